"""Decode steps on a GPU, captured as CUDA graphs.

A decode step is hundreds of short kernels, and launching them takes longer than running them. If a
step computes neither prompts nor resumed rows, it depends on the host by a few sizes and by
integers that fit into one tensor. The sizes are rounded up, so that few of them occur:

    sizes ───► graph of these sizes
    integers ───copy───► its input ───replay───► tokens and log-probabilities of all rows

Sizes that occur for the CAPTURED_AT-th time are captured; before that their steps run as they are.
The first replay is compared bit by bit with the step itself. If they differ, or if the model's code
reads values on the host, which cannot be captured, no step is replayed from then on. So the samples
do not depend on what has been captured.

Shapes: n active rows, padded to B with copies of the first; L cells of each; C slots of prompts, W
places for the rows of each, P tokens of each.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from easyrl import devices
from easyrl.engines import padded
from easyrl.engines.base import SamplingSettings
from easyrl.engines.kv_cache import (
    Ints,
    KVCache,
    PromptAttention,
    attend_block_inference,
    gather_by_slot,
    merge,
    visibility_bias,
)
from easyrl.engines.sampling import sample
from easyrl.model.policy import Policy
from easyrl.model.shared_prompt import AttentionSettings, Block
from easyrl.types import Float64

ROW_STEP, CELL_STEP = 8, 128
"""Numbers of rows, and lengths of rows and prompts, are rounded up to multiples of these."""
CAPTURED_AT = 3
"""Capturing takes as long as about this many steps."""
MAX_GRAPHS = 100
"""Kept at a time. Each takes a few megabytes for its kernels' arguments."""

Drawn = tuple[Tensor, Tensor]
"""Tokens [B] and their log-probabilities [B]."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    rows: int  # B
    cells: int  # L
    slots: int = 0  # C; 0: no active row has a shared prompt
    width: int = 0  # W
    prompt: int = 0  # P

    def split(self, integers: Tensor) -> list[Tensor]:
        """Input tokens, positions, uniform numbers, sources, cells and places of the rows [B] each,
        rows by place [C * W] and lengths of prompts [C]."""
        sizes = [self.rows] * 6 + [self.slots * self.width, self.slots]
        return list(torch.split(integers, sizes))


@dataclass(slots=True)
class _Graph:
    integers: Tensor  # the input
    replay: Callable[[], None]
    drawn: Drawn  # overwritten by each replay


class StepGraphs:
    """The decode steps of an engine whose model and KV cache stay where they are in memory."""

    def __init__(self, policy: Policy, cache: KVCache, sampling: SamplingSettings) -> None:
        self._policy, self._cache, self._sampling = policy, cache, sampling
        self._graphs: dict[_Sizes, _Graph] = {}  # the last used last
        self._num_seen: Counter[_Sizes] = Counter()
        self._pool: Any = None
        self._captures = True
        self._prompts_size = (0, 0)
        self.num_replays = 0

    def step(self, tokens: Ints, uniforms: Float64, rows: np.ndarray[Any, Any]) -> Drawn:
        """Return the next token of every row and its log-probability: 2 x [n].

        `tokens` [n]: the newest of each row; `uniforms` [n]: see `sample`; `rows` [n]: the state of
        the active rows (fields position, cell and slot).
        """
        if self._prompts_size != self._cache.prompts_size:  # their memory is another one
            self._graphs.clear()
            self._prompts_size = self._cache.prompts_size
        sizes, integers = self._prepare(tokens, uniforms, rows)
        graph = self._graphs.pop(sizes, None)
        if graph is None:
            drawn = self._compute(sizes, on_device := integers.to(self._policy.device))
            self._num_seen[sizes] += 1
            if self._captures and self._num_seen[sizes] >= CAPTURED_AT:
                graph = self._capture(sizes, on_device, drawn)
        else:
            graph.integers.copy_(integers)
            graph.replay()
            self.num_replays += 1
            drawn = graph.drawn
        if graph is not None:
            self._graphs[sizes] = graph
            if len(self._graphs) > MAX_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
        return drawn[0][: len(rows)], drawn[1][: len(rows)]

    def _prepare(
        self, tokens: Ints, uniforms: Float64, rows: np.ndarray[Any, Any]
    ) -> tuple[_Sizes, Tensor]:
        """Round the sizes of a step up. Return them and its integers (see `_Sizes.split`)."""
        cache, n = self._cache, len(rows)
        num_rows = min(padded(n, ROW_STEP), cache.num_rows)
        cells = min(padded(int(rows["cell"].max()) + 1, CELL_STEP), cache.cells_per_row)
        sizes, of_prompts = _Sizes(num_rows, cells), [np.zeros(n, dtype=np.int64)]
        lengths = cache.shared_lengths[: rows["slot"].max() + 1]
        if lengths[rows["slot"]].any():
            counts = np.bincount(rows["slot"])
            width = 1 << int(counts.max() - 1).bit_length()
            longest = cache.prompt_cells(int(lengths.max()))
            sizes = _Sizes(num_rows, cells, len(lengths), width, longest)
            by_place, places = gather_by_slot(rows["slot"], counts, width)
            of_prompts = [places, by_place, lengths]
        of_rows = [tokens, rows["position"], uniforms.view(np.int64), np.arange(n), rows["cell"]]
        missing = num_rows - n
        padded_rows = [np.append(x, np.repeat(x[:1], missing)) for x in (*of_rows, of_prompts[0])]
        return sizes, torch.from_numpy(np.concatenate([*padded_rows, *of_prompts[1:]]))

    def _compute(self, sizes: _Sizes, integers: Tensor) -> Drawn:
        """Launch the kernels of a step, none of which depends on a value of `integers`."""
        tokens, positions, uniforms, *_ = sizes.split(integers)
        layout = _PaddedRows(self._cache, sizes, integers)
        every = torch.arange(sizes.rows, device=integers.device)
        logits = self._policy.forward(tokens, positions, layout, every)
        return sample(logits, uniforms.view(torch.float64), self._sampling)

    def _capture(self, sizes: _Sizes, integers: Tensor, expected: Drawn) -> _Graph | None:
        if not self._graphs:  # torch cannot reuse a pool whose graphs are gone
            self._pool = devices.graph_pool()
        try:
            replay, drawn = devices.capture(lambda: self._compute(sizes, integers), self._pool)
            replay()
            if all(map(torch.equal, drawn, expected)):
                return _Graph(integers, replay, drawn)
            reason = "a replayed step differs"
        except Exception as error:  # any: model code may do what cannot be captured
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        warnings.warn(f"decoding without CUDA graphs: {reason}", stacklevel=2)
        self._captures = False
        self._graphs.clear()
        return None


class _PaddedRows:
    """The attention layout of a step: all rows in one block."""

    def __init__(self, cache: KVCache, sizes: _Sizes, integers: Tensor) -> None:
        self._cache, self._sizes = cache, sizes
        _, positions, _, self._sources, self._cells, *of_prompts = sizes.split(integers)
        # Copies of the first row write to that row's cell what it writes itself.
        self._newest = self._sources * cache.cells_per_row + self._cells
        self._prompts: PromptAttention | None = None
        if sizes.slots:
            self._prompts = PromptAttention(
                slice(0, sizes.slots),
                sizes.width,
                sizes.prompt,
                **dict(zip(("places", "rows", "lengths"), of_prompts, strict=True)),
                positions=positions,
            )
        self._biases: dict[int | None, Tensor] = {}  # by sliding window

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings
    ) -> Tensor:
        keys, values = self._cache.rows[settings.layer]
        keys.flatten(0, 1).index_copy_(0, self._newest, key[self._sources])
        values.flatten(0, 1).index_copy_(0, self._newest, value[self._sources])
        num_rows, num_cells = self._sizes.rows, self._sizes.cells
        grouped = query.reshape(num_rows, keys.shape[2], -1, query.shape[-1])  # [B, Hkv, Q, D]
        k, v = (x[:num_rows, :num_cells].transpose(1, 2) for x in (keys, values))
        bias = self._bias(settings.sliding_window, keys)
        block = Block(grouped, k, v, is_causal=False, bias=bias)
        output, logsumexp = attend_block_inference(block, settings)
        if self._prompts is not None:
            prompts = self._cache.prompts[settings.layer]
            of_prompt = self._prompts.attend(grouped, prompts, settings)
            output = merge((output, logsumexp), of_prompt)
        return output.reshape(num_rows, -1, output.shape[-1])

    def _bias(self, window: int | None, keys: Tensor) -> Tensor:
        """[B, 1, 1, L]"""
        if window not in self._biases:
            cells = torch.arange(self._sizes.cells, device=keys.device)
            distance = self._cells[:, None] - cells
            bias = visibility_bias(distance, distance < 0, window, keys.dtype)
            self._biases[window] = bias[:, None, None]
        return self._biases[window]
