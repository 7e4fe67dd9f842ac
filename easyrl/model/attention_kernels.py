"""Attention of one block of queries to one block of keys, forward and backward.

A softmax over keys in several blocks is merged from the blocks: each gives its output and the
log-sum-exp of its scores (`merge`). Backward also runs block by block: given the *merged* output
and log-sum-exp, a block's probabilities are `exp(scores - logsumexp)` (FlashAttention-2,
arXiv 2307.08691, algorithm 2). So no block's scores are kept.

Two kernels have the same signatures: PyTorch's fused one for CPUs, and one of plain operations for
what that does not support: soft-capping, values of another size than keys (multi-head latent
attention), and devices other than CPUs.

Shapes: B sequences, H query heads, L queries, S keys, D head size (values and output may have
another). Keys and values have H heads or are expanded to H (stride 0); their gradients have H.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

HIDDEN = -1e30
"""Added to hidden scores. Finite, because a query may have no visible key in a block."""


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """A layer's attention parameters."""

    layer: int
    scaling: float
    sliding_window: int | None
    softcap: float | None


@dataclass(frozen=True, slots=True)
class Block:
    """Queries [B, H, L, D] with the keys and values [B, H, S, D] that they attend to."""

    query: Tensor
    key: Tensor
    value: Tensor
    is_causal: bool  # only where L == S
    bias: Tensor | None  # [L, S], added to the scores


@dataclass(frozen=True, slots=True)
class Kernel:
    forward: Callable[[Block, AttentionSettings], tuple[Tensor, Tensor]]
    """Return the output [B, H, L, D] and the scores' log-sum-exp [B, H, L, 1], float32 or wider."""
    backward: Callable[
        [Tensor, Tensor, Tensor, Block, AttentionSettings], tuple[Tensor, Tensor, Tensor]
    ]
    """Return the gradients of query, key and value, given the output's gradient, the merged output
    and the merged log-sum-exp."""


def choose_kernel(query: Tensor, value: Tensor, settings: AttentionSettings) -> Kernel:
    is_supported = settings.softcap is None and query.shape[-1] == value.shape[-1]
    return FUSED if query.device.type == "cpu" and is_supported else PLAIN


def merge(output: Tensor, logsumexp: Tensor, other: Tensor, other_logsumexp: Tensor) -> None:
    """Update `output` [..., D], `logsumexp` [..., 1] to those of one softmax over both blocks."""
    whole = torch.logaddexp(logsumexp, other_logsumexp)
    output *= torch.exp(logsumexp - whole)
    output += other * torch.exp(other_logsumexp - whole)
    logsumexp.copy_(whole)


# -- PyTorch's fused kernel for CPUs ---------------------------------------------------------------


def _fused_forward(block: Block, settings: AttentionSettings) -> tuple[Tensor, Tensor]:
    outputs: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        block.query,
        block.key,
        block.value,
        0.0,
        block.is_causal,
        attn_mask=block.bias,
        scale=settings.scaling,
    )
    return outputs[0], outputs[1].unsqueeze(-1)


def _fused_backward(
    gradient: Tensor, output: Tensor, logsumexp: Tensor, block: Block, settings: AttentionSettings
) -> tuple[Tensor, Tensor, Tensor]:
    gradients: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient,
        block.query,
        block.key,
        block.value,
        output,
        logsumexp.squeeze(-1),
        0.0,
        block.is_causal,
        attn_mask=block.bias,
        scale=settings.scaling,
    )
    return gradients[0], gradients[1], gradients[2]


# -- plain operations ------------------------------------------------------------------------------


def _scores(block: Block, settings: AttentionSettings) -> tuple[Tensor, Tensor | None]:
    """Return scores [B, H, L, S], float32 or wider, and tanh(score / softcap) if soft-capped."""
    wide = torch.promote_types(block.query.dtype, torch.float32)
    scores = torch.matmul(block.query.to(wide), block.key.to(wide).transpose(-1, -2))
    scores = scores * settings.scaling
    capped = None
    if settings.softcap is not None:
        capped = torch.tanh(scores / settings.softcap)
        scores = capped * settings.softcap
    if block.bias is not None:
        scores = scores + block.bias
    if block.is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores = scores.masked_fill(hidden, HIDDEN)
    return scores, capped


def _plain_forward(block: Block, settings: AttentionSettings) -> tuple[Tensor, Tensor]:
    scores, _ = _scores(block, settings)
    logsumexp = torch.logsumexp(scores, dim=-1, keepdim=True)
    weights = torch.exp(scores - logsumexp)
    return torch.matmul(weights.to(block.value.dtype), block.value), logsumexp


def _plain_backward(
    gradient: Tensor, output: Tensor, logsumexp: Tensor, block: Block, settings: AttentionSettings
) -> tuple[Tensor, Tensor, Tensor]:
    scores, capped = _scores(block, settings)
    weights = torch.exp(scores - logsumexp)
    wide = weights.dtype
    gradient = gradient.to(wide)
    of_value = torch.matmul(weights.transpose(-1, -2), gradient)
    of_weights = torch.matmul(gradient, block.value.to(wide).transpose(-1, -2))
    dot = (gradient * output).sum(dim=-1, keepdim=True)
    of_scores = weights * (of_weights - dot) * settings.scaling
    if capped is not None:
        of_scores = of_scores * (1.0 - capped.square())
    of_query = torch.matmul(of_scores, block.key.to(wide))
    of_key = torch.matmul(of_scores.transpose(-1, -2), block.query.to(wide))
    return of_query, of_key, of_value


FUSED = Kernel(_fused_forward, _fused_backward)
PLAIN = Kernel(_plain_forward, _plain_backward)
