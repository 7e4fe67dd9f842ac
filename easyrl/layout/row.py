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

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import NamedTuple, Self

import numpy as np

from easyrl.layout.tree import NONE, Arrangement, Ints, TokenTree
from easyrl.types import Bool, Completion, Float32, Int32, MicroBatch, RolloutGroup, no_tokens


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
    """Index in `prompt_ids` followed by `completion_ids` of the token that each completion token
    continues [R], or NONE; None: each continues the one before it."""
    teacher_prompt_ids: Int32 = field(default_factory=no_tokens)  # [P'], empty: the same

    def num_tokens_behind(self, previous: Self | None, *, shares_prompts: bool = True) -> int:
        """Return how many tokens this rollout adds to a row that ends with `previous`."""
        if not shares_prompts and self.predecessors is not None:
            return self._num_repeated_tokens
        if shares_prompts and previous is not None and previous.prompt_index == self.prompt_index:
            return len(self.completion_ids)
        num_prompt = max(len(self.prompt_ids), len(self.teacher_prompt_ids))  # both rows fit
        return len(self.completion_ids) + num_prompt

    @cached_property
    def _num_repeated_tokens(self) -> int:
        """Tokens of all its sequences, each with its whole path."""
        return len(_lay_out([self], shares_prompts=False).row.tokens)

    def behind_teacher_prompt(self) -> Self:
        """Return the rollout with the teacher's prompt in the place of its own."""
        assert self.predecessors is None, "the branches of an episode have no other prompt"
        return replace(self, prompt_ids=self.teacher_prompt_ids, teacher_prompt_ids=no_tokens())


def group_tree(num_prompt: int, completions: Sequence[Completion]) -> TokenTree:
    """Return the tree of a group, its tokens in the order of `[P | R1 | R2 | ...]`."""
    own = [each.tree.predecessors[num_prompt:] if each.tree else None for each in completions]
    lengths = [len(each.token_ids) for each in completions]
    before = _join_at_prompt(num_prompt, lengths, own)
    return TokenTree.of_predecessors(before, cuts=[num_prompt])


def _join_at_prompt(
    num_prompt: int, lengths: Sequence[int], predecessors: Sequence[Ints | None]
) -> Ints:
    """Return the predecessors of the tokens `[P | R1 | R2 | ...]`, given each completion's length
    and predecessors (as in `Rollout`)."""
    parts = [np.arange(-1, num_prompt - 1)]
    start = num_prompt
    for length, own in zip(lengths, predecessors, strict=True):
        if own is None:
            of_completion = np.arange(start - 1, start + length - 1)
            of_completion[:1] = num_prompt - 1
        else:
            of_completion = np.where(own < num_prompt, own, own + (start - num_prompt))
        parts.append(of_completion)
        start += length
    return np.concatenate(parts)


def split_group(
    group: RolloutGroup, *, mask_truncated: bool = False, keep_zero_advantages: bool = False
) -> list[Rollout]:
    """Split a group into its rollouts that carry a gradient: not all tokens are masked, and the
    advantage is not 0 or there is a KL term or an entropy bonus (`keep_zero_advantages`)."""
    mask = group.trained_mask(mask_truncated=mask_truncated)
    predecessors = _predecessors_of_completions(group)
    return [
        Rollout(
            group.prompt_index,
            group.prompt_ids,
            group.completion_ids[where],
            group.rollout_logprobs[where],
            mask[where],
            float(advantage),
            own,
            group.teacher_prompt_ids,
        )
        for where, advantage, own in zip(
            group.completion_slices(), group.advantages, predecessors, strict=True
        )
        if mask[where].any() and (advantage != 0.0 or keep_zero_advantages)
    ]


def _predecessors_of_completions(group: RolloutGroup) -> list[Ints | None]:
    """Return the predecessors of each completion, as in `Rollout`."""
    num_prompt = len(group.prompt_ids)
    slices = group.completion_slices()
    before = group.tree.predecessors[num_prompt:]
    assert not group.loss_mask[before == NONE].any(), "nothing predicts a context's first token"
    found = list[Ints | None]()
    for where in slices:
        of_group = before[where]
        first = num_prompt + where.start
        is_own = of_group >= first
        assert (is_own | (of_group < num_prompt)).all(), "it continues another completion"
        own = np.where(is_own, of_group - where.start, of_group)
        is_chain = np.array_equal(own, np.arange(num_prompt - 1, num_prompt - 1 + len(own)))
        found.append(None if is_chain else own)
    return found


class _LaidOut(NamedTuple):
    """Rollouts of one prompt in a row. Its tokens are numbered as in `[P | R1 | R2 | ...]`."""

    row: Arrangement
    logits_at: Ints  # [K] place in the row of the token that predicts each completion token


def _lay_out(rollouts: Sequence[Rollout], *, shares_prompts: bool) -> _LaidOut:
    num_prompt = len(rollouts[0].prompt_ids)
    lengths = [len(rollout.completion_ids) for rollout in rollouts]
    before = _join_at_prompt(num_prompt, lengths, [rollout.predecessors for rollout in rollouts])
    tree = TokenTree.of_predecessors(before, cuts=[num_prompt])
    if shares_prompts:
        row = tree.depth_first(cuts=[num_prompt])
    else:
        # A beginning of the prompt that only the prompt continues is no sequence of a rollout.
        row = tree.repeated(leaf for leaf in tree.leaves if tree.starts[leaf] >= num_prompt)
    # The logits of a token that continues nothing are not used: its loss is masked.
    predictors = before[num_prompt:].clip(min=0)
    return _LaidOut(row, row.first_places(len(before))[predictors])


def pack(rollouts: Sequence[Rollout], *, shares_prompts: bool = True) -> MicroBatch:
    """Pack rollouts into a row, and into one for the teacher if it has its own prompts. Consecutive
    rollouts of one prompt share it (`shares_prompts`)."""
    if shares_prompts:
        parts = [[*own] for _, own in groupby(rollouts, lambda rollout: rollout.prompt_index)]
    else:
        parts = [[rollout] for rollout in rollouts]
    trees = list[TokenTree]()
    ids = list[Int32]()
    logits_at = list[Ints]()
    start = 0
    for own in parts:
        row, at = _lay_out(own, shares_prompts=shares_prompts)
        tokens = np.concatenate([own[0].prompt_ids, *(each.completion_ids for each in own)])
        trees.append(row.tree)
        ids.append(tokens[row.tokens])
        logits_at.append(start + at)
        start += len(row.tokens)
    for_teacher = None
    if len(rollouts[0].teacher_prompt_ids):
        own = [rollout.behind_teacher_prompt() for rollout in rollouts]
        for_teacher = pack(own, shares_prompts=shares_prompts)
    completion_lengths = [len(rollout.completion_ids) for rollout in rollouts]
    advantages = np.array([rollout.advantage for rollout in rollouts], dtype=np.float32)
    return MicroBatch(
        input_ids=np.concatenate(ids).astype(np.int64),
        tree=TokenTree.joined(trees),
        logits_at=np.concatenate(logits_at).astype(np.int64),
        targets=np.concatenate([r.completion_ids for r in rollouts]).astype(np.int64),
        completion_of_token=np.repeat(np.arange(len(rollouts)), completion_lengths),
        rollout_logprobs=np.concatenate([r.rollout_logprobs for r in rollouts]),
        loss_mask=np.concatenate([r.loss_mask for r in rollouts]),
        advantages=np.repeat(advantages, completion_lengths),
        for_teacher=for_teacher,
    )


_ID = np.zeros(1, np.int32)
EMPTY = pack([Rollout(-1, _ID, _ID, np.zeros(1, np.float32), np.zeros(1, np.bool_), 0.0)])
"""Micro-batch of a rank without a rollout: one masked token, so loss and gradient are 0."""
