"""`easyrl plan`: predict the throughput of every split of devices from the metrics of a run.

docs/devices.md ("The fastest split of the devices") has the formula and what it leaves out.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from easyrl.config import ConfigError
from easyrl.config.devices import DeviceSet
from easyrl.config.spec import RunSpec
from easyrl.observe.history import History, read_history

PREFIX = "perf/"  # of the metrics of speed
TIE = 0.05
"""Predictions that differ by less are not told apart: iterations of a run differ by as much."""


class Measured(NamedTuple):
    """A run: medians over the iterations of its newest command, but the first, which warms up."""

    spec: RunSpec
    devices: Sequence[str]  # of the workers, engines first
    engines: int
    trainers: int
    num_tokens: float  # sampled tokens trained per iteration
    seconds: float  # of an iteration, of which the next three are parts that may overlap
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
    lines = _measured_lines(run)

    def seconds(name: str) -> float:
        return float(median(line[f"{PREFIX}{name}_seconds"] for line in lines))

    num_tokens = []
    for line in lines:
        rate = line[f"{PREFIX}tokens_per_second"]
        num_tokens.append(rate * line[f"{PREFIX}iteration_seconds"])
    engines = sum(worker.startswith("rollout") for worker in run.devices)
    return Measured(
        spec=run.spec,
        devices=list(run.devices.values()),
        engines=engines,
        trainers=len(run.devices) - engines,
        num_tokens=median(num_tokens),
        seconds=seconds("iteration"),
        generating=seconds("infer"),
        training=seconds("train"),
        weights=seconds("weights"),
    )


def _measured_lines(run: History) -> list[dict[str, Any]]:
    """Return the metrics of the iterations that count. Raises ConfigError if there are none."""
    num_before = run.state.run.num_iterations if run.state.run else 0  # of earlier commands
    lines = []
    num_done = 0
    for number, line in run.lines.items():
        if number > num_before:
            num_done += 1
        if number > num_before + 1 and f"{PREFIX}iteration_seconds" in line:
            lines.append(line)
    if not lines or not run.devices:
        raise ConfigError(
            f"'{run.folder}': expected 2 iterations of its newest command (one warms up), got "
            f"{num_done}; run or resume it with more --iterations"
        )
    return lines


def predict_splits(run: Measured, num_devices: int) -> list[Split]:
    """Predict all splits of so many devices. Raises ConfigError if there is none."""
    size = run.spec.engine.tensor_parallel_size
    most_trainers = run.spec.batches.groups_per_update
    splits = []
    for engines in range(1, (num_devices - 1) // size + 1):
        trainers = num_devices - engines * size
        if trainers <= most_trainers:
            splits.append(_predict(run, engines, trainers))
    if not splits:
        raise ConfigError(
            f"--devices: expected devices for engines of {size} (rollout.tensor_parallel_size) and "
            f"1 to {most_trainers} trainers (prompts per update), got {num_devices}"
        )
    return splits


def _predict(run: Measured, engines: int, trainers: int) -> Split:
    schedule = run.spec.schedule
    num_busy = min(engines, schedule.prompts_per_iteration)  # the others have no prompt
    generating = run.generating * run.engines / num_busy
    training = run.training * run.trainers / trainers
    if schedule.schedule == "periodic":  # generating and training overlap
        measured = max(run.generating, run.training)
        predicted = max(generating, training)
    else:
        measured = run.generating + run.training
        predicted = generating + training
    rest = max(0.0, run.seconds - measured - run.weights)  # such as the wait for the first group
    seconds = predicted + run.weights + rest
    return Split(
        engines,
        trainers,
        tokens_per_second=run.num_tokens / seconds,
        infer_idle=1 - generating * num_busy / engines / seconds,
        train_idle=1 - training / seconds,
    )


def find_ties(splits: Sequence[Split]) -> list[Split]:
    """Return the splits that are about as fast as the fastest, with it."""
    fastest = max(split.tokens_per_second for split in splits)
    return [split for split in splits if split.tokens_per_second >= (1 - TIE) * fastest]


def verdict(run: Measured, splits: Sequence[Split]) -> str:
    """Name the fastest split, and those that the run cannot tell from it."""
    best = max(splits, key=lambda split: split.tokens_per_second)
    text = f"fastest: {flags_of(run, best)}, {best.tokens_per_second:,.0f} tokens/s"
    ties = find_ties(splits)
    if len(ties) == 1:
        return text
    names = ", ".join(f"{split.engines}+{split.trainers}" for split in ties)
    prompts = run.spec.schedule.prompts_per_iteration
    return (
        f"{text}\nbut {len(ties)} splits are within {TIE:.0%} of each other ({names}): the run was "
        "too small to tell which is the fastest. Measure one with more "
        f"train.prompts_per_iteration (now {prompts}) or longer completions"
    )


def to_text(run: Measured, splits: Sequence[Split]) -> str:
    """Return what was measured, and a table of the splits."""
    speed = run.num_tokens / run.seconds
    lines = [
        f"measured with {run.engines}+{run.trainers} workers: {speed:,.0f} tokens/s; seconds: "
        f"generating {run.generating:.3g}, training {run.training:.3g}, weights {run.weights:.3g}, "
        f"iteration {run.seconds:.3g}"
    ]
    share_devices = run.devices[0] == run.devices[-1]
    if share_devices and run.spec.devices.threads is None:
        lines.append("workers shared cores or a device: on their own they are faster")
    lines.append("engines trainers  tokens/s  idle: engines trainers")
    row = "{:7}{:9}{:10,.0f}{:15.0%}{:9.0%}"
    lines += [row.format(*split) for split in splits]
    return "\n".join(lines)


def flags_of(run: Measured, split: Split) -> str:
    """Return the options for the split, with devices of the kind that was measured."""
    name = run.devices[0]  # "cpu", "cuda:0,1", or "10.0.0.2/cpu" on a cluster
    num_infer = split.engines * run.spec.engine.tensor_parallel_size
    all_devices = DeviceSet(
        "cpu" if name.endswith("cpu") else "accelerator",
        tuple(range(num_infer + split.trainers)),
        is_ray="/" in name,
    )
    infer = replace(all_devices, indices=all_devices.indices[:num_infer])
    train = replace(all_devices, indices=all_devices.indices[num_infer:])
    return f"--infer-devices {infer} --train-devices {train}"
