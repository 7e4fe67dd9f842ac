"""The figures of an evaluation, and their comparison with those of another one.

Shapes: N problems, S samples of each. Problems are the unit of every standard error, because
samples of one problem are correlated (Miller, arXiv 2411.00640, sections 2.1 and 2.2).
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from math import comb
from typing import Any

import numpy as np
import numpy.typing as npt

from easyrl.config import ConfigError
from easyrl.runtime.metrics import is_correct, mean_and_error

Bools = npt.NDArray[np.bool_]
Lines = Sequence[Mapping[str, Any]]  # the lines of `samples.jsonl` for one problem: [S]
Answers = Mapping[str, Lines]  # by problem
NUM_RESAMPLES = 99_999
"""All 2^n sign flips are counted for up to 16 problems that differ; above, this many are drawn."""


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Estimate the probability that one of `k` is correct (arXiv 2107.03374, equation 1)."""
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def rewards_of(answers: Iterable[Lines]) -> npt.NDArray[np.float64]:
    """The rewards [N, S] of the problems that have all of them: no reward call failed."""
    rewards = [[line["reward"] for line in lines] for lines in answers]
    return np.array([each for each in rewards if None not in each], dtype=np.float64)


def summarize(answers: Sequence[Lines], correct_reward: float) -> dict[str, Any]:
    """The figures of `eval.json`: means over problems, and over all completions."""
    rewards = rewards_of(answers)  # [N, S]
    lengths = [line["length"] for lines in answers for line in lines]
    # An evaluation that an older version began has lines without it.
    inserted = [line.get("inserted_tokens", 0) for lines in answers for line in lines]
    of_samples: dict[str, Any] = {
        "num_problems": len(rewards),
        "num_skipped": len(answers) - len(rewards),  # their reward calls failed
        "completion_tokens": sum(lengths),  # sampled
        "inserted_tokens": sum(inserted),
        "mean_completion_length": float(np.mean(lengths)),
        "mean_inserted_length": float(np.mean(inserted)),
        "truncated_share": float(np.mean([line["truncated"] for each in answers for line in each])),
    }
    if not len(rewards):
        return {"accuracy": None, "standard_error": None, **of_samples}
    correct = is_correct(rewards, correct_reward)
    accuracy, error = mean_and_error(correct.mean(axis=1))
    reward, reward_error = mean_and_error(rewards.mean(axis=1))
    scored = [line["rewards"] for lines in answers if len(rewards_of([lines])) for line in lines]
    by_function = {  # None: the function does not apply
        name: [scores[name] for scores in scored if scores[name] is not None] for name in scored[0]
    }
    num_samples, counts = correct.shape[1], correct.sum(axis=1).tolist()
    solved = {}
    for k in range(1, num_samples + 1):
        solved[str(k)] = float(np.mean([pass_at_k(num_samples, count, k) for count in counts]))
    return {
        "accuracy": accuracy,
        "standard_error": error,
        "pass_at_k": solved,
        "reward": reward,
        "reward_standard_error": reward_error,
        "rewards": {name: float(np.mean(values)) for name, values in by_function.items() if values},
        **of_samples,
    }


def compare(
    here: Answers, there: Answers, correct_reward: float
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the figures, and a line for each common problem, the largest differences first.

    Problems are matched by their ids (`data.datasets.problem_ids`); if all prompts differ, by
    number, where all answers are the same. Those with missing samples or rewards are left out.
    Raises ConfigError if none is left.
    """
    if not here.keys() & there.keys():
        here, there = _by_number(here, there)
    scored = []
    for answers in (here, there):
        whole = max(map(len, answers.values()), default=0)
        of_one = {k: rewards_of([lines]) for k, lines in answers.items() if len(lines) == whole}
        scored.append({k: rewards[0] for k, rewards in of_one.items() if len(rewards)})
    common = [problem for problem in scored[0] if problem in scored[1]]
    if not common:
        expected = "expected an evaluation on the same problems"
        raise ConfigError(f"compare (--compare): {expected}, got one without a common problem")
    correct = [is_correct([each[k] for k in common], correct_reward) for each in scored]
    means = [of_one.mean(axis=1) for of_one in correct]  # [N]
    rewards = [np.array([of_one[k].mean() for k in common]) for of_one in scored]  # [N]
    figures: dict[str, Any] = {"num_problems": len(common)}
    names = ("accuracy", "other_accuracy", "reward", "other_reward")
    for name, values in zip(names, [*means, *rewards], strict=True):
        figures[name], figures[f"{name}_standard_error"] = mean_and_error(values)
    figures |= paired(*correct)
    problems = [
        {
            "problem": common[number],
            "prompt": here[common[number]][0]["prompt"],
            "accuracy": float(means[0][number]),
            "other_accuracy": float(means[1][number]),
        }
        for number in np.argsort(-np.abs(means[0] - means[1]), kind="stable")
    ]
    return figures, problems


def _by_number(here: Answers, there: Answers) -> tuple[Answers, Answers]:
    """Match problems by their place in the data; none if their answers differ or are unknown."""
    both = [{str(e[0].get("prompt_index")): e for e in each.values()} for each in (here, there)]
    answers = [[of_one[k][0].get("answer") for of_one in both] for k in both[0] if k in both[1]]
    is_same_data = all(first == second and first is not None for first, second in answers)
    return (both[0], both[1]) if is_same_data else (here, there)


def paired(first: Bools, second: Bools) -> dict[str, Any]:
    """Compare correct answers to the same problems in the same order: [N, S] and [N, T]. Figures
    are those of the first minus those of the second.

    The standard error is that of the problems' differences (arXiv 2411.00640, section 4.2). The
    p-value is that of the two-sided sign-flip permutation test: if the two models were alike, each
    problem's difference could as well have the opposite sign. If all differences have one size, as
    with one sample per problem, this is McNemar's exact test.
    """
    differences = first.mean(axis=1) - second.mean(axis=1)  # [N]
    difference, error = mean_and_error(differences)
    better, worse = int((differences > 0).sum()), int((differences < 0).sum())
    nonzero = differences[differences != 0]
    n, p_value, is_exact = len(nonzero), 1.0, 2 ** len(nonzero) <= NUM_RESAMPLES
    if n and np.ptp(np.abs(nonzero)) < 1e-12:
        # The sum depends on the number of positive signs alone.
        ways = sum(comb(n, k) for k in range(min(better, worse) + 1))
        p_value, is_exact = min(1.0, ways / 2 ** (n - 1)), True
    elif n:
        flips: Iterable[Any] = (k >> np.arange(n) & 1 for k in range(2**n))
        if not is_exact:  # the observed signs count among random ones (arXiv 1603.05766)
            rng = np.random.default_rng(0)
            flips = chain([np.zeros(n)], (rng.integers(2, size=n) for _ in range(NUM_RESAMPLES)))
        sums = np.array([nonzero.sum() - 2 * (flip @ nonzero) for flip in flips])
        p_value = float(np.mean(np.abs(sums) > abs(nonzero.sum()) - 1e-9))
    how = "exact" if is_exact else f"{NUM_RESAMPLES:,} random sign flips"
    return {
        "difference": difference,
        "standard_error": error,
        "p_value": p_value,
        "num_better": better,
        "num_worse": worse,
        "test": f"two-sided sign-flip permutation test over problems, {how}",
    }
