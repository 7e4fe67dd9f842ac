"""The tree of what an engine has stored: runs of tokens, each stored once for all that continue it.

    A ─┬─ B ─── sequence       A, B, C: nodes, each in a slot of the stores
       ├─ C ─┬─ sequence       sequences: in rows, or ready to start
       │     └─ sequence
       └─ sequence

A node is *used* while a sequence or another node continues it. Nodes of one *family* may continue
each other: a prompt that begins as stored tokens of its family continues them. An unused node of a
family is kept for such prompts until its slot is needed, and so is a beginning that prompts without
a family have in common; other nodes are dropped at once.

Which nodes exist is a function of what was asked of the tree, in this order, alone: not of time,
nor of the memory that happens to be allocated.

Shapes: N tokens of a node's path from the root.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from easyrl.layout.prefixes import num_common
from easyrl.types import Int32

Family = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Node:
    ids: Int32  # [N]: the tokens of its path, with its own at the end
    start: int  # position of its first own token
    parent: Node | None
    family: Family | None  # None: no prompt looks for its tokens
    slot: int
    num_stored: int = 0  # so many of its first tokens are stored; the others are computed next
    is_prompt: bool = True  # whether a prompt ends with it
    logits: Any = None
    """[V]: of the token behind it. Kept if a prompt of a family ends with it."""
    num_sequences: int = 0  # that continue it
    children: list[Node] = field(default_factory=list)
    last_use: int = 0  # in numbers of the tree's clock

    @property
    def stop(self) -> int:
        """Position behind its last token."""
        return len(self.ids)

    def __len__(self) -> int:
        """Number of its own tokens."""
        return self.stop - self.start

    @property
    def is_used(self) -> bool:
        return self.num_sequences > 0 or bool(self.children)

    @property
    def is_prefix(self) -> bool:
        """Whether it is a beginning that prompts without a family have in common."""
        return self.family is None and not self.is_prompt

    @property
    def is_stored(self) -> bool:
        return self.num_stored == len(self)

    def path(self) -> list[Node]:
        """Return the nodes from the root to this one."""
        path = [self]
        while path[-1].parent is not None:
            path.append(path[-1].parent)
        return path[::-1]

    def num_levels(self) -> int:
        """Return the number of levels of the tree below it and with it."""
        return 1 + max([child.num_levels() for child in self.children], default=0)


class NodeTree:
    """The nodes, oldest first. Slots are given by the caller."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._clock = 0

    def add(self, ids: Int32, parent: Node | None, family: Family | None, slot: int) -> Node:
        """Add a node behind `parent`, or a root, whose path has these tokens [N]."""
        start = 0 if parent is None else parent.stop
        node = Node(ids, start, parent, family, slot)
        if parent is not None:
            parent.children.append(node)
        self.nodes.append(node)
        self._touch(node)
        return node

    def cut(self, node: Node, position: int, slot: int) -> Node:
        """Divide a node: its tokens before `position` become a node of their own, which takes its
        slot, and which it continues from now on, in `slot`. Return the new node."""
        assert node.start < position < node.stop
        upper = Node(node.ids[:position], node.start, node.parent, node.family, node.slot)
        upper.is_prompt = False
        upper.num_stored = min(node.num_stored, len(upper))
        upper.children = [node]
        if node.parent is not None:
            node.parent.children.remove(node)
            node.parent.children.append(upper)
        node.start = position
        node.parent = upper
        node.slot = slot
        node.num_stored -= upper.num_stored
        self.nodes.append(upper)
        self._touch(upper)
        return upper

    def remove(self, node: Node) -> None:
        """Remove an unused node."""
        assert not node.is_used
        self.nodes.remove(node)
        if node.parent is not None:
            node.parent.children.remove(node)

    def use(self, node: Node | None) -> None:
        """Note that a sequence continues the node; nothing for one that continues no node."""
        if node is not None:
            node.num_sequences += 1
            self._touch(node)

    def release(self, node: Node) -> None:
        """Note that a sequence that continued the node does so no more."""
        assert node.num_sequences > 0
        node.num_sequences -= 1
        self._touch(node)

    def _touch(self, node: Node) -> None:
        self._clock += 1
        node.last_use = self._clock

    def oldest_unused(self, *, prefixes: bool = True) -> Node | None:
        """Return the unused node whose last use was first; without `prefixes`, of the others."""
        unused = [node for node in self.nodes if not node.is_used]
        if not prefixes:
            unused = [node for node in unused if not node.is_prefix]
        return min(unused, key=lambda node: node.last_use, default=None)

    def prefixes(self) -> list[Node]:
        return [node for node in self.nodes if node.is_prefix]

    def prefix(self, ids: Int32, parent: Node | None) -> Node | None:
        """Return the node behind `parent` of a beginning with these tokens."""
        for node in self.prefixes():
            if node.parent is parent and np.array_equal(node.ids, ids):
                return node
        return None

    def node_of_prompt(self, family: Family, ids: Int32) -> Node | None:
        """Return the node that ends a prompt with these tokens."""
        for node in self.nodes:
            if node.family == family and node.is_prompt and np.array_equal(node.ids, ids):
                return node
        return None

    def longest(
        self, family: Family, ids: Int32, *, are_whole: bool = False
    ) -> tuple[Node | None, int]:
        """Return the node that has the longest beginning of `ids` in common with its path, one of
        its own tokens included, and that beginning's length. Of several the oldest. `are_whole`:
        only of nodes whose whole path is a beginning of `ids`."""
        found: Node | None = None
        length = 0
        for node in self.nodes:
            if node.family != family:
                continue
            common = num_common(node.ids, ids)
            if are_whole and common < node.stop:
                continue
            if common > max(length, node.start):
                found = node
                length = common
        return found, length
