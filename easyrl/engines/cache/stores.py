"""What layers store for a node and for a row: keys and values of each token.

A store has a *slot* for each node, whose number and size grow, and a fixed number of *rows*, each
for the tokens of one sequence behind the nodes that it continues.

Shapes: C slots of P cells (P: tokens of the longest node), S rows of R cells, T tokens, Hkv
key/value heads, D head size.
"""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from easyrl.layout.tree import Ints

Cells = tuple[Tensor, Tensor]  # keys and values of a layer: 2 x [C, Hkv, P, D] or [S, Hkv, R, D]


class Span(NamedTuple):
    """Some cells of a slot or a row."""

    is_row: bool
    number: int
    start: int
    stop: int

    def of(self, cells: Tensor) -> Tensor:
        """[C, Hkv, P, D] or [S, Hkv, R, D] -> [Hkv, n, D]"""
        return cells[self.number, :, self.start : self.stop]


class Store(Protocol):
    """What one kind of layer stores. Keys and values have a cell for each token; a recurrent state
    has one for each node and row, that behind its last token."""

    can_cut: bool
    """Whether nodes and rows can be continued behind any of their tokens, not only the last."""

    def resize(self, num_slots: int, num_cells: int) -> None:
        """Allocate so many slots of so many cells. What is stored keeps its place."""

    def copy(self, source: Span, target: Span) -> None:
        """Copy cells; source and target may overlap."""

    def start_rows(self, slots: Ints, rows: Ints, num_cells: int) -> None:
        """Copy the first cells of each slot to the start of a row."""

    def move_rows(self, sources: Ints, targets: Ints, num_cells: int) -> None:
        """Move the first cells of rows."""


class KeysValues:
    """The keys and values of all attention layers, allocated when a layer is first seen."""

    can_cut = True

    def __init__(self, num_rows: int, cells_per_row: int) -> None:
        self._num_rows = num_rows
        self._cells_per_row = cells_per_row
        self._num_slots = 0
        self._cells_per_slot = 0
        self.rows: list[Cells] = []  # by layer
        self.nodes: list[Cells] = []  # by layer

    def add_layer(self, key: Tensor, value: Tensor) -> None:
        """Allocate a layer with the heads and dtype of key and value: 2 x [T, Hkv, D]."""

        def zeros(token: Tensor, number: int, length: int) -> Tensor:
            num_heads, head_size = token.shape[1:]
            return token.new_zeros(number, num_heads, length, head_size)

        def both(number: int, length: int) -> Cells:
            return zeros(key, number, length), zeros(value, number, length)

        self.rows.append(both(self._num_rows, self._cells_per_row))
        self.nodes.append(both(self._num_slots, self._cells_per_slot))

    def resize(self, num_slots: int, num_cells: int) -> None:
        self._num_slots = num_slots
        self._cells_per_slot = num_cells

        def resized(old: Tensor) -> Tensor:
            old_slots, num_heads, old_cells, head_size = old.shape
            new = old.new_zeros(num_slots, num_heads, num_cells, head_size)
            kept_slots = min(old_slots, num_slots)
            kept_cells = min(old_cells, num_cells)
            new[:kept_slots, :, :kept_cells] = old[:kept_slots, :, :kept_cells]
            return new

        for layer, (keys, values) in enumerate(self.nodes):
            self.nodes[layer] = resized(keys), resized(values)

    def copy(self, source: Span, target: Span) -> None:
        sources = self.rows if source.is_row else self.nodes
        targets = self.rows if target.is_row else self.nodes
        for cells, copy in zip(chain(*sources), chain(*targets), strict=True):
            target.of(copy).copy_(source.of(cells).clone())

    def start_rows(self, slots: Ints, rows: Ints, num_cells: int) -> None:
        for cache, nodes in zip(chain(*self.rows), chain(*self.nodes), strict=True):
            cache[rows, :, :num_cells] = nodes[slots, :, :num_cells]

    def move_rows(self, sources: Ints, targets: Ints, num_cells: int) -> None:
        device = self.rows[0][0].device
        of = torch.from_numpy(np.asarray(sources)).to(device)
        to = torch.from_numpy(np.asarray(targets)).to(device)
        for cache in chain(*self.rows):
            cells = cache[:, :, :num_cells]
            cells.index_copy_(0, to, cells.index_select(0, of))  # half of the time of indexing

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in chain(*self.rows, *self.nodes))
