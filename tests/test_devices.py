"""Cores, devices and memory of a machine, and each worker's part of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from easyrl import devices, processes
from easyrl.config import Config, ConfigError, load_config
from easyrl.config.devices import parse_device_set
from easyrl.engines.vllm import platforms
from easyrl.model.files import ModelFiles
from easyrl.runtime.placement import (
    EngineChoice,
    Placement,
    choose_engine,
    describe,
    device_names,
    resolve_placement,
)
from own_workers import spawned_settings


def test_num_cores_respects_a_containers_quota(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    files = (tmp_path / "quota", tmp_path / "period")
    version_1, version_2 = tuple(map(str, files)), (str(files[0]),)
    for name, quota, expected in (
        (version_2, "150000 100000", 2),  # a part of a core is a core that threads can use
        (version_2, "max 100000", 8),
        (version_2, "1600000 100000", 8),  # more than there is
        (version_1, "100000", 1),
    ):
        for file, text in zip(files, (quota, "100000"), strict=True):
            file.write_text(text + "\n")
        monkeypatch.setattr(processes, "CPU_QUOTAS", (("/no/such/file",), name))
        assert processes.num_cores() == expected


def test_a_gpu_is_found_by_its_device_node_without_a_driver_library(tmp_path, monkeypatch):
    """Some systems have the driver where only torch's libraries find it."""
    monkeypatch.setattr(devices, "DEVICE_NODES", tmp_path)
    monkeypatch.setattr(devices, "CUDA_DRIVER", "libnone.so")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert devices.accelerator() == devices.accelerator(is_asked=True) == ("cpu", 0)
    (tmp_path / "nvidia0").touch()
    assert devices.accelerator() == ("cuda", 2)


# Cores of a worker.


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Four physical cores of two hyperthreads: 0 and 4, 1 and 5, …; no quota."""
    for core in range(8):
        folder = tmp_path / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text("0\n")
        (folder / "core_id").write_text(f"{core % 4}\n")
    monkeypatch.setattr(processes, "TOPOLOGY", tmp_path)
    monkeypatch.setattr(processes, "CPU_QUOTAS", ())
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    return monkeypatch


def test_workers_get_disjoint_physical_cores_of_the_process(machine, tmp_path):
    assert processes.split_cores(2) == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert processes.split_cores(3) == ((0, 4), (1, 5), (2, 6))
    assert len(processes.split_cores(7)) == 7 and processes.split_cores(8) == ()
    (tmp_path / "cpu.max").write_text("400000 100000")
    with machine.context() as patch:
        patch.setattr(processes, "CPU_QUOTAS", ((str(tmp_path / "cpu.max"),),))
        assert processes.num_cores() == 4 and processes.split_cores(2) == ()  # under a quota
    machine.setattr(os, "sched_getaffinity", lambda pid: {1, 5, 3, 7})
    assert processes.split_cores(2) == ((1, 5), (3, 7))


def of(*words: str) -> Config:
    return load_config(None, {}, words)


def placed(*words: str) -> Placement:
    return resolve_placement(of(*words))


def test_each_cpu_worker_has_its_cores_unless_threads_are_chosen(machine):
    placement = placed("devices.infer=cpu:2", "devices.train=cpu")
    assert [placement.cores_of("rollout", n) for n in (0, 1)] == [(0, 4), (1, 5)]
    assert placement.cores_of("train", 0) == (2, 6)
    assert placement.num_threads == 2
    assert "rollout-1: cpu, 2 CPU thread(s)" in describe(placement)
    chosen = placed("devices.infer=cpu", "devices.train=cpu", "devices.threads=8")
    assert chosen.cores_of("rollout", 0) == chosen.cores_of("train", 0) == ()


# Accelerators, by the numbers that the user sees.


def of_gpus(infer: str, train: str) -> Placement:
    config = load_config(None, {"devices.infer": infer, "devices.train": train})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "accelerator", lambda *, is_asked: ("cuda", 8))
        return resolve_placement(config)


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


# -- the engine; vLLM itself is not needed here ----------------------------------------------------

TWO = "rollout.tensor_parallel_size=2"
GPUS, CPU = parse_device_set("0-3"), parse_device_set("cpu")


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Function that makes versions of vLLM and vllm-ascend look installed."""

    def make(vllm: str | None, ascend: str | None = None) -> None:
        for name, version in (("vllm", vllm), ("vllm_ascend", ascend)):
            if version is not None:
                folder = tmp_path / f"{name}-{version}.dist-info"
                folder.mkdir()
                (folder / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(tmp_path))

    return make


def test_auto_takes_vllm_on_accelerators_and_the_embedded_engine_on_the_cpu(install):
    install("0.32.0")
    assert choose_engine(of(), GPUS).name == "vllm"
    assert choose_engine(of(), CPU) == EngineChoice("embedded", "the default on the CPU")
    assert choose_engine(of("rollout.engine=vllm"), CPU) == EngineChoice("vllm")
    assert choose_engine(of("rollout.engine=embedded"), GPUS) == EngineChoice("embedded")
    words = ("rollout.engine=vllm", "runtime.deterministic=true")
    assert choose_engine(of(*words), CPU).name == "vllm"
    with pytest.raises(ConfigError, match=r"^rollout\.engine"):
        choose_engine(of(*words, TWO), parse_device_set("cpu:2"))


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
    chosen = choose_engine(of(*words), GPUS, accelerator=kind)
    assert chosen.name == ("embedded" if reason else "vllm")
    if reason:
        with pytest.raises(ConfigError, match=rf"^rollout.engine: .*{reason}"):
            choose_engine(of("rollout.engine=vllm", *words), GPUS, accelerator=kind)


def test_beside_the_trainer_vllm_gets_a_fixed_cache_size(monkeypatch):
    """vLLM would count what the trainer allocates meanwhile as its own."""
    config = {"num_hidden_layers": 16, "num_attention_heads": 16, "hidden_size": 2048}
    files = ModelFiles("m", config | {"vocab_size": 32_000}, 2**28, "bfloat16")
    monkeypatch.setattr(platforms, "read_model_files", lambda model: files)
    monkeypatch.setattr(devices, "total_memory_bytes", lambda kind, index: 40 * 2**30)
    sizes = [
        platforms.cache_bytes("m", "bfloat16", 64, 1024, device="cuda:0", shared_part=part)
        for part in (None, 0.5, 0.2)
    ]
    # 16 layers x 2 x 2048 in bfloat16 are 128 KiB a token; without a trainer it measures.
    rows, available = 8 * 2**30, int(0.85 * 0.2 * 40 * 2**30) - 2**29
    assert sizes == [None, rows + platforms.EXTRA_CACHE_BYTES, available]


def test_tensor_parallel_engines_take_their_devices_in_turn(install, monkeypatch):
    install("0.32.0")
    monkeypatch.setattr(devices, "accelerator", lambda *, is_asked: ("cuda", 8))
    placement = resolve_placement(of("devices.infer=0-2,4", "devices.train=5", TWO))
    names = {"rollout-0": "cuda:0,1", "rollout-1": "cuda:2,4", "train-0": "cuda:5"}
    assert device_names(placement) == names and "vllm" in describe(placement)
    for words in (["rollout.tensor_parallel_size=3"], ["rollout.engine=embedded", TWO]):
        with pytest.raises(ConfigError, match=r"^rollout\.tensor_parallel_size"):
            choose_engine(of(*words), GPUS)
