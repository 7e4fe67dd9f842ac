"""Attention of one block of queries to one block of keys, forward and backward.

Softmax over keys that come in several blocks is put together from the blocks: each gives its
output and the log-sum-exp of its scores (`merge`). Backward goes block by block as well: with the
*whole* output and log-sum-exp at hand, a block's probabilities are `exp(scores - logsumexp)`
(FlashAttention-2, arXiv 2307.08691, algorithm 2). So no block's scores are ever kept.

Two kernels with the same signatures: PyTorch's fused one for CPUs, and one of plain operations for
whatever that does not offer: soft-capping, values of another size than keys (multi-head latent
attention), and devices that are not CPUs.

Shapes: B sequences, H query heads, L queries, S keys, D head size, of values and output as well
where it is the same. Keys and values have H heads or are expanded to them (stride 0); their
gradients come back with H heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

HIDDEN = -1e30
"""Added to a score that must not count. Finite: a query may have no visible key in a block."""


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """What a layer asks of its attention besides query, key and value."""

    layer: int
    scaling: float
    sliding_window: int | None
    softcap: float | None


@dataclass(frozen=True, slots=True)
class Block:
    """Queries [B, H, L, D] with the keys and values [B, H, S, D] that they look at."""

    query: Tensor
    key: Tensor
    value: Tensor
    is_causal: bool  # only where L == S
    bias: Tensor | None  # [L, S], added to the scores


@dataclass(frozen=True, slots=True)
class Kernel:
    forward: Callable[[Block, AttentionSettings], tuple[Tensor, Tensor]]
    """Output [B, H, L, D] and the scores' log-sum-exp [B, H, L, 1] in float32 or wider."""
    backward: Callable[
        [Tensor, Tensor, Tensor, Block, AttentionSettings], tuple[Tensor, Tensor, Tensor]
    ]
    """Gradients of query, key and value from the output's gradient, the whole output and the whole
    log-sum-exp."""


def choose_kernel(query: Tensor, value: Tensor, settings: AttentionSettings) -> Kernel:
    is_offered = settings.softcap is None and query.shape[-1] == value.shape[-1]
    return FUSED if query.device.type == "cpu" and is_offered else PLAIN


def merge(output: Tensor, logsumexp: Tensor, other: Tensor, other_logsumexp: Tensor) -> None:
    """Make `output` [..., D], `logsumexp` [..., 1] those of one softmax over both blocks' keys."""
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
    """Scores [B, H, L, S] in float32 or wider, and tanh(score / softcap) where there is such."""
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
