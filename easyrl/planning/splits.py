"""`easyrl plan`: predict the throughput of every split of devices from measured rates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from pydantic import TypeAdapter

from easyrl.config import Config, ConfigError
from easyrl.config.devices import range_words
from easyrl.observe.run_files import RunFiles
from easyrl.planning.rates import Group, MeasuredIteration, MeasuredRun, Rates, fit, measure
from easyrl.planning.simulation import Outcome, simulate

SIMULATED = {
    *("train.prompts_per_iteration", "train.updates_per_iteration", "runtime.schedule"),
    *("train.max_tokens_per_micro_batch", "rollout.max_concurrent_groups"),
}
"""Settings that may differ from the measured ones."""
MAX_SPLITS = 24


class Split(NamedTuple):
    """The prediction for a number of engines and trainers."""

    engines: int
    trainers: int
    tokens_per_second: float
    tokens_per_second_low: float  # 5 %, of the simulated iterations
    tokens_per_second_high: float  # 95 %
    infer_idle: float  # share of the time
    train_idle: float


def predict_splits(run: MeasuredRun, config: Config, num_devices: int) -> list[Split]:
    """Predict the splits of so many devices; of many, every second, third, .... All have the same
    draws of rates and lengths. Raises ConfigError if there is no split."""
    size, train = config.rollout.tensor_parallel_size, config.train
    most = train.prompts_per_iteration // train.updates_per_iteration
    pairs = [
        ((num_devices - num_trainers) // size, num_trainers)
        for num_trainers in range(min(most, num_devices - size), 0, -1)
        if (num_devices - num_trainers) % size == 0
    ]
    if not pairs:
        raise ConfigError(
            f"--devices: expected devices for engines of {size} (rollout.tensor_parallel_size) and "
            f"1 to {most} trainers (prompts per update), got {num_devices}"
        )
    pairs = pairs[:: -(-len(pairs) // MAX_SPLITS)]
    per_draw = train.prompts_per_iteration * config.rollout.num_generations * len(pairs)
    rng, count = np.random.default_rng(0), max(6, min(50, 400_000 // per_draw))  # a few seconds
    draws = [_draw(run, config, rng) for _ in range(count)]
    splits = []
    for pair in pairs:
        outcomes = [simulate(*drawn, config, *pair) for drawn in draws]
        low, high = np.percentile([each.num_tokens / each.seconds for each in outcomes], (5, 95))
        infer, trainer = np.mean([(each.infer_busy, each.train_busy) for each in outcomes], axis=0)
        figures = map(float, (mean_speed(outcomes), low, high, 1 - infer, 1 - trainer))
        splits.append(Split(*pair, *figures))
    return splits


def _draw(run: MeasuredRun, config: Config, rng: np.random.Generator) -> tuple[Rates, list[Group]]:
    """Fit rates to iterations drawn with replacement; draw an iteration's groups from theirs."""
    numbers = rng.integers(len(run.iterations), size=len(run.iterations))
    iterations = [run.iterations[number] for number in numbers]
    groups = [group for each in iterations for group in each.groups]
    num_accepted = sum(group.is_accepted for group in groups)
    count = round(config.train.prompts_per_iteration * len(groups) / max(1, num_accepted))
    drawn = [groups[number] for number in rng.integers(len(groups), size=count)]
    return fit(iterations, run.count("train")), drawn


def mean_speed(iterations: Sequence[Outcome | MeasuredIteration]) -> float:
    """Return the tokens per second of iterations, one after another."""
    return sum(each.num_tokens for each in iterations) / sum(each.seconds for each in iterations)


def read_rates(path: Path) -> MeasuredRun:
    """Read a run's folder or a file of `bench loop`. Raises ConfigError if it has no rates."""
    if path.is_dir():
        run = measure(RunFiles(path).read())
    else:
        try:
            [row] = json.loads(path.read_text())["results"]
            run = TypeAdapter(MeasuredRun).validate_python(row["rates"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = str(error).partition("\n")[0]  # pydantic's has many lines
            raise ConfigError(
                f"'{path}': expected a run's folder, or a file of `easyrl bench loop --json` with "
                f"one model (--model), got another one: {reason}"
            ) from None
    if not run.iterations:
        raise ConfigError(f"'{path}': expected two finished iterations (the first one warms up)")
    return run


def to_text(run: MeasuredRun, splits: Sequence[Split]) -> str:
    """The rates and a table of the splits."""
    rates, speed = fit(run.iterations, run.count("train")), mean_speed(run.iterations)
    names = "step", "token", "prompt", "micro-batch", "trained token", "update", "broadcast"
    of_each = zip(names, (*rates.engine, *rates.trainer, rates.broadcast), strict=True)
    lines = [
        f"measured with {run.count('rollout')}+{run.count('train')} workers: {speed:,.0f} tokens/s",
        "in ms: " + ", ".join(f"{name} {1e3 * seconds:.3g}" for name, seconds in of_each),
        "engines trainers  tokens/s       5 %      95 %  idle: engines trainers",
    ]
    infer, train = (
        {name for worker, name in run.devices.items() if worker.startswith(role)}
        for role in ("rollout", "train")
    )
    shared = infer & train if run.config.devices.threads is None else infer & train - {"cpu"}
    if shared:
        lines.insert(1, "workers shared cores or a device: on their own they are faster")
    for split in splits:
        speeds = split.tokens_per_second, split.tokens_per_second_low, split.tokens_per_second_high
        lines.append(
            f"{split.engines:7}{split.trainers:9}{''.join(f'{speed:10,.0f}' for speed in speeds)}"
            f"{split.infer_idle:15.0%}{split.train_idle:9.0%}"
        )
    return "\n".join(lines)


def flags_of(run: MeasuredRun, split: Split) -> str:
    """Return the options for the split, with devices of the kind that was measured."""
    names, flags, first = list(run.devices.values()), [], 0
    num_infer = split.engines * run.config.rollout.tensor_parallel_size
    for role, name, count in (("infer", names[0], num_infer), ("train", names[-1], split.trainers)):
        devices = range_words(range(first, first + count))
        if (is_ray := "/" in name) or name == "cpu":
            devices = f"{'ray:' * is_ray}{'cpu:' * name.endswith('cpu')}{count}"
        flags.append(f"--{role}-devices {devices}")
        first += count
    return " ".join(flags)
