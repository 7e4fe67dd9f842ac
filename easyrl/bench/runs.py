"""Train, and record what the iterations took. The first iteration warms up and does not count."""

from __future__ import annotations

import signal
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from easyrl import events
from easyrl.config import load_config
from easyrl.runtime.run import run
from easyrl.runtime.supervisor import SIGNALLED, Interrupted, WorkerFailure

NUM_WARM_UP = 1
SAMPLE_SECONDS = 1e-4


class Recorder:
    """Observe a run."""

    def __init__(self) -> None:
        self.metrics: list[Mapping[str, Any]] = []
        """Metrics of the measured iterations."""
        self.error = ""
        self._iterations: list[tuple[float, float]] = []  # start and end
        self._working: dict[str, list[tuple[float, float]]] = {"rollout": [], "train": []}
        self._started = 0.0

    def __call__(self, event: events.Event) -> None:
        match event:
            case events.IterationStarted(time, _):
                self._started = time
            case events.FromWorker(worker, _, events.Activity(spans)):
                self._working[worker.partition("-")[0]] += [
                    (span.started, span.ended) for span in spans if span.kind in events.WORKING
                ]
            case events.IterationFinished(time, metrics):
                if metrics["iteration"] >= NUM_WARM_UP:
                    self.metrics.append(metrics)
                    self._iterations.append((self._started, time))
            case events.RunEnded(message=message):
                self.error = message

    def median(self, name: str) -> float:
        return float(statistics.median(metrics[f"perf/{name}"] for metrics in self.metrics))

    @property
    def completion_tokens(self) -> float:
        """Mean per iteration."""
        return statistics.mean(
            float(metrics["perf/tokens_per_second"] * metrics["perf/iteration_seconds"])
            for metrics in self.metrics
        )

    def busy_shares(self) -> tuple[float, float, float]:
        """Return the shares of the time in which any engine, any trainer, and both were busy."""
        times = np.concatenate([np.arange(*span, SAMPLE_SECONDS) for span in self._iterations])
        busy = np.zeros((2, len(times)), dtype=np.bool_)
        for row, spans in zip(busy, self._working.values(), strict=True):
            for span in spans:
                row[slice(*np.searchsorted(times, span))] = True
        infer, train = busy
        return float(infer.mean()), float(train.mean()), float((infer & train).mean())


def record(
    name: str, flags: Mapping[str, Any], words: Sequence[str] = (), *, iterations: int
) -> Recorder:
    """Train for `iterations` after the warm-up. The learning rate is 0, so that all do the same
    work. Raises WorkerFailure with `name` if the run fails."""
    own = {
        "data.num_held_out": 0,
        "train.iterations": NUM_WARM_UP + iterations,
        "train.learning_rate": 0.0,
        "train.keep_checkpoints": 0,
    }
    recorder = Recorder()
    with tempfile.TemporaryDirectory(prefix="easyrl-bench-") as folder:
        config = load_config(None, {**own, **flags, "output.dir": f"{folder}/run"}, words)
        exit_code = run(config, [recorder])
    if exit_code > SIGNALLED:
        raise Interrupted(signal.Signals(exit_code - SIGNALLED))
    if exit_code != 0:
        raise WorkerFailure(f"bench, {name}: {recorder.error}")
    tokens, seconds = recorder.median("tokens_per_second"), recorder.median("iteration_seconds")
    print(f"{name}: {tokens:.0f} tokens/s, {seconds:.2f} s per iteration", file=sys.stderr)
    return recorder
