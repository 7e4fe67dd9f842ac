"""Pack groups into micro-batches: a prompt once, no padding, at most a budget of tokens each.

    RolloutGroup, … ──► [prompt | completion | completion …][prompt | completion …] ──► MicroBatch

The unit of packing is one rollout: a group larger than the budget is split, and its prompt is
repeated in each part. An agent's episode is one rollout, whose tokens are a tree. Prompts of a row
that begin alike share their beginning (`prefixes`), as do contexts that agents begin anew; those of
groups with pictures do not, because the same placeholders may stand for other pictures. Where
prompts are not shared (`model.attention`), the row consists of whole sequences, one for each leaf
of an episode; the first that contains a token trains it. Which rollouts share a micro-batch is a
function of their order, lengths and tokens alone (docs/design.md, Invariants).

Shapes: T tokens of the packed row, K completion tokens in it, C completions; P tokens of a prompt,
R of a completion.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import NamedTuple, Self

import numpy as np

from easyrl.layout.prefixes import Beginning, Prefixes, PrefixIds, merge_prefixes
from easyrl.layout.tree import NONE, Arrangement, Ints, TokenTree
from easyrl.types import (
    Bool,
    Completion,
    Float32,
    Int32,
    MicroBatch,
    PlacedPictures,
    RolloutGroup,
    RowPictures,
    no_tokens,
)

MIN_SHARED_TOKENS = 16
MIN_SHARED_PART = 0.06
"""A beginning in common is shared if it has so many tokens, and is this part of its group's tokens.
Attention to one more node takes the time of 4 to 6 % of the tokens below it (tiny model on one
core, 12 to 256 tokens in a completion): a few tokens in common by chance do not pay."""


def min_shared(num_tokens: int) -> int:
    """Return the fewest tokens that a group of so many tokens shares with others."""
    return max(MIN_SHARED_TOKENS, math.ceil(MIN_SHARED_PART * num_tokens))


@dataclass(frozen=True)
class Rollout:
    """One completion with its prompt: views into its group's arrays."""

    prompt_index: int
    prompt_ids: Int32  # [P]
    completion_ids: Int32  # [R]
    rollout_logprobs: Float32  # [R]
    loss_mask: Bool  # [R]
    advantage: float
    predecessors: Ints | None = None
    """The token that each completion token continues [R], as an index into `prompt_ids` followed by
    `completion_ids`, or NONE. None: each token continues the one before it.

    Example: behind a prompt of 3 tokens, [2, 3, 4, 3, 6] are two branches. Both begin with token 3,
    the first of the completion; tokens 4 and 5 continue it, and so do 6 and 7."""
    teacher_prompt_ids: Int32 = field(default_factory=no_tokens)
    """The prompt [P'] that the teacher reads. Empty: it reads the same one."""
    pictures: tuple[PlacedPictures, ...] = ()
    """Those of the prompt and of the completion, in `prompt_ids` followed by `completion_ids`."""
    is_of_pictures: bool = False  # its group shows some, perhaps in other completions alone
    num_group_tokens: int = 0
    """Tokens of its group: the prompt, and the completions that are trained."""

    @property
    def shares_beginnings(self) -> bool:
        """Whether its prompt and contexts may share their beginnings with those of others."""
        return not (self.pictures or self.is_of_pictures)

    @cached_property
    def prompt_prefix(self) -> PrefixIds:
        return PrefixIds.of(self.prompt_ids)

    @cached_property
    def teacher_prefix(self) -> PrefixIds:
        return PrefixIds.of(self.teacher_prompt_ids)

    @cached_property
    def contexts(self) -> list[Beginning]:
        """The contexts that an agent began anew, up to their first trained token. Their tokens are
        numbered as in `[P | R]`."""
        if self.predecessors is None:
            return []
        num_prompt = len(self.prompt_ids)
        num_completion = len(self.completion_ids)
        continues_last = self.predecessors == num_prompt - 1 + np.arange(num_completion)
        is_beginning = continues_last & ~self.loss_mask
        fewest = min_shared(num_completion)
        contexts = list[Beginning]()
        for first in np.flatnonzero(self.predecessors == NONE).tolist():
            others = np.flatnonzero(~is_beginning[first + 1 :])
            length = 1 + int(others[0]) if len(others) else num_completion - first
            start = num_prompt + first
            contexts.append(Beginning(start, start + length, fewest))
        return contexts

    @cached_property
    def context_prefixes(self) -> list[PrefixIds]:
        """The token ids of `contexts`."""
        num_prompt = len(self.prompt_ids)
        prefixes = list[PrefixIds]()
        for context in self.contexts:
            ids = self.completion_ids[context.start - num_prompt : context.stop - num_prompt]
            prefixes.append(PrefixIds.of(ids))
        return prefixes

    @cached_property
    def num_repeated_tokens(self) -> int:
        """Number of tokens of all its sequences, each with its whole path."""
        laid_out = _lay_out([self], shares_prompts=False)
        return len(laid_out.row.tokens)

    def behind_teacher_prompt(self) -> Self:
        """Return the rollout with the teacher's prompt in place of its own."""
        assert self.predecessors is None, "the branches of an episode have no other prompt"
        return replace(self, prompt_ids=self.teacher_prompt_ids, teacher_prompt_ids=no_tokens())


def group_tree(num_prompt: int, completions: Sequence[Completion]) -> TokenTree:
    """Return the tree of a group, its tokens in the order of `[P | R1 | R2 | ...]`."""
    parts = list[_Part]()
    for completion in completions:
        own = None
        if completion.tree is not None:
            own = completion.tree.predecessors[num_prompt:]
        parts.append(_Part(len(completion.token_ids), own))
    before = _join_at_prompt(num_prompt, parts)
    return TokenTree.of_predecessors(before, cuts=[num_prompt])


class _Part(NamedTuple):
    """What is needed of a completion to place it behind its prompt."""

    length: int
    predecessors: Ints | None  # as in `Rollout`


def _join_at_prompt(num_prompt: int, parts: Sequence[_Part]) -> Ints:
    """Return the predecessors of the tokens `[P | R1 | R2 | ...]`."""
    of_prompt = np.arange(-1, num_prompt - 1)
    predecessors = [of_prompt]
    start = num_prompt  # of the next completion
    for length, own in parts:
        if own is None:
            of_completion = np.arange(start - 1, start + length - 1)
            of_completion[:1] = num_prompt - 1
        else:
            shift = start - num_prompt
            of_completion = np.where(own < num_prompt, own, own + shift)
        predecessors.append(of_completion)
        start += length
    return np.concatenate(predecessors)


def split_group(
    group: RolloutGroup, *, mask_truncated: bool = False, keep_zero_advantages: bool = False
) -> list[Rollout]:
    """Split a group into its rollouts, without those that have no gradient.

    A rollout has none if all its tokens are masked. It has none with an advantage of 0 either,
    unless there is a KL term or an entropy bonus (`keep_zero_advantages`).
    """
    mask = group.trained_mask(mask_truncated=mask_truncated)
    slices = group.completion_slices()
    pictures = _pictures_of_completions(group)
    num_group_tokens = len(group.prompt_ids)
    is_trained = list[bool]()
    for where, advantage in zip(slices, group.advantages, strict=True):
        has_gradient = advantage != 0.0 or keep_zero_advantages
        is_trained.append(bool(mask[where].any()) and has_gradient)
        if is_trained[-1]:
            num_group_tokens += where.stop - where.start
    rollouts = list[Rollout]()
    for number, predecessors in enumerate(_predecessors_of_completions(group)):
        if not is_trained[number]:
            continue
        where = slices[number]
        rollout = Rollout(
            prompt_index=group.prompt_index,
            prompt_ids=group.prompt_ids,
            completion_ids=group.completion_ids[where],
            rollout_logprobs=group.rollout_logprobs[where],
            loss_mask=mask[where],
            advantage=float(group.advantages[number]),
            predecessors=predecessors,
            teacher_prompt_ids=group.teacher_prompt_ids,
            pictures=pictures[number],
            is_of_pictures=bool(len(group.shown_files)),
            num_group_tokens=num_group_tokens,
        )
        rollouts.append(rollout)
    return rollouts


def _pictures_of_completions(group: RolloutGroup) -> list[tuple[PlacedPictures, ...]]:
    """Return the pictures of the prompt and of each completion, as in `Rollout`."""
    num_prompt = len(group.prompt_ids)
    shown = group.pictures
    found = list[tuple[PlacedPictures, ...]]()
    for where in group.completion_slices():
        first = num_prompt + where.start
        stop = num_prompt + where.stop
        own = list[PlacedPictures]()
        for each in shown:
            if each.stop <= num_prompt:
                own.append(each)
            elif first <= each.start and each.stop <= stop:
                own.append(_shifted(each, -where.start))
        found.append(tuple(own))
    return found


def _shifted(placed: PlacedPictures, shift: int) -> PlacedPictures:
    return replace(placed, start=placed.start + shift, stop=placed.stop + shift)


def _predecessors_of_completions(group: RolloutGroup) -> list[Ints | None]:
    """Return the predecessors of each completion, as in `Rollout`."""
    num_prompt = len(group.prompt_ids)
    before = group.tree.predecessors[num_prompt:]
    assert not group.loss_mask[before == NONE].any(), "nothing predicts a context's first token"
    found = list[Ints | None]()
    for where in group.completion_slices():
        of_group = before[where]
        first_token = num_prompt + where.start
        is_in_completion = of_group >= first_token
        is_in_prompt = of_group < num_prompt
        assert (is_in_completion | is_in_prompt).all(), "it continues another completion"
        own = np.where(is_in_completion, of_group - where.start, of_group)
        chain = np.arange(num_prompt - 1, num_prompt - 1 + len(own))
        found.append(None if np.array_equal(own, chain) else own)
    return found


class _LaidOut(NamedTuple):
    """Rollouts of one prompt in a row. Their tokens are numbered as in `[P | R1 | R2 | ...]`."""

    row: Arrangement
    logits_at: Ints  # [K] place in the row of the token that predicts each completion token
    beginnings: list[Beginning]  # in the row: of the prompt and of contexts that agents begin anew
    pictures: list[RowPictures]  # in the row, in its order


def _lay_out(rollouts: Sequence[Rollout], *, shares_prompts: bool) -> _LaidOut:
    """Lay out rollouts of one prompt. Their tokens are numbered as in `[P | R1 | R2 | ...]`, those
    of contexts from the completion's first one on; `places` are those in the row."""
    num_prompt = len(rollouts[0].prompt_ids)
    parts = list[_Part]()
    for rollout in rollouts:
        parts.append(_Part(len(rollout.completion_ids), rollout.predecessors))
    before = _join_at_prompt(num_prompt, parts)
    tree = TokenTree.of_predecessors(before, cuts=[num_prompt])
    if shares_prompts:
        row = tree.depth_first(cuts=[num_prompt])
    else:
        # A branch may leave the prompt before its end. What is left of the prompt is then a leaf,
        # but no rollout's sequence.
        row = tree.repeated(leaf for leaf in tree.leaves if tree.starts[leaf] >= num_prompt)
    # A context's first token has no predictor. The logits taken for it, those of token 0, are not
    # used, since its loss is masked.
    predictors = before[num_prompt:].clip(min=0)
    places = row.first_places(len(before))
    if not rollouts[0].shares_beginnings:
        pictures = _pictures_in_row(rollouts, row)
        return _LaidOut(row, places[predictors], beginnings=[], pictures=pictures)
    beginnings = [Beginning(0, num_prompt, min_shared(rollouts[0].num_group_tokens))]
    shift = 0  # of the next completion
    for rollout in rollouts:
        for context in rollout.contexts:
            start = int(places[shift + context.start])
            stop = start + context.stop - context.start
            beginnings.append(Beginning(start, stop, context.min_shared))
        shift += len(rollout.completion_ids)
    return _LaidOut(row, places[predictors], beginnings, pictures=[])


def _pictures_in_row(rollouts: Sequence[Rollout], row: Arrangement) -> list[RowPictures]:
    """Return where the pictures of rollouts of one prompt stand in their row, whose tokens are
    numbered as in `[P | R1 | R2 | ...]`."""
    num_prompt = len(rollouts[0].prompt_ids)
    shown = dict[int, PlacedPictures]()  # by their first token; those of the prompt come often
    shift = 0  # of the next completion
    for rollout in rollouts:
        for each in rollout.pictures:
            placed = each if each.stop <= num_prompt else _shifted(each, shift)
            shown[placed.start] = placed
        shift += len(rollout.completion_ids)
    found = list[RowPictures]()
    for first, placed in shown.items():
        length = placed.stop - placed.start
        for start in np.flatnonzero(row.tokens == first).tolist():
            node = int(np.searchsorted(row.tree.stops, start, side="right"))
            stop = start + length
            assert stop <= row.tree.stops[node], "no branch begins inside a picture"
            found.append(RowPictures(placed.pictures, start, stop, int(row.tree.ends[node])))
    return sorted(found, key=lambda pictures: pictures.start)


class OpenRow:
    """A row that rollouts are added to one by one, and the number of its tokens."""

    def __init__(self, *, shares_prompts: bool = True) -> None:
        self.rollouts = list[Rollout]()
        self.num_tokens = 0
        self._shares_prompts = shares_prompts
        self._prefixes = Prefixes()  # of prompts and contexts
        self._teacher_prefixes = Prefixes()  # of the teacher's prompts, in the teacher's row

    def num_more(self, rollout: Rollout) -> int:
        """Return how many tokens the rollout would add."""
        if not self._shares_prompts:
            return self._num_alone(rollout)
        num_more = len(rollout.completion_ids)
        if not rollout.shares_beginnings:
            num_prompt = max(len(rollout.prompt_ids), len(rollout.teacher_prompt_ids))
            return num_more if self._has_prompt_of(rollout) else num_prompt + num_more
        is_first = not self._has_prompt_of(rollout)
        if is_first:
            num_more += self._num_of_prompt(rollout)
        if not rollout.contexts:
            return num_more
        of_rollout = Prefixes()  # contexts of one rollout share their beginnings, too
        if is_first:
            of_rollout.add(rollout.prompt_prefix)
        fewest = min_shared(len(rollout.completion_ids))
        for ids in rollout.context_prefixes:
            others = _num_shared(self._prefixes, ids, fewest)
            own = _num_shared(of_rollout, ids, fewest)
            num_more -= max(others, own)
            of_rollout.add(ids)
        return num_more

    def add(self, rollout: Rollout, max_tokens: int | None = None) -> bool:
        """Add a rollout, unless the row would then have more than `max_tokens`; return whether it
        is added."""
        num_tokens = self.num_tokens + self.num_more(rollout)
        if max_tokens is not None and num_tokens > max_tokens:
            return False
        self.num_tokens = num_tokens
        if self._shares_prompts and rollout.shares_beginnings:
            if not self._has_prompt_of(rollout):
                self._prefixes.add(rollout.prompt_prefix)
                self._teacher_prefixes.add(rollout.teacher_prefix)
            for ids in rollout.context_prefixes:
                self._prefixes.add(ids)
        self.rollouts.append(rollout)
        return True

    def _has_prompt_of(self, rollout: Rollout) -> bool:
        return bool(self.rollouts) and self.rollouts[-1].prompt_index == rollout.prompt_index

    def _num_of_prompt(self, rollout: Rollout) -> int:
        """Return how many tokens a prompt adds. The policy's row and the teacher's row have the
        same budget."""
        fewest = min_shared(rollout.num_group_tokens)
        shared = _num_shared(self._prefixes, rollout.prompt_prefix, fewest)
        shared_by_teacher = _num_shared(self._teacher_prefixes, rollout.teacher_prefix, fewest)
        of_policy = len(rollout.prompt_ids) - shared
        of_teacher = len(rollout.teacher_prompt_ids) - shared_by_teacher
        return max(of_policy, of_teacher)

    @staticmethod
    def _num_alone(rollout: Rollout) -> int:
        """Return how many tokens whole sequences have."""
        if rollout.predecessors is not None:
            return rollout.num_repeated_tokens
        num_prompt = max(len(rollout.prompt_ids), len(rollout.teacher_prompt_ids))
        return num_prompt + len(rollout.completion_ids)


def _moved(pictures: RowPictures, places: Ints) -> RowPictures:
    """Return pictures whose tokens have other places in the row. A group that shows pictures shares
    nothing with others, and stays together."""
    shift = int(places[pictures.start]) - pictures.start
    return replace(
        pictures,
        start=pictures.start + shift,
        stop=pictures.stop + shift,
        end=pictures.end + shift,
    )


def _num_shared(prefixes: Prefixes, ids: PrefixIds, fewest: int) -> int:
    """Return how many tokens are shared with others."""
    length = prefixes.longest_shared(ids).length
    return length if length >= fewest else 0


def pack(rollouts: Sequence[Rollout], *, shares_prompts: bool = True) -> MicroBatch:
    """Pack rollouts into a row. Consecutive rollouts of one prompt share it (`shares_prompts`), and
    prompts that begin alike share their beginning.

    If the teacher has its own prompts, the micro-batch has a second row for it (`for_teacher`).
    """
    trees = list[TokenTree]()
    ids = list[Int32]()
    logits_at = list[Ints]()
    pictures = list[RowPictures]()
    beginnings = list[Beginning]()
    start = 0  # of the next tree in the row
    laid_out_together = _sharing_a_prompt(rollouts) if shares_prompts else _each_alone(rollouts)
    for sharing in laid_out_together:
        row, at, own_beginnings, own_pictures = _lay_out(sharing, shares_prompts=shares_prompts)
        parts = [sharing[0].prompt_ids]
        parts += (rollout.completion_ids for rollout in sharing)
        tokens = np.concatenate(parts)
        trees.append(row.tree)
        ids.append(tokens[row.tokens])
        logits_at.append(start + at)
        if shares_prompts:
            for first, stop, fewest in own_beginnings:
                beginnings.append(Beginning(start + first, start + stop, fewest))
        for each in own_pictures:
            moved = replace(
                each, start=start + each.start, stop=start + each.stop, end=start + each.end
            )
            pictures.append(moved)
        start += len(row.tokens)
    every_id = np.concatenate(ids)
    merged = merge_prefixes(trees, every_id, beginnings)

    for_teacher = None
    if len(rollouts[0].teacher_prompt_ids):
        behind_teacher_prompts = [rollout.behind_teacher_prompt() for rollout in rollouts]
        for_teacher = pack(behind_teacher_prompts, shares_prompts=shares_prompts)

    completions = [rollout.completion_ids for rollout in rollouts]
    lengths = list(map(len, completions))
    advantages = np.array([rollout.advantage for rollout in rollouts], dtype=np.float32)
    return MicroBatch(
        input_ids=every_id[merged.row.tokens].astype(np.int64),
        tree=merged.row.tree,
        logits_at=merged.places[np.concatenate(logits_at)].astype(np.int64),
        targets=np.concatenate(completions).astype(np.int64),
        completion_of_token=np.repeat(np.arange(len(rollouts)), lengths),
        rollout_logprobs=np.concatenate([rollout.rollout_logprobs for rollout in rollouts]),
        loss_mask=np.concatenate([rollout.loss_mask for rollout in rollouts]),
        advantages=np.repeat(advantages, lengths),
        for_teacher=for_teacher,
        pictures=tuple(_moved(each, merged.places) for each in pictures),
    )


def _sharing_a_prompt(rollouts: Sequence[Rollout]) -> Iterator[list[Rollout]]:
    """Yield the runs of rollouts with the same prompt."""
    for _, sharing in groupby(rollouts, lambda rollout: rollout.prompt_index):
        yield list(sharing)


def _each_alone(rollouts: Sequence[Rollout]) -> Iterator[list[Rollout]]:
    for rollout in rollouts:
        yield [rollout]


_ID = np.zeros(1, np.int32)
EMPTY = pack([Rollout(-1, _ID, _ID, np.zeros(1, np.float32), np.zeros(1, np.bool_), 0.0)])
"""Micro-batch of a rank without a rollout: one masked token, so that loss and gradient are 0."""
