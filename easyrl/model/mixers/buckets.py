"""Nodes of similar length, padded to the longest of them: a bucket.

A kernel computes many nodes at once if they have one length. Wide buckets waste scores of padding,
many buckets waste calls.

Shapes: T tokens of the packed row, N nodes; of a bucket: B nodes, L the longest of them. Of a row
of tokens: Hkv key/value heads, G query heads for each of them (1 for keys and values), D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from easyrl.layout.tree import Ints, TokenTree

BUCKET_SCORES = 8000
"""Cost of another bucket, in padded scores. Measured with the demo's model on one core: a bucket's
calls take as long as this many scores of 4 heads, forward and backward."""

LANES = 16
"""Float32 numbers in the widest vector register. PyTorch's fused kernel processes the remainder of
a row of scores one by one: 79 keys take 1.5 times as long as 80."""


def padded_length(length: int) -> int:
    """Return the length, or the next multiple of LANES if that is faster to compute."""
    remainder = length % LANES
    if remainder <= LANES // 2:
        return length
    return length + LANES - remainder


@dataclass(frozen=True, slots=True)
class Bucket:
    """B nodes of similar length. Its B * L cells hold their tokens and padding, node by node."""

    longest: int  # L
    tokens: Tensor  # [B*L] int64: the token of each cell; 0 for padding
    padding: Tensor  # int64: the cells that are padding
    real: Tensor  # int64: the cells that are not padding
    tokens_of_real: Tensor  # int64: the token of each of these

    def take(self, tokens: Tensor, padding: float | None = None) -> Tensor:
        """Copy tokens [T, ...] to cells [B, L, ...]. Padding cells hold any value, or `padding`."""
        cells = tokens.index_select(0, self.tokens)
        if padding is not None:
            cells.index_fill_(0, self.padding, padding)
        return cells.view(-1, self.longest, *tokens.shape[1:])

    def put(self, tokens: Tensor, block: Tensor) -> None:
        """Write the real cells of a block [B*Hkv, G, L, D] to their tokens in [T, Hkv, G, D]."""
        num_heads = tokens.shape[1]
        cells = block.view(-1, num_heads, *block.shape[1:])  # [B, Hkv, G, L, D]
        cells = cells.permute(0, 3, 1, 2, 4).reshape(-1, *tokens.shape[1:])  # [B*L, Hkv, G, D]
        real = cells.index_select(0, self.real)
        tokens.index_copy_(0, self.tokens_of_real, real.to(tokens.dtype))  # may be wider


def make_buckets(tree: TokenTree, device: torch.device) -> list[Bucket]:
    """Divide the nodes of a tree into buckets, the longest nodes first.

    The nodes are sorted by length, so that a bucket is a range of them. The cuts minimize the sum
    of padded scores and BUCKET_SCORES for each bucket, by dynamic programming over the distinct
    widths.
    """
    longest_first = np.argsort(-tree.lengths, kind="stable")
    starts = tree.starts[longest_first]
    lengths = tree.lengths[longest_first]
    # W distinct widths, falling; the nodes of width w are those from bounds[w] to bounds[w + 1].
    widths = np.array([padded_length(length) for length in lengths.tolist()])
    negative_widths, first_nodes = np.unique(-widths, return_index=True)
    bounds = np.append(first_nodes, len(lengths))  # [W + 1]
    least_cost = np.zeros(len(bounds), dtype=np.int64)  # of the nodes before each bound
    last_cut = np.zeros(len(bounds), dtype=np.int64)  # where the last of their buckets begins
    for stop in range(1, len(bounds)):
        num_nodes = bounds[stop] - bounds[:stop]
        costs = least_cost[:stop] + num_nodes * negative_widths[:stop] ** 2
        last_cut[stop] = costs.argmin()
        least_cost[stop] = costs.min() + BUCKET_SCORES
    cuts = [len(negative_widths)]
    while cuts[-1] > 0:
        cuts.append(int(last_cut[cuts[-1]]))
    buckets = list[Bucket]()
    for first, last in pairwise(reversed(cuts)):
        nodes = slice(bounds[first], bounds[last])
        buckets.append(_make_bucket(starts[nodes], lengths[nodes], device))
    return buckets


def _make_bucket(starts: Ints, lengths: Ints, device: torch.device) -> Bucket:
    """`starts`, `lengths` [B]: of the nodes, the longest first."""
    longest = padded_length(int(lengths[0]))
    offsets = np.arange(longest)
    is_real = (offsets < lengths[:, None]).reshape(-1)  # [B*L]
    numbers = (starts[:, None] + offsets).reshape(-1)
    tokens = np.where(is_real, numbers, 0)
    real = np.flatnonzero(is_real)

    def on_device(array: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return Bucket(
        longest=longest,
        tokens=on_device(tokens),
        padding=on_device(np.flatnonzero(~is_real)),
        real=on_device(real),
        tokens_of_real=on_device(tokens[real]),
    )
