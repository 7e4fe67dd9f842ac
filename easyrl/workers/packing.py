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

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import Any, Self

import numpy as np

from easyrl.types import Bool, Float32, Groups, Int32, MicroBatch, RolloutGroup, no_tokens

Branches = Sequence[tuple[int, int]]
"""The tokens of `[P | R]` that do not continue the one before, each with the index of the token
that it continues; -1: it begins a context of its own."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One completion with its prompt: views into its group's arrays."""

    prompt_index: int
    prompt_ids: Int32  # [P]
    completion_ids: Int32  # [R]
    rollout_logprobs: Float32  # [R]
    loss_mask: Bool  # [R]
    advantage: float
    branches: Branches = ()
    teacher_prompt_ids: Int32 = field(default_factory=no_tokens)  # [P'], empty: the same

    def num_tokens_behind(self, previous: Self | None, *, shares_prompts: bool = True) -> int:
        """Tokens that this rollout adds to a row that ends with `previous`."""
        if self.branches and not shares_prompts:
            return len(_lay_out([self], shares_prompts=False)[1])
        if shares_prompts and previous is not None and previous.prompt_index == self.prompt_index:
            return len(self.completion_ids)
        num_prompt = max(len(self.prompt_ids), len(self.teacher_prompt_ids))  # both rows fit
        return len(self.completion_ids) + num_prompt


def split_group(
    group: RolloutGroup, *, mask_truncated: bool = False, keep_zero_advantages: bool = False
) -> list[Rollout]:
    """Split a group into its rollouts that carry a gradient: not all tokens are masked, and the
    advantage is not 0 or there is a KL term or an entropy bonus (`keep_zero_advantages`)."""
    mask = group.trained_mask(mask_truncated=mask_truncated)
    return [
        Rollout(
            group.prompt_index,
            group.prompt_ids,
            group.completion_ids[where],
            group.rollout_logprobs[where],
            mask[where],
            float(advantage),
            branches,
            group.teacher_prompt_ids,
        )
        for where, advantage, branches in zip(
            group.completion_slices(), group.advantages, _branches(group), strict=True
        )
        if mask[where].any() and (advantage != 0.0 or keep_zero_advantages)
    ]


def _branches(group: RolloutGroup) -> list[Branches]:
    slices, num_prompt = group.completion_slices(), len(group.prompt_ids)
    if not len(group.segment_lengths):
        return [()] * len(slices)
    starts = np.cumsum(group.segment_lengths) - group.segment_lengths
    bounds = np.searchsorted(starts, [where.start for where in slices]).tolist()
    found = list[Branches]()
    for where, bound in zip(slices, pairwise([*bounds, len(starts)]), strict=True):
        tokens, after = starts[slice(*bound)] + num_prompt, group.segment_after[slice(*bound)]
        first = num_prompt + where.start
        assert [*tokens[:1]] == [first][: where.stop - where.start], "it starts within a segment"
        is_own = (after < num_prompt) | (after >= first)
        assert (is_own & (after >= -1) & (after < tokens)).all(), "it continues no earlier token"
        assert not group.loss_mask[tokens[after < 0] - num_prompt].any(), "nothing predicts it"
        after = np.where(after < num_prompt, after, after - where.start)
        pairs = zip((tokens - where.start).tolist(), after.tolist(), strict=True)
        found.append([(token, other) for token, other in pairs if other != token - 1])
    return found


def _lay_out(
    rollouts: Sequence[Rollout], *, shares_prompts: bool
) -> tuple[Groups, np.ndarray, np.ndarray, np.ndarray]:
    """Lay out the tokens `[P | R1 | R2 | ...]` of rollouts of one prompt as a row. Return its
    groups; of each token of the row the index in these tokens, and its position; and for each
    completion token the place in the row of the token that it continues."""
    num_prompt = num_tokens = len(rollouts[0].prompt_ids)
    after = {0: -1}  # what the first token of each segment continues
    for rollout in rollouts:
        shift = num_tokens - num_prompt
        after[num_tokens] = num_prompt - 1
        for token, other in rollout.branches:
            after[token + shift] = other if other < num_prompt else other + shift
        num_tokens += len(rollout.completion_ids)
    # Cut the tokens into pieces of which others continue only the last token.
    starts = sorted({*after, *(other + 1 for other in after.values())})
    ends_at = {stop: piece for piece, stop in enumerate([*starts[1:], num_tokens])}
    lengths = np.diff([*starts, num_tokens])
    parents = [ends_at.get(after.get(start, start - 1) + 1, -1) for start in starts]
    paths, firsts = list[list[int]](), list[int]()  # of each piece: path to it, first position
    for piece, parent in enumerate(parents):
        paths.append([*paths[parent], piece] if parent >= 0 else [piece])
        firsts.append(firsts[parent] + int(lengths[parent]) if parent >= 0 else 0)
    paths.sort()  # depth-first
    if shares_prompts:
        pieces = [path[-1] for path in paths]
        groups = _groups_of(pieces, parents, lengths, prompt_end=starts.index(num_prompt))
    else:
        leaves = (path for path in paths if path[-1] not in parents)
        whole = [path for path in leaves if starts[path[-1]] >= num_prompt]
        pieces = [piece for path in whole for piece in path]
        groups = [(int(lengths[path].sum()), []) for path in whole]
    row = np.concatenate([np.arange(starts[n], starts[n] + lengths[n]) for n in pieces])
    positions = np.concatenate([firsts[n] + np.arange(lengths[n]) for n in pieces])
    place = np.zeros(num_tokens, dtype=np.int64)
    place[row[::-1]] = np.arange(len(row))[::-1]  # where a token is repeated: its first
    before = np.arange(-1, num_tokens - 1)
    before[[*after]] = [*after.values()]
    return groups, row, positions, place[before[num_prompt:].clip(min=0)]


def _groups_of(
    pieces: Sequence[int], parents: Sequence[int], lengths: np.ndarray, prompt_end: int
) -> Groups:
    """Return the groups of pieces in depth-first order. One that alone continues another is joined
    to it, except `prompt_end`: a completion is not joined to its prompt."""
    num_children, groups = Counter(parents), list[tuple[list[int], list[int]]]()
    number = dict[int, int]()  # of each piece in its group
    for piece in pieces:
        parent, length = parents[piece], int(lengths[piece])
        if parent < 0:
            groups.append(([], []))
        elif num_children[parent] == 1 and piece != prompt_end:
            number[piece] = number[parent]
            groups[-1][0][-1] += length
            continue
        else:
            groups[-1][1].append(number[parent])
        number[piece] = len(groups[-1][0])
        groups[-1][0].append(length)
    plain = ((root, others) for (root, *others), _ in groups)
    return [
        (*each, above) if any(above) else each
        for each, (_, above) in zip(plain, groups, strict=True)
    ]


def pack(rollouts: Sequence[Rollout], *, shares_prompts: bool = True) -> MicroBatch:
    """Pack rollouts into a row, and into one for the teacher if it has its own prompts. Consecutive
    rollouts of one prompt share it (`shares_prompts`)."""
    alike = [[*own] for _, own in groupby(rollouts, lambda rollout: rollout.prompt_index)]
    ids, positions, logits_at = list[Int32](), list[np.ndarray](), list[np.ndarray]()
    groups, start = list[Any](), 0
    for own in alike if shares_prompts else [[rollout] for rollout in rollouts]:
        layout, row, position, at = _lay_out(own, shares_prompts=shares_prompts)
        groups += layout
        ids.append(np.concatenate([own[0].prompt_ids, *(r.completion_ids for r in own)])[row])
        positions.append(position)
        logits_at.append(start + at)
        start += len(row)
    completion_lengths = [len(rollout.completion_ids) for rollout in rollouts]
    for_teacher = None
    if len(rollouts[0].teacher_prompt_ids):
        own = [
            replace(each, prompt_ids=each.teacher_prompt_ids, teacher_prompt_ids=no_tokens())
            for each in rollouts
        ]
        for_teacher = pack(own, shares_prompts=shares_prompts)
    advantages = np.array([rollout.advantage for rollout in rollouts], dtype=np.float32)
    return MicroBatch(
        input_ids=np.concatenate(ids).astype(np.int64),
        position_ids=np.concatenate(positions),
        groups=groups,
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
