"""`easyrl plan`: predict the throughput of every split of devices from measured rates.

    RUN, or FILE of `easyrl bench loop --json` ──► rates ──simulate──► splits, the best one

Each split is simulated with the same draws of rates and lengths (`runtime.simulation`), so that
splits are compared under equal conditions. With more than MAX_SPLITS splits some are simulated
first, then those near the fastest.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from easyrl.config import Config, ConfigError, load_config
from easyrl.config.devices import range_words
from easyrl.formatting import counted
from easyrl.observe.trace import FILE_NAME, RunFiles
from easyrl.runtime.rates import MeasuredIteration, Recorder, fit
from easyrl.runtime.simulation import Scenario, draw_scenarios, mean_speed, simulate

MAX_SPLITS = 24
NUM_COMPLETIONS = 400_000
"""About as many are simulated in all: a few seconds."""
MIN_DRAWS, MAX_DRAWS = 6, 50
INTERVAL = (5, 95)  # percentiles
BAR = 14  # characters


@dataclass(frozen=True, slots=True)
class Split:
    """The prediction for a number of engines and trainers."""

    engines: int
    trainers: int
    tokens_per_second: float
    tokens_per_second_low: float
    tokens_per_second_high: float
    infer_idle: float  # share of the time
    train_idle: float
    seconds: Sequence[float]  # of each simulated iteration


@dataclass(frozen=True, slots=True)
class SplitPlan:
    about: str
    best: Split
    confidence: float
    """Share of the simulated iterations in which `best` is the fastest, or less than 1 % slower."""
    splits: Sequence[Split]


def make_plan(
    paths: Sequence[Path], num_devices: int, words: Sequence[str] = (), model: str | None = None
) -> SplitPlan:
    """Predict the splits of so many devices. `words` change the settings of the first source,
    `model`: that of a benchmark. Raises ValueError for a source without rates."""
    sources = [_read_run(path) if path.is_dir() else _read_bench(path, model) for path in paths]
    config = load_config(None, sources[0][0], words)
    size, train = config.rollout.tensor_parallel_size, config.train
    most = train.prompts_per_iteration // train.updates_per_iteration
    pairs = [
        ((num_devices - num_trainers) // size, num_trainers)
        for num_trainers in range(min(most, num_devices - size), 0, -1)
        if (num_devices - num_trainers) % size == 0
    ]
    if not pairs:
        raise ConfigError(
            f"--devices: expected a number that makes engines of {size} "
            f"(rollout.tensor_parallel_size) and 1 to {most} trainers (train.prompts_per_iteration "
            f"/ train.updates_per_iteration), got {num_devices}"
        )
    iterations = [iteration for _, of_source in sources for iteration in of_source]
    per_draw = train.prompts_per_iteration * config.rollout.num_generations
    per_draw *= min(len(pairs), 2 * MAX_SPLITS)
    count = max(MIN_DRAWS, min(MAX_DRAWS, NUM_COMPLETIONS // per_draw))
    splits = _search(pairs, draw_scenarios(iterations, config, count), config)
    best = max(splits, key=lambda split: split.tokens_per_second)
    fastest = np.min([split.seconds for split in splits], axis=0)
    confidence = float((np.array(best.seconds) <= 1.01 * fastest).mean())
    lines = [_describe(path, found) for path, (_, found) in zip(paths, sources, strict=True)]
    about = "\n".join([*lines, *_describe_rates(iterations, config)])
    return SplitPlan(about, best, confidence, splits)


def _search(
    pairs: Sequence[tuple[int, int]], scenarios: Sequence[Scenario], config: Config
) -> list[Split]:
    """Simulate all splits, or first some of them and then those near the fastest."""
    found: dict[int, Split] = {}

    def simulate_at(numbers: Sequence[int]) -> int:
        for number in {*numbers} - {*found}:
            found[number] = _predict(*pairs[number], scenarios, config)
        return max(found, key=lambda number: found[number].tokens_per_second)

    last = len(pairs) - 1
    step = max(1, last // (MAX_SPLITS // 2)) if last >= MAX_SPLITS else 1
    best = simulate_at([*range(0, last, step), last])
    while step > max(1, last // 100):
        step = -(-step // 3)
        near = (best + k * step for k in range(-2, 3))
        best = simulate_at([number for number in near if 0 <= number <= last])
    return [found[number] for number in sorted(found)]


def _predict(
    num_engines: int, num_trainers: int, scenarios: Sequence[Scenario], config: Config
) -> Split:
    outcomes = [simulate(*each, config, num_engines, num_trainers) for each in scenarios]
    busy = np.mean([(each.infer_busy, each.train_busy) for each in outcomes], axis=0)
    ends = np.percentile([each.num_tokens / each.seconds for each in outcomes], INTERVAL)
    (low, high), (infer_idle, train_idle) = ends.tolist(), (1.0 - busy).tolist()
    seconds, speed = [each.seconds for each in outcomes], mean_speed(outcomes)
    return Split(num_engines, num_trainers, speed, low, high, infer_idle, train_idle, seconds)


# -- sources --------------------------------------------------------------------------------------

Source = tuple[dict[str, Any], Sequence[MeasuredIteration]]
"""Settings, and the iterations that were measured with them."""


def _read_run(folder: Path) -> Source:
    recorder = Recorder()
    for event in RunFiles(folder).read():
        recorder(event)
    if not recorder.iterations:
        raise ValueError(
            f"'{folder}': expected a run with at least two finished iterations in {FILE_NAME} (the "
            "first one warms up), written by this version of EasyRL, got none to measure"
        )
    return recorder.config.model_dump(mode="json"), recorder.iterations


def _read_bench(file: Path, model: str | None) -> Source:
    expected = f"'{file}': expected a run's folder, or a file of `easyrl bench loop --json`"
    try:
        by_model = {row["model"]: row["rates"] for row in json.loads(file.read_text())["results"]}
    except OSError as error:
        raise ValueError(f"{expected}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{expected}, got another one") from None
    if len(by_model) == 1:
        model = model or next(iter(by_model))
    if model not in by_model:
        raise ValueError(f"--model: expected {' or '.join(by_model)}, got {model or 'none'}")
    rates = by_model[model]
    return rates["config"], [MeasuredIteration.from_json(each) for each in rates["iterations"]]


# -- the screen -----------------------------------------------------------------------------------


def _describe(path: Path, iterations: Sequence[MeasuredIteration]) -> str:
    first, count = iterations[0], counted(len(iterations), "iteration")
    return (
        f"rates of {path}: {count} with {first.num_engines}+{first.num_trainers} workers, "
        f"{mean_speed(iterations):,.0f} tokens/s"
    )


def _describe_rates(iterations: Sequence[MeasuredIteration], config: Config) -> list[str]:
    rates = fit(iterations)
    names = "a step", "a token", "a prompt", "a micro-batch", "a token", "an update"
    of_each = [
        f"{1e3 * seconds:.3g} ms {name}"
        for name, seconds in zip(names, (*rates.engine, *rates.trainer), strict=True)
    ]
    lines = [
        f"engine: {', '.join(of_each[:3])}; trainer: {', '.join(of_each[3:])}",
        f"weights: {1e3 * rates.broadcast:.3g} ms from one device to another; controller: "
        f"{1e3 * rates.message:.3g} ms a message",
    ]
    if all(each.num_trainers == 1 for each in iterations):
        lines.append(
            "assumed, as no run has several trainers: their communication takes "
            f"{1e3 * rates.communication:.3g} ms a micro-batch, three times the weights"
        )
    devices = config.devices
    if devices.infer == devices.train and "cpu" not in (devices.infer or "cpu"):
        lines.append("measured on one device for both: on their own, workers are faster")
    elif devices.threads is None and "cpu" in (devices.infer or "cpu"):
        lines.append("on a CPU: workers that share cores (devices.threads=null) measure too much")
    return lines


def to_screen(plan: SplitPlan, num_devices: int) -> RenderableType:
    """The rates, a table with bars, and the best split."""
    best, highest = plan.best, plan.best.tokens_per_second
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    names = "engines", "trainers", "tokens/s", "5 %", "95 %", "engines\nidle", "trainers\nidle", ""
    for name in names:
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for split in plan.splits:
        speeds = split.tokens_per_second, split.tokens_per_second_low, split.tokens_per_second_high
        table.add_row(
            *map(str, (split.engines, split.trainers)),
            *(f"{speed:,.0f}" for speed in speeds),
            *(f"{idle:.0%}" for idle in (split.infer_idle, split.train_idle)),
            "█" * max(1, round(BAR * speeds[0] / highest)),
            style="bold green" if split is best else "",
        )
    num_infer = num_devices - best.trainers
    end = (
        f"fastest: --infer-devices {range_words(range(num_infer))} --train-devices "
        f"{range_words(range(num_infer, num_devices))}, {highest:,.0f} tokens/s (within 1 % of the "
        f"best in {plan.confidence:.0%} of {len(best.seconds)} simulated iterations)"
    )
    return Lines(Text(plan.about), table, Text(end))
