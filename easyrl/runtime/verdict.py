"""What the metrics of a run say about its success: whether anything was learned, and whether the
held-out accuracy has changed by more than its error.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from easyrl.config.spec import RunSpec
from easyrl.runtime.metrics import EXTREME_SHARE, values_of

CLEAR_ERRORS = 2.0
"""A difference is clear from this many of its standard errors on: 5 of 100 by chance."""
CAUSES_OF_EQUAL_REWARDS = (
    "the reward does not find the answer: its form, or the column (data.columns)",
    "the problems are too hard or too easy: all completions score alike",
    "the completions are alike (rollout.temperature), or are cut off before the answer "
    "(rollout.max_completion_length)",
)
CAUSES_OF_DROPPED_UPDATES = (
    "the learning rate is too high (train.learning_rate)",
    "the loss or a reward divides by 0",
    "the weights of the model that was loaded are not finite",
)
CAUSES_OF_AN_IDLE_TEACHER = (
    "the teacher is the policy's own model (algorithm.teacher): there is nothing to learn from it",
    "the learning rate is 0 (train.learning_rate)",
    "a loss of your own that does not use the teacher (algorithm.loss_type)",
)
CAUSES_OF_UNCHANGED_WEIGHTS = (
    "train.learning_rate is 0",
    "a loss of your own that does not depend on the log-probabilities (algorithm.loss_type)",
    "all advantages are 0 (algorithm.scale_rewards, the reward)",
)


class NothingLearned(NamedTuple):
    """Why a run has not changed its model, or not by its rewards."""

    reason: str  # "all rewards were 0.000, the weights are unchanged"
    causes: Sequence[str]  # the usual ones, the most frequent first


def nothing_learned(lines: Sequence[Mapping[str, Any]], spec: RunSpec) -> NothingLearned | None:
    """Return why nothing was learned, by the metrics of all iterations; None if something was, or
    without iterations."""
    if not lines:
        return None
    updates = spec.schedule.updates_per_iteration
    is_unchanged = all(_leaves_weights(line, updates) for line in lines)
    if not spec.rewards.is_none and _all_rewards_equal(lines):
        reason = _describe_equal_rewards(lines)
        if is_unchanged:
            reason += ", so no group had a gradient and the weights are unchanged"
            return NothingLearned(reason, _causes_of_equal_rewards(lines, spec))
        if spec.teacher is None:  # another term of the loss has trained
            reason += ", so no group had a gradient from its rewards"
            return NothingLearned(reason, _causes_of_equal_rewards(lines, spec))
    return _explain_unchanged(lines, spec) if is_unchanged else None


def _explain_unchanged(lines: Sequence[Mapping[str, Any]], spec: RunSpec) -> NothingLearned:
    """Return why no update has changed a weight, where the rewards are not the reason."""
    num_dropped = sum(values_of(lines, "num_updates_not_finite"))
    if num_dropped == spec.schedule.updates_per_iteration * len(lines):
        reason = "no update was finite, so that all were dropped: the weights are unchanged"
        return NothingLearned(reason, CAUSES_OF_DROPPED_UPDATES)
    if spec.rewards.is_none:
        reason = "the teacher gave no gradient, so the weights are unchanged"
        return NothingLearned(reason, CAUSES_OF_AN_IDLE_TEACHER)
    return NothingLearned("the weights are unchanged", CAUSES_OF_UNCHANGED_WEIGHTS)


def _leaves_weights(line: Mapping[str, Any], updates: int) -> bool:
    """Return whether no update of the iteration has changed a weight: AdamW without weight decay
    does nothing as long as all gradients have been 0."""
    is_dropped = line.get("num_updates_not_finite", 0) == updates
    return is_dropped or line.get("grad_norm") == 0 or line.get("learning_rate") == 0


def _all_rewards_equal(lines: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether in each group of the run all rewards were equal, or none had any."""
    for line in lines:
        has_rewards = line.get("reward") is not None
        if has_rewards and line.get("frac_reward_zero_std") != 1:
            return False
    return True


def _causes_of_equal_rewards(lines: Sequence[Mapping[str, Any]], spec: RunSpec) -> Sequence[str]:
    """Return the usual causes, first of all a limit that nearly all completions have reached."""
    cut_off = min(values_of(lines, "completions/clipped_ratio"), default=0.0)
    if cut_off < EXTREME_SHARE:
        return CAUSES_OF_EQUAL_REWARDS
    limit = spec.limits.max_completion_length
    about = f"{cut_off:.0%} of the completions were cut off after {limit} tokens, perhaps before"
    return (f"{about} the answer (rollout.max_completion_length)", *CAUSES_OF_EQUAL_REWARDS[:2])


def _describe_equal_rewards(lines: Sequence[Mapping[str, Any]]) -> str:
    rewards = values_of(lines, "reward")
    if not rewards:
        return "no group has got a reward"
    if min(rewards) == max(rewards):
        return f"all rewards were {rewards[0]:.3f}"
    return "in each group all rewards were equal"


class Change(NamedTuple):
    """Two measurements of an accuracy with their standard errors, if these are known."""

    before: float
    after: float
    error_before: float | None
    error_after: float | None

    @property
    def is_clear(self) -> bool | None:
        """Whether the difference is larger than chance explains; None: the errors are unknown."""
        errors = []
        for error in (self.error_before, self.error_after):
            if error is None or math.isnan(error):
                return None
            errors.append(error)
        return abs(self.after - self.before) > CLEAR_ERRORS * math.hypot(*errors)


def accuracy_change(summary: Mapping[str, Any]) -> Change | None:
    """Return how the held-out accuracy has changed; None if it was not measured twice."""
    before = summary.get("accuracy_before")
    after = summary.get("accuracy_after")
    if before is None or after is None:
        return None
    return Change(before, after, summary.get("error_before"), summary.get("error_after"))


def sentence(summary: Mapping[str, Any]) -> str:
    """Say in one sentence what a run has reached, as in `held-out accuracy 0.31 to 0.50 ± 0.04 on
    128 problems`. `summary`: as `summary.json`."""
    change = accuracy_change(summary)
    if change is not None:
        text = f"held-out accuracy {change.before:.2f} to {change.after:.2f}"
        if change.is_clear is not None:  # the errors are known
            text += f" ± {change.error_after:.2f}"
        num_problems = summary.get("held_out_problems")
        if num_problems:
            text += f" on {num_problems:,} problems"
        return text if change.is_clear is not False else f"{text}: no clear change"
    first = summary.get("reward_first")
    last = summary.get("reward_last")
    if first is None or last is None:
        return _sentence_on_teacher(summary) or "no reward so far"
    return f"reward {first:.3g} to {last:.3g} on the problems that were trained"


def _sentence_on_teacher(summary: Mapping[str, Any]) -> str:
    """Say how far the policy is from its teacher; empty without one."""
    first = summary.get("teacher_kl_first")
    last = summary.get("teacher_kl_last")
    if first is None or last is None:
        return ""
    return f"KL divergence from the teacher {first:.3g} to {last:.3g}"
