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
from typing import NamedTuple

from easyrl.engines import COPIED_TOKENS, MIN_PREFIX_TOKENS, MIN_TOKENS_OF_LEVEL
from easyrl.engines.cache.cache import MAX_LEVELS
from easyrl.layout.prefixes import PrefixIds, num_common
from easyrl.types import Int32


class _Range(NamedTuple):
    """Prompts side by side in the sorted list, which have a beginning in common."""

    first: int
    stop: int
    cut: int  # tokens before the last cut of all of them


class PromptPrefixes:
    """The prompts of a round, and the beginnings that several of them have in common."""

    def __init__(self) -> None:
        self._prompts = list[PrefixIds]()  # sorted by their keys
        self._cuts = list[list[int]]()  # of each prompt; out of date where there are fewer

    def add(self, prompts: Sequence[Int32]) -> None:
        """Add prompts [P] each. The last token of a prompt is never a part of a beginning: its
        logits are needed."""
        self._prompts += [PrefixIds.of(ids[:-1]) for ids in prompts]
        self._prompts.sort(key=lambda prompt: prompt.key)
        self._cuts = []

    def cuts_of(self, ids: Int32) -> list[int]:
        """Return the lengths of the beginnings behind which a prompt that was added is cut, the
        shortest first: of those in common with others, the ones that pay."""
        if len(self._cuts) < len(self._prompts):
            self._cuts = _common_beginnings(self._prompts)
        key = PrefixIds.of(ids[:-1]).key
        place = bisect_left(self._prompts, key, key=lambda prompt: prompt.key)
        chosen = list[int]()
        last_cut = 0
        for cut in self._cuts[place]:
            # Rows start with a copy of a short rest, or of a short prompt: they attend to no more
            # nodes than without the cut.
            is_copied = len(ids) - cut <= COPIED_TOKENS
            fewest = MIN_PREFIX_TOKENS if is_copied else MIN_TOKENS_OF_LEVEL
            if cut - last_cut >= fewest and len(chosen) < MAX_LEVELS - 1:
                chosen.append(cut)
                last_cut = cut
        return chosen


def _common_beginnings(prompts: Sequence[PrefixIds]) -> list[list[int]]:
    """Return, for each of the sorted prompts, the lengths of the beginnings that it has in common
    with others. Each is at least MIN_PREFIX_TOKENS longer than the one before: what some have in
    common by chance is none."""
    with_last = [0]  # tokens that each prompt has in common with the one before it
    for number in range(1, len(prompts)):
        with_last.append(num_common(prompts[number].ids, prompts[number - 1].ids))
    cuts: list[list[int]] = [[] for _ in prompts]
    open_ranges = [_Range(0, len(prompts), cut=0)]
    while open_ranges:
        first, stop, cut = open_ranges.pop()
        if stop - first < 2:
            continue
        of_all = min(with_last[first + 1 : stop])
        if of_all - cut >= MIN_PREFIX_TOKENS:
            cut = of_all
            for number in range(first, stop):
                cuts[number].append(cut)
        begins = first
        for number in range(first + 1, stop):
            if with_last[number] == of_all:
                open_ranges.append(_Range(begins, number, cut))
                begins = number
        open_ranges.append(_Range(begins, stop, cut))
    return cuts
