"""Groups to packed micro-batches: no padding, at most a budget of tokens each.

    RolloutGroup, RolloutGroup, … ──► [prompt completion][prompt completion] … ──► MicroBatch

The unit of packing is one rollout, so a group larger than the budget is split and nothing else
changes. Which rollouts share a micro-batch is a function of their order and lengths alone
(invariant 5).

Shapes: T tokens of the packed row, K completion tokens in it, C completions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from easyrl.types import Bool, Float32, Int32, RolloutGroup


@dataclass(frozen=True, slots=True)
class Rollout:
    """One completion with its prompt: views into its group's arrays."""

    prompt_ids: Int32  # [P]
    completion_ids: Int32  # [R]
    rollout_logprobs: Float32  # [R]
    loss_mask: Bool  # [R]
    advantage: float

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward and backward works on."""

    input_ids: np.ndarray  # [T] int64
    position_ids: np.ndarray  # [T] int64, from 0 in every sequence
    sequence_lengths: list[int]  # [C], they sum to T
    logits_at: np.ndarray  # [K] int64: the places whose logits predict completion tokens
    targets: np.ndarray  # [K] int64: those completion tokens
    completion_of_token: np.ndarray  # [K] int64 in 0..C-1
    rollout_logprobs: Float32  # [K]
    loss_mask: Bool  # [K]
    advantages: Float32  # [K], each token its completion's

    @property
    def num_completions(self) -> int:
        return len(self.sequence_lengths)


def split_group(group: RolloutGroup) -> list[Rollout]:
    """The group's rollouts that carry a gradient. One of advantage 0 has none."""
    return [
        Rollout(
            group.prompt_ids,
            group.completion_ids[where],
            group.rollout_logprobs[where],
            group.loss_mask[where],
            float(advantage),
        )
        for where, advantage in zip(group.completion_slices(), group.advantages, strict=True)
        if advantage != 0.0
    ]


def pack(rollouts: Sequence[Rollout]) -> MicroBatch:
    """Lay rollouts one after another in a row."""
    lengths = [rollout.num_tokens for rollout in rollouts]
    completion_lengths = [len(rollout.completion_ids) for rollout in rollouts]
    starts = np.cumsum(lengths) - lengths
    ids = [part for r in rollouts for part in (r.prompt_ids, r.completion_ids)]
    # The token before a completion token predicts it.
    logits_at = [
        start + len(r.prompt_ids) - 1 + np.arange(len(r.completion_ids))
        for start, r in zip(starts, rollouts, strict=True)
    ]
    advantages = np.array([rollout.advantage for rollout in rollouts], dtype=np.float32)
    return MicroBatch(
        input_ids=np.concatenate(ids).astype(np.int64),
        position_ids=np.concatenate([np.arange(length) for length in lengths]),
        sequence_lengths=lengths,
        logits_at=np.concatenate(logits_at).astype(np.int64),
        targets=np.concatenate([r.completion_ids for r in rollouts]).astype(np.int64),
        completion_of_token=np.repeat(np.arange(len(rollouts)), completion_lengths),
        rollout_logprobs=np.concatenate([r.rollout_logprobs for r in rollouts]),
        loss_mask=np.concatenate([r.loss_mask for r in rollouts]),
        advantages=np.repeat(advantages, completion_lengths),
    )
