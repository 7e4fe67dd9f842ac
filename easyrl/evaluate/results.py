"""The figures of an evaluation, computed from its scored answers.

Shapes: N problems, S samples of each. Problems are the unit of every standard error, because
samples of one problem are correlated (Miller, "Adding Error Bars to Evals", arXiv 2411.00640,
sections 2.1 and 2.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from easyrl.runtime.evaluation import is_correct, mean_and_error

Bools = npt.NDArray[np.bool_]


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that one of `k` samples is correct: 1 - C(n - c, k) / C(n, k), which is unbiased
    (arXiv 2107.03374, equation 1)."""
    assert 0 <= num_correct <= num_samples and 1 <= k <= num_samples
    if num_samples - num_correct < k:
        return 1.0
    terms = np.arange(num_samples - num_correct + 1, num_samples + 1)
    return float(1.0 - np.prod(1.0 - k / terms))


def pass_at_every_k(correct: Bools) -> list[float]:
    """Mean over the problems of `correct` [N, S] for k = 1 … S."""
    num_samples = correct.shape[1]
    num_problems = np.bincount(correct.sum(axis=1), minlength=num_samples + 1)  # by correct samples
    return [
        sum(
            int(count) * pass_at_k(num_samples, num_correct, k)
            for num_correct, count in enumerate(num_problems)
            if count
        )
        / len(correct)
        for k in range(1, num_samples + 1)
    ]


def avg_at_every_k(correct: Bools) -> list[float]:
    """Mean over the problems and the first k samples of `correct` [N, S] for k = 1 … S."""
    sums = np.cumsum(correct, axis=1).sum(axis=0)
    averages = sums / (len(correct) * np.arange(1, correct.shape[1] + 1))
    return [float(average) for average in averages]


@dataclass(frozen=True, slots=True)
class Answers:
    """What the figures need of the answers to one problem."""

    problem: str
    """Its id (`data.problems.problem_ids`)."""
    rewards: Sequence[float | None]  # [S], None if the reward call failed
    by_function: Sequence[Mapping[str, float | None]]  # [S]
    lengths: Sequence[int]  # [S], in tokens
    truncated: Sequence[bool]  # [S]

    @property
    def is_scored(self) -> bool:
        return None not in self.rewards

    @classmethod
    def of_lines(cls, lines: Sequence[Mapping[str, Any]]) -> Answers:
        """From one problem's lines of `samples.jsonl`."""
        return cls(
            lines[0]["problem"],
            [line["reward"] for line in lines],
            [line["rewards"] for line in lines],
            [line["length"] for line in lines],
            [line["truncated"] for line in lines],
        )


def accuracy_of(answers: Sequence[Answers], correct_reward: float) -> tuple[float, float]:
    """Accuracy and its standard error; NaN where no answer is scored."""
    scored = [answer.rewards for answer in answers if answer.is_scored]
    rewards = np.array(scored, dtype=np.float64)  # [N, S]
    return mean_and_error(is_correct(rewards, correct_reward).mean(axis=1) if scored else [])


def summarize(answers: Sequence[Answers], correct_reward: float) -> dict[str, Any]:
    """The figures of `eval.json`: means over problems, and over all completions."""
    scored = [answer for answer in answers if answer.is_scored]
    lengths = np.array([answer.lengths for answer in answers])
    of_samples: dict[str, Any] = {
        "num_problems": len(scored),
        "num_skipped": len(answers) - len(scored),  # their reward calls failed
        "completion_tokens": int(lengths.sum()),
        "mean_completion_length": float(lengths.mean()),
        "truncated_share": float(np.mean([answer.truncated for answer in answers])),
    }
    if not scored:
        return {"accuracy": None, "standard_error": None, **of_samples}
    rewards = np.array([answer.rewards for answer in scored], dtype=np.float64)  # [N, S]
    correct = is_correct(rewards, correct_reward)
    accuracy, error = mean_and_error(correct.mean(axis=1))
    reward, reward_error = mean_and_error(rewards.mean(axis=1))
    by_function: dict[str, list[float]] = {}
    for scores in (scores for answer in scored for scores in answer.by_function):
        for name, score in scores.items():
            if score is not None:  # None: the function does not apply
                by_function.setdefault(name, []).append(score)
    return {
        "accuracy": accuracy,
        "standard_error": error,
        "pass_at_k": _by_k(pass_at_every_k(correct)),
        "avg_at_k": _by_k(avg_at_every_k(correct)),
        "reward": reward,
        "reward_standard_error": reward_error,
        "rewards": {name: float(np.mean(scores)) for name, scores in by_function.items()},
        **of_samples,
    }


def _by_k(values: Sequence[float]) -> dict[str, float]:
    return {str(k): value for k, value in enumerate(values, start=1)}
