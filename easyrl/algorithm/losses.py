"""The policy loss as a pure function of tensors: it knows no trainer.

Shapes: K completion tokens of a micro-batch, C completions in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossInputs:
    logprobs: Tensor  # [K], with gradient
    old_logprobs: Tensor  # [K], of the policy before the iteration's first update
    advantages: Tensor  # [K], each token its completion's
    loss_mask: Tensor  # [K] bool, False where a token was not sampled by the policy
    completion_of_token: Tensor  # [K] int64 in 0..C-1
    num_completions: int  # C


@dataclass(frozen=True, slots=True)
class LossOutputs:
    loss: Tensor  # scalar: the sum over completions; divide by the update's completions
    num_clipped_low: Tensor  # scalar: tokens whose ratio is clipped at 1 - epsilon
    num_clipped_high: Tensor  # scalar: at 1 + epsilon_high
    num_tokens: Tensor  # scalar: tokens that the mask keeps


def grpo_loss(inputs: LossInputs, *, epsilon: float, epsilon_high: float) -> LossOutputs:
    """GRPO's clipped surrogate (arXiv 2402.03300, equation 3, without its KL term).

        r_t = exp(logprobs_t - old_logprobs_t)
        l_t = -min(r_t * A, clip(r_t, 1 - epsilon, 1 + epsilon_high) * A)
        loss = sum over completions of (mean over the completion's tokens of l_t)

    The mean over an update's completions is the caller's division, by a count that is known
    before the first group arrives: so streaming changes nothing. A completion whose tokens are
    all masked counts in that denominator and adds nothing.
    """
    # What stands at a masked token does not matter, even if it is not finite.
    ratio = torch.exp(torch.where(inputs.loss_mask, inputs.logprobs - inputs.old_logprobs, 0.0))
    clipped = torch.clamp(ratio, 1.0 - epsilon, 1.0 + epsilon_high)
    per_token = -torch.minimum(ratio * inputs.advantages, clipped * inputs.advantages)
    mask = inputs.loss_mask.to(per_token.dtype)
    lengths = mask.new_zeros(inputs.num_completions)
    lengths.index_add_(0, inputs.completion_of_token, mask)
    weights = mask / lengths.clamp(min=1.0)[inputs.completion_of_token]
    with torch.no_grad():
        low = (ratio < 1.0 - epsilon) & (inputs.advantages < 0) & inputs.loss_mask
        high = (ratio > 1.0 + epsilon_high) & (inputs.advantages > 0) & inputs.loss_mask
    return LossOutputs(
        loss=(per_token * weights).sum(),
        num_clipped_low=low.sum(),
        num_clipped_high=high.sum(),
        num_tokens=inputs.loss_mask.sum(),
    )
