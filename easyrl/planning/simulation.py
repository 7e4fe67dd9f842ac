"""A discrete-event simulation of one iteration, from measured rates.

    broadcast ─► engines: prompts on demand, rows refilled ─► rewards ─► ring ─► trainers ─► update

It follows the real parts: who gets a prompt (`runtime.dispatch`), which rows an engine fills
(`engines.embedded`), when a micro-batch starts and what it contains (`workers.batches`).

Not simulated: rounds of replacements (rejected groups are generated, all in one round), engines
that wait for slow rewards or a full ring, and the controller (half a millisecond per message).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from easyrl.config import Config
from easyrl.planning.rates import Group, Rates, communication_seconds, num_broadcasts
from easyrl.runtime.placement import max_concurrent_groups, max_open_groups
from easyrl.workers.batches import MIN_FILL


class Outcome(NamedTuple):
    """A simulated iteration."""

    seconds: float
    num_tokens: int  # completion tokens of accepted groups
    infer_busy: float  # share of the time, mean of the engines
    train_busy: float


def simulate(
    rates: Rates, groups: Sequence[Group], config: Config, num_engines: int, num_trainers: int
) -> Outcome:
    """Simulate an iteration that generates and trains these groups."""
    weights = rates.broadcast * num_broadcasts(num_engines, num_trainers)
    arrivals, infer_busy = _generate(rates, groups, config, num_engines)
    trained, train_busy = _train(rates, groups, config, num_trainers, arrivals)
    seconds = weights + max(trained, *arrivals) + rates.overhead
    num_tokens = sum(sum(group.lengths) for group in groups if group.is_accepted)
    return Outcome(seconds, num_tokens, infer_busy / num_engines / seconds, train_busy / seconds)


@dataclass(slots=True)
class _Engine:
    step: float = 0.0  # decode steps done
    rows: list[tuple[float, int]] = field(default_factory=list)  # heap: last step, group
    waiting: deque[tuple[int, int]] = field(default_factory=deque)  # group, length
    num_open: int = 0  # groups that are not finished
    newest: int = -1  # group whose prompt has been prefilled


def _generate(
    rates: Rates, groups: Sequence[Group], config: Config, num_engines: int
) -> tuple[list[float], float]:
    """Return when each group is in the ring, in seconds since the engines began, and the sum of the
    engines' busy seconds. An event is the end of an engine's next completion."""
    step, token, prompt = rates.engine
    in_flight = max_concurrent_groups(config, num_engines)
    num_rows = in_flight * config.rollout.num_generations
    is_fixed = config.runtime.deterministic or num_engines == 1
    most = len(groups) if is_fixed else max_open_groups(in_flight)
    engines = [_Engine() for _ in range(num_engines)]
    num_left = Counter({number: len(group.lengths) for number, group in enumerate(groups)})
    arrivals, busy = [0.0] * len(groups), 0.0
    queue = deque(range(len(groups)))
    events = [(0.0, number) for number in range(num_engines)]  # heap: time, engine

    def submit(engine: _Engine) -> None:
        number = queue.popleft()
        engine.num_open += 1
        engine.waiting += [(number, length) for length in groups[number].lengths]

    for number in range(min(len(groups), most * num_engines)):
        submit(engines[number % num_engines])
    while events:
        now, number = heappop(events)
        engine, time = engines[number], now
        engine.step = engine.rows[0][0] if engine.rows else 0.0
        while engine.rows and engine.rows[0][0] <= engine.step:
            _, group = heappop(engine.rows)
            num_left[group] -= 1
            if not num_left[group]:
                arrivals[group] = now + groups[group].scoring_seconds
                engine.num_open -= 1
        while queue and engine.num_open < most:
            submit(engine)
        while engine.waiting and len(engine.rows) < num_rows:
            group, length = engine.waiting.popleft()
            if group != engine.newest:  # its prompt's step samples the first tokens
                time += prompt + token * len(groups[group].lengths)
                time += step if engine.newest < 0 else 0.0
                engine.newest = group
            heappush(engine.rows, (engine.step + length - 1, group))
        if engine.rows:
            time += (engine.rows[0][0] - engine.step) * (step + token * len(engine.rows))
            busy += time - now
            heappush(events, (time, number))
    return arrivals, busy


def _train(
    rates: Rates,
    groups: Sequence[Group],
    config: Config,
    num_trainers: int,
    arrivals: Sequence[float],
) -> tuple[float, float]:
    """Return when the last update is done, and the busy seconds of a trainer."""
    micro_batch, token, update = rates.trainer
    micro_batch = max(0.0, micro_batch + communication_seconds(rates.broadcast, num_trainers))
    budget = config.max_tokens_per_micro_batch * num_trainers
    is_ordered = config.runtime.deterministic
    enough = budget if is_ordered else MIN_FILL * budget
    time = max(arrivals) if config.runtime.schedule == "sync" else 0.0
    busy = 0.0
    accepted = [number for number, group in enumerate(groups) if group.is_accepted]
    for of_update in np.array_split(accepted, config.train.updates_per_iteration):
        read = of_update.tolist() if is_ordered else sorted(of_update, key=arrivals.__getitem__)
        left = deque(read)
        rollouts: list[float] = []  # tokens
        while left or rollouts:
            while left and (num_tokens := sum(rollouts)) < budget:
                if arrivals[left[0]] > time and rollouts and num_tokens >= enough:
                    break
                number = left.popleft()
                time = max(time, arrivals[number])
                if groups[number].is_trained:
                    lengths = groups[number].lengths
                    rollouts += [length + rates.prompt_tokens / len(lengths) for length in lengths]
            if rollouts:
                taken = max(1, bisect_right([*accumulate(rollouts)], budget))
                seconds = micro_batch + token * _largest_share(rollouts[:taken], num_trainers)
                time, busy = time + seconds, busy + seconds
                rollouts = rollouts[taken:]
        time, busy = time + update / num_trainers, busy + update / num_trainers
    return time, busy


def _largest_share(lengths: Sequence[float], num_trainers: int) -> float:
    """Return the tokens of the largest share (`workers.batches.share_out`), within 1 %."""
    ends = np.cumsum(lengths)
    budget = max(ends[-1] / num_trainers, *lengths)
    while True:
        end = 0.0
        for _ in range(num_trainers):
            end = ends[np.searchsorted(ends, end + budget + 1e-9, "right") - 1]
        if end == ends[-1]:
            return float(budget)
        budget *= 1.01
