"""The number of rollout workers at which neither side waits: what `runtime.autoscale` follows."""

import math
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from easyrl.runtime.ledger import Ledger

BALANCED_ITERATIONS = 3  # how many of the last iterations count
ROUNDED_DOWN = 0.25
"""A fraction of an engine below this is rounded down: such an engine would mostly wait."""


class IterationSeconds(NamedTuple):
    """Times of one iteration, without its evaluation."""

    duration: float
    all_engines: float  # busy seconds, summed over the engines
    engine: float  # the same per engine
    train: float  # busy seconds of a train worker
    weights: float  # in which both sides exchange weights


class Balance:
    """Measure which side waits for the other, over the last iterations:

    share of waiting = 1 - (busy + weight exchange) / duration               mean of each side
    balanced number  = busy seconds of all engines / busy seconds of a train worker

    With that number of engines, generating the groups takes as long as training on them.
    """

    def __init__(self, max_engines: int) -> None:
        self._max_engines = max_engines
        self._iterations: deque[IterationSeconds] = deque(maxlen=BALANCED_ITERATIONS)

    def add(self, ledger: Ledger, seconds: Mapping[str, float], num_engines: int) -> None:
        """Add a complete iteration with its `perf/` metrics."""
        assert ledger.trained is not None
        all_engines = sum(ledger.engine_seconds.values())
        iteration = IterationSeconds(
            duration=seconds["perf/iteration_seconds"],
            all_engines=all_engines,
            engine=all_engines / num_engines,
            train=ledger.trained.busy_seconds,
            weights=seconds["perf/weights_seconds"],
        )
        self._iterations.append(iteration)

    def clear(self) -> None:
        self._iterations.clear()

    def waiting(self) -> dict[str, float | None]:
        """Return each side's share of waiting; None before anything is known."""
        if not self._iterations:
            return {"rollout": None, "train": None}
        total = sum(each.duration for each in self._iterations)
        rollout = sum(each.engine + each.weights for each in self._iterations)
        train = sum(each.train + each.weights for each in self._iterations)
        return {
            "rollout": max(0.0, 1.0 - rollout / total),
            "train": max(0.0, 1.0 - train / total),
        }

    def num_engines(self) -> int | None:
        """Return the balanced number; None before anything is known."""
        all_engines = sum(each.all_engines for each in self._iterations)
        train = sum(each.train for each in self._iterations)
        if train == 0.0:
            return None
        number = math.ceil(all_engines / train - ROUNDED_DOWN)
        return min(max(1, number), self._max_engines)
