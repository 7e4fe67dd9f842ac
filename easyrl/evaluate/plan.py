"""Decide what an evaluation does, and check it before it starts.

model's files ─► problems ─► rewards ─► devices ─► prompts as tokens ─► memory
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from easyrl.config import Config
from easyrl.config.eval import Sampling
from easyrl.data.datasets import open_prompts
from easyrl.data.presets import eval_sampling, with_long_problems
from easyrl.data.problems import identity_of, problem_ids, problems_of, with_eval_data
from easyrl.evaluate.folder import MODEL, converted_model
from easyrl.model.files import ModelFiles, read_model_files
from easyrl.model.source import ModelSource, find_model
from easyrl.rewards.loading import check_rewards, reward_specs, reward_weights
from easyrl.runtime.memory import (
    bytes_by_device,
    check_memory,
    estimate_memory,
    memory_of_devices,
    model_size,
)
from easyrl.runtime.placement import Placement, place_evaluation
from easyrl.runtime.preflight import check_positions, too_long_prompts
from easyrl.types import Prompt


@dataclass(frozen=True, slots=True)
class Plan:
    config: Config
    """Its section `data` says where the problems are."""
    source: ModelSource
    model: Mapping[str, Any]
    """What is evaluated: `path`, and `files`, its identity."""
    problems: Sequence[Prompt]
    ids: Sequence[str]
    sampling: Sampling
    placement: Placement
    num_skipped: int
    """Problems whose prompts are too long (`data.long_prompts=skip`)."""

    @property
    def dataset_identity(self) -> str:
        return identity_of(self.ids)

    @property
    def worker_config(self) -> Config:
        return _with_sampling(self.config, self.sampling)

    def settings(self) -> Mapping[str, Any]:
        """What must not change when the evaluation continues, by the keys that users know."""
        config = self.config
        return {
            MODEL: self.model,
            "model.dtype": config.model.dtype,
            "data.dataset (--dataset), its rows": self.dataset_identity,
            "data.max_prompt_length": config.data.max_prompt_length,
            "reward.functions (--reward)": reward_specs(config),
            "reward.weights": reward_weights(config),
            "reward.answer_column": config.reward.answer_column,
            **{
                f"eval.{key}" + " (--num-samples)" * (key == "num_samples"): value
                for key, value in asdict(self.sampling).items()
            },
            "eval.correct_reward": config.eval.correct_reward,
            "rollout.engine (--engine)": self.placement.engine.name,
            "runtime.seed (--seed)": config.runtime.seed,
        }


def make_plan(config: Config, base: str | None = None) -> Plan:
    """`base`: the model that an adapter belongs to. Raises ValueError, with the key to change, for
    what would not work."""
    source, model = _model_of(config, base)
    config = with_eval_data(config)
    config = config.model_copy(update={"data": with_long_problems(config.data)})
    files = read_model_files(source.base)
    problems = problems_of(open_prompts(config, is_trained=False), config)
    sampling = Sampling.of_evaluation(config.eval, config.rollout, eval_sampling(config.data))
    sampled = _with_sampling(config, sampling)
    check_positions(sampled, files, section="eval")
    check_rewards(sampled, problems.prompts[0])
    base_model = config.model.model_copy(update={"path": source.base})
    skipped = too_long_prompts(
        config.model_copy(update={"model": base_model}), problems, sampling.max_completion_length
    )
    prompts = problems.without(skipped).prompts
    placement = place_evaluation(config, len(prompts), sampling.num_samples)
    placement = _fit_memory(sampled, placement, files)
    ids = problem_ids(prompts)
    return Plan(config, source, model, prompts, ids, sampling, placement, len(skipped))


def _model_of(config: Config, base: str | None) -> tuple[ModelSource, Mapping[str, Any]]:
    converted = None if base else converted_model(config)
    if converted is not None:
        path, model = str(converted[0]), converted[1]
        return ModelSource("model", path, path), model
    source = find_model(config.model.path, base)
    return source, {"path": source.path, "files": source.identity()}


def _with_sampling(config: Config, sampling: Sampling) -> Config:
    """As if training sampled this way: rewards depend on the number and length of completions."""
    update = {
        "num_generations": sampling.num_samples,
        "max_completion_length": sampling.max_completion_length,
    }
    return config.model_copy(update={"rollout": config.rollout.model_copy(update=update)})


def _fit_memory(config: Config, placement: Placement, files: ModelFiles) -> Placement:
    """Halve the number of problems in flight until the estimate fits, unless the user chose it.
    Raises ConfigError if the model and the KV cache cannot fit. (vLLM's cache has a fixed size on
    an accelerator.)"""
    model = model_size(files.config, files.num_weights or 0)
    is_vllm = placement.engine.name == "vllm"
    if model is None or (is_vllm and placement.infer.kind != "cpu"):
        return placement
    sizes = memory_of_devices(placement)
    while True:
        processes = estimate_memory(config, placement, model, ring_bytes=0)
        needed = bytes_by_device(processes)
        fits = all(num_bytes <= sizes[device] for device, num_bytes in needed.items())
        num_problems = placement.max_concurrent_groups
        if fits or num_problems == 1 or config.rollout.max_concurrent_groups is not None:
            break
        placement = replace(placement, max_concurrent_groups=num_problems // 2)
    check_memory(processes, sizes)
    return placement
