"""What layers store for a node and for a row: keys and values of each token.

A store has a *slot* for each node, whose number and size grow, and a fixed number of *rows*, each
for the tokens of one sequence behind the nodes that it continues.

Shapes: C slots of P cells (P: tokens of the longest node), S rows of R cells, T tokens, Hkv
key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple, Protocol

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

        row_keys = _zeros(key, self._num_rows, self._cells_per_row)
        row_values = _zeros(value, self._num_rows, self._cells_per_row)
        self.rows.append((row_keys, row_values))

        node_keys = _zeros(key, self._num_slots, self._cells_per_slot)
        node_values = _zeros(value, self._num_slots, self._cells_per_slot)
        self.nodes.append((node_keys, node_values))

    def resize(self, num_slots: int, num_cells: int) -> None:
        self._num_slots = num_slots
        self._cells_per_slot = num_cells
        for layer, (keys, values) in enumerate(self.nodes):
            new_keys = _resized(keys, num_slots, num_cells)
            new_values = _resized(values, num_slots, num_cells)
            self.nodes[layer] = (new_keys, new_values)

    def copy(self, source: Span, target: Span) -> None:
        sources = self._tensors(is_row=source.is_row)
        targets = self._tensors(is_row=target.is_row)
        for source_tensor, target_tensor in zip(sources, targets, strict=True):
            copied = source.of(source_tensor)
            target_cells = target.of(target_tensor)
            target_cells.copy_(copied.clone())  # the cells may overlap

    def _tensors(self, *, is_row: bool) -> Iterator[Tensor]:
        """Iterate over the keys and values of each layer."""
        layers = self.rows if is_row else self.nodes
        return chain(*layers)

    def start_rows(self, slots: Ints, rows: Ints, num_cells: int) -> None:
        row_tensors = self._tensors(is_row=True)
        node_tensors = self._tensors(is_row=False)
        for row_cells, node_cells in zip(row_tensors, node_tensors, strict=True):
            row_cells[rows, :, :num_cells] = node_cells[slots, :, :num_cells]

    def move_rows(self, sources: Ints, targets: Ints, num_cells: int) -> None:
        first_keys, _ = self.rows[0]
        device = first_keys.device
        source_rows = torch.from_numpy(sources).to(device)
        target_rows = torch.from_numpy(targets).to(device)
        for tensor in self._tensors(is_row=True):
            cells = tensor[:, :, :num_cells]
            _move(cells, source_rows, target_rows)

    @property
    def num_bytes(self) -> int:
        tensors = chain(*self.rows, *self.nodes)
        total = 0
        for tensor in tensors:
            total += tensor.nbytes
        return total


def _zeros(token: Tensor, number: int, num_cells: int) -> Tensor:
    """Return cells for tokens like `token` [T, Hkv, D]: [number, Hkv, num_cells, D]."""
    _, num_heads, head_size = token.shape
    return token.new_zeros(number, num_heads, num_cells, head_size)


def _move(cells: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Move cells [S, Hkv, n, D] from rows to others, in half of the time of indexing."""
    moved = cells.index_select(0, sources)
    cells.index_copy_(0, targets, moved)


def _resized(old: Tensor, num_slots: int, num_cells: int) -> Tensor:
    """Return a copy [num_slots, Hkv, num_cells, D] with the cells that both sizes have."""
    old_slots, num_heads, old_cells, head_size = old.shape
    new = old.new_zeros(num_slots, num_heads, num_cells, head_size)
    kept_slots = min(old_slots, num_slots)
    kept_cells = min(old_cells, num_cells)
    kept = old[:kept_slots, :, :kept_cells]
    new[:kept_slots, :, :kept_cells] = kept
    return new
