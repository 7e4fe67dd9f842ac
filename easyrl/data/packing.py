"""Groups to packed micro-batches: a prompt once, no padding, at most a budget of tokens each.

    RolloutGroup, … ──► [prompt | completion | completion …][prompt | completion …] ──► MicroBatch

The unit of packing is one rollout, so a group larger than the budget is split, its prompt repeated
in each part, and nothing else changes. Which rollouts share a micro-batch is a function of their
order and lengths alone (invariant 5).

Shapes: T tokens of the packed row, K completion tokens in it, C completions; P tokens of a prompt,
R of a completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from easyrl.types import Bool, Float32, Int32, RolloutGroup


@dataclass(frozen=True, slots=True)
class Rollout:
    """One completion with its prompt: views into its group's arrays."""

    prompt_index: int
    prompt_ids: Int32  # [P]
    completion_ids: Int32  # [R]
    rollout_logprobs: Float32  # [R]
    loss_mask: Bool  # [R]
    advantage: float

    def num_tokens_behind(self, previous: Rollout | None) -> int:
        """Tokens it adds to a row that ends with `previous`: the prompt only where it is new."""
        is_shared = previous is not None and previous.prompt_index == self.prompt_index
        return len(self.completion_ids) + (0 if is_shared else len(self.prompt_ids))


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward and backward works on."""

    input_ids: np.ndarray  # [T] int64
    position_ids: np.ndarray  # [T] int64: a completion's go on from its prompt's
    groups: list[tuple[int, list[int]]]  # of each its P, and the R of its completions
    logits_at: np.ndarray  # [K] int64: the places whose logits predict completion tokens
    targets: np.ndarray  # [K] int64: those completion tokens
    completion_of_token: np.ndarray  # [K] int64 in 0..C-1
    rollout_logprobs: Float32  # [K]
    loss_mask: Bool  # [K]
    advantages: Float32  # [K], each token its completion's

    @property
    def num_completions(self) -> int:
        return sum(len(completion_lengths) for _, completion_lengths in self.groups)


def split_group(
    group: RolloutGroup, *, mask_truncated: bool = False, keep_zero_advantages: bool = False
) -> list[Rollout]:
    """The group's rollouts that carry a gradient.

    One whose tokens are all masked has none, and with `mask_truncated` all of a truncated one's
    are. One of advantage 0 has none but that of a KL term or an entropy bonus
    (`keep_zero_advantages`).
    """
    mask = group.trained_mask(mask_truncated=mask_truncated)
    return [
        Rollout(
            group.prompt_index,
            group.prompt_ids,
            group.completion_ids[where],
            group.rollout_logprobs[where],
            mask[where],
            float(advantage),
        )
        for where, advantage in zip(group.completion_slices(), group.advantages, strict=True)
        if mask[where].any() and (advantage != 0.0 or keep_zero_advantages)
    ]


def pack(rollouts: Sequence[Rollout]) -> MicroBatch:
    """Lay rollouts one after another in a row; those of one prompt that follow each other share
    it."""
    groups: list[tuple[int, list[int]]] = []
    ids: list[Int32] = []
    positions: list[np.ndarray] = []
    logits_at: list[np.ndarray] = []
    place = prompt_end = 0
    previous = None
    for rollout in rollouts:
        num_prompt, num_completion = len(rollout.prompt_ids), len(rollout.completion_ids)
        if rollout.num_tokens_behind(previous) > num_completion:
            groups.append((num_prompt, []))
            ids.append(rollout.prompt_ids)
            positions.append(np.arange(num_prompt))
            place += num_prompt
            prompt_end = place
        groups[-1][1].append(num_completion)
        ids.append(rollout.completion_ids)
        positions.append(num_prompt + np.arange(num_completion))
        # The token before a completion token predicts it; before the first, the prompt's last.
        logits_at.append(np.concatenate([[prompt_end - 1], place + np.arange(num_completion - 1)]))
        place += num_completion
        previous = rollout
    completion_lengths = [len(rollout.completion_ids) for rollout in rollouts]
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
    )
