"""Metrics of an iteration and of an evaluation from the workers' reports; the summary of a run; the
number of rollout workers that `runtime.autoscale` follows.

Shapes: N groups or problems, G completions of a group, S samples of a problem.
"""

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import numpy.typing as npt

from easyrl import events
from easyrl.config.spec import BatchSpec, RewardSpec, ScheduleSpec, TokenLimits
from easyrl.rewards import judge
from easyrl.rewards.code_blocks import find_program
from easyrl.rewards.functions import final_text
from easyrl.runtime.ledger import Ledger
from easyrl.runtime.resume import SavedState

LAST_ITERATIONS = 5
"""`reward_first` and `reward_last` are means over this many, in a run of at least twice as many."""
NO_LEARNING_ITERATIONS = 3  # a run at an extreme for this many in a row gets a warning
EXTREME_SHARE, EXTREME_LENGTH = 0.95, 1.5
MANY_WITHOUT_PROGRAM = 0.5  # a larger share of the first completions gets a warning
EXCERPT_CHARACTERS = 300  # of a completion, in that warning
BALANCED_ITERATIONS = 3  # `Balance` looks at the last iterations
TOLERANCE = 1e-6  # a reward this little below the bound is correct: rewards are sums in float32


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
    groups, trained = ledger.reports, ledger.trained
    assert trained is not None
    rate = trained.completion_tokens / seconds["perf/iteration_seconds"]
    lengths = np.concatenate([group.completion_lengths for group in groups])
    num_generated = int(lengths.sum())
    num_read = sum(group.num_prompt_tokens for group in groups)
    inserted = {}
    if rewards.acts is not None:
        num_inserted = sum(group.num_inserted_tokens for group in groups)
        inserted["completions/mean_inserted_length"] = num_inserted / lengths.size
    return {
        "iteration": trained.iteration + 1,
        "policy_version": trained.policy_version,
        **_reward_metrics([group for group in groups if not group.is_skipped], rewards.names),
        "groups_skipped": sum(group.is_skipped for group in groups),
        "groups_replaced": sum(group.is_rejected for group in groups),
        "groups_not_replaced": sum(g.is_unwanted and not g.is_rejected for g in groups),
        "replacement_rounds": ledger.round,
        "reward_errors": sum(len(group.errors) for group in groups),
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": sum(g.num_truncated for g in groups) / lengths.size,
        **inserted,
        **trained.metrics,
        **_trained_tokens(before, trained),
        "num_tokens": before.get("num_tokens", 0) + num_read + num_generated,
        "num_generated_tokens": before.get("num_generated_tokens", 0) + num_generated,
        **seconds,
        "perf/infer_seconds": float(np.mean([*ledger.engine_seconds.values()])),
        "perf/train_seconds": trained.busy_seconds,
        "perf/tokens_per_second": rate,
        "perf/tokens_per_second_per_device": rate / num_devices,
    }


def trained_tokens(line: Mapping[str, Any]) -> dict[str, int]:
    """Return the tokens of the completions trained so far, from a line of metrics: sampled ones,
    inserted ones, and the sum that the trainer gets. A line of an older version has only the sum,
    as `num_tokens`: all of it counts as sampled."""
    if "num_trainer_tokens" not in line:
        total = line.get("num_tokens", 0)
        line = {"num_completion_tokens": total, "num_trainer_tokens": total}
    names = ("num_completion_tokens", "num_inserted_tokens", "num_trainer_tokens")
    return {name: line.get(name, 0) for name in names}


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
    """Metrics that reward functions logged, averaged over groups; `logged/NAME` if `taken`."""
    values: dict[str, list[float]] = {}
    for group in groups:
        for name, value in group.logged.items():
            values.setdefault(f"logged/{name}" if name in taken else name, []).append(value)
    return {name: float(np.mean(of_name)) for name, of_name in values.items()}


def judge_counts(reports: Iterable[events.GroupScored | events.PromptEvaluated]) -> Counter[str]:
    """Sums of what judging groups or answers took; empty without a judge."""
    counts: Counter[str] = Counter()
    for logged in (report.logged for report in reports):
        counts.update({name: logged[name] for name in judge.COUNTS if name in logged})
    return counts


def _reward_metrics(
    groups: Sequence[events.GroupScored], reward_names: Sequence[str]
) -> dict[str, float]:
    """Reward metrics of the groups that have rewards; NaN if there are none."""
    if not groups:
        return dict.fromkeys(("reward", "reward_std", "frac_reward_zero_std"), math.nan)
    rewards = np.array([group.rewards for group in groups])  # [N, G]
    metrics = {
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std(axis=1, ddof=1).mean()),
        "frac_reward_zero_std": float((rewards == rewards[:, :1]).all(axis=1).mean()),
    }
    for number, name in enumerate(reward_names):
        scores = np.array([group.rewards_by_function[number] for group in groups], dtype=np.float64)
        if count := np.count_nonzero(~np.isnan(scores)):
            metrics[f"rewards/{name}/mean"] = float(np.nanmean(scores))
            metrics[f"rewards/{name}/std"] = float(np.nanstd(scores, ddof=int(count > 1)))
    return metrics


BUSY = ("infer", "train", "weights")
COUNTS = ("groups_skipped", "groups_replaced", "groups_not_replaced", "reward_errors")


def summarize(
    lines: Sequence[Mapping[str, Any]],
    schedule: ScheduleSpec,
    reward_names: Sequence[str],
    state: SavedState,
    num_devices: int,
) -> dict[str, Any]:
    """Return what `summary.json` says about the iterations, whose metrics are `lines`."""

    def total(name: str) -> float:  # a metric may be missing in lines of an older version
        return sum(line.get(name) or 0 for line in lines)

    num_averaged = LAST_ITERATIONS if schedule.iterations >= 2 * LAST_ITERATIONS else 1

    def ends(name: str) -> list[float | None]:
        """The means of the metric in the first and the last iterations."""
        values = [line[name] for line in lines if line.get(name) is not None]
        parts = values[:num_averaged], values[-num_averaged:]
        return [sum(part) / len(part) if part else None for part in parts]

    reward_first, reward_last = ends("reward")
    gap = "sampling/sampling_logp_difference/max"
    gaps = [line[gap] for line in lines if line.get(gap) is not None]
    newest: Mapping[str, Any] = lines[-1] if lines else {}  # all lines may have been lost
    seconds = total("perf/iteration_seconds")
    tokens = trained_tokens(newest)
    num_sampled = tokens["num_completion_tokens"]
    best = best_of(lines)
    return {
        "iterations": schedule.iterations,
        "updates_per_iteration": schedule.updates_per_iteration,
        "policy_version": state.policy_version,
        "reward_first": reward_first,
        "reward_last": reward_last,
        "rewards": {name: ends(f"rewards/{name}/mean") for name in reward_names},
        "tokens_per_second_per_device": num_sampled / seconds / num_devices if seconds else 0.0,
        "accuracy_before": state.accuracy_before,
        "held_out_reward_before": state.held_out_reward_before,
        "accuracy_best": best.get("eval/accuracy"),
        "iterations_best": best.get("iteration"),
        "overlap": overlap(lines),
        "iteration_seconds": seconds,
        **{f"{part}_seconds": total(f"perf/{part}_seconds") for part in BUSY},
        **{name: total(name) for name in COUNTS},
        **{name: total(name) for name in judge.COUNTS if any(name in line for line in lines)},
        "updates_not_finite": int(total("num_updates_not_finite")),
        **{name.removeprefix("num_"): number for name, number in tokens.items()},
        "generated_tokens": newest.get("num_generated_tokens", 0),
        "groups_trained": state.num_iterations * schedule.prompts_per_iteration,
        "groups_off_policy": 0,  # one such group ends the run (`GroupReader._accept`)
        "sampling_logp_difference_max": max(gaps, default=None),  # None: no group had a gradient
    }


def no_learning_warning(
    lines: Sequence[Mapping[str, Any]], batches: BatchSpec, limits: TokenLimits, folder: Path
) -> str:
    """Explain what keeps a run from learning, by its metrics; empty if nothing does."""
    newest = lines[-NO_LEARNING_ITERATIONS:]
    if len(newest) < NO_LEARNING_ITERATIONS or any(line["reward"] is None for line in newest):
        return ""
    names = ("frac_reward_zero_std", "completions/clipped_ratio")
    alike, cut_off = (min(line[name] for line in newest) for name in names)
    length = max(line["completions/mean_length"] for line in newest)
    found, causes = [], []
    if alike >= EXTREME_SHARE and not batches.keeps_zero_advantages:
        found.append(f"the rewards of a group are equal in {alike:.0%} of the groups")
        causes.append("the problems are too easy or too hard for the model")
        causes.append("the reward does not find the answers (their form, the data's columns)")
        causes.append("a group's completions are alike (rollout.temperature)")
    if cut_off >= EXTREME_SHARE:
        limit = limits.max_completion_length
        found.append(f"{cut_off:.0%} of the completions are cut off after {limit} tokens")
        causes.append("rollout.max_completion_length is too low")
        causes.append("the model does not end its answers (data.chat, rollout.stop)")
    if length <= EXTREME_LENGTH:
        found.append(f"completions have {length:.1f} tokens")
        causes.append("the prompts lack the model's format (data.chat)")
    if not found:
        return ""
    first, last = newest[0]["iteration"], newest[-1]["iteration"]
    return (
        f"warning: the run may learn nothing: in iterations {first} to {last} "
        f"{', and '.join(found)} (reward {newest[-1]['reward']:.3f})\n"
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
    without = [
        sample
        for sample in scored
        if not sample.rewards["code"] and find_program(final_text(sample.completion)) is None
    ]
    if len(without) <= MANY_WITHOUT_PROGRAM * len(scored):
        return ""
    num_cut_off = sum(sample.truncated for sample in without)
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


def best_of(lines: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the metrics with the highest held-out accuracy, the first of equals; or nothing."""
    measured = [line for line in lines if line.get("eval/accuracy") is not None]
    return max(measured, key=lambda line: line["eval/accuracy"], default={})


def overlap(lines: Collection[Mapping[str, Any]]) -> float:
    """Return the share (0 to 1) of the shorter of generating and training that overlapped."""
    infer, train, weights, wall = (
        sum(line.get(f"perf/{name}_seconds") or 0.0 for line in lines)
        for name in (*BUSY, "iteration")
    )
    hidden, shorter = infer + train + weights - wall, min(infer, train)
    return min(1.0, max(0.0, hidden / shorter)) if shorter > 0 else 0.0


class Balance:
    """Measure which side waits for the other, over the last iterations without their evaluations:

    share of waiting = 1 - (busy + weight exchange) / duration               mean of each side
    balanced number  = busy seconds of all engines / busy seconds of a train worker

    With that number of engines, generating the groups takes as long as training on them. A
    fraction below 1/4 is rounded down: such an engine would mostly wait.
    """

    def __init__(self, max_engines: int) -> None:
        self._max_engines = max_engines
        self._iterations: deque[tuple[float, ...]] = deque(maxlen=BALANCED_ITERATIONS)

    def add(self, ledger: Ledger, seconds: Mapping[str, float], num_engines: int) -> None:
        assert ledger.trained is not None
        engines, train = sum(ledger.engine_seconds.values()), ledger.trained.busy_seconds
        duration, weights = seconds["perf/iteration_seconds"], seconds["perf/weights_seconds"]
        mean = engines / num_engines
        self._iterations.append((duration, engines, train, mean + weights, train + weights))

    def clear(self) -> None:
        self._iterations.clear()

    def waiting(self) -> dict[str, float | None]:
        """Each side's share of waiting; None before anything is known."""
        if not self._iterations:
            return {"rollout": None, "train": None}
        seconds, _, _, rollout, train = map(sum, zip(*self._iterations, strict=True))
        shares = {"rollout": 1.0 - rollout / seconds, "train": 1.0 - train / seconds}
        return {side: max(0.0, share) for side, share in shares.items()}

    def num_engines(self) -> int | None:
        train = sum(iteration[2] for iteration in self._iterations)
        engines = sum(iteration[1] for iteration in self._iterations)
        if train == 0.0:
            return None
        return min(max(1, math.ceil(engines / train - 0.25)), self._max_engines)


def is_correct(rewards: npt.ArrayLike, bound: float) -> npt.NDArray[np.bool_]:
    """Return whether each reward reaches `bound`; NaN does not."""
    return np.asarray(rewards, dtype=np.float64) >= bound - TOLERANCE


def mean_and_error(of_problems: npt.ArrayLike) -> tuple[float, float]:
    """The mean of the problems' means [N] and its standard error (n - 1); NaN where undefined."""
    means = np.asarray(of_problems, dtype=np.float64)
    if not len(means):
        return math.nan, math.nan
    error = float(means.std(ddof=1)) / math.sqrt(len(means)) if len(means) > 1 else math.nan
    return float(means.mean()), error


def evaluation_metrics(
    answers: Iterable[events.PromptEvaluated], correct_reward: float
) -> tuple[dict[str, float], int]:
    """Metrics over the held-out problems, and the number of problems that have rewards."""
    # Events come in order of arrival: sort, so that sums do not depend on it.
    ordered = sorted(answers, key=lambda answer: answer.prompt_index)
    of_all = [[sample.reward for sample in answer.samples] for answer in ordered]
    rewards = np.array(of_all, dtype=np.float64)  # [N, S]
    rewards = rewards[~np.isnan(rewards).any(axis=1)]
    accuracy, error = mean_and_error(is_correct(rewards, correct_reward).mean(axis=1))
    reward, _ = mean_and_error(rewards.mean(axis=1))
    metrics = {"eval/accuracy": accuracy, "eval/standard_error": error, "eval/reward": reward}
    return metrics, len(rewards)
