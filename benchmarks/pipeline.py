"""Whole iterations of the demo under four schedules (their table: docs/benchmarks.md).

All modes do the same work. A run's figure is the median of its iterations; ratios are taken between
runs of one round. The ceilings over sync follow from its busy times: `apart` cannot be faster than
its busier group, `periodic` not faster than all cores working all the time:

    apart      (infer + train + weights) / (max(infer, train) + weights)
    periodic   (infer + train + weights) / ((infer + train) / 2 + weights)
"""

import statistics
from collections.abc import Iterator
from functools import partial

from easyrl.bench.harness import Row, median_ratio, record, take_turns
from easyrl.processes import num_cores

PROMPTS = 64  # per iteration
MODES = {
    "sync": PROMPTS,
    "colocated": PROMPTS,
    "apart": PROMPTS // 4,
    "periodic": None,
}
"""Mode -> most groups in flight; None: the default."""


def run(rounds: int = 3) -> Iterator[Row]:
    """Yield a row per mode. `over_sync` and `over_colocated`: how many times as fast as these it is
    (median over rounds)."""
    actions = {mode: partial(measure, mode) for mode in MODES}
    runs = take_turns(actions, rounds, num_warm_up=0)
    seconds = {}
    for mode in MODES:
        seconds[mode] = [run["iteration_seconds"] for run in runs[mode]]
    infer = statistics.median(run["infer_seconds"] for run in runs["sync"])
    train = statistics.median(run["train_seconds"] for run in runs["sync"])
    weights = statistics.median(run["weights_seconds"] for run in runs["sync"])
    # Least time for generating and training.
    busy = {"apart": max(infer, train), "periodic": (infer + train) / 2}
    for mode in MODES:
        row: Row = {"mode": mode, "iteration_seconds": statistics.median(seconds[mode])}
        for other in ("sync", "colocated"):
            row[f"over_{other}"] = median_ratio(seconds[other], seconds[mode])
        if mode in busy:
            row["ceiling"] = (infer + train + weights) / (busy[mode] + weights)
            row["share_of_ceiling"] = row["over_sync"] / row["ceiling"]
        yield row


def measure(mode: str) -> dict[str, float]:
    """Train some iterations, and return the figures of `record`."""
    num_threads: int | None = max(1, num_cores() // 2)
    if mode == "colocated":
        num_threads = num_cores()
    elif mode == "periodic":  # cores are shared between the groups
        num_threads = None
    flags = {
        "runtime.schedule": "periodic" if mode in ("apart", "periodic") else "sync",
        "train.prompts_per_iteration": PROMPTS,
        "rollout.num_generations": 8,
        "rollout.max_concurrent_groups": MODES[mode],
        "devices.infer": "cpu",
        "devices.train": "cpu",
        "devices.threads": num_threads,
    }
    return record(mode, flags, iterations=4)
