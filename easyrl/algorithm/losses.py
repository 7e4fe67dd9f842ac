"""The policy loss, a pure function of tensors.

A completion is never split between micro-batches. So an update's gradient is the gradient of the
sum of its micro-batches' losses, divided once by a denominator that is known after its last group.

Shapes: K completion tokens of a micro-batch, C completions in it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from easyrl.algorithm.corrections import correction_weights, kl_k3


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Completion tokens of a micro-batch. Values at masked tokens, finite or not, change neither
    the loss, nor its gradient, nor a metric."""

    logprobs: Tensor  # [K], of the policy, with gradient
    old_logprobs: Tensor  # [K], of the policy before the iteration's first update, no gradient
    rollout_logprobs: Tensor  # [K], what the engine reported
    ref_logprobs: Tensor | None  # [K], of the frozen reference; None where beta is 0
    entropy: Tensor  # [K] nats, with gradient where there is an entropy bonus
    advantages: Tensor  # [K], of the token's completion
    loss_mask: Tensor  # [K] bool, False where a token is not trained
    completion_of_token: Tensor  # [K] int64 in 0..C-1
    num_completions: int  # C


@dataclass(frozen=True, slots=True)
class LossSettings:
    """Section `algorithm` of the config with its defaults resolved (`learner.loss_settings`)."""

    loss_type: Literal["grpo", "dapo", "dr_grpo", "cispo"]
    importance_sampling_level: Literal["token", "sequence"]
    epsilon: float
    epsilon_high: float  # relative to 1; cispo: the largest ratio itself
    beta: float
    entropy_coef: float
    importance_sampling_correction: Literal["none", "truncate", "mask"]
    importance_sampling_cap: float
    max_completion_length: int  # tokens


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """Sums over a micro-batch; add them up over an update's micro-batches."""

    loss: Tensor  # scalar, with gradient: divide the update's sum by `loss_denominator`
    metrics: dict[str, Tensor]
    """Scalars without gradient: sums over the unmasked tokens. Divided by `tokens` they are means:

    tokens                      unmasked tokens
    entropy                     nats
    clipped_low, clipped_high   tokens whose ratio is clipped at 1 - epsilon, at 1 + epsilon_high,
                                so that they have no gradient; cispo: high only, where clipping
                                reduces the gradient
    kl                          k3 in nats, without the factor beta; only with beta > 0
    importance_sampling_ratio   weights of the correction as applied; only with a correction
    importance_sampling_capped  tokens whose weight exceeded the cap; only with a correction
    """


def policy_loss(inputs: LossInputs, settings: LossSettings) -> LossOutputs:
    """Return the loss summed over a micro-batch.

        r_t = exp(logprobs_t - old_logprobs_t)                                      token
            = exp(mean of logprobs - old_logprobs over t's completion)              sequence
        s_t = -min(r_t A, clip(r_t, 1 - epsilon, 1 + epsilon_high) A)               not cispo
            = -detach(min(r_t, epsilon_high)) A logprobs_t                          cispo
        l_t = w_t s_t + beta k3_t - entropy_coef entropy_t
        loss = sum over completions of (mean over the completion's tokens of l_t)   grpo
             = sum over tokens of l_t                                               the others

    `w_t` corrects for the engine's numerics (`correction_weights`); `k3_t` estimates the KL
    divergence from the reference (`kl_k3`). No sum and no mean includes masked tokens.

    Sources: the clipped surrogate and grpo's mean, GRPO (arXiv 2402.03300, equation 3); dapo
    (arXiv 2503.14476, section 3.3); dr_grpo (arXiv 2503.20783, section 3); cispo, MiniMax-M1
    (arXiv 2506.13585, section 3.1), without a lower clip as there; the sequence's ratio, GSPO
    (arXiv 2507.18071, equations 5 and 7).
    """
    inputs = _zero_masked(inputs)
    lengths = _completion_lengths(inputs)
    ratio = torch.exp(_log_ratio(inputs, lengths, settings))
    per_token, is_low, is_high = _surrogate(inputs, ratio, settings)
    metrics = {
        "tokens": inputs.loss_mask.sum(),
        "entropy": inputs.entropy.detach().sum(),
        "clipped_low": is_low.sum(),
        "clipped_high": is_high.sum(),
    }
    if settings.importance_sampling_correction != "none":
        weights, is_over = correction_weights(
            inputs.old_logprobs,
            inputs.rollout_logprobs,
            kind=settings.importance_sampling_correction,
            cap=settings.importance_sampling_cap,
        )
        per_token = per_token * weights
        metrics["importance_sampling_ratio"] = (weights * inputs.loss_mask).sum()
        metrics["importance_sampling_capped"] = (is_over & inputs.loss_mask).sum()
    if settings.beta > 0.0:
        assert inputs.ref_logprobs is not None
        kl = kl_k3(inputs.logprobs, inputs.ref_logprobs)
        per_token = per_token + settings.beta * kl
        metrics["kl"] = kl.detach().sum()
    if settings.entropy_coef != 0.0:
        per_token = per_token - settings.entropy_coef * inputs.entropy
    if settings.loss_type == "grpo":
        per_token = per_token / lengths
    return LossOutputs(per_token.sum(), metrics)


def loss_denominator(settings: LossSettings, *, num_completions: int, num_tokens: int) -> float:
    """Return the divisor of an update's gradient, which is summed over its micro-batches.

    `num_completions` counts all completions of the update's groups, `num_tokens` their unmasked
    tokens. Both include completions that are not computed because their advantage is 0. A
    completion that is masked as a whole (`algorithm.mask_truncated_completions`) counts as a
    completion without tokens, as in TRL.

        grpo           num_completions
        dapo, cispo    num_tokens (at least 1; if all are masked the gradient is 0)
        dr_grpo        num_completions * max_completion_length
    """
    if settings.loss_type == "grpo":
        return float(num_completions)
    if settings.loss_type == "dr_grpo":
        return float(num_completions * settings.max_completion_length)
    return float(max(1, num_tokens))


def _surrogate(
    inputs: LossInputs, ratio: Tensor, settings: LossSettings
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `s_t` [K] of `policy_loss`, and which tokens are clipped below and above [K] bool.

    Masked tokens have advantage 0: they add nothing and are not counted.
    """
    advantages = inputs.advantages
    if settings.loss_type == "cispo":
        is_above = ratio.detach() > settings.epsilon_high
        weight = ratio.detach().clamp(max=settings.epsilon_high)
        per_token = -weight * advantages * inputs.logprobs
        return per_token, torch.zeros_like(is_above), is_above & (advantages != 0)
    lower, upper = 1.0 - settings.epsilon, 1.0 + settings.epsilon_high
    per_token = -torch.minimum(ratio * advantages, ratio.clamp(lower, upper) * advantages)
    return per_token, (ratio < lower) & (advantages < 0), (ratio > upper) & (advantages > 0)


def _zero_masked(inputs: LossInputs) -> LossInputs:
    """Set values at masked tokens to 0 before any exp, so that they reach no gradient either.

    The policy may give a tool's token any log-probability, -inf included.
    """

    def zeroed(values: Tensor) -> Tensor:
        return torch.where(inputs.loss_mask, values, 0.0)

    ref_logprobs = inputs.ref_logprobs
    return replace(
        inputs,
        logprobs=zeroed(inputs.logprobs),
        old_logprobs=zeroed(inputs.old_logprobs),
        rollout_logprobs=zeroed(inputs.rollout_logprobs),
        ref_logprobs=None if ref_logprobs is None else zeroed(ref_logprobs),
        entropy=zeroed(inputs.entropy),
        advantages=zeroed(inputs.advantages),
    )


def _completion_lengths(inputs: LossInputs) -> Tensor:
    """Return the number of unmasked tokens in each token's completion [K], at least 1."""
    return _sum_over_completion(inputs.loss_mask.to(inputs.logprobs.dtype), inputs).clamp(min=1.0)


def _log_ratio(inputs: LossInputs, lengths: Tensor, settings: LossSettings) -> Tensor:
    """Return the log ratio [K] of each token, or the mean over its completion."""
    log_ratio = inputs.logprobs - inputs.old_logprobs
    if settings.importance_sampling_level == "token":
        return log_ratio
    return _sum_over_completion(log_ratio, inputs) / lengths


def _sum_over_completion(values: Tensor, inputs: LossInputs) -> Tensor:
    """Sum over each completion [K] -> [K]; every token gets its completion's sum."""
    sums = values.new_zeros(inputs.num_completions)
    sums = sums.index_add(0, inputs.completion_of_token, values)
    return sums[inputs.completion_of_token]
