"""The events of a run, for tests of what observers make of them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from easyrl import events
from easyrl.config import Config
from easyrl.events import Activity, Event, FromWorker, GroupScored, Sample, Span, UnderWay
from easyrl.observe.state import RunState

METRICS = {
    "iteration": 0,
    "reward": 0.25,
    "completions/mean_length": 9.0,
    "loss": 0.0,
    "grad_norm": 1.0,
    "num_updates_not_finite": 0.0,
    "perf/iteration_seconds": 10.0,
    "perf/tokens_per_second": 1200.0,
    "perf/infer_seconds": 8.0,
    "perf/train_seconds": 5.0,
    "perf/weights_seconds": 1.0,
}


def group(time_: float, prompt_index: int, iteration: int = 0, **more: Any) -> FromWorker:
    scored = GroupScored(iteration, 0, prompt_index, [1.0, 0.0], [], [100, 200], 0, 0.0)
    return FromWorker("rollout-0", time_, replace(scored, **more))


def active(worker: str, *spans: Span, **more: Any) -> FromWorker:
    now = spans[-1].ended if spans else more["under_way"].started
    return FromWorker(worker, now, replace(Activity(spans, 0), **more))


def run_events(folder: Path, config: Config) -> list[Event]:
    """All kinds of events, in the order of a run."""
    t = time.monotonic()
    devices = {"rollout-0": "cpu", "train-0": "cpu"}
    sample = Sample("5", 1.0, 0.0, {})
    error = "reward 'score' failed, for the prompt '2+3='"
    return [
        events.RunStarted(t, folder, config, devices, "two workers"),
        FromWorker("rollout-0", t + 1, events.Starting("importing torch")),
        FromWorker("train-0", t + 1, events.Starting("importing torch")),
        FromWorker("rollout-0", t + 3, events.Ready()),
        FromWorker("train-0", t + 4, events.Ready()),
        events.EvaluationStarted(t + 5, 2),
        FromWorker("rollout-0", t + 5.5, events.PromptEvaluated(0, 1, [1.0])),
        events.Evaluated(t + 6, 0.5, 2, 0.2, num_iterations=0),
        events.IterationStarted(t + 7, 0),
        active("rollout-0", Span("weights", t + 7, t + 7.1), Span("generate", t + 7.1, t + 8),
               Span("score", t + 7.5, t + 8.5)),
        group(t + 8, 0, prompt="2+3=", samples=[sample], shown=sample),
        group(t + 8.1, 1, errors=[error]),
        group(t + 8.3, 2, is_rejected=True),
        events.Note("a note"),
        active("train-0", Span("train", t + 8, t + 9), num_groups=1),
        active("rollout-0", under_way=UnderWay("wait", t + 9.1)),
        active("train-0", under_way=UnderWay("train", t + 9.3)),
        events.NoEvents(t + 70.4, "no events for 60 s"),
        active("train-0", Span("train", t + 9.3, t + 71)),
        events.EvaluationStarted(t + 70.5, 2),
        events.Evaluated(t + 70.8, 0.7, 2, 0.1, num_iterations=1),
        events.IterationFinished(t + 71, METRICS),
        FromWorker("train-0", t + 71.2, events.CheckpointSaved(1, 0.1, 100)),
        events.SavingModel(t + 72),
        events.RunFinished(t + 73, {"iterations": 1}),
        events.RunEnded(0, ""),
    ]  # fmt: skip


def state_of(run: Iterable[Event]) -> RunState:
    state = RunState()
    for event in run:
        state.apply(event)
    return state
