"""All that can be found wrong with a run before anything is started, the quick things first.

    run folder ─► model's files ─► data ─► rewards ─► devices ─► memory of the ring
                                   ─► model's class ─► every prompt ─► memory, disk

The first half takes a fraction of a second; devices and the model's class take torch and
transformers (one or two seconds), which the run needs anyway. Nothing is written, no process is
started, no weights are loaded. Raises ValueError for what the user can mend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from easyrl import devices
from easyrl.config import Config, ConfigError
from easyrl.data.datasets import PromptStream, open_prompts
from easyrl.data.prompt_check import CheckedPrompts, check_prompts
from easyrl.hub import BUILT_IN_MODELS
from easyrl.model.files import fingerprint, read_model_files
from easyrl.model.lora import check_lora
from easyrl.model.pretrained import (
    check_rope,
    load_model_config,
    load_tokenizer,
    refuse_shared_prompt,
)
from easyrl.rewards.loading import check_rewards
from easyrl.runtime.engine_choice import check_engine_memory
from easyrl.runtime.memory import check_disk, check_memory, check_shared_device
from easyrl.runtime.placement import Placement, resolve_placement
from easyrl.runtime.resume import Resume, check_same
from easyrl.runtime.ring import ring_layout
from easyrl.runtime.run_folder import folder_of, refuse_existing
from easyrl.tasks import TASKS


@dataclass(frozen=True, slots=True)
class Preflight:
    """What the checks have made, for the run to use."""

    prompts: PromptStream
    """Without those that `data.long_prompts` skips."""
    num_prompts_skipped: int
    placement: Placement
    num_trained: int | None
    """Elements of LoRA's adapters; None: all weights are trained."""
    identity: Mapping[str, Any]
    """What a resumed run must find again: of some keys, what they name."""


def check_run(config: Config, resume: Resume | None = None) -> Preflight:
    """Raises ValueError, with the key that mends it, for what would not work."""
    folder = folder_of(config)
    if resume is None:
        refuse_existing(folder)
    files = read_model_files(config.model.path)
    prompts = open_prompts(config)
    check_rewards(config, prompts.prompt(0))
    placement = resolve_placement(config)  # to look for accelerators takes torch
    ring_bytes = ring_layout(config, placement).total_bytes
    checked = _check_prompts(config, prompts)
    num_trained = None if config.model.lora.rank is None else _check_lora(config, placement)
    check_memory(config, placement, files, ring_bytes=ring_bytes, num_trained=num_trained)
    if placement.shares_device:
        index = placement.infer.indices[0]
        total_bytes = devices.total_memory_bytes(placement.accelerator, index)
        check_shared_device(
            config, placement, files, total_bytes=total_bytes, num_trained=num_trained
        )
    elif placement.engine.name == "vllm" and placement.infer.kind == "accelerator":
        total_bytes = min(
            devices.total_memory_bytes(placement.accelerator, index)
            for index in placement.infer.indices
        )
        check_engine_memory(config, placement.engine, files, total_bytes=total_bytes)
    is_small = resume is not None or num_trained is not None  # checkpoints are there, or tiny
    check_disk(folder, files, 0 if is_small else config.train.keep_checkpoints)
    identity = {
        "model.path": fingerprint(config.model.path),
        "data.dataset": checked.stream.epoch_length,
    }
    check_same(resume, "model.path", f"the files of {config.model.path} are", identity)
    check_same(resume, "data.dataset", f"the rows of {config.data.dataset} are", identity)
    return Preflight(checked.stream, checked.num_skipped, placement, num_trained, identity)


def _check_prompts(config: Config, prompts: PromptStream) -> CheckedPrompts:
    """The prompts as tokens of the model, whose class is looked at on the way."""
    model = config.model
    if (  # its tokenizer makes one token of a character: the demo starts without transformers
        model.path in BUILT_IN_MODELS
        and config.data.dataset in TASKS
        and max(map(len, prompts.examples())) <= config.data.max_prompt_length
    ):
        return CheckedPrompts(prompts, num_skipped=0)
    _quieten_transformers()
    model_config = load_model_config(model.path, trust_remote_code=model.trust_remote_code)
    if model.attention == "shared_prompt":
        refuse_shared_prompt(model.path, model_config)
    check_rope(
        model.path,
        model_config,
        max_prompt_length=config.data.max_prompt_length,
        max_completion_length=config.rollout.max_completion_length,
    )
    tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
    return check_prompts(prompts, tokenizer, config)


def _check_lora(config: Config, placement: Placement) -> int:
    model = config.model
    wrong = {
        f"model.dtype={model.dtype}": model.dtype != "float32",
        f"{placement.train.count} train devices": placement.train.count > 1,
        "train.offload=[optimizer]": "optimizer" in config.train.offload,
    }
    for what, is_wrong in wrong.items():
        if is_wrong:
            raise ConfigError(
                f"model.lora.rank: {model.lora.rank} came with {what}; accepted: adapters are "
                "trained in float32, on one train device, with the optimizer beside them"
            )
    _quieten_transformers()
    model_config = load_model_config(model.path, trust_remote_code=model.trust_remote_code)
    return check_lora(
        model.lora, model.path, model_config, trust_remote_code=model.trust_remote_code
    )


def _quieten_transformers() -> None:
    """What it warns of (lengths, fields of a config) is either an error of ours or no matter."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
