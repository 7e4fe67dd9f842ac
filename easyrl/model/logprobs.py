"""Log-probabilities of given tokens at the sampling temperature, a chunk of logits at a time.

The logits of a large vocabulary are by far the largest tensor of training. So a chunk of hidden
states is reduced to two numbers per token; backward recomputes its logits.

    hidden [K, H] ─► chunk [n, H] ─► head ─► logits [n, V] ─► logprobs [n], entropy [n]

Each chunk reads the head's weight, and adds to its gradient. So chunks are large on accelerators,
and the gradient is added in float32: in bfloat16 every addition would round the sum.

Shapes: K tokens, n of them in a chunk, H the model's width, V tokens of the vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from easyrl.model import CHUNK_BYTES, CPU_CHUNK_BYTES
from easyrl.model.policy import Policy

LEAST_LOGPROB = -1e30  # of a token of probability 0: finite, so that 0 times it is 0
BLOCK = 128  # tokens of the vocabulary that are summed first


def chunked_token_logprobs(
    policy: Policy,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute `token_logprobs(policy.head(hidden), targets, temperature)` of hidden states [K, H]
    and targets [K], a chunk at a time."""

    chunk_bytes = CPU_CHUNK_BYTES if hidden.device.type == "cpu" else CHUNK_BYTES
    num_chunks = -(-len(targets) * policy.vocabulary_size * 4 // chunk_bytes)
    if num_chunks <= 1:
        logits = policy.head(hidden)
        return token_logprobs(logits, targets, temperature, entropy_gradient=entropy_gradient)
    num_rows = -(-len(targets) // num_chunks)
    logprobs, entropies = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        *(policy.head, num_rows, targets, temperature, entropy_gradient, hidden),
        *policy.trained_parameters(),  # that the head does not use get no gradient
    )
    return logprobs, entropies


def token_logprobs(
    logits: Tensor, targets: Tensor, temperature: float, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities [K] and entropies [K] of targets [K], given logits [K, V]: of the
    sampling distribution softmax(logits / temperature), in float32, in nats. The entropies have a
    gradient only with `entropy_gradient`, which an entropy bonus needs."""
    logprobs, entropies = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        lambda rows: rows, max(1, len(targets)), targets, temperature, entropy_gradient, logits
    )
    return logprobs, entropies


def shifted_scores(logits: Tensor, temperature: float) -> Tensor:
    """Return logits / temperature [K, V] in float32, shifted so that the largest of a row is 0."""
    # Such tensors are read and written as seldom as possible: on accelerators that is the time.
    scores = torch.sub(logits, logits.detach().amax(dim=-1, keepdim=True).float()).float()
    return scores if temperature == 1.0 else scores.div_(temperature)


def block_sums(values: Tensor) -> Tensor:
    """Sum BLOCK columns each: [K, V] -> [K, V / BLOCK, rounded up]; this keeps the long tail."""
    num_whole = values.shape[1] // BLOCK
    whole, rest = values[:, : num_whole * BLOCK], values[:, num_whole * BLOCK :]
    sums = whole.view(len(values), num_whole, BLOCK).sum(dim=-1)
    return torch.cat([sums, rest.sum(dim=-1, keepdim=True)], dim=1) if rest.shape[1] else sums


class _TokenLogprobs(torch.autograd.Function):
    """Log-probabilities and entropies. The logits head(hidden) exist a chunk at a time, and again
    in backward. With scores s, t = Σ exp(s), p = exp(s) / t, target y:

    log p_y = s_y - log t;      d log p_y / d logits = (1[y] - p) / T
    H = log t - Σ exp(s) s / t;          d H / d logits = -p (log p + H) / T
    """

    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any,
        head: Callable[[Tensor], Tensor],
        num_rows: int,
        targets: Tensor,
        temperature: float,
        entropy_gradient: bool,
        hidden: Tensor,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        chunks = []
        parts = torch.split(hidden, num_rows), torch.split(targets, num_rows)
        for rows, chosen in zip(*parts, strict=True):
            scores = shifted_scores(head(rows), temperature)
            exponentials = scores.exp()
            total = block_sums(exponentials).sum(dim=-1)
            logprobs = scores.gather(1, chosen.unsqueeze(1)).squeeze(1) - total.log()
            weighted = exponentials.mul_(scores).nansum(dim=-1)  # 0 · log 0 is 0
            chunks.append((logprobs, total.log() - weighted / total, total.log()))
        logprobs, entropies, log_totals = map(torch.cat, zip(*chunks, strict=True))
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, targets, entropies, log_totals)
        ctx.head, ctx.num_rows, ctx.temperature, ctx.weights = head, num_rows, temperature, weights
        return logprobs, entropies

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(
        ctx: Any, of_logprobs: Tensor | None, of_entropies: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, targets, entropies, log_totals = ctx.saved_tensors
        if of_logprobs is None:
            of_logprobs = torch.zeros_like(entropies)
        of_hidden = torch.empty_like(hidden)
        of_weights: list[Tensor | None] = [None] * len(ctx.weights)
        for start in reversed(range(0, len(targets), ctx.num_rows)):
            chunk = slice(start, start + ctx.num_rows)
            with torch.enable_grad():
                rows = hidden[chunk].detach().requires_grad_()
                logits = ctx.head(rows)
            scores = shifted_scores(logits.detach(), ctx.temperature)
            scores.sub_(log_totals[chunk].unsqueeze(1))
            chosen = (of_logprobs[chunk] / ctx.temperature).unsqueeze(1)  # [n, 1]
            if of_entropies is None:
                gradient = scores.exp_().mul_(-chosen)
            else:
                gradient = scores.exp()
                slopes = scores.clamp_(min=LEAST_LOGPROB).add_(entropies[chunk].unsqueeze(1))
                slopes.mul_((of_entropies[chunk] / ctx.temperature).unsqueeze(1)).add_(chosen)
                gradient.mul_(slopes.neg_())
            gradient.scatter_add_(1, targets[chunk].unsqueeze(1), chosen)
            of_hidden[chunk], *of_chunk = torch.autograd.grad(
                logits, (rows, *ctx.weights), gradient.to(logits.dtype), allow_unused=True
            )
            for number, added in enumerate(of_chunk):
                if added is not None and (total := of_weights[number]) is not None:
                    total.add_(added)
                elif added is not None:
                    of_weights[number] = added.to(torch.float32, copy=True)
        return None, None, None, None, None, of_hidden, *of_weights
