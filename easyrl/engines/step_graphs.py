"""Decode steps on a GPU, captured as CUDA graphs.

Launching a step's hundreds of short kernels takes longer than running them. A step without prompts
and resumed rows takes from the host only a few integers, and sizes that are rounded up:

    sizes ───► graph of these sizes
    integers ───copy───► its input ───replay───► tokens and log-probabilities of all rows

A step is computed without a graph until its sizes have occurred often enough to capture it. The
first replay must equal the step bit by bit; otherwise nothing is replayed from then on. So the
samples do not depend on what has been captured.

Shapes: n active rows, padded to B with copies of the first; L cells of each; C slots of prompts, W
places for the rows of each, P tokens of each.
"""

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from easyrl import devices
from easyrl.engines import SLOT_STEP, padded
from easyrl.engines.kv_cache import Ints, KVCache, RowBuckets, RowTokens, SharedKeys, gather_by_slot
from easyrl.engines.sampling import SamplingSettings, sample
from easyrl.model.inputs import ModelInputs
from easyrl.model.mixers.interface import LayerSettings
from easyrl.model.policy import Policy
from easyrl.types import Float64

ROW_STEP, CELL_STEP, PROMPT_STEP = 8, 128, 256  # B, L, C and P are rounded up to multiples of these
CAPTURED_AT = 3  # a step is captured when its sizes occur for the third time
MAX_PADDING = 2**26
"""Elements of keys, in a layer, by which rows may be padded in a step with a graph. Reading them
takes an H100 0.1 ms, an RTX 4090 0.3 ms, and launching a layer's kernels 0.3 ms (calculated)."""
MAX_GRAPHS = 100  # bounds the memory of kernels' arguments, which torch does not count

Drawn = tuple[Tensor, Tensor]  # tokens [B] and their log-probabilities [B]


class _Sizes(NamedTuple):
    rows: int  # B
    cells: int  # L
    slots: int = 0  # C; 0: no active row has a shared prompt
    width: int = 0  # W
    prompt: int = 0  # P


class _Inputs(NamedTuple):
    """The integers of a step: numpy arrays on the host, tensors on the device."""

    tokens: Any  # [B]: the newest of each row
    positions: Any  # [B]
    uniforms: Any  # [B]: the bits of float64 numbers
    sources: Any  # [B]: the row whose token is computed, not its own number in a copy
    cells: Any  # [B]: of the newest token in its row
    places: Any  # [B]: see `gather_by_slot`
    rows_by_place: Any  # [C * W]
    prompt_lengths: Any  # [C]: of shared prompts, else 0


@dataclass(slots=True)
class _Graph:
    integers: Tensor  # the input
    replay: Callable[[], None]
    drawn: Drawn  # overwritten by each replay


class StepGraphs:
    """The decode steps of an engine. Weights and KV cache must keep their places in memory."""

    def __init__(self, policy: Policy, cache: KVCache, sampling: SamplingSettings) -> None:
        self._policy, self._cache, self._sampling = policy, cache, sampling
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
        numbers_per_cell = self._cache.rows[0][0][0, :, 0].numel()
        num_padding = sizes.rows * sizes.cells - int((rows["cell"] + 1).sum())
        if num_padding * numbers_per_cell > MAX_PADDING:
            return None
        integers = torch.from_numpy(np.concatenate(inputs))
        if self._can_compute is None:
            self._can_compute = self._try(sizes, integers.to(self._policy.device))
        if not self._can_compute:
            return None
        if self._num_allocations != self._cache.num_allocations:
            self._graphs.clear()
            self._num_allocations = self._cache.num_allocations
        if (graph := self._graphs.get(sizes)) is not None:
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
        return drawn[0][: len(rows)], drawn[1][: len(rows)]

    def _prepare(
        self, tokens: Ints, uniforms: Float64, rows: np.ndarray[Any, Any]
    ) -> tuple[_Sizes, _Inputs]:
        """Round the sizes of a step up. They must not depend on earlier steps."""
        cache, n = self._cache, len(rows)
        num_rows = min(padded(n, ROW_STEP), cache.num_rows)
        cells = min(padded(int(rows["cell"].max()) + 1, CELL_STEP), cache.cells_per_row)
        sizes = _Sizes(num_rows, cells)
        places = np.zeros(n, dtype=np.int64)
        rows_by_place = lengths = np.zeros(0, dtype=np.int64)
        slots = padded(int(rows["slot"].max()) + 1, SLOT_STEP)
        if cache.shared_lengths[rows["slot"]].any():
            lengths = cache.shared_lengths[:slots]
            counts = np.bincount(rows["slot"], minlength=slots)
            width = 1 << int(counts.max() - 1).bit_length()
            sizes = _Sizes(num_rows, cells, slots, width, cache.prompt_cells(int(lengths.max())))
            rows_by_place, places = gather_by_slot(rows["slot"], counts, width)
        of_rows = (tokens, rows["position"], uniforms.view(np.int64), np.arange(n), rows["cell"])
        with_copies = [np.append(x, np.repeat(x[:1], num_rows - n)) for x in (*of_rows, places)]
        return sizes, _Inputs(*[*with_copies, rows_by_place, lengths])

    def _compute(self, sizes: _Sizes, integers: Tensor) -> Drawn:
        """Launch the kernels of a step. Which these are does not depend on the integers."""
        lengths = [sizes.rows] * 6 + [sizes.slots * sizes.width, sizes.slots]
        inputs = _Inputs(*torch.split(integers, lengths))
        layout = _PaddedRows(self._cache, sizes, inputs)
        every = torch.arange(sizes.rows, device=integers.device)
        logits = self._policy.forward(ModelInputs(inputs.tokens, inputs.positions, layout, every))
        return sample(logits, inputs.uniforms.view(torch.float64), self._sampling)

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


class _PaddedRows:
    """The attention layout of a step: all rows in one block."""

    def __init__(self, cache: KVCache, sizes: _Sizes, inputs: _Inputs) -> None:
        self._sources = inputs.sources
        prompts: SharedKeys | None = None
        if sizes.slots:
            slots, lengths = slice(0, sizes.slots), inputs.prompt_lengths
            of_rows = inputs.rows_by_place, inputs.places, lengths, inputs.positions
            prompts = SharedKeys(slots, sizes.width, sizes.prompt, *of_rows)
        own = RowBuckets(inputs.cells, [(slice(0, sizes.rows), sizes.cells)])
        self._tokens = RowTokens(cache, inputs.sources, inputs.cells, own, prompts)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, settings: LayerSettings) -> Tensor:
        # Padding repeats the first row: it writes the same values to the same cell.
        return self._tokens.attend(query, key[self._sources], value[self._sources], settings)
