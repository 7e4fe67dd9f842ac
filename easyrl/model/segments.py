"""The segments of a packed row (prompts and completions) as padded blocks of similar length.

A kernel takes many segments at once if they are of one length. So those of similar length are
padded to the longest of them: a bucket. Wide buckets waste scores, many buckets waste calls.

Shapes: T tokens of the packed row, Hkv key/value heads, G query heads for each of them, D head
size; B segments of a bucket, L the length that they are padded to. What is called "tokens" is
[T, Hkv, G, D], "cells" [B, L, Hkv, G, D], a block [B*Hkv, G, L, D].
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

BUCKET_SCORES = 8000
"""What another bucket costs, in scores of padding: measured with the demo's model on one core,
where a bucket's calls take as long as that many scores of 4 heads, forward and backward."""

LANES = 16
"""Float32 numbers of the widest vector register. PyTorch's fused kernel goes one by one through
the end of a row of scores that is no multiple of it: 79 keys take half as long again as 80."""

_Ints = np.ndarray[Any, np.dtype[np.int64]]
_Lengths = TypeVar("_Lengths", int, _Ints)


def padded_length(lengths: _Lengths) -> _Lengths:
    """Each length, or the next multiple of LANES where that is quicker to compute."""
    return lengths + (-lengths % LANES) * (lengths % LANES > LANES // 2)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Segments of similar length, padded to the longest: B of them, L the longest."""

    num_segments: int
    longest: int
    whole: slice | None
    """Where they stand, if they are of one length and follow each other: they need no copy."""
    tokens: Tensor  # [B*L] int64: of each cell its token in the row; 0 where it is padding
    padding: Tensor  # int64: the cells that are padding
    real: Tensor  # int64: the cells that are not padding
    tokens_of_real: Tensor  # int64

    def take(self, tokens: Tensor, padding: float | None = None) -> Tensor:
        """[T, ...] -> cells [B, L, ...]; what stands in padding is anything, or `padding`."""
        shape = (self.num_segments, self.longest, *tokens.shape[1:])
        if self.whole is not None:
            return tokens[self.whole].view(shape)
        cells = tokens.index_select(0, self.tokens)
        if padding is not None:
            cells.index_fill_(0, self.padding, padding)
        return cells.view(shape)

    def put(self, tokens: Tensor, block: Tensor) -> None:
        """Write a block's real cells to their places in [T, ...]."""
        cells = _to_cells(block, self.num_segments)
        if self.whole is not None:
            tokens[self.whole].view(cells.shape).copy_(cells)
        else:
            real = cells.reshape(-1, *tokens.shape[1:]).index_select(0, self.real)
            tokens.index_copy_(0, self.tokens_of_real, real.to(tokens.dtype))  # may be wider


def make_buckets(segments: _Ints, device: torch.device) -> list[Bucket]:
    """Segments [n, 2] (start, length) in buckets, the longest first.

    Of all cuts of the segments, ordered by length, the one whose scores and buckets together cost
    least (dynamic programming over the distinct widths).
    """
    longest_first = segments[np.argsort(-segments[:, 1], kind="stable")]
    falling, starts = np.unique(-padded_length(longest_first[:, 1]), return_index=True)
    bounds = np.append(starts, len(segments))  # of the segments of each width
    least = np.zeros(len(bounds), dtype=np.int64)  # cost of the segments before each bound
    previous = np.zeros(len(bounds), dtype=np.int64)  # where the last of their buckets begins
    for stop in range(1, len(bounds)):
        costs = least[:stop] + (bounds[stop] - bounds[:stop]) * falling[:stop] ** 2
        previous[stop] = costs.argmin()
        least[stop] = costs.min() + BUCKET_SCORES
    cuts = [len(falling)]
    while cuts[-1]:
        cuts.append(int(previous[cuts[-1]]))
    return [
        _make_bucket(longest_first[bounds[start] : bounds[stop]], device)
        for stop, start in pairwise(cuts)
    ][::-1]


def _make_bucket(segments: _Ints, device: torch.device) -> Bucket:
    starts, lengths = segments[:, :1], segments[:, 1:]  # 2 x [B, 1]
    longest = padded_length(int(lengths[0, 0]))
    places = np.arange(longest)[None, :]  # [1, L]
    is_real = (places < lengths).reshape(-1)
    tokens = np.where(is_real, (starts + places).reshape(-1), 0)
    real = np.flatnonzero(is_real)
    follow = is_real.all() and bool((np.diff(tokens) == 1).all())

    def on_device(array: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return Bucket(
        num_segments=len(segments),
        longest=longest,
        whole=slice(int(tokens[0]), int(tokens[-1]) + 1) if follow else None,
        tokens=on_device(tokens),
        padding=on_device(np.flatnonzero(~is_real)),
        real=on_device(real),
        tokens_of_real=on_device(tokens[real]),
    )


def _to_cells(block: Tensor, num_segments: int) -> Tensor:
    """[B*Hkv, G, L, D] -> [B, L, Hkv, G, D]"""
    by_segment = block.view(num_segments, -1, *block.shape[1:])
    return by_segment.permute(0, 3, 1, 2, 4)
