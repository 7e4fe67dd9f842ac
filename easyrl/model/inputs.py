"""What a model is given: a packed row, and how its tokens see each other.

Policy, old policy, reference and teacher in the trainer, and the engines' steps, all hand this to
the model, and nothing else. What else a model may need of a row is a field here: positions of
several axes, or pictures.

Shapes: T tokens of the packed row, K of them with logits; B sequences, L the longest of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from easyrl.layout.tree import NONE, TokenTree
from easyrl.model.mixers.interface import Layout
from easyrl.model.mixers.packed_row import AttentionKernels, PackedRow


@dataclass(frozen=True, slots=True)
class ModelInputs:
    ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64: position of each token in its sequence
    layout: Layout  # how each token sees those before it
    logits_at: Tensor  # [K] int64: numbers of the tokens whose logits are wanted

    @classmethod
    def of_row(
        cls,
        ids: Tensor,
        tree: TokenTree,
        logits_at: Tensor | None = None,
        kernels: AttentionKernels | None = None,
    ) -> Self:
        """Return the inputs for a row whose tokens form `tree`, on the device of `ids`. Without
        `logits_at` every token has logits. `kernels`: of the model that runs the row."""
        positions = torch.from_numpy(tree.positions).to(ids.device)
        if logits_at is None:
            logits_at = torch.arange(len(ids), device=ids.device)
        return cls(ids, positions, PackedRow(tree, ids.device, kernels), logits_at)


def real_tokens(tree: TokenTree, device: torch.device) -> Tensor:
    """Return the mask [B, L] of the tokens in a padded batch of a row's sequences. A causal model
    needs no other mask."""
    assert (tree.parents == NONE).all(), "every sequence is whole"
    lengths = torch.from_numpy(tree.lengths).to(device)  # [B]
    columns = torch.arange(int(tree.lengths.max()), device=device)  # [L]
    return columns < lengths[:, None]
