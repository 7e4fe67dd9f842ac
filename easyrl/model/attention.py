"""The one attention function of EasyRL, registered with transformers.

A model loaded with `attn_implementation="easyrl"` builds no mask of its own. Every forward
hands a *layout* through the model's keyword arguments:

    model(input_ids, position_ids=..., attention_layout=layout)

and each layer calls `layout.attend(...)`. The layout knows which tokens of the row belong
together; the model's code is not touched. The trainer's layout is `PackedGroups`; the
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
_Ints = np.ndarray[Any, np.dtype[np.int64]]

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


class PackedGroups:
    """Groups one after another in a row, `[P | R1 | R2 | ...]` each: the prompt stands there once.

    Every completion is causal behind its prompt and sees no other. Linear layers see each prompt
    once and no padding. Attention alone works on whole sequences `P + R`, padded to the longest of
    a *bucket* of similar lengths: behind a causal mask the padding is never looked at. A prompt's
    queries are computed with every completion there, and taken from one of them.
    """

    def __init__(
        self,
        groups: Sequence[tuple[int, Sequence[int]]],
        device: torch.device | str = "cpu",
    ) -> None:
        """`groups`: of each its P, and the R of its completions (none: the prompt stands alone)."""
        sequences = _Sequences.of(groups)
        self._buckets = _make_buckets(sequences.lengths)
        cells = [sequences.cells(bucket) for bucket in self._buckets]
        token = np.concatenate([tokens for tokens, _ in cells])  # [C]
        is_real = np.concatenate([real for _, real in cells])  # [C]
        cell_of_token = np.empty(sequences.num_tokens, dtype=np.int64)  # [T]
        cell_of_token[token[is_real]] = np.flatnonzero(is_real)  # of a prompt: its last copy
        is_chosen = cell_of_token[token] == np.arange(len(token))  # [C]
        copies = np.flatnonzero(is_real & ~is_chosen)

        def on_device(array: np.ndarray[Any, Any]) -> Tensor:
            return torch.from_numpy(array).to(device)

        self._index = _CellIndex(
            token_of_cell=on_device(token),
            cell_of_token=on_device(cell_of_token),
            not_chosen=on_device(~is_chosen),
            copies=on_device(copies),
            token_of_copy=on_device(token[copies]),
        )

    @classmethod
    def of_sequences(
        cls, lengths: Sequence[int], device: torch.device | str = "cpu"
    ) -> PackedGroups:
        """Whole sequences that share nothing."""
        return cls([(length, ()) for length in lengths], device)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings
    ) -> Tensor:
        spread = [_spread(x, self._index) for x in (query, key, value)]  # 3 x [C, H, D]
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
        return _collect(torch.cat(outputs), self._index)


@dataclass(frozen=True, slots=True)
class _Sequences:
    """Where the prompt and the completion of every sequence stand in the row: 4 x [sequences]."""

    prompt_starts: _Ints
    prompt_lengths: _Ints
    completion_starts: _Ints
    lengths: _Ints  # P + R
    num_tokens: int  # T

    @classmethod
    def of(cls, groups: Sequence[tuple[int, Sequence[int]]]) -> _Sequences:
        rows: list[tuple[int, int, int, int]] = []
        place = 0
        for prompt_length, completion_lengths in groups:
            prompt_start = place
            place += prompt_length
            for length in completion_lengths:
                rows.append((prompt_start, prompt_length, place, prompt_length + length))
                place += length
            if not completion_lengths:
                rows.append((prompt_start, prompt_length, place, prompt_length))
        columns = np.array(rows, dtype=np.int64).T
        return cls(columns[0], columns[1], columns[2], columns[3], num_tokens=place)

    def cells(self, bucket: _Bucket) -> tuple[_Ints, np.ndarray[Any, np.dtype[np.bool_]]]:
        """Of every cell of the bucket [B*L]: its token in the row, and whether it has one."""
        chosen = bucket.sequences[:, None]  # [B, 1]
        places = np.arange(bucket.longest)[None, :]  # [1, L]
        prompt_lengths = self.prompt_lengths[chosen]
        tokens = np.where(
            places < prompt_lengths,
            self.prompt_starts[chosen] + places,
            self.completion_starts[chosen] + places - prompt_lengths,
        )
        is_real = places < self.lengths[chosen]
        return np.where(is_real, tokens, 0).reshape(-1), is_real.reshape(-1)


@dataclass(frozen=True, slots=True)
class _Bucket:
    sequences: _Ints  # [B], their numbers in the row
    longest: int  # L

    @property
    def num_cells(self) -> int:
        return len(self.sequences) * self.longest


def _make_buckets(sizes: _Ints) -> list[_Bucket]:
    """Sequences by length, so that none is padded to more than BUCKET_RATIO times its own."""
    by_length = np.argsort(-sizes, kind="stable")
    buckets = []
    while len(by_length):
        longest = int(sizes[by_length[0]])
        count = int((sizes[by_length] * BUCKET_RATIO >= longest).sum())
        buckets.append(_Bucket(by_length[:count], longest))
        by_length = by_length[count:]
    return buckets


@dataclass(frozen=True, slots=True)
class _CellIndex:
    """Which token of the row each cell holds, and which cell answers for each token."""

    token_of_cell: Tensor  # [C] int64
    cell_of_token: Tensor  # [T] int64
    not_chosen: Tensor  # [C] bool: padding, and copies of a token that another cell answers for
    copies: Tensor  # int64: cells that hold such a copy
    token_of_copy: Tensor  # int64: their tokens


def _spread(tokens: Tensor, index: _CellIndex) -> Tensor:
    """[T, H, D] -> [C, H, D]"""
    cells: Tensor = _Spread.apply(tokens, index)  # type: ignore[no-untyped-call]
    return cells


def _collect(cells: Tensor, index: _CellIndex) -> Tensor:
    """[C, H, D] -> [T, H, D]"""
    tokens: Tensor = _Collect.apply(cells, index)  # type: ignore[no-untyped-call]
    return tokens


class _Spread(torch.autograd.Function):
    """`index_select` whose inverse is known: backward is a gather, and a sum over the copies."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, index: _CellIndex) -> Tensor:
        ctx.index = index
        return tokens.index_select(0, index.token_of_cell)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        cells, index = gradients[0].contiguous(), ctx.index
        tokens = cells.index_select(0, index.cell_of_token)
        if len(index.copies):
            tokens.index_add_(0, index.token_of_copy, cells.index_select(0, index.copies))
        return tokens, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cells: Tensor, index: _CellIndex) -> Tensor:
        ctx.index = index
        return cells.index_select(0, index.cell_of_token)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        index = ctx.index
        cells = gradients[0].contiguous().index_select(0, index.token_of_cell)
        cells.masked_fill_(index.not_chosen.view(-1, *[1] * (cells.dim() - 1)), 0.0)
        return cells, None


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
