"""Decode steps on a GPU, captured as CUDA graphs.

Launching a step's hundreds of short kernels takes longer than running them. A step without prompts
and resumed rows takes from the host only a few integers, and sizes that are rounded up:

    sizes ───► graph of these sizes
    integers ───copy───► its input ───replay───► tokens and log-probabilities of all rows

A step is computed without a graph until its sizes have occurred often enough to capture it. The
first replay must equal the step bit by bit; otherwise nothing is replayed from then on. So the
samples do not depend on what has been captured.

Shapes: n active rows, padded to B with copies of the first; L cells of each; on a level of the tree
of nodes C slots, W places for the rows of each, P tokens of each.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from easyrl import devices
from easyrl.engines import SLOT_STEP, padded
from easyrl.engines.cache.attention import (
    Level,
    NewTokens,
    RowBucket,
    RowBuckets,
    SharedKeys,
    gather_by_slot,
)
from easyrl.engines.cache.cache import NodeCache
from easyrl.engines.sampling import SamplingSettings, sample
from easyrl.layout.tree import NONE, Ints
from easyrl.model.inputs import ModelInputs
from easyrl.model.mixers.interface import LayerSettings
from easyrl.model.mixers.sdpa import Rows
from easyrl.model.policy import Policy
from easyrl.types import Float64

# B, L, C and P are rounded up to multiples of these.
ROW_STEP = 8
CELL_STEP = 128
PROMPT_STEP = 256
CAPTURED_AT = 3  # a step is captured when its sizes occur for the third time
MAX_PADDING = 2**26
"""Elements of keys, in a layer, by which rows may be padded in a step with a graph. Reading them
takes an H100 0.1 ms, an RTX 4090 0.3 ms, and launching a layer's kernels 0.3 ms (calculated)."""
MAX_GRAPHS = 100  # bounds the memory of kernels' arguments, which torch does not count

Drawn = tuple[Tensor, Tensor]  # tokens [B] and their log-probabilities [B]


class _LevelSizes(NamedTuple):
    slots: int  # C
    width: int  # W
    longest: int  # P
    has_all_rows: bool  # whether every row has a node on this level


class _Sizes(NamedTuple):
    rows: int  # B
    cells: int  # L
    levels: tuple[_LevelSizes, ...] = ()  # of the nodes that rows continue


class _LevelInputs(NamedTuple):
    """The integers of a level: numpy arrays on the host, tensors on the device."""

    distances: Any  # [B]: from the first token of a row's node to the row's newest
    is_member: Any  # [B]: whether the row has a node on this level
    places: Any  # [B]: see `gather_by_slot`
    rows_by_place: Any  # [C * W]
    lengths: Any  # [C]: of nodes


class _RowInputs(NamedTuple):
    """The integers of the rows of a step: numpy arrays on the host, tensors on the device."""

    tokens: Any  # [B]: the newest of each row
    positions: Any  # [B]
    uniforms: Any  # [B]: the bits of float64 numbers
    sources: Any  # [B]: the row whose token is computed, not its own number in a copy
    cells: Any  # [B]: of the newest token in its row


class _Inputs(NamedTuple):
    """All integers of a step."""

    rows: _RowInputs
    levels: tuple[_LevelInputs, ...]

    def joined(self) -> Ints:
        """Return the arrays of the host one after the other."""
        arrays = [*self.rows]
        for level in self.levels:
            arrays += level
        return np.concatenate(arrays)

    @classmethod
    def divided(cls, integers: Tensor, sizes: _Sizes) -> _Inputs:
        """Return the parts of what `joined` returned, on the device."""
        lengths = [sizes.rows] * len(_RowInputs._fields)
        for level in sizes.levels:
            lengths += [sizes.rows] * 3 + [level.slots * level.width, level.slots]
        parts = iter(torch.split(integers, lengths))
        rows = _RowInputs(*islice(parts, len(_RowInputs._fields)))
        levels = []
        for _ in sizes.levels:
            level_inputs = _LevelInputs(*islice(parts, len(_LevelInputs._fields)))
            levels.append(level_inputs)
        return cls(rows, tuple(levels))


@dataclass(slots=True)
class _Graph:
    integers: Tensor  # the input
    replay: Callable[[], None]
    drawn: Drawn  # overwritten by each replay


class StepGraphs:
    """The decode steps of an engine. Weights and KV cache must keep their places in memory."""

    def __init__(self, policy: Policy, cache: NodeCache, sampling: SamplingSettings) -> None:
        self._policy = policy
        self._cache = cache
        self._sampling = sampling
        self._graphs: dict[_Sizes, _Graph] = {}
        self._num_seen: Counter[_Sizes] = Counter()
        self._pool: Any = None
        self._num_allocations = 0  # of the prompts that graphs read
        self._can_compute: bool | None = None  # None: not tried
        self._captures = True
        self.num_replays = 0

    def step(self, tokens: Ints, uniforms: Float64, rows: np.ndarray[Any, Any]) -> Drawn | None:
        """Return the next token of every row and its log-probability: 2 x [n]; None if the step
        cannot be captured, or if its rows are too uneven (`MAX_PADDING`). `tokens` [n]: the newest
        of each row; `uniforms` [n]: see `sample`; `rows` [n]: see `StepLayout`."""
        sizes, inputs = self._prepare(tokens, uniforms, rows)
        numbers_per_cell = self._cache.keys_values.numbers_per_cell
        num_used = int((rows["cell"] + 1).sum())
        num_padding = sizes.rows * sizes.cells - num_used  # in cells
        if num_padding * numbers_per_cell > MAX_PADDING:
            return None
        integers = torch.from_numpy(inputs.joined())
        if self._can_compute is None:
            self._can_compute = self._try(sizes, integers.to(self._policy.device))
        if not self._can_compute:
            return None
        if self._num_allocations != self._cache.num_allocations:
            self._graphs.clear()
            self._num_allocations = self._cache.num_allocations
        graph = self._graphs.get(sizes)
        if graph is not None:
            graph.integers.copy_(integers)
            graph.replay()
            self.num_replays += 1
            drawn = graph.drawn
        else:
            on_device = integers.to(self._policy.device)
            drawn = self._compute(sizes, on_device)
            self._num_seen[sizes] += 1
            if self._captures and self._num_seen[sizes] >= CAPTURED_AT:
                self._capture(sizes, on_device, drawn)
        # The rows behind these are padding.
        drawn_tokens, drawn_logprobs = drawn
        return drawn_tokens[: len(rows)], drawn_logprobs[: len(rows)]

    def _prepare(
        self, tokens: Ints, uniforms: Float64, rows: np.ndarray[Any, Any]
    ) -> tuple[_Sizes, _Inputs]:
        """Round the sizes of a step up. They must not depend on earlier steps."""
        n = len(rows)
        num_rows = min(padded(n, ROW_STEP), self._cache.num_rows)
        cells = min(padded(int(rows["cell"].max()) + 1, CELL_STEP), self._cache.cells_per_row)
        levels = []
        inputs_of_levels = []
        for slots in rows["slots"].T:
            if (slots == NONE).all():
                break
            level, inputs = self._prepare_level(slots, rows["position"], num_rows)
            levels.append(level)
            inputs_of_levels.append(inputs)
        inputs_of_rows = _RowInputs(
            tokens=_with_copies(tokens, num_rows),
            positions=_with_copies(rows["position"] + rows["shift"], num_rows),
            uniforms=_with_copies(uniforms.view(np.int64), num_rows),
            sources=_with_copies(np.arange(n), num_rows),
            cells=_with_copies(rows["cell"], num_rows),
        )
        sizes = _Sizes(num_rows, cells, tuple(levels))
        return sizes, _Inputs(inputs_of_rows, tuple(inputs_of_levels))

    def _prepare_level(
        self, slots: Ints, positions: Ints, num_rows: int
    ) -> tuple[_LevelSizes, _LevelInputs]:
        """`slots`, `positions` [n]: of the rows; `num_rows`: B."""
        is_member = slots != NONE
        used = slots[is_member]
        num_slots = padded(int(used.max()) + 1, SLOT_STEP)
        lengths = np.zeros(num_slots, dtype=np.int64)
        lengths[used] = self._cache.lengths[used]
        counts = np.bincount(used, minlength=num_slots)
        width = 1 << int(counts.max() - 1).bit_length()
        members_by_place, places_of_members = gather_by_slot(used, counts, width)
        distances = np.zeros_like(positions)
        distances[is_member] = positions[is_member] - self._cache.starts[used]
        places = np.zeros_like(positions)
        places[is_member] = places_of_members
        inputs = _LevelInputs(
            distances=_with_copies(distances, num_rows),
            is_member=_with_copies(is_member.astype(np.int64), num_rows),
            places=_with_copies(places, num_rows),
            rows_by_place=np.flatnonzero(is_member)[members_by_place],
            lengths=lengths,
        )
        longest = self._cache.prompt_cells(int(lengths.max()))
        return _LevelSizes(num_slots, width, longest, bool(is_member.all())), inputs

    def _compute(self, sizes: _Sizes, integers: Tensor) -> Drawn:
        """Launch the kernels of a step. Which these are does not depend on the integers."""
        inputs = _Inputs.divided(integers, sizes)
        layout = _PaddedRows(self._cache, sizes, inputs)
        every_row = torch.arange(sizes.rows, device=integers.device)
        rows = inputs.rows
        model_inputs = ModelInputs(rows.tokens, rows.positions, layout, every_row)
        logits = self._policy.forward(model_inputs)
        uniforms = rows.uniforms.view(torch.float64)
        return sample(logits, uniforms, self._sampling)

    def _try(self, sizes: _Sizes, integers: Tensor) -> bool:
        """Return whether the model computes a step without waiting for the device."""
        try:
            with devices.refuse_waits():
                self._compute(sizes, integers)
        except torch.OutOfMemoryError:  # says nothing about the model
            raise
        except Exception as error:  # any: it depends on the model's code
            _warn(error)
            return False
        return True

    def _capture(self, sizes: _Sizes, integers: Tensor, expected: Drawn) -> None:
        if len(self._graphs) == MAX_GRAPHS:
            self._graphs.clear()
            self._num_seen.clear()
        if not self._graphs:  # torch cannot reuse a pool whose graphs are gone
            self._pool = devices.graph_pool()
        try:
            replay, drawn = devices.capture(lambda: self._compute(sizes, integers), self._pool)
            replay()
            pairs = zip(drawn, expected, strict=True)
            # Log-probabilities may be NaN.
            if all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs):
                self._graphs[sizes] = _Graph(integers, replay, drawn)
                return
            _warn("a replayed step differs")
        except Exception as error:  # any: out of memory, or a kernel that cannot be captured
            _warn(error.__context__ or error)  # the end of the capture raises one more error
        self._captures = False
        self._graphs.clear()


def _warn(reason: object) -> None:
    text = str(reason) or type(reason).__name__
    warnings.warn(f"decoding without CUDA graphs: {text.splitlines()[0]}", stacklevel=2)


def _with_copies(array: Ints, length: int) -> Ints:
    """Append the first element until the array has this length."""
    return np.append(array, np.repeat(array[:1], length - len(array)))


class _PaddedRows:
    """The attention layout of a step: all rows in one block."""

    def __init__(self, cache: NodeCache, sizes: _Sizes, inputs: _Inputs) -> None:
        self._sources = inputs.rows.sources
        levels = []
        for size, of_level in zip(sizes.levels, inputs.levels, strict=True):
            keys = SharedKeys(
                slots=slice(0, size.slots),
                width=size.width,
                longest=size.longest,
                queries=of_level.rows_by_place,
                places=of_level.places,
                lengths=of_level.lengths,
                positions=of_level.distances,
            )
            is_member = None if size.has_all_rows else of_level.is_member.bool()
            levels.append(Level(keys, is_member=is_member))
        cells = inputs.rows.cells
        own = RowBuckets(cells, [RowBucket(slice(0, sizes.rows), sizes.cells)])
        self._tokens = NewTokens(cache, self._sources, cells, own, levels)
        self._num_attended = 0  # layers that have run

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        settings: LayerSettings,
        sinks: Tensor | None = None,
    ) -> Tensor:
        layer = self._num_attended
        self._num_attended += 1
        # Padding repeats the first row: it writes the same values to the same cell.
        self._tokens.store(key[self._sources], value[self._sources], layer)
        new = Rows(query, key, value)
        return self._tokens.attend(new, key.shape[1], layer, settings, sinks)
