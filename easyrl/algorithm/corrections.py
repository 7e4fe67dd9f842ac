"""The importance-sampling correction and the KL estimate of a token's loss.

Shapes: K completion tokens of a micro-batch.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def correction_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    *,
    kind: Literal["truncate", "mask"],
    cap: float,
) -> tuple[Tensor, Tensor]:
    """Return weights [K] that correct for the engine's numerics, and which of them exceed the cap
    [K] bool. No gradient.

        w_t = exp(old_logprobs_t - rollout_logprobs_t)
        truncate: min(w_t, cap)       mask: w_t, and 0 where w_t > cap

    Truncated importance sampling (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training"). The masked variant is TRL's: only large weights are masked, because
    small ones reduce the loss by themselves.
    """
    with torch.no_grad():
        weights = torch.exp(old_logprobs - rollout_logprobs)
        is_over = weights > cap
        return torch.where(is_over, cap if kind == "truncate" else 0.0, weights), is_over


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Estimate KL(policy || reference) [K] in nats, never negative, with gradient.

        k3_t = exp(ref_logprobs_t - logprobs_t) - (ref_logprobs_t - logprobs_t) - 1

    GRPO (arXiv 2402.03300, equation 4); Schulman 2020, "Approximating KL Divergence".
    """
    difference = ref_logprobs - logprobs
    return torch.expm1(difference) - difference  # near 0, exp - 1 would lose precision
