"""Choose the engine, and check its memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from easyrl.config import Config, ConfigError, DeviceSet
from easyrl.engines.vllm.platforms import unsupported_reason
from easyrl.model.files import DTYPE_BYTES, ModelFiles, kv_bytes_per_token


@dataclass(frozen=True, slots=True)
class EngineChoice:
    name: Literal["embedded", "vllm"] = "embedded"
    reason: str = ""
    """Why it was chosen by `auto`."""
    tensor_parallel_size: int = 1
    """Devices of one engine."""


EMBEDDED = EngineChoice()
MEMORY_FRACTION = 0.9
"""Fraction of its own accelerator that vLLM takes where rollout.memory_fraction is null."""


def choose_engine(config: Config, infer: DeviceSet, *, accelerator: str = "") -> EngineChoice:
    """Choose the engine for devices `infer`. `accelerator`: their kind in torch, if not the CPU.
    Raises ConfigError for an engine that cannot be used on these devices."""
    wanted, size = config.rollout.engine, config.rollout.tensor_parallel_size
    on_cpu = infer.kind == "cpu"
    reason = _unsupported(config, "cpu" if on_cpu else accelerator)
    if wanted == "vllm" and reason is not None:
        raise ConfigError(f"rollout.engine: expected embedded, because {reason}, got vllm")
    if wanted == "auto" and on_cpu:
        reason = "the default on the CPU"
    if wanted == "embedded" or (wanted == "auto" and reason is not None):
        if size > 1:
            raise ConfigError(
                "rollout.tensor_parallel_size: expected 1 with the embedded engine, got "
                f"{size}; rollout.engine=vllm can use several devices"
            )
        return EngineChoice("embedded", reason or "" if wanted == "auto" else "")
    if infer.count % size:
        raise ConfigError(
            f"rollout.tensor_parallel_size: expected a divisor of {infer.count}, the number of "
            f"devices in devices.infer (--infer-devices), got {size}"
        )
    return EngineChoice("vllm", "it is installed" if wanted == "auto" else "", size)


def _unsupported(config: Config, kind: str) -> str | None:
    is_one = config.rollout.tensor_parallel_size == 1
    if config.runtime.deterministic and not (is_one and kind == "cpu"):
        return (
            "with runtime.deterministic=true vLLM is only known to repeat its bits on CPUs with "
            "rollout.tensor_parallel_size=1"
        )
    return unsupported_reason(kind, config.model.dtype)


def check_engine_memory(
    config: Config, choice: EngineChoice, model: ModelFiles, *, total_bytes: int
) -> None:
    """Raise ConfigError where vLLM's fraction of a device's memory cannot hold the weights and the
    KV cache of one sequence. `total_bytes` of each of its devices."""
    share = DTYPE_BYTES[config.model.dtype]
    tokens = config.max_sequence_length
    weights = share * (model.num_weights or 0) // choice.tensor_parallel_size
    cache = share * tokens * kv_bytes_per_token(model.config) // 4 // choice.tensor_parallel_size
    fraction = config.rollout.memory_fraction or MEMORY_FRACTION
    if weights + cache <= fraction * total_bytes:
        return
    part, whole, of_model, of_cache = (
        f"{num_bytes / 2**30:.2f} GiB"
        for num_bytes in (fraction * total_bytes, total_bytes, weights, cache)
    )
    raise ConfigError(
        f"rollout.memory_fraction: {fraction:g} of a device's {whole} is {part}, but the "
        f"model takes {of_model} and the KV cache of one sequence of {tokens} tokens {of_cache}; "
        "use a larger fraction, a larger rollout.tensor_parallel_size, or a smaller model"
    )
