"""What a machine has, and what of it each worker gets: cores, devices, memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from easyrl import cores, devices
from easyrl.config import ConfigError, load_config
from easyrl.device_sets import count_devices
from easyrl.model.files import ModelFiles
from easyrl.runtime import launch, memory
from easyrl.runtime.crew import Crew
from easyrl.runtime.placement import Placement, describe, device_names, resolve_placement
from easyrl.workers.settings import WorkerSettings
from runs import SMALL, lines_of


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["200000 100000"], 2),
        (["150000 100000"], 2),  # a part of a core is a core that threads can use
        (["max 100000"], 8),
        (["1600000 100000"], 8),  # more than there is
        (["-1", "100000"], 8),  # version 1: no quota
        (["100000", "100000"], 1),
        (["not a number"], 8),
    ],
)
def test_a_containers_quota_counts(
    lines: list[str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / str(number) for number in range(len(lines))]
    for file, line in zip(files, lines, strict=True):
        file.write_text(line + "\n")
    quotas = (("/no/such/file",), tuple(map(str, files)))
    monkeypatch.setattr(cores, "CPU_QUOTAS", quotas)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert cores.num_cores() == expected


def test_the_cpu_counts_once_per_worker_and_a_shared_device_once() -> None:
    assert count_devices(["cpu", "cpu", "cpu"]) == 3
    assert count_devices(["cuda:0", "cuda:1", "cuda:0", "cpu"]) == 3


@pytest.mark.parametrize("node", ["nvidia0", "kfd"])
def test_a_gpu_is_found_where_torch_alone_knows_the_way_to_its_driver(
    node: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some systems tell torch's libraries where the driver is, and no others."""
    monkeypatch.setattr(devices, "DEVICE_NODES", tmp_path)
    monkeypatch.setattr(devices, "CUDA_DRIVER", "libnone.so")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert devices.accelerator() == ("cpu", 0)
    (tmp_path / node).touch()
    assert devices.accelerator() == ("cuda", 2)


# Cores of one's own.


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Four physical cores of two hyperthreads: 0 and 4, 1 and 5, …; no quota."""
    for core in range(8):
        folder = tmp_path / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text("0\n")
        (folder / "core_id").write_text(f"{core % 4}\n")
    monkeypatch.setattr(cores, "TOPOLOGY", tmp_path)
    monkeypatch.setattr(cores, "CPU_QUOTAS", ())
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    return monkeypatch


def test_workers_get_disjoint_cores_and_share_no_physical_one(machine: pytest.MonkeyPatch) -> None:
    assert cores.split_cores(2) == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert cores.split_cores(3) == ((0, 4), (1, 5), (2, 6))


def test_the_mask_that_a_run_was_started_with_is_what_is_split(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(os, "sched_getaffinity", lambda pid: {1, 5, 3, 7})
    assert cores.split_cores(2) == ((1, 5), (3, 7))


def test_without_more_cores_than_workers_nobody_is_pinned(machine: pytest.MonkeyPatch) -> None:
    assert cores.split_cores(8) == () and cores.split_cores(9) == ()
    assert len(cores.split_cores(7)) == 7


def test_under_a_quota_nobody_is_pinned(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("400000 100000")
    machine.setattr(cores, "CPU_QUOTAS", ((str(tmp_path / "cpu.max"),),))
    assert cores.num_cores() == 4 and cores.split_cores(2) == ()


def placed(*words: str) -> Placement:
    return resolve_placement(load_config(None, {}, words))


def test_each_cpu_worker_has_its_cores_unless_threads_are_chosen(
    machine: pytest.MonkeyPatch,
) -> None:
    placement = placed("devices.infer=cpu:2", "devices.train=cpu")
    assert [placement.cores_of("rollout", n) for n in (0, 1)] == [(0, 4), (1, 5)]
    assert placement.cores_of("train", 0) == (2, 6)
    assert placement.infer_threads == placement.train_threads == 2
    assert "rollout-1: cpu, 2 CPU thread(s) on the cores 1,5" in describe(placement)
    for key in ("infer_threads", "train_threads"):  # as in `easyrl bench pipeline`
        chosen = placed("devices.infer=cpu", "devices.train=cpu", f"devices.{key}=8")
        assert chosen.cores_of("rollout", 0) == chosen.cores_of("train", 0) == ()
        assert "cores" not in describe(chosen)


PIN = """
import json, os
import torch
from easyrl.cores import pin
pin(())
before = os.sched_getaffinity(0)
others = set(os.listdir("/proc/self/task"))  # NumPy's, which torch does not compute with
pin((min(before),))
torch.set_num_threads(2)
torch.randn(400, 400) @ torch.randn(400, 400)
threads = {*set(os.listdir("/proc/self/task")) - others, os.getpid()}
masks = [sorted(os.sched_getaffinity(int(thread))) for thread in threads]
print(json.dumps({"before": sorted(before), "masks": masks}))
"""


def test_torchs_threads_stay_on_the_cores_of_their_worker() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PIN], capture_output=True, text=True, check=True, timeout=120
    )
    told = json.loads(done.stdout)
    assert told["before"] == sorted(os.sched_getaffinity(0))
    assert len(told["masks"]) >= 2 and all(mask == told["before"][:1] for mask in told["masks"])


RUN = """
import json, os, sys
from pathlib import Path
import psutil
from easyrl import records
from easyrl.config import load_config
from easyrl.runtime import placement, run

if __name__ == "__main__":
    first, second = map(int, sys.argv[1:3])
    placement.split_cores = lambda num_workers: ((first,), (second,))
    seen = []

    def watch(record):
        if isinstance(record, records.Evaluated):
            workers = [p for p in psutil.Process().children() if "spawn_main" in p.cmdline()[-2]]
            seen.append(sorted(p.cpu_affinity() for p in workers))

    words = json.loads(sys.argv[3])
    code = run.run(load_config(None, {}, words), [watch])
    print(json.dumps({"code": code, "workers": seen, "own": sorted(os.sched_getaffinity(0))}))
"""
REWARD = """
import os
def score(completions, **columns):
    return [float(len(os.sched_getaffinity(0)))] * len(completions)
"""


@pytest.mark.alone
@pytest.mark.skipif(len(cores.allowed_cores()) < 2, reason="one core")
def test_workers_run_on_their_cores_and_lent_ones_and_rewards_on_any(tmp_path: Path) -> None:
    script, reward = tmp_path / "script.py", tmp_path / "reward.py"
    script.write_text(RUN)
    reward.write_text(REWARD)
    own = sorted(cores.allowed_cores())
    words = [
        *SMALL,
        f"output.dir={tmp_path / 'run'}",
        f"reward.functions=[{reward}:score]",
        "train.iterations=1",
        "devices.infer=cpu",
        "devices.train=cpu",
    ]
    done = subprocess.run(
        [sys.executable, str(script), *map(str, own[:2]), json.dumps(words)],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
    )
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["code"] == 0 and told["own"] == own
    # Before the first iteration: the trainer waits, and the engine has its core as well.
    assert told["workers"][0] == sorted([own[:2], own[1:2]])
    (line,) = lines_of(tmp_path / "run" / "metrics.jsonl")
    assert line["reward"] == len(own)


# Accelerators, by the numbers that the user sees.


@pytest.mark.parametrize(
    ("kind", "seen", "expected"),
    [
        ("cuda", None, {"CUDA_VISIBLE_DEVICES": "1"}),
        ("cuda", "6,7", {"CUDA_VISIBLE_DEVICES": "7"}),
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


def test_lanes_have_the_users_numbers_and_accelerators_leave_cores_alone() -> None:
    placement = of_gpus("1,4", "5")
    names = {"rollout-0": "cuda:1", "rollout-1": "cuda:4", "train-0": "cuda:5"}
    assert device_names(placement) == names
    assert placement.cores == () and placement.memory_fraction("train") is None


def settings_on_gpu(index: int) -> WorkerSettings:
    return WorkerSettings(
        name="rollout-1",
        owner_id=1,
        config=load_config(),
        device="cuda:0",
        weights_cross_on_cpu=False,
        num_threads=1,
        max_concurrent_groups=1,
        store_path="",
        log_file=None,
        device_indices=(index,),
    )


def test_an_error_on_a_device_is_told_with_the_users_number() -> None:
    try:
        raise RuntimeError("CUDA out of memory. GPU 0 has a total capacity of 140 GiB")
    except RuntimeError as error:
        failed = launch._describe(error, settings_on_gpu(5))
    assert failed.message.endswith("(on cuda:5, which the worker sees as cuda:0)")
    assert failed.traceback.endswith(failed.message.splitlines()[-1])


def settings_of(placement: Placement, role: str, number: int) -> WorkerSettings:
    """What a worker of the run's crew is told when it is spawned."""
    told: dict[str, WorkerSettings] = {}
    supervisor: Any = SimpleNamespace(
        spawn=lambda name, target, settings, ring: told.update({name: settings})
    )
    Crew(
        load_config(),
        placement,
        folder=cast(Any, SimpleNamespace(log_of=lambda name: name)),
        supervisor=supervisor,
        ring=cast(Any, SimpleNamespace(close=lambda: None)),
        store_path="",
        checkpoint=None,
    )
    return told[f"{role}-{number}"]


def test_every_worker_is_told_to_see_its_device_as_the_first() -> None:
    placement = of_gpus("1,4", "5")
    told = [settings_of(placement, *worker) for worker in (("rollout", 1), ("train", 0))]
    assert [(settings.device, settings.device_indices) for settings in told] == [
        ("cuda:0", (4,)),
        ("cuda:0", (5,)),
    ]
    assert not any(settings.weights_cross_on_cpu for settings in told)
    mixed = of_gpus("2", "cpu")
    told = [settings_of(mixed, *worker) for worker in (("rollout", 0), ("train", 0))]
    assert [(settings.device, settings.device_indices) for settings in told] == [
        ("cuda:0", (2,)),
        ("cpu", ()),
    ]
    assert all(settings.weights_cross_on_cpu for settings in told)
    assert all(settings.memory_fraction is None for settings in told)


# One accelerator for both groups.


def test_a_shared_accelerators_memory_is_split_between_the_groups() -> None:
    placement = of_gpus("3", "3")
    assert placement.shares_device and placement.weights_cross_on_cpu
    assert [placement.memory_fraction(role) for role in ("rollout", "train")] == [0.5, 0.5]
    assert "50% of its memory for the rollout worker" in describe(placement)
    for role in ("rollout", "train"):
        settings = settings_of(placement, role, 0)
        assert (settings.device, settings.device_indices) == ("cuda:0", (3,))
        assert settings.memory_fraction == 0.5 and settings.weights_cross_on_cpu


def test_a_part_of_the_memory_that_cannot_hold_a_group_is_refused() -> None:
    model = ModelFiles("m", {}, 2**28)  # a GiB of weights in float32
    placement = of_gpus("0", "0")

    def check(fraction: float, total: int, *words: str, num_trained: int | None = None) -> None:
        config = load_config(None, {}, ["rollout.max_completion_length=10", *words])
        split = Placement(
            *(placement.infer, placement.train, "cuda", 1, 1, 1), infer_memory_fraction=fraction
        )
        memory.check_shared_device(
            config, split, model, total_bytes=total * 2**30, num_trained=num_trained
        )

    check(0.3, 6)  # 1.8 for 1 GiB, 4.2 for 4
    message = r"devices.infer_memory_fraction: 0.1 came, .* rollout worker 0.60 GiB .* 1.00 GiB"
    with pytest.raises(ConfigError, match=message):
        check(0.1, 6)
    with pytest.raises(ConfigError, match=r"train worker 2.40 GiB .* 4.00 GiB"):
        check(0.6, 6)
    with pytest.raises(ConfigError, match=r"at least 5\.00 GiB"):
        check(0.5, 4)
    check(0.15, 6, "model.dtype=bfloat16")  # half a GiB for the rollout worker, 4 for the other
    with pytest.raises(ConfigError, match=r"rollout worker 0.30 GiB .* 0.50 GiB"):
        check(0.05, 6, "model.dtype=bfloat16")
    check(0.8, 6, "model.lora.rank=2", num_trained=9)  # the frozen weights are a GiB
    with pytest.raises(ConfigError, match=r"train worker 0.60 GiB .* 1.00 GiB"):
        check(0.9, 6, "model.lora.rank=2", num_trained=9)
    check(0.9, 6, "model.lora.rank=2", "train.offload=[optimizer]", num_trained=9)
