"""Cores of a worker that waits serve workers of the other role; freed memory is kept."""

import os

import pytest
import torch

from easyrl import processes
from easyrl.config import load_config
from easyrl.runtime.placement import resolve_placement
from easyrl.workers import core_sharing
from easyrl.workers.core_sharing import CoreSharing, WorkerCores, make_idle_board
from own_workers import spawned_settings


def test_a_worker_uses_the_cores_of_idle_workers_and_gives_them_back(monkeypatch):
    board, asked = make_idle_board(3), []  # of a worker: cores, then threads
    monkeypatch.setattr(core_sharing, "pin", lambda mask: asked.append(sorted(mask)))
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    shared = {1: (2, 3), 2: (4, 5)}
    ours = WorkerCores(2, (0, 1), CoreSharing(board, 0, shared))
    theirs = WorkerCores(2, (2, 3), CoreSharing(board, 1, {}))
    ours.use_available()
    assert asked == []  # nobody is idle
    with theirs.idle():
        ours.use_available()
        ours.use_available()
        assert asked == [[0, 1, 2, 3, 4, 5], 4]  # once
        board[2] = True
        ours.use_available()
        assert asked[2:] == [[0, 1, 2, 3, 4, 5], 6]
    ours.use_available()
    assert asked[4:] == [[0, 1, 2, 3, 4, 5], 4]
    board[2] = False
    ours.use_available()
    assert asked[6:] == [[0, 1], 2]


@pytest.fixture
def eight_cores(monkeypatch):
    monkeypatch.setattr(processes, "CPU_QUOTAS", ())
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


def placed(*words):
    return resolve_placement(load_config(None, {}, words))


@pytest.mark.parametrize(("infer", "train"), [(1, 1), (3, 2), (2, 5)])
@pytest.mark.usefixtures("eight_cores")
def test_every_worker_shares_with_one_of_the_other_role(infer, train):
    words = (f"devices.infer=cpu:{infer}", f"devices.train=cpu:{train}")
    spawned = [*spawned_settings(placed(*words, "train.prompts_per_iteration=8")).values()]
    pairs = [(user, *each) for user in spawned for each in user.core_sharing.shared.items()]
    assert sorted(worker for _, worker, _ in pairs) == [*range(len(spawned))]
    for user, worker, cores in pairs:
        owner = spawned[worker]
        assert owner.name.partition("-")[0] != user.name.partition("-")[0]
        assert (user.num_threads, cores) == (owner.num_threads, owner.cores)


@pytest.mark.usefixtures("eight_cores")
def test_cores_are_shared_on_cpus_unless_threads_or_bits_are_fixed():
    both = ("devices.infer=cpu", "devices.train=cpu", "train.prompts_per_iteration=128")
    assert placed(*both).lends_cores and placed(*both).max_concurrent_groups == 64
    for word in ("devices.threads=2", "runtime.deterministic=true"):
        apart = placed(*both, word)
        assert not apart.lends_cores and apart.max_concurrent_groups == 32
        assert all(settings.core_sharing is None for settings in spawned_settings(apart).values())
    # More workers than cores: none is free when one is idle.
    assert not placed("devices.infer=cpu:8", "devices.train=cpu").lends_cores
