"""The state of a run: a fold of its events, which all views draw.

It has no clock: callers pass the time they ask about, on the clock of the events.
"""

import re
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
PROBLEMS = {
    "reward_errors": ("reward call", "failed"),
    "groups_skipped": ("group", "skipped"),
    "groups_not_replaced": ("group", "without advantages"),
    "num_updates_not_finite": ("update", "dropped, not finite (lower train.learning_rate)"),
    "worker_restarts": ("rollout worker", "replaced"),  # in the summary
}
"""Count of problems, among metrics -> what is counted, and what happened to it."""


def problems_in(counts: Mapping[str, Any]) -> list[str]:
    """Describe the problems that were counted, as in `2 groups skipped`."""
    texts = []
    for name, (noun, what) in PROBLEMS.items():
        count = counts.get(name)
        if count:
            texts.append(f"{counted(int(count), noun)} {what}")
    return texts


def _is_continued(first: Span, second: Span) -> bool:
    """Return whether the second span is shown as a part of the first."""
    return first.kind == second.kind and second.started <= first.ended + MERGE_SECONDS


def _new_spans() -> deque[Span]:
    return deque(maxlen=MAX_SPANS)


@dataclass(slots=True)
class WorkerState:
    name: str
    device: str
    phase: str  # current step of the worker's start; empty once it is ready
    phase_started: float
    spans: deque[Span] = field(default_factory=_new_spans)
    scoring: deque[Span] = field(default_factory=_new_spans)
    """Rewards being computed, besides the worker's own work."""
    under_way: UnderWay | None = None

    def add(self, activity: Activity) -> None:
        self.phase = ""  # its Ready may be missing in a shortened trace
        self.under_way = activity.under_way
        for span in activity.spans:
            spans = self.scoring if span.kind == "score" else self.spans
            last = spans[-1] if spans else None
            if last is not None and _is_continued(last, span):
                ended = max(last.ended, span.ended)
                spans[-1] = Span(span.kind, last.started, ended)
            else:
                spans.append(span)

    def seconds_by_kind(
        self, since: float, slice_seconds: float, num_slices: int
    ) -> list[dict[SpanKind, float]]:
        """Return the seconds of each kind of work in each of the slices of time, which begin at
        `since`. Work under way goes on to the end of the last slice."""
        starts = since + slice_seconds * np.arange(num_slices)  # [slices]
        ends = starts + slice_seconds
        by_kind: dict[SpanKind, list[Span]] = {}
        for span in (*self.scoring, *self.spans):
            if span.ended > since:
                by_kind.setdefault(span.kind, []).append(span)
        if self.under_way is not None:
            kind = self.under_way.kind
            until = since + num_slices * slice_seconds
            span = Span(kind, self.under_way.started, until)
            by_kind.setdefault(kind, []).append(span)
        slices: list[dict[SpanKind, float]] = [{} for _ in range(num_slices)]
        for kind, spans in by_kind.items():
            times = np.array([(span.started, span.ended) for span in spans])  # [spans, 2]
            started = times[:, :1]  # [spans, 1]
            ended = times[:, 1:]
            # Begin and end of the part of each span that is in each slice [spans, slices].
            part_started = np.clip(started, starts, ends)
            part_ended = np.clip(ended, starts, ends)
            seconds = (part_ended - part_started).sum(axis=0)
            for number in np.flatnonzero(seconds):
                slices[number][kind] = float(seconds[number])
        return slices


@dataclass(slots=True)
class RunState:
    run: events.RunStarted | None = None
    workers: dict[str, WorkerState] = field(default_factory=dict)
    iteration_started: float | None = None  # None between iterations
    _finished: list[float] = field(default_factory=list)  # when the newest iterations ended
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
            case events.RunStarted():
                self._start(event)
            case FromWorker(name, time, worker_event):
                self._apply(self.workers[name], time, worker_event)
            case events.EvaluationStarted():
                self.evaluation = event
                self.num_answered = 0
            case events.Evaluated(accuracy=accuracy, num_iterations=number):
                self.evaluation = None
                self.accuracies[number] = accuracy
            case events.IterationStarted(time):
                self.iteration_started = time
            case events.IterationFinished(time, metrics):
                self.iteration_started = None
                self._finished = [*self._finished, time][-ETA_ITERATIONS - 1 :]
                self.num_groups = 0
                self.lines[metrics["iteration"]] = metrics
            case events.SavingModel(time):
                self.saving_since = time
            case events.Note():
                self._keep_note(event)
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

    def _keep_note(self, note: events.Note) -> None:
        if note.is_lasting:
            self.lasting_note = note.text
        else:
            self.note = note.text

    def _start(self, run: events.RunStarted) -> None:
        """Begin anew, but keep the iterations that are not undone."""
        workers = {}
        for name, device in run.devices.items():
            workers[name] = WorkerState(name, device, STARTING, run.started)
        # `easyrl watch` has seen the earlier iterations, and some that are undone now.
        earlier = run.earlier or self.lines.values()
        lines = {}
        for line in earlier:
            if line["iteration"] <= run.num_iterations:
                lines[line["iteration"]] = line
        # Reset every other field to its default.
        self.__init__(run, workers, lines=lines, newest=run.started)  # type: ignore[misc]
        self.accuracies = dict(run.accuracies)

    def _apply(self, worker: WorkerState, time: float, event: events.WorkerEvent) -> None:
        match event:
            case events.Starting(what):
                worker.phase = what
                worker.phase_started = time
            case events.Ready():
                worker.phase = ""
            case Activity():
                worker.add(event)
            case events.GroupScored():
                if not event.is_rejected:
                    self.num_groups += 1
                if event.errors:
                    self.note = _in_one_line(event.errors[-1])
                if event.shown is not None:
                    without_texts = replace(event, samples=())
                    self.sampled = [without_texts, *self.sampled][:GROUPS_SHOWN]
            case events.PromptEvaluated():
                self.num_answered += 1
        if not any(each.phase for each in self.workers.values()):
            self.is_starting = False

    @property
    def num_done(self) -> int:
        """Number of iterations trained."""
        return max(self.lines, default=0)

    @property
    def mean_iteration_seconds(self) -> float | None:
        newest = list(self.lines.values())[-ETA_ITERATIONS:]
        return fmean(line["perf/iteration_seconds"] for line in newest) if newest else None

    def seconds_left(self, now: float) -> float | None:
        """Time until the end of the last iteration, with evaluations and checkpoints as between the
        newest ones; None before the first has finished."""
        mean = self.mean_iteration_seconds
        if mean is None or self.run is None:
            return None
        num_between = len(self._finished) - 1
        if num_between > 0:
            mean = (self._finished[-1] - self._finished[0]) / num_between
        num_left = self.run.spec.schedule.iterations - self.num_done
        started = self.iteration_started
        if self._finished:
            started = self._finished[-1]
        since_start = 0.0
        if started is not None:
            since_start = now - started
        return max(0.0, num_left * mean - min(since_start, mean))


ERROR_LINE = re.compile(r"[A-Za-z_][\w.]*(?:: \S|$)")
"""`ValueError: no`, or `TimeoutError`."""


def _in_one_line(failed: events.FailedCall) -> str:
    """Say what failed, and with which error: its name and message stand behind a traceback."""
    first, *others = failed.error.splitlines()
    for line in reversed(others):
        if ERROR_LINE.match(line):
            return f"{first} {line}"
    return first


def main_kind(work: Mapping[SpanKind, float], seconds: float) -> SpanKind:
    """Return what took most of a slice of time, from the seconds of each kind of work in it.

    A weight exchange is shown however short it is: it separates iterations. Rewards are computed
    beside a worker's own work, and are shown where it waits.
    """
    if "weights" in work:
        return "weights"
    own = dict(work)
    score_seconds = own.pop("score", 0.0)
    unknown_seconds = max(0.0, seconds - sum(own.values()))
    own["wait"] = own.get("wait", 0.0) + unknown_seconds
    kind = max(own, key=lambda kind: own[kind])
    if kind == "wait" and score_seconds:
        return "score"
    return kind
