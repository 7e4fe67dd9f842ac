"""Predict the throughput of every split of devices from the metrics of a run (`easyrl plan`).

docs/devices.md ("The fastest split of the devices") has the formula and what it leaves out.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

from easyrl.config import ConfigError
from easyrl.config.devices import DeviceSet
from easyrl.config.spec import RunSpec
from easyrl.observe.history import read_history


class Measured(NamedTuple):
    """A run: medians over the iterations of its newest command, but the first, which warms up."""

    spec: RunSpec
    devices: Sequence[str]  # of the workers, engines first
    engines: int
    trainers: int
    num_tokens: float  # sampled tokens trained per iteration
    seconds: float
    generating: float
    training: float
    weights: float


class Split(NamedTuple):
    engines: int
    trainers: int
    tokens_per_second: float
    infer_idle: float  # share of the time
    train_idle: float


def measure(folder: Path) -> Measured:
    """Read a run's folder. Raises ConfigError if it has no measured iteration."""
    run = read_history(folder)
    done_before = run.state.run.num_iterations if run.state.run else 0
    lines = [
        {name.removeprefix("perf/"): value for name, value in line.items()}
        for number, line in run.lines.items()
        if number > done_before + 1 and "perf/iteration_seconds" in line
    ]
    if not lines or not run.devices:
        done = sum(number > done_before for number in run.lines)
        raise ConfigError(
            f"'{folder}': expected 2 iterations of its newest command (one warms up), got {done}; "
            "run or resume it with more --iterations"
        )
    names = ("iteration", "infer", "train", "weights")
    seconds = [median(line[f"{name}_seconds"] for line in lines) for name in names]
    num_tokens = median(line["tokens_per_second"] * line["iteration_seconds"] for line in lines)
    engines = sum(worker.startswith("rollout") for worker in run.devices)
    counts = engines, len(run.devices) - engines, num_tokens
    return Measured(run.spec, [*run.devices.values()], *counts, *seconds)


def predict_splits(run: Measured, num_devices: int) -> list[Split]:
    """Predict all splits of so many devices. Raises ConfigError if there is none."""
    schedule, size = run.spec.schedule, run.spec.engine.tensor_parallel_size
    num_prompts = schedule.prompts_per_iteration
    most = num_prompts // schedule.updates_per_iteration
    both = max if schedule.schedule == "periodic" else lambda *sides: sum(sides)
    rest = max(0.0, run.seconds - both(run.generating, run.training) - run.weights)
    splits = []
    for engines in range(1, (num_devices - 1) // size + 1):
        if (trainers := num_devices - engines * size) > most:
            continue
        infer = run.generating * run.engines / min(engines, num_prompts)
        train = run.training * run.trainers / trainers
        seconds = both(infer, train) + run.weights + rest
        busy = infer * min(engines, num_prompts) / engines
        idle = 1 - busy / seconds, 1 - train / seconds
        splits.append(Split(engines, trainers, run.num_tokens / seconds, *idle))
    if not splits:
        raise ConfigError(
            f"--devices: expected devices for engines of {size} (rollout.tensor_parallel_size) and "
            f"1 to {most} trainers (prompts per update), got {num_devices}"
        )
    return splits


def to_text(run: Measured, splits: Sequence[Split]) -> str:
    speed = run.num_tokens / run.seconds
    lines = [
        f"measured with {run.engines}+{run.trainers} workers: {speed:,.0f} tokens/s; seconds: "
        f"generating {run.generating:.3g}, training {run.training:.3g}, weights {run.weights:.3g}, "
        f"iteration {run.seconds:.3g}",
        "engines trainers  tokens/s  idle: engines trainers",
    ]
    if run.devices[0] == run.devices[-1] and run.spec.devices.threads is None:
        lines.insert(1, "workers shared cores or a device: on their own they are faster")
    row = "{:7}{:9}{:10,.0f}{:15.0%}{:9.0%}"
    return "\n".join([*lines, *(row.format(*split) for split in splits)])


def flags_of(run: Measured, split: Split) -> str:
    """Return the options for the split, with devices of the kind that was measured."""
    name, num_infer = run.devices[0], split.engines * run.spec.engine.tensor_parallel_size
    devices = DeviceSet("cpu" if name.endswith("cpu") else "accelerator", (), is_ray="/" in name)
    infer = replace(devices, indices=tuple(range(num_infer)))
    train = replace(devices, indices=tuple(range(num_infer, num_infer + split.trainers)))
    return f"--infer-devices {infer} --train-devices {train}"
