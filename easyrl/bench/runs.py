"""Train, and record what the iterations took. The first iteration warms up and does not count."""

from __future__ import annotations

import signal
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from easyrl import events
from easyrl.config import Config
from easyrl.events import WORKING
from easyrl.runtime.run import run
from easyrl.runtime.supervisor import SIGNALLED, Interrupted, WorkerFailure

NUM_WARM_UP = 1
Spans = Sequence[tuple[float, float]]
"""Start and end of each, in seconds."""


class Recorder:
    """An observer of a run."""

    def __init__(self) -> None:
        self.metrics: list[Mapping[str, Any]] = []
        """Metrics of the iterations that are measured."""
        self.iterations: list[tuple[float, float]] = []
        """Their spans."""
        self.error = ""
        self._working: dict[str, list[tuple[float, float]]] = {"rollout": [], "train": []}
        self._started = 0.0

    def __call__(self, event: events.Event) -> None:
        match event:
            case events.IterationStarted(time, _):
                self._started = time
            case events.FromWorker(worker, _, events.Activity() as activity):
                self._working[worker.partition("-")[0]] += [
                    (span.started, span.ended) for span in activity.spans if span.kind in WORKING
                ]
            case events.IterationFinished(time, metrics):
                if metrics["iteration"] >= NUM_WARM_UP:
                    self.metrics.append(metrics)
                    self.iterations.append((self._started, time))
            case events.RunEnded(message=message):
                self.error = message

    def median(self, metric: str) -> float:
        return float(statistics.median(metrics[metric] for metrics in self.metrics))

    @property
    def completion_tokens(self) -> float:
        """Mean per iteration."""
        return statistics.mean(
            float(metrics["perf/tokens_per_second"] * metrics["perf/iteration_seconds"])
            for metrics in self.metrics
        )

    def busy_shares(self) -> tuple[float, float, float]:
        """The share of the time in which any engine, any trainer, and both were busy."""
        infer, train = (overlap(self.iterations, union(s)) for s in self._working.values())
        seconds = total(self.iterations)
        return (
            total(infer) / seconds,
            total(train) / seconds,
            total(overlap(infer, train)) / seconds,
        )


def record(config: Config, recorder: Recorder, name: str) -> Recorder:
    """Train from start to end. Raises WorkerFailure with `name` if the run fails."""
    exit_code = run(config, [recorder])
    if exit_code > SIGNALLED:
        raise Interrupted(signal.Signals(exit_code - SIGNALLED))
    if exit_code != 0:
        raise WorkerFailure(f"bench, {name}: {recorder.error}")
    return recorder


def union(spans: Spans) -> Spans:
    """The same time in order, without overlaps."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def overlap(some: Spans, others: Spans) -> Spans:
    """The time that is in both; neither has overlaps."""
    shared = ((max(a[0], b[0]), min(a[1], b[1])) for a in some for b in others)
    return [(start, end) for start, end in shared if start < end]


def total(spans: Spans) -> float:
    return sum(end - start for start, end in spans)
