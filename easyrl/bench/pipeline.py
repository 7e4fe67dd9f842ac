"""Whole iterations of the demo under four schedules.

    sync       training starts when all groups are in; each group of workers has half of the cores
    colocated  the same, but each phase may use all cores in turn
    apart      groups are trained while others are generated; each group of workers has half of the
               cores
    periodic   the same, but cores of a waiting worker serve the other group: the default

All do the same work: the learning rate is 0, so every iteration of every run has the same weights,
prompts and random numbers. All groups are in flight at once under sync and colocated, a quarter
under apart and half under periodic, which are the defaults for many prompts. The runs take turns,
NUM_ROUNDS times; a run's figure is the median of its iterations, and ratios are taken within a
round.

The ceilings over sync follow from its busy times. `apart` cannot be faster than its busier group,
`periodic` not faster than all cores working all the time, if two did twice the work of one:

    apart      (infer + train + weights) / (max(infer, train) + weights)
    periodic   (infer + train + weights) / ((infer + train) / 2 + weights)
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from typing import Any

from easyrl.bench.measure import median_ratio
from easyrl.bench.report import progress
from easyrl.bench.runs import NUM_WARM_UP, Recorder, record
from easyrl.config import load_config
from easyrl.processes import num_cores

SIZES = (16, 64)  # prompts per iteration
NUM_GENERATIONS = 8
NUM_ROUNDS = 3
MODES = ("sync", "colocated", "apart", "periodic")
COLUMNS = {
    "prompts": "prompts",
    "mode": "mode",
    "groups_in_flight": "in flight",
    "threads": "threads",
    "iteration_seconds": "s / iter.",
    "over_sync": "over sync",
    "over_colocated": "over coloc.",
    "share_of_ceiling": "of ceiling",
}


def run(sizes: Sequence[int] = SIZES, rounds: int = NUM_ROUNDS) -> list[dict[str, Any]]:
    """One row per size and mode: its settings, its times, and `over_sync` and `over_colocated`: how
    many times as fast as these it is (median over rounds)."""
    return [row for size in sizes for row in _compare(size, rounds)]


def _compare(size: int, rounds: int) -> list[dict[str, Any]]:
    recorders: dict[str, list[Recorder]] = {mode: [] for mode in MODES}
    for _ in range(rounds):
        for mode in MODES:
            recorders[mode].append(measure(mode, size, num_iterations=8 if size <= 16 else 4))

    def seconds(mode: str, what: str = "iteration") -> list[float]:
        return [recorder.median(f"perf/{what}_seconds") for recorder in recorders[mode]]

    infer, train, weights = (
        statistics.median(seconds("sync", what)) for what in ("infer", "train", "weights")
    )
    least = {"apart": max(infer, train), "periodic": (infer + train) / 2}
    rows = []
    for mode in MODES:
        row: dict[str, Any] = {
            "prompts": size,
            "generations": NUM_GENERATIONS,
            "mode": mode,
            "groups_in_flight": groups_in_flight(mode, size),
            "threads": num_threads(mode),
            "iteration_seconds": statistics.median(seconds(mode)),
            "infer_seconds": statistics.median(seconds(mode, "infer")),
            "train_seconds": statistics.median(seconds(mode, "train")),
            "completion_tokens": statistics.median(r.completion_tokens for r in recorders[mode]),
            "over_sync": median_ratio(seconds("sync"), seconds(mode)),
            "over_colocated": median_ratio(seconds("colocated"), seconds(mode)),
        }
        if mode in least:
            ceiling = (infer + train + weights) / (least[mode] + weights)
            row |= {"ceiling": ceiling, "share_of_ceiling": row["over_sync"] / ceiling}
        rows.append(row)
    return rows


def groups_in_flight(mode: str, size: int) -> int:
    return max(2, size // {"apart": 4, "periodic": 2}.get(mode, 1))


def num_threads(mode: str) -> int:
    """CPU threads of each worker."""
    return num_cores() if mode == "colocated" else max(1, num_cores() // 2)


def measure(mode: str, size: int, num_iterations: int) -> Recorder:
    """Train for `num_iterations` after the warm-up."""
    name = f"{size} x {NUM_GENERATIONS}, {mode}"
    flags = {
        "data.num_held_out": 0,
        "runtime.schedule": "periodic" if mode in ("apart", "periodic") else "sync",
        "train.iterations": NUM_WARM_UP + num_iterations,
        "train.prompts_per_iteration": size,
        "train.learning_rate": 0.0,
        "train.keep_checkpoints": 0,
        "rollout.num_generations": NUM_GENERATIONS,
        "rollout.max_concurrent_groups": groups_in_flight(mode, size),
        "devices.infer": "cpu",
        "devices.train": "cpu",
        # Cores are shared between the groups unless a number of threads is set.
        "devices.threads": None if mode == "periodic" else num_threads(mode),
    }
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(flags={**flags, "output.dir": f"{folder}/run"})
        recorder = record(config, Recorder(), name)
    progress(f"{name}: {recorder.median('perf/iteration_seconds'):.2f} s per iteration")
    return recorder
