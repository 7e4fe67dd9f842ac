"""Metrics of an iteration and of an evaluation from the workers' events; the summary of a run.

Shapes: N groups or problems, G completions of a group, S samples of a problem.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from easyrl import events
from easyrl.config.sections import TrainConfig
from easyrl.runtime.resume import SavedState

LAST_ITERATIONS = 5
"""`reward_first` and `reward_last` are means over this many iterations."""
TOLERANCE = 1e-6
"""Rewards are sums in float32: a reward below the bound by less than this reaches it."""


@dataclass(slots=True)
class IterationRecord:
    """Filled from events while the iteration runs."""

    iteration: int
    groups: list[events.GroupScored] = field(default_factory=list)
    trained: events.IterationTrained | None = None
    weights_seconds: float = 0.0
    num_replacement_rounds: int = 0
    _engine_seconds: dict[str, float] = field(default_factory=dict)

    def add_group(self, worker: str, group: events.GroupScored) -> None:
        self.groups.append(group)
        # Reports of rejected groups can overtake those of groups that wait for a ring slot.
        self._engine_seconds[worker] = max(
            group.busy_seconds, self._engine_seconds.get(worker, 0.0)
        )

    @property
    def num_generated_tokens(self) -> int:
        """Completion tokens, including those of rejected groups."""
        return sum(sum(group.completion_lengths) for group in self.groups)

    @property
    def infer_seconds(self) -> float:
        """Busy time per engine, mean over the engines."""
        return sum(self._engine_seconds.values()) / max(1, len(self._engine_seconds))

    def metrics(self, reward_names: Sequence[str]) -> dict[str, float]:
        """Metrics, with TRL's names where it has one.

        Rewards and lengths cover all generated groups, also rejected ones, as in TRL: they describe
        the policy, not the selection that is trained.
        """
        assert self.trained is not None
        # Events come in order of arrival: sort, so that sums do not depend on it.
        groups = sorted(self.groups, key=lambda group: group.prompt_index)
        lengths = np.concatenate([group.completion_lengths for group in groups])
        return {
            **_reward_metrics([group for group in groups if not group.is_skipped], reward_names),
            "groups_skipped": sum(group.is_skipped for group in groups),
            "groups_replaced": sum(group.is_rejected for group in groups),
            "groups_not_replaced": sum(g.is_unwanted and not g.is_rejected for g in groups),
            "replacement_rounds": self.num_replacement_rounds,
            "reward_errors": sum(len(group.errors) for group in groups),
            "completions/mean_length": float(lengths.mean()),
            "completions/min_length": float(lengths.min()),
            "completions/max_length": float(lengths.max()),
            "completions/clipped_ratio": sum(g.num_truncated for g in groups) / lengths.size,
            **self.trained.metrics,
        }

    def logged(self, taken: Collection[str]) -> dict[str, float]:
        """Metrics that reward functions logged (`log_metric`), each averaged over the groups that
        logged it. A name in `taken` gets the prefix `logged/`."""
        values: dict[str, list[float]] = {}
        for group in sorted(self.groups, key=lambda group: group.prompt_index):
            for name, value in group.logged.items():
                values.setdefault(f"logged/{name}" if name in taken else name, []).append(value)
        return {name: float(np.mean(of_name)) for name, of_name in values.items()}


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
        if not np.isnan(scores).all():
            metrics[f"rewards/{name}/mean"] = float(np.nanmean(scores))
            deviations = scores - metrics[f"rewards/{name}/mean"]
            count = max(1, int((~np.isnan(scores)).sum()) - 1)
            metrics[f"rewards/{name}/std"] = math.sqrt(np.nansum(deviations**2) / count)
    return metrics


BUSY = ("infer_seconds", "train_seconds", "weights_seconds")
SUMS = (
    *("_iteration_seconds", *BUSY, "completion_tokens", "generated_tokens"),
    *("groups_trained", "groups_off_policy", "groups_skipped", "groups_replaced"),
    *("groups_not_replaced", "reward_errors", "updates_not_finite"),
)
"""Sums over iterations, as summary.json names them."""


class Totals:
    """Sums over the iterations of a run; a checkpoint keeps them."""

    def __init__(
        self, num_devices: int, started: float, before: Mapping[str, Any] | None = None
    ) -> None:
        """`started`: `time.monotonic` at the command's start. `before`: the `state` of the
        checkpoint that a run resumes from; older versions lack some values."""
        self._num_devices = num_devices
        self._started = started
        self._values: dict[str, Any] = {
            "largest_logp_difference": None,
            "_rewards": [],
            "_earlier_seconds": 0.0,  # of earlier commands
            **dict.fromkeys(SUMS, 0),
            **(before or {}),
        }

    def state(self) -> dict[str, Any]:
        """The sums so far, for JSON."""
        return {**self._values, "_earlier_seconds": self._wall_seconds}

    @property
    def _wall_seconds(self) -> float:
        earlier: float = self._values["_earlier_seconds"]
        return earlier + time.monotonic() - self._started

    def add_iteration(
        self, record: IterationRecord, metrics: Mapping[str, float], seconds: float
    ) -> dict[str, float]:
        """Add a finished iteration with its `metrics`; return its `perf/*` metrics."""
        trained, values = record.trained, self._values
        assert trained is not None
        if not math.isnan(metrics["reward"]):  # NaN: every group was skipped
            values["_rewards"].append(metrics["reward"])
        difference = metrics["sampling/sampling_logp_difference/max"]
        if not math.isnan(difference):  # NaN: no group had a gradient
            largest = values["largest_logp_difference"] or 0.0
            values["largest_logp_difference"] = max(difference, largest)
        added = {
            "_iteration_seconds": seconds,
            "infer_seconds": record.infer_seconds,
            "train_seconds": trained.busy_seconds,
            "weights_seconds": record.weights_seconds,
            "completion_tokens": trained.completion_tokens,
            "generated_tokens": record.num_generated_tokens,
            "groups_trained": trained.groups_trained,
            "groups_off_policy": trained.groups_off_policy,
            "updates_not_finite": int(metrics["num_updates_not_finite"]),
        }
        for name in SUMS:
            values[name] += added[name] if name in added else metrics[name]
        tokens_per_second = trained.completion_tokens / seconds
        return {
            "num_tokens": values["completion_tokens"],
            "num_generated_tokens": values["generated_tokens"],
            "perf/iteration_seconds": seconds,
            **{f"perf/{name}": added[name] for name in BUSY},
            "perf/tokens_per_second": tokens_per_second,
            "perf/tokens_per_second_per_device": tokens_per_second / self._num_devices,
        }

    def summary(
        self, train: TrainConfig, state: SavedState, accuracy_after: float | None, sha256: str
    ) -> dict[str, Any]:
        """The contents of `summary.json`."""
        values = self._values
        first, last = values["_rewards"][:LAST_ITERATIONS], values["_rewards"][-LAST_ITERATIONS:]
        seconds = values["_iteration_seconds"]
        return {
            "iterations": train.iterations,
            "updates_per_iteration": train.updates_per_iteration,  # the first is strictly on-policy
            "policy_version": state.policy_version,
            "wall_seconds": self._wall_seconds,
            "reward_first": sum(first) / len(first) if first else math.nan,
            "reward_last": sum(last) / len(last) if last else math.nan,
            "tokens_per_second_per_device": values["completion_tokens"]
            / seconds
            / self._num_devices,
            "accuracy_before": state.accuracy_before,
            "accuracy_after": accuracy_after,
            "accuracy_best": state.best["accuracy"] if state.best else None,
            "iterations_best": state.best["num_iterations"] if state.best else None,
            "overlap": overlap(**{name: values[name] for name in BUSY}, wall_seconds=seconds),
            **{name: values[name] for name in SUMS if name != "_iteration_seconds"},
            "sampling_logp_difference_max": values["largest_logp_difference"],
            "weights_sha256": sha256,
        }


def overlap(
    *, infer_seconds: float, train_seconds: float, weights_seconds: float, wall_seconds: float
) -> float:
    """Return the share (0 to 1) of the shorter of generating and training that overlapped."""
    hidden = infer_seconds + train_seconds + weights_seconds - wall_seconds
    shorter = min(infer_seconds, train_seconds)
    return min(1.0, max(0.0, hidden / shorter)) if shorter > 0 else 0.0


# -- evaluations ----------------------------------------------------------------------------------


def is_correct(rewards: npt.ArrayLike, bound: float) -> npt.NDArray[np.bool_]:
    """Whether each reward reaches `bound`; NaN does not."""
    correct: npt.NDArray[np.bool_] = np.asarray(rewards, dtype=np.float64) >= bound - TOLERANCE
    return correct


def mean_and_error(of_problems: npt.ArrayLike) -> tuple[float, float]:
    """The mean of the problems' means [N] and its standard error, from the sample variance (n - 1).

    NaN where undefined: the mean of no problem, the error of fewer than two.
    """
    means = np.asarray(of_problems, dtype=np.float64)
    if not len(means):
        return math.nan, math.nan
    error = float(means.std(ddof=1)) / math.sqrt(len(means)) if len(means) > 1 else math.nan
    return float(means.mean()), error


def evaluation_metrics(
    answers: Sequence[events.PromptEvaluated], correct_reward: float
) -> tuple[dict[str, float], int]:
    """Metrics over the held-out problems, and the number of problems that have rewards."""
    # Events come in order of arrival: sort, so that sums do not depend on it.
    ordered = sorted(answers, key=lambda answer: answer.prompt_index)
    rewards = np.array([answer.rewards for answer in ordered], dtype=np.float64)  # [N, S]
    rewards = rewards[~np.isnan(rewards).any(axis=1)]
    accuracy, error = mean_and_error(is_correct(rewards, correct_reward).mean(axis=1))
    reward, _ = mean_and_error(rewards.mean(axis=1))
    metrics = {"eval/accuracy": accuracy, "eval/standard_error": error, "eval/reward": reward}
    return metrics, len(rewards)
