"""Where the prompts of a round begin alike, so that an engine computes their beginnings once.

    S S S S A A ─ question 1        S: of all prompts, e.g. a system prompt and the schema of tools
    S S S S A A ─ question 2        A: of some, e.g. examples of one task
    S S S S ───── question 3

Prompts are cut behind such a beginning, all that have it, the first one too. So it does not matter
for the arithmetic of a prompt for which other one its beginning was computed. Where prompts are cut
is a function of the prompts that were added and of their order alone.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from easyrl.engines import COPIED_TOKENS, MIN_PREFIX_TOKENS, MIN_TOKENS_OF_LEVEL
from easyrl.engines.cache.cache import MAX_LEVELS
from easyrl.layout.prefixes import PrefixIds, num_common
from easyrl.types import Int32


class PromptPrefixes:
    """The prompts of a round, and the beginnings that several of them have in common."""

    def __init__(self) -> None:
        self._prompts = list[PrefixIds]()  # sorted by their keys
        self._with_last = list[int]()
        """Tokens that each prompt has in common with the one before it; the first has none."""

    def add(self, prompts: Sequence[Int32]) -> None:
        """Add prompts [P] each. The last token of a prompt is never a part of a beginning: its
        logits are needed."""
        for ids in prompts:
            added = PrefixIds.of(ids[:-1])
            place = self._place_of(added)
            with_last = 0
            if place > 0:
                with_last = num_common(added.ids, self._prompts[place - 1].ids)
            if place < len(self._prompts):
                self._with_last[place] = num_common(added.ids, self._prompts[place].ids)
            self._prompts.insert(place, added)
            self._with_last.insert(place, with_last)

    def _place_of(self, prompt: PrefixIds) -> int:
        return bisect_left(self._prompts, prompt.key, key=lambda each: each.key)

    def cuts_of(self, ids: Int32) -> list[int]:
        """Return the lengths of the beginnings behind which a prompt that was added is cut, the
        shortest first: of those in common with others, the ones that pay."""
        chosen = list[int]()
        last_cut = 0
        for cut in self._common_beginnings(ids):
            # Rows start with a copy of a short rest, or of a short prompt: they attend to no more
            # nodes than without the cut.
            is_copied = len(ids) - cut <= COPIED_TOKENS
            fewest = MIN_PREFIX_TOKENS if is_copied else MIN_TOKENS_OF_LEVEL
            if cut - last_cut >= fewest and len(chosen) < MAX_LEVELS - 1:
                chosen.append(cut)
                last_cut = cut
        return chosen

    def _common_beginnings(self, ids: Int32) -> list[int]:
        """Return the lengths of the beginnings that a prompt has in common with others, the
        shortest first. Each is at least MIN_PREFIX_TOKENS longer than the one before: what some
        have in common by chance is none."""
        place = self._place_of(PrefixIds.of(ids[:-1]))
        # With the prompts before it in the sorted list, and with those behind it, it has the fewer
        # tokens in common the farther away they are.
        before = reversed(self._with_last[1 : place + 1])
        behind = self._with_last[place + 1 :]
        lengths = {*accumulate(before, min), *accumulate(behind, min)}
        common = list[int]()
        last_length = 0
        for length in sorted(lengths):
            if length - last_length >= MIN_PREFIX_TOKENS:
                common.append(length)
                last_length = length
        return common
