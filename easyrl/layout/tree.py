"""Trees of tokens: how the sequences of one group, or of several, share their beginnings.

A node is a run of tokens that every sequence through it has in common. Its first token continues
the last token of its parent. A node without a parent begins a sequence, at position 0:

    tokens   P P P R R R R S S S S S        P ─┬─ R ─┬─ R
    nodes    0     1   2   3                   │     └─ ...
    parents  -1    0   1   0                   └─ S

The root of a plain group is its prompt, and its completions are the root's children. The branches
of an agent's episode are deeper nodes. A context that an agent begins anew is a root of its own.
A sequence that shares nothing is a tree of one node, so a `TokenTree` is a forest in general.

A token sees its *path*: the tokens of its node's ancestors, then its own node up to itself. All
that depends on the layout follows from the path: positions, attention, which token predicts which,
and what a token costs.

Shapes: N nodes, T tokens of all nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np

Ints = np.ndarray[Any, np.dtype[np.integer[Any]]]

NONE = -1
"""The parent of a node, and the predecessor of a token, that continues nothing."""


@dataclass(frozen=True, eq=False)
class TokenTree:
    """Nodes of a forest. A parent stands before its children; tokens are numbered node by node."""

    lengths: Ints  # [N] tokens of each node, positive
    parents: Ints  # [N] number of the node that each node continues; NONE: it is a root

    def __post_init__(self) -> None:
        assert self.lengths.shape == self.parents.shape, "one parent for each node"
        assert (self.lengths > 0).all(), "every node has a token"
        numbers = np.arange(len(self.parents))
        assert ((self.parents >= NONE) & (self.parents < numbers)).all(), "parents come first"

    @classmethod
    def of_sequences(cls, lengths: Sequence[int]) -> Self:
        """Return the forest of whole sequences that share nothing."""
        return cls(np.array(lengths, np.int64), np.full(len(lengths), NONE))

    @classmethod
    def of_group(cls, prompt_length: int, completion_lengths: Sequence[int]) -> Self:
        """Return the tree of a prompt and of completions that continue its end."""
        lengths = [prompt_length, *completion_lengths]
        parents = [NONE] + [0] * len(completion_lengths)
        return cls(np.array(lengths, np.int64), np.array(parents, np.int64))

    @classmethod
    def of_predecessors(cls, predecessors: Ints, cuts: Iterable[int] = ()) -> Self:
        """Cut tokens into nodes, as few as possible.

        `predecessors` [T]: number of the earlier token that each token continues, or NONE. A node
        begins where a token does not continue the token before it, and ends where another token
        than the next one continues it. `cuts`: tokens that begin a node in any case.
        """
        num_tokens = len(predecessors)
        jumps = np.flatnonzero(predecessors != np.arange(-1, num_tokens - 1))
        continued = predecessors[jumps]
        behind_continued = continued[continued != NONE] + 1
        starts = np.unique(np.concatenate([[0], jumps, behind_continued, [*cuts]]).astype(np.int64))
        starts = starts[starts < num_tokens]
        lengths = np.diff(starts, append=num_tokens)
        before = predecessors[starts]
        # A token is in the last node that starts at it or before it.
        node_before = np.searchsorted(starts, before, side="right") - 1
        return cls(lengths, np.where(before == NONE, NONE, node_before))

    @classmethod
    def joined(cls, trees: Sequence[TokenTree]) -> Self:
        """Return the forest of these trees, side by side."""
        parents = list[Ints]()
        num_nodes = 0
        for tree in trees:
            parents.append(np.where(tree.parents == NONE, NONE, tree.parents + num_nodes))
            num_nodes += tree.num_nodes
        return cls(np.concatenate([tree.lengths for tree in trees]), np.concatenate(parents))

    @property
    def num_nodes(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @cached_property
    def stops(self) -> Ints:
        """Number [N] of the token behind each node."""
        stops: Ints = np.cumsum(self.lengths, dtype=np.int64)
        return stops

    @cached_property
    def starts(self) -> Ints:
        """Number [N] of each node's first token."""
        starts: Ints = self.stops - self.lengths
        return starts

    @cached_property
    def first_positions(self) -> Ints:
        """Position [N] of each node's first token: the number of tokens on the path before it."""
        positions = np.zeros(self.num_nodes, np.int64)
        for node, parent in enumerate(self.parents.tolist()):
            if parent != NONE:
                positions[node] = positions[parent] + self.lengths[parent]
        return positions

    @cached_property
    def positions(self) -> Ints:
        """Position [T] of each token in its sequence."""
        shifts = np.repeat(self.first_positions - self.starts, self.lengths)
        positions: Ints = shifts + np.arange(self.num_tokens)
        return positions

    @cached_property
    def predecessors(self) -> Ints:
        """Number [T] of the token that each token continues, or NONE."""
        before = np.arange(-1, self.num_tokens - 1)
        is_root = self.parents == NONE
        before[self.starts] = np.where(is_root, NONE, self.stops[self.parents] - 1)
        return before

    @cached_property
    def has_children(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Whether others continue each node [N]."""
        found = np.zeros(self.num_nodes, np.bool_)
        found[self.parents[self.parents != NONE]] = True
        return found

    @property
    def leaves(self) -> list[int]:
        """The nodes that nothing continues."""
        return [int(node) for node in np.flatnonzero(~self.has_children)]

    @cached_property
    def ends(self) -> Ints:
        """Number [N] of the token behind all that is below each node: the tokens that see it are
        its own and those up to there. The tree has to be in depth-first order."""
        assert self.is_depth_first, "what is below a node stands right behind it"
        ends = self.stops.copy()
        for node in reversed(range(self.num_nodes)):
            parent = self.parents[node]
            if parent != NONE:
                ends[parent] = max(ends[parent], ends[node])
        return ends

    @cached_property
    def is_depth_first(self) -> bool:
        """Whether all nodes below a node stand right behind it."""
        path = list[int]()
        for node, parent in enumerate(self.parents.tolist()):
            while path and path[-1] != parent:
                path.pop()
            if parent != NONE and not path:
                return False
            path.append(node)
        return True

    def path(self, node: int) -> list[int]:
        """Return the nodes from the root to `node`."""
        path = [node]
        while (parent := int(self.parents[path[-1]])) != NONE:
            path.append(parent)
        return path[::-1]

    def tokens_of(self, nodes: Iterable[int]) -> Ints:
        """Return the numbers of the tokens of these nodes, node by node."""
        ranges = [np.arange(self.starts[node], self.stops[node]) for node in nodes]
        return np.concatenate(ranges) if ranges else np.zeros(0, np.int64)

    def depth_first(self, cuts: Iterable[int] = ()) -> Arrangement:
        """Arrange the tokens so that all that is below a node stands right behind it, children in
        their order. A node that alone continues another is then joined to it, unless it begins with
        a token in `cuts`."""
        tokens = self.tokens_of(_depth_first_order(self.parents))
        places = np.empty_like(tokens)
        places[tokens] = np.arange(len(tokens))
        before = self.predecessors[tokens]
        before = np.where(before == NONE, NONE, places[before])
        return Arrangement(TokenTree.of_predecessors(before, places[[*cuts]]), tokens)

    def repeated(self, leaves: Iterable[int]) -> Arrangement:
        """Arrange the whole path to each of these leaves as a sequence of its own, in depth-first
        order: tokens that several paths share are repeated."""
        wanted = {*leaves}
        order = [node for node in _depth_first_order(self.parents) if node in wanted]
        sequences = [self.tokens_of(self.path(leaf)) for leaf in order]
        tree = TokenTree.of_sequences([len(tokens) for tokens in sequences])
        return Arrangement(tree, np.concatenate(sequences))


class Arrangement(NamedTuple):
    """A row in which the tokens of a tree stand in another order, or several times."""

    tree: TokenTree  # of the row
    tokens: Ints  # [T] number, in the tree that was arranged, of each token of the row

    def first_places(self, num_tokens: int) -> Ints:
        """Return where each token of the arranged tree first stands in the row [num_tokens]. Of a
        token that the row lacks, 0."""
        places = np.zeros(num_tokens, np.int64)
        numbers = np.arange(len(self.tokens))
        places[self.tokens[::-1]] = numbers[::-1]  # the first place is assigned last
        return places


def _depth_first_order(parents: Ints) -> list[int]:
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents.tolist()):
        children.setdefault(parent, []).append(node)
    order = list[int]()
    open_nodes = children.get(NONE, [])[::-1]
    while open_nodes:
        node = open_nodes.pop()
        order.append(node)
        open_nodes += children.get(node, [])[::-1]
    return order
