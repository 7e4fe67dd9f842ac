"""How much memory a train worker takes, for the estimate before a run: no torch here.

Forward and backward of a micro-batch are in `model.sizes`, a rollout worker's engine in
`engines.sizes`.
"""

from easyrl.config.spec import TokenLimits, TrainSpec
from easyrl.engines.sizes import WEIGHTS_KEYS
from easyrl.model import FEATURES_BYTES
from easyrl.model.checkpoint_files import FILE_BYTES
from easyrl.model.files import DTYPE_BYTES, FLOAT_BYTES, ModelSize
from easyrl.model.sizes import activation_bytes, gathered_bytes, largest_batch
from easyrl.processes import MemoryNeed

HEAP_FACTOR = 3.9
"""On the CPU a trainer keeps freed memory, and glibc cannot reuse a hole for a block of the same
size: transient tensors take this many times their size. Measured with 13 to 92 million weights."""
TOKENS_KEY = "train.max_tokens_per_micro_batch"


def train_needs(
    model: ModelSize,
    spec: TrainSpec,
    limits: TokenLimits,
    *,
    num_ranks: int,
    is_on_cpu: bool,
    is_fused: bool,
    teacher_weights: int,
) -> list[MemoryNeed]:
    """Return what a train worker needs besides its process and the buckets of its weights.

    `is_fused`: its attention keeps no scores. `teacher_weights`: elements of a teacher that is not
    the policy; 0: there is none.
    """
    needs = _policy_needs(model, spec, num_ranks=num_ranks, is_on_cpu=is_on_cpu)
    if teacher_weights:
        teacher = DTYPE_BYTES[spec.model.dtype] * teacher_weights // num_ranks
        needs.append(MemoryNeed("teacher", teacher))

    repeats_prompts = spec.model.attention == "repeated"
    batch = largest_batch(
        limits, spec.batches, num_ranks=num_ranks, repeats_prompts=repeats_prompts
    )
    activations = activation_bytes(
        model,
        batch,
        dtype=spec.model.dtype,
        is_on_cpu=is_on_cpu,
        is_fused=is_fused,
        is_checkpointed=spec.optimizer.activation_checkpointing,
        transient_factor=HEAP_FACTOR if is_on_cpu else 1.0,
    )
    keys = f"{TOKENS_KEY}, train.activation_checkpointing=true"
    needs.append(MemoryNeed("activations", activations.kept, keys))
    needs.append(MemoryNeed("logits, transients", activations.transient, TOKENS_KEY))
    return needs


def _policy_needs(
    model: ModelSize, spec: TrainSpec, *, num_ranks: int, is_on_cpu: bool
) -> list[MemoryNeed]:
    """Return what weights take: the policy's with gradients and moments, those of other policies, a
    checkpoint that is being written, and layers that are gathered from all ranks."""
    dtype = spec.model.dtype
    is_lora = model.num_trained is not None
    num_trained = model.num_weights if model.num_trained is None else model.num_trained
    trained = FLOAT_BYTES * num_trained // num_ranks  # trained weights are in float32
    weights = trained
    if is_lora:  # the frozen base is kept in the dtype of the computation
        weights += DTYPE_BYTES[dtype] * model.num_weights // num_ranks

    offloaded = set[str]() if is_on_cpu else {*spec.optimizer.offload}
    on_host = "optimizer" in offloaded
    keys = "model.lora.rank, train.offload"
    is_sharded = num_ranks > 1 or dtype != "float32" or on_host
    tower_dtype = dtype if is_sharded else "float32"
    weights += DTYPE_BYTES[tower_dtype] * model.num_frozen_weights // num_ranks
    needs = [
        _certain("weights", weights, WEIGHTS_KEYS, is_on_host=on_host),
        _certain("gradients", trained, keys, is_on_host=on_host),
        _certain("AdamW's two moments", 2 * trained, keys, is_on_host=on_host),
    ]
    if model.num_frozen_weights:
        needs.append(MemoryNeed("features of pictures", FEATURES_BYTES))
    if spec.loss.beta > 0.0 and not is_lora:  # LoRA's reference is the base without adapters
        keys = "algorithm.beta, train.offload"
        reference_on_host = "reference" in offloaded
        needs.append(_certain("reference policy", trained, keys, is_on_host=reference_on_host))
    if spec.batches.updates_per_iteration > 1:
        keys = "train.updates_per_iteration, train.offload"
        needs.append(_certain("old policy", trained, keys, is_on_host="old" in offloaded))
    if spec.keep_checkpoints > 0:
        saved = 3 * trained  # weights and moments
        num_bytes = saved + min(saved, FILE_BYTES)  # and a file as it is written
        key = "train.keep_checkpoints=0"
        needs.append(_certain("checkpoint's copy", num_bytes, key, is_on_host=True))

    if is_sharded:
        drops_layers = spec.optimizer.reshard is not False
        gathered = gathered_bytes(model, dtype, drops_layers=drops_layers)
        needs.append(MemoryNeed("gathered layers", gathered))
    elif not is_on_cpu and model.stored_dtype != "float32":
        needs.append(MemoryNeed("weights being loaded", weights, is_on_host=True))
    return needs


def _certain(what: str, num_bytes: int, settings: str, *, is_on_host: bool) -> MemoryNeed:
    return MemoryNeed(what, num_bytes, settings, is_certain=True, is_on_host=is_on_host)
