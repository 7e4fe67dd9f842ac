"""The trainer's step, without a run around it."""

import math

import pytest
import torch

from easyrl.config import load_config
from easyrl.model.policy import Policy
from easyrl.workers.learner import Learner


@pytest.fixture
def learner():
    torch.set_num_threads(1)
    config = load_config(words=["train.learning_rate=1e-2", "train.max_grad_norm=1.0"])
    return Learner(Policy.load("tiny"), config)


def step(learner, iteration):
    """The iteration's only update, and its metrics."""
    learner.step(num_completions=1, num_tokens=1)
    metrics = learner.metrics()
    learner.begin_iteration(iteration + 1)
    return metrics


@pytest.mark.parametrize(("what", "poison"), [("gradient", math.inf), ("loss", math.nan)])
def test_a_loss_or_gradient_that_is_not_finite_is_dropped_and_counted(learner, what, poison):
    policy = learner.policy
    before = policy.weights_sha256()
    parameter = next(policy.model.parameters())
    parameter.grad.view(-1)[0] = poison if what == "gradient" else 1.0
    learner._loss += poison if what == "loss" else 0.0
    assert step(learner, 0)["num_updates_not_finite"] == 1
    assert policy.weights_sha256() == before
    assert learner.policy_version == 1  # everything stays in step
    # The next update is a whole one: nothing of the bad one is left.
    parameter.grad.view(-1)[0] = 1.0
    assert step(learner, 1)["num_updates_not_finite"] == 0
    assert policy.weights_sha256() != before
    assert all(bool(p.isfinite().all()) for p in policy.model.parameters())


def test_the_gradient_is_clipped_to_its_norm(learner):
    for parameter in learner.policy.model.parameters():
        parameter.grad.fill_(1.0)
    norm = math.sqrt(learner.policy.model.num_parameters())
    assert step(learner, 0)["grad_norm"] == pytest.approx(norm, rel=1e-4)
