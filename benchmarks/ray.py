"""Iterations of the demo with workers on a Ray cluster against the same without Ray.

Both run on this machine with one thread per worker: cores are not lent between Ray's workers. The
cluster is started for each run and stopped after it, so that it does not slow the other one.
"""

import statistics
from collections.abc import Iterator
from functools import partial

from easyrl.bench.harness import Row, median_ratio, record, take_turns

SHAPES = {"16 x 8": (16, 8), "64 x 8": (64, 8)}
"""Prompts and generations of an iteration."""


def run(rounds: int = 3) -> Iterator[Row]:
    """One row per shape. `ratio`: how many times as long an iteration takes with Ray."""
    for name, (prompts, generations) in SHAPES.items():
        both = ("cpu", "ray:cpu:1")
        actions = {each: partial(_measure, each, prompts, generations) for each in both}
        runs = take_turns(actions, rounds, num_warm_up=0)
        yield {
            "groups": name,
            "seconds_without_ray": statistics.median(runs["cpu"]),
            "seconds_with_ray": statistics.median(runs["ray:cpu:1"]),
            "ratio": median_ratio(runs["ray:cpu:1"], runs["cpu"]),
        }


def _measure(devices: str, prompts: int, generations: int) -> float:
    import ray

    flags = {
        "train.prompts_per_iteration": prompts,
        "rollout.num_generations": generations,
        "devices.infer": devices,
        "devices.train": devices,
        "devices.threads": 1,
    }
    try:
        medians = record(f"{devices}, {prompts} x {generations}", flags, iterations=6)
        return medians["iteration_seconds"]
    finally:
        ray.shutdown()
