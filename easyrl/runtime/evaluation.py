"""Problems to the rollout workers, and their answers back.

    dispatcher ──Evaluate──► rollout workers ──PromptEvaluated──► answers_to ──► who asked

In a run between two iterations, and in `easyrl eval`. Workers answer with the weights that they
have. Neither the position in the data nor a random state of the training changes: each completion's
random stream depends on round, problem and sample alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from easyrl import events
from easyrl.runtime.dispatch import Dispatcher
from easyrl.runtime.supervisor import Worker
from easyrl.types import Prompt

BEFORE, AFTER = 0, 1
"""Rounds of a run; that after its n-th iteration, which is not the last, is AFTER + n."""

TOLERANCE = 1e-6
"""Rewards are sums in float32: a reward below the bound by less than this reaches it."""


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


@dataclass(frozen=True, slots=True)
class HeldOut:
    """How many held-out problems were answered correctly."""

    accuracy: float
    standard_error: float
    reward: float
    num_problems: int  # without those whose reward call failed

    @classmethod
    def of(cls, answers: Sequence[events.PromptEvaluated], correct_reward: float) -> HeldOut:
        """Means over the problems' means; NaN where no answer has rewards."""
        # Events come in order of arrival: sort, so that sums do not depend on it.
        ordered = sorted(answers, key=lambda answer: answer.prompt_index)
        rewards = np.array([answer.rewards for answer in ordered], dtype=np.float64)  # [N, S]
        rewards = rewards[~np.isnan(rewards).any(axis=1)]
        accuracy, error = mean_and_error(is_correct(rewards, correct_reward).mean(axis=1))
        return cls(accuracy, error, mean_and_error(rewards.mean(axis=1))[0], len(rewards))

    def metrics(self) -> dict[str, float]:
        return {
            "eval/accuracy": self.accuracy,
            "eval/standard_error": self.standard_error,
            "eval/reward": self.reward,
        }


def answers_to(
    prompts: Sequence[Prompt],
    dispatcher: Dispatcher,
    next_event: Callable[[], tuple[Worker, events.WorkerEvent]],
    *,
    round_: int,
    num_samples: int = 1,
    with_texts: bool = False,
) -> Iterator[events.PromptEvaluated]:
    """Have problems answered by whichever worker is free; yield the answers as they arrive."""
    dispatcher.start_evaluation(round_, prompts, num_samples=num_samples, with_texts=with_texts)
    for _ in prompts:
        worker, event = next_event()
        assert isinstance(event, events.PromptEvaluated) and event.evaluation_round == round_
        dispatcher.on_group(worker)
        yield event
