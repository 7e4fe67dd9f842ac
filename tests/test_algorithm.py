"""Advantages, learning rate and log-probabilities against numbers computed by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from easyrl.algorithm.advantages import group_advantages
from easyrl.model.logprobs import token_logprobs
from easyrl.workers.learner import learning_rate_factor

torch.set_num_threads(1)


def rewards(*values):
    return np.array(values, dtype=np.float32)


@pytest.mark.parametrize(
    ("values", "scale", "estimator", "expected"),
    [
        ([1, 2, 6], "none", "group", [-2, -1, 3]),
        # Mean 0.25; squares 3 * 0.0625 + 0.5625 = 0.75; by n - 1 = 3: 0.25, whose root is 0.5.
        ([0, 0, 0, 1], "group", "group", np.array([-0.25, -0.25, -0.25, 0.75]) / 0.5001),
        # 1 - (2 + 6) / 2; 2 - (1 + 6) / 2; 6 - (1 + 2) / 2.
        ([1, 2, 6], "none", "rloo", [-3, -1.5, 4.5]),
        # Exactly zero: a rounding error divided by a tiny deviation would be large.
        *(
            ([value] * 7, scale, estimator, [0] * 7)
            for value in (1.0, 0.1, -1e6, 1e-8)
            for scale in ("group", "none")
            for estimator in ("group", "rloo")
        ),
        # The others' means are 1/3 and 0.
        ([0, 0, 0, 1], "group", "rloo", np.array([-1, -1, -1, 3]) / 3 / 0.5001),
    ],
)
def test_advantages(values, scale, estimator, expected):
    got = group_advantages(rewards(*values), scale, estimator)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=0.0)
    assert got.dtype == np.float32


@given(
    st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=16), st.floats(-50, 50, width=32)
)
def test_advantages_sum_to_zero_and_do_not_move_with_the_rewards(values, shift):
    got = group_advantages(rewards(*values), "none")
    assert abs(got.astype(np.float64).sum()) <= 1e-4
    moved = group_advantages((rewards(*values) + np.float32(shift)).astype(np.float32), "none")
    np.testing.assert_allclose(moved, got, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "warmup", "expected"),
    [
        ("constant", 0, [1, 1, 1, 1]),
        ("constant", 3, [0.25, 0.5, 0.75, 1]),
        ("linear", 0, [1, 0.75, 0.5, 0.25]),
        ("linear", 2, [1 / 3, 2 / 3, 1, 0.5]),
        ("cosine", 0, [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]),
        ("linear", 4, [0.2, 0.4, 0.6, 0.8]),
        ("cosine", 9, [0.1, 0.2, 0.3, 0.4]),  # the run ends before its warm-up does
    ],
)
def test_learning_rate(kind, warmup, expected):
    options = {"num_iterations": 4, "warmup_iterations": warmup, "kind": kind}
    factors = [learning_rate_factor(iteration, **options) for iteration in range(4)]
    assert factors == pytest.approx(expected)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_logprobs_and_entropy_at_a_temperature(temperature):
    # At temperature 1 the first row is 0.2, 0.8; a temperature t raises the ratio 4 to 1/t.
    logits = torch.tensor([[0.2, 0.8], [5.0, 5.0]])
    logits[0] = logits[0].log()
    ratio = 4.0 ** (1 / temperature)
    likely = ratio / (1 + ratio)
    logprobs, entropy = token_logprobs(logits, torch.tensor([1, 0]), temperature)
    np.testing.assert_allclose(logprobs, [math.log(likely), math.log(0.5)], rtol=1e-5)
    expected = -(likely * math.log(likely) + (1 - likely) * math.log(1 - likely))
    np.testing.assert_allclose(entropy, [expected, math.log(2)], rtol=1e-5)


def test_the_gradient_of_a_logprob_is_onehot_minus_probability_over_temperature():
    logits = torch.tensor([[0.2, 0.3, 0.5]]).log().requires_grad_()
    logprobs, entropy = token_logprobs(logits, torch.tensor([1]), 1.0)
    assert not entropy.requires_grad
    logprobs.sum().backward()
    np.testing.assert_allclose(logits.grad, [[-0.2, 0.7, -0.5]], atol=1e-6)
    hot = torch.zeros(1, 2, requires_grad=True)
    token_logprobs(hot, torch.tensor([0]), 4.0)[0].sum().backward()
    np.testing.assert_allclose(hot.grad, [[0.125, -0.125]], atol=1e-6)
