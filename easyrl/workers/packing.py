"""Pack groups into micro-batches: a prompt once, no padding, at most a budget of tokens each.

    RolloutGroup, … ──► [prompt | completion | completion …][prompt | completion …] ──► MicroBatch

The unit of packing is one rollout: a group larger than the budget is split, and its prompt is
repeated in each part. Where prompts are not shared (`model.attention`), the row consists of whole
sequences. Which rollouts share a micro-batch is a function of their order and lengths alone
(docs/design.md, Invariants).

Shapes: T tokens of the packed row, K completion tokens in it, C completions; P tokens of a prompt,
R of a completion.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from easyrl.types import Bool, Float32, Int32, MicroBatch, RolloutGroup

NO_IDS = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class Rollout:
    """One completion with its prompt: views into its group's arrays."""

    prompt_index: int
    prompt_ids: Int32  # [P]
    completion_ids: Int32  # [R]
    rollout_logprobs: Float32  # [R]
    loss_mask: Bool  # [R]
    advantage: float
    teacher_prompt_ids: Int32 = field(default_factory=lambda: NO_IDS)  # [P'], empty: the same

    def num_tokens_behind(self, previous: Self | None, *, shares_prompts: bool = True) -> int:
        """Tokens that this rollout adds to a row that ends with `previous`."""
        has_prompt = previous is not None and previous.prompt_index == self.prompt_index
        is_shared = has_prompt and shares_prompts
        num_prompt = max(len(self.prompt_ids), len(self.teacher_prompt_ids))  # both rows fit
        return len(self.completion_ids) + (0 if is_shared else num_prompt)


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
            group.teacher_prompt_ids,
        )
        for where, advantage in zip(group.completion_slices(), group.advantages, strict=True)
        if mask[where].any() and (advantage != 0.0 or keep_zero_advantages)
    ]


def pack(rollouts: Sequence[Rollout], *, shares_prompts: bool = True) -> MicroBatch:
    """Pack rollouts into a row, and into one for the teacher if it has its own prompts. Consecutive
    rollouts of one prompt share it (`shares_prompts`)."""
    groups: list[tuple[int, list[int]]] = []
    ids: list[Int32] = []
    positions: list[np.ndarray] = []
    logits_at: list[np.ndarray] = []
    start = prompt_end = 0
    previous = None
    for rollout in rollouts:
        num_prompt, num_completion = len(rollout.prompt_ids), len(rollout.completion_ids)
        if rollout.num_tokens_behind(previous, shares_prompts=shares_prompts) > num_completion:
            groups.append((num_prompt, []))
            ids.append(rollout.prompt_ids)
            positions.append(np.arange(num_prompt))
            start += num_prompt
            prompt_end = start
        groups[-1][1].append(num_completion)
        ids.append(rollout.completion_ids)
        positions.append(num_prompt + np.arange(num_completion))
        # The token before a completion token predicts it; before the first, the prompt's last.
        logits_at.append(np.concatenate([[prompt_end - 1], start + np.arange(num_completion - 1)]))
        start += num_completion
        previous = rollout
    completion_lengths = [len(rollout.completion_ids) for rollout in rollouts]
    for_teacher = None
    if len(rollouts[0].teacher_prompt_ids):
        own = [
            replace(each, prompt_ids=each.teacher_prompt_ids, teacher_prompt_ids=NO_IDS)
            for each in rollouts
        ]
        for_teacher = pack(own, shares_prompts=shares_prompts)
    advantages = np.array([rollout.advantage for rollout in rollouts], dtype=np.float32)
    return MicroBatch(
        input_ids=np.concatenate(ids).astype(np.int64),
        position_ids=np.concatenate(positions),
        groups=groups if shares_prompts else [(prompt + sum(rs), []) for prompt, rs in groups],
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
