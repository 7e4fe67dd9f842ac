"""Cores, devices and memory of a machine, and each worker's part of them."""

import os
import re

import pytest
import torch

from easyrl import devices, processes
from easyrl.config import ConfigError, load_config
from easyrl.config.devices import count_devices, parse_device_set
from easyrl.engines.vllm import platforms
from easyrl.runtime.placement import (
    EngineChoice,
    choose_engine,
    describe,
    device_names,
    resolve_placement,
)
from easyrl.runtime.resolve import resolve
from easyrl.workers import core_sharing
from easyrl.workers.core_sharing import CoreSharing, WorkerCores, make_idle_board
from own_workers import spawned_settings


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Four physical cores of two hyperthreads: 0 and 4, 1 and 5, …; no quota."""
    for core in range(8):
        folder = tmp_path / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text("0\n")
        (folder / "core_id").write_text(f"{core % 4}\n")
    monkeypatch.setattr(processes, "TOPOLOGY", tmp_path)
    monkeypatch.setattr(processes, "CPU_QUOTA", tmp_path / "none")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    return monkeypatch


def test_num_cores_respects_a_containers_quota(machine, tmp_path):
    for quota, expected in (("150000", 2), ("max", 8), ("1600000", 8)):  # 1.5 cores serve 2 threads
        (tmp_path / "cpu.max").write_text(f"{quota} 100000\n")
        machine.setattr(processes, "CPU_QUOTA", tmp_path / "cpu.max")
        assert processes.num_cores() == expected


def test_workers_get_disjoint_physical_cores_of_the_process(machine, tmp_path):
    assert processes.split_cores(2) == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert processes.split_cores(3) == ((0, 4), (1, 5), (2, 6))
    assert len(processes.split_cores(7)) == 7 and processes.split_cores(8) == ()
    (tmp_path / "cpu.max").write_text("400000 100000")
    with machine.context() as patch:
        patch.setattr(processes, "CPU_QUOTA", tmp_path / "cpu.max")
        assert processes.num_cores() == 4 and processes.split_cores(2) == ()  # under a quota
    machine.setattr(os, "sched_getaffinity", lambda pid: {1, 5, 3, 7})
    assert processes.split_cores(2) == ((1, 5), (3, 7))


def of(*words):
    return resolve(load_config(None, {}, words))


def engine_for(spec, *arguments, **options):
    return choose_engine(spec.engine, spec.model.dtype, *arguments, **options)


def of_gpus(infer, train):
    config = load_config(None, {"devices.infer": infer, "devices.train": train})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "accelerator", lambda *, is_asked: ("cuda", 8))
        return resolve_placement(resolve(config))


@pytest.mark.parametrize(
    ("infer", "train", "devices_seen", "cross_on_cpu", "memory_fraction"),
    [
        ("1,4", "5", [("cuda:0", (4,)), ("cuda:0", (5,))], False, None),
        ("2,3", "cpu", [("cuda:0", (3,)), ("cpu", ())], True, None),
        ("3", "3", [("cuda:0", (3,)), ("cuda:0", (3,))], True, 0.5),  # a shared device
    ],
)
def test_every_worker_sees_its_device_as_number_0(
    infer, train, devices_seen, cross_on_cpu, memory_fraction
):
    placement = of_gpus(infer, train)
    last = f"rollout-{len(infer.split(',')) - 1}"
    spawned = spawned_settings(placement)
    workers = [spawned[last], spawned["train-0"]]
    assert [(each.device, each.device_indices) for each in workers] == devices_seen
    assert {each.weights_cross_on_cpu for each in workers} == {cross_on_cpu}
    assert {each.memory_fraction for each in workers} == {memory_fraction}
    names = device_names(placement)
    assert names["train-0"] == ("cpu" if train == "cpu" else f"cuda:{train}")
    assert names[last] == f"cuda:{infer[-1]}"
    assert ("50% of its memory" in describe(placement)) == (memory_fraction is not None)


TWO = "rollout.tensor_parallel_size=2"
GPUS, CPU = parse_device_set("0-3"), parse_device_set("cpu")


@pytest.fixture
def install(monkeypatch, tmp_path):
    def make(vllm, ascend=None):
        for name, version in (("vllm", vllm), ("vllm_ascend", ascend)):
            if version is not None:
                folder = tmp_path / f"{name}-{version}.dist-info"
                folder.mkdir()
                (folder / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(tmp_path))

    return make


def test_auto_takes_vllm_on_accelerators_and_the_embedded_engine_on_the_cpu(install):
    install("0.32.0")
    assert engine_for(of(), GPUS).name == "vllm"
    assert engine_for(of(), CPU) == EngineChoice("embedded", "the default on the CPU")
    assert engine_for(of("rollout.engine=vllm"), CPU) == EngineChoice("vllm")
    assert engine_for(of("rollout.engine=embedded"), GPUS) == EngineChoice("embedded")
    words = ("rollout.engine=vllm", "runtime.deterministic=true")
    assert engine_for(of(*words), CPU).name == "vllm"
    with pytest.raises(ConfigError, match=r"^rollout\.engine"):
        engine_for(of(*words, TWO), parse_device_set("cpu:2"))


@pytest.mark.parametrize(
    ("accelerator", "installed", "words", "reason"),
    [
        ("cuda", [None], (), r"vLLM is not installed: pip install 'easyrl-train\[vllm\]'"),
        ("cuda", ["0.27.1"], (), r"expected vLLM .*, got 0\.27\.1"),
        ("cuda", ["0.32.0"], ("runtime.deterministic=true",), "deterministic=true"),
        ("npu", ["0.30.0", "0.30.0.post1"], (), ""),
        ("npu", ["0.30.0"], (), "expected vllm-ascend"),
        ("npu", ["0.30.0", "0.29.0rc1"], (), "expected vLLM 0.29.0 for vllm-ascend 0.29.0rc1"),
        ("npu", ["0.30.0", "0.30.0rc2"], ("model.dtype=float32",), "model.dtype=bfloat16"),
    ],
)
def test_where_vllm_cannot_be_used_auto_gives_the_reason_and_vllm_is_refused(
    install, accelerator, installed, words, reason
):
    install(*installed)
    kind = devices.ASCEND if accelerator == "npu" else accelerator
    words = ("model.dtype=bfloat16", *words)
    chosen = engine_for(of(*words), GPUS, accelerator=kind)
    assert chosen.name == ("embedded" if reason else "vllm")
    if reason:
        with pytest.raises(ConfigError, match=rf"^rollout.engine: .*{reason}"):
            engine_for(of("rollout.engine=vllm", *words), GPUS, accelerator=kind)


@pytest.mark.parametrize(
    ("picture_type", "reason"),
    [
        ("qwen3_vl", "torchvision: pip install torchvision"),
        ("gemma3", r"pictures, .* qwen2_5_vl, .* not for 'gemma3'"),
    ],
)
def test_where_vllm_cannot_be_shown_pictures_auto_gives_the_reason(
    install, monkeypatch, picture_type, reason
):
    install("0.32.0")
    monkeypatch.setattr(platforms, "find_spec", lambda name: None)
    options = {"picture_type": picture_type}
    chosen = engine_for(of(), GPUS, **options)
    assert chosen.name == "embedded" and re.search(reason, chosen.reason)
    with pytest.raises(ConfigError, match=rf"^rollout\.engine: .*{reason}"):
        engine_for(of("rollout.engine=vllm"), GPUS, **options)
    monkeypatch.setattr(platforms, "find_spec", lambda name: "installed")
    expected = "vllm" if picture_type == "qwen3_vl" else "embedded"
    assert engine_for(of(), GPUS, **options).name == expected
    in_episodes = engine_for(of(), GPUS, has_episodes=True, **options)
    assert in_episodes.name == "embedded"
    assert "no pictures of environments, tools or agents" in in_episodes.reason


def test_tensor_parallel_engines_take_their_devices_in_turn(install, monkeypatch):
    install("0.32.0")
    monkeypatch.setattr(devices, "accelerator", lambda *, is_asked: ("cuda", 8))
    placement = resolve_placement(of("devices.infer=0-2,4", "devices.train=5", TWO))
    names = {"rollout-0": "cuda:0,1", "rollout-1": "cuda:2,4", "train-0": "cuda:5"}
    assert device_names(placement) == names and "vllm" in describe(placement)
    assert count_devices(["1.2.3.4/cpu", *names.values(), "cuda:5"]) == 6, "of a shared device, too"
    for words in (["rollout.tensor_parallel_size=3"], ["rollout.engine=embedded", TWO]):
        with pytest.raises(ConfigError, match=r"^rollout\.tensor_parallel_size"):
            engine_for(of(*words), GPUS)


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


def placed(*words):
    return resolve_placement(of(*words))


@pytest.mark.parametrize(("infer", "train"), [(1, 1), (3, 2), (2, 5)])
@pytest.mark.usefixtures("machine")
def test_every_worker_shares_with_one_of_the_other_role(infer, train):
    words = (f"devices.infer=cpu:{infer}", f"devices.train=cpu:{train}")
    spawned = [*spawned_settings(placed(*words, "train.prompts_per_iteration=8")).values()]
    pairs = [(user, *each) for user in spawned for each in user.core_sharing.shared.items()]
    assert sorted(worker for _, worker, _ in pairs) == [*range(len(spawned))]
    for user, worker, cores in pairs:
        owner = spawned[worker]
        assert owner.name.partition("-")[0] != user.name.partition("-")[0]
        assert (user.num_threads, cores) == (owner.num_threads, owner.cores)


@pytest.mark.usefixtures("machine")
def test_cores_are_shared_on_cpus_unless_threads_or_bits_are_fixed():
    both = ("devices.infer=cpu", "devices.train=cpu", "train.prompts_per_iteration=128")
    assert placed(*both).lends_cores and placed(*both).max_concurrent_groups == 64
    for word in ("devices.threads=2", "runtime.deterministic=true"):
        apart = placed(*both, word)
        assert not apart.lends_cores and apart.max_concurrent_groups == 32
        assert all(settings.core_sharing is None for settings in spawned_settings(apart).values())
    # More workers than cores: none is free when one is idle.
    assert not placed("devices.infer=cpu:8", "devices.train=cpu").lends_cores
