"""What a live run does, from its events: the reply to `easyrl status`, and the numbers that
`runtime.autoscale` decides by.

Only the time of training counts: from an iteration's start to its end, or to its evaluation. With
the seconds that workers of one side (rollout, train) spent in an activity, summed over workers and
over the last iterations,

    share of waiting = wait / (wait + busy + weights)                       of each side
    balanced number  = rollout busy / (train busy / train workers)          of rollout workers

With that number of engines, generating the iterations' groups takes as long as training on them.
A fraction below 1/4 is rounded down: such an engine would mostly wait. An engine's time for a group
hardly depends on the number of engines, so one measurement comes close.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

from easyrl import events
from easyrl.events import WORKING, Activity, Event, FromWorker, Span, SpanKind, UnderWay
from easyrl.processes import children_named
from easyrl.rewards.worker import PROCESS_NAME

ITERATIONS = 3
MIN_SECONDS = 10.0  # more iterations count if these were shorter than this together
COLUMNS = ("name", "kind", "pid", "device", "state", "restarts")
"""Keys of each of `workers` in the reply."""
SIDES = ("rollout", "train")
Seconds = defaultdict[tuple[str, SpanKind], float]
"""By side and activity."""


class Member(NamedTuple):
    """A worker of the run."""

    name: str
    pid: int
    device: str
    state: str = ""  # if its events do not show it, as `leaving`


@dataclass(slots=True)
class _Seen:
    """What a worker has reported."""

    state: str = "starting"  # then the kind of its newest activity, or `lost`
    under_way: UnderWay | None = None
    num_restarts: int = 0


@dataclass(slots=True)
class _Iteration:
    started: float
    ended: float = math.inf
    seconds: Seconds = field(default_factory=lambda: defaultdict(float))

    def overlap(self, started: float, ended: float) -> float:
        return max(0.0, min(ended, self.ended) - max(started, self.started))


class RunStatus:
    def __init__(self, num_iterations: int) -> None:
        """`num_iterations`: of the whole run."""
        self._num_iterations = num_iterations
        self._iteration: int | None = None
        self._state = "starting"
        self._workers: dict[str, _Seen] = {}
        self._iterations: deque[_Iteration] = deque()

    def observe(self, event: Event) -> None:
        match event:
            case events.IterationStarted(time_, number):
                self._iteration, self._state = number, "training"
                old = time_ - MIN_SECONDS
                while len(self._iterations) >= ITERATIONS and self._iterations[0].ended < old:
                    self._iterations.popleft()
                self._iterations.append(_Iteration(time_))
            case events.EvaluationStarted(time_):
                self._end_iteration(time_, "evaluating")
            case events.IterationFinished(time_):
                self._end_iteration(time_, "training")
            case events.SavingModel():
                self._state = "saving"
            case events.WorkerLeft(_, name):
                self._workers.pop(name, None)
            case FromWorker(name, _, worker_event):
                self._observe_worker(name, worker_event)

    def _end_iteration(self, time_: float, state: str) -> None:
        self._state = state
        if self._iterations:
            self._iterations[-1].ended = min(time_, self._iterations[-1].ended)

    def _observe_worker(self, name: str, event: events.WorkerEvent) -> None:
        worker = self._workers.setdefault(name, _Seen())
        match event:
            case events.Starting():
                worker.state = "starting"
            case events.Ready() | events.WeightsExchanged() | events.IterationTrained():
                worker.state = "wait"  # for a command
            case events.Lost():
                self._workers[name] = _Seen("lost", num_restarts=worker.num_restarts + 1)
            case Activity(spans, _, under_way):
                worker.under_way = under_way
                for span in spans:
                    self._add(name, span)
                if newest := under_way or (spans and spans[-1]):
                    worker.state = newest.kind

    def _add(self, name: str, span: Span) -> None:
        for iteration in takewhile(lambda it: it.ended > span.started, reversed(self._iterations)):
            seconds = iteration.overlap(span.started, span.ended)
            iteration.seconds[side_of(name), span.kind] += seconds

    def forget(self) -> None:
        """Start the measurement anew with the next iteration: the rollout workers change."""
        self._iterations.clear()

    def waiting_shares(self) -> dict[str, float | None]:
        """Share of the time that each side waited; None before anything is known."""
        seconds, kinds = self._seconds(), (*WORKING, "weights", "wait")
        totals = {side: sum(seconds[side, kind] for kind in kinds) for side in SIDES}
        return {
            side: seconds[side, "wait"] / total if total > 0.0 else None
            for side, total in totals.items()
        }

    def balanced(self) -> int | None:
        """The number of rollout workers with which both sides take equally long; None before
        anything was trained."""
        seconds, num_train = self._seconds(), sum(side_of(n) == "train" for n in self._workers)
        rollout, train = (sum(seconds[side, kind] for kind in WORKING) for side in SIDES)
        return max(1, math.ceil(rollout / train * num_train - 0.25)) if train > 0.0 else None

    def _seconds(self) -> Seconds:
        """Sums over the iterations, with activities that have not ended."""
        now, total = time.monotonic(), Seconds(float)
        for iteration in self._iterations:
            for key, seconds in iteration.seconds.items():
                total[key] += seconds
            for name, worker in self._workers.items():
                if (work := worker.under_way) is not None:
                    # While it waits for rewards, a worker shows `score`.
                    kind: SpanKind = "wait" if work.kind == "score" else work.kind
                    total[side_of(name), kind] += iteration.overlap(work.started, now)
        return total

    # -- the reply of `easyrl status` -------------------------------------------------------------

    def reply(self, members: Sequence[Member]) -> dict[str, Any]:
        """`members`: all rollout and train workers."""
        return {
            "iteration": self._iteration,  # from 0
            "num_iterations": self._num_iterations,
            "waiting": self.waiting_shares(),
            "balanced_rollout_workers": self.balanced(),
            "workers": [dict(zip(COLUMNS, row, strict=True)) for row in self._rows(members)],
        }

    def _rows(self, members: Sequence[Member]) -> Iterator[tuple[Any, ...]]:
        yield "controller", "controller", os.getpid(), "cpu", self._state, 0
        for name, pid, device, state in members:
            seen = self._workers.get(name, _Seen())
            yield name, side_of(name), pid, device, state or seen.state, seen.num_restarts
        rollout = {each.pid: each.name for each in members if side_of(each.name) == "rollout"}
        numbers: Counter[int] = Counter()
        for pid, parent in sorted(children_named(PROCESS_NAME, rollout).items()):
            name = f"{rollout[parent]}/reward-{numbers[parent]}"
            numbers[parent] += 1
            yield name, "reward", pid, "cpu", "running", 0


def side_of(name: str) -> str:
    """`rollout` or `train`."""
    return name.partition("-")[0]
