"""The state of a run as a view shows it: a fold of the run's events.

    event ──apply──► ViewState ──render──► picture

It has no clock: times are those of the events, and callers pass the time they ask about. The
events that `easyrl watch` reads from the run folder give the same state.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain, takewhile
from statistics import fmean
from typing import Any

from easyrl import events
from easyrl.events import WORKING, Activity, Event, FromWorker, Span, SpanKind, UnderWay
from easyrl.observe.report import PROBLEMS
from easyrl.runtime.run_folder import sample_line

MAX_SPANS = 2000  # spans kept per worker
MERGE_SECONDS = 0.02  # spans of one kind with a smaller gap are merged
RATE_SECONDS = 5.0  # tokens per second are means over this long
BUSY_SECONDS = 20.0  # busy shares are means over this long
ETA_ITERATIONS = 10  # the time left is estimated from this many iterations


@dataclass(slots=True)
class WorkerState:
    name: str
    device: str
    phase: str  # current step of the worker's start; empty once it is ready
    phase_started: float
    spans: deque[Span] = field(default_factory=lambda: deque(maxlen=MAX_SPANS))
    scoring: deque[Span] = field(default_factory=lambda: deque(maxlen=MAX_SPANS))
    """Rewards being computed, besides the worker's own work."""
    tokens: deque[tuple[float, float, int]] = field(default_factory=lambda: deque(maxlen=MAX_SPANS))
    """(started, ended, number of tokens)"""
    under_way: UnderWay | None = None

    def add(self, activity: Activity) -> None:
        self.under_way = activity.under_way
        for span in activity.spans:
            spans = self.scoring if span.kind == "score" else self.spans
            last = spans[-1] if spans else None
            if last is None or last.kind != span.kind or span.started > last.ended + MERGE_SECONDS:
                spans.append(span)
            else:
                spans[-1] = Span(span.kind, last.started, max(last.ended, span.ended))
        working = [span for span in activity.spans if span.kind in WORKING] or activity.spans
        if activity.num_tokens and working:
            self.tokens.append((working[0].started, working[-1].ended, activity.num_tokens))

    def tokens_per_second(self, until: float) -> float:
        since, total = until - RATE_SECONDS, 0.0
        for started, ended, number in takewhile(
            lambda item: item[1] > since, reversed(self.tokens)
        ):
            inside = min(ended, until) - max(started, since)
            total += number * max(0.0, inside) / max(ended - started, 1e-9)
        return total / RATE_SECONDS

    def busy_share(self, until: float) -> float:
        """The share of the last BUSY_SECONDS in which the worker processed tokens."""
        (seconds,) = self.seconds_by_kind(until - BUSY_SECONDS, BUSY_SECONDS, 1)
        return min(1.0, sum(seconds.get(kind, 0.0) for kind in WORKING) / BUSY_SECONDS)

    def seconds_by_kind(
        self, since: float, slice_seconds: float, num_slices: int
    ) -> list[dict[SpanKind, float]]:
        """For each slice of time, the seconds of each kind of work."""
        slices: list[dict[SpanKind, float]] = [{} for _ in range(num_slices)]
        until = since + num_slices * slice_seconds
        now = [] if self.under_way is None else [self.under_way]
        begun = [Span(work.kind, work.started, until) for work in now if work.started < until]
        recent = (
            takewhile(lambda span: span.ended > since, reversed(spans))
            for spans in (self.scoring, self.spans)
        )
        for span in chain(begun, *recent):
            first = max(0, int((span.started - since) / slice_seconds))
            last = min(num_slices - 1, int((span.ended - since) / slice_seconds))
            for number in range(first, last + 1):
                start = since + number * slice_seconds
                inside = min(span.ended, start + slice_seconds) - max(span.started, start)
                if inside > 1e-6:
                    slices[number][span.kind] = slices[number].get(span.kind, 0.0) + inside
        return slices


@dataclass(slots=True)
class ViewState:
    run: events.RunStarted | None = None
    workers: dict[str, WorkerState] = field(default_factory=dict)
    iteration: int | None = None
    """The current one, from 0; None before the first and after the last."""
    iteration_started: float = 0.0
    num_groups: int = 0  # finished groups of this iteration that will be trained
    rewards: list[float] = field(default_factory=list)  # of each iteration
    metrics: Mapping[str, Any] = field(default_factory=dict)  # of the newest iteration
    iteration_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=ETA_ITERATIONS))
    problems: Counter[str] = field(default_factory=Counter)  # sums over the iterations
    accuracies: dict[int, float | None] = field(default_factory=dict)
    """Number of iterations trained -> held-out accuracy."""
    note: str = ""  # the newest note
    warning: str = ""  # what the workers do, if there have been no events for long
    sample: Mapping[str, Any] | None = None  # the newest line of `samples.jsonl`
    evaluation: events.EvaluationStarted | None = None
    num_answered: int = 0
    saving_since: float | None = None
    summary: Mapping[str, Any] | None = None
    ended: events.RunEnded | None = None
    newest: float = 0.0  # the latest time in any event

    def apply(self, event: Event) -> None:  # noqa: PLR0912  one case per event
        self.newest = max(self.newest, getattr(event, "time", 0.0))
        self.warning = ""
        match event:
            case events.RunStarted(started=started, devices=devices):
                self.run, self.newest, self.ended = event, started, None
                self.iteration, self.num_groups = None, 0
                self.workers = {
                    name: WorkerState(name, device, "starting the process", started)
                    for name, device in devices.items()
                }
            case events.RunResumed(metrics, accuracies):
                self.rewards.clear()
                self.accuracies = dict(accuracies)
                self._add_iterations(metrics)
            case FromWorker(name, time, events.Starting(what)) if name in self.workers:
                self.workers[name].phase, self.workers[name].phase_started = what, time
            case FromWorker(name, _, events.Ready()) if name in self.workers:
                self.workers[name].phase = ""
            case FromWorker(name, _, Activity() as activity) if name in self.workers:
                self.workers[name].add(activity)
            case FromWorker(event=events.GroupScored() as group):
                self.num_groups += not group.is_rejected
                self.note = group.errors[-1].splitlines()[0] if group.errors else self.note
                if group.samples:
                    self.sample = sample_line(group, group.samples[-1])
            case FromWorker(event=events.PromptEvaluated()):
                self.num_answered += 1
            case events.EvaluationStarted():
                self.iteration, self.evaluation, self.num_answered = None, event, 0
            case events.Evaluated(accuracy=accuracy, num_iterations=number):
                self.evaluation, self.accuracies[number] = None, accuracy
            case events.IterationStarted(time, iteration):
                self.iteration, self.iteration_started = iteration, time
                self.num_groups = 0
                for worker in self.workers.values():
                    worker.phase = ""  # its Ready may be missing in a shortened trace
            case events.IterationFinished(_, metrics):
                self._add_iterations([metrics])
            case events.SavingModel(time):
                self.iteration, self.saving_since = None, time
            case events.Note(text):
                self.note = text
            case events.NoEvents(_, warning):
                self.warning = warning
            case events.RunFinished(_, summary):
                self.summary = summary
            case events.RunEnded():
                self.ended = event

    def _add_iterations(self, lines: Iterable[Mapping[str, Any]]) -> None:
        for line in lines:
            reward = line["reward"]  # None in the file where it was not finite
            self.rewards.append(math.nan if reward is None else reward)
            self.iteration_seconds.append(line["perf/iteration_seconds"])
            self.problems.update({name: int(line.get(name, 0)) for name in PROBLEMS})
            self.metrics = line
        self.num_groups = 0
        if self.run is not None and len(self.rewards) == self.run.config.train.iterations:
            self.iteration = None

    @property
    def is_starting(self) -> bool:
        return any(worker.phase for worker in self.workers.values())

    @property
    def mean_iteration_seconds(self) -> float | None:
        return fmean(self.iteration_seconds) if self.iteration_seconds else None

    def seconds_left(self, now: float) -> float | None:
        """Time until the end of the last iteration; None before the first has finished."""
        mean = self.mean_iteration_seconds
        if mean is None or self.run is None:
            return None
        num_left = self.run.config.train.iterations - len(self.rewards)
        since = now - self.iteration_started if self.iteration is not None else 0.0
        return max(0.0, (num_left - 1) * mean + max(0.0, mean - since)) if num_left else 0.0
