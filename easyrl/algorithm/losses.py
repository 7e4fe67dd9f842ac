"""The policy loss as a pure function of tensors: it knows no trainer, no device, no config file.

A completion is never split between micro-batches. So the gradient of an update is that of the sum
of its micro-batches' losses, divided once by a denominator that is known when its last group is in.

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
    """What a micro-batch knows of its completion tokens. What stands at a masked token of any of
    them, finite or not, changes neither the loss, nor its gradient, nor a metric."""

    logprobs: Tensor  # [K], of the policy, with gradient
    old_logprobs: Tensor  # [K], of the policy before the iteration's first update, no gradient
    rollout_logprobs: Tensor  # [K], what the engine reported
    ref_logprobs: Tensor | None  # [K], of the frozen reference; None where beta is 0
    entropy: Tensor  # [K] nats, with gradient where there is an entropy bonus
    advantages: Tensor  # [K], each token its completion's
    loss_mask: Tensor  # [K] bool, False where a token is not trained
    completion_of_token: Tensor  # [K] int64 in 0..C-1
    num_completions: int  # C


@dataclass(frozen=True, slots=True)
class LossSettings:
    """Section `algorithm` of the config, its defaults resolved."""

    loss_type: Literal["grpo", "dapo", "dr_grpo", "cispo"]
    importance_sampling_level: Literal["token", "sequence"]
    epsilon: float
    epsilon_high: float  # above 1; of cispo the largest ratio itself
    delta: float | None  # the largest ratio where the advantage is negative
    beta: float
    entropy_coef: float
    importance_sampling_correction: Literal["none", "truncate", "mask"]
    importance_sampling_cap: float
    max_completion_length: int  # tokens


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """Sums over a micro-batch, to be added up over an update's micro-batches."""

    loss: Tensor  # scalar, with gradient: divide the update's sum by `loss_denominator`
    metrics: dict[str, Tensor]
    """Scalars without gradient, sums over the micro-batch's unmasked tokens; divided by `tokens`
    they are means per token:

    tokens                      unmasked tokens
    entropy                     nats
    clipped_low, clipped_high   tokens whose ratio (their completion's, if so chosen) is clipped at
                                1 - epsilon, at 1 + epsilon_high, counted where that takes the
                                gradient away; of cispo high alone, where it makes it smaller. As
                                in TRL what delta bounds is not counted
    kl                          k3 in nats, before beta; only where beta > 0
    importance_sampling_ratio   weights of the correction as applied; only where there is one
    importance_sampling_capped  tokens whose weight was over the cap; only where there is one
    """


def policy_loss(inputs: LossInputs, settings: LossSettings) -> LossOutputs:
    """The sum over a micro-batch of what each token adds to the loss.

        r_t = exp(logprobs_t - old_logprobs_t)                                      token
            = exp(mean of logprobs - old_logprobs over t's completion)              sequence
        s_t = -min(min(r_t, delta) A, clip(r_t, 1 - epsilon, 1 + epsilon_high) A)   not cispo
            = -detach(min(r_t, epsilon_high)) A logprobs_t                          cispo
        l_t = w_t s_t + beta k3_t - entropy_coef entropy_t
        loss = sum over completions of (mean over the completion's tokens of l_t)   grpo
             = sum over tokens of l_t                                               the others

    `w_t` corrects for the engine's numerics (`correction_weights`); `k3_t` is the KL divergence
    from the reference (`kl_k3`). Masked tokens are in no sum and in no mean.

    Sources: the clipped surrogate and grpo's mean, GRPO (arXiv 2402.03300, equation 3); dapo
    (arXiv 2503.14476, section 3.3); dr_grpo (arXiv 2503.20783, section 3); cispo, MiniMax-M1
    (arXiv 2506.13585, section 3.1), as there without a lower clip; the sequence's ratio, GSPO
    (arXiv 2507.18071, equations 5 and 7); delta, the two-sided clipping of INTELLECT-2 (arXiv
    2505.07291).
    """
    inputs = _silence_masked(inputs)
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
    """What the gradient of a whole update's summed loss is divided by.

    `num_completions` are all completions of the update's groups. `num_tokens` are their unmasked
    tokens. Both also count completions that are never computed, because their advantage is 0.
    A completion that is masked as a whole (`algorithm.mask_truncated_completions`) has no unmasked
    tokens and still is a completion, as in TRL.

        grpo           num_completions
        dapo, cispo    num_tokens (at least 1: where all is masked there is no gradient to divide)
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
    """`s_t` [K] of `policy_loss`, and which tokens' ratios are clipped below and above [K] bool.

    At a masked token the advantage is 0: it adds nothing and is not counted.
    """
    advantages = inputs.advantages
    if settings.loss_type == "cispo":
        is_above = ratio.detach() > settings.epsilon_high
        weight = ratio.detach().clamp(max=settings.epsilon_high)
        per_token = -weight * advantages * inputs.logprobs
        return per_token, torch.zeros_like(is_above), is_above & (advantages != 0)
    lower, upper = 1.0 - settings.epsilon, 1.0 + settings.epsilon_high
    # Where the advantage is positive, delta changes nothing: it is above the clip.
    bounded = ratio if settings.delta is None else ratio.clamp(max=settings.delta)
    per_token = -torch.minimum(bounded * advantages, ratio.clamp(lower, upper) * advantages)
    return per_token, (ratio < lower) & (advantages < 0), (ratio > upper) & (advantages > 0)


def _silence_masked(inputs: LossInputs) -> LossInputs:
    """Zeros at masked tokens: before any exp, so that not even a gradient sees what stood there.

    A tool's token may be one that the policy would never have sampled.
    """

    def silenced(values: Tensor) -> Tensor:
        return torch.where(inputs.loss_mask, values, 0.0)

    ref_logprobs = inputs.ref_logprobs
    return replace(
        inputs,
        logprobs=silenced(inputs.logprobs),
        old_logprobs=silenced(inputs.old_logprobs),
        rollout_logprobs=silenced(inputs.rollout_logprobs),
        ref_logprobs=None if ref_logprobs is None else silenced(ref_logprobs),
        entropy=silenced(inputs.entropy),
        advantages=silenced(inputs.advantages),
    )


def _completion_lengths(inputs: LossInputs) -> Tensor:
    """[K] unmasked tokens of each token's completion, at least 1."""
    return _sum_over_completion(inputs.loss_mask.to(inputs.logprobs.dtype), inputs).clamp(min=1.0)


def _log_ratio(inputs: LossInputs, lengths: Tensor, settings: LossSettings) -> Tensor:
    """[K], of each token or, the same for all its tokens, of its completion."""
    log_ratio = inputs.logprobs - inputs.old_logprobs
    if settings.importance_sampling_level == "token":
        return log_ratio
    return _sum_over_completion(log_ratio, inputs) / lengths


def _sum_over_completion(values: Tensor, inputs: LossInputs) -> Tensor:
    """[K] -> [K]: at each token the sum over its completion."""
    sums = values.new_zeros(inputs.num_completions)
    sums = sums.index_add(0, inputs.completion_of_token, values)
    return sums[inputs.completion_of_token]
