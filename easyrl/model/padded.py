"""Whole sequences as a padded batch: the exact way for models that cannot attend in packed rows.

    [s1 s1 s1 | s2 | s3 s3] ──spread──► [[s1 s1 s1] [s2 . .] [s3 s3 .]] ──model──► ──gather──► [T]

Padding stands behind what is real, where a causal model does not look. So it needs no mask, and
transformers' own code makes of each row what it makes of the sequence alone.

Shapes: T tokens of the packed row, B sequences, L the longest of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

PADDING = 0
"""A token's number, any one."""


class PaddedRows:
    """Where the tokens of a packed row of whole sequences stand in the batch."""

    def __init__(self, position_ids: Tensor) -> None:
        """`position_ids` [T]: a sequence begins where they begin again at 0."""
        begins = position_ids == 0
        row = begins.cumsum(0) - 1  # [T]
        starts = begins.nonzero().squeeze(1)  # [B]
        places = torch.arange(len(position_ids), device=position_ids.device)
        assert bool((places - starts[row] == position_ids).all()), "a prompt is shared"
        self._shape = len(starts), int(position_ids.max()) + 1
        self._cells = row * self._shape[1] + position_ids  # [T]

    def spread(self, tokens: Tensor) -> Tensor:
        """[T] -> [B, L]"""
        batch = tokens.new_full((self._shape[0] * self._shape[1],), PADDING)
        batch[self._cells] = tokens
        return batch.view(self._shape)

    def gather(self, states: Tensor) -> Tensor:
        """[B, L, ...] -> [T, ...]"""
        return states.flatten(0, 1)[self._cells]
