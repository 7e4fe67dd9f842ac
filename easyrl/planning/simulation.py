"""A discrete-event simulation of one iteration, from measured rates.

    broadcast ─► engines: prompts on demand, rows refilled ─► rewards ─► ring ─► trainers ─► update

It follows the real parts: who gets a prompt (`runtime.ledger`), which rows an engine fills
(`engines.embedded`), when a micro-batch starts and what it contains (`workers.batches`). Not
simulated: rounds of replacements (rejected groups are generated, all in one round), waits for a
full ring, the order of deterministic runs, the controller (half a millisecond per message).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from easyrl.config import Config
from easyrl.planning.rates import Group, Rates, num_broadcasts
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
    clock: float = 0.0
    step: float = 0.0  # decode steps done at that time
    rows: list[tuple[float, int]] = field(default_factory=list)  # heap: last step, group
    waiting: deque[tuple[int, int]] = field(default_factory=deque)  # group, length
    newest: int = -1  # group whose prompt has been prefilled
    version: int = 0  # of its next event: older ones are void


def _generate(
    rates: Rates, groups: Sequence[Group], config: Config, num_engines: int
) -> tuple[list[float], float]:
    """Return when each group is in the ring, in seconds since the engines began, and the sum of the
    engines' busy seconds."""
    step, token, prompt = rates.engine
    in_flight = max_concurrent_groups(config, num_engines)
    num_rows = in_flight * config.rollout.num_generations
    at_once = len(groups) if num_engines == 1 else max_open_groups(in_flight) * num_engines
    queue, engines = deque(range(len(groups))), [_Engine() for _ in range(num_engines)]
    num_left = [len(group.lengths) for group in groups]
    arrivals, busy = [0.0] * len(groups), 0.0
    # Time and engine; the version if its next completion ends, -1 if a prompt is answered.
    events = [(0.0, number % num_engines, -1) for number in range(min(at_once, len(groups)))]
    while events:
        now, number, version = heappop(events)
        engine = engines[number]
        if version == -1 and queue:
            new = queue.popleft()
            engine.waiting += [(new, length) for length in groups[new].lengths]
            if len(engine.rows) == num_rows:
                continue
            if engine.rows and now > engine.clock:
                engine.step += (now - engine.clock) / (step + token * len(engine.rows))
        elif version == engine.version:
            engine.step = engine.rows[0][0]
        else:
            continue
        busy += max(0.0, now - engine.clock) if engine.rows else 0.0
        engine.clock = max(engine.clock, now)
        while version >= 0 and engine.rows and engine.rows[0][0] <= engine.step:
            _, group = heappop(engine.rows)
            num_left[group] -= 1
            if not num_left[group]:
                arrivals[group] = now + groups[group].scoring_seconds
                heappush(events, (arrivals[group], number, -1))
        while engine.waiting and len(engine.rows) < num_rows:
            group, length = engine.waiting.popleft()
            if group != engine.newest:  # its prompt's step samples the first tokens
                seconds = prompt + token * len(groups[group].lengths)
                seconds += step if engine.newest < 0 else 0.0
                engine.newest, engine.clock, busy = group, engine.clock + seconds, busy + seconds
            heappush(engine.rows, (engine.step + length - 1, group))
        engine.version += 1
        if engine.rows:
            left = (engine.rows[0][0] - engine.step) * (step + token * len(engine.rows))
            heappush(events, (engine.clock + left, number, engine.version))
    return arrivals, busy


def _train(
    rates: Rates, groups: Sequence[Group], config: Config, num_trainers: int, arrivals: list[float]
) -> tuple[float, float]:
    """Return when the last update is done, and the busy seconds of a trainer."""
    micro_batch, token, update = rates.trainer
    # Assumed of more trainers: FSDP gathers the weights twice and sums the gradient once.
    micro_batch += 3 * rates.broadcast * max(0.0, 1 / rates.num_trainers - 1 / num_trainers)
    budget = config.max_tokens_per_micro_batch * num_trainers
    time, busy = max(arrivals) if config.runtime.schedule == "sync" else 0.0, 0.0
    accepted = [number for number, group in enumerate(groups) if group.is_accepted]
    for of_update in np.array_split(accepted, config.train.updates_per_iteration):
        left = deque(sorted(of_update, key=arrivals.__getitem__))
        rollouts: list[float] = []  # tokens
        while left or rollouts:
            while left and (num_tokens := sum(rollouts)) < budget:
                if arrivals[left[0]] > time and rollouts and num_tokens >= MIN_FILL * budget:
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
    ends, share = np.cumsum(lengths), max(sum(lengths) / num_trainers, *lengths)
    while True:
        end = 0.0
        for _ in range(num_trainers):
            end = ends[np.searchsorted(ends, end + share + 1e-9, "right") - 1]
        if end == ends[-1]:
            return share
        share *= 1.01
