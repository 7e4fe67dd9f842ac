"""Every setting of a run, once, with its meaning, unit and default.

`load_config` makes a `Config` from four layers; the later wins:

    defaults  <  --config FILE.yaml  <  named flags  <  section.key=value words

A `Config` is checked when it is made. The docstrings of the keys are the comments that
`easyrl config` prints, and the text of docs/settings.md.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ValidationError, model_validator

from easyrl.config import text as config_text
from easyrl.config.algorithm import AlgorithmConfig
from easyrl.config.changed_keys import MERGED, REMOVED, RENAMED, merge_old_keys
from easyrl.config.data import DataConfig
from easyrl.config.devices import DevicesConfig, DeviceSet, check_disjoint, parse_device_set
from easyrl.config.eval import EvalConfig
from easyrl.config.model import AttentionMode, DType, LoraConfig, ModelConfig
from easyrl.config.reward import RewardConfig
from easyrl.config.rollout import RolloutConfig
from easyrl.config.runtime import OutputConfig, RuntimeConfig
from easyrl.config.text import ConfigError, Scalar, Section
from easyrl.config.train import TrainConfig
from easyrl.formatting import counted

__all__ = [
    "AttentionMode",
    "Config",
    "ConfigError",
    "DType",
    "DeviceSet",
    "LoraConfig",
    "check_disjoint",
    "load_config",
    "parse_device_set",
    "settings_markdown",
    "to_commented_yaml",
]


class Config(Section):
    """All sections."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    devices: DevicesConfig = DevicesConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    output: OutputConfig = OutputConfig()

    @property
    def learning_rate(self) -> float:
        """Peak learning rate, with its default."""
        if self.train.learning_rate is not None:
            return self.train.learning_rate
        is_built_in = self.model.path in ("tiny", "tiny-countdown")
        if self.model.lora.rank is not None:
            return 3e-3 if is_built_in else 1e-5
        return 3e-4 if is_built_in else 1e-6

    @property
    def importance_sampling_correction(self) -> Literal["none", "truncate", "mask"]:
        """`algorithm.importance_sampling_correction` with `auto` resolved."""
        chosen = self.algorithm.importance_sampling_correction
        if chosen != "auto":
            return chosen
        return "none" if self.model.dtype == "float32" else "truncate"

    @property
    def max_sequence_length(self) -> int:
        """Longest prompt + completion in tokens."""
        return self.data.max_prompt_length + self.rollout.max_completion_length

    @property
    def ring_slots(self) -> int:
        """Slots of the ring buffer, with its default."""
        return self.rollout.ring_slots or self.train.prompts_per_iteration

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        problems = [
            *self._ring_problems(),
            *self._train_problems(),
            *self.reward.problems(),
        ]
        if self.reward.weights is not None:
            num_functions = len(self.reward.functions or ["the task's own"])
            if len(self.reward.weights) != num_functions:
                problems.append(
                    "reward.weights: expected one for each of "
                    f"{counted(num_functions, 'reward function')}, got {self.reward.weights}"
                )
        if self.runtime.resume == "auto" and self.output.dir is None:
            problems.append("runtime.resume: auto needs the run folder: set output.dir (--output)")
        if self.devices.infer is not None and self.devices.train is not None:
            try:
                check_disjoint(
                    parse_device_set(self.devices.infer, "devices.infer"),
                    parse_device_set(self.devices.train, "devices.train"),
                )
            except ConfigError as overlap:
                problems.append(str(overlap))
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _ring_problems(self) -> list[str]:
        """A ring smaller than an iteration deadlocks where all groups may have to wait in it."""
        needed = self.train.prompts_per_iteration
        reasons = {
            "runtime.schedule=sync": self.runtime.schedule == "sync",
            "runtime.deterministic=true": self.runtime.deterministic,
            "train.updates_per_iteration": self.train.updates_per_iteration > 1,
            "algorithm.dynamic_sampling=true": self.algorithm.dynamic_sampling,
        }
        return [
            f"rollout.ring_slots: expected at least {needed} (train.prompts_per_iteration) or "
            f"null, because with {reason} all groups of an iteration may wait in the ring, got "
            f"{self.ring_slots}"
            for reason, holds in reasons.items()
            if holds and self.ring_slots < needed
        ][:1]

    def _train_problems(self) -> list[str]:
        problems = []
        updates, prompts = self.train.updates_per_iteration, self.train.prompts_per_iteration
        if prompts % updates:
            problems.append(
                f"train.updates_per_iteration: expected a divisor of {prompts} "
                f"(train.prompts_per_iteration), got {updates}"
            )
        longest, budget = self.max_sequence_length, self.train.max_tokens_per_micro_batch
        if longest > budget:
            problems.append(
                f"train.max_tokens_per_micro_batch: expected at least {longest}, the length of one "
                f"rollout (data.max_prompt_length + rollout.max_completion_length), got {budget}"
            )
        return problems


def load_config(
    file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    words: Sequence[str] = (),
) -> Config:
    """Merge defaults < `file` < `flags` < `words`.

    `flags` are named flags by `section.key`; None means that the flag was not given. `words` are
    `section.key=value`. Raises ConfigError with one line for every problem found.
    """
    layers: list[tuple[Path | None, str | tuple[str, Any]]] = []
    if file is not None:
        layers += [(file, pair) for pair in config_text.read_file(Config, file)]
    layers += [(None, pair) for pair in (flags or {}).items() if pair[1] is not None]
    layers += [(None, word) for word in words]
    problems: list[str] = []
    values: dict[str, Any] = {}
    for source, layer in layers:
        try:
            name, value = config_text.read_word(Config, layer) if isinstance(layer, str) else layer
            if (current := _current_name(name, value, source)) is None:
                continue
            if current in MERGED:
                value = _text_of(current, value)
            else:
                value = config_text.convert(Config, current, value)
        except ConfigError as error:
            problems.append(str(error))
            continue
        *path, key = current.split(".")
        section = values
        for part in path:
            section = section.setdefault(part, {})
        section[key] = value
    try:
        for warning in merge_old_keys(values):
            print(f"warning: {warning}", file=sys.stderr)
        config = Config.model_validate(values)
    except ValidationError as error:
        problems += config_text.problems(error)
    except ValueError as error:
        problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def _current_name(name: str, value: Any, file: Path | None) -> str | None:
    """Return the key's name in this release; None where it is gone and has its old default.

    Raises ConfigError for a removed key with another value.
    """
    changed = REMOVED.get(name) or RENAMED.get(name)
    if changed is None:
        return name
    got = config_text.plain(value)
    if got == changed.default or (isinstance(value, Scalar) and value.text == changed.default):
        return None
    if name in REMOVED:
        line = f"; delete the line in {file}" if file else ""
        raise ConfigError(f"{name}: removed in easyrl 0.2: {REMOVED[name].reason}{line}")
    print(f"warning: {name} is now {RENAMED[name].name}", file=sys.stderr)
    return RENAMED[name].name


def _text_of(name: str, value: Any) -> str | None:
    if isinstance(value, Scalar):
        value = None if value.value is None else value.text
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{name}: expected a string, got {config_text.plain(value)!r}")
    return value


def to_commented_yaml(config: Config, *, only_changes: bool = False) -> str:
    """Print the config as YAML with comments, which loads again to an equal config.

    `only_changes`: only the keys whose value is not the default; a comment gives the default.
    """
    return config_text.commented_yaml(config, Config() if only_changes else None)


def settings_markdown() -> str:
    """Print docs/settings.md."""
    return (
        "# Settings\n\nEvery key of a run, printed by `easyrl config --markdown`. Set one as\n"
        "`section.key=value` on the command line, or in a YAML file given with `--config`;\n"
        "`easyrl config` prints such a file with every key.\n" + config_text.markdown(Config())
    )
