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

from easyrl import events
from easyrl.config import Config, ConfigError, load_config
from easyrl.config.devices import DeviceSet, parse_device_set, range_words
from easyrl.formatting import counted
from easyrl.observe.trace import FILE_NAME, RunFiles
from easyrl.runtime.rates import MeasuredIteration, Recorder, fit, with_measured_groups
from easyrl.runtime.simulation import Scenario, compare, draw_scenarios, mean_speed, simulate

SIMULATED = {
    *("rollout.num_generations", "rollout.max_concurrent_groups"),
    *("train.prompts_per_iteration", "train.updates_per_iteration"),
    *("train.max_tokens_per_micro_batch", "runtime.schedule", "runtime.deterministic"),
}
"""Settings that may differ from the measured ones."""
FEW_ITERATIONS = 4

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


Prediction = tuple[Split, np.ndarray[Any, Any]]
"""A split, and the seconds of each simulated iteration."""


@dataclass(frozen=True, slots=True)
class SplitPlan:
    about: str
    best: Split
    flags: str  # of the command, for `best`
    num_simulated: int  # iterations, of each split
    confidence: float
    """Share of the simulated iterations in which `best` is the fastest, or less than 1 % slower."""
    splits: Sequence[Split]
    notes: Sequence[str]


def make_plan(
    paths: Sequence[Path], num_devices: int, words: Sequence[str] = (), model: str | None = None
) -> SplitPlan:
    """Predict the splits of so many devices. `words` change settings of SIMULATED, `model`: that of
    a benchmark. Raises ConfigError for sources without rates, or of several models."""
    sources = [_read_run(path) if path.is_dir() else _read_bench(path, model) for path in paths]
    config = load_config(None, sources[0].config.model_dump(mode="json"), words)
    for word in words:
        if word.partition("=")[0] not in SIMULATED:
            raise ConfigError(
                f"{word}: expected a setting that a plan simulates ({', '.join(sorted(SIMULATED))})"
                "; for any other, measure a run that has it"
            )
    if len(kinds := dict.fromkeys(source.kind for source in sources)) > 1:
        raise ConfigError(
            "RATES: expected sources with one model, data type, engine and tensor parallel size, "
            f"got {' and '.join(kinds)}"
        )
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
    iterations = [iteration for source in sources for iteration in source.iterations]
    per_draw = train.prompts_per_iteration * config.rollout.num_generations
    per_draw *= min(len(pairs), 2 * MAX_SPLITS)
    count = max(MIN_DRAWS, min(MAX_DRAWS, NUM_COMPLETIONS // per_draw))
    predictions = _search(pairs, draw_scenarios(iterations, config, count), config)
    splits = [split for split, _ in predictions]
    best, seconds = max(predictions, key=lambda found: found[0].tokens_per_second)
    fastest = np.min([of_split for _, of_split in predictions], axis=0)
    confidence = float((seconds <= 1.01 * fastest).mean())
    lines = [_describe(path, source) for path, source in zip(paths, sources, strict=True)]
    about = "\n".join([*lines, *_describe_rates(iterations, config)])
    notes = []
    if len(iterations) < FEW_ITERATIONS:
        few = counted(len(iterations), "iteration")
        notes.append(f"only {few} measured: rates are uncertain")
    if num_devices - size > most:
        prompts = "train.prompts_per_iteration / train.updates_per_iteration"
        notes.append(f"more than {most} trainers are not possible ({prompts})")
    if best.tokens_per_second < 0.95 * max(mean_speed(source.iterations) for source in sources):
        notes.append("slower than measured: take fewer devices or more train.prompts_per_iteration")
    flags = _flags(best, num_devices, config)
    return SplitPlan(about, best, flags, count, confidence, splits, notes)


def _flags(best: Split, num_devices: int, config: Config) -> str:
    """Return the options for these devices, of the kind that was measured."""
    num_infer = num_devices - best.trainers

    def devices(measured: str | None, numbers: range) -> str:
        found = parse_device_set(measured or "cpu")
        if found.is_ray or found.kind == "cpu":
            return str(DeviceSet(found.kind, tuple(numbers), found.is_ray))
        return range_words(numbers)

    infer = devices(config.devices.infer, range(num_infer))
    train = devices(config.devices.train, range(num_infer, num_devices))
    return f"--infer-devices {infer} --train-devices {train}"


def _search(
    pairs: Sequence[tuple[int, int]], scenarios: Sequence[Scenario], config: Config
) -> list[Prediction]:
    """Simulate all splits. Of many, first simulate some, then those on both sides of the fastest,
    at half the distance each time, until its neighbours are slower."""
    found: dict[int, Prediction] = {}
    step = -(-len(pairs) // MAX_SPLITS)
    numbers = list(range(0, len(pairs), step))
    while numbers:
        for number in numbers:
            found[number] = _predict(*pairs[number], scenarios, config)
        best = max(found, key=lambda number: found[number][0].tokens_per_second)
        step = -(-step // 2)
        near = {best - step, best + step} - {*found}
        numbers = [number for number in near if 0 <= number < len(pairs)]
    return [found[number] for number in sorted(found)]


def _predict(
    num_engines: int, num_trainers: int, scenarios: Sequence[Scenario], config: Config
) -> Prediction:
    outcomes = [simulate(*each, config, num_engines, num_trainers) for each in scenarios]
    busy = np.mean([(each.infer_busy, each.train_busy) for each in outcomes], axis=0)
    ends = np.percentile([each.num_tokens / each.seconds for each in outcomes], INTERVAL)
    (low, high), (infer_idle, train_idle) = ends.tolist(), (1.0 - busy).tolist()
    speed = mean_speed(outcomes)
    split = Split(num_engines, num_trainers, speed, low, high, infer_idle, train_idle)
    return split, np.array([each.seconds for each in outcomes])


# -- sources --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Source:
    """Settings, and the iterations that were measured with them."""

    config: Config
    iterations: Sequence[MeasuredIteration]
    model: str

    @property
    def kind(self) -> str:
        """Model, data type, engine and tensor parallel size: rates of another kind differ."""
        rollout = self.config.rollout
        kind = f"{self.model} ({self.config.model.dtype}, {rollout.engine}"
        return f"{kind}, {rollout.tensor_parallel_size})"


def _read_run(folder: Path) -> Source:
    recorder, num_finished = Recorder(), 0
    for event in RunFiles(folder).read():
        recorder(event)
        num_finished += isinstance(event, events.IterationFinished)
    if not recorder.iterations:
        raise ConfigError(
            f"'{folder}': expected at least two finished iterations in {FILE_NAME}, of which the "
            f"first one warms up, with all reports of the workers, got {num_finished}"
        )
    config = with_measured_groups(recorder.config, recorder.iterations)
    return Source(config, recorder.iterations, Path(config.model.path).name)


def _read_bench(file: Path, model: str | None) -> Source:
    expected = f"'{file}': expected a run's folder, or a file of `easyrl bench loop --json`"
    try:
        by_model = {
            row["model"]: Source(
                load_config(None, row["rates"]["config"]),
                [MeasuredIteration.from_json(each) for each in row["rates"]["iterations"]],
                row["model"],
            )
            for row in json.loads(file.read_text())["results"]
            if row["rates"]["iterations"]
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{expected}, got another one: {error}") from None
    if not by_model:
        raise ConfigError(f"{expected}, got one without measured iterations")
    if len(by_model) == 1:
        model = model or next(iter(by_model))
    if model not in by_model:
        raise ConfigError(f"--model: expected {' or '.join(by_model)}, got {model or 'none'}")
    return by_model[model]


# -- the screen -----------------------------------------------------------------------------------


def _describe(path: Path, source: Source) -> str:
    iterations = source.iterations
    first, count = iterations[0], counted(len(iterations), "iteration")
    predicted = compare(iterations, source.config)["predicted_tokens_per_second"]
    return (
        f"rates of {path}: {count} with {first.num_engines}+{first.num_trainers} workers, "
        f"{mean_speed(iterations):,.0f} tokens/s"
        + (f" ({predicted:,.0f} predicted from half of them)" if predicted else "")
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
            f"{1e3 * rates.communication:.3g} ms a micro-batch, three weight broadcasts"
        )
    devices = config.devices
    if devices.threads is None and "cpu" in (devices.infer or "cpu"):
        lines.append("workers shared CPU cores: for times of their own, measure a run with "
                     "devices.threads=1")  # fmt: skip
    elif devices.infer == devices.train:
        lines.append("measured on one device for both: on their own, workers are faster")
    return lines


def to_screen(plan: SplitPlan) -> RenderableType:
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
    end = (
        f"fastest: {plan.flags}, {highest:,.0f} tokens/s (within 1 % of the best in "
        f"{plan.confidence:.0%} of {plan.num_simulated} simulated iterations)"
    )
    notes = [Text(f"note: {note}") for note in plan.notes]
    return Lines(Text(plan.about), table, *notes, Text(end))
