"""Whether a run fits the memory and the disk, told before it starts.

On the CPU a run holds, in float32:

    train worker      4 x the weights: they, gradients, AdamW's two moments; once more each for a
                      reference (algorithm.beta) and an old policy (train.updates_per_iteration);
                      of a train worker elsewhere, those that train.offload keeps here
                      and, while a checkpoint is written, 3 x the weights it is copied from
    rollout worker    the weights, and a KV cache of all its rows at their full length
    ring buffer       its slots

Only what is surely asked for is counted (no activations, no libraries), so that nothing is refused
that could run. Accelerators tell of their own memory when it is asked for.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from easyrl.channels.ring_resources import available_memory_bytes
from easyrl.config import Config, ConfigError
from easyrl.model.files import PACKED_LAYERS, ModelFiles
from easyrl.runtime.placement import Placement

FLOAT_BYTES = 4
COPIES_TO_TRAIN = 4
COPIES_TO_SAVE = 3
"""Weights and AdamW's two moments."""


def check_memory(
    config: Config,
    placement: Placement,
    model: ModelFiles,
    *,
    ring_bytes: int,
) -> None:
    """Raise ConfigError where this machine or its cgroup surely has too little."""
    weights = FLOAT_BYTES * (model.num_weights or 0)
    num_rollout = placement.infer.count if placement.infer.kind == "cpu" else 0
    num_groups = placement.max_concurrent_groups if _fills_rows(model.config) else 1
    num_rows = num_rollout * num_groups * config.rollout.num_generations
    row_tokens = config.data.max_prompt_length + config.rollout.max_completion_length
    cache = num_rows * row_tokens * kv_bytes_per_token(model.config)
    trains_here = placement.train.kind == "cpu"
    copies = num_rollout + _copies_of_trainer(config, is_here=trains_here)
    saved = COPIES_TO_SAVE * weights if trains_here and config.train.keep_checkpoints else 0
    needed, available = copies * weights + saved + cache + ring_bytes, available_memory_bytes()
    if needed <= available:
        return
    parts = {
        f"{copies} x the model ({_size(weights)}): lower --infer-devices ({placement.infer}), or "
        "choose a smaller model.path": copies * weights,
        f"KV cache ({num_rows} sequences of {row_tokens} tokens): lower "
        f"rollout.max_concurrent_groups ({placement.max_concurrent_groups}), "
        f"rollout.num_generations ({config.rollout.num_generations}), "
        f"rollout.max_completion_length ({config.rollout.max_completion_length}) or "
        f"data.max_prompt_length ({config.data.max_prompt_length})": cache,
        f"what a checkpoint is written from, {COPIES_TO_SAVE} x the model: "
        "train.keep_checkpoints=0 writes none": saved,
        f"ring buffer: lower rollout.ring_slots ({config.ring_slots})": ring_bytes,
    }
    shares = sorted(parts.items(), key=lambda part: -part[1])
    raise ConfigError(
        f"this run asks for {_size(needed)} of memory, but this machine and its cgroup have "
        f"{_size(available)} left:\n" + "\n".join(f"{_size(size)}  {what}" for what, size in shares)
    )


def check_disk(folder: Path, model: ModelFiles, num_checkpoints: int) -> None:
    """Raise ConfigError where the final model and so many checkpoints, with the one that is being
    written, do not fit the disk that `folder` will be on."""
    there = next(parent for parent in folder.absolute().parents if parent.exists())
    weights, free = FLOAT_BYTES * (model.num_weights or 0), shutil.disk_usage(there).free
    saved = COPIES_TO_SAVE * weights
    if weights > free:
        raise ConfigError(
            f"output.dir (--output): the final model has {_size(weights)}, but the disk of "
            f"'{folder}' has {_size(free)} left; accepted: a folder on a disk with room"
        )
    if num_checkpoints and weights + (num_checkpoints + 1) * saved > free:
        raise ConfigError(
            f"train.keep_checkpoints: {num_checkpoints} came, and one more while it is written; "
            f"each has {_size(saved)} and the final model {_size(weights)}, but the disk of "
            f"'{folder}' has {_size(free)} left; accepted: fewer (0: none, and no --resume), or an "
            "output.dir (--output) on a disk with room"
        )


def kv_bytes_per_token(model_config: dict[str, Any]) -> int:
    """Keys and values of one token in all layers; 0 where `config.json` does not tell in the
    usual words."""
    config = model_config.get("text_config") or model_config
    layers, heads = config.get("num_hidden_layers"), config.get("num_attention_heads")
    if not layers or not heads:
        return 0
    size = config.get("head_dim") or config.get("hidden_size", 0) // heads
    return int(2 * layers * (config.get("num_key_value_heads") or heads) * size * FLOAT_BYTES)


def _fills_rows(model_config: dict[str, Any]) -> bool:
    """Whether an engine may have several groups in flight: with layers of other kinds it has one
    (`engines.generate`)."""
    config = model_config.get("text_config") or model_config
    return set(config.get("layer_types") or ()) <= set(PACKED_LAYERS)


def _copies_of_trainer(config: Config, *, is_here: bool) -> int:
    """Weights and what has their size, on the CPU."""
    others = {
        "reference": config.algorithm.beta > 0.0,
        "old": config.train.updates_per_iteration > 1,
    }
    if is_here:
        return COPIES_TO_TRAIN + sum(others.values())
    return sum(others[name] for name in config.train.offload)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**28 else f"{num_bytes / 2**20:.1f} MiB"
