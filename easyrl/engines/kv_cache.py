"""The KV cache of the embedded engine, and the attention of one of its steps.

A group's prompt is stored once, in a slot; a row stores the tokens of one completion.

    prompts  [C, Hkv, P, D] ──► all rows of a group at once ──┐
    rows     [S, Hkv, R, D] ──► rows of similar length ───────┴─► merged by log-sum-exp

(Hydragen, arXiv 2402.05099, section 3.) A short prompt is copied to the start of its rows instead,
which costs less than a merge.

Shapes: C slots of P tokens, S rows of R cells, n of them active, m resumed, T new tokens of rows,
Hq query heads, Hkv key/value heads, Q query heads for each of them, D head size; of a bucket of
rows: B rows, L cells; W queries of the slot that has most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from easyrl.engines import COPIED_TOKENS, padded, row_cells
from easyrl.layout.tree import TokenTree
from easyrl.model.mixers.interface import LayerSettings
from easyrl.model.mixers.sdpa import HIDDEN, Block, SdpaAttention, attend_block

Ints = np.ndarray[Any, np.dtype[np.int64]]
KeysValues = tuple[Tensor, Tensor]

BUCKET_STEP = 64  # rows are sorted by their cells in steps of this many (`length_class`)
BUCKET_NUMBERS = 40_000
"""Cost of another bucket, in elements of keys (cells x heads x head size), on one core."""


class KVCache:
    """Keys and values per layer, allocated when a layer is first seen."""

    def __init__(
        self, num_rows: int, max_prompt: int, max_completion: int, prompt_step: int, slot_step: int
    ) -> None:
        """The numbers of a prompt's cells and of slots are multiples of the steps."""
        self.num_rows = num_rows
        self.cells_per_row = row_cells(max_prompt, max_completion)
        self._max_prompt_cells, self._prompt_step = padded(max_prompt), prompt_step
        self._slot_step = slot_step
        self.rows: list[KeysValues] = []  # per layer 2 x [S, Hkv, R, D]
        self.prompts: list[KeysValues] = []  # per layer 2 x [C, Hkv, P, D]
        self.prompt_lengths = np.zeros(0, dtype=np.int64)  # [C]; 0: free
        self._longest_prompt = 0
        self._most_slots = self._most_length = 0  # in use since `shrink`
        self.num_allocations = 0  # of memory for prompts

    @property
    def shared_lengths(self) -> Ints:
        """Length [C] of each slot's prompt; 0 if it is copied to its rows."""
        return np.where(self.prompt_lengths > COPIED_TOKENS, self.prompt_lengths, 0)

    def allocate(self, key: Tensor, value: Tensor) -> None:
        """Add a layer with the shape and dtype of key and value: 2 x [T, Hkv, D]."""

        def zeros(number: int, length: int) -> KeysValues:
            sizes = [(number, x.shape[1], length, x.shape[2]) for x in (key, value)]
            return key.new_zeros(sizes[0]), value.new_zeros(sizes[1])

        self.rows.append(zeros(self.num_rows, self.cells_per_row))
        self.prompts.append(zeros(len(self.prompt_lengths), self._longest_prompt))

    def prompt_cells(self, length: int) -> int:
        return min(padded(length, self._prompt_step), self._max_prompt_cells)

    def claim_slots(self, lengths: Sequence[int]) -> list[int]:
        """Reserve a slot for each prompt, the first free ones. More are allocated as needed."""
        num_used = int(np.count_nonzero(self.prompt_lengths)) + len(lengths)
        num_missing = padded(max(0, num_used - len(self.prompt_lengths)), self._slot_step)
        longest = self.prompt_cells(max([self._longest_prompt, *lengths]))
        if num_missing or longest > self._longest_prompt:
            self._grow(num_missing, longest)
        free = np.flatnonzero(self.prompt_lengths == 0)[: len(lengths)]
        self.prompt_lengths[free] = lengths
        self._most_slots = max(self._most_slots, num_used)
        self._most_length = max([self._most_length, *lengths])
        return [int(slot) for slot in free]

    def shrink(self) -> None:
        """Free the slots if less than half of their cells were needed since the last call."""
        needed = padded(self._most_slots, self._slot_step) * self.prompt_cells(self._most_length)
        self._most_slots = self._most_length = 0
        if 2 * needed < len(self.prompt_lengths) * self._longest_prompt:
            self.num_allocations += 1
            self.prompt_lengths, self._longest_prompt = self.prompt_lengths[:0], 0
            self.prompts = [(k[:0, :, :0].clone(), v[:0, :, :0].clone()) for k, v in self.prompts]

    def _grow(self, num_more: int, longest: int) -> None:
        self.num_allocations += 1
        used, self._longest_prompt = len(self.prompt_lengths), longest
        self.prompt_lengths = np.append(self.prompt_lengths, np.zeros(num_more, dtype=np.int64))

        def enlarged(old: Tensor) -> Tensor:
            new = old.new_zeros(used + num_more, old.shape[1], longest, old.shape[3])
            new[:used, :, : old.shape[2]] = old
            return new

        for layer, (keys, values) in enumerate(self.prompts):
            self.prompts[layer] = enlarged(keys), enlarged(values)

    def start_rows(self, rows: Ints, slots: Ints) -> Ints:
        """Copy short prompts to their rows; return the first free cell of each row."""
        # Of long prompts, which are shared, 0.
        lengths: Ints = (self.prompt_lengths - self.shared_lengths)[slots]
        into, of = rows[lengths > 0], slots[lengths > 0]
        if len(into):
            longest = lengths.max()
            for layer, prompts in zip(self.rows, self.prompts, strict=True):
                for cache, prompt in zip(layer, prompts, strict=True):
                    cache[into, :, :longest] = prompt[of, :, :longest]
        return lengths

    def move_rows(self, sources: Ints, targets: Ints, num_cells: int) -> None:
        of, to = (torch.from_numpy(x).to(self.rows[0][0].device) for x in (sources, targets))
        for cache in chain(*self.rows):
            cells = cache[:, :, :num_cells]
            cells.index_copy_(0, to, cells.index_select(0, of))  # half of the time of indexing


class StepLayout:
    """The attention layout of a step: n decode tokens, tokens of resumed rows, whole prompts."""

    def __init__(
        self,
        cache: KVCache,
        rows: np.ndarray[Any, Any],
        resumed: np.ndarray[Any, Any],
        num_new: Sequence[int],
        *,
        prompts: Sequence[tuple[int, int]],
        device: torch.device,
    ) -> None:
        """`rows` [n]: the state of the active rows (fields position, cell and slot), those of the
        highest length class first; `resumed` [m]: the state of the rows behind the active ones that
        have `num_new` [m] tokens to process; `prompts`: slot and length of each."""
        self.cache, self._prompts = cache, prompts
        self._packed: SdpaAttention | None = None
        if prompts:
            self._packed = SdpaAttention(
                TokenTree.of_sequences([length for _, length in prompts]), device
            )
        self._tokens_of_rows: list[RowTokens] = []
        if len(rows):
            self._tokens_of_rows.append(_tokens_of_active(cache, rows, device))
        if len(resumed):
            of_resumed = _tokens_of_resumed(cache, len(rows), resumed, np.array(num_new), device)
            self._tokens_of_rows.append(of_resumed)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, settings: LayerSettings) -> Tensor:
        if settings.layer == len(self.cache.rows):
            self.cache.allocate(key, value)
        n, outputs = 0, []
        for tokens in self._tokens_of_rows:
            new = slice(n, n := n + tokens.number)
            outputs.append(tokens.attend(query[new], key[new], value[new], settings))
        if self._packed is not None:
            for cache, x in zip(self.cache.prompts[settings.layer], (key, value), strict=True):
                parts = torch.split(x[n:], [length for _, length in self._prompts])
                for (slot, length), part in zip(self._prompts, parts, strict=True):
                    cache[slot, :, :length] = part.transpose(0, 1)
            outputs.append(self._packed.attend_sequences(query[n:], key[n:], value[n:], settings))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class RowTokens:
    """Attention of T new tokens, stored in their rows, to these rows and their groups' prompts."""

    def __init__(
        self,
        cache: KVCache,
        rows: Tensor,
        cells: Tensor,
        own: RowBuckets | SharedKeys,
        prompts: SharedKeys | None,
    ) -> None:
        """`rows`, `cells` [T]: the row and the cell of each token."""
        self.number = len(rows)
        self._cache, self._rows, self._cells = cache, rows, cells
        self._own, self._prompts = own, prompts

    def attend(self, query: Tensor, key: Tensor, value: Tensor, settings: LayerSettings) -> Tensor:
        """[T, Hq, D], 2 x [T, Hkv, D] -> [T, Hq, D]"""
        rows = self._cache.rows[settings.layer]
        for cache, x in zip(rows, (key, value), strict=True):
            cache[self._rows, :, self._cells] = x
        # Query heads that share a key head take the dimension of query positions: no key is copied.
        grouped = query.reshape(len(query), key.shape[1], -1, query.shape[-1])  # [T, Hkv, Q, D]
        output, logsumexp = self._own.attend(grouped, rows, settings)
        if self._prompts is not None:
            prompts = self._cache.prompts[settings.layer]
            other, other_logsumexp = self._prompts.attend(grouped, prompts, settings)
            # Of one softmax over both.
            share = torch.sigmoid(other_logsumexp - logsumexp)  # of the prompt
            merged = torch.lerp(output.to(share.dtype), other.to(share.dtype), share)
            output = merged.to(output.dtype)
        return output.reshape(len(query), -1, output.shape[-1])


def _tokens_of_active(cache: KVCache, rows: Any, device: torch.device) -> RowTokens:
    cells = rows["cell"].copy()
    cost = BUCKET_NUMBERS // cache.rows[0][0][0, :, 0].numel()
    buckets = [
        (slice(start, stop), padded(int(cells[start:stop].max()) + 1))
        for start, stop in divide_rows(cells, cost)
    ]
    prompts = _shared_prompts(cache, rows["slot"], rows["position"].copy(), device)
    numbers, at = torch.arange(len(rows), device=device), torch.from_numpy(cells).to(device)
    return RowTokens(cache, numbers, at, RowBuckets(at, buckets), prompts)


def _tokens_of_resumed(
    cache: KVCache, first: int, rows: Any, num_new: Ints, device: torch.device
) -> RowTokens:
    """`first`: number of the first row; `rows` [m]: their states after the new tokens."""
    numbers = np.repeat(np.arange(len(rows)), num_new)  # [T]: the row of each token
    # From the newest token of its row: [T], 0 or less.
    offsets = 1 + np.arange(len(numbers)) - num_new.cumsum()[numbers]
    cells, positions = rows["cell"][numbers] + offsets, rows["position"][numbers] + offsets
    lengths = np.append(np.zeros(first, dtype=np.int64), rows["cell"] + 1)
    own = SharedKeys.of_queries(first + numbers, cells, lengths, device, is_causal=True)
    prompts = _shared_prompts(cache, rows["slot"][numbers], positions, device)
    in_rows, at = (torch.from_numpy(x).to(device) for x in (first + numbers, cells))
    return RowTokens(cache, in_rows, at, own, prompts)


def _shared_prompts(
    cache: KVCache, slots: Ints, positions: Ints, device: torch.device
) -> SharedKeys | None:
    """`slots`, `positions` [T]: of each token."""
    lengths = cache.shared_lengths
    if not lengths[slots].any():
        return None
    return SharedKeys.of_queries(slots, positions, lengths, device)


class RowBuckets:
    """Attention of one token of each row to its row, in blocks of rows of similar length."""

    def __init__(self, cells: Tensor, buckets: Sequence[tuple[slice, int]]) -> None:
        """`cells` [n]: of each token; `buckets`: the rows and L of each."""
        self._cells, self._buckets = cells, buckets
        self._biases: dict[int | None, list[Tensor]] = {}  # by sliding window

    def attend(
        self, query: Tensor, cache: KeysValues, settings: LayerSettings
    ) -> tuple[Tensor, Tensor]:
        """query [n, Hkv, Q, D] -> output [n, Hkv, Q, D] and log-sum-exp [n, Hkv, Q, 1]"""
        window = settings.sliding_window
        if window not in self._biases:
            biases = (self._bias(*bucket, window, query.dtype) for bucket in self._buckets)
            self._biases[window] = list(biases)
        parts = []
        for (rows, length), bias in zip(self._buckets, self._biases[window], strict=True):
            k, v = (x[rows, :, :length] for x in cache)
            block = Block(query[rows], k, v, is_causal=False, bias=bias)
            parts.append(attend_block(block, settings))
        output, logsumexp = (
            x[0] if len(x) == 1 else torch.cat(x) for x in zip(*parts, strict=True)
        )
        return output, logsumexp

    def _bias(self, rows: slice, length: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """[B, 1, 1, L]"""
        distance = self._cells[rows, None] - torch.arange(length, device=self._cells.device)
        return _bias(distance, distance < 0, window, dtype)[:, None, None]


def length_class(num_cells: Ints) -> Ints:
    """Return the class of rows with this many cells. A row is moved when its class changes."""
    return (num_cells - 1) // BUCKET_STEP


def divide_rows(cells: Ints, bucket_cost: int) -> list[tuple[int, int]]:
    """Divide rows with these numbers of cells [n], the highest length class first, into buckets;
    return each one's first row and one past its last. Two classes share a bucket where that
    computes fewer than `bucket_cost` cells more."""
    new_classes = (np.flatnonzero(np.diff(length_class(cells + 1))) + 1).tolist()
    starts = [0]
    for start, stop in pairwise([*new_classes, len(cells)]):
        excess = (stop - start) * (cells[starts[-1] : start].max() - cells[start:stop].max())
        if excess > bucket_cost:
            starts.append(start)
    return [*pairwise([*starts, len(cells)])]


def _bias(distance: Tensor, hidden: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """Return 0 for visible keys, else HIDDEN. `distance`: from key to query, in tokens."""
    if window is not None:
        hidden = hidden | (distance >= window)
    return hidden.to(dtype).mul_(HIDDEN)


def gather_by_slot(numbers: Ints, counts: Ints, width: int) -> tuple[Ints, Ints]:
    """Return the row of each of `width` places for each slot [C * W] (0 where a place is empty),
    and the place of each row [n]. `numbers` [n]: of each row's slot; `counts` [C]: rows of each."""
    order = np.argsort(numbers, kind="stable")
    rank = np.arange(len(numbers)) - (counts.cumsum() - counts)[numbers[order]]
    places = np.empty_like(numbers)
    places[order] = numbers[order] * width + rank
    rows = np.zeros(len(counts) * width, dtype=np.int64)
    rows[places] = np.arange(len(numbers))
    return rows, places


@dataclass(slots=True)
class SharedKeys:
    """Attention to keys that several queries share, in one block: of decode tokens to the prompts
    of their groups, and of several new tokens to their row. Queries are gathered slot by slot, W
    places for each. Slots whose prompt is copied to its rows are hidden. Where the slots in use are
    few among many, their keys are gathered, too."""

    slots: slice | Tensor  # C of the cache; or its rows
    width: int  # W
    longest: int  # cells that are read: P
    rows: Tensor  # [C * W]: see `gather_by_slot`
    places: Tensor  # [n]: see `gather_by_slot`
    lengths: Tensor  # [C]: cells that are visible; of prompts that are not shared 0
    positions: Tensor  # [n]: of each query
    is_causal: bool = False  # whether cells behind a query's position are hidden from it
    biases: dict[int | None, Tensor] = field(default_factory=dict, init=False)  # by sliding window

    @classmethod
    def of_queries(
        cls,
        slots: Ints,
        positions: Ints,
        lengths: Ints,
        device: torch.device,
        *,
        is_causal: bool = False,
    ) -> SharedKeys:
        """`slots`, `positions` [n]: of each query; `lengths` [C]: see above."""
        used, numbers = np.unique(slots, return_inverse=True)
        at: slice | Tensor = torch.from_numpy(used).to(device)
        if used[-1] - used[0] < 2 * len(used):
            used, numbers = np.arange(used[0], used[-1] + 1), slots - used[0]
            at = slice(int(used[0]), int(used[-1]) + 1)
        counts = np.bincount(numbers)
        width = int(counts.max())
        rows, places = gather_by_slot(numbers, counts, width)
        arrays = {"rows": rows, "places": places, "lengths": lengths[used], "positions": positions}
        on_device = {name: torch.from_numpy(x).to(device) for name, x in arrays.items()}
        longest = padded(int(lengths[used].max()))
        return cls(at, width, longest, **on_device, is_causal=is_causal)

    def attend(
        self, query: Tensor, cache: KeysValues, settings: LayerSettings
    ) -> tuple[Tensor, Tensor]:
        """query [n, Hkv, Q, D] -> output [n, Hkv, Q, D] and log-sum-exp [n, Hkv, Q, 1]"""
        _, num_heads, num_queries, _ = query.shape
        by_slot = query[self.rows].view(-1, self.width, *query.shape[1:])  # [C, W, Hkv, Q, D]
        k, v = (x[self.slots, :, : self.longest] for x in cache)
        window = settings.sliding_window
        if window not in self.biases:
            self.biases[window] = self._bias(window, query)
        bias = self.biases[window]
        by_head = by_slot.transpose(1, 2).flatten(2, 3)  # [C, Hkv, W * Q, D]
        block = Block(by_head, k, v, is_causal=False, bias=bias)

        def by_row(x: Tensor) -> Tensor:
            apart = x.reshape(len(x), num_heads, self.width, num_queries, -1)
            rows: Tensor = apart.transpose(1, 2).flatten(0, 1)[self.places]
            return rows

        output, logsumexp = attend_block(block, settings)
        return by_row(output), by_row(logsumexp)

    def _bias(self, window: int | None, query: Tensor) -> Tensor:
        """[C, 1, 1, P] or, where it depends on the query, [C, 1, W * Q, P]"""
        cells = torch.arange(self.longest, device=query.device)
        hidden = cells >= self.lengths[:, None]  # [C, P]
        if window is None and not self.is_causal:
            return _bias(cells, hidden, None, query.dtype)[:, None, None]
        distance = self.positions[self.rows].view(-1, self.width, 1) - cells  # [C, W, P]
        bias = _bias(distance, hidden[:, None] | (distance < 0), window, query.dtype)
        return bias.repeat_interleave(query.shape[2], dim=1)[:, None]
