"""Pack groups into micro-batches: a prompt once, no padding, at most a budget of tokens each.

    RolloutGroup, … ──► [prompt | completion | completion …][prompt | completion …] ──► MicroBatch

The unit of packing is one rollout: a group larger than the budget is split, and its prompt is
repeated in each part. An agent's episode is one rollout, whose tokens are a tree. Where prompts are
not shared (`model.attention`), the row consists of whole sequences, one for each leaf of an
episode; the first that contains a token trains it. Which rollouts share a micro-batch is a function
of their order and lengths alone (docs/design.md, Invariants).

Shapes: T tokens of the packed row, K completion tokens in it, C completions; P tokens of a prompt,
R of a completion.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import NamedTuple, Self

import numpy as np

from easyrl.layout.tree import NONE, Arrangement, Ints, TokenTree
from easyrl.types import (
    Bool,
    Completion,
    Float32,
    Int32,
    MicroBatch,
    Picture,
    RolloutGroup,
    RowPictures,
    no_tokens,
)


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
    pictures: tuple[Picture, ...] = ()  # of the prompt

    def num_tokens_behind(self, previous: Self | None, *, shares_prompts: bool = True) -> int:
        """Return how many tokens this rollout adds to a row that ends with `previous`."""
        # The policy's row and the teacher's row have the same budget.
        num_prompt = max(len(self.prompt_ids), len(self.teacher_prompt_ids))
        num_completion = len(self.completion_ids)
        if shares_prompts:
            has_its_prompt = previous is not None and previous.prompt_index == self.prompt_index
            return num_completion if has_its_prompt else num_prompt + num_completion
        if self.predecessors is not None:
            return self._num_repeated_tokens
        return num_prompt + num_completion

    @cached_property
    def _num_repeated_tokens(self) -> int:
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
    rollouts = list[Rollout]()
    pictures = group.pictures
    for where, advantage, predecessors in zip(
        group.completion_slices(),
        group.advantages,
        _predecessors_of_completions(group),
        strict=True,
    ):
        is_trained = mask[where].any() and (advantage != 0.0 or keep_zero_advantages)
        if not is_trained:
            continue
        rollout = Rollout(
            prompt_index=group.prompt_index,
            prompt_ids=group.prompt_ids,
            completion_ids=group.completion_ids[where],
            rollout_logprobs=group.rollout_logprobs[where],
            loss_mask=mask[where],
            advantage=float(advantage),
            predecessors=predecessors,
            teacher_prompt_ids=group.teacher_prompt_ids,
            pictures=pictures,
        )
        rollouts.append(rollout)
    return rollouts


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


def _lay_out(rollouts: Sequence[Rollout], *, shares_prompts: bool) -> _LaidOut:
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
    return _LaidOut(row, places[predictors])


def pack(rollouts: Sequence[Rollout], *, shares_prompts: bool = True) -> MicroBatch:
    """Pack rollouts into a row. Consecutive rollouts of one prompt share it (`shares_prompts`).

    If the teacher has its own prompts, the micro-batch has a second row for it (`for_teacher`).
    """
    trees = list[TokenTree]()
    ids = list[Int32]()
    logits_at = list[Ints]()
    pictures = list[RowPictures]()
    start = 0  # of the next tree in the row
    laid_out_together = _sharing_a_prompt(rollouts) if shares_prompts else _each_alone(rollouts)
    for sharing in laid_out_together:
        row, at = _lay_out(sharing, shares_prompts=shares_prompts)
        parts = [sharing[0].prompt_ids]
        parts += (rollout.completion_ids for rollout in sharing)
        tokens = np.concatenate(parts)
        trees.append(row.tree)
        ids.append(tokens[row.tokens])
        logits_at.append(start + at)
        end = start + len(row.tokens)
        if sharing[0].pictures:
            stop = start + len(sharing[0].prompt_ids)
            pictures.append(RowPictures(sharing[0].pictures, start, stop, end))
        start = end

    for_teacher = None
    if len(rollouts[0].teacher_prompt_ids):
        behind_teacher_prompts = [rollout.behind_teacher_prompt() for rollout in rollouts]
        for_teacher = pack(behind_teacher_prompts, shares_prompts=shares_prompts)

    completions = [rollout.completion_ids for rollout in rollouts]
    lengths = list(map(len, completions))
    advantages = np.array([rollout.advantage for rollout in rollouts], dtype=np.float32)
    return MicroBatch(
        input_ids=np.concatenate(ids).astype(np.int64),
        tree=TokenTree.joined(trees),
        logits_at=np.concatenate(logits_at).astype(np.int64),
        targets=np.concatenate(completions).astype(np.int64),
        completion_of_token=np.repeat(np.arange(len(rollouts)), lengths),
        rollout_logprobs=np.concatenate([rollout.rollout_logprobs for rollout in rollouts]),
        loss_mask=np.concatenate([rollout.loss_mask for rollout in rollouts]),
        advantages=np.repeat(advantages, lengths),
        for_teacher=for_teacher,
        pictures=tuple(pictures),
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
