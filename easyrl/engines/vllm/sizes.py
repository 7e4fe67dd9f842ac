"""How much memory vLLM takes, for the estimate before a run and for vLLM itself: no torch here.

vLLM allocates its KV cache at once. On a device of its own it takes what `rollout.memory_fraction`
leaves besides the weights; elsewhere EasyRL computes the size.
"""

from typing import NamedTuple

from easyrl import devices
from easyrl.engines import padded
from easyrl.engines.sizes import (
    CACHE_KEYS,
    GROUPS_KEY,
    EngineLoad,
    logits_bytes,
    prefill_bytes,
)
from easyrl.engines.vllm.platforms import BLOCK_TOKENS
from easyrl.model.files import DTYPE_BYTES, ModelSize, model_size, read_loaded_files
from easyrl.processes import MemoryNeed

EXTRA_CACHE_BYTES = 16 * 2**20  # added to the computed size of the KV cache
DEFAULT_CACHE_BYTES = 2**30  # where the size cannot be computed
STEP_FRACTION = 0.15  # part of vLLM's memory on a shared device for activations and captured graphs
MORE_CACHE = "KV cache, the room left"
"""Memory that vLLM gives its cache although the run does not need it: shown, but not required."""


class DeviceShare(NamedTuple):
    """The accelerator memory that one vLLM engine may take."""

    num_bytes: float  # of its devices together; 0: unknown
    fraction: float  # of them for weights, cache and steps
    num_devices: int
    is_with_trainer: bool  # the trainer computes on the same device
    bucket_bytes: int  # of the weight channel, on these devices


def vllm_needs(model: ModelSize, load: EngineLoad, share: DeviceShare | None) -> list[MemoryNeed]:
    """Return what vLLM needs besides its weights and the buckets of new ones. `share`: None on the
    CPU."""
    wanted = wanted_cache_bytes(model, load.dtype, load.num_rows, load.max_sequence_length)
    if share is None:
        num_bytes = logits_bytes(model, load) + prefill_bytes(model, load)
        return [
            MemoryNeed("KV cache", wanted, CACHE_KEYS, is_certain=True),
            MemoryNeed("engine's step", num_bytes, GROUPS_KEY),
        ]
    dtype_bytes = DTYPE_BYTES[load.dtype]
    # It needs room for 1 sequence at least.
    least = load.max_sequence_length * dtype_bytes * model.kv_elements
    num_weights = model.num_weights + model.num_frozen_weights
    room = cache_room(share.num_bytes, share.fraction, dtype_bytes * num_weights)
    if share.is_with_trainer:
        room = min(room, wanted)
    else:
        room -= share.num_devices * devices.CONTEXT_BYTES + share.bucket_bytes
    # Memory that it keeps free for its step and graphs, and what is not its own.
    reserve = int((1.0 - (1.0 - STEP_FRACTION) * share.fraction) * share.num_bytes)
    needs = [
        MemoryNeed("KV cache", least, CACHE_KEYS, is_certain=True),
        MemoryNeed(MORE_CACHE, room - least, is_required=False),
    ]
    if share.is_with_trainer:
        key = "rollout.memory_fraction"
        needs.append(MemoryNeed("vLLM's reserve", reserve, key, is_certain=True))
    else:
        needs.append(MemoryNeed("vLLM's step, reserve", reserve))
    return needs


def cache_room(num_bytes: float, fraction: float, weights_bytes: int) -> int:
    """Return what the fraction of a device's memory leaves for the KV cache."""
    return int((1.0 - STEP_FRACTION) * fraction * num_bytes) - weights_bytes


def cache_bytes(
    model: str,
    dtype: str,
    num_rows: int,
    longest: int,
    *,
    device: str,
    shared_part: float | None,
    has_tower: bool = False,
    trust_remote_code: bool = False,
) -> int | None:
    """Return the size of the KV cache for `num_rows` sequences of `longest` tokens; None on a
    device of its own, where vLLM measures how much memory is left. On a device that the trainer
    uses too, it is at most what the fraction `shared_part` of the memory leaves besides the
    weights. `has_tower`: vLLM loads the model's tower, too."""
    if device != "cpu" and shared_part is None:
        return None
    # vLLM says what is missing.
    files = read_loaded_files(model, is_whole=False, trust_remote_code=trust_remote_code)
    num_weights = files.num_weights or 0
    size = model_size(files.config, num_weights)
    wanted = DEFAULT_CACHE_BYTES
    if size is not None:
        wanted = wanted_cache_bytes(size, dtype, num_rows, longest)
    if shared_part is None:
        return wanted
    kind, _, _ = device.partition(":")
    total = devices.total_memory_bytes(kind, 0)  # the worker sees its own device only
    if has_tower:
        num_weights += files.kept.num_weights
    return min(wanted, cache_room(total, shared_part, DTYPE_BYTES[dtype] * num_weights))


def wanted_cache_bytes(size: ModelSize, dtype: str, num_rows: int, longest: int) -> int:
    """Return the size of a KV cache for all sequences at their full length."""
    row_tokens = padded(longest, BLOCK_TOKENS)
    return num_rows * row_tokens * size.kv_elements * DTYPE_BYTES[dtype] + EXTRA_CACHE_BYTES
