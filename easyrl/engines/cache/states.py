"""The states of one step of the embedded engine: what its layers with a state run, from which state
on, and where they leave it.

    a row's newest token        from the row's state                        to the row
    a resumed row's tokens      from the row's state                        to the row
    a node's new tokens         from its own state, or that of its parent   to the node
    a whole prompt              from the beginning                          to the node

Runs of the same length are computed together. They are never padded: a state would decay through
the padding.

Shapes: T tokens of the step, H the model's width; B runs of a batch, L tokens of each.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from easyrl.engines.cache.nodes import Node
from easyrl.engines.cache.stores import Places, States
from easyrl.model.mixers.recurrent import RunLayer


class Place(NamedTuple):
    """Where one state is stored."""

    is_row: bool  # else in a slot
    number: int


class Run(NamedTuple):
    """Tokens of the step that a layer reads one after the other."""

    tokens: range
    source: Place | None  # the state before them; None: they begin a sequence
    target: Place  # that behind them
    level: int = 0
    """Runs of level 0 continue what is stored, those of level 1 runs of level 0, and so on."""


class _Batch(NamedTuple):
    """Runs that are computed together."""

    tokens: Tensor  # [B, L]
    sources: Places | None
    targets: Places


def runs_of_step(num_active: int, num_new: Sequence[int], nodes: Sequence[Node]) -> list[Run]:
    """Return the runs of a step before its nodes are stored: of active rows with one new token, of
    resumed rows with `num_new`, and of nodes, in this order."""
    runs = list[Run]()
    num_tokens = 0
    lengths_of_rows = [1] * num_active + [*num_new]
    for row, length in enumerate(lengths_of_rows):
        tokens = range(num_tokens, num_tokens + length)
        place = Place(is_row=True, number=row)
        runs.append(Run(tokens, source=place, target=place))
        num_tokens = tokens.stop

    for node in nodes:
        tokens = range(num_tokens, num_tokens + len(node) - node.num_stored)
        target = Place(is_row=False, number=node.slot)
        source: Place | None = None
        if node.num_stored:
            source = target
        elif node.parent is not None:
            source = Place(is_row=False, number=node.parent.slot)
        runs.append(Run(tokens, source, target, _level_of(node)))
        num_tokens = tokens.stop
    return runs


def _level_of(node: Node) -> int:
    """Return the level of the run of a node's new tokens, in a step that may compute the nodes
    above, too."""
    if node.num_stored or node.parent is None or node.parent.is_stored:
        return 0
    return 1 + _level_of(node.parent)


class StepStates:
    """The states of a step, in all layers."""

    def __init__(self, states: States, runs: Sequence[Run], device: torch.device) -> None:
        self._states = states
        self._batches = _batches_of(runs, device)
        self._num_scanned = 0  # layers with a state that have run

    def scan(self, run: RunLayer, hidden: Tensor) -> Tensor:
        """Return a layer's outputs [T, H] for the step's hidden states [T, H]."""
        layer = self._num_scanned
        self._num_scanned += 1
        outputs = torch.empty_like(hidden)
        for batch in self._batches:
            state = self._states.before(layer, batch.sources)
            outputs[batch.tokens] = run(hidden[batch.tokens], state)
            self._states.store(layer, batch.targets, state)
        return outputs


def _batches_of(runs: Sequence[Run], device: torch.device) -> list[_Batch]:
    """Group runs by level, length and kind of place; those of lower levels come first."""
    together: dict[tuple[int, int, bool, bool], list[Run]] = {}
    for run in runs:
        is_start = run.source is None
        key = (run.level, len(run.tokens), run.target.is_row, is_start)
        together.setdefault(key, []).append(run)
    batches = []
    for key in sorted(together):
        members = together[key]
        tokens = np.array([list(run.tokens) for run in members])
        sources = [run.source for run in members if run.source is not None]
        batch = _Batch(
            tokens=torch.from_numpy(tokens).to(device),
            sources=_places(sources, device) if sources else None,
            targets=_places([run.target for run in members], device),
        )
        batches.append(batch)
    return batches


def _places(places: Sequence[Place], device: torch.device) -> Places:
    """Join places, all of rows or all of slots. Rows that stand side by side become a slice, so
    that their states are read and written where they are."""
    is_row = places[0].is_row
    numbers = np.array([place.number for place in places])
    first = int(numbers[0])
    stop = first + len(numbers)
    are_adjacent = np.array_equal(numbers, np.arange(first, stop))
    if is_row and are_adjacent:
        return Places(is_row, slice(first, stop))
    on_device = torch.from_numpy(numbers).to(device)
    return Places(is_row, on_device)
