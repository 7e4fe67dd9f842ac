"""The figures of an evaluation against enumeration and scipy."""

from itertools import combinations, product

import numpy as np
import pytest

from easyrl.evaluation.figures import paired, pass_at_k
from easyrl.runtime.metrics import is_correct


@pytest.mark.parametrize("num_samples", range(1, 8))
def test_pass_at_k_is_the_share_of_choices_with_a_correct_sample(num_samples):
    for num_correct in range(num_samples + 1):
        samples = [True] * num_correct + [False] * (num_samples - num_correct)
        for k in range(1, num_samples + 1):
            choices = [any(choice) for choice in combinations(samples, k)]
            expected = sum(choices) / len(choices)
            assert pass_at_k(num_samples, num_correct, k) == pytest.approx(expected, abs=1e-12)


def by_enumeration(first, second):
    differences = first.mean(axis=1) - second.mean(axis=1)
    observed = abs(differences.sum())
    sums = [abs(np.dot(signs, differences)) for signs in product((1, -1), repeat=len(differences))]
    return float(np.mean(np.array(sums) >= observed - 1e-9))


@pytest.mark.parametrize("samples", [(1, 1), (2, 3), (8, 8), (4, 1)])
def test_paired_test_counts_all_sign_flips(samples):
    rng = np.random.default_rng(2)
    for _ in range(8):
        first, second = (rng.random((9, count)) < 0.5 for count in samples)
        result = paired(first, second)
        assert result["test"].endswith("exact")
        assert result["p_value"] == pytest.approx(by_enumeration(first, second))
        assert paired(second, first)["p_value"] == pytest.approx(result["p_value"])


@pytest.mark.parametrize("samples", [1, 4])
def test_p_values_are_those_of_scipy(samples):
    from scipy import stats

    rng = np.random.default_rng(3)
    for bound in (0.5, 0.42):
        first, second = rng.random((150, samples)) < 0.5, rng.random((150, samples)) < bound
        result, differences = paired(first, second), first.mean(axis=1) - second.mean(axis=1)
        drawn = {"permutation_type": "samples", "n_resamples": 9999, "rng": 1}
        test = stats.permutation_test((differences[differences != 0],), np.sum, **drawn)
        assert result["p_value"] == pytest.approx(test.pvalue, abs=0.02)
        if samples == 1:
            better, worse = result["num_better"], result["num_worse"]
            exact = stats.binomtest(better, better + worse).pvalue
            assert result["p_value"] == pytest.approx(exact, rel=1e-12)


def test_reward_just_below_the_bound_by_rounding_is_correct():
    rewards = np.float32([1.0, 0.1 * 3 + 0.7 - 1e-7, 0.99, np.nan])
    assert is_correct(rewards, 1.0).tolist() == [True, True, False, False]
