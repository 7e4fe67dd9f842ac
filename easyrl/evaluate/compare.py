"""Compare two evaluations problem by problem.

Problems are matched by their ids (`data.problems.problem_ids`), whatever their order. Problems that
only one of the two evaluations has are counted and left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from easyrl.config import ConfigError
from easyrl.evaluate.folder import RESULTS, SAMPLES, whole_lines
from easyrl.evaluate.results import Bools
from easyrl.runtime.evaluation import is_correct, mean_and_error

TEST = "two-sided sign-flip permutation test over problems"
NUM_RESAMPLES = 99_999
"""All 2^n sign flips are counted for up to 16 problems that differ; above, this many are drawn."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    path: Path
    """The evaluation's folder, or its samples.jsonl."""
    rewards: Mapping[str, Sequence[float]]
    """By problem: [S]."""
    prompts: Mapping[str, str]
    about: Mapping[str, Any]
    """Content of its `eval.json`; empty if there is none."""


def paired(first: Bools, second: Bools) -> dict[str, Any]:
    """Compare correct answers to the same problems in the same order: [N, S] and [N, T]. Figures
    are those of the first minus those of the second.

    The standard error is that of the problems' differences (arXiv 2411.00640, section 4.2). The
    p-value is that of the two-sided sign-flip permutation test: if the two models were alike, each
    problem's difference could as well have the opposite sign. If all differences have one size, as
    with one sample per problem, this is McNemar's exact test.
    """
    assert len(first) == len(second) > 0
    differences = first.mean(axis=1) - second.mean(axis=1)  # [N]
    difference, error = mean_and_error(differences)
    better, worse = int((differences > 0).sum()), int((differences < 0).sum())
    p_value, test = _sign_flip_test(differences[differences != 0], better)
    return {
        "difference": difference,
        "standard_error": error,
        "p_value": p_value,
        "num_better": better,
        "num_worse": worse,
        "num_equal": len(differences) - better - worse,
        "test": f"{TEST}, {test}",
    }


def _sign_flip_test(differences: np.ndarray[Any, Any], num_positive: int) -> tuple[float, str]:
    """The p-value of `differences` [n], all nonzero, and whether it is exact."""
    from scipy import stats

    if not len(differences):
        return 1.0, "exact"
    if np.ptp(np.abs(differences)) < 1e-12:  # the sum depends on the number of positive signs alone
        return float(stats.binomtest(num_positive, len(differences)).pvalue), "exact"
    result = stats.permutation_test(
        (differences, -differences),
        lambda x, y, axis: (x - y).sum(axis=axis),
        vectorized=True,
        permutation_type="samples",
        n_resamples=NUM_RESAMPLES,
        batch=max(1, 4_000_000 // len(differences)),
        rng=0,
    )
    is_exact = 2 ** len(differences) <= NUM_RESAMPLES
    return float(result.pvalue), "exact" if is_exact else f"{NUM_RESAMPLES:,} random sign flips"


def read_evaluation(path: Path) -> Evaluation:
    """Read the evaluation in a folder, or of a `samples.jsonl` or `eval.json`. Problems with
    missing samples or rewards are left out. Raises ConfigError if there is no evaluation."""
    folder = path if path.is_dir() else path.parent
    samples = path if path.suffix == ".jsonl" else folder / SAMPLES
    if not path.exists() or not samples.is_file():
        raise ConfigError(
            "--compare: expected the folder of an evaluation (easyrl eval --output DIR), its "
            f"eval.json or its samples.jsonl, got '{path}', which "
            + (f"has no {SAMPLES}" if path.exists() else "does not exist")
            + ". To evaluate a training run: easyrl eval --model RUN"
        )
    by_problem: dict[str, list[Mapping[str, Any]]] = {}
    for _, line in whole_lines(samples):
        by_problem.setdefault(line["problem"], []).append(line)
    num_samples = max(map(len, by_problem.values()), default=0)
    rewards = {
        problem: [line["reward"] for line in lines]
        for problem, lines in by_problem.items()
        if len(lines) == num_samples and all(line["reward"] is not None for line in lines)
    }
    if not rewards:
        raise ConfigError(f"--compare: expected scored answers in '{samples}', got none")
    prompts = {problem: str(by_problem[problem][0]["prompt"]) for problem in rewards}
    try:
        about = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        about = {}
    return Evaluation(path, rewards, prompts, about)


def compare(
    first: Evaluation, second: Evaluation, correct_reward: float
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the comparison as a whole, and of each common problem, the largest difference first.
    Raises ConfigError if the two have no problem in common."""
    common = [problem for problem in first.rewards if problem in second.rewards]
    if not common:
        raise ConfigError(
            f"--compare: expected an evaluation on the same problems, got '{second.path}', which "
            f"has none of those of '{first.path}'. Problems are the same if their prompts and "
            "columns are"
        )
    correct = [
        is_correct([each.rewards[problem] for problem in common], correct_reward)
        for each in (first, second)
    ]
    means = [of_one.mean(axis=1) for of_one in correct]
    (accuracy, error), (other_accuracy, other_error) = map(mean_and_error, means)
    whole = {
        "with": str(second.path),
        "model": second.about.get("model"),
        "num_problems": len(common),
        "num_only_here": len(first.rewards) - len(common),
        "num_only_there": len(second.rewards) - len(common),
        "accuracy": accuracy,
        "accuracy_standard_error": error,
        "other_accuracy": other_accuracy,
        "other_accuracy_standard_error": other_error,
        **paired(*correct),
    }
    problems = [
        {
            "problem": common[number],
            "prompt": first.prompts[common[number]],
            "accuracy": float(means[0][number]),
            "other_accuracy": float(means[1][number]),
        }
        for number in np.argsort(-np.abs(means[0] - means[1]), kind="stable")
    ]
    return whole, problems
