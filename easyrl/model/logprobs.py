"""Log-probabilities of given tokens at the sampling temperature, a chunk of logits at a time.

The logits of a large vocabulary are by far the largest tensor of training. So a chunk of hidden
states is reduced to two numbers per token; backward recomputes its logits. On the CPU the logits of
the last chunks are kept instead, as many as fit in CPU_KEPT_BYTES.

    hidden [K, H] ─► chunk [n, H] ─► head ─► logits [n, V] ─► logprobs [n], entropy [n]

Each chunk reads the head's weight, and adds to its gradient. So chunks are large on accelerators,
and the gradient is added in float32: in bfloat16 every addition would round the sum.

Shapes: K tokens, n of them in a chunk, H the model's width, V tokens of the vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from easyrl.model import CHUNK_BYTES, CPU_CHUNK_BYTES, CPU_KEPT_BYTES
from easyrl.model.files import FLOAT_BYTES
from easyrl.model.policy import Policy

LEAST_LOGPROB = -1e30  # of a token of probability 0: finite, so that 0 times it is 0
BLOCK = 128  # tokens of the vocabulary that are summed first


class TokenLogprobs(NamedTuple):
    """Of K tokens, in float32, in nats."""

    logprobs: Tensor  # [K]
    entropies: Tensor  # [K] of the distribution that the token was drawn from


def chunked_token_logprobs(
    policy: Policy,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    entropy_gradient: bool = False,
) -> TokenLogprobs:
    """Compute `token_logprobs(policy.head(hidden), targets, temperature)` of hidden states [K, H]
    and targets [K], a chunk at a time."""
    is_on_cpu = hidden.device.type == "cpu"
    chunk_bytes = CPU_CHUNK_BYTES if is_on_cpu else CHUNK_BYTES
    row_bytes = policy.vocabulary_size * FLOAT_BYTES
    num_tokens = len(targets)
    num_chunks = -(-num_tokens * row_bytes // chunk_bytes)
    if num_chunks <= 1:
        logits = policy.head(hidden)
        return token_logprobs(logits, targets, temperature, entropy_gradient=entropy_gradient)
    chunk_length = -(-num_tokens // num_chunks)
    num_kept = 0
    if is_on_cpu and torch.is_grad_enabled():
        num_kept = CPU_KEPT_BYTES // (chunk_length * row_bytes)
    # Weights that the head does not use get no gradient.
    weights = policy.trained_parameters()
    chunked = _Chunks(policy.head, chunk_length, targets, temperature, entropy_gradient, num_kept)
    return TokenLogprobs(*_TokenLogprobs.apply(chunked, hidden, *weights))  # type: ignore[no-untyped-call]


def token_logprobs(
    logits: Tensor, targets: Tensor, temperature: float, *, entropy_gradient: bool = False
) -> TokenLogprobs:
    """Return log-probabilities and entropies of targets [K], given logits [K, V]: of the sampling
    distribution softmax(logits / temperature). The entropies have a gradient only with
    `entropy_gradient`, which an entropy bonus needs."""
    in_one = _Chunks(
        lambda rows: rows, max(1, len(targets)), targets, temperature, entropy_gradient
    )
    return TokenLogprobs(*_TokenLogprobs.apply(in_one, logits))  # type: ignore[no-untyped-call]


def shifted_scores(logits: Tensor, temperature: float) -> Tensor:
    """Return logits / temperature [K, V] in float32, shifted so that the largest of a row is 0."""
    # Such tensors are read and written as seldom as possible: on accelerators that is the time.
    largest = logits.detach().amax(dim=-1, keepdim=True).float()
    scores = torch.sub(logits, largest).float()
    return scores if temperature == 1.0 else scores.div_(temperature)


def block_sums(values: Tensor) -> Tensor:
    """Sum BLOCK columns each: [K, V] -> [K, V / BLOCK, rounded up]; this keeps the long tail."""
    num_whole = values.shape[1] // BLOCK
    whole = values[:, : num_whole * BLOCK]
    rest = values[:, num_whole * BLOCK :]
    sums = whole.view(len(values), num_whole, BLOCK).sum(dim=-1)
    if rest.shape[1] == 0:
        return sums
    return torch.cat([sums, rest.sum(dim=-1, keepdim=True)], dim=1)


@dataclass(frozen=True, slots=True)
class _Chunks:
    """What all chunks of a computation have in common."""

    head: Callable[[Tensor], Tensor]  # [n, H] -> logits [n, V]
    length: int  # n
    targets: Tensor  # [K]
    temperature: float
    has_entropy_gradient: bool
    num_kept: int = 0  # the last chunks, whose logits are kept for backward


class _ChunkLogits(NamedTuple):
    """The logits of a chunk, with the graph of their gradient."""

    rows: Tensor  # [n, H], a leaf of the graph
    logits: Tensor  # [n, V]


def _differentiable_logits(head: Callable[[Tensor], Tensor], rows: Tensor) -> _ChunkLogits:
    """Compute head(rows) for backward, also where gradients are disabled."""
    with torch.enable_grad():
        leaf = rows.detach().requires_grad_()
        return _ChunkLogits(leaf, head(leaf))


class _TokenLogprobs(torch.autograd.Function):
    """Log-probabilities and entropies. The logits head(hidden) exist a chunk at a time, and again
    in backward. With scores s, t = Σ exp(s), p = exp(s) / t, target y:

    log p_y = s_y - log t;      d log p_y / d logits = (1[y] - p) / T
    H = log t - Σ exp(s) s / t;          d H / d logits = -p (log p + H) / T
    """

    @staticmethod
    def forward(
        ctx: Any, chunks: _Chunks, hidden: Tensor, *weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`weights`: those of the head, among others, so that they get a gradient."""
        reduced = list[_Reduced]()
        kept = list[_ChunkLogits]()
        starts = range(0, len(hidden), chunks.length)
        for number, start in enumerate(starts):
            rows = hidden[start : start + chunks.length]
            targets = chunks.targets[start : start + chunks.length]
            if number < len(starts) - chunks.num_kept:
                reduced.append(_reduce(chunks.head(rows), targets, chunks.temperature))
            else:
                kept.append(_differentiable_logits(chunks.head, rows))
                reduced.append(_reduce(kept[-1].logits, targets, chunks.temperature))
        logprobs = torch.cat([each.logprobs for each in reduced])
        entropies = torch.cat([each.entropies for each in reduced])
        log_totals = torch.cat([each.log_totals for each in reduced])
        if not chunks.has_entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, chunks.targets, entropies, log_totals)
        ctx.chunks = chunks
        ctx.kept = kept
        ctx.weights = weights
        return logprobs, entropies

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(
        ctx: Any, of_logprobs: Tensor | None, of_entropies: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, targets, entropies, log_totals = ctx.saved_tensors
        chunks: _Chunks = ctx.chunks
        kept: list[_ChunkLogits] = ctx.kept
        if of_logprobs is None:
            of_logprobs = torch.zeros_like(entropies)
        of_hidden = torch.empty_like(hidden)
        of_weights: list[Tensor | None] = [None] * len(ctx.weights)
        for start in reversed(range(0, len(targets), chunks.length)):
            chunk = slice(start, start + chunks.length)
            if kept:  # those of the last chunks, and this loop begins with the last one
                rows, logits = kept.pop()
            else:
                rows, logits = _differentiable_logits(chunks.head, hidden[chunk])
            of_logits = _gradient_of_logits(
                logits.detach(),
                targets[chunk],
                entropies[chunk],
                log_totals[chunk],
                chunks.temperature,
                of_logprobs=of_logprobs[chunk],
                of_entropies=None if of_entropies is None else of_entropies[chunk],
            )
            of_rows, *of_chunk = torch.autograd.grad(
                logits, (rows, *ctx.weights), of_logits.to(logits.dtype), allow_unused=True
            )
            of_hidden[chunk] = of_rows
            _add_in_float32(of_weights, of_chunk)
        return None, of_hidden, *of_weights


class _Reduced(NamedTuple):
    """The numbers per token that a chunk's logits are reduced to. Shape of each: [n]."""

    logprobs: Tensor
    entropies: Tensor
    log_totals: Tensor


def _reduce(logits: Tensor, targets: Tensor, temperature: float) -> _Reduced:
    """Reduce logits [n, V] by the formulas of `_TokenLogprobs`."""
    scores = shifted_scores(logits, temperature)
    del logits  # so that three tensors of this size exist at most, unless it is kept
    exponentials = scores.exp()
    total = block_sums(exponentials).sum(dim=-1)
    log_total = total.log()
    logprobs = scores.gather(1, targets.unsqueeze(1)).squeeze(1) - log_total
    weighted = exponentials.mul_(scores).nansum(dim=-1)  # 0 · log 0 is 0
    return _Reduced(logprobs, log_total - weighted / total, log_total)


def _gradient_of_logits(
    logits: Tensor,
    targets: Tensor,
    entropies: Tensor,
    log_totals: Tensor,
    temperature: float,
    *,
    of_logprobs: Tensor,
    of_entropies: Tensor | None,
) -> Tensor:
    """Return the gradient [n, V] of a chunk's logits by the formulas of `_TokenLogprobs`."""
    log_probabilities = shifted_scores(logits, temperature)
    log_probabilities.sub_(log_totals.unsqueeze(1))
    of_targets = (of_logprobs / temperature).unsqueeze(1)  # [n, 1]
    if of_entropies is None:
        gradient = log_probabilities.exp_().mul_(-of_targets)
    else:
        gradient = log_probabilities.exp()
        slopes = log_probabilities.clamp_(min=LEAST_LOGPROB).add_(entropies.unsqueeze(1))
        slopes.mul_((of_entropies / temperature).unsqueeze(1)).add_(of_targets)
        gradient.mul_(slopes.neg_())
    return gradient.scatter_add_(1, targets.unsqueeze(1), of_targets)


def _add_in_float32(sums: list[Tensor | None], added: Sequence[Tensor | None]) -> None:
    """Add gradients to their sums, which are None before the first one."""
    for number, gradient in enumerate(added):
        if gradient is None:
            continue
        total = sums[number]
        if total is None:
            sums[number] = gradient.to(torch.float32, copy=True)
        else:
            total.add_(gradient)
