"""Train, and record what the iterations took. The first iteration warms up and does not count."""

from __future__ import annotations

import signal
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from easyrl import events
from easyrl.config import load_config
from easyrl.runtime.run import run
from easyrl.runtime.supervisor import SIGNALLED, Interrupted, WorkerFailure

NUM_WARM_UP = 1


class Recorder:
    """Observe a run."""

    def __init__(self) -> None:
        self.metrics: list[Mapping[str, Any]] = []
        """Metrics of the measured iterations."""
        self.error = ""

    def __call__(self, event: events.Event) -> None:
        match event:
            case events.IterationFinished(metrics=metrics) if metrics["iteration"] >= NUM_WARM_UP:
                self.metrics.append(metrics)
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
