"""The content of `easyrl status`, and the number that `runtime.autoscale` follows."""

import math
import os
from collections import deque
from collections.abc import Mapping
from typing import Any

from easyrl.processes import children_named
from easyrl.rewards.worker import PROCESS_NAME
from easyrl.runtime.fleet import Fleet
from easyrl.runtime.ledger import Ledger

ITERATIONS = 3
COLUMNS = ("name", "kind", "pid", "device", "state", "restarts")
"""Keys of each of `workers` in the reply."""


class Balance:
    """Measure which side waits for the other, over the last iterations without their evaluations:

    share of waiting = 1 - (busy + weight exchange) / duration               mean of each side
    balanced number  = busy seconds of all engines / busy seconds of a train worker

    With that number of engines, generating the groups takes as long as training on them. A
    fraction below 1/4 is rounded down: such an engine would mostly wait.
    """

    def __init__(self) -> None:
        self._iterations: deque[tuple[float, ...]] = deque(maxlen=ITERATIONS)

    def add(self, ledger: Ledger, seconds: Mapping[str, float], num_engines: int) -> None:
        """Add an iteration. `seconds`: as in its metrics."""
        assert ledger.trained is not None
        engines, train = sum(ledger.engine_seconds.values()), ledger.trained.busy_seconds
        duration, weights = seconds["perf/iteration_seconds"], seconds["perf/weights_seconds"]
        mean = engines / num_engines
        self._iterations.append((duration, engines, train, mean + weights, train + weights))

    def clear(self) -> None:
        self._iterations.clear()

    def waiting(self) -> dict[str, float | None]:
        """Each side's share of waiting; None before anything is known."""
        if not self._iterations:
            return {"rollout": None, "train": None}
        seconds, _, _, rollout, train = map(sum, zip(*self._iterations, strict=True))
        shares = {"rollout": 1.0 - rollout / seconds, "train": 1.0 - train / seconds}
        return {side: max(0.0, share) for side, share in shares.items()}

    def num_engines(self) -> int | None:
        """The balanced number of engines; None before anything is known."""
        train = sum(iteration[2] for iteration in self._iterations)
        engines = sum(iteration[1] for iteration in self._iterations)
        return max(1, math.ceil(engines / train - 0.25)) if train > 0.0 else None


def worker_rows(fleet: Fleet) -> list[dict[str, Any]]:
    """Describe every process of the run."""
    rows: list[tuple[Any, ...]] = [("controller", "controller", os.getpid(), "cpu", "running", 0)]
    for worker in (*fleet.rollout, *fleet.train):
        name, pid, device = worker.name, worker.process.pid, fleet.device_of(worker)
        kind, num_restarts = name.partition("-")[0], fleet.num_restarts[name]
        rows.append((name, kind, pid, device, worker.state, num_restarts))
    names = {worker.local_pid: worker.name for worker in fleet.rollout if worker.local_pid}
    for pid, parent in sorted(children_named(PROCESS_NAME, names).items()):
        rows.append((f"{names[parent]}/reward", "reward", pid, "cpu", "running", 0))
    return [dict(zip(COLUMNS, row, strict=True)) for row in rows]
