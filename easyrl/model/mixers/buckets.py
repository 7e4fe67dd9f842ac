"""Nodes of similar length, padded to the longest of them: a bucket.

A kernel computes many nodes at once if they have one length. Wide buckets waste scores of padding,
many buckets waste calls.

Shapes: T tokens of the packed row, N nodes; of a bucket: B nodes, L the longest of them. Of a row
of tokens: Hkv key/value heads, G query heads for each of them (1 for keys and values), D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

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
        num_key_heads = tokens.shape[1]
        real = _to_cells(block, num_key_heads).index_select(0, self.real)
        real = real.to(tokens.dtype)  # a block may be wider
        tokens.index_copy_(0, self.tokens_of_real, real)


def _to_cells(block: Tensor, num_key_heads: int) -> Tensor:
    """[B*Hkv, G, L, D] -> [B*L, Hkv, G, D]"""
    _, num_groups, longest, head_size = block.shape
    by_head = block.view(-1, num_key_heads, num_groups, longest, head_size)
    by_cell = by_head.permute(0, 3, 1, 2, 4)  # [B, L, Hkv, G, D]
    return by_cell.reshape(-1, num_key_heads, num_groups, head_size)


def make_buckets(tree: TokenTree, device: torch.device) -> list[Bucket]:
    """Divide the nodes of a tree into buckets, the longest nodes first.

    The nodes are sorted by length, so that a bucket is a range of them.
    """
    longest_first = np.argsort(-tree.lengths, kind="stable")
    starts = tree.starts[longest_first]
    lengths = tree.lengths[longest_first]
    widths = np.array([padded_length(length) for length in lengths.tolist()])
    cuts = _cheapest_cuts(widths)
    buckets = list[Bucket]()
    for first, stop in pairwise(cuts):
        bucket = _make_bucket(starts[first:stop], lengths[first:stop], device)
        buckets.append(bucket)
    return buckets


def _cheapest_cuts(widths: Ints) -> list[int]:
    """Divide nodes of these widths [N], the widest first, into ranges. Return each one's first node
    and, at the end, N.

    A range costs the padded scores of its nodes, and BUCKET_SCORES. The sum is minimized by dynamic
    programming over the W distinct widths, between which there is no reason to cut.
    """
    num_nodes = len(widths)
    _, first_nodes = np.unique(-widths, return_index=True)  # [W] where a width begins
    scores = widths[first_nodes] ** 2  # [W] of each node in a range that begins there
    least_costs = np.zeros(1, dtype=np.int64)  # of the nodes before each of the first bounds
    last_cuts = [0]  # node at which the last of their ranges begins
    bounds = [*first_nodes.tolist(), num_nodes]
    for number, stop in enumerate(bounds[1:], start=1):
        begins = first_nodes[:number]  # where the last range may begin
        num_in_range = stop - begins
        costs = least_costs + num_in_range * scores[:number]
        cheapest = costs.argmin()
        last_cuts.append(int(begins[cheapest]))
        least_cost = costs[cheapest] + BUCKET_SCORES
        least_costs = np.append(least_costs, least_cost)
    last_cut_before = dict(zip(bounds, last_cuts, strict=True))
    cuts = [num_nodes]
    while cuts[0] > 0:
        previous = last_cut_before[cuts[0]]
        cuts.insert(0, previous)
    return cuts


def _make_bucket(starts: Ints, lengths: Ints, device: torch.device) -> Bucket:
    """`starts`, `lengths` [B]: of the nodes, the longest first."""
    longest = padded_length(int(lengths[0]))
    offsets = np.arange(longest)
    is_real = offsets < lengths[:, None]  # [B, L]
    every_token = starts[:, None] + offsets  # [B, L], beyond the node where it is padding
    token_of_cell = np.where(is_real, every_token, 0)  # [B, L]
    tokens = torch.from_numpy(token_of_cell.reshape(-1))
    padding = torch.from_numpy(np.flatnonzero(~is_real))
    real = torch.from_numpy(np.flatnonzero(is_real))
    return Bucket(
        longest=longest,
        tokens=tokens.to(device),
        padding=padding.to(device),
        real=real.to(device),
        tokens_of_real=tokens[real].to(device),
    )
