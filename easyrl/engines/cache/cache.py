"""The cache of an engine: a tree of nodes (`nodes`) and what layers store for them (`stores`).

A new prompt continues what its family has stored. Of what is found, the whole nodes are continued
where they are. The rest is an end within a node or a row:

    long     it becomes a node of its own (the node or the row is cut), which both continue
    short    it is copied to the new node: attending to one more node costs more

So a sequence attends to few nodes, at most `MAX_LEVELS`, and a token is computed once.

Prompts without a family continue the beginnings that they have in common (`engines.prefixes`). A
beginning that no prompt continues any more is kept for later ones, until all work is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from easyrl.engines import COPIED_TOKENS, MAX_PREFIXES, padded, row_cells
from easyrl.engines.cache.nodes import Family, Node, NodeTree
from easyrl.engines.cache.stores import KeysValues, RowCopies, RowStarts, Span, States, Store
from easyrl.layout.prefixes import num_common
from easyrl.layout.tree import NONE, Ints
from easyrl.types import Int32

MAX_LEVELS = 4
"""Most nodes that a sequence attends to. Deeper ones begin with a copy of what is above them."""


@dataclass(slots=True, eq=False)
class StoredRow:
    """The tokens that a row has stored behind a node. `NodeCache.node_of` may move the first of
    them to a node, which the row then continues."""

    number: int  # of the row
    ids: Int32  # [N]: all tokens of its sequence that are stored
    start: int  # position of the token in its first cell
    parent: Node | None  # ends there

    @property
    def stop(self) -> int:
        return len(self.ids)


class _Found(NamedTuple):
    """The longest beginning of a prompt that the tree and the rows have."""

    nodes: list[Node]  # that are a part of it as a whole, from the root on
    rest: Node | StoredRow | None  # begins with the other tokens; None: there are none
    length: int


class _Plan(NamedTuple):
    """What becomes of tokens that are found."""

    continued: Sequence[Node]  # the new node's path to the root
    copied: Iterable[Node | StoredRow]  # their first tokens, behind that path, are copied to it


def _path(node: Node | None) -> list[Node]:
    return [] if node is None else node.path()


def _copies(copied: Mapping[int, Sequence[Node]]) -> list[RowCopies]:
    """Return what is copied to rows, given the nodes of each row, in the order of their cells."""
    pairs: dict[int, list[tuple[int, Node]]] = {}  # row and node, by the first cell of the copy
    for row, nodes in copied.items():
        for node in nodes:
            first_cell = node.start - nodes[0].start
            pairs.setdefault(first_cell, []).append((row, node))
    copies = list[RowCopies]()
    for first_cell in sorted(pairs):
        of_cell = pairs[first_cell]
        rows = np.array([row for row, _ in of_cell])
        slots = np.array([node.slot for _, node in of_cell])
        longest = max(len(node) for _, node in of_cell)
        copies.append(RowCopies(rows, slots, first_cell, longest))
    return copies


class NodeCache:
    """The tree, its slots, and the stores. Slots are allocated as needed."""

    def __init__(
        self,
        num_rows: int,
        max_prompt: int,
        max_completion: int,
        *,
        prompt_step: int = 1,
        slot_step: int = 1,
        capacity: int = 0,
        has_states: bool = False,
    ) -> None:
        """The cells of a slot and the number of slots are multiples of the steps. `capacity`: nodes
        up to which unused ones are kept. `has_states`: layers of the model keep a state."""
        self.num_rows = num_rows
        self.cells_per_row = row_cells(max_prompt, max_completion)
        self.keys_values = KeysValues(num_rows, self.cells_per_row)
        self._stores: list[Store] = [self.keys_values]
        self.states: States | None = None  # None: no layer keeps a state
        if has_states:
            self.states = States(num_rows)
            self._stores.append(self.states)
        # A state is that behind a node's last token alone: others cannot be continued.
        self._can_cut = all(store.can_cut for store in self._stores)
        self._max_prompt_cells = padded(max_prompt)
        self._prompt_step = prompt_step
        self._slot_step = slot_step
        self._capacity = capacity
        self.tree = NodeTree()
        self.lengths: Ints = np.zeros(0, dtype=np.int64)  # [C] tokens of each slot's node; 0: free
        self.starts: Ints = np.zeros(0, dtype=np.int64)  # [C] position of the first of them
        self._longest = 0  # cells of a slot
        self._most_slots = 0  # most that were claimed at a time since `shrink`
        self._most_length = 0  # tokens of the longest node since `shrink`
        self.num_allocations = 0  # of memory for nodes

    # -- slots ------------------------------------------------------------------------------------

    def prompt_cells(self, length: int) -> int:
        """Return the cells of a slot for nodes of this length."""
        return min(padded(length, self._prompt_step), self._max_prompt_cells)

    def _claim_slots(self, lengths: Sequence[int]) -> list[int]:
        """Reserve a slot for a node of each of these lengths, the first free ones."""
        num_prefixes = len(self.tree.prefixes())  # they have a bound of their own
        while len(self.tree.nodes) - num_prefixes + len(lengths) > self._capacity:
            unused = self.tree.oldest_unused(prefixes=False)
            if unused is None:
                break
            self._drop(unused)
        num_slots = len(self.lengths)
        num_used = len(self.tree.nodes) + len(lengths)
        num_missing = padded(max(0, num_used - num_slots), self._slot_step)
        most_tokens = max([self._longest, *lengths])
        longest = self.prompt_cells(most_tokens)
        if num_missing or longest > self._longest:
            self._allocate(num_slots + num_missing, longest)

        free = np.flatnonzero(self.lengths == 0)
        claimed = free[: len(lengths)]
        self.lengths[claimed] = lengths
        self._most_slots = max(self._most_slots, num_used)
        self._most_length = max([self._most_length, *lengths])
        return [int(slot) for slot in claimed]

    def _allocate(self, num_slots: int, longest: int) -> None:
        self.num_allocations += 1
        num_kept = min(num_slots, len(self.lengths))
        num_added = num_slots - num_kept
        added = np.zeros(num_added, dtype=np.int64)
        self.lengths = np.append(self.lengths[:num_kept], added)
        self.starts = np.append(self.starts[:num_kept], added)
        self._longest = longest
        for store in self._stores:
            store.resize(num_slots, longest)

    def shrink(self) -> None:
        """Drop unused nodes; free all slots if less than half of their cells were needed since the
        last call. No sequence may be in progress."""
        self.drop_unused()
        assert not self.tree.nodes, "weights wait for all sequences"
        needed_slots = padded(self._most_slots, self._slot_step)
        needed_cells = needed_slots * self.prompt_cells(self._most_length)
        allocated_cells = len(self.lengths) * self._longest
        self._most_slots = 0
        self._most_length = 0
        if 2 * needed_cells < allocated_cells:
            self._allocate(0, 0)

    # -- nodes ------------------------------------------------------------------------------------

    def add_prompts(self, prompts: Sequence[Int32], cuts: Sequence[Sequence[int]]) -> list[Node]:
        """Add a node for each prompt, which no other prompt continues. `cuts`: of each prompt the
        lengths of its beginnings that others share (`engines.prefixes`); it continues their nodes.
        """
        prefixes = list[Node | None]()
        for ids, of_prompt in zip(prompts, cuts, strict=True):
            prefix = self._prefix_of(ids, of_prompt)
            self.tree.use(prefix)  # it is not dropped before the prompt's node continues it
            prefixes.append(prefix)
        starts = [0 if prefix is None else prefix.stop for prefix in prefixes]
        lengths = [len(ids) - start for ids, start in zip(prompts, starts, strict=True)]
        slots = self._claim_slots(lengths)
        self.starts[slots] = starts
        nodes = list[Node]()
        for ids, prefix, slot in zip(prompts, prefixes, slots, strict=True):
            nodes.append(self.tree.add(ids, prefix, None, slot))
            self.release(prefix)
        return nodes

    def _prefix_of(self, ids: Int32, cuts: Sequence[int]) -> Node | None:
        """Return the node of the longest of these beginnings, with a node for each of the shorter
        ones above it. Without room for another one, return that of a shorter one, or None."""
        node: Node | None = None
        for cut in cuts:
            known = self.tree.prefix(ids[:cut], node)
            if known is None:
                if not self._make_room_for_prefix(kept=node):
                    break
                known = self._add(None, ids[:cut], node)
                known.is_prompt = False
            node = known
        return node

    def _make_room_for_prefix(self, kept: Node | None) -> bool:
        """Drop an unused beginning if there are MAX_PREFIXES, but not `kept`; return whether there
        is room for one more."""
        prefixes = self.tree.prefixes()
        if len(prefixes) < MAX_PREFIXES:
            return True
        unused = [node for node in prefixes if not node.is_used and node is not kept]
        if not unused:
            return False
        self._drop(min(unused, key=lambda node: node.last_use))
        return True

    def num_found(self, family: Family, ids: Int32, rows: Sequence[StoredRow]) -> int:
        """Return how many of a prompt's first tokens need not be computed."""
        if self.tree.node_of_prompt(family, ids) is not None:
            return len(ids)
        return self._find(family, ids[:-1], rows).length

    def node_of(self, family: Family, ids: Int32, rows: Sequence[StoredRow]) -> Node:
        """Return the node that ends with this prompt: one that is there, or a new one. `rows`: of
        the same family; see `StoredRow`."""
        known = self.tree.node_of_prompt(family, ids)
        if known is not None:
            return known
        # The prompt's last token is computed in any case: its logits are needed.
        found = self._find(family, ids[:-1], rows)
        with self._holding(found):
            plan = self._plan(family, found)
            parent = plan.continued[-1] if plan.continued else None
            node = self._add(family, ids, parent)
            for holder in plan.copied:
                self._copy(holder, node, min(found.length, holder.stop))
        return node

    def _plan(self, family: Family, found: _Found) -> _Plan:
        """Choose what of the found tokens a new node continues, and what it copies. If a long rest
        is found within a node or a row, cut that."""
        continued = [*found.nodes]
        copied = deque[Node | StoredRow]()
        if found.rest is not None:
            is_long = found.length - found.rest.start > COPIED_TOKENS
            if is_long and self._is_cuttable(found.rest):
                continued.append(self._cut(family, found.rest, found.length))
            else:
                copied.append(found.rest)
        while continued:
            last = continued[-1]
            is_short = found.length - last.start <= COPIED_TOKENS
            if not is_short and len(continued) < MAX_LEVELS:
                break
            copied.appendleft(last)
            continued.pop()
        return _Plan(continued, copied)

    def keep(self, family: Family, row: StoredRow) -> None:
        """Keep what a row has stored, in an unused node, if there is room."""
        used = [node for node in self.tree.nodes if node.is_used]
        has_room = len(used) < self._capacity
        has_tokens = row.start < row.stop
        if has_room and has_tokens:
            node = self._add(family, row.ids, row.parent)
            node.is_prompt = False
            self._copy(row, node, row.stop)

    def release(self, node: Node | None) -> None:
        """Note that a sequence continues the node no more; nothing for one that continues none."""
        if node is None:
            return
        self.tree.release(node)
        is_needed = node.is_used or node.is_prefix or node.family is not None
        if not is_needed:
            self._drop(node)

    def drop_unused(self) -> None:
        unused = self.tree.oldest_unused()
        while unused is not None:
            self._drop(unused)
            unused = self.tree.oldest_unused()

    def _drop(self, node: Node) -> None:
        self.tree.remove(node)
        self.lengths[node.slot] = 0

    def _find(self, family: Family, ids: Int32, rows: Sequence[StoredRow]) -> _Found:
        """Find the longest beginning of `ids` that is stored or will be after this step."""
        node, length = self.tree.longest(family, ids, are_whole=not self._can_cut)
        if node is not None and length == node.stop:
            found = _Found(node.path(), None, length)
        elif node is not None:
            found = _Found(_path(node.parent), node, length)
        else:
            found = _Found([], None, 0)
        for row in rows:
            common = num_common(row.ids, ids)
            is_continued = self._can_cut or common == row.stop
            if is_continued and common > max(found.length, row.start):
                found = _Found(_path(row.parent), row, common)
        return found

    @contextmanager
    def _holding(self, found: _Found) -> Iterator[None]:
        """Let no slot be taken from the nodes that are found."""
        held = list(found.nodes)
        if isinstance(found.rest, Node):
            held.append(found.rest)
        for node in held:
            node.num_sequences += 1
        try:
            yield
        finally:
            for node in held:
                node.num_sequences -= 1

    def _is_cuttable(self, holder: Node | StoredRow) -> bool:
        """Whether no sequence continues more than MAX_LEVELS nodes once this has been cut."""
        num_above = len(_path(holder.parent))
        num_below = holder.num_levels() if isinstance(holder, Node) else 1  # the new node
        return num_above + 1 + num_below <= MAX_LEVELS

    def _add(self, family: Family | None, ids: Int32, parent: Node | None) -> Node:
        start = 0 if parent is None else parent.stop
        (slot,) = self._claim_slots([len(ids) - start])
        self.starts[slot] = start
        return self.tree.add(ids, parent, family, slot)

    def _cut(self, family: Family, holder: Node | StoredRow, position: int) -> Node:
        """Make the tokens before `position` a node, which the holder then continues; return it."""
        if isinstance(holder, StoredRow):
            upper = self._add(family, holder.ids[:position], holder.parent)
            upper.is_prompt = False
            self._copy(holder, upper, position)
            rest = Span(
                is_row=True,
                number=holder.number,
                start=position - holder.start,
                stop=holder.stop - holder.start,
            )
            start_of_row = Span(
                is_row=True,
                number=holder.number,
                start=0,
                stop=holder.stop - position,
            )
            self._copy_cells(rest, start_of_row)
            self.tree.use(upper)
            self.release(holder.parent)
            holder.parent = upper
            holder.start = position
            return upper
        return self._cut_node(holder, position)

    def _cut_node(self, holder: Node, position: int) -> Node:
        (slot,) = self._claim_slots([holder.stop - position])
        upper = self.tree.cut(holder, position, slot)
        self.lengths[upper.slot] = len(upper)
        self.starts[slot] = position
        if holder.num_stored:
            rest = Span(
                is_row=False,
                number=upper.slot,
                start=len(upper),
                stop=len(upper) + holder.num_stored,
            )
            new_slot = Span(
                is_row=False,
                number=holder.slot,
                start=0,
                stop=holder.num_stored,
            )
            self._copy_cells(rest, new_slot)
        return upper

    def _copy(self, source: Node | StoredRow, target: Node, stop: int) -> None:
        """Copy the source's tokens before position `stop` to the target, if they are stored and
        follow what the target has stored."""
        start = source.start
        num_tokens = stop - start
        is_stored = isinstance(source, StoredRow) or num_tokens <= source.num_stored
        follows = target.start + target.num_stored == start
        if not is_stored or not follows:
            return
        is_row = isinstance(source, StoredRow)
        number = source.number if isinstance(source, StoredRow) else source.slot
        copied = Span(is_row, number, start=0, stop=num_tokens)
        copy = Span(
            is_row=False,
            number=target.slot,
            start=start - target.start,
            stop=stop - target.start,
        )
        self._copy_cells(copied, copy)
        target.num_stored += num_tokens

    def _copy_cells(self, source: Span, target: Span) -> None:
        for store in self._stores:
            store.copy(source, target)

    def slots_of(self, node: Node | None) -> Ints:
        """Return the slots of a node's path, then NONE: [MAX_LEVELS]."""
        slots = np.full(MAX_LEVELS, NONE)
        path = _path(node)
        slots[: len(path)] = [each.slot for each in path]
        return slots

    # -- rows -------------------------------------------------------------------------------------

    def copied(self, node: Node, num_more: int) -> Sequence[Node]:
        """Return the last nodes of a prompt's path that a row starts with a copy of, which costs
        less than a merge: a short node, one behind another that it alone continues, and a short
        prompt with the beginnings that it shares. `num_more`: tokens that the row may store behind
        them."""
        if node.family is None and node.stop <= COPIED_TOKENS:
            return node.path()
        if len(node) <= COPIED_TOKENS:
            return [node]
        is_alone = node.num_sequences == 1 and not node.children
        fits = len(node) + num_more <= self.cells_per_row
        if node.parent is not None and is_alone and fits:
            return [node]
        return []

    def start_rows(self, nodes: Mapping[int, Node], copied: Mapping[int, Sequence[Node]]) -> None:
        """Start rows behind nodes: `nodes` by row. A row of `copied` begins with a copy of these
        nodes, the last of which is its own; it does not continue them then."""
        starts = RowStarts(
            rows=np.array(list(nodes)),
            slots=np.array([node.slot for node in nodes.values()]),
            copies=_copies(copied),
        )
        for store in self._stores:
            store.start_rows(starts)
        for row in copied:
            self.release(nodes[row])

    def move_rows(self, sources: Ints, targets: Ints, num_cells: int) -> None:
        for store in self._stores:
            store.move_rows(sources, targets, num_cells)
