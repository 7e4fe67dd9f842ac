"""What a model is given: a packed row, and how its tokens see each other.

Policy, old policy, reference and teacher in the trainer, and the engines' steps, all hand this to
the model, and nothing else. Of a row with pictures the model also needs their features, and
positions of several axes in some families: `pictures.Vision` makes these of what is here.

Shapes: T tokens of the packed row, K of them with logits; B sequences, L the longest of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from easyrl.layout.tree import NONE, TokenTree
from easyrl.model.mixers.interface import Layout, Spans
from easyrl.model.mixers.packed_row import AttentionKernels, PackedRow
from easyrl.types import RowPictures


@dataclass(frozen=True, slots=True)
class ModelInputs:
    ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64: position of each token in its sequence
    layout: Layout  # how each token sees those before it
    logits_at: Tensor  # [K] int64: numbers of the tokens whose logits are wanted
    pictures: tuple[RowPictures, ...] = ()  # of the prompts that show some, in the row's order

    @classmethod
    def of_row(
        cls,
        ids: Tensor,
        tree: TokenTree,
        logits_at: Tensor | None = None,
        kernels: AttentionKernels | None = None,
        *,
        pictures: tuple[RowPictures, ...] = (),
        spans: Spans | None = None,
    ) -> Self:
        """Return the inputs for a row whose tokens form `tree`, on the device of `ids`. Without
        `logits_at` every token has logits. `kernels`: of the model that runs the row; `spans`: of
        its pictures, where they see each other in both directions."""
        positions = torch.from_numpy(tree.positions).to(ids.device)
        if logits_at is None:
            logits_at = torch.arange(len(ids), device=ids.device)
        layout = PackedRow(tree, ids.device, kernels, spans)
        return cls(ids, positions, layout, logits_at, pictures)


def real_tokens(tree: TokenTree, device: torch.device) -> Tensor:
    """Return the mask [B, L] of the tokens in a padded batch of a row's sequences. A causal model
    needs no other mask."""
    assert (tree.parents == NONE).all(), "every sequence is whole"
    lengths = torch.from_numpy(tree.lengths).to(device)  # [B]
    columns = torch.arange(int(tree.lengths.max()), device=device)  # [L]
    return columns < lengths[:, None]
