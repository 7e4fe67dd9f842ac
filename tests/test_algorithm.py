"""Advantages, loss, learning rate and log-probabilities against numbers worked out by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from easyrl.algorithm.advantages import group_advantages
from easyrl.algorithm.losses import LossInputs, grpo_loss
from easyrl.algorithm.schedule import learning_rate_factor
from easyrl.model.logprobs import token_logprobs

torch.set_num_threads(1)


def rewards(*values):
    return np.array(values, dtype=np.float32)


# -- advantages -----------------------------------------------------------------------------------


def test_advantages_are_scaled_by_the_sample_standard_deviation():
    # Mean 0.25; squares 3 * 0.0625 + 0.5625 = 0.75; divided by n - 1 = 3: 0.25, whose root is 0.5.
    got = group_advantages(rewards(0, 0, 0, 1), "group")
    np.testing.assert_allclose(got, np.array([-0.25, -0.25, -0.25, 0.75]) / 0.5001, rtol=1e-6)
    assert got.dtype == np.float32


def test_advantages_without_scaling_are_differences_from_the_mean():
    got = group_advantages(rewards(1, 2, 6), "none")
    np.testing.assert_array_equal(got, rewards(-2, -1, 3))


def test_two_rewards_give_opposite_advantages():
    # Mean 0.5, sample standard deviation sqrt(0.5).
    expected = 0.5 / (math.sqrt(0.5) + 1e-4)
    got = group_advantages(rewards(1, 0), "group")
    np.testing.assert_allclose(got, [expected, -expected], rtol=1e-6)


@pytest.mark.parametrize("scale", ["group", "none"])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -1e6, 1e-8])
def test_equal_rewards_have_no_advantage_at_all(scale, value):
    """Exactly zero: a rounding error over a tiny deviation would be a loud one."""
    got = group_advantages(rewards(*[value] * 7), scale)
    assert not got.any() and got.dtype == np.float32


@given(
    st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=16),
    st.floats(-50, 50, width=32),
)
def test_advantages_sum_to_zero_and_do_not_move_with_the_rewards(values, shift):
    got = group_advantages(rewards(*values), "none")
    assert abs(got.astype(np.float64).sum()) <= 1e-4
    moved = group_advantages((rewards(*values) + np.float32(shift)).astype(np.float32), "none")
    np.testing.assert_allclose(moved, got, atol=1e-4)


# -- loss -----------------------------------------------------------------------------------------


def loss_of(ratios, advantages, *, mask=None, completion_of_token=None, low=0.2, high=0.3):
    """The loss at these probability ratios, and its gradient by log-probability."""
    old = torch.linspace(-3.0, -0.1, len(ratios))
    logprobs = (old + torch.tensor(ratios).log()).requires_grad_()
    completions = completion_of_token or [0] * len(ratios)
    outputs = grpo_loss(
        LossInputs(
            logprobs=logprobs,
            old_logprobs=old,
            advantages=torch.tensor(advantages),
            loss_mask=torch.tensor(mask or [True] * len(ratios)),
            completion_of_token=torch.tensor(completions),
            num_completions=max(completions) + 1,
        ),
        epsilon=low,
        epsilon_high=high,
    )
    outputs.loss.backward()
    counts = (outputs.num_clipped_low, outputs.num_clipped_high, outputs.num_tokens)
    return outputs.loss.item(), logprobs.grad.tolist(), tuple(map(int, counts))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, (0, 0)),
        (1.0, -2.0, 2.0, 2.0, (0, 0)),
        (1.2, 2.0, -2.4, -2.4, (0, 0)),  # inside 1 + epsilon_high
        (1.5, 2.0, -2.6, 0.0, (0, 1)),  # clipped at 1.3: no gradient
        (1.5, -2.0, 3.0, 3.0, (0, 0)),  # never clipped upward for a negative advantage
        (0.9, -2.0, 1.8, 1.8, (0, 0)),  # inside 1 - epsilon
        (0.5, -2.0, 1.6, 0.0, (1, 0)),  # clipped at 0.8: no gradient
        (0.5, 2.0, -1.0, -1.0, (0, 0)),  # never clipped downward for a positive advantage
        (3.0, 0.0, 0.0, 0.0, (0, 0)),
    ],
)
def test_one_token(ratio, advantage, loss, gradient, clipped):
    got_loss, got_gradient, counts = loss_of([ratio], [advantage])
    assert got_loss == pytest.approx(loss, rel=1e-5)
    assert got_gradient[0] == pytest.approx(gradient, rel=1e-5)
    assert counts == (*clipped, 1)


def test_ragged_completions_are_averaged_over_their_own_tokens():
    # First: (-1.0 - 1.2 - 0.9) / 3; second, of one token: +2; third: (-0.5 - 0.5) / 2.
    loss, gradient, _ = loss_of(
        [1.0, 1.2, 0.9, 1.0, 1.0, 1.0],
        [1.0, 1.0, 1.0, -2.0, 0.5, 0.5],
        completion_of_token=[0, 0, 0, 1, 2, 2],
    )
    assert loss == pytest.approx(-3.1 / 3 + 2.0 - 0.5, rel=1e-5)
    assert gradient == pytest.approx([-1 / 3, -1.2 / 3, -0.9 / 3, 2.0, -0.25, -0.25], rel=1e-5)


def test_the_tokens_of_a_completion_need_not_stand_together():
    together = loss_of([1.0, 1.1, 0.9], [1.0, 1.0, -1.0], completion_of_token=[0, 0, 1])
    apart = loss_of([1.0, 0.9, 1.1], [1.0, -1.0, 1.0], completion_of_token=[0, 1, 0])
    assert together[0] == pytest.approx(apart[0], rel=1e-6)


def test_masked_tokens_are_neither_averaged_nor_counted():
    loss, gradient, counts = loss_of(
        [1.0, 9.0, 0.1, 1.2],
        [1.0, 1.0, -1.0, -1.0],
        mask=[True, False, False, True],
        completion_of_token=[0, 0, 1, 1],
    )
    assert loss == pytest.approx(-1.0 + 1.2, rel=1e-5)
    assert gradient == pytest.approx([-1.0, 0.0, 0.0, 1.2], rel=1e-5)
    assert counts == (0, 0, 2)


def test_a_completion_that_is_all_masked_adds_nothing():
    loss, gradient, counts = loss_of(
        [1.0, 1.1, 1.1], [1.0, 5.0, 5.0], mask=[True, False, False], completion_of_token=[0, 1, 1]
    )
    assert loss == pytest.approx(-1.0) and gradient == pytest.approx([-1.0, 0, 0])
    assert counts == (0, 0, 1)


@pytest.mark.parametrize("old", [math.nan, -math.inf, -1e4])
def test_what_stands_at_a_masked_token_does_not_matter(old):
    """A tool's token may be one that the policy would never have sampled."""
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    outputs = grpo_loss(
        LossInputs(
            logprobs=logprobs,
            old_logprobs=torch.tensor([-1.0, old]),
            advantages=torch.tensor([1.0, 1.0]),
            loss_mask=torch.tensor([True, False]),
            completion_of_token=torch.tensor([0, 0]),
            num_completions=1,
        ),
        epsilon=0.2,
        epsilon_high=0.2,
    )
    outputs.loss.backward()
    assert outputs.loss.item() == pytest.approx(-1.0)
    assert logprobs.grad.tolist() == [-1.0, 0.0]


def test_on_policy_the_loss_is_minus_the_sum_of_advantages():
    loss, _, counts = loss_of([1.0] * 5, [0.5, 0.5, -2, 1, 1], completion_of_token=[0, 0, 1, 2, 2])
    assert loss == pytest.approx(-(0.5 - 2 + 1)) and counts[:2] == (0, 0)


def test_a_micro_batch_is_the_sum_of_its_halves():
    ratios, advantages = [1.0, 1.4, 0.6, 1.1], [1.0, 1.0, -1.0, -1.0]
    whole, _, counts = loss_of(ratios, advantages, completion_of_token=[0, 0, 1, 1])
    first, _, counts_first = loss_of(ratios[:2], advantages[:2])
    second, _, counts_second = loss_of(ratios[2:], advantages[2:])
    assert whole == pytest.approx(first + second, rel=1e-6)
    assert counts == tuple(np.add(counts_first, counts_second)) == (1, 1, 4)


# -- learning rate --------------------------------------------------------------------------------


def factors(kind, num_iterations, warmup_iterations=0):
    return [
        learning_rate_factor(
            iteration,
            num_iterations=num_iterations,
            warmup_iterations=warmup_iterations,
            kind=kind,
        )
        for iteration in range(num_iterations)
    ]


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
def test_the_course_of_the_learning_rate(kind, warmup, expected):
    assert factors(kind, 4, warmup) == pytest.approx(expected)


@given(st.sampled_from(["constant", "linear", "cosine"]), st.integers(1, 60), st.integers(0, 70))
def test_the_learning_rate_rises_then_falls_and_never_stops_a_run(kind, num_iterations, warmup):
    course = factors(kind, num_iterations, warmup)
    assert all(0.0 < factor <= 1.0 for factor in course)
    assert course[:warmup] == sorted(course[:warmup])
    assert course[warmup:] == sorted(course[warmup:], reverse=True)


# -- log-probabilities ----------------------------------------------------------------------------


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


def test_logprobs_are_float32_whatever_the_logits_are():
    logits = torch.randn(3, 7).to(torch.bfloat16)
    logprobs, entropy = token_logprobs(logits, torch.tensor([0, 6, 3]), 1.0)
    assert logprobs.dtype == entropy.dtype == torch.float32
    expected = torch.log_softmax(logits.float(), -1)[torch.arange(3), torch.tensor([0, 6, 3])]
    torch.testing.assert_close(logprobs, expected)


def test_an_impossible_token_leaves_the_entropy_finite():
    _, entropy = token_logprobs(torch.tensor([[0.0, 0.0, -math.inf]]), torch.tensor([0]), 1.0)
    assert float(entropy) == pytest.approx(math.log(2))


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 5), st.integers(2, 40), st.floats(0.2, 3.0), st.integers(0, 2**31))
def test_logprobs_agree_with_torch_categorical(num_tokens, vocabulary, temperature, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_tokens, vocabulary, generator=generator) * 4
    targets = torch.randint(vocabulary, (num_tokens,), generator=generator)
    distribution = torch.distributions.Categorical(logits=logits / temperature)
    logprobs, entropy = token_logprobs(logits, targets, temperature)
    torch.testing.assert_close(logprobs, distribution.log_prob(targets), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(entropy, distribution.entropy(), rtol=1e-4, atol=1e-5)
