"""How much memory a training step of a model takes, for the estimate before a run: no torch here.

Letters: H the model's width, I the MLP's, Hq query heads and Hkv key/value heads of size D.
"""

from typing import NamedTuple

from easyrl.config.spec import BatchSpec, TokenLimits
from easyrl.model import CHUNK_BYTES, CPU_CHUNK_BYTES, CPU_KEPT_BYTES
from easyrl.model.files import DTYPE_BYTES, FLOAT_BYTES, ModelSize

TRAINED_SCORE_BYTES = 20
"""Of an attention score without a fused kernel, in backward: five float32 tensors."""
NUM_LIVE_CHUNKS = 3  # copies of a chunk of float32 logits that `logprobs` has in forward


class TrainedBatch(NamedTuple):
    """The largest micro-batch of a run."""

    num_tokens: int
    num_targets: int  # completion tokens, whose log-probabilities are trained
    num_keys: int  # that a token attends to in one call of attention


class ActivationBytes(NamedTuple):
    kept: int  # by all layers together when backward begins, and logits that are kept for it
    transient: int  # of the largest tensors that live only within a layer, or the head


class HeadBytes(NamedTuple):
    kept: int  # logits that are kept for backward
    transient: int  # of the chunk that is computed


def largest_batch(
    limits: TokenLimits, batches: BatchSpec, *, num_ranks: int, repeats_prompts: bool
) -> TrainedBatch:
    """Return the largest micro-batch of a train worker. `repeats_prompts`: every completion has a
    copy of its prompt (`model.attention=repeated`), else a group shares one."""
    num_prompts = batches.num_generations if repeats_prompts else 1
    completions = batches.num_generations * limits.max_completion_length
    group = num_prompts * limits.max_prompt_length + completions
    num_groups = batches.prompts_per_iteration / batches.updates_per_iteration / num_ranks
    num_tokens = int(max(num_groups * group, limits.max_sequence_length))
    num_tokens = min(batches.max_tokens, num_tokens)
    num_targets = -(-num_tokens * completions // group)
    most_keys = max(limits.max_prompt_length, limits.max_completion_length)
    if repeats_prompts:
        most_keys = limits.max_sequence_length
    return TrainedBatch(num_tokens, num_targets, min(num_tokens, most_keys))


def activation_bytes(
    model: ModelSize,
    batch: TrainedBatch,
    *,
    dtype: str,
    is_on_cpu: bool,
    is_fused: bool,
    is_checkpointed: bool,
    transient_factor: float = 1.0,
) -> ActivationBytes:
    """Estimate forward and backward of a micro-batch. `is_fused`: attention keeps no scores.
    `is_checkpointed`: layers are computed again in backward. `transient_factor`: how many times
    their size transient tensors take."""
    dtype_bytes = DTYPE_BYTES[dtype]
    layer = layer_bytes(model, dtype)
    kept_by_layer = dtype_bytes * model.width if is_checkpointed else layer
    ends = 2 * dtype_bytes * model.width  # the last norm's input, and the head's
    kept = batch.num_tokens * (model.num_layers * kept_by_layer + ends)

    # The last MLP in backward; a tied head's gradient waits for the embedding's.
    last_mlp = batch.num_tokens * dtype_bytes * (model.width + 2 * model.mlp_width)
    if is_checkpointed:
        last_mlp += batch.num_tokens * layer
    if model.is_tied:
        last_mlp += dtype_bytes * _trained_head(model)
    scores = 0
    if not is_fused:
        num_scores = model.num_heads * batch.num_tokens * batch.num_keys
        scores = TRAINED_SCORE_BYTES * num_scores
    head = head_bytes(model, batch, dtype, is_on_cpu=is_on_cpu)
    # The head, the last MLP and the scores never coincide.
    in_layer = int(transient_factor * max(last_mlp, scores))
    in_head = int(transient_factor * head.transient)
    if head.kept + in_head > in_layer:
        return ActivationBytes(kept + head.kept, in_head)
    return ActivationBytes(kept, in_layer)


def layer_bytes(model: ModelSize, dtype: str) -> int:
    """Return what a decoder layer keeps of a token for backward.

    It keeps the stream before attention and before the MLP, plain and normed (4 H); queries and
    keys before and after their norm, values and output (3 (Hq + Hkv) D); and of a gated MLP 4 I. A
    norm whose weight is trained also keeps its normed input, and a norm in a narrow dtype its input
    in float32.
    """
    dtype_bytes = DTYPE_BYTES[dtype]
    num_heads = model.num_heads + model.num_key_value_heads
    heads = num_heads * model.head_size
    plain = 4 * model.width + 3 * heads + 4 * model.mlp_width
    normed = 2 * model.width + heads
    per_normed = 0
    if model.num_trained is None:
        per_normed += dtype_bytes
    if dtype_bytes < FLOAT_BYTES:
        per_normed += FLOAT_BYTES
    return dtype_bytes * plain + per_normed * normed


def head_bytes(model: ModelSize, batch: TrainedBatch, dtype: str, *, is_on_cpu: bool) -> HeadBytes:
    """Return what the head allocates for the logits, which `logprobs` computes in chunks."""
    row = FLOAT_BYTES * model.vocabulary_size
    most_bytes = CPU_CHUNK_BYTES if is_on_cpu else CHUNK_BYTES
    num_chunks = -(-batch.num_targets * row // most_bytes)
    rows_per_chunk = -(-batch.num_targets // num_chunks)
    chunk = rows_per_chunk * row
    gradient = DTYPE_BYTES[dtype]
    kept = 0
    if num_chunks > 1:  # that of one chunk, and the sum
        gradient += FLOAT_BYTES
        if is_on_cpu:
            kept = chunk * min(num_chunks, CPU_KEPT_BYTES // chunk)
    forward = NUM_LIVE_CHUNKS * chunk
    backward = 2 * chunk + gradient * _trained_head(model)
    return HeadBytes(kept, max(forward, backward))


def gathered_bytes(model: ModelSize, dtype: str, *, drops_layers: bool) -> int:
    """Return what a sharded model holds whole on each rank. `drops_layers` (`train.reshard`): the
    outer weights, the layer that computes and the next one, and the largest gradient, which is
    summed in float32; else all weights and gradients."""
    dtype_bytes = DTYPE_BYTES[dtype]
    is_lora = model.num_trained is not None
    if not drops_layers:
        num_trained = model.num_weights if model.num_trained is None else model.num_trained
        return dtype_bytes * model.num_weights + FLOAT_BYTES * num_trained
    outer = model.outer_weights
    layer = model.layer_weights // model.num_layers
    gathered = dtype_bytes * (outer + 2 * layer)
    if is_lora:  # the gradients of adapters are small
        return gathered
    return gathered + (dtype_bytes + FLOAT_BYTES) * max(outer, layer)


def _trained_head(model: ModelSize) -> int:
    """Return how many elements the head's gradient has."""
    return 0 if model.num_trained is not None else model.vocabulary_size * model.width
