"""Resolve and check a run before anything is started, in stages that each run once.

    read config ─► resolve: model files, data, rewards, devices, prompts ─► Resolved
                ─► check and estimate: positions, memory, disk, resume    ─► Preflight ─► launch

Fast checks come first; devices and the model's class need torch and transformers (one or two
seconds), which the run needs anyway. Nothing is written, no process is started and no weights are
loaded. Raises ValueError for errors that the user can fix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from easyrl import devices
from easyrl.config import Config, ConfigError
from easyrl.data.chat import CheckedPrompts, check_prompts, check_variables_are_used
from easyrl.data.datasets import check_trainable, open_prompts
from easyrl.data.hub import BUILT_IN_MODELS
from easyrl.data.presets import PRESETS
from easyrl.data.problems import identity_of, problem_ids, problems_of, with_eval_data
from easyrl.data.streams import PromptStream
from easyrl.model.files import (
    ModelFiles,
    check_rope,
    count_weights,
    fingerprint,
    load_model_config,
    load_tokenizer,
    max_positions,
    read_model_files,
    refuse_shared_prompt,
)
from easyrl.rewards.loading import check_rewards
from easyrl.runtime.engine_choice import check_engine_memory
from easyrl.runtime.memory import (
    ModelSize,
    check_disk,
    check_memory,
    estimate_memory,
    memory_of_devices,
    memory_table,
    memory_warnings,
    model_size,
)
from easyrl.runtime.placement import Placement, resolve_placement, ring_layout
from easyrl.runtime.resume import MEASURE, Resume, check_same
from easyrl.runtime.run_folder import folder_of, refuse_existing
from easyrl.types import Prompt


@dataclass(frozen=True, slots=True)
class Resolved:
    """What the keys of a config stand for on this machine."""

    files: ModelFiles
    prompts: CheckedPrompts
    held_out: Sequence[Prompt]
    placement: Placement
    ring_bytes: int
    num_trained: int | None
    """Elements of LoRA's adapters; None: all weights are trained."""


@dataclass(frozen=True, slots=True)
class Preflight:
    """A checked run, ready to launch."""

    prompts: PromptStream
    """Without those that `data.long_prompts` skips."""
    num_prompts_skipped: int
    placement: Placement
    num_trained: int | None
    """Elements of LoRA's adapters; None: all weights are trained."""
    identity: Mapping[str, Any]
    """Digests of model, data and held-out problems, which a resumed run must have again."""
    held_out: Sequence[Prompt]
    """Problems that accuracy is measured on; may be empty."""
    warnings: Sequence[str]


def check_run(config: Config, resume: Resume | None = None) -> Preflight:
    """Resolve and check a run. Raises ValueError, with the key to change, where it cannot start."""
    if resume is None:
        refuse_existing(folder_of(config))
    resolved = resolve(config)
    warnings = sampling_warnings(config) + _check_resources(config, resolved, resume)
    stream = resolved.prompts.stream
    identity = {
        "model.path": fingerprint(config.model.path),
        "data.dataset": stream.fingerprint(),
        MEASURE: measure_of(resolved.held_out, config),
    }
    check_same(resume, "model.path", f"the files of {config.model.path} are", identity)
    check_same(resume, "data.dataset", f"the rows of {config.data.shown} are", identity)
    return Preflight(
        prompts=stream,
        num_prompts_skipped=resolved.prompts.num_skipped,
        placement=resolved.placement,
        num_trained=resolved.num_trained,
        identity=identity,
        held_out=resolved.held_out,
        warnings=warnings,
    )


def resolve(config: Config) -> Resolved:
    """Find model files, data, rewards and devices, and check every prompt."""
    files = read_model_files(config.model.path)
    check_trainable(config.data)
    prompts = open_prompts(config)
    check_rewards(config, prompts.prompt(0))
    placement = resolve_placement(config)  # imports torch where it must look for accelerators
    ring_bytes = ring_layout(config, placement).total_bytes
    checked = checked_prompts(config, prompts)
    return Resolved(
        files=files,
        prompts=checked,
        held_out=_held_out(config, checked.stream),
        placement=placement,
        ring_bytes=ring_bytes,
        num_trained=_num_trained(config),
    )


def _check_resources(config: Config, resolved: Resolved, resume: Resume | None) -> list[str]:
    """Check positions, memory and disk; return warnings."""
    placement, files = resolved.placement, resolved.files
    warnings: list[str] = []
    size = _model_size(config, files, resolved.num_trained)
    if size is not None:
        processes = estimate_memory(config, placement, size, ring_bytes=resolved.ring_bytes)
        device_sizes = memory_of_devices(placement)
        check_memory(processes, device_sizes, placement)
        warnings += memory_warnings(processes, device_sizes, placement)
    check_positions(config, files)
    is_vllm = placement.engine.name == "vllm" and placement.infer.kind == "accelerator"
    if is_vllm and not placement.shares_device:
        total_bytes = min(
            devices.total_memory_bytes(placement.accelerator, index)
            for index in placement.infer.indices
        )
        check_engine_memory(config, placement.engine, files, total_bytes=total_bytes)
    # A resumed run has its checkpoints already; those of adapters are small.
    is_small = resume is not None or resolved.num_trained is not None
    num_kept = config.train.keep_checkpoints + config.train.keep_best
    check_disk(folder_of(config), files, 0 if is_small else num_kept)
    return warnings


def measure_of(held_out: Sequence[Prompt], config: Config) -> str | None:
    """Identify the problems and the threshold of accuracy; None where there are no problems."""
    if not held_out:
        return None
    return f"{identity_of(problem_ids(held_out))} {config.eval.correct_reward}"


def check_positions(
    config: Config, model: ModelFiles, *, section: str = "rollout", whose: str = ""
) -> None:
    """Raise ConfigError where sequences may be longer than the model's positions.

    `section` of the `max_completion_length` that applies; `whose` is added to the message."""
    positions, longest = max_positions(model.config), config.max_sequence_length
    if positions is None or longest <= positions:
        return
    prompt, completion = config.data.max_prompt_length, config.rollout.max_completion_length
    key = f"data.max_prompt_length + {section}.max_completion_length"
    raise ConfigError(
        f"{key}: expected at most {positions} tokens together, which is max_position_embeddings in "
        f"the config.json of {model.path}, got {prompt} + "
        f"{completion}{whose}; use a smaller value of either key"
    )


def sampling_warnings(config: Config) -> list[str]:
    if not config.rollout.processors:
        return []
    keys = ", ".join(f"rollout.{key}={value}" for key, value in config.rollout.processors.items())
    return [
        f"warning: with {keys} completions are not sampled from the trained distribution; the "
        "engine still reports log-probabilities of the trained distribution"
    ]


def describe_memory(config: Config, placement: Placement) -> str:
    """Estimate the memory of the run's processes, as lines of text with what is wrong. A model that
    is not downloaded yet is counted by its configuration."""
    lines: list[str] = []
    try:
        files = read_model_files(config.model.path, is_whole=False)
        size = _model_size(config, files, _num_trained(config))
        ring_bytes = ring_layout(config, placement).total_bytes
        if size is None:
            return f"memory: unknown, because the config.json of '{files.path}' gives no sizes"
        processes = estimate_memory(config, placement, size, ring_bytes=ring_bytes)
        sizes = memory_of_devices(placement)
        lines = [
            memory_table(processes, sizes),
            *memory_warnings(processes, sizes, placement),
        ]
        check_memory(processes, sizes, placement)
    except ValueError as refused:
        lines = [*lines, f"a run would not start: {refused}"]
    return "\n".join(lines)


def _model_size(config: Config, files: ModelFiles, num_trained: int | None) -> ModelSize | None:
    """None where the model's configuration does not have the usual names."""
    num_weights = files.num_weights
    size = None if num_weights is None else model_size(files.config, num_weights, num_trained)
    if size is None:
        _quieten_transformers()
        trusts = config.model.trust_remote_code
        model_config = load_model_config(files.path, trust_remote_code=trusts)
        if num_weights is None:
            num_weights = count_weights(model_config, trust_remote_code=trusts)
        size = model_size(model_config, num_weights, num_trained)
    return size


def _held_out(config: Config, prompts: PromptStream) -> list[Prompt]:
    """Open the held-out problems of `eval.dataset`, else of `data.dataset`."""
    if config.data.num_held_out == 0 or (config.eval.dataset is None and not prompts.held_out()):
        if config.train.eval_every:
            raise ConfigError(
                "train.eval_every: expected 0, because there are no held-out problems, got "
                f"{config.train.eval_every}; set eval.dataset and data.num_held_out"
            )
        return []
    if config.eval.dataset is None:
        return problems_of(prompts, config).held_out()
    other = with_eval_data(config)
    problems = problems_of(open_prompts(other, is_trained=False), other)
    check_rewards(config, problems.prompt(0))
    return checked_prompts(other, problems).stream.held_out()


def checked_prompts(
    config: Config, prompts: PromptStream, max_completion_length: int | None = None
) -> CheckedPrompts:
    """Check the prompts as tokens of the model, and the model's class on the way.

    `max_completion_length` where it is not that of training."""
    model = config.model
    check_variables_are_used(prompts, config)
    if model.path in BUILT_IN_MODELS and set(config.data.datasets) <= set(PRESETS):
        # One token per character, so that the demo needs no transformers here.
        longest = config.data.max_prompt_length
        if all(isinstance(text, str) and len(text) <= longest for text in prompts.examples()):
            return CheckedPrompts(prompts, num_skipped=0)
    _quieten_transformers()
    model_config = load_model_config(model.path, trust_remote_code=model.trust_remote_code)
    if model.attention == "shared_prompt":
        refuse_shared_prompt(model.path, model_config)
    check_rope(
        model.path,
        model_config,
        max_prompt_length=config.data.max_prompt_length,
        max_completion_length=max_completion_length or config.rollout.max_completion_length,
    )
    tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
    return check_prompts(prompts, tokenizer, config)


def _num_trained(config: Config) -> int | None:
    """Elements of LoRA's adapters, checked; None without LoRA."""
    model = config.model
    if model.lora.rank is None:
        return None
    from easyrl.model.lora import check_lora

    _quieten_transformers()
    model_config = load_model_config(model.path, trust_remote_code=model.trust_remote_code)
    return check_lora(
        model.lora, model.path, model_config, trust_remote_code=model.trust_remote_code
    )


def _quieten_transformers() -> None:
    """Silence its warnings (of lengths, of fields): each is an error of ours or does not matter."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
