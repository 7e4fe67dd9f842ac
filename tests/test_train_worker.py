"""The trainer's step, without a run around it."""

from __future__ import annotations

import math
import multiprocessing
from typing import Any, cast

import pytest
import torch

from easyrl.config import load_config
from easyrl.workers.settings import WorkerSettings
from easyrl.workers.train import TrainWorker


@pytest.fixture
def worker() -> TrainWorker:
    torch.set_num_threads(1)
    settings = WorkerSettings(
        name="train-0",
        owner_id=0,
        config=load_config(words=["train.learning_rate=1e-2", "train.max_grad_norm=1.0"]),
        device="cpu",
        weights_cross_on_cpu=True,
        num_threads=1,
        max_concurrent_groups=1,
        store_path="",
        log_file=None,
    )
    events, _ = multiprocessing.Pipe()
    return TrainWorker(settings, cast(Any, None), events)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_dropped_and_counted(
    worker: TrainWorker, poison: float
) -> None:
    before = worker.policy.weights_sha256()
    parameter = next(worker.policy.model.parameters())
    parameter.grad.view(-1)[0] = poison
    metrics = worker._step(0, torch.tensor(0.5))
    assert metrics["num_updates_not_finite"] == 1
    assert worker.policy.weights_sha256() == before
    assert worker.policy_version == 1  # everything stays in step
    # The next update is a whole one: nothing of the bad one is left.
    parameter.grad.view(-1)[0] = 1.0
    assert worker._step(1, torch.tensor(0.5))["num_updates_not_finite"] == 0
    assert worker.policy.weights_sha256() != before
    assert all(bool(p.isfinite().all()) for p in worker.policy.model.parameters())


def test_a_loss_that_is_not_finite_is_dropped_and_counted(worker: TrainWorker) -> None:
    before = worker.policy.weights_sha256()
    next(worker.policy.model.parameters()).grad.view(-1)[0] = 1.0
    assert worker._step(0, torch.tensor(math.nan))["num_updates_not_finite"] == 1
    assert worker.policy.weights_sha256() == before


def test_the_gradient_is_clipped_to_its_norm(worker: TrainWorker) -> None:
    for parameter in worker.policy.model.parameters():
        parameter.grad.fill_(1.0)
    norm = math.sqrt(worker.policy.model.num_parameters())
    assert worker._step(0, torch.tensor(0.5))["grad_norm"] == pytest.approx(norm, rel=1e-4)
