"""Resolve and check a run before anything is started: model files, data, rewards, devices, prompts,
memory, disk.

Fast checks come first; devices and the model's class need torch and transformers (one or two
seconds), which the run needs anyway. Nothing is written, no process is started and no weights are
loaded. Raises ValueError for errors that the user can fix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from easyrl.config import Config, ConfigError
from easyrl.data.chat import check_prompts
from easyrl.data.datasets import open_prompts, problems_of, with_eval_data
from easyrl.data.hub import BUILT_IN_MODELS
from easyrl.data.presets import PRESETS
from easyrl.data.streams import PromptStream
from easyrl.model.files import (
    ModelFiles,
    check_rope,
    fingerprint,
    load_model_config,
    load_tokenizer,
    max_positions,
    meta_model,
    read_model_files,
)
from easyrl.rewards.loading import check_rewards
from easyrl.runtime.memory import (
    ProcessMemory,
    check_disk,
    check_memory,
    estimate_memory,
    memory_of_devices,
    memory_table,
    model_size,
)
from easyrl.runtime.placement import Placement, resolve_placement, ring_layout
from easyrl.runtime.resume import Resume
from easyrl.runtime.run_folder import folder_of, refuse_existing
from easyrl.types import Messages, Prompt


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
    """Digests of model and data, which a resumed run must have again."""
    held_out: Sequence[Prompt]
    """Problems that accuracy is measured on; may be empty."""
    warnings: Sequence[str]


def check_run(config: Config, resume: Resume | None = None) -> Preflight:
    """Resolve and check a run. Raises ValueError, with the key to change, where it cannot start."""
    if resume is None:
        refuse_existing(folder_of(config))
    files = read_model_files(config.model.path)
    prompts = open_prompts(config)
    check_rewards(config, prompts.prompt(0))
    placement = resolve_placement(config)  # imports torch where it must look for accelerators
    skipped = too_long_prompts(config, prompts.examples())
    prompts = prompts.without(skipped)
    held_out = _held_out(config, prompts)
    num_trained = _num_trained(config)
    warnings = sampling_warnings(config)
    if (processes := _estimate(config, placement, files, num_trained)) is not None:
        warnings += check_memory(processes, memory_of_devices(placement))
    check_positions(config, files)
    # A resumed run has its checkpoints already; those of adapters are small.
    is_small = resume is not None or num_trained is not None
    num_kept = config.train.keep_checkpoints + config.train.keep_best
    check_disk(folder_of(config), files, 0 if is_small else num_kept)
    identity = {
        "model.path": fingerprint(config.model.path),
        "data.dataset": prompts.fingerprint(),
    }
    for key, what in (
        ("model.path", f"the files of {config.model.path}"),
        ("data.dataset", f"the rows of {config.data.shown}"),
    ):
        if resume and resume.state.identity.get(key, identity[key]) != identity[key]:
            raise ConfigError(
                f"{key}: {what} are not those that the run in '{resume.folder}' started from; "
                "restore them, or start a new run (--output)"
            )
    return Preflight(
        prompts=prompts,
        num_prompts_skipped=len(skipped),
        placement=placement,
        num_trained=num_trained,
        identity=identity,
        held_out=held_out,
        warnings=warnings,
    )


def check_positions(config: Config, model: ModelFiles, *, section: str = "rollout") -> None:
    """Raise ConfigError where sequences may be longer than the model's positions.

    `section` of the `max_completion_length` that applies."""
    positions = max_positions(model.config)
    if positions is not None and config.max_sequence_length > positions:
        prompt, completion = config.data.max_prompt_length, config.rollout.max_completion_length
        raise ConfigError(
            f"data.max_prompt_length + {section}.max_completion_length: expected at most "
            f"{positions} tokens together, which is max_position_embeddings in the config.json of "
            f"{model.path}, got {prompt} + {completion}"
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
        processes = _estimate(config, placement, files, _num_trained(config))
        if processes is None:
            return f"memory: unknown, because the config.json of '{files.path}' gives no sizes"
        sizes = memory_of_devices(placement)
        lines.append(memory_table(processes, sizes))
        lines += check_memory(processes, sizes)
    except ValueError as refused:
        lines.append(f"a run would not start: {refused}")
    return "\n".join(lines)


def _estimate(
    config: Config, placement: Placement, files: ModelFiles, num_trained: int | None
) -> list[ProcessMemory] | None:
    """None where the model's configuration does not have the usual names."""
    num_weights = files.num_weights
    size = None if num_weights is None else model_size(files.config, num_weights, num_trained)
    if size is None:
        model_config = _model_config(config, files.path)
        if num_weights is None:
            model = meta_model(model_config, trust_remote_code=config.model.trust_remote_code)
            num_weights = sum(weight.numel() for weight in model.parameters())
        size = model_size(model_config, num_weights, num_trained)
        if size is None:
            return None
    ring_bytes = ring_layout(config, placement).total_bytes
    return estimate_memory(config, placement, size, ring_bytes=ring_bytes)


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
        return list(problems_of(prompts, config).values())
    other = with_eval_data(config)
    problems = problems_of(open_prompts(other, is_trained=False), other)
    check_rewards(config, next(iter(problems.values())))
    return short_problems(other, problems)


def short_problems(
    config: Config, problems: Mapping[str, Prompt], max_completion_length: int | None = None
) -> list[Prompt]:
    """The problems that are not too long."""
    examples = {location: problem.content for location, problem in problems.items()}
    skipped = too_long_prompts(config, examples, max_completion_length)
    return [problem for location, problem in problems.items() if location not in skipped]


def too_long_prompts(
    config: Config,
    examples: Mapping[str, str | Messages],
    max_completion_length: int | None = None,
) -> set[str]:
    """Check prompts by their locations as tokens of the model, and the model's class on the way.
    Return the locations of those to skip.

    `max_completion_length` where it is not that of training."""
    model = config.model
    is_demo = model.path in BUILT_IN_MODELS and set(config.data.datasets) <= set(PRESETS)
    if is_demo and not config.data.chat_template_kwargs:
        # One token per character, so that the demo needs no transformers here.
        longest = config.data.max_prompt_length
        if all(isinstance(text, str) and len(text) <= longest for text in examples.values()):
            return set()
    model_config = _model_config(config, model.path)
    check_rope(
        model.path,
        model_config,
        max_prompt_length=config.data.max_prompt_length,
        max_completion_length=max_completion_length or config.rollout.max_completion_length,
    )
    tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
    return check_prompts(examples, tokenizer, config)


def _num_trained(config: Config) -> int | None:
    """Elements of LoRA's adapters, checked; None without LoRA."""
    model = config.model
    if model.lora.rank is None:
        return None
    from easyrl.model.lora import check_lora

    model_config = _model_config(config, model.path)
    trusts = model.trust_remote_code
    return check_lora(model.lora, model.path, model_config, trust_remote_code=trusts)


def _model_config(config: Config, path: str) -> Any:
    """Load transformers' configuration. Its warnings (of lengths, of fields) are silenced: each is
    an error of ours or does not matter."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    return load_model_config(path, trust_remote_code=config.model.trust_remote_code)
