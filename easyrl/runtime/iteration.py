"""Record of one iteration from the workers' events, and its metrics."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from easyrl import events
from easyrl.config import Config
from easyrl.formatting import counted


@dataclass(slots=True)
class IterationRecord:
    """Filled from events while the iteration runs."""

    iteration: int
    groups: list[events.GroupScored] = field(default_factory=list)
    trained: events.IterationTrained | None = None
    weights_seconds: float = 0.0
    first_group_seconds: float = 0.0
    """From the iteration's start to the first group in the ring."""
    num_replacement_rounds: int = 0
    _engine_seconds: dict[str, float] = field(default_factory=dict)

    def add_group(self, worker: str, group: events.GroupScored, seconds: float) -> None:
        """Add a group that `worker` reported, `seconds` after the start of the iteration."""
        if not group.is_rejected and not self.first_group_seconds:
            self.first_group_seconds = seconds
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
    def num_replaced(self) -> int:
        return sum(group.is_rejected for group in self.groups)

    @property
    def num_not_replaced(self) -> int:
        """Unwanted groups that were kept, because no round was left."""
        return sum(group.is_unwanted and not group.is_rejected for group in self.groups)

    @property
    def infer_seconds(self) -> float:
        """Busy time per engine, mean over the engines."""
        return sum(self._engine_seconds.values()) / max(1, len(self._engine_seconds))

    def notes(self, config: Config) -> list[str]:
        """Warnings for the user; the caller shows each text once."""
        notes = []
        if self.num_not_replaced:
            notes.append(
                f"iteration {self.iteration + 1}: no advantage in {self.num_not_replaced} of "
                f"{counted(config.train.prompts_per_iteration, 'group')}, and no round of fresh "
                "prompts is left "
                f"(of {self.num_replacement_rounds}): it counts as 0"
            )
        kept = [group for group in self.groups if not group.is_rejected]
        are_all_truncated = all(g.num_truncated == len(g.completion_lengths) for g in kept)
        if are_all_truncated and config.algorithm.mask_truncated_completions:
            notes.append(
                "warning: an iteration trained nothing: all its completions reached "
                f"rollout.max_completion_length={config.rollout.max_completion_length}, and "
                "algorithm.mask_truncated_completions excludes these; raise the first or set the "
                "second to false (shown once)"
            )
        return notes

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
            "groups_replaced": self.num_replaced,
            "groups_not_replaced": self.num_not_replaced,
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
