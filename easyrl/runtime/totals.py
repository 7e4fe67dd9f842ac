"""Sums over a run, and the summary made of them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from easyrl.config.train import TrainConfig
from easyrl.runtime.iteration import IterationRecord

LAST_ITERATIONS = 5
"""`reward_first` and `reward_last` are means over this many iterations."""


class Totals:
    """Sums over the iterations of a run; a checkpoint keeps them."""

    def __init__(
        self, num_devices: int, started: float, before: Mapping[str, Any] | None = None
    ) -> None:
        """`started`: `time.monotonic` at the command's start. `before`: the `state` of the
        checkpoint that a run resumes from."""
        self._num_devices = num_devices
        self._started = started
        self.first_rollout_seconds: float | None = None
        self._rewards: list[float] = []
        self._earlier_seconds = 0.0  # of the run's earlier commands
        self._iteration_seconds = 0.0
        self.weights_seconds = 0.0
        self.completion_tokens = 0
        self.generated_tokens = 0
        self.infer_seconds = 0.0
        self.train_seconds = 0.0
        self.groups_trained = 0
        self.groups_off_policy = 0
        self.largest_logp_difference = math.nan  # until a group has a gradient
        self.updates_not_finite = 0
        self.groups_skipped = 0
        self.groups_replaced = 0
        self.groups_not_replaced = 0
        self.reward_errors = 0
        self._names = vars(self).keys() - {"_num_devices", "_started"}
        if before:
            # A checkpoint of an older version may lack newer sums: they keep their defaults.
            vars(self).update({name: before[name] for name in self._names if name in before})
            if self.largest_logp_difference is None:
                self.largest_logp_difference = math.nan

    def state(self) -> dict[str, Any]:
        """The sums so far, for JSON."""
        state = {name: getattr(self, name) for name in self._names}
        state["_rewards"] = list(self._rewards)
        state["_earlier_seconds"] = self._wall_seconds
        if math.isnan(self.largest_logp_difference):
            state["largest_logp_difference"] = None
        return state

    @property
    def _wall_seconds(self) -> float:
        return self._earlier_seconds + time.monotonic() - self._started

    def note_rollout(self) -> bool:
        """Count a rollout; return whether it is the run's first."""
        if self.first_rollout_seconds is not None:
            return False
        self.first_rollout_seconds = time.monotonic() - self._started
        return True

    def add_iteration(
        self, record: IterationRecord, reward: float, seconds: float
    ) -> dict[str, float]:
        """Add a finished iteration; return its `perf/*` metrics."""
        trained = record.trained
        assert trained is not None
        if not math.isnan(reward):  # NaN: every group was skipped
            self._rewards.append(reward)
        self.groups_skipped += sum(group.is_skipped for group in record.groups)
        self.groups_replaced += record.num_replaced
        self.groups_not_replaced += record.num_not_replaced
        self.reward_errors += sum(len(group.errors) for group in record.groups)
        self._iteration_seconds += seconds
        self.completion_tokens += trained.completion_tokens
        self.generated_tokens += record.num_generated_tokens
        self.infer_seconds += record.infer_seconds
        self.train_seconds += trained.busy_seconds
        self.weights_seconds += record.weights_seconds
        self.groups_trained += trained.groups_trained
        self.groups_off_policy += trained.groups_off_policy
        self.updates_not_finite += int(trained.metrics["num_updates_not_finite"])
        self.largest_logp_difference = float(
            np.fmax(
                self.largest_logp_difference,
                trained.metrics["sampling/sampling_logp_difference/max"],
            )
        )
        return {
            "num_tokens": self.completion_tokens,
            "num_generated_tokens": self.generated_tokens,
            "perf/iteration_seconds": seconds,
            "perf/infer_seconds": record.infer_seconds,
            "perf/train_seconds": trained.busy_seconds,
            "perf/weights_seconds": record.weights_seconds,
            "perf/first_group_seconds": record.first_group_seconds,
            "perf/tokens_per_second": trained.completion_tokens / seconds,
            "perf/tokens_per_second_per_device": (
                trained.completion_tokens / seconds / self._num_devices
            ),
        }

    def summary(
        self,
        train: TrainConfig,
        policy_version: int,
        accuracy_before: float | None,
        accuracy_after: float | None,
        weights_sha256: str,
        *,
        best: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        first, last = self._rewards[:LAST_ITERATIONS], self._rewards[-LAST_ITERATIONS:]
        return {
            "iterations": train.iterations,
            "updates_per_iteration": train.updates_per_iteration,  # the first is strictly on-policy
            "policy_version": policy_version,
            "wall_seconds": self._wall_seconds,
            "first_rollout_seconds": self.first_rollout_seconds,
            "reward_first": sum(first) / len(first) if first else math.nan,
            "reward_last": sum(last) / len(last) if last else math.nan,
            "completion_tokens": self.completion_tokens,
            "generated_tokens": self.generated_tokens,
            "tokens_per_second_per_device": (
                self.completion_tokens / self._iteration_seconds / self._num_devices
            ),
            "accuracy_before": accuracy_before,
            "accuracy_after": accuracy_after,
            "accuracy_best": best["accuracy"] if best else None,
            "iterations_best": best["num_iterations"] if best else None,  # trained before it
            "infer_seconds": self.infer_seconds,
            "train_seconds": self.train_seconds,
            "weights_seconds": self.weights_seconds,
            "overlap": overlap(
                infer_seconds=self.infer_seconds,
                train_seconds=self.train_seconds,
                weights_seconds=self.weights_seconds,
                wall_seconds=self._iteration_seconds,
            ),
            "groups_trained": self.groups_trained,
            "groups_off_policy": self.groups_off_policy,
            "groups_skipped": self.groups_skipped,
            "groups_replaced": self.groups_replaced,
            "groups_not_replaced": self.groups_not_replaced,  # trained, with advantages of 0
            "reward_errors": self.reward_errors,
            "sampling_logp_difference_max": self.largest_logp_difference,
            "updates_not_finite": self.updates_not_finite,
            "weights_sha256": weights_sha256,
        }


def overlap(
    *, infer_seconds: float, train_seconds: float, weights_seconds: float, wall_seconds: float
) -> float:
    """Return the share (0 to 1) of the shorter of generating and training that overlapped."""
    hidden = infer_seconds + train_seconds + weights_seconds - wall_seconds
    shorter = min(infer_seconds, train_seconds)
    return min(1.0, max(0.0, hidden / shorter)) if shorter > 0 else 0.0
