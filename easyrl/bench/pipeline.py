"""Whole iterations of the demo under four schedules (their table: docs/benchmarks.md).

All modes do the same work. A run's figure is the median of its iterations; ratios are taken between
runs of one round. The ceilings over sync follow from its busy times: `apart` cannot be faster than
its busier group, `periodic` not faster than all cores working all the time:

    apart      (infer + train + weights) / (max(infer, train) + weights)
    periodic   (infer + train + weights) / ((infer + train) / 2 + weights)
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from functools import partial

from easyrl.bench.measure import Row, median_ratio, take_turns
from easyrl.bench.runs import record
from easyrl.processes import num_cores

MODES = {"sync": 1, "colocated": 1, "apart": 4, "periodic": 2}
"""The part of the groups that is in flight: all, a half or a quarter."""


def run(sizes: Sequence[int] = (16, 64), rounds: int = 3) -> Iterator[Row]:
    """One row per size (prompts per iteration) and mode. `over_sync` and `over_colocated`: how many
    times as fast as these it is (median over rounds)."""
    for size in sizes:
        iterations = 8 if size <= 16 else 4
        actions = {mode: partial(measure, mode, size, iterations) for mode in MODES}
        runs = take_turns(actions, rounds, num_warm_up=0)
        seconds = {
            (mode, what): [run[f"{what}_seconds"] for run in runs[mode]]
            for mode in MODES
            for what in ("iteration", "infer", "train", "weights")
        }
        medians = {key: statistics.median(values) for key, values in seconds.items()}
        infer, train, weights = (medians["sync", what] for what in ("infer", "train", "weights"))
        busy = {"apart": max(infer, train), "periodic": (infer + train) / 2}
        for mode in MODES:
            row: Row = {"prompts": size, "mode": mode}
            row["iteration_seconds"] = medians[mode, "iteration"]
            for other in ("sync", "colocated"):
                pair = seconds[other, "iteration"], seconds[mode, "iteration"]
                row[f"over_{other}"] = median_ratio(*pair)
            if mode in busy:
                row["ceiling"] = (infer + train + weights) / (busy[mode] + weights)
                row["share_of_ceiling"] = row["over_sync"] / row["ceiling"]
            yield row


def measure(mode: str, size: int, iterations: int) -> dict[str, float]:
    num_threads = num_cores() if mode == "colocated" else max(1, num_cores() // 2)
    flags = {
        "runtime.schedule": "periodic" if mode in ("apart", "periodic") else "sync",
        "train.prompts_per_iteration": size,
        "rollout.num_generations": 8,
        "rollout.max_concurrent_groups": max(2, size // MODES[mode]),
        "devices.infer": "cpu",
        "devices.train": "cpu",
        # Cores are shared between the groups unless a number of threads is set.
        "devices.threads": None if mode == "periodic" else num_threads,
    }
    return record(f"{size} prompts, {mode}", flags, iterations=iterations)
