"""All settings of a run: the sections, what holds between them, and the names of the keys."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import model_validator

from easyrl.config.algorithm import AlgorithmConfig
from easyrl.config.data import DataConfig
from easyrl.config.devices import DevicesConfig
from easyrl.config.eval import EvalConfig
from easyrl.config.model import BUILT_IN_MODELS, LoraConfig, ModelConfig
from easyrl.config.reward import JudgeConfig, RewardConfig
from easyrl.config.rollout import RolloutConfig
from easyrl.config.runtime import OutputConfig, RuntimeConfig
from easyrl.config.section import Mark, Section
from easyrl.config.train import TrainConfig

MIN_TOKENS_PER_MICRO_BATCH = 4096  # where `train.max_tokens_per_micro_batch` is null


class Config(Section):
    """All sections. The values that a run uses where a key is null or `auto` are in its `RunSpec`
    (`easyrl.runtime.resolve`)."""

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
        """`train.learning_rate`, or its default for the model."""
        if self.train.learning_rate is not None:
            return self.train.learning_rate
        is_built_in = self.model.path in BUILT_IN_MODELS
        if self.model.lora.rank is not None:
            return 3e-3 if is_built_in else 1e-5
        return 3e-4 if is_built_in else 1e-6

    @property
    def importance_sampling_correction(self) -> Literal["none", "truncate", "mask"]:
        """`algorithm.importance_sampling_correction`; `auto` follows from `model.dtype`."""
        chosen = self.algorithm.importance_sampling_correction
        if chosen != "auto":
            return chosen
        return "none" if self.model.dtype == "float32" else "truncate"

    @property
    def max_sequence_length(self) -> int:
        """Most tokens of a prompt with a completion."""
        return self.data.max_prompt_length + self.rollout.max_completion_length

    @property
    def ring_slots(self) -> int:
        """`rollout.ring_slots`, or its default: all groups of an iteration."""
        return self.rollout.ring_slots or self.train.prompts_per_iteration

    @property
    def max_tokens_per_micro_batch(self) -> int:
        """`train.max_tokens_per_micro_batch`, or its default: room for one rollout at least."""
        given = self.train.max_tokens_per_micro_batch
        return given or max(MIN_TOKENS_PER_MICRO_BATCH, self.max_sequence_length)

    @model_validator(mode="after")
    def _ring_holds_what_may_wait(self) -> Self:
        all_may_wait = (
            self.runtime.schedule == "sync"
            or self.runtime.deterministic
            or self.train.updates_per_iteration > 1
            or self.algorithm.dynamic_sampling
        )
        num_groups = self.train.prompts_per_iteration
        if all_may_wait and self.ring_slots < num_groups:
            raise ValueError(
                f"rollout.ring_slots: expected null or at least {num_groups}, as all groups of an "
                "iteration may wait in the ring with runtime.schedule=sync, runtime.deterministic, "
                "train.updates_per_iteration over 1 or algorithm.dynamic_sampling, got "
                f"{self.ring_slots}"
            )
        return self

    @model_validator(mode="after")
    def _batches_fit(self) -> Self:
        num_prompts = self.train.prompts_per_iteration
        num_updates = self.train.updates_per_iteration
        if num_prompts % num_updates:
            raise ValueError(
                f"train.updates_per_iteration: expected a divisor of {num_prompts} "
                f"(train.prompts_per_iteration), got {num_updates}"
            )
        longest = self.max_sequence_length
        budget = self.max_tokens_per_micro_batch
        if longest > budget:
            raise ValueError(
                f"train.max_tokens_per_micro_batch: expected null or at least {longest}, one "
                f"rollout (data.max_prompt_length + rollout.max_completion_length), got {budget}"
            )
        return self

    @model_validator(mode="after")
    def _keys_of_the_runtime_agree(self) -> Self:
        runtime = self.runtime
        if runtime.resume == "auto" and self.output.dir is None:
            raise ValueError("runtime.resume: expected output.dir (--output) too with auto")
        if runtime.autoscale and (runtime.deterministic or self.devices.spare is None):
            raise ValueError(
                "runtime.autoscale: expected false without devices.spare (--spare-devices) or with "
                "runtime.deterministic, got true"
            )
        episode_timeout = self.rollout.episode_timeout_seconds
        if runtime.deterministic and episode_timeout is not None:
            raise ValueError(
                "rollout.episode_timeout_seconds: expected null with runtime.deterministic, got "
                f"{episode_timeout:g}"
            )
        return self

    @model_validator(mode="after")
    def _training_is_possible(self) -> Self:
        algorithm = self.algorithm
        is_unused = algorithm.teacher is None or self.rollout.has_environments
        if algorithm.teacher_prompt is not None and is_unused:
            raise ValueError(
                "algorithm.teacher_prompt: expected null without algorithm.teacher, and with "
                f"rollout.environment or rollout.tools, got {algorithm.teacher_prompt!r}"
            )
        if self.runtime.deterministic and self.train.compile:
            raise ValueError("train.compile: expected false with runtime.deterministic, got true")
        return self


SECTIONS: dict[str, Any] = {
    "model": ModelConfig,
    "model.lora": LoraConfig,
    "data": DataConfig,
    "reward": RewardConfig,
    "reward.judge": JudgeConfig,
}
SECTIONS |= {name: field.annotation for name, field in Config.model_fields.items()}
"""All sections by their names, each before those inside it."""


def _all_keys() -> dict[str, Any]:
    keys = {}
    for section_name, section in SECTIONS.items():
        for key, field in section.model_fields.items():
            name = f"{section_name}.{key}"
            if name not in SECTIONS:
                keys[name] = field
    return keys


KEYS = _all_keys()
"""Fields by the full names of their keys, as `model.lora.rank`."""
OPTIONS = {
    "model": "model.path",
    "dataset": "data.dataset",
    "reward": "reward.functions",
    "environment": "rollout.environment",
    "agent": "rollout.agent",
    "infer_devices": "devices.infer",
    "train_devices": "devices.train",
    "spare_devices": "devices.spare",
    "ray_address": "devices.ray_address",
    "output": "output.dir",
    "iterations": "train.iterations",
    "seed": "runtime.seed",
    "schedule": "runtime.schedule",
}
"""Named options of `easyrl grpo` and arguments of `easyrl.train`, with the keys that they set."""
EVAL_OPTIONS = {"num_samples": "eval.num_samples", "engine": "rollout.engine"}
"""Options that only `easyrl eval` and `easyrl.evaluate` have."""
INPUTS = "inputs"
"""Subfolder of a run for Python objects that it was given, or a model that was made for it."""


def options_by_key(**options: Any) -> dict[str, Any]:
    """Return the options that are not None, by the keys that they set: `seed=3, output=None` gives
    {"runtime.seed": 3}."""
    keys = OPTIONS | EVAL_OPTIONS
    return {keys[name]: value for name, value in options.items() if value is not None}


def keys_marked(*marks: Mark) -> list[str]:
    """Return the keys that have any of these marks."""
    return [name for name, field in KEYS.items() if any(mark in field.metadata for mark in marks)]


def by_name(settings: Mapping[str, Any], within: str = "") -> dict[str, Any]:
    """Return the values of sections, as in a dumped config, by the full names of their keys:
    {"train": {"iterations": 60}} gives {"train.iterations": 60}."""
    values: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{within}{key}"
        if name in SECTIONS and isinstance(value, Mapping):
            values |= by_name(value, f"{name}.")
        else:
            values[name] = value
    return values
