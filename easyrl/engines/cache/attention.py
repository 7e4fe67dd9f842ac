"""The layout of one step of the embedded engine: attention to what its cache stores. (For layers
with a state see `states`.)

A node that several sequences continue is stored once, in a slot; a row stores the tokens of one
sequence behind its nodes.

    nodes    [C, Hkv, P, D] ──► all that continue a node at once, level by level ──┐
    rows     [S, Hkv, R, D] ──► rows of similar length ────────────────────────────┴─► merged by
                                                                                       log-sum-exp

(Hydragen, arXiv 2402.05099, section 3.) Level 0 are the roots, level 1 what continues these.

Shapes: C slots of P cells, S rows of R cells, n of them active, m resumed, T new tokens, Hq query
heads, Hkv key/value heads, Q query heads for each of them, D head size; of a bucket of rows: B
rows, L cells; W queries of the node that has most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from easyrl.engines import padded
from easyrl.engines.cache.cache import NodeCache
from easyrl.engines.cache.nodes import Node
from easyrl.engines.cache.states import StepStates, runs_of_step
from easyrl.engines.cache.stores import Cells, Span
from easyrl.layout.tree import NONE, Ints, TokenTree
from easyrl.model.mixers.interface import LayerSettings, Spans
from easyrl.model.mixers.recurrent import RunLayer
from easyrl.model.mixers.sdpa import (
    HIDDEN,
    Block,
    Rows,
    SdpaAttention,
    attend_block,
    group_sinks,
)

BUCKET_STEP = 64  # rows are sorted by their cells in steps of this many (`length_class`)
BUCKET_NUMBERS = 40_000
"""Cost of another bucket, in elements of keys (cells x heads x head size), on one core."""


class StepLayout:
    """The layout of a step.

    Its tokens are, in this order: the newest one of each active row; those of resumed rows; those
    of nodes of which a part is stored, or what they continue; those of prompts behind a beginning
    that others share; and those of whole prompts.
    """

    def __init__(
        self,
        cache: NodeCache,
        rows: np.ndarray[Any, Any],
        resumed: np.ndarray[Any, Any],
        num_new: Sequence[int],
        *,
        continuing: Sequence[Node],
        behind_prefixes: Sequence[Node],
        prompts: Sequence[Node],
        spans: Spans | None = None,
        device: torch.device,
    ) -> None:
        """`rows` [n]: the state of the active rows (fields position, cell and slots: of the nodes
        that it continues, from the root on, then NONE), those of the highest length class first;
        `resumed` [m]: the state of the rows behind the active ones that have `num_new` [m] tokens
        to process; `continuing`, `behind_prefixes`, `prompts`: nodes whose tokens are to be stored;
        `spans`: of the step's tokens."""
        self._cache = cache
        self._num_attended = 0  # layers with attention that have run
        self._prompts = prompts
        parts = list[NewTokens]()
        if len(rows):
            parts.append(_tokens_of_active(cache, rows, device))
        if len(resumed):
            of_resumed = _tokens_of_resumed(cache, len(rows), resumed, np.array(num_new), device)
            parts.append(of_resumed)
        if continuing:
            parts.append(_tokens_of_nodes(cache, continuing, device))
        if behind_prefixes:
            parts.append(_tokens_of_nodes(cache, behind_prefixes, device, are_whole=True))
        self._parts = list[tuple[NewTokens, slice]]()  # each with where its tokens stand
        self._first_of_prompts = 0
        for part in parts:
            first = self._first_of_prompts
            self._first_of_prompts = first + part.number
            self._parts.append((part, slice(first, self._first_of_prompts)))
        num_tokens = self._first_of_prompts + sum(map(len, prompts))
        if spans is not None:
            for part, new in self._parts:
                part.add_spans(spans.within(new.start, new.stop), device)
        self._packed: SdpaAttention | None = None
        if prompts:
            tree = TokenTree.of_sequences([len(node) for node in prompts])
            of_prompts = None if spans is None else spans.within(self._first_of_prompts, num_tokens)
            self._packed = SdpaAttention(tree, device, of_prompts)
        self._states: StepStates | None = None
        if cache.states is not None:
            nodes = [*continuing, *behind_prefixes, *prompts]
            runs = runs_of_step(len(rows), num_new, nodes)
            self._states = StepStates(cache.states, runs, device)

    def scan(self, run: RunLayer, hidden: Tensor) -> Tensor:
        assert self._states is not None, "the cache stores no states"
        return self._states.scan(run, hidden)

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
        if layer == len(self._cache.keys_values.rows):
            self._cache.keys_values.add_layer(key, value)
        # A token may see others of the same step: all are stored first.
        for part, new in self._parts:
            part.store(key[new], value[new], layer)
        of_prompts = slice(self._first_of_prompts, len(query))
        if self._packed is not None:
            self._store_prompts(key[of_prompts], value[of_prompts], layer)

        num_heads = key.shape[1]
        outputs = []
        for part, new in self._parts:
            rows = Rows(query[new], key[new], value[new])
            output = part.attend(rows, num_heads, layer, settings, sinks)
            outputs.append(output)
        if self._packed is not None:
            output = self._packed.attend_sequences(
                query[of_prompts],
                key[of_prompts],
                value[of_prompts],
                settings,
                sinks,
            )
            outputs.append(output)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _store_prompts(self, key: Tensor, value: Tensor, layer: int) -> None:
        keys, values = self._cache.keys_values.nodes[layer]
        start = 0
        for node in self._prompts:
            stop = start + len(node)
            cells = Span(is_row=False, number=node.slot, start=0, stop=len(node))
            node_key = key[start:stop].transpose(0, 1)  # [Hkv, n, D]
            node_value = value[start:stop].transpose(0, 1)
            cells.of(keys).copy_(node_key)
            cells.of(values).copy_(node_value)
            start = stop


class NewTokens:
    """Attention of T new tokens, each stored in a row or a slot, to this and to its nodes."""

    def __init__(
        self,
        cache: NodeCache,
        numbers: Tensor,
        cells: Tensor,
        own: RowBuckets | SharedKeys | WholeNodes,
        levels: Sequence[Level],
        *,
        are_in_rows: bool = True,
    ) -> None:
        """`numbers`, `cells` [T]: the row or slot, and the cell, of each token; `own`: attention
        to the row or slot; `levels`: to nodes, from the roots on."""
        self.number = len(numbers)
        self._numbers = numbers
        self._cells = cells
        self._own = own
        self._levels = levels
        self._nodes = cache.keys_values.nodes  # by layer
        self._stored_in = cache.keys_values.rows if are_in_rows else self._nodes
        self._of_spans: SdpaAttention | None = None

    def add_spans(self, spans: Spans | None, device: torch.device) -> None:
        """Let these runs of the tokens see each other in both directions."""
        if spans is not None:
            tree = TokenTree.of_sequences([self.number])
            self._of_spans = SdpaAttention(tree, device, spans)

    def store(self, key: Tensor, value: Tensor, layer: int) -> None:
        """2 x [T, Hkv, D]"""
        keys, values = self._stored_in[layer]
        keys[self._numbers, :, self._cells] = key
        values[self._numbers, :, self._cells] = value

    def attend(
        self,
        new: Rows,
        num_heads: int,
        layer: int,
        settings: LayerSettings,
        sinks: Tensor | None,
    ) -> Tensor:
        """Return the outputs [T, Hq, D] for new queries [T, Hq, D], whose keys and values are 2 x
        [T, Hkv, D]. `layer`: see `stores`."""
        query = new.query
        # Query heads that share a key head take the dimension of query positions: no key is copied.
        num_tokens, _, head_size = query.shape
        grouped = query.reshape(num_tokens, num_heads, -1, head_size)  # [T, Hkv, Q, D]
        stored = self._stored_in[layer]
        attended = self._own.attend(grouped, stored, settings)
        if self._of_spans is not None:
            rows = Rows(grouped, new.key.unsqueeze(2), new.value.unsqueeze(2))
            self._of_spans.merge_others(rows, settings, attended.output, attended.logsumexp)
        nodes = self._nodes[layer]
        for level in self._levels:
            is_last = level is self._levels[-1] and sinks is None
            attended = level.merge(attended, grouped, nodes, settings, is_last=is_last)
        output = attended.output
        if sinks is not None:
            output = attended.output_with_sinks(group_sinks(sinks, num_heads))
        return output.reshape(num_tokens, -1, output.shape[-1])


class Attended(NamedTuple):
    """Attention of queries to some of their keys."""

    output: Tensor  # [T, Hkv, Q, D]
    logsumexp: Tensor  # [T, Hkv, Q, 1], of the scores

    def merged(self, other: Attended, *, is_last: bool) -> Attended:
        """Return the output of one softmax over the keys of both. If it is the last, the
        log-sum-exp is not computed."""
        share_of_other = torch.sigmoid(other.logsumexp - self.logsumexp)
        mine = self.output.to(share_of_other.dtype)
        theirs = other.output.to(share_of_other.dtype)
        merged = torch.lerp(mine, theirs, share_of_other)
        logsumexp = self.logsumexp
        if not is_last:
            logsumexp = torch.logaddexp(self.logsumexp, other.logsumexp)
        return Attended(merged.to(self.output.dtype), logsumexp)

    def output_with_sinks(self, sinks: Tensor) -> Tensor:
        """Return the output of one softmax over these keys and `sinks` [Hkv, Q, 1], the scores of
        one more key, whose value is 0."""
        share_of_keys = torch.sigmoid(self.logsumexp - sinks)
        return (self.output * share_of_keys).to(self.output.dtype)


class Level(NamedTuple):
    """Attention of new tokens to the nodes of a level of the tree."""

    keys: SharedKeys
    members: Tensor | None = None  # [M]: the tokens that have a node on this level; None: all
    is_member: Tensor | None = None  # [T]: instead of `members`, if the others are computed, too

    def merge(
        self,
        before: Attended,
        query: Tensor,
        nodes: Cells,
        settings: LayerSettings,
        *,
        is_last: bool,
    ) -> Attended:
        """Return attention to these nodes' keys, too. See `Attended.merged`."""
        if self.members is None:
            of_nodes = self.keys.attend(query, nodes, settings)
            if self.is_member is not None:
                is_hidden = ~self.is_member[:, None, None, None]
                logsumexp = of_nodes.logsumexp.masked_fill(is_hidden, HIDDEN)
                of_nodes = Attended(of_nodes.output, logsumexp)
            return before.merged(of_nodes, is_last=is_last)
        of_nodes = self.keys.attend(query[self.members], nodes, settings)
        before_of_members = Attended(
            output=before.output[self.members],
            logsumexp=before.logsumexp[self.members],
        )
        merged = before_of_members.merged(of_nodes, is_last=is_last)
        # The other tokens stay as they are.
        output = before.output.index_copy(0, self.members, merged.output)
        logsumexp = before.logsumexp.index_copy(0, self.members, merged.logsumexp)
        return Attended(output, logsumexp)


def _tokens_of_active(cache: NodeCache, rows: Any, device: torch.device) -> NewTokens:
    cells = rows["cell"].copy()
    bucket_cost = BUCKET_NUMBERS // max(1, cache.keys_values.numbers_per_cell)
    buckets = []
    for start, stop in divide_rows(cells, bucket_cost):
        last_cell = int(cells[start:stop].max())
        bucket = RowBucket(rows=slice(start, stop), longest=padded(last_cell + 1))
        buckets.append(bucket)
    levels = _levels(cache, rows["slots"], rows["position"], device)
    numbers = torch.arange(len(rows), device=device)
    cells_on_device = torch.from_numpy(cells).to(device)
    own = RowBuckets(cells_on_device, buckets)
    return NewTokens(cache, numbers, cells_on_device, own, levels)


def _tokens_of_resumed(
    cache: NodeCache, first: int, rows: Any, num_new: Ints, device: torch.device
) -> NewTokens:
    """`first`: number of the first row; `rows` [m]: their states after the new tokens."""
    row_of_token = np.repeat(np.arange(len(rows)), num_new)  # [T]
    num_tokens = len(row_of_token)
    ends = num_new.cumsum()  # [m]: behind the tokens of each row
    # Offsets from the newest token of its row: [T], 0 or less.
    offsets = 1 + np.arange(num_tokens) - ends[row_of_token]
    cells = rows["cell"][row_of_token] + offsets
    positions = rows["position"][row_of_token] + offsets
    slots_above_token = rows["slots"][row_of_token]  # [T, MAX_LEVELS]
    lengths_of_others = np.zeros(first, dtype=np.int64)
    lengths = np.append(lengths_of_others, rows["cell"] + 1)
    numbers = first + row_of_token
    own = SharedKeys.of_queries(numbers, cells, lengths, device, is_causal=True)
    levels = _levels(cache, slots_above_token, positions, device)
    numbers_on_device = torch.from_numpy(numbers).to(device)
    cells_on_device = torch.from_numpy(cells).to(device)
    return NewTokens(cache, numbers_on_device, cells_on_device, own, levels)


def _tokens_of_nodes(
    cache: NodeCache, nodes: Sequence[Node], device: torch.device, *, are_whole: bool = False
) -> NewTokens:
    """The tokens of these nodes that are not stored yet. `are_whole`: none of any node is."""
    slots = list[Ints]()
    cells = list[Ints]()
    positions = list[Ints]()
    slots_above = list[Ints]()  # of the nodes that each token's node continues
    for node in nodes:
        new_cells = np.arange(node.num_stored, len(node))
        num_new = len(new_cells)
        slots.append(np.full(num_new, node.slot))
        cells.append(new_cells)
        positions.append(node.start + new_cells)
        above = cache.slots_of(node.parent)
        slots_above.append(np.repeat(above[None], num_new, axis=0))
    slot_of_token = np.concatenate(slots)  # [T]
    cell_of_token = np.concatenate(cells)  # [T]
    slots_on_device = torch.from_numpy(slot_of_token).to(device)
    cells_on_device = torch.from_numpy(cell_of_token).to(device)
    own: WholeNodes | SharedKeys
    if are_whole:
        tree = TokenTree.of_sequences([len(node) for node in nodes])
        own = WholeNodes(slots_on_device, cells_on_device, SdpaAttention(tree, device))
    else:
        own = SharedKeys.of_queries(
            slot_of_token,
            cell_of_token,
            cache.lengths,
            device,
            is_causal=True,
        )
    slots_above_token = np.concatenate(slots_above)  # [T, MAX_LEVELS]
    position_of_token = np.concatenate(positions)  # [T]
    levels = _levels(cache, slots_above_token, position_of_token, device)
    return NewTokens(
        cache,
        slots_on_device,
        cells_on_device,
        own,
        levels,
        are_in_rows=False,
    )


def _levels(cache: NodeCache, slots: Ints, positions: Ints, device: torch.device) -> list[Level]:
    """`slots` [T, MAX_LEVELS]: of the nodes that each token continues; `positions` [T]: of each."""
    levels = list[Level]()
    for slots_of_level in slots.T:
        members = np.flatnonzero(slots_of_level != NONE)
        if not len(members):
            break
        used = slots_of_level[members]
        if levels:
            lengths = np.zeros_like(cache.lengths)
            lengths[used] = cache.lengths[used]
        else:
            lengths = np.where(cache.starts == 0, cache.lengths, 0)
        distances = positions[members] - cache.starts[used]
        keys = SharedKeys.of_queries(used, distances, lengths, device)
        if len(members) == len(slots):
            level = Level(keys)
        else:
            level = Level(keys, members=torch.from_numpy(members).to(device))
        levels.append(level)
    return levels


class WholeNodes(NamedTuple):
    """Attention of all tokens of nodes to their own nodes, causally, in blocks of nodes of similar
    length."""

    slots: Tensor  # [T]: of each token's node
    cells: Tensor  # [T]
    packed: SdpaAttention  # of the nodes side by side

    def attend(self, query: Tensor, cache: Cells, settings: LayerSettings) -> Attended:
        """Compute the attention of queries [T, Hkv, Q, D]."""
        keys, values = cache
        key = keys[self.slots, :, self.cells]  # [T, Hkv, D]
        value = values[self.slots, :, self.cells]
        rows = Rows(query, key.unsqueeze(2), value.unsqueeze(2))
        output, logsumexp = self.packed.attend_own(rows, settings)
        return Attended(output, logsumexp)


class RowBucket(NamedTuple):
    """Rows of similar length."""

    rows: slice
    longest: int  # L: cells that are read


class RowBuckets:
    """Attention of one token of each row to its row, in blocks of rows of similar length."""

    def __init__(self, cells: Tensor, buckets: Sequence[RowBucket]) -> None:
        """`cells` [n]: of each token."""
        self._cells = cells
        self._buckets = buckets
        self._biases: dict[int | None, list[Tensor]] = {}  # of the buckets, by sliding window

    def attend(self, query: Tensor, cache: Cells, settings: LayerSettings) -> Attended:
        """Compute the attention of each row's query: [n, Hkv, Q, D]."""
        window = settings.sliding_window
        if window not in self._biases:
            biases = [self._bias(bucket, window, query.dtype) for bucket in self._buckets]
            self._biases[window] = biases
        keys, values = cache
        outputs = []
        logsumexps = []
        for bucket, bias in zip(self._buckets, self._biases[window], strict=True):
            block = Block(
                query[bucket.rows],
                keys[bucket.rows, :, : bucket.longest],
                values[bucket.rows, :, : bucket.longest],
                is_causal=False,
                bias=bias,
            )
            output, logsumexp = attend_block(block, settings)
            outputs.append(output)
            logsumexps.append(logsumexp)
        if len(outputs) == 1:
            return Attended(outputs[0], logsumexps[0])
        return Attended(torch.cat(outputs), torch.cat(logsumexps))

    def _bias(self, bucket: RowBucket, window: int | None, dtype: torch.dtype) -> Tensor:
        """[B, 1, 1, L]"""
        every_cell = torch.arange(bucket.longest, device=self._cells.device)
        newest_cell = self._cells[bucket.rows, None]  # [B, 1]
        distance = newest_cell - every_cell  # [B, L]
        bias = _bias(distance, distance < 0, window, dtype)
        return bias[:, None, None]


def length_class(num_cells: Ints) -> Ints:
    """Return the class of rows with this many cells. A row is moved when its class changes."""
    return (num_cells - 1) // BUCKET_STEP


def divide_rows(cells: Ints, bucket_cost: int) -> list[tuple[int, int]]:
    """Divide rows with these numbers of cells [n], the highest length class first, into buckets;
    return each one's first row and one past its last. Two classes share a bucket where that
    computes fewer than `bucket_cost` cells more."""
    num_rows = len(cells)
    classes = length_class(cells + 1)
    is_new_class = np.diff(classes) != 0
    first_rows = np.flatnonzero(is_new_class) + 1  # of each class but the first
    starts = [0]
    for start, stop in pairwise([*first_rows.tolist(), num_rows]):
        bucket_start = starts[-1]
        longest_of_bucket = cells[bucket_start:start].max()
        longest_of_class = cells[start:stop].max()
        # If the class shares the bucket, each of its rows computes so many cells more.
        num_more = longest_of_bucket - longest_of_class
        if (stop - start) * num_more > bucket_cost:
            starts.append(start)
    return list(pairwise([*starts, num_rows]))


def _bias(distance: Tensor, hidden: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """Return 0 for visible keys, else HIDDEN. `distance`: from key to query, in tokens."""
    if window is not None:
        hidden = hidden | (distance >= window)
    return hidden.to(dtype).mul_(HIDDEN)


def gather_by_slot(numbers: Ints, counts: Ints, width: int) -> tuple[Ints, Ints]:
    """Return the query of each of `width` places for each slot [C * W] (0 where a place is empty),
    and the place of each query [n]. `numbers` [n]: of each query's slot; `counts` [C]: queries of
    each slot. Example: numbers [1, 0, 1], counts [1, 2], width 2: queries [1, 0, 0, 2], places
    [2, 0, 3]."""
    every_query = np.arange(len(numbers))
    order = np.argsort(numbers, kind="stable")
    sorted_numbers = numbers[order]
    num_before = counts.cumsum() - counts  # [C]: queries of the slots before
    ranks = every_query - num_before[sorted_numbers]  # among the queries of its slot
    places = np.empty_like(numbers)
    places[order] = sorted_numbers * width + ranks
    num_places = len(counts) * width
    queries = np.zeros(num_places, dtype=np.int64)
    queries[places] = every_query
    return queries, places


@dataclass(slots=True)
class SharedKeys:
    """Attention to keys that several queries share, in one block: of tokens to the nodes that they
    continue, and of several new tokens to their row or node. Queries are gathered slot by slot, W
    places for each. Where the slots in use are few among many, their keys are gathered, too."""

    slots: slice | Tensor  # C of the cache; or its rows
    width: int  # W
    longest: int  # cells that are read: P
    queries: Tensor  # [C * W]: see `gather_by_slot`
    places: Tensor  # [n]: see `gather_by_slot`
    lengths: Tensor  # [C]: cells that are visible
    positions: Tensor  # [n]: of each query, from the first cell on
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
        used: Ints
        numbers: Ints  # of each query's slot among the used ones
        used, numbers = np.unique(slots, return_inverse=True)
        start = int(used[0])
        stop = int(used[-1]) + 1
        read_slots: slice | Tensor
        are_dense = stop - start <= 2 * len(used)
        if are_dense:
            used = np.arange(start, stop)
            numbers = slots - start
            read_slots = slice(start, stop)
        else:
            read_slots = torch.from_numpy(used).to(device)
        counts = np.bincount(numbers)
        width = int(counts.max())
        queries, places = gather_by_slot(numbers, counts, width)
        used_lengths = lengths[used]
        longest = int(used_lengths.max())
        return cls(
            slots=read_slots,
            width=width,
            longest=padded(longest),
            queries=torch.from_numpy(queries).to(device),
            places=torch.from_numpy(places).to(device),
            lengths=torch.from_numpy(used_lengths).to(device),
            positions=torch.from_numpy(positions).to(device),
            is_causal=is_causal,
        )

    def attend(self, query: Tensor, cache: Cells, settings: LayerSettings) -> Attended:
        """Compute the attention of queries [n, Hkv, Q, D]."""
        window = settings.sliding_window
        if window not in self.biases:
            self.biases[window] = self._bias(window, query)
        by_slot = query[self.queries].view(-1, self.width, *query.shape[1:])  # [C, W, Hkv, Q, D]
        by_head = by_slot.transpose(1, 2).flatten(2, 3)  # [C, Hkv, W * Q, D]
        keys, values = cache
        block = Block(
            by_head,
            keys[self.slots, :, : self.longest],
            values[self.slots, :, : self.longest],
            is_causal=False,
            bias=self.biases[window],
        )
        output, logsumexp = attend_block(block, settings)
        return Attended(
            output=self._by_query(output, query),
            logsumexp=self._by_query(logsumexp, query),
        )

    def _by_query(self, block: Tensor, query: Tensor) -> Tensor:
        """[C, Hkv, W * Q, X] -> [n, Hkv, Q, X]"""
        _, num_heads, num_queries, _ = query.shape
        places_apart = block.reshape(len(block), num_heads, self.width, num_queries, -1)
        of_places = places_apart.transpose(1, 2).flatten(0, 1)  # [C * W, Hkv, Q, X]
        return of_places[self.places]

    def _bias(self, window: int | None, query: Tensor) -> Tensor:
        """[C, 1, 1, P] or, where it depends on the query, [C, 1, W * Q, P]"""
        cells = torch.arange(self.longest, device=query.device)
        is_empty = cells >= self.lengths[:, None]  # [C, P]
        if window is None and not self.is_causal:
            bias = _bias(cells, is_empty, None, query.dtype)
            return bias[:, None, None]
        by_slot = self.positions[self.queries].view(-1, self.width, 1)
        distance = by_slot - cells  # [C, W, P]
        is_hidden = is_empty[:, None] | (distance < 0)
        bias = _bias(distance, is_hidden, window, query.dtype)
        num_queries = query.shape[2]  # Q
        by_query_head = bias.repeat_interleave(num_queries, dim=1)  # [C, W * Q, P]
        return by_query_head[:, None]
