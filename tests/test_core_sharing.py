"""Cores of a worker that waits serve workers of the other role; freed memory is kept."""

import os
from typing import cast

import pytest
import torch

from easyrl import processes
from easyrl.config import load_config
from easyrl.runtime.placement import resolve_placement
from easyrl.workers import core_sharing
from easyrl.workers.core_sharing import CoreSharing, WorkerCores, make_idle_board
from own_workers import spawned_settings


@pytest.fixture
def board():
    return make_idle_board(3)


@pytest.fixture
def asked(monkeypatch):
    """Recorded requests of a worker: cores, then threads."""
    asked = []
    monkeypatch.setattr(core_sharing, "pin", lambda mask: asked.append(sorted(mask)))
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    return asked


def test_a_worker_uses_the_cores_of_idle_workers_and_gives_them_back(board, asked):
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
    board[1] = True
    WorkerCores(2, (), CoreSharing(board, 0, {1: ()})).use_available()  # not pinned
    assert asked[8:] == [4]


# -- who shares with whom -------------------------------------------------------------------------


@pytest.fixture
def eight_cores(monkeypatch):
    monkeypatch.setattr(processes, "CPU_QUOTAS", ())
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


def placed(*words):
    return resolve_placement(load_config(None, {}, words))


def sharing_of(settings):
    return cast(CoreSharing, settings.core_sharing)


@pytest.mark.parametrize(("infer", "train"), [(1, 1), (3, 2), (2, 5)])
@pytest.mark.usefixtures("eight_cores")
def test_every_worker_shares_with_one_of_the_other_role(infer, train):
    words = (f"devices.infer=cpu:{infer}", f"devices.train=cpu:{train}")
    spawned = spawned_settings(placed(*words, "train.prompts_per_iteration=8"))
    names = list(spawned)
    assert [sharing_of(each).worker for each in spawned.values()] == [*range(len(names))]
    used = [
        (user, *each) for user, own in spawned.items() for each in sharing_of(own).shared.items()
    ]
    assert sorted(names[worker] for _, worker, _ in used) == sorted(names)
    for user, worker, cores in used:
        owner = spawned[names[worker]]
        assert owner.name.partition("-")[0] != user.partition("-")[0]
        assert (spawned[user].num_threads, cores) == (owner.num_threads, owner.cores)


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


# -- memory ---------------------------------------------------------------------------------------
