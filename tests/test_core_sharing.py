"""Cores of a worker that waits serve workers of the other role; freed memory is kept."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from resource import getpagesize
from typing import Any, cast

import pytest
import torch

from easyrl import processes
from easyrl.config import load_config
from easyrl.model.attention import PackedGroups
from easyrl.model.policy import Policy
from easyrl.runtime import placement as placement_module
from easyrl.runtime.placement import Placement, resolve_placement
from easyrl.workers import core_sharing
from easyrl.workers.core_sharing import CoreSharing, IdleBoard, WorkerCores, make_idle_board
from easyrl.workers.settings import WorkerSettings
from own_workers import spawned_settings


@pytest.fixture
def board() -> IdleBoard:
    return make_idle_board(3)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Recorded requests of a worker: cores, then threads."""
    asked: list[Any] = []
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


TURNS = """
import json, os
import torch
from easyrl.workers.core_sharing import CoreSharing, WorkerCores, make_idle_board
one, other = %d, %d
board = make_idle_board(3)
shared = {1: (one,), 2: (other,)}
cores = WorkerCores(1, (one,), CoreSharing(board, 0, shared))
torch.set_num_threads(1)
others = set(os.listdir("/proc/self/task"))  # NumPy's, which torch does not compute with
for worker in (1, 2):
    board[worker] = True
    cores.use_available()
    torch.randn(400, 400) @ torch.randn(400, 400)
    board[worker] = False
threads = set(os.listdir("/proc/self/task")) - others
print(json.dumps([sorted(os.sched_getaffinity(int(thread))) for thread in threads]))
"""


@pytest.mark.skipif(len(processes.allowed_cores()) < 2, reason="one core")
def test_a_thread_started_on_shared_cores_reaches_all_of_them():
    two = tuple(sorted(processes.allowed_cores())[:2])
    done = subprocess.run(
        [sys.executable, "-c", TURNS % two], capture_output=True, text=True, check=True
    )
    masks = json.loads(done.stdout)
    assert masks and all(mask == list(two) for mask in masks)


def test_the_users_spin_settings_win():
    assert processes.spin_environment({}) == {"GOMP_SPINCOUNT": "10000"}
    for own in ({"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "passive"}):
        assert processes.spin_environment(own) == {}


def test_a_worker_is_busy_again_after_an_interrupted_wait(board):
    with pytest.raises(KeyboardInterrupt), WorkerCores(1, (), CoreSharing(board, 1, {})).idle():
        assert board[1]
        raise KeyboardInterrupt
    assert not board[1]


# -- who shares with whom -------------------------------------------------------------------------


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "CPU_QUOTAS", ())
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


def placed(*words: str) -> Placement:
    return resolve_placement(load_config(None, {}, words))


def sharing_of(settings: WorkerSettings) -> CoreSharing:
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


@pytest.mark.usefixtures("eight_cores")
def test_vllm_shares_its_cores_and_uses_no_others(monkeypatch):
    """vLLM computes in a process of its own, whose threads are set once."""
    monkeypatch.setattr(placement_module, "unsupported_reason", lambda *about: None)
    placement = placed(
        *("devices.infer=cpu", "devices.train=cpu", "rollout.engine=vllm"),
        "train.prompts_per_iteration=128",
    )
    spawned = spawned_settings(placement)
    assert sharing_of(spawned["rollout-0"]).shared == {}
    assert sharing_of(spawned["train-0"]).shared == {0: spawned["rollout-0"].cores}
    assert placement.max_concurrent_groups == 32


def test_the_trainer_looks_for_idle_cores_at_each_layer():
    policy = Policy.load("tiny", "cpu")
    calls: list[bool] = []
    policy.before_each_block(lambda: calls.append(torch.is_grad_enabled()))
    row = torch.arange(5)
    policy.forward(row, row, PackedGroups([(5, ())]), row).sum().backward()
    assert len(calls) == 2 * len(policy.blocks)


# -- memory ---------------------------------------------------------------------------------------

PAGE_FAULTS = """
import resource, sys
import numpy as np
from easyrl.processes import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()
np.ones(2**23)  # 64 MiB, freed at once
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    np.ones(2**23)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def num_faults(how: str) -> int:
    command = [sys.executable, "-c", PAGE_FAULTS, how]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_kept_memory_is_used_again_without_page_faults():
    pages = 20 * 2**26 // getpagesize()
    assert num_faults("give-back") > pages / 1024  # huge pages fault once for 512 small ones
    assert num_faults("keep") < pages / 10_000
