"""Pictures among the tokens of sequences that agents and environments continue.

    rendered     41  90  90  90  90  17        90: the placeholder of the model
    here         41 -73 -73 -73 -73  17        -73: the id of the picture

A placeholder is the same token for every picture. So in the sequences of episodes, and in the
engine, the placeholders of a picture are replaced by an id of its own, a negative number that
follows from the file. Then sequences with equal ids show equal pictures: what requests have in
common, and what the cache has stored, is found as for text. The model and the trainer get
placeholders again, and where each picture stands.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from easyrl.layout.tree import Ints
from easyrl.types import BrokenInvariant, Completion, Int32, Picture, PlacedPictures

NUM_IDS = 2**31
"""Ids that pictures may have: all negative ones of 32 bits."""


class Shown(NamedTuple):
    """A picture among tokens."""

    picture: Picture
    start: int  # number of its first placeholder
    stop: int  # behind its last one; tokens of text may be between them


@dataclass(slots=True, eq=False)
class Known:
    """A picture that sequences may have."""

    picture_id: int
    picture: Picture
    num_placeholders: int
    owners: set[Hashable] = field(default_factory=set)


class ShownPictures:
    """The pictures of the sequences of a rollout worker."""

    def __init__(self) -> None:
        self._by_id: dict[int, Known] = {}
        self._by_digest: dict[str, Known] = {}
        self._of_owner: dict[Hashable, dict[str, Known]] = {}

    def add(self, picture: Picture, num_placeholders: int, owner: Hashable) -> Known:
        """Remember a picture until all its owners are forgotten."""
        digest = picture.digest
        known = self._by_digest.get(digest)
        if known is None:
            number = int(digest, 16) % NUM_IDS
            # Two files with the same number are as good as impossible in one worker.
            while -1 - number in self._by_id:
                number = (number + 1) % NUM_IDS
            known = Known(-1 - number, picture, num_placeholders)
            self._by_id[known.picture_id] = known
            self._by_digest[digest] = known
        known.owners.add(owner)
        self._of_owner.setdefault(owner, {})[digest] = known
        return known

    def with_digest(self, digest: str) -> Known:
        return self._by_digest[digest]

    def forget(self, owner: Hashable) -> None:
        """Drop the pictures that nobody else owns."""
        for digest, known in self._of_owner.pop(owner, {}).items():
            known.owners.discard(owner)
            if not known.owners:
                del self._by_id[known.picture_id]
                del self._by_digest[digest]

    def find(self, ids: Sequence[int] | Ints) -> list[Shown]:
        """Return the pictures among tokens, in their order."""
        every = np.asarray(ids)
        places = np.flatnonzero(every < 0)
        found = list[Shown]()
        index = 0
        while index < len(places):
            picture_id = int(every[places[index]])
            known = self._by_id[picture_id]
            own = places[index : index + known.num_placeholders]
            if len(own) < known.num_placeholders or (every[own] != picture_id).any():
                raise BrokenInvariant("expected all tokens of a picture, got a part of them")
            found.append(Shown(known.picture, int(own[0]), int(own[-1]) + 1))
            index += known.num_placeholders
        return found

    def placed(
        self, prompt_ids: Sequence[int], completions: Sequence[Completion]
    ) -> list[PlacedPictures]:
        """Return the pictures of a group, whose tokens are counted as `[P | R1 | R2 | ...]`."""
        parts: list[Sequence[int] | Ints] = [prompt_ids]
        parts += [completion.token_ids for completion in completions]
        found = list[PlacedPictures]()
        first = 0
        for part in parts:
            for shown in self.find(part):
                placed = PlacedPictures((shown.picture,), first + shown.start, first + shown.stop)
                found.append(placed)
            first += len(part)
        return found


def with_placeholders(ids: Ints, placeholder_id: int) -> Int32:
    """Return tokens as the model gets them."""
    return np.where(ids < 0, placeholder_id, ids).astype(np.int32)
