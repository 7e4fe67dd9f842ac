"""Whole iterations of the demo under four schedules (their table: docs/benchmarks.md).

All modes do the same work. A run's figure is the median of its iterations; ratios are taken between
runs of one round. The ceilings over sync follow from its busy times: `apart` cannot be faster than
its busier group, `periodic` not faster than all cores working all the time:

    apart      (infer + train + weights) / (max(infer, train) + weights)
    periodic   (infer + train + weights) / ((infer + train) / 2 + weights)
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

from easyrl.bench.measure import median_ratio, take_turns
from easyrl.bench.runs import Recorder, record
from easyrl.processes import num_cores

SIZES = (16, 64)  # prompts per iteration
NUM_ROUNDS = 3
MODES = {"sync": 1, "colocated": 1, "apart": 4, "periodic": 2}
"""The part of the groups that is in flight: all, a half or a quarter."""
COLUMNS = (
    *("prompts", "mode", "groups_in_flight", "threads", "iteration_seconds", "over_sync"),
    *("over_colocated", "share_of_ceiling"),
)


def run(sizes: Sequence[int] = SIZES, rounds: int = NUM_ROUNDS) -> list[dict[str, Any]]:
    """One row per size and mode: its settings, its times, and `over_sync` and `over_colocated`: how
    many times as fast as these it is (median over rounds)."""
    return [row for size in sizes for row in _compare(size, rounds)]


def _compare(size: int, rounds: int) -> list[dict[str, Any]]:
    iterations = 8 if size <= 16 else 4
    actions = {mode: partial(measure, mode, size, iterations) for mode in MODES}
    recorders = take_turns(actions, rounds, num_warm_up=0)

    def seconds(mode: str, what: str = "iteration") -> list[float]:
        return [recorder.median(f"{what}_seconds") for recorder in recorders[mode]]

    infer, train, weights = (
        statistics.median(seconds("sync", what)) for what in ("infer", "train", "weights")
    )
    busy = {"apart": max(infer, train), "periodic": (infer + train) / 2}
    rows = []
    for mode in MODES:
        row: dict[str, Any] = {"prompts": size, "mode": mode}
        row |= {"groups_in_flight": groups_in_flight(mode, size), "threads": num_threads(mode)}
        for what in ("iteration", "infer", "train"):
            row[f"{what}_seconds"] = statistics.median(seconds(mode, what))
        for other in ("sync", "colocated"):
            row[f"over_{other}"] = median_ratio(seconds(other), seconds(mode))
        if mode in busy:
            row["ceiling"] = (infer + train + weights) / (busy[mode] + weights)
            row["share_of_ceiling"] = row["over_sync"] / row["ceiling"]
        rows.append(row)
    return rows


def groups_in_flight(mode: str, size: int) -> int:
    return max(2, size // MODES[mode])


def num_threads(mode: str) -> int:
    """CPU threads of each worker."""
    return num_cores() if mode == "colocated" else max(1, num_cores() // 2)


def measure(mode: str, size: int, iterations: int) -> Recorder:
    flags = {
        "runtime.schedule": "periodic" if mode in ("apart", "periodic") else "sync",
        "train.prompts_per_iteration": size,
        "rollout.num_generations": 8,
        "rollout.max_concurrent_groups": groups_in_flight(mode, size),
        "devices.infer": "cpu",
        "devices.train": "cpu",
        # Cores are shared between the groups unless a number of threads is set.
        "devices.threads": None if mode == "periodic" else num_threads(mode),
    }
    return record(f"{size} prompts, {mode}", flags, iterations=iterations)
