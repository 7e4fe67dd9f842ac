"""Log-probabilities of given tokens at the sampling temperature, a chunk of logits at a time.

The logits of a large vocabulary are by far the largest tensor of training (8,192 tokens times a
vocabulary of 151,936: 4.6 GiB). So they never exist all at once: a chunk of hidden states passes
through the model's head and is reduced to two numbers per token; backward recomputes its logits.

    hidden [K, H] ─► chunk [n, H] ─► head ─► logits [n, V] ─► logprobs [n], entropy [n]

Each chunk reads the head's weight, and adds to its gradient. So chunks are large on accelerators,
and the gradient is added in float32: in bfloat16 every addition would round the sum.

Shapes: K tokens, n of them in a chunk, H the model's width, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from easyrl.model import CHUNK_BYTES, CPU_CHUNK_BYTES

LEAST_LOGPROB = -1e30
"""Log-probability of a token of probability 0: finite, so that 0 times it is 0."""


def chunked_token_logprobs(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    weights: Sequence[Tensor],
    vocabulary_size: int,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute `token_logprobs(head(hidden), targets, temperature)` of hidden states [K, H] and
    targets [K], a chunk at a time.

    `head` maps [n, H] to logits [n, V], row by row. `weights` may get a gradient through it. If all
    logits fit a chunk it is called once, and nothing is computed twice.
    """

    def chunk_logprobs(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return token_logprobs(head(hidden), targets, temperature, entropy_gradient=entropy_gradient)

    chunk_bytes = CPU_CHUNK_BYTES if hidden.device.type == "cpu" else CHUNK_BYTES
    num_chunks = -(-len(targets) * vocabulary_size * 4 // chunk_bytes)
    if num_chunks <= 1:
        return chunk_logprobs(hidden, targets)
    num_rows = -(-len(targets) // num_chunks)
    logprobs, entropies = _Chunks.apply(  # type: ignore[no-untyped-call]
        chunk_logprobs, num_rows, entropy_gradient, targets, hidden, *weights
    )
    return logprobs, entropies


class _Chunks(torch.autograd.Function):
    """The log-probabilities and entropies of all chunks, computed again in backward."""

    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any,
        chunk_logprobs: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        num_rows: int,
        entropy_gradient: bool,
        targets: Tensor,
        hidden: Tensor,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        chunks = zip(hidden.split(num_rows), targets.split(num_rows), strict=True)
        logprobs, entropies = zip(*(chunk_logprobs(*rows) for rows in chunks), strict=True)
        ctx.save_for_backward(hidden, targets)
        ctx.chunk_logprobs, ctx.num_rows, ctx.weights = chunk_logprobs, num_rows, weights
        results = torch.cat(logprobs), torch.cat(entropies)
        if not entropy_gradient:
            ctx.mark_non_differentiable(results[1])
        return results

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *of_results: Tensor) -> tuple[Tensor | None, ...]:
        hidden, _ = ctx.saved_tensors
        of_hidden = torch.empty_like(hidden)
        of_weights: dict[int, Tensor] = {}  # by number
        trained = [number for number, weight in enumerate(ctx.weights) if weight.requires_grad]
        parts = (each.split(ctx.num_rows) for each in (*ctx.saved_tensors, of_hidden, *of_results))
        for chunk, targets, of_rows, *of_chunk in reversed([*zip(*parts, strict=True)]):
            with torch.enable_grad():
                rows = chunk.detach().requires_grad_()
                outputs = [out for out in ctx.chunk_logprobs(rows, targets) if out.requires_grad]
            inputs = rows, *(ctx.weights[number] for number in trained)
            gradients = torch.autograd.grad(
                outputs, inputs, of_chunk[: len(outputs)], allow_unused=True
            )
            of_rows.copy_(gradients[0])
            for number, gradient in zip(trained, gradients[1:], strict=True):
                if gradient is None:
                    continue
                if number in of_weights:
                    of_weights[number] += gradient
                else:
                    of_weights[number] = gradient.to(torch.float32, copy=True)
        cast = [
            of_weights[number].to(weight.dtype) if number in of_weights else None
            for number, weight in enumerate(ctx.weights)
        ]
        return None, None, None, None, of_hidden, *cast


def token_logprobs(
    logits: Tensor, targets: Tensor, temperature: float, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Logits [K, V] and targets [K] -> log-probabilities [K] and entropies [K].

    Both are of the sampling distribution softmax(logits / temperature), in float32, in nats. The
    entropies have a gradient only with `entropy_gradient`, which an entropy bonus needs.
    """
    logprobs, entropies = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        logits, targets, temperature, entropy_gradient
    )
    return logprobs, entropies


def log_softmax(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Logits [K, V] -> log-probabilities and probabilities [K, V] of softmax(logits / temperature),
    in float32. (On the CPU torch.log_softmax loses part of a long tail: with 262,144 words its
    log-probabilities are 4e-5 too high.)"""
    # Large tensors are changed in place: a copy costs memory and, on accelerators, time.
    scores = logits.to(torch.float32, copy=True).div_(temperature)
    scores.sub_(scores.amax(dim=-1, keepdim=True))
    probabilities = scores.exp()
    total = probabilities.sum(dim=-1, keepdim=True)
    return scores.sub_(total.log()), probabilities.div_(total)


class _TokenLogprobs(torch.autograd.Function):
    """Log-probability and entropy. With p = softmax(logits / T), H = -Σ p log p, target t:

    d log p_t / d logits = (1[target] - p) / T;   dH / d logits = -p (log p + H) / T.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        all_logprobs, probabilities = log_softmax(logits, temperature)
        logprobs = all_logprobs.gather(1, targets.unsqueeze(1)).squeeze(1)
        all_logprobs.clamp_(min=LEAST_LOGPROB)  # 0 · log 0 is 0
        entropies = probabilities.mul_(all_logprobs).sum(dim=-1).neg_()
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(all_logprobs, targets, entropies)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        return logprobs, entropies

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(
        ctx: Any, of_logprobs: Tensor | None, of_entropies: Tensor | None
    ) -> tuple[Tensor | None, None, None, None]:
        all_logprobs, targets, entropies = ctx.saved_tensors
        if of_logprobs is None:
            of_logprobs = torch.zeros_like(entropies)
        chosen = (of_logprobs / ctx.temperature).unsqueeze(1)  # [K, 1]
        gradient = all_logprobs.exp()
        if of_entropies is None:
            gradient.mul_(-chosen)
        else:
            slopes = all_logprobs + entropies.unsqueeze(1)
            slopes.mul_((of_entropies / ctx.temperature).unsqueeze(1)).add_(chosen)
            gradient.mul_(slopes.neg_())
        gradient.scatter_add_(1, targets.unsqueeze(1), chosen)
        return gradient.to(ctx.dtype), None, None, None
