"""The figures of an evaluation, and their comparison with those of another one.

Shapes: N problems, S samples of each. Problems are the unit of every standard error, because
samples of one problem are correlated (Miller, arXiv 2411.00640, sections 2.1 and 2.2).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import comb
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from easyrl.config import ConfigError
from easyrl.runtime.metrics import is_correct, mean_and_error

Bools = npt.NDArray[np.bool_]
Lines = Sequence[Mapping[str, Any]]  # the lines of `samples.jsonl` for one problem: [S]
Answers = Mapping[str, Lines]  # by problem
NUM_RESAMPLES = 99_999
"""All 2^n sign flips are counted for up to 16 problems that differ; above, this many are drawn."""
SAME_SIZE = 1e-12  # differences of the same size differ by less, from rounding
ROUNDING = 1e-9  # of a sum of differences


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Estimate the probability that one of `k` is correct (arXiv 2107.03374, equation 1)."""
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def rewards_of(answers: Iterable[Lines]) -> npt.NDArray[np.float64]:
    """Return the rewards [N, S] of the problems that have all of them: no reward call failed."""
    table = []
    for lines in answers:
        rewards = [line["reward"] for line in lines]
        is_complete = None not in rewards
        if is_complete:
            table.append(rewards)
    return np.array(table, dtype=np.float64)


def summarize(answers: Sequence[Lines], correct_reward: float) -> dict[str, Any]:
    """Return the figures of `eval.json`: means over problems, and over all completions."""
    rewards = rewards_of(answers)  # [N, S]
    about_samples = _summarize_samples(answers, num_problems=len(rewards))
    if not len(rewards):
        return {"accuracy": None, "standard_error": None, **about_samples}
    correct = is_correct(rewards, correct_reward)  # [N, S]
    accuracy, error = mean_and_error(correct.mean(axis=1))
    reward, reward_error = mean_and_error(rewards.mean(axis=1))
    return {
        "accuracy": accuracy,
        "standard_error": error,
        "pass_at_k": _pass_at_every_k(correct),
        "reward": reward,
        "reward_standard_error": reward_error,
        "rewards": _mean_scores(answers),
        **about_samples,
    }


def _summarize_samples(answers: Sequence[Lines], *, num_problems: int) -> dict[str, Any]:
    """Return counts and lengths. `num_problems`: of those that have all rewards."""
    lengths = []
    inserted = []
    truncated = []
    for line in chain.from_iterable(answers):
        lengths.append(line["length"])
        # An evaluation that an older version began has lines without it.
        inserted.append(line.get("inserted_tokens", 0))
        truncated.append(line["truncated"])
    return {
        "num_problems": num_problems,
        "num_skipped": len(answers) - num_problems,  # their reward calls failed
        "completion_tokens": sum(lengths),  # sampled
        "inserted_tokens": sum(inserted),
        "mean_completion_length": float(np.mean(lengths)),
        "mean_inserted_length": float(np.mean(inserted)),
        "truncated_share": float(np.mean(truncated)),
    }


def _pass_at_every_k(correct: Bools) -> dict[str, float]:
    """Return pass@k, the mean over problems, for each k up to the number of samples."""
    num_samples = correct.shape[1]
    counts: list[int] = correct.sum(axis=1).tolist()
    means = {}
    for k in range(1, num_samples + 1):
        of_problems = [pass_at_k(num_samples, count, k) for count in counts]
        means[str(k)] = float(np.mean(of_problems))
    return means


def _mean_scores(answers: Sequence[Lines]) -> dict[str, float]:
    """Return the mean score of each reward function over the completions it applies to."""
    scores: dict[str, list[float]] = {}
    for lines in answers:
        if len(rewards_of([lines])) == 0:
            continue
        for line in lines:
            for name, score in line["rewards"].items():
                of_function = scores.setdefault(name, [])
                if score is not None:  # None: the function does not apply
                    of_function.append(score)
    return {name: float(np.mean(values)) for name, values in scores.items() if values}


class Comparison(NamedTuple):
    figures: dict[str, Any]  # of the problems that both evaluations have
    problems: Sequence[Mapping[str, Any]]  # a line for each, the largest differences first


def compare(here: Answers, there: Answers, correct_reward: float) -> Comparison:
    """Compare the answers of two evaluations.

    Problems are matched by their ids (`data.datasets.problem_ids`); if all prompts differ, by
    number, where all answers are the same. Those with missing samples or rewards are left out.
    Raises ConfigError if none is left.
    """
    if not here.keys() & there.keys():
        here, there = _by_number(here, there)
    own = _complete_rewards(here)
    other = _complete_rewards(there)
    common = [problem for problem in own if problem in other]
    if not common:
        expected = "expected an evaluation on the same problems"
        raise ConfigError(f"compare (--compare): {expected}, got one without a common problem")
    own_rewards = np.array([own[problem] for problem in common])  # [N, S]
    other_rewards = np.array([other[problem] for problem in common])  # [N, T]
    own_correct = is_correct(own_rewards, correct_reward)
    other_correct = is_correct(other_rewards, correct_reward)
    own_means = own_correct.mean(axis=1)  # [N]
    other_means = other_correct.mean(axis=1)  # [N]
    means = {
        "accuracy": own_means,
        "other_accuracy": other_means,
        "reward": own_rewards.mean(axis=1),
        "other_reward": other_rewards.mean(axis=1),
    }
    figures: dict[str, Any] = {"num_problems": len(common)}
    for name, values in means.items():
        figures[name], figures[f"{name}_standard_error"] = mean_and_error(values)
    figures |= paired(own_correct, other_correct)

    problems = []
    largest_first = np.argsort(-np.abs(own_means - other_means), kind="stable")
    for number in largest_first:
        problem = common[number]
        line = {
            "problem": problem,
            "prompt": here[problem][0]["prompt"],
            "accuracy": float(own_means[number]),
            "other_accuracy": float(other_means[number]),
        }
        problems.append(line)
    return Comparison(figures, problems)


def _complete_rewards(answers: Answers) -> dict[str, npt.NDArray[np.float64]]:
    """Return the rewards [S] by problem, of the problems that have all samples and rewards."""
    num_samples = max(map(len, answers.values()), default=0)
    complete = {}
    for problem, lines in answers.items():
        has_all_samples = len(lines) == num_samples
        rewards = rewards_of([lines])  # [1, S], or empty
        if has_all_samples and len(rewards) == 1:
            complete[problem] = rewards[0]
    return complete


class _BothAnswers(NamedTuple):
    here: Answers
    there: Answers


def _by_number(here: Answers, there: Answers) -> _BothAnswers:
    """Match problems by their number in the data, if the answers of all of them are known and the
    same; else return them as they are."""
    numbered = _BothAnswers(_with_numbers(here), _with_numbers(there))
    for number, lines in numbered.here.items():
        if number in numbered.there:
            answer = lines[0].get("answer")
            other = numbered.there[number][0].get("answer")
            if answer is None or answer != other:
                return _BothAnswers(here, there)
    return numbered


def _with_numbers(answers: Answers) -> Answers:
    return {str(lines[0].get("prompt_index")): lines for lines in answers.values()}


def paired(first: Bools, second: Bools) -> dict[str, Any]:
    """Compare correct answers to the same problems in the same order: [N, S] and [N, T]. Figures
    are those of the first minus those of the second.

    The standard error is that of the problems' differences (arXiv 2411.00640, section 4.2).
    """
    differences = first.mean(axis=1) - second.mean(axis=1)  # [N]
    difference, error = mean_and_error(differences)
    test = sign_flip_test(differences)
    how = "exact" if test.is_exact else f"{NUM_RESAMPLES:,} random sign flips"
    return {
        "difference": difference,
        "standard_error": error,
        "p_value": test.p_value,
        "num_better": int((differences > 0).sum()),
        "num_worse": int((differences < 0).sum()),
        "test": f"two-sided sign-flip permutation test over problems, {how}",
    }


class SignFlipTest(NamedTuple):
    p_value: float
    is_exact: bool  # all sign flips were counted


def sign_flip_test(differences: npt.NDArray[np.float64]) -> SignFlipTest:
    """Make the two-sided sign-flip permutation test of the problems' differences [N].

    If the two models were alike, each difference could as well have the opposite sign. If all have
    one size, as with one sample per problem, this is McNemar's exact test.
    """
    nonzero = differences[differences != 0]
    n = len(nonzero)
    if n == 0:
        return SignFlipTest(1.0, is_exact=True)
    have_same_size = np.ptp(np.abs(nonzero)) < SAME_SIZE
    if have_same_size:
        return SignFlipTest(_mcnemar(nonzero), is_exact=True)
    is_exact = 2**n <= NUM_RESAMPLES
    total = nonzero.sum()
    sums = []
    for flip in _flips(n, is_exact=is_exact):
        sums.append(total - 2 * (flip @ nonzero))
    is_as_large = np.abs(sums) > abs(total) - ROUNDING
    return SignFlipTest(float(np.mean(is_as_large)), is_exact)


def _mcnemar(differences: npt.NDArray[np.float64]) -> float:
    """Return the p-value for differences of one size, whose sum depends on the number of positive
    ones alone."""
    n = len(differences)
    is_positive = differences > 0
    num_positive = int(is_positive.sum())
    num_negative = n - num_positive
    num_ways = 0  # to get no more signs of the rarer kind
    for k in range(min(num_positive, num_negative) + 1):
        num_ways += comb(n, k)
    num_outcomes: int = 2**n
    return min(1.0, 2 * num_ways / num_outcomes)


def _flips(n: int, *, is_exact: bool) -> Iterator[npt.NDArray[Any]]:
    """Yield which of `n` signs are flipped, 0 or 1 each: all ways, or random ones."""
    if is_exact:
        for number in range(2**n):
            yield number >> np.arange(n) & 1
        return
    yield np.zeros(n)  # the observed signs count among random ones (arXiv 1603.05766)
    rng = np.random.default_rng(0)
    for _ in range(NUM_RESAMPLES):
        yield rng.integers(2, size=n)
