"""What layers store for a node and for a row: keys and values of each token, or one state.

A store has a *slot* for each node, whose number and size grow, and a fixed number of *rows*, each
for the tokens of one sequence behind the nodes that it continues.

    keys and values    a cell for each token; a row has the cells of its own tokens
    states             one for each node and row, that behind its last token

Layers are numbered by the order in which a forward calls them: a module may be called twice.

Shapes: C slots of P cells (P: tokens of the longest node), S rows of R cells, T tokens, Hkv
key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from easyrl.layout.tree import Ints
from easyrl.model.mixers.recurrent import MixerState, StateName

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


class RowCopies(NamedTuple):
    """Nodes that are copied to rows, from the same cell of each row on."""

    rows: Ints  # [M]
    slots: Ints  # [M]: of the nodes
    first_cell: int
    longest: int  # tokens of the longest node


class RowStarts(NamedTuple):
    """Rows that start, each behind the node of a prompt."""

    rows: Ints  # [N]
    slots: Ints  # [N]: of the nodes
    copies: Sequence[RowCopies]  # what rows start with, from their first cells on


class Store(Protocol):
    """Memory for one kind of layer: of all nodes, and of all rows."""

    can_cut: bool
    """Whether nodes and rows can be continued behind any of their tokens, not only the last."""

    def resize(self, num_slots: int, num_cells: int) -> None:
        """Allocate so many slots of so many cells. What is stored keeps its place."""

    def copy(self, source: Span, target: Span) -> None:
        """Copy cells, or the state behind the last of them. Source and target may overlap."""

    def start_rows(self, starts: RowStarts) -> None:
        """Start rows behind nodes."""

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

    def start_rows(self, starts: RowStarts) -> None:
        for rows, slots, first_cell, longest in starts.copies:
            cells = slice(first_cell, first_cell + longest)
            row_tensors = self._tensors(is_row=True)
            node_tensors = self._tensors(is_row=False)
            for row_cells, node_cells in zip(row_tensors, node_tensors, strict=True):
                row_cells[rows, :, cells] = node_cells[slots, :, :longest]

    def move_rows(self, sources: Ints, targets: Ints, num_cells: int) -> None:
        of_rows = [tensor[:, :, :num_cells] for tensor in self._tensors(is_row=True)]
        _move(of_rows, sources, targets)

    @property
    def numbers_per_cell(self) -> int:
        """Elements of the keys of one token in a layer; 0 before a layer is seen, or without
        attention."""
        if not self.rows:
            return 0
        first_keys, _ = self.rows[0]
        return first_keys[0, :, 0].numel()

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in chain(*self.rows, *self.nodes))


class Places(NamedTuple):
    """The rows or slots that hold the states of a batch of B sequences."""

    is_row: bool  # in rows; else in slots
    numbers: slice | Tensor  # of B rows or slots


class _LayerStates(NamedTuple):
    """The states of one layer, by name: of all rows [S, ...] and of all slots [C, ...]."""

    rows: dict[StateName, Tensor]
    nodes: dict[StateName, Tensor]

    def at(self, *, is_row: bool) -> dict[StateName, Tensor]:
        return self.rows if is_row else self.nodes


class States:
    """The states of all layers that have one, allocated when a layer is first seen."""

    can_cut = False

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._num_slots = 0
        self._layers: list[_LayerStates] = []

    def before(self, layer: int, places: Places | None) -> MixerState:
        """Return the states of a batch in a layer; None: sequences begin. A kernel may write them
        in place: those of rows, which the batch continues, but slots are copied."""
        if places is None:
            return MixerState()
        stored = self._layers[layer].at(is_row=places.is_row)
        batch = {name: tensor[places.numbers] for name, tensor in stored.items()}
        return MixerState(batch)

    def store(self, layer: int, places: Places, state: MixerState) -> None:
        """Store the states behind a batch in a layer."""
        if layer == len(self._layers):
            self._add_layer(state)
        stored = self._layers[layer].at(is_row=places.is_row)
        for name, tensor in state.tensors.items():
            stored[name][places.numbers] = tensor

    def _add_layer(self, state: MixerState) -> None:
        """Allocate a layer with the shapes and dtypes of a batch's states [B, ...]."""
        rows = {}
        nodes = {}
        for name, tensor in state.tensors.items():
            own_shape = tensor.shape[1:]
            rows[name] = tensor.new_zeros(self._num_rows, *own_shape)
            nodes[name] = tensor.new_zeros(self._num_slots, *own_shape)
        self._layers.append(_LayerStates(rows, nodes))

    def resize(self, num_slots: int, num_cells: int) -> None:
        self._num_slots = num_slots
        for layer in self._layers:
            for name, old in layer.nodes.items():
                new = old.new_zeros(num_slots, *old.shape[1:])
                num_kept = min(num_slots, len(old))
                new[:num_kept] = old[:num_kept]
                layer.nodes[name] = new

    def copy(self, source: Span, target: Span) -> None:
        for layer in self._layers:
            sources = layer.at(is_row=source.is_row)
            targets = layer.at(is_row=target.is_row)
            for name, states in sources.items():
                targets[name][target.number] = states[source.number]

    def start_rows(self, starts: RowStarts) -> None:
        for layer in self._layers:
            for name, states in layer.nodes.items():
                layer.rows[name][starts.rows] = states[starts.slots]

    def move_rows(self, sources: Ints, targets: Ints, num_cells: int) -> None:
        of_rows = [tensor for layer in self._layers for tensor in layer.rows.values()]
        _move(of_rows, sources, targets)

    @property
    def num_bytes(self) -> int:
        total = 0
        for layer in self._layers:
            for tensor in chain(layer.rows.values(), layer.nodes.values()):
                total += tensor.nbytes
        return total


def _zeros(token: Tensor, number: int, num_cells: int) -> Tensor:
    """Return cells for tokens like `token` [T, Hkv, D]: [number, Hkv, num_cells, D]."""
    _, num_heads, head_size = token.shape
    return token.new_zeros(number, num_heads, num_cells, head_size)


def _move(tensors: Sequence[Tensor], sources: Ints, targets: Ints) -> None:
    """Move rows of each tensor [S, ...] to the places of others, in half of the time of
    indexing."""
    if not tensors:
        return
    device = tensors[0].device
    source_rows = torch.from_numpy(sources).to(device)
    target_rows = torch.from_numpy(targets).to(device)
    for tensor in tensors:
        moved = tensor.index_select(0, source_rows)
        tensor.index_copy_(0, target_rows, moved)


def _resized(old: Tensor, num_slots: int, num_cells: int) -> Tensor:
    """Return a copy [num_slots, Hkv, num_cells, D] with the cells that both sizes have."""
    old_slots, num_heads, old_cells, head_size = old.shape
    new = old.new_zeros(num_slots, num_heads, num_cells, head_size)
    kept_slots = min(old_slots, num_slots)
    kept_cells = min(old_cells, num_cells)
    kept = old[:kept_slots, :, :kept_cells]
    new[:kept_slots, :, :kept_cells] = kept
    return new
