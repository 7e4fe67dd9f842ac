"""The state of a run: a fold of its events, which all views draw.

It has no clock: callers pass the time they ask about, on the clock of the events.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import numpy as np

from easyrl import events
from easyrl.events import Activity, Event, FromWorker, Span, SpanKind, UnderWay
from easyrl.formatting import counted

MAX_SPANS = 2000  # spans kept per worker
MERGE_SECONDS = 0.02  # spans of one kind with a smaller gap are merged
ETA_ITERATIONS = 10  # the time left is estimated from this many iterations
STARTING = "starting the process"
GROUPS_SHOWN = 20  # at most, with a completion each
PROBLEMS = {  # counts of problems: name -> (what is counted, what happened to it)
    "reward_errors": ("reward call", "failed"),
    "groups_skipped": ("group", "skipped"),
    "groups_not_replaced": ("group", "without advantages"),
    "num_updates_not_finite": ("update", "dropped, not finite (lower train.learning_rate)"),
    "worker_restarts": ("rollout worker", "replaced"),  # in the summary
}


def problems_in(counts: Mapping[str, Any]) -> list[str]:
    return [
        f"{counted(int(counts[name]), noun)} {what}"
        for name, (noun, what) in PROBLEMS.items()
        if counts.get(name)
    ]


@dataclass(slots=True)
class WorkerState:
    name: str
    device: str
    phase: str  # current step of the worker's start; empty once it is ready
    phase_started: float
    spans: deque[Span] = field(default_factory=lambda: deque(maxlen=MAX_SPANS))
    scoring: deque[Span] = field(default_factory=lambda: deque(maxlen=MAX_SPANS))
    """Rewards being computed, besides the worker's own work."""
    under_way: UnderWay | None = None

    def add(self, activity: Activity) -> None:
        self.phase = ""  # its Ready may be missing in a shortened trace
        self.under_way = activity.under_way
        for span in activity.spans:
            spans = self.scoring if span.kind == "score" else self.spans
            last = spans[-1] if spans else None
            if last is None or last.kind != span.kind or span.started > last.ended + MERGE_SECONDS:
                spans.append(span)
            else:
                spans[-1] = Span(span.kind, last.started, max(last.ended, span.ended))

    def seconds_by_kind(
        self, since: float, slice_seconds: float, num_slices: int
    ) -> list[dict[SpanKind, float]]:
        starts = since + slice_seconds * np.arange(num_slices)[:, None]
        spans = [span for span in (*self.scoring, *self.spans) if span.ended > since]
        if self.under_way is not None:
            until = since + num_slices * slice_seconds
            spans.append(Span(self.under_way.kind, self.under_way.started, until))
        slices: list[dict[SpanKind, float]] = [{} for _ in range(num_slices)]
        for kind in {span.kind for span in spans}:
            times = np.array([(span.started, span.ended) for span in spans if span.kind == kind])
            started, ended = np.clip(times.T[:, None], starts, starts + slice_seconds)
            seconds = (ended - started).sum(axis=1)
            for number in np.flatnonzero(seconds):
                slices[number][kind] = float(seconds[number])
        return slices


@dataclass(slots=True)
class RunState:
    run: events.RunStarted | None = None
    workers: dict[str, WorkerState] = field(default_factory=dict)
    iteration_started: float | None = None  # None between iterations
    num_groups: int = 0  # finished groups of this iteration that will be trained
    lines: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """Iteration, from 1 -> its line of `metrics.jsonl`."""
    accuracies: dict[int, float | None] = field(default_factory=dict)
    """Number of iterations trained -> held-out accuracy."""
    note: str = ""  # the newest note
    lasting_note: str = ""
    sampled: Sequence[events.GroupScored] = ()  # the newest groups, the newest first
    evaluation: events.EvaluationStarted | None = None
    num_answered: int = 0
    saving_since: float | None = None
    summary: Mapping[str, Any] | None = None
    ended: events.RunEnded | None = None
    is_starting: bool = True  # until all workers have been ready
    newest: float = 0.0  # the latest time in any event

    def apply(self, event: Event) -> None:
        self.newest = max(self.newest, getattr(event, "time", 0.0))
        match event:
            case events.RunStarted(started=started, devices=devices, num_iterations=done):
                workers = {
                    name: WorkerState(name, device, STARTING, started)
                    for name, device in devices.items()
                }
                # `easyrl watch` has seen the earlier iterations, and some that are undone now.
                earlier = event.earlier or self.lines.values()
                lines = {line["iteration"]: line for line in earlier if line["iteration"] <= done}
                # Reset every other field to its default.
                self.__init__(event, workers, lines=lines, newest=started)  # type: ignore[misc]
                self.accuracies = dict(event.accuracies)
            case FromWorker(name, time, worker_event):
                self._apply(self.workers[name], time, worker_event)
            case events.EvaluationStarted():
                self.evaluation, self.num_answered = event, 0
            case events.Evaluated(accuracy=accuracy, num_iterations=number):
                self.evaluation, self.accuracies[number] = None, accuracy
            case events.IterationStarted(time):
                self.iteration_started = time
            case events.IterationFinished(_, metrics):
                self.iteration_started, self.num_groups = None, 0
                self.lines[metrics["iteration"]] = metrics
            case events.SavingModel(time):
                self.saving_since = time
            case events.Note(text, is_lasting):
                self.note = self.note if is_lasting else text
                self.lasting_note = text if is_lasting else self.lasting_note
            case events.WorkerSpawned(time, name, device):
                worker = WorkerState(name, device, STARTING, time)
                # Rollout workers stand above the trainers.
                self.workers = dict(sorted({**self.workers, name: worker}.items()))
            case events.WorkerLeft(worker=name):
                del self.workers[name]
            case events.RunFinished(_, summary):
                self.summary = summary
            case events.RunEnded():
                self.ended = event

    def _apply(self, worker: WorkerState, time: float, event: events.WorkerEvent) -> None:
        match event:
            case events.Starting(what):
                worker.phase, worker.phase_started = what, time
            case events.Ready():
                worker.phase = ""
            case Activity():
                worker.add(event)
            case events.GroupScored():
                self.num_groups += not event.is_rejected
                self.note = event.errors[-1].splitlines()[0] if event.errors else self.note
                if event.shown is not None:
                    self.sampled = [replace(event, samples=()), *self.sampled][:GROUPS_SHOWN]
            case events.PromptEvaluated():
                self.num_answered += 1
        self.is_starting &= any(each.phase for each in self.workers.values())

    @property
    def num_done(self) -> int:
        return max(self.lines, default=0)

    @property
    def mean_iteration_seconds(self) -> float | None:
        newest = list(self.lines.values())[-ETA_ITERATIONS:]
        return fmean(line["perf/iteration_seconds"] for line in newest) if newest else None

    def seconds_left(self, now: float) -> float | None:
        """Time until the end of the last iteration; None before the first has finished."""
        mean = self.mean_iteration_seconds
        if mean is None or self.run is None:
            return None
        num_left = self.run.spec.schedule.iterations - self.num_done
        since = 0.0 if self.iteration_started is None else now - self.iteration_started
        return max(0.0, num_left * mean - min(since, mean))


def main_kind(work: Mapping[SpanKind, float], seconds: float) -> SpanKind:
    """Return what took most of a slice of time, from the seconds of each kind of work in it."""
    own = {kind: spent for kind, spent in work.items() if kind != "score"}
    own["wait"] = own.get("wait", 0.0) + max(0.0, seconds - sum(own.values()))
    kind = max(own, key=own.__getitem__)
    if "weights" in own:  # separates iterations, however short it is
        return "weights"
    return "score" if kind == "wait" and work.get("score") else kind
