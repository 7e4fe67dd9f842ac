"""Iterations of the demo with workers on a Ray cluster against the same without Ray.

Both run on this machine with one thread per worker: cores are not lent between Ray's workers. The
cluster is started for each run and stopped after it, so that it does not slow the other one.
"""

from collections.abc import Iterator
from functools import partial
from statistics import median

from easyrl.bench.harness import Row, median_ratio, record, take_turns

GENERATIONS = 8


def run(rounds: int = 3) -> Iterator[Row]:
    """Yield a row per number of prompts. `ratio`: how many times as long an iteration takes with
    Ray."""
    for prompts in (16, 64):
        actions = {
            "without": partial(_measure, "cpu", prompts),
            "with": partial(_measure, "ray:cpu:1", prompts),
        }
        seconds = take_turns(actions, rounds, num_warm_up=0)
        without = seconds["without"]
        with_ray = seconds["with"]
        yield {
            "groups": f"{prompts} x {GENERATIONS}",
            "seconds_without_ray": median(without),
            "seconds_with_ray": median(with_ray),
            "ratio": median_ratio(with_ray, without),
        }


def _measure(devices: str, prompts: int) -> float:
    import ray

    flags = {
        "devices.infer": devices,
        "devices.train": devices,
        "devices.threads": 1,
        "train.prompts_per_iteration": prompts,
        "rollout.num_generations": GENERATIONS,
    }
    try:
        figures = record(f"{devices}, {prompts} groups", flags, iterations=6)
        return figures["iteration_seconds"]
    finally:
        ray.shutdown()
