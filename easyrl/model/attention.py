"""The one attention function of EasyRL, registered with transformers.

A model loaded with `attn_implementation="easyrl"` builds no mask of its own. Every forward
hands a *layout* through the model's keyword arguments:

    model(input_ids, position_ids=..., attention_layout=layout)

and each layer calls `layout.attend(...)`. The layout knows which tokens of the row belong
together; the model's code is not touched. The trainer's layout is `PackedSequences`; the
embedded engine brings its own, which reads and writes a KV cache.

Shapes: T tokens of the packed row, Hq query heads, Hkv key/value heads, D head size; of a bucket:
B sequences, L the longest of them; C cells (B x L) of all buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

ATTENTION_NAME = "easyrl"

BUCKET_RATIO = 1.5
"""Longest to shortest sequence that are padded together: less padding, but more kernels."""


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """What a layer asks of its attention besides query, key and value."""

    layer: int
    scaling: float
    sliding_window: int | None
    softcap: float | None


class AttentionLayout(Protocol):
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings
    ) -> Tensor:
        """Attention over the packed row: [T, Hq, D], 2 x [T, Hkv, D] -> [T, Hq, D]."""
        ...


def register_attention() -> None:
    """Make `attn_implementation="easyrl"` known to transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, _attention)


def _attention(
    module: nn.Module,
    query: Tensor,  # [1, Hq, T, D]
    key: Tensor,  # [1, Hkv, T, D]
    value: Tensor,  # [1, Hkv, T, D]
    attention_mask: Tensor | None,
    *,
    attention_layout: AttentionLayout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if s_aux is not None:
        raise ValueError(
            f"model.path: {type(module).__name__} has attention sinks, which EasyRL's attention "
            "cannot compute exactly; choose a model without them"
        )
    if attention_mask is not None:
        raise ValueError(
            f"model.path: {type(module).__name__} makes an attention mask of its own, which "
            "EasyRL's attention cannot follow exactly; choose another model"
        )
    settings = AttentionSettings(
        layer=int(module.layer_idx),  # type: ignore[arg-type]
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
    )
    output = attention_layout.attend(
        query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), settings
    )
    return output.unsqueeze(0), None


class PackedSequences:
    """Several whole sequences one after another in a row, each causal on its own.

    Linear layers see no padding. Attention alone is padded, to the longest of a *bucket* of
    sequences of similar length: behind a causal mask the padding is never looked at.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        sizes = np.asarray(lengths, dtype=np.int64)
        starts = np.cumsum(sizes) - sizes
        token_of_cell, is_real = [], []
        self._buckets = _make_buckets(sizes)
        for bucket in self._buckets:
            places = np.arange(bucket.longest)[None, :]
            inside = places < sizes[bucket.sequences][:, None]  # [B, L]
            tokens = np.where(inside, starts[bucket.sequences][:, None] + places, 0)
            token_of_cell.append(tokens.reshape(-1))
            is_real.append(inside.reshape(-1))
        tokens, real = np.concatenate(token_of_cell), np.concatenate(is_real)  # [C]
        cell_of_token = np.empty(int(sizes.sum()), dtype=np.int64)  # [T]
        cell_of_token[tokens[real]] = np.flatnonzero(real)
        self._token_of_cell = torch.from_numpy(tokens).to(device)
        self._cell_of_token = torch.from_numpy(cell_of_token).to(device)
        self._padding = torch.from_numpy(~real).to(device)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings
    ) -> Tensor:
        spread = [
            _select_once(x, self._token_of_cell, self._cell_of_token) for x in (query, key, value)
        ]  # 3 x [C, H, D]
        outputs = []
        first = 0
        for bucket in self._buckets:
            cells = slice(first, first + bucket.num_cells)
            first += bucket.num_cells
            shape = (len(bucket.sequences), bucket.longest, -1)
            q, k, v = (x[cells].view(*shape, x.shape[-1]).transpose(1, 2) for x in spread)
            repeats = q.shape[1] // k.shape[1]
            if repeats > 1:
                k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
            output = causal_attention(q, k, v, settings).transpose(1, 2)  # [B, L, Hq, D]
            outputs.append(output.reshape(bucket.num_cells, *output.shape[2:]))
        return _select_once(
            torch.cat(outputs), self._cell_of_token, self._token_of_cell, self._padding
        )


@dataclass(frozen=True, slots=True)
class _Bucket:
    sequences: np.ndarray[Any, np.dtype[np.int64]]  # [B], their numbers in the row
    longest: int  # L

    @property
    def num_cells(self) -> int:
        return len(self.sequences) * self.longest


def _make_buckets(sizes: np.ndarray[Any, np.dtype[np.int64]]) -> list[_Bucket]:
    """Sequences by length, so that none is padded to more than BUCKET_RATIO times its own."""
    by_length = np.argsort(-sizes, kind="stable")
    buckets = []
    while len(by_length):
        longest = int(sizes[by_length[0]])
        count = int((sizes[by_length] * BUCKET_RATIO >= longest).sum())
        buckets.append(_Bucket(by_length[:count], longest))
        by_length = by_length[count:]
    return buckets


def _select_once(
    source: Tensor, index: Tensor, inverse: Tensor, unselected: Tensor | None = None
) -> Tensor:
    """`index_select` whose inverse is known, so that its backward is a gather too.

    Rows of the source that `unselected` marks are not in `index`: their gradient is zero.
    """
    selected: Tensor = _SelectOnce.apply(source, index, inverse, unselected)  # type: ignore[no-untyped-call]
    return selected


class _SelectOnce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, source: Tensor, index: Tensor, inverse: Tensor, unselected: Tensor | None
    ) -> Tensor:
        ctx.inverse, ctx.unselected = inverse, unselected
        return source.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        gradient = gradients[0].contiguous().index_select(0, ctx.inverse)
        if ctx.unselected is not None:
            gradient.masked_fill_(ctx.unselected.view(-1, *[1] * (gradient.dim() - 1)), 0.0)
        return gradient, None, None, None


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings
) -> Tensor:
    """Causal attention of whole sequences: 3 x [B, Hq, L, D] -> [B, Hq, L, D]."""
    length = query.shape[2]
    window = settings.sliding_window
    if settings.softcap is None and (window is None or window >= length):
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=settings.scaling
        )
    positions = torch.arange(length, device=query.device)
    distance = positions[:, None] - positions[None, :]
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    if settings.softcap is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, scale=settings.scaling
        )
    bias = torch.zeros_like(visible, dtype=query.dtype).masked_fill_(~visible, float("-inf"))
    return unfused_attention(query, key, value, bias, settings)


def unfused_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, settings: AttentionSettings
) -> Tensor:
    """softmax(softcap(q·k·scaling) + bias)·v, for what the fused kernels do not offer."""
    scores = torch.matmul(query, key.transpose(-1, -2)) * settings.scaling
    if settings.softcap is not None:
        scores = torch.tanh(scores / settings.softcap) * settings.softcap
    weights = torch.softmax(scores + bias, dim=-1, dtype=torch.float32)
    return torch.matmul(weights.to(value.dtype), value)
