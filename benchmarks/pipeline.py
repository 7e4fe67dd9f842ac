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
MODES = {"sync": 1, "colocated": 1, "apart": 4, "periodic": None}
"""The part of the groups that is in flight: all, or a quarter; None: the default."""


def run(rounds: int = 3) -> Iterator[Row]:
    """One row per mode. `over_sync` and `over_colocated`: how many times as fast as these it is
    (median over rounds)."""
    actions = {mode: partial(measure, mode) for mode in MODES}
    runs = take_turns(actions, rounds, num_warm_up=0)
    seconds = {mode: [run["iteration_seconds"] for run in runs[mode]] for mode in MODES}
    infer, train, weights = (
        statistics.median(run[f"{phase}_seconds"] for run in runs["sync"])
        for phase in ("infer", "train", "weights")
    )
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
    num_threads = num_cores() if mode == "colocated" else max(1, num_cores() // 2)
    part = MODES[mode]
    flags = {
        "runtime.schedule": "periodic" if mode in ("apart", "periodic") else "sync",
        "train.prompts_per_iteration": PROMPTS,
        "rollout.num_generations": 8,
        "rollout.max_concurrent_groups": None if part is None else PROMPTS // part,
        "devices.infer": "cpu",
        "devices.train": "cpu",
        # Cores are shared between the groups unless a number of threads is set.
        "devices.threads": None if mode == "periodic" else num_threads,
    }
    return record(mode, flags, iterations=4)
