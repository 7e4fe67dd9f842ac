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


def record(
    name: str, flags: Mapping[str, Any], words: Sequence[str] = (), *, iterations: int
) -> dict[str, float]:
    """Train for `iterations` after the warm-up. The learning rate is 0, so that all do the same
    work. Returns the medians of the run's `perf` metrics, and `completion_tokens`, the mean of an
    iteration. Raises WorkerFailure with `name` if the run fails."""
    own = {
        "data.num_held_out": 0,
        "train.iterations": NUM_WARM_UP + iterations,
        "train.learning_rate": 0.0,
        "train.keep_checkpoints": 0,
    }
    lines: list[Mapping[str, Any]] = []
    error = ""

    def observe(event: events.Event) -> None:
        nonlocal error
        if isinstance(event, events.RunEnded):
            error = event.message
        elif isinstance(event, events.IterationFinished):
            lines.append(event.metrics)

    with tempfile.TemporaryDirectory(prefix="easyrl-bench-") as folder:
        config = load_config(None, {**own, **flags, "output.dir": f"{folder}/run"}, words)
        exit_code = run(config, [observe])
    if exit_code > SIGNALLED:
        raise Interrupted(signal.Signals(exit_code - SIGNALLED))
    if exit_code != 0:
        raise WorkerFailure(f"bench, {name}: {error}")
    lines = lines[NUM_WARM_UP:]
    medians = {
        key.removeprefix("perf/"): float(statistics.median(line[key] for line in lines))
        for key in lines[0]
        if key.startswith("perf/")
    }
    tokens, seconds = medians["tokens_per_second"], medians["iteration_seconds"]
    print(f"{name}: {tokens:.0f} tokens/s, {seconds:.2f} s per iteration", file=sys.stderr)
    products = (line["perf/tokens_per_second"] * line["perf/iteration_seconds"] for line in lines)
    return medians | {"completion_tokens": float(statistics.mean(products))}
