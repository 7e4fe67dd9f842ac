"""A discrete-event simulation of one iteration, from measured rates.

    broadcast ─► engines: prompts on demand, rows refilled ─► rewards ─► ring ─► trainers ─► update

It follows the real parts: who gets a prompt (`runtime.dispatch`), which rows an engine fills
(`engines.embedded`), when a micro-batch starts and what it contains (`workers.batches`). An event
is the end of a completion. Between two events an engine's step takes equally long.

Not simulated: rounds of replacements (rejected groups are generated, all in one round), and engines
that wait because `rollout.ring_slots` is lower than the prompts of an iteration (the trainer is the
slower side then, and decides).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from easyrl.config import Config
from easyrl.runtime.placement import max_concurrent_groups, max_open_groups
from easyrl.runtime.rates import (
    Group,
    MeasuredIteration,
    Rates,
    fit,
    num_rounds,
    with_measured_groups,
)
from easyrl.workers.batches import MIN_FILL

NUM_COMPARED = 8
"""Iterations simulated at the end of a run."""
SCAN_SECONDS = 20e-6
"""Time for which the controller looks at a worker's pipe whenever a message arrives."""


class Outcome(NamedTuple):
    """A simulated iteration."""

    seconds: float
    num_tokens: int  # completion tokens of accepted groups
    infer_busy: float  # share of the time, mean of the engines
    train_busy: float


Scenario = tuple[Rates, Sequence[Group]]


def draw_scenarios(
    iterations: Sequence[MeasuredIteration], config: Config, count: int
) -> list[Scenario]:
    """Draw rates and groups of iterations: rates are fitted to iterations drawn with replacement
    from those that were measured, as many with each number of trainers, because only several
    trainers show what their communication costs. Groups are drawn from theirs."""
    rng = np.random.default_rng(0)
    alike: dict[int, list[MeasuredIteration]] = {}
    for each in iterations:
        alike.setdefault(each.num_trainers, []).append(each)
    scenarios: list[Scenario] = []
    for _ in range(count):
        rates = fit(
            [
                same[number]
                for same in alike.values()
                for number in rng.integers(len(same), size=len(same))
            ]
        )
        scenarios.append((rates, draw_groups(rates, config, rng)))
    return scenarios


def compare(iterations: Sequence[MeasuredIteration], config: Config) -> dict[str, float | None]:
    """Predict every other iteration of a run from those between, for `summary.json`. None where too
    few were measured, or the number of engines, or of groups in flight, changed."""
    predicted = measured = None
    given, left_out = [*iterations][::2], [*iterations][1::2]
    if left_out and len({(x.num_engines, x.max_concurrent_groups) for x in iterations}) == 1:
        config = with_measured_groups(config, left_out)
        num_engines, num_trainers = given[0].num_engines, given[0].num_trainers
        outcomes = [
            simulate(*scenario, config, num_engines, num_trainers)
            for scenario in draw_scenarios(given, config, NUM_COMPARED)
        ]
        predicted, measured = mean_speed(outcomes), mean_speed(left_out)
    return {"predicted_tokens_per_second": predicted, "measured_tokens_per_second": measured}


def mean_speed(iterations: Sequence[Outcome | MeasuredIteration]) -> float:
    """Return the tokens per second of iterations, one after another."""
    return sum(each.num_tokens for each in iterations) / sum(each.seconds for each in iterations)


def draw_groups(rates: Rates, config: Config, rng: np.random.Generator) -> list[Group]:
    """Draw the groups of an iteration from those that were measured."""
    num_generations = config.rollout.num_generations
    num_accepted = sum(group.is_accepted for group in rates.groups)
    count = round(config.train.prompts_per_iteration * len(rates.groups) / max(1, num_accepted))
    chosen = [rates.groups[number] for number in rng.integers(len(rates.groups), size=count)]
    return [
        group
        if len(group.lengths) == num_generations
        else group._replace(lengths=rng.choice(group.lengths, num_generations).tolist())
        for group in chosen
    ]


def simulate(
    rates: Rates, groups: Sequence[Group], config: Config, num_engines: int, num_trainers: int
) -> Outcome:
    """Simulate an iteration that generates and trains these groups."""
    num_workers = num_engines + num_trainers
    messages = 2 * rates.message * num_workers + SCAN_SECONDS * num_workers
    gather = rates.communication / 3 * (1 - 1 / num_trainers)
    weights = rates.broadcast * num_rounds(num_engines) + gather + messages
    arrivals, engines_busy = _generate(rates, groups, config, num_engines, num_workers)
    arrivals = [weights + time for time in arrivals]
    trained, train_busy = _train(rates, groups, config, num_trainers, arrivals)
    seconds = max(trained, *arrivals) + rates.overhead
    # Messages wait for the controller: it is one process.
    num_reports = rates.messages_per_second * num_workers * seconds
    seconds = max(seconds, weights + rates.message * (len(groups) + num_reports))
    num_tokens = sum(sum(group.lengths) for group in groups if group.is_accepted)
    return Outcome(seconds, num_tokens, engines_busy / num_engines / seconds, train_busy / seconds)


# -- engines --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Engine:
    rates: Rates
    groups: Sequence[Group]
    num_rows: int
    clock: float
    step: float = 0.0  # decode steps done at that time
    busy_seconds: float = 0.0
    num_open: int = 0  # prompts that are not answered
    version: int = 0  # of its next event: older ones are void
    rows: list[tuple[float, int]] = field(default_factory=list)  # heap: last step, group
    waiting: deque[tuple[int, int]] = field(default_factory=deque)  # length, group
    is_idle: bool = True
    newest: int = -1  # group whose prompt has been prefilled
    num_left: Counter[int] = field(default_factory=Counter)  # completions by group

    def submit(self, number: int) -> None:
        lengths = self.groups[number].lengths
        self.num_open += 1
        self.num_left[number] = len(lengths)
        self.waiting.extend((length, number) for length in lengths)

    def advance(self, now: float, *, is_end: bool) -> list[int]:
        """Generate until `now`, when a completion ends (`is_end`) or an answer arrives; return the
        groups that are finished."""
        if is_end:
            self.step = self.rows[0][0]
        elif self.rows and now > self.clock:
            self.step += (now - self.clock) / self._step_seconds()
        self.busy_seconds += max(0.0, now - self.clock) if self.rows else 0.0
        self.clock = max(self.clock, now)
        finished = []
        while is_end and self.rows and self.rows[0][0] <= self.step:
            _, number = heappop(self.rows)
            self.num_left[number] -= 1
            if not self.num_left[number]:
                finished.append(number)
        return finished

    def fill_rows(self) -> float | None:
        """Start waiting completions; return when the next one ends."""
        step, token, prompt = self.rates.engine
        while self.waiting and len(self.rows) < self.num_rows:
            length, number = self.waiting.popleft()
            if number != self.newest:  # its prompt's step samples the first tokens
                self.newest = number
                first_tokens = token * len(self.groups[number].lengths)
                seconds = prompt + first_tokens + (step if self.is_idle else 0.0)
                self.clock += seconds
                self.busy_seconds += seconds
                self.is_idle = False
            heappush(self.rows, (self.step + length - 1, number))
        self.version += 1
        self.is_idle = not self.rows
        if self.is_idle:
            return None
        return self.clock + (self.rows[0][0] - self.step) * self._step_seconds()

    def _step_seconds(self) -> float:
        return self.rates.engine[0] + self.rates.engine[1] * len(self.rows)


def _generate(
    rates: Rates, groups: Sequence[Group], config: Config, num_engines: int, num_workers: int
) -> tuple[list[float], float]:
    """Return when each group is in the ring, in seconds since the first engine began, and the sum
    of the engines' busy seconds."""
    in_flight = max_concurrent_groups(config, num_engines)
    num_rows = in_flight * config.rollout.num_generations
    is_fixed = config.runtime.deterministic or num_engines == 1
    most = len(groups) if is_fixed else max_open_groups(in_flight)
    latency = 2 * rates.message + SCAN_SECONDS * num_workers  # of an answer and the next prompt
    engines = [
        _Engine(rates, groups, num_rows, rates.message * number) for number in range(num_engines)
    ]
    at_once = min(len(groups), most * num_engines)
    queue = deque(range(at_once, len(groups)))
    arrivals = [0.0] * len(groups)
    events: list[tuple[float, int, int]] = []  # time, engine, its version (-1: an answer)
    for number in range(at_once):
        engines[number % num_engines].submit(number)
    for number, engine in enumerate(engines):
        if (ends := engine.fill_rows()) is not None:
            events.append((ends, number, engine.version))
    heapify(events)
    while events:
        now, number, version = heappop(events)
        engine = engines[number]
        if version not in (-1, engine.version):
            continue
        for group in engine.advance(now, is_end=version != -1):
            scored = now + groups[group].scoring_seconds
            arrivals[group] = scored
            if queue:
                heappush(events, (scored + latency, number, -1))
        if version == -1:
            engine.num_open -= 1
            while queue and engine.num_open < most:
                engine.submit(queue.popleft())
        if (ends := engine.fill_rows()) is not None:
            heappush(events, (ends, number, engine.version))
    return arrivals, sum(engine.busy_seconds for engine in engines)


# -- trainers -------------------------------------------------------------------------------------


def _train(
    rates: Rates,
    groups: Sequence[Group],
    config: Config,
    num_trainers: int,
    arrivals: Sequence[float],
) -> tuple[float, float]:
    """Return when the last update is done, and the busy seconds of a trainer."""
    micro_batch, _, update = rates.trainer
    per_micro_batch = micro_batch + rates.communication * (1 - 1 / num_trainers)
    budget = config.max_tokens_per_micro_batch * num_trainers
    is_ordered, num_updates = config.runtime.deterministic, config.train.updates_per_iteration
    enough = budget if is_ordered else MIN_FILL * budget
    time = max(arrivals) if config.runtime.schedule == "sync" else 0.0
    busy = 0.0
    accepted = [number for number, group in enumerate(groups) if group.is_accepted]
    for of_update in np.array_split(accepted, num_updates):
        read = of_update.tolist() if is_ordered else sorted(of_update, key=arrivals.__getitem__)
        left = deque(read)
        rollouts: list[float] = []  # tokens
        num_tokens = 0.0
        while left or rollouts:
            while left and num_tokens < budget:
                if arrivals[left[0]] > time and rollouts and num_tokens >= enough:
                    break
                number = left.popleft()
                time = max(time, arrivals[number])
                group = groups[number]
                if group.is_trained:
                    share = rates.prompt_tokens / len(group.lengths)
                    rollouts += [length + share for length in group.lengths]
                    num_tokens += sum(group.lengths) + rates.prompt_tokens
            if not rollouts:
                continue
            taken = max(1, bisect_right([*accumulate(rollouts)], budget))
            lengths, rollouts = rollouts[:taken], rollouts[taken:]
            num_tokens = sum(rollouts)
            seconds = per_micro_batch + rates.trainer[1] * _largest_share(lengths, num_trainers)
            time, busy = time + seconds, busy + seconds
        time, busy = time + update / num_trainers, busy + update / num_trainers
    return time, busy


def _largest_share(lengths: Sequence[float], num_trainers: int) -> float:
    """Return the tokens of the largest share (`workers.batches.share_out`)."""
    if num_trainers == 1:
        return sum(lengths)
    ends = np.cumsum(lengths)
    low, high = max(ends[-1] / num_trainers, *lengths, 0.0), float(ends[-1])
    while high - low > 1e-3 * high:
        middle, start, count = (low + high) / 2, 0.0, 0
        while start < ends[-1] and count <= num_trainers:
            start = ends[np.searchsorted(ends, start + middle + 1e-9, "right") - 1]
            count += 1
        low, high = (low, middle) if count <= num_trainers else (middle, high)
    return float(high)
