"""Metrics of an iteration and of an evaluation from the workers' reports, warnings that follow from
them, and the summary of a run.

Shapes: N groups or problems, G completions of a group, S samples of a problem.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from easyrl import events
from easyrl.config.spec import BatchSpec, BestMetric, RewardSpec, ScheduleSpec, TokenLimits
from easyrl.rewards import judge
from easyrl.rewards.code_blocks import find_program
from easyrl.rewards.functions import final_text
from easyrl.runtime.ledger import Ledger
from easyrl.runtime.resume import SavedState

LAST_ITERATIONS = 5
"""`reward_first` and `reward_last` are means over this many, in a run of at least twice as many."""
NO_LEARNING_ITERATIONS = 3
"""A run that is at one of these extremes for this many iterations in a row gets a warning:"""
EXTREME_SHARE = 0.95  # of groups with equal rewards, or of completions that are cut off, at least
EXTREME_LENGTH = 1.5  # mean length of the completions in tokens, at most
MANY_WITHOUT_PROGRAM = 0.5
"""A larger share of first completions without a program gets a warning."""
MANY_WITHOUT_REQUESTS = 0.25
"""Warn from this share of an agent's episodes that got no answer from the model."""
EXCERPT_CHARACTERS = 300  # of a completion, in that warning
TOLERANCE = 1e-6
"""A reward this little below the bound is correct: rewards are sums in float32."""
BUSY = ("infer", "train", "weights")
"""Parts of an iteration, whose seconds are the metrics `perf/NAME_seconds`."""
ACCURACY = BestMetric("eval/accuracy", is_highest=True)
COUNTS = ("groups_skipped", "groups_replaced", "groups_not_replaced", "reward_errors")
"""Metrics of an iteration that the summary adds up."""


def iteration_metrics(
    ledger: Ledger,
    rewards: RewardSpec,
    before: Mapping[str, Any],
    seconds: Mapping[str, float],
    num_devices: int,
) -> dict[str, float]:
    """Metrics of a complete iteration, with TRL's names where it has one. As in TRL, rewards and
    lengths cover all generated groups, also rejected ones: they describe the policy, not what is
    trained. Lengths and rates count the tokens that the model has sampled, not those inserted.
    `before`: metrics of the previous iteration, if any; `seconds`: the measured ones."""
    groups = ledger.reports
    trained = ledger.trained
    assert trained is not None
    totals = _totals_of(groups)
    lengths = np.concatenate([group.completion_lengths for group in groups])  # [N * G]
    num_completions = lengths.size
    num_generated = int(lengths.sum())
    inserted = {}
    if rewards.acts is not None:
        mean_inserted = totals.inserted_tokens / num_completions
        inserted["completions/mean_inserted_length"] = mean_inserted
    num_tokens_before = before.get("num_tokens", 0)
    num_generated_before = before.get("num_generated_tokens", 0)
    rate = trained.completion_tokens / seconds["perf/iteration_seconds"]
    return {
        "iteration": trained.iteration + 1,
        "policy_version": trained.policy_version,
        **_reward_metrics(groups, rewards),
        "groups_skipped": totals.skipped,
        "groups_replaced": totals.replaced,
        "groups_not_replaced": totals.not_replaced,
        "replacement_rounds": ledger.round,
        "reward_errors": totals.reward_errors,
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": totals.truncated / num_completions,
        **inserted,
        **trained.metrics,
        **_trained_tokens(before, trained),
        "num_tokens": num_tokens_before + totals.prompt_tokens + num_generated,
        "num_generated_tokens": num_generated_before + num_generated,
        **seconds,
        "perf/infer_seconds": float(np.mean([*ledger.engine_seconds.values()])),
        "perf/train_seconds": trained.busy_seconds,
        "perf/tokens_per_second": rate,
        "perf/tokens_per_second_per_device": rate / num_devices,
    }


@dataclass(slots=True)
class _Totals:
    """Sums over the groups of an iteration."""

    skipped: int = 0
    replaced: int = 0
    not_replaced: int = 0  # unwanted groups that were trained all the same
    reward_errors: int = 0
    truncated: int = 0  # completions
    inserted_tokens: int = 0
    prompt_tokens: int = 0


def _totals_of(groups: Iterable[events.GroupScored]) -> _Totals:
    totals = _Totals()
    for group in groups:
        if group.is_skipped:
            totals.skipped += 1
        if group.is_rejected:
            totals.replaced += 1
        elif group.is_unwanted:
            totals.not_replaced += 1
        totals.reward_errors += len(group.errors)
        totals.truncated += group.num_truncated
        totals.inserted_tokens += group.num_inserted_tokens
        totals.prompt_tokens += group.num_prompt_tokens
    return totals


def trained_tokens(line: Mapping[str, Any]) -> dict[str, int]:
    """Return the tokens of the completions trained so far, from a line of metrics: sampled ones,
    inserted ones, and the sum that the trainer gets. A line of an older version has only the sum,
    as `num_tokens`: all of it counts as sampled."""
    if "num_trainer_tokens" not in line:
        total = line.get("num_tokens", 0)
        line = {"num_completion_tokens": total, "num_trainer_tokens": total}
    return {
        "num_completion_tokens": line.get("num_completion_tokens", 0),
        "num_inserted_tokens": line.get("num_inserted_tokens", 0),
        "num_trainer_tokens": line.get("num_trainer_tokens", 0),
    }


def _trained_tokens(before: Mapping[str, Any], trained: events.IterationTrained) -> dict[str, int]:
    """Add an iteration's tokens to those of the iterations before."""
    tokens = trained_tokens(before)
    tokens["num_completion_tokens"] += trained.completion_tokens
    tokens["num_inserted_tokens"] += trained.inserted_tokens
    tokens["num_trainer_tokens"] += trained.completion_tokens + trained.inserted_tokens
    return tokens


def logged_metrics(
    groups: Iterable[events.GroupScored], taken: Collection[str]
) -> dict[str, float]:
    """Metrics that reward functions logged, averaged over groups. One whose name is `taken` by
    another metric is called `logged/NAME`."""
    values: dict[str, list[float]] = {}
    for group in groups:
        for name, value in group.logged.items():
            shown_name = f"logged/{name}" if name in taken else name
            values.setdefault(shown_name, []).append(value)
    return {name: float(np.mean(of_groups)) for name, of_groups in values.items()}


def judge_counts(reports: Iterable[events.GroupScored | events.PromptEvaluated]) -> Counter[str]:
    """Sums of what judging groups or answers took; empty without a judge."""
    counts: Counter[str] = Counter()
    for report in reports:
        for name in judge.COUNTS:
            if name in report.logged:
                counts.update({name: report.logged[name]})
    return counts


def _reward_metrics(groups: Sequence[events.GroupScored], spec: RewardSpec) -> dict[str, float]:
    """Reward metrics of the groups that have rewards; NaN if there are none."""
    scored = [group for group in groups if not group.is_skipped]
    if not scored or spec.scores_nothing:
        return dict.fromkeys(("reward", "reward_std", "frac_reward_zero_std"), math.nan)
    rewards = np.array([group.rewards for group in scored])  # [N, G]
    is_equal_to_first = rewards == rewards[:, :1]
    metrics = {
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std(axis=1, ddof=1).mean()),
        "frac_reward_zero_std": float(is_equal_to_first.all(axis=1).mean()),
    }
    for number, name in enumerate(spec.names):
        of_groups = [group.rewards_by_function[number] for group in scored]
        scores = np.array(of_groups, dtype=np.float64)  # [N, G], NaN: it did not apply
        count = np.count_nonzero(~np.isnan(scores))
        if count > 0:
            ddof = 1 if count > 1 else 0
            metrics[f"rewards/{name}/mean"] = float(np.nanmean(scores))
            metrics[f"rewards/{name}/std"] = float(np.nanstd(scores, ddof=ddof))
    return metrics


def summarize(
    lines: Sequence[Mapping[str, Any]],
    schedule: ScheduleSpec,
    reward_names: Sequence[str],
    state: SavedState,
    num_devices: int,
) -> dict[str, Any]:
    """Return what `summary.json` says about the iterations, whose metrics are `lines`."""

    def total(name: str) -> float:
        return sum(values_of(lines, name))

    num_averaged = LAST_ITERATIONS if schedule.iterations >= 2 * LAST_ITERATIONS else 1
    rewards = {name: ends(lines, f"rewards/{name}/mean", num_averaged) for name in reward_names}
    reward_first, reward_last = ends(lines, "reward", num_averaged)
    teacher_kl_first, teacher_kl_last = ends(lines, "teacher/kl", num_averaged)
    _, cut_off_last = ends(lines, "completions/clipped_ratio", num_averaged)
    newest: Mapping[str, Any] = lines[-1] if lines else {}  # all lines may have been lost
    tokens = trained_tokens(newest)
    seconds = total("perf/iteration_seconds")
    tokens_per_second = tokens["num_completion_tokens"] / seconds if seconds else 0.0
    best = best_of(lines)
    summary = {
        "iterations": schedule.iterations,
        "updates_per_iteration": schedule.updates_per_iteration,
        "policy_version": state.policy_version,
        "reward_first": reward_first,
        "reward_last": reward_last,
        "rewards": rewards,
        "teacher_kl_first": teacher_kl_first,  # None: without a teacher
        "teacher_kl_last": teacher_kl_last,
        "cut_off_last": cut_off_last,
        "tokens_per_second_per_device": tokens_per_second / num_devices,
        "accuracy_before": state.accuracy_before,
        "error_before": state.error_before,
        "held_out_reward_before": state.held_out_reward_before,
        "accuracy_best": best.get("eval/accuracy"),
        "iterations_best": best.get("iteration"),
        "overlap": overlap(lines),
        "iteration_seconds": seconds,
    }
    for part in BUSY:
        summary[f"{part}_seconds"] = total(f"perf/{part}_seconds")
    for name in COUNTS:
        summary[name] = total(name)
    for name in judge.COUNTS:
        if any(name in line for line in lines):
            summary[name] = total(name)
    summary["updates_not_finite"] = int(total("num_updates_not_finite"))
    for name, number in tokens.items():
        summary[name.removeprefix("num_")] = number
    summary["generated_tokens"] = newest.get("num_generated_tokens", 0)
    summary["groups_trained"] = state.num_iterations * schedule.prompts_per_iteration
    summary["groups_off_policy"] = 0  # one such group ends the run (`GroupReader._accept`)
    gaps = values_of(lines, "sampling/sampling_logp_difference/max")
    summary["sampling_logp_difference_max"] = max(gaps, default=None)  # None: without a gradient
    return summary


def values_of(lines: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    """Return a metric of each line that has it: lines of an older version may not."""
    values = []
    for line in lines:
        value = line.get(name)
        if value is not None:
            values.append(value)
    return values


def ends(lines: Iterable[Mapping[str, Any]], name: str, num_averaged: int) -> list[float | None]:
    """Return the means [first, last] of a metric over the first and the last `num_averaged` lines
    that have it; None without any."""
    values = values_of(lines, name)
    if not values:
        return [None, None]
    first = values[:num_averaged]
    last = values[-num_averaged:]
    return [sum(first) / len(first), sum(last) / len(last)]


def no_learning_warning(
    lines: Sequence[Mapping[str, Any]], batches: BatchSpec, limits: TokenLimits, folder: Path
) -> str:
    """Explain what keeps a run from learning, by its metrics; empty if nothing does."""
    newest = lines[-NO_LEARNING_ITERATIONS:]
    if len(newest) < NO_LEARNING_ITERATIONS:
        return ""
    rewards = values_of(newest, "reward")
    if 0 < len(rewards) < NO_LEARNING_ITERATIONS:  # in some iterations all groups were skipped
        return ""
    has_rewards = bool(rewards)  # False with a teacher alone
    alike = min(values_of(newest, "frac_reward_zero_std"), default=0.0)
    cut_off = min(values_of(newest, "completions/clipped_ratio"))
    length = max(values_of(newest, "completions/mean_length"))
    found = []
    causes = []
    if cut_off >= EXTREME_SHARE:
        limit = limits.max_completion_length
        found.append(f"{cut_off:.0%} of the completions are cut off after {limit} tokens")
        causes.append("rollout.max_completion_length is too low")
        causes.append("the model does not end its answers (data.chat, rollout.stop)")
    if has_rewards and alike >= EXTREME_SHARE and not batches.keeps_zero_advantages:
        found.append(f"the rewards of a group are equal in {alike:.0%} of the groups")
        causes.append("the problems are too easy or too hard for the model")
        causes.append("the reward does not find the answers (their form, the data's columns)")
        causes.append("a group's completions are alike (rollout.temperature)")
    if length <= EXTREME_LENGTH:
        found.append(f"completions have {length:.1f} tokens")
        causes.append("the prompts lack the model's format (data.chat)")
    if not found:
        return ""
    first = newest[0]["iteration"]
    last = newest[-1]["iteration"]
    about_reward = f" (reward {rewards[-1]:.3f})" if has_rewards else ""
    return (
        f"warning: the run may learn nothing: in iterations {first} to {last} "
        f"{', and '.join(found)}{about_reward}\n"
        f"likely causes: {'; '.join(causes)}\n"
        f"to see the completions: easyrl samples {quote(str(folder))} --iteration {last}"
    )


def samples_of(groups: Iterable[events.GroupScored]) -> list[events.Sample]:
    """All completions of the groups that report them, and one of each other group."""
    samples: list[events.Sample] = []
    for group in groups:
        samples.extend(group.samples)
        if not group.samples and group.shown is not None:
            samples.append(group.shown)
    return samples


def no_program_warning(
    samples: Sequence[events.Sample], max_completion_length: int, section: str = "rollout"
) -> str:
    """Explain that the reward `code` finds no program in most completions, and show one of them;
    empty if it does, and without this reward. A text that passed its tests is a program."""
    scored = [sample for sample in samples if sample.rewards.get("code") is not None]
    without = [sample for sample in scored if not _has_program(sample)]
    if len(without) <= MANY_WITHOUT_PROGRAM * len(scored):
        return ""
    num_cut_off = len([sample for sample in without if sample.truncated])
    shown = min(without, key=lambda sample: sample.truncated)  # one that has an end, if any has
    text = shown.completion
    if len(text) > EXCERPT_CHARACTERS:
        text = f"{text[: EXCERPT_CHARACTERS // 2]} … {text[-EXCERPT_CHARACTERS // 2 :]}"
    cut_off = ""
    if num_cut_off:
        cut_off = (
            f" ({num_cut_off} of them are cut off after {max_completion_length} tokens: "
            f"{section}.max_completion_length)"
        )
    return (
        f"warning: the reward code finds no program in {len(without)} of {len(scored)} of the "
        f"first completions{cut_off}: expected a block of code (```python), behind the "
        f"thinking (ask for one: data.system_prompt, data.prompt_template), got {text!r}"
    )


def no_requests_warning(logged: Iterable[Mapping[str, float]]) -> str:
    """Explain that many episodes of an agent got no answer from the model. Empty if few did, or if
    there is no agent. `logged`: metrics of groups, or of answers in an evaluation."""
    name = "episodes/without_requests"
    shares = [values[name] for values in logged if name in values]
    if not shares:
        return ""
    share = sum(shares) / len(shares)
    if share < MANY_WITHOUT_REQUESTS:
        return ""
    return (
        f"warning: {share:.0%} of the agent's episodes got no answer from the model, so their "
        "rewards say nothing of it, and nothing of them is trained. Either all their requests were "
        "refused (ended_by in samples.jsonl is then `refused` or a limit, and notes of the run say "
        "why), or they made none: a client must not answer from a "
        "cache, as dspy does by default (LM(…, cache=False))"
    )


def _has_program(sample: events.Sample) -> bool:
    """Return whether a completion that the reward `code` has scored contains a program."""
    if sample.rewards["code"]:  # it passed tests
        return True
    return find_program(final_text(sample.completion)) is not None


def best_of(lines: Iterable[Mapping[str, Any]], metric: BestMetric = ACCURACY) -> Mapping[str, Any]:
    """Return the line with the best value of a metric, the first of equals; or nothing."""
    measured = [line for line in lines if line.get(metric.name) is not None]
    choose = max if metric.is_highest else min
    return choose(measured, key=lambda line: line[metric.name], default={})


def overlap(lines: Collection[Mapping[str, Any]]) -> float:
    """Return the share (0 to 1) of the shorter of generating and training that overlapped."""

    def total(name: str) -> float:
        return sum(values_of(lines, f"perf/{name}_seconds"))

    infer = total("infer")
    train = total("train")
    hidden = infer + train + total("weights") - total("iteration")
    shorter = min(infer, train)
    if shorter <= 0:
        return 0.0
    return min(1.0, max(0.0, hidden / shorter))


def is_correct(rewards: npt.ArrayLike, bound: float) -> npt.NDArray[np.bool_]:
    """Return whether each reward reaches `bound`; NaN does not."""
    return np.asarray(rewards, dtype=np.float64) >= bound - TOLERANCE


class Mean(NamedTuple):
    """A mean over problems, and its standard error."""

    value: float
    standard_error: float


def mean_and_error(of_problems: npt.ArrayLike) -> Mean:
    """Return the mean of the problems' means [N] and its standard error (n - 1); NaN where
    undefined."""
    means = np.asarray(of_problems, dtype=np.float64)
    if len(means) == 0:
        return Mean(math.nan, math.nan)
    error = math.nan
    if len(means) > 1:
        error = float(means.std(ddof=1)) / math.sqrt(len(means))
    return Mean(float(means.mean()), error)


class EvaluationMetrics(NamedTuple):
    metrics: dict[str, float]
    num_problems: int  # that have rewards


def evaluation_metrics(
    answers: Iterable[events.PromptEvaluated], correct_reward: float
) -> EvaluationMetrics:
    """Return the metrics over the held-out problems that have rewards."""
    # Events come in order of arrival: sort, so that sums do not depend on it.
    ordered = sorted(answers, key=lambda answer: answer.prompt_index)
    of_all = [[sample.reward for sample in answer.samples] for answer in ordered]
    rewards = np.array(of_all, dtype=np.float64)  # [N, S]
    has_rewards = ~np.isnan(rewards).any(axis=1)
    rewards = rewards[has_rewards]
    accuracy = mean_and_error(is_correct(rewards, correct_reward).mean(axis=1))
    reward = mean_and_error(rewards.mean(axis=1))
    metrics = {
        "eval/accuracy": accuracy.value,
        "eval/standard_error": accuracy.standard_error,
        "eval/reward": reward.value,
    }
    return EvaluationMetrics(metrics, num_problems=len(rewards))
