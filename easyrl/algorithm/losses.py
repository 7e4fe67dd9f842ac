"""The policy loss, a pure function of tensors; built in, or a function of the user's file.

A completion is never split between micro-batches. So an update's gradient is the gradient of the
sum of its micro-batches' losses, divided once by a denominator that is known after its last group.

Shapes: K completion tokens of a micro-batch, C completions in it.
"""

import inspect
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from easyrl.config import ConfigError
from easyrl.config.algorithm import LOSS_FORMS, LOSS_KEY
from easyrl.config.spec import LossOptions
from easyrl.user_code import load_function, module_of, user_traceback


class TeacherScores(NamedTuple):
    """How the teacher (`algorithm.teacher`) scores a micro-batch's completion tokens. Its
    distribution and the policy's are at the sampling temperature."""

    logprobs: Tensor
    """Its log-probabilities [K] of the sampled tokens."""
    divergence: Tensor
    """`algorithm.teacher_divergence` [K] in nats, with gradient; where that is null, as `kl`."""
    kl: Tensor
    """KL(policy || teacher) [K] in nats, over the whole vocabulary, without gradient."""
    agrees: Tensor
    """Whether both find the same token most likely [K] bool."""

    def metrics(self) -> dict[str, Tensor]:
        return {"teacher_kl": self.kl.sum(), "teacher_agrees": self.agrees.sum()}


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Completion tokens of a micro-batch. Values at masked tokens, also NaN, change nothing."""

    logprobs: Tensor  # [K], of the policy, with gradient
    old_logprobs: Tensor  # [K], of the policy before the iteration's first update, no gradient
    rollout_logprobs: Tensor  # [K], what the engine reported
    ref_logprobs: Tensor | None  # [K], of the frozen reference; None where beta is 0
    entropy: Tensor  # [K] nats, with gradient where there is an entropy bonus
    advantages: Tensor  # [K], of the token's completion
    loss_mask: Tensor  # [K] bool, False where a token is not trained
    completion_of_token: Tensor  # [K] int64 in 0..C-1
    num_completions: int  # C
    teacher: TeacherScores | None = None  # None without one


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
    teacher_kl, teacher_agrees  KL(policy || teacher) in nats, and tokens whose most likely
                                successor is the same; only with a teacher
    """


def policy_loss(inputs: LossInputs, options: LossOptions) -> LossOutputs:
    """Return the loss summed over a micro-batch.

        r_t = exp(logprobs_t - old_logprobs_t)                                      token
            = exp(mean of logprobs - old_logprobs over t's completion)              sequence
        s_t = -min(r_t A, clip(r_t, 1 - epsilon, 1 + epsilon_high) A)               not cispo
            = -detach(min(r_t, epsilon_high)) A logprobs_t                          cispo
        w_t = exp(old_logprobs_t - rollout_logprobs_t), no gradient; over the cap:  correction
              the cap (truncate) or 0 (mask)
        l_t = w_t s_t + beta k3_t - entropy_coef entropy_t + teacher_weight D_t
        loss = sum over completions of (mean over the completion's tokens of l_t)   grpo
             = sum over tokens of l_t                                               the others

    An agent's episode is one completion, which all its branches belong to; a token that they share
    counts once. `w_t` corrects for the engine's numerics; `k3_t` estimates the KL divergence from
    the reference (`kl_k3`). No sum and no mean includes masked tokens. A teacher with
    log-probabilities q_t adds its divergence D_t (`easyrl.model.distillation`) or, without
    `teacher_divergence`, teacher_weight (q_t - old_logprobs_t) to the advantage A of the token.

    Sources: the clipped surrogate and grpo's mean, GRPO (arXiv 2402.03300, equation 3); dapo
    (arXiv 2503.14476, section 3.3); dr_grpo (arXiv 2503.20783, section 3); cispo, MiniMax-M1
    (arXiv 2506.13585, section 3.1); the sequence's ratio, GSPO (arXiv 2507.18071, equations 5 and
    7); truncated importance sampling, Yao et al. 2025, "Your Efficient RL Framework Secretly Brings
    You Off-Policy RL Training"; mask, TRL.
    """
    inputs = _zero_masked(inputs)
    mask = inputs.loss_mask
    teacher = inputs.teacher
    if teacher is not None and options.teacher_divergence is None:
        of_teacher = options.teacher_weight * (teacher.logprobs - inputs.old_logprobs)
        inputs = replace(inputs, advantages=inputs.advantages + of_teacher)
    lengths = _sum_over_completion(mask.to(inputs.logprobs.dtype), inputs).clamp(min=1.0)
    log_ratio = inputs.logprobs - inputs.old_logprobs
    if options.importance_sampling_level == "sequence":
        log_ratio = _sum_over_completion(log_ratio, inputs) / lengths
    surrogate = _surrogate(inputs, torch.exp(log_ratio), options)
    per_token = surrogate.per_token
    metrics = {
        "tokens": mask.sum(),
        "entropy": inputs.entropy.detach().sum(),
        "clipped_low": surrogate.is_clipped_low.sum(),
        "clipped_high": surrogate.is_clipped_high.sum(),
    }
    if options.correction != "none":
        correction = _correction(inputs, options)
        per_token = per_token * correction.weights
        metrics["importance_sampling_ratio"] = (correction.weights * mask).sum()
        metrics["importance_sampling_capped"] = (correction.is_capped & mask).sum()
    if options.beta > 0.0:
        assert inputs.ref_logprobs is not None
        kl = kl_k3(inputs.logprobs, inputs.ref_logprobs)
        per_token = per_token + options.beta * kl
        metrics["kl"] = kl.detach().sum()
    if options.entropy_coef != 0.0:
        per_token = per_token - options.entropy_coef * inputs.entropy
    if teacher is not None:
        if options.teacher_divergence is not None:
            per_token = per_token + options.teacher_weight * teacher.divergence
        metrics |= teacher.metrics()
    if options.loss_type == "grpo":
        per_token = per_token / lengths
    return LossOutputs(per_token.sum(), metrics)


def loss_denominator(options: LossOptions, *, num_completions: int, num_tokens: int) -> float:
    """Return the divisor of an update's gradient, which is summed over its micro-batches.

    `num_completions` counts all completions of the update's groups, `num_tokens` their unmasked
    tokens. Both include completions that are not computed because their advantage is 0. One that is
    masked as a whole counts as a completion without tokens, as in TRL. An agent's episode counts as
    one completion, whatever its branches, and each of its sampled tokens as one token.

        grpo           num_completions
        dapo, cispo    num_tokens (at least 1; if all are masked the gradient is 0)
        dr_grpo        num_completions * rollout.max_completion_length

    A loss of the user's own: num_completions, unless its file has a function `loss_denominator`.
    """
    if options.loss_type in ("dapo", "cispo"):
        return float(max(1, num_tokens))
    if options.loss_type == "dr_grpo":
        return float(num_completions * options.max_completion_length)
    return float(num_completions)


class Loss(NamedTuple):
    """The functions of `algorithm.loss_type`."""

    policy_loss: Callable[[LossInputs, LossOptions], LossOutputs]
    loss_denominator: Callable[..., float]  # (options, *, num_completions, num_tokens)
    metrics: Collection[str]  # names of the metrics that `policy_loss` returns


def load_loss(options: LossOptions) -> Loss:
    """Return the built-in loss, or load and try the user's. Raises ConfigError if it fails."""
    tiny = _zero_masked(_tiny_inputs(options))
    if not options.is_own:
        return Loss(policy_loss, loss_denominator, policy_loss(tiny, options).metrics.keys())
    spec = options.loss_type
    loss = load_function(spec, LOSS_KEY, LOSS_FORMS)
    settings = _settings_for(loss, 1, options)
    divisor_of: Callable[..., Any]
    divisor_of = getattr(module_of(spec), "loss_denominator", loss_denominator)
    divisor_settings = _settings_for(divisor_of, 0, options)

    def own_loss(inputs: LossInputs, options: LossOptions) -> LossOutputs:
        inputs = _zero_masked(inputs)
        outputs = loss(inputs, *settings)
        metrics = {name: value.detach() for name, value in outputs.metrics.items()}
        metrics["tokens"] = inputs.loss_mask.sum()
        metrics["entropy"] = inputs.entropy.detach().sum()
        if inputs.teacher is not None:
            metrics |= inputs.teacher.metrics()
        return LossOutputs(outputs.loss, metrics)

    def denominator(options: LossOptions, **counts: int) -> float:
        return float(divisor_of(*divisor_settings, **counts))

    try:
        outputs = loss(tiny, *settings)
        divisor = denominator(options, num_completions=2, num_tokens=5)
    except Exception as error:
        raise ConfigError(f"{LOSS_KEY}: '{spec}' fails:\n{user_traceback(error)}") from error
    is_divisor = 0.0 < divisor < math.inf
    if not _can_be_trained(outputs) or not is_divisor:
        raise ConfigError(
            f"{LOSS_KEY}: '{spec}': expected LossOutputs with a loss that has a gradient and with "
            "metrics, all scalar tensors, and a positive loss_denominator, got "
            f"{outputs!r:.200} and {divisor}"
        )
    return Loss(own_loss, denominator, own_loss(tiny, options).metrics.keys())


def _can_be_trained(outputs: Any) -> bool:
    """Return whether a loss of the user's returned what it should."""
    if not isinstance(outputs, LossOutputs):
        return False
    for value in (outputs.loss, *outputs.metrics.values()):
        if not isinstance(value, Tensor) or value.ndim > 0:
            return False
    return outputs.loss.requires_grad


def _settings_for(function: Callable[..., Any], number: int, options: LossOptions) -> list[Any]:
    """Return the settings that a function of the user's gets as argument `number`: all of the run's
    (`config`), or if the parameter is called `options` the loss's, as the built-in functions do.
    Empty if it has no such parameter."""
    parameters = [*inspect.signature(function).parameters]
    if len(parameters) <= number:
        return []
    return [options if parameters[number] == "options" else options.config]


def _tiny_inputs(options: LossOptions) -> LossInputs:
    """Two completions of three tokens, one of them masked, as a loss gets them."""
    values = torch.arange(6) / -10.0
    logprobs = values.clone().requires_grad_()
    teacher = None
    if options.has_teacher:
        has_gradient = options.teacher_divergence is not None
        teacher = TeacherScores(
            logprobs=values,
            divergence=-logprobs if has_gradient else -values,
            kl=-values,
            agrees=values < 0,
        )
    return LossInputs(
        logprobs=logprobs,
        old_logprobs=values,
        rollout_logprobs=values,
        ref_logprobs=values if options.beta > 0.0 else None,
        entropy=(-values).requires_grad_(options.entropy_coef > 0.0),
        advantages=torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0]),
        loss_mask=torch.arange(6) < 5,
        completion_of_token=torch.tensor([0, 0, 0, 1, 1, 1]),
        num_completions=2,
        teacher=teacher,
    )


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Estimate KL(policy || reference) [K] in nats, never negative, with gradient.

        k3_t = exp(ref_logprobs_t - logprobs_t) - (ref_logprobs_t - logprobs_t) - 1

    GRPO (arXiv 2402.03300, equation 4); Schulman 2020, "Approximating KL Divergence".
    """
    difference = ref_logprobs - logprobs
    return torch.expm1(difference) - difference  # near 0, exp - 1 would lose precision


class _Surrogate(NamedTuple):
    """The first term of the loss. Masked tokens have advantage 0: they do not count as clipped."""

    per_token: Tensor  # [K] `s_t` of `policy_loss`
    is_clipped_low: Tensor  # [K] bool
    is_clipped_high: Tensor  # [K] bool


def _surrogate(inputs: LossInputs, ratio: Tensor, options: LossOptions) -> _Surrogate:
    advantages = inputs.advantages
    if options.loss_type == "cispo":
        fixed_ratio = ratio.detach()
        weight = fixed_ratio.clamp(max=options.epsilon_high)
        is_above = fixed_ratio > options.epsilon_high
        return _Surrogate(
            per_token=-weight * advantages * inputs.logprobs,
            is_clipped_low=torch.zeros_like(is_above),
            is_clipped_high=is_above & (advantages != 0),
        )
    lower = 1.0 - options.epsilon
    upper = 1.0 + options.epsilon_high
    clipped = ratio.clamp(lower, upper)
    return _Surrogate(
        per_token=-torch.minimum(ratio * advantages, clipped * advantages),
        is_clipped_low=(ratio < lower) & (advantages < 0),
        is_clipped_high=(ratio > upper) & (advantages > 0),
    )


class _Correction(NamedTuple):
    """The correction for the engine's numerics."""

    weights: Tensor  # [K] `w_t` of `policy_loss`
    is_capped: Tensor  # [K] bool: the weight exceeded the cap


@torch.no_grad()
def _correction(inputs: LossInputs, options: LossOptions) -> _Correction:
    cap = options.importance_sampling_cap
    weights = torch.exp(inputs.old_logprobs - inputs.rollout_logprobs)
    is_capped = weights > cap
    beyond_cap = cap if options.correction == "truncate" else 0.0
    return _Correction(torch.where(is_capped, beyond_cap, weights), is_capped)


def _zero_masked(inputs: LossInputs) -> LossInputs:
    """Set masked tokens, whose log-probability may be -inf, to 0 before any exp."""
    zeroed: dict[str, Any] = {}
    for field in fields(inputs):
        value = getattr(inputs, field.name)
        if isinstance(value, Tensor) and value.is_floating_point():
            zeroed[field.name] = torch.where(inputs.loss_mask, value, 0.0)
    if inputs.teacher is not None:
        of_teacher = [torch.where(inputs.loss_mask, value, 0) for value in inputs.teacher]
        zeroed["teacher"] = TeacherScores(*of_teacher)
    return replace(inputs, **zeroed)


def _sum_over_completion(values: Tensor, inputs: LossInputs) -> Tensor:
    """Sum over each completion [K] -> [K]; every token gets its completion's sum."""
    sums = values.new_zeros(inputs.num_completions)
    sums = sums.index_add(0, inputs.completion_of_token, values)
    return sums[inputs.completion_of_token]
