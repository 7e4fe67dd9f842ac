"""Cores, devices and memory of a machine, and each worker's part of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from easyrl import devices, events, processes
from easyrl.config import load_config
from easyrl.runtime import placement as placement_module
from easyrl.runtime.placement import Placement, describe, device_names, resolve_placement
from easyrl.runtime.run import run
from own_workers import spawned_settings
from runs import SMALL, lines_of


def test_num_cores_respects_a_containers_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.parametrize("node", ["nvidia0", "kfd"])
def test_a_gpu_is_found_by_its_device_node_without_a_driver_library(
    node: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some systems have the driver where only torch's libraries find it."""
    monkeypatch.setattr(devices, "DEVICE_NODES", tmp_path)
    monkeypatch.setattr(devices, "CUDA_DRIVER", "libnone.so")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert devices.accelerator() == devices.accelerator(is_asked=True) == ("cpu", 0)
    (tmp_path / node).touch()
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


def test_workers_get_disjoint_physical_cores_of_the_process(
    machine: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert processes.split_cores(2) == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert processes.split_cores(3) == ((0, 4), (1, 5), (2, 6))
    assert len(processes.split_cores(7)) == 7 and processes.split_cores(8) == ()
    (tmp_path / "cpu.max").write_text("400000 100000")
    with machine.context() as patch:
        patch.setattr(processes, "CPU_QUOTAS", ((str(tmp_path / "cpu.max"),),))
        assert processes.num_cores() == 4 and processes.split_cores(2) == ()  # under a quota
    machine.setattr(os, "sched_getaffinity", lambda pid: {1, 5, 3, 7})
    assert processes.split_cores(2) == ((1, 5), (3, 7))


def placed(*words: str) -> Placement:
    return resolve_placement(load_config(None, {}, words))


def test_each_cpu_worker_has_its_cores_unless_threads_are_chosen(
    machine: pytest.MonkeyPatch,
) -> None:
    placement = placed("devices.infer=cpu:2", "devices.train=cpu")
    assert [placement.cores_of("rollout", n) for n in (0, 1)] == [(0, 4), (1, 5)]
    assert placement.cores_of("train", 0) == (2, 6)
    assert placement.num_threads == 2
    assert "rollout-1: cpu, 2 CPU thread(s)" in describe(placement)
    chosen = placed("devices.infer=cpu", "devices.train=cpu", "devices.threads=8")
    assert chosen.cores_of("rollout", 0) == chosen.cores_of("train", 0) == ()


@pytest.mark.alone
@pytest.mark.skipif(len(processes.allowed_cores()) < 2, reason="one core")
def test_workers_run_on_their_cores_and_lent_ones_and_rewards_on_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(
        "import os\n"
        "def score(completions, **columns):\n"
        "    return [float(len(os.sched_getaffinity(0)))] * len(completions)\n"
    )
    own = sorted(processes.allowed_cores())
    monkeypatch.setattr(placement_module, "split_cores", lambda _: ((own[0],), (own[1],)))
    seen = []

    def watch(record: Any) -> None:
        if isinstance(record, events.Evaluated):
            workers = [p for p in psutil.Process().children() if "spawn_main" in p.cmdline()[-2]]
            seen.append(sorted(p.cpu_affinity() for p in workers))

    words = (f"output.dir={tmp_path / 'run'}", f"reward.functions=[{reward}:score]")
    on_cpu = ("devices.infer=cpu", "devices.train=cpu", "train.iterations=1")
    assert run(load_config(words=[*SMALL, *words, *on_cpu]), [watch]) == 0
    assert sorted(os.sched_getaffinity(0)) == own
    # Before the first iteration: the trainer waits, and the engine has its core as well.
    assert seen[0] == sorted([own[:2], own[1:2]])
    (line,) = lines_of(tmp_path / "run" / "metrics.jsonl")
    assert line["reward"] == len(own)


# Accelerators, by the numbers that the user sees.


@pytest.mark.parametrize(
    ("kind", "seen", "expected"),
    [
        ("cuda", None, {"CUDA_VISIBLE_DEVICES": "1"}),
        ("cuda", "GPU-8a, MIG-9b", {"CUDA_VISIBLE_DEVICES": "MIG-9b"}),
        ("npu", "2,5", {"ASCEND_RT_VISIBLE_DEVICES": "5"}),
    ],
)
def test_a_device_number_counts_what_the_user_lets_be_seen(
    kind: str, seen: str | None, expected: dict[str, str]
) -> None:
    variable = devices.VISIBLE_DEVICES[kind]
    environment = {} if seen is None else {variable: seen}
    assert devices.visible_environment(kind, (1,), environment) == expected


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
    infer: str, train: str, devices_seen: list[Any], cross_on_cpu: bool, memory_fraction: float
) -> None:
    placement = of_gpus(infer, train)
    last = f"rollout-{len(infer.split(',')) - 1}"
    spawned = spawned_settings(placement)
    workers = [spawned[last], spawned["train-0"]]
    assert [(each.device, each.device_indices) for each in workers] == devices_seen
    for settings in workers:
        assert settings.weights_cross_on_cpu == cross_on_cpu
        assert settings.memory_fraction == memory_fraction
    names = device_names(placement)
    assert names["train-0"] == ("cpu" if train == "cpu" else f"cuda:{train}")
    assert names[last] == f"cuda:{infer[-1]}"
    assert ("50% of its memory" in describe(placement)) == (memory_fraction is not None)


# The environment of a worker.


SCRIPT = """
import json, os, sys
from easyrl.config import load_config
from easyrl.runtime import launch
from easyrl.workers.settings import WorkerSettings

assert "torch" not in sys.modules
settings = WorkerSettings(
    name="rollout-0", owner_id=0, device="cpu", weights_cross_on_cpu=True, num_threads=1,
    config=load_config(words=["runtime.deterministic=true"]), max_concurrent_groups=1,
    store="", log_file=None,
)
launch._set_up_environment(launch.with_environment(settings))
import torch
names = ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS", "GOMP_SPINCOUNT"]
print(json.dumps({
    **{name: os.environ[name] for name in names},
    "threads": torch.get_num_threads(),
    "deterministic": torch.are_deterministic_algorithms_enabled(),
}))
"""


def test_a_worker_is_bound_to_loopback_and_to_its_threads_before_torch_is_loaded() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=120
    )
    assert json.loads(done.stdout) == {
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "GOMP_SPINCOUNT": "10000",
        "threads": 1,
        "deterministic": True,
    }


PROGRAM = """
import json, os, sys, time
from pathlib import Path
from easyrl import devices
from easyrl.config import load_config
from own_workers import settings_on_cpu

FILE, NAME = Path("seen.jsonl"), "CUDA_VISIBLE_DEVICES"

def report(where):
    if __name__ != "__main__":
        names = NAME, "TORCH_NCCL_DUMP_ON_TIMEOUT", "PYTORCH_ALLOC_CONF"
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


def test_a_program_that_looks_at_devices_when_it_is_imported_sees_the_workers_own(
    tmp_path: Path,
) -> None:
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
    of_workers = ("6", "0", None), ("4", "0", "expandable_segments:True")
    assert sorted(seen, key=str) == sorted(
        ([where, *each] for where in ("program", "worker") for each in of_workers), key=str
    )
    for words in ("expected 1 device", "got 3", "CUDA_VISIBLE_DEVICES", "__main__"):
        assert words in done.stdout
