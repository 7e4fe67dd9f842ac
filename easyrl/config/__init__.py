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
from easyrl.config.changed_keys import update_old_keys
from easyrl.config.data import DataConfig
from easyrl.config.devices import DevicesConfig
from easyrl.config.eval import EvalConfig
from easyrl.config.model import ModelConfig
from easyrl.config.reward import RewardConfig
from easyrl.config.rollout import RolloutConfig
from easyrl.config.runtime import OutputConfig, RuntimeConfig
from easyrl.config.text import ConfigError, Section
from easyrl.config.train import TrainConfig

__all__ = ["Config", "ConfigError", "load_config", "settings_markdown", "to_commented_yaml"]


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

    @model_validator(mode="before")
    @classmethod
    def _accept_old_keys(cls, values: Any) -> Any:
        if isinstance(values, dict):
            values = {name: dict(v) if isinstance(v, dict) else v for name, v in values.items()}
            for warning in update_old_keys(values):
                print(f"warning: {warning}", file=sys.stderr)
        return values

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        updates, prompts = self.train.updates_per_iteration, self.train.prompts_per_iteration
        longest, budget = self.max_sequence_length, self.train.max_tokens_per_micro_batch
        runtime, problems = self.runtime, []
        must_hold_all = runtime.schedule == "sync" or runtime.deterministic or updates > 1
        if self.ring_slots < prompts and (must_hold_all or self.algorithm.dynamic_sampling):
            problems.append(
                f"rollout.ring_slots: expected null or at least {prompts}, as all groups of an "
                "iteration may wait in the ring with runtime.schedule=sync, runtime.deterministic, "
                "train.updates_per_iteration over 1 or algorithm.dynamic_sampling, got "
                f"{self.ring_slots}"
            )
        if prompts % updates:
            problems.append(
                f"train.updates_per_iteration: expected a divisor of {prompts} "
                f"(train.prompts_per_iteration), got {updates}"
            )
        if longest > budget:
            problems.append(
                f"train.max_tokens_per_micro_batch: expected at least {longest}, one rollout "
                f"(data.max_prompt_length + rollout.max_completion_length), got {budget}"
            )
        if runtime.resume == "auto" and self.output.dir is None:
            problems.append("runtime.resume: expected output.dir (--output) too with auto")
        if problems:
            raise ValueError("\n".join(problems))
        return self


def load_config(
    file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    words: Sequence[str] = (),
) -> Config:
    """Merge defaults < `file` < `flags` < `words`.

    `flags` are named flags by `section.key`; None means that the flag was not given. `words` are
    `section.key=value`. Raises ConfigError with one line for every problem found.
    """
    values = config_text.read_file(file) if file is not None else {}
    for name, value in (flags or {}).items():
        if value is not None:
            config_text.put(values, name, value)
    problems: list[str] = []
    for word in words:
        try:
            config_text.put(values, *config_text.read_word(Config, word))
        except ConfigError as error:
            problems.append(str(error))
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        problems += config_text.problems(Config, error)
    if problems:
        source = [f"(the config file was {file})"] if file is not None else []
        raise ConfigError("\n".join(problems + source))
    return config


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
