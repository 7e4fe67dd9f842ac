"""Sequences that begin with the same tokens: where they do, and how their trees become one.

Prompts of a run often begin alike: with a system prompt, the schema of tools, or examples. In a
packed row such a beginning stands once, and each prompt continues it.

Shapes: T tokens of all trees that are merged.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from easyrl.layout.tree import NONE, Arrangement, Ints, TokenTree, renumbered


class Merged(NamedTuple):
    """Trees with their common beginnings joined; see `merge_prefixes`."""

    row: Arrangement  # its tokens are numbered as in `TokenTree.joined(trees)`
    places: Ints  # [T] place in the row of each token of the joined trees

    @property
    def num_saved(self) -> int:
        """Tokens that the row has fewer than the trees."""
        return len(self.places) - len(self.row.tokens)


class Beginning(NamedTuple):
    """The first tokens of a sequence, which stand side by side in trees that are joined."""

    start: int  # number of the first token
    stop: int  # number of the token behind the last one
    min_shared: int = 1  # fewest tokens to share with a sequence before it


def merge_prefixes(
    trees: Sequence[TokenTree], ids: Ints, beginnings: Sequence[Beginning]
) -> Merged:
    """Join the beginnings of trees that start with the same token ids, as far as they are the same.

        tree 0   A B C ─┬─ R        A B ─┬─ C ─┬─ R
                        └─ S   ──►       │     └─ S
        tree 1   A B D ─── T             └─ D ─── T

    `ids` [T]: token ids of all trees, one tree after the other. `beginnings`: what is compared, in
    the order of the tokens. Each joins the one before it with which it shares most tokens, if these
    are at least `min_shared`.

    Two completions of one prompt may well begin with the same token, but joining these would cut
    the row into many short nodes: prompts are beginnings, completions are none.
    """
    joined = TokenTree.joined(trees)
    num_tokens = joined.num_tokens
    kept = np.arange(num_tokens)  # [T] the token that stands in the row for each token
    earlier = Prefixes()
    for start, stop, min_shared in beginnings:
        own_ids = PrefixIds.of(ids[start:stop])
        shared = earlier.longest_shared(own_ids)
        if shared.length >= min_shared:
            others = slice(shared.start, shared.start + shared.length)
            kept[start : start + shared.length] = kept[others]
        earlier.add(own_ids, start)

    every_token = np.arange(num_tokens)
    is_kept = kept == every_token
    if is_kept.all() and joined.is_depth_first:
        return Merged(Arrangement(joined, every_token), every_token)
    # Three numberings: of the joined trees (`tokens`), of the tokens that stay (`numbers`), and of
    # the row, where nodes stand depth first (`places`).
    tokens = np.flatnonzero(is_kept)
    numbers = np.zeros(num_tokens, np.int64)
    numbers[tokens] = np.arange(len(tokens))
    before = renumbered(joined.predecessors[tokens], numbers[kept])
    # A node of the trees stays a node, so that trees that share nothing stay as they are.
    first_tokens = joined.starts[is_kept[joined.starts]]
    cuts = numbers[first_tokens].tolist()
    arranged = TokenTree.of_predecessors(before, cuts).depth_first(cuts)
    row = Arrangement(arranged.tree, tokens[arranged.tokens])
    places = row.first_places(num_tokens)
    # A token that was joined to another one stands where that one does.
    return Merged(row, places[kept])


@dataclass(frozen=True, slots=True, eq=False)
class PrefixIds:
    """Token ids whose beginning is compared with that of others."""

    ids: np.ndarray[Any, np.dtype[np.int64]]
    key: bytes
    """The same ids, of a fixed width each. Of sorted keys, those right beside one share the longest
    beginnings with it."""

    @classmethod
    def of(cls, ids: Ints) -> Self:
        wide = ids.astype(np.int64)
        return cls(wide, wide.tobytes())

    def __len__(self) -> int:
        return len(self.ids)


class Shared(NamedTuple):
    """The longest beginning that some tokens have in common with earlier ones."""

    length: int  # in tokens
    start: int  # where the earlier ones begin, as it was given to `Prefixes.add`


class Prefixes:
    """Beginnings of sequences, to find the one that begins like another one for longest."""

    def __init__(self) -> None:
        self._keys = list[bytes]()  # sorted
        self._ids = list[PrefixIds]()  # in the same order
        self._starts = list[int]()

    def longest_shared(self, ids: PrefixIds) -> Shared:
        place = bisect_left(self._keys, ids.key)
        found = Shared(length=0, start=NONE)
        for neighbour in range(max(place - 1, 0), min(place + 1, len(self._keys))):
            length = num_common(ids.ids, self._ids[neighbour].ids)
            if length > found.length:
                found = Shared(length, self._starts[neighbour])
        return found

    def add(self, ids: PrefixIds, start: int = 0) -> None:
        """Add the ids of a sequence that begins at token `start`."""
        place = bisect_left(self._keys, ids.key)
        self._keys.insert(place, ids.key)
        self._ids.insert(place, ids)
        self._starts.insert(place, start)


def num_common(one: Ints, other: Ints) -> int:
    """Return the length of the longest beginning that both have."""
    num_compared = min(len(one), len(other))
    is_different = one[:num_compared] != other[:num_compared]
    if is_different.any():
        return int(is_different.argmax())
    return num_compared
