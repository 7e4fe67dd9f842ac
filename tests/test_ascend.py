"""The Ascend path without Ascend's hardware: a stand-in takes torch_npu's place."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from easyrl import devices
from own_processes import WAIT_SECONDS

ROOT, STAND_IN = Path(__file__).parent.parent, Path(__file__).parent / "stand_in"


def python(*words, paths=(), **environment):
    """Run Python, in which torch_npu is the stand-in."""
    path = os.pathsep.join(map(str, (ROOT, STAND_IN, *paths)))
    changed = {**os.environ, **devices.NO_AUTOLOAD, "PYTHONPATH": path, **environment}
    return subprocess.run(
        [sys.executable, *words],
        check=False,
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        env={name: value for name, value in changed.items() if value is not None},
    )


def printed(script, **environment):
    done = python("-c", script, **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


PLACE = """
import json, os
from easyrl.config import load_config
from easyrl.runtime.placement import device_names, resolve_placement
from easyrl.runtime.resolve import resolve

def place(infer, train):
    config = load_config(None, {"devices.infer": infer, "devices.train": train})
    return device_names(resolve_placement(resolve(config)))

found = [place("0,2", "3")]
os.environ["ASCEND_RT_VISIBLE_DEVICES"] = "1,3"
try:
    place("0,2", "1")
except ValueError as error:
    found.append(str(error))
print(json.dumps(found))
"""


def test_npus_are_found_by_number_among_those_that_the_user_shows():
    names, error = printed(PLACE)
    assert names == {"rollout-0": "npu:0", "rollout-1": "npu:2", "train-0": "npu:3"}
    assert "devices.infer" in error and "npu devices 0-1" in error


WORKER = """
import json, os, sys
from dataclasses import replace
from datetime import timedelta
from easyrl import devices
from easyrl.config import load_config
from easyrl.runtime import worker_process
from easyrl.runtime.resolve import resolve
from easyrl.workers.settings import WorkerSettings
from easyrl.runtime.resolve import resolve

spec = resolve(load_config())
settings = WorkerSettings(
    name="rollout-1", owner_id=1, device="npu:0", weights_cross_on_cpu=True, num_threads=1,
    spec=spec.for_rollout, timeout_seconds=9.0, is_deterministic=False,
    max_concurrent_groups=1, store="", log_file=None,
    device_indices=(2,), memory_fraction=0.25, engine=ENGINE,
)
worker_process.set_up_process(worker_process.with_environment(settings))
found = {"visible": os.environ["ASCEND_RT_VISIBLE_DEVICES"]}
if settings.engine == "embedded":
    import torch, torch_npu
    group, _ = devices.make_process_group("npu:0", "store", 1, 2, timedelta(seconds=3))
    found |= {
        "count": torch.npu.device_count(),
        "limits": torch_npu.limits,
        "group": [type(group).__name__, *group.made_with[:3], group.made_with[3].total_seconds()],
        "flex": devices.trains_flex_attention(torch.device("npu:0")),
        "memory": devices.total_memory_bytes("npu", 0),
    }
else:
    names = ["HCCL_SOCKET_IFNAME", "VLLM_HOST_IP", "DYNAMIC_EPLB", "TORCH_DEVICE_BACKEND_AUTOLOAD"]
    names += ["HCCL_HOST_SOCKET_PORT_RANGE", "TORCH_COMPILE_DISABLE"]
    alone = replace(settings, memory_fraction=None, weights_cross_on_cpu=False)
    endpoints = [each.weight_endpoint(1, 2) for each in (settings, alone)]
    found |= {name: os.environ.get(name) for name in names}
    found["endpoints"] = [[each.device, each.shared_device] for each in endpoints]
print(json.dumps(found))
"""
EMBEDDED = {
    "visible": "3",  # the third that the user shows
    "count": 1,
    "limits": {"0": 0.25},
    "group": ["ProcessGroupHCCL", "store", 1, 2, 3.0],
    "flex": False,
    "memory": 64 * 2**30,
}
VLLM = {
    "visible": "3",
    "HCCL_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
    "DYNAMIC_EPLB": "false",  # whatever the user has set
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",  # vLLM's processes do not load torch_npu themselves
    "HCCL_HOST_SOCKET_PORT_RANGE": "auto",  # the NPU is shared
    "TORCH_COMPILE_DISABLE": None,
    "endpoints": [["cpu", "npu:0"], ["npu:0", None]],  # a bucket that both open, or HCCL
}


@pytest.mark.parametrize(("engine", "expected"), [("embedded", EMBEDDED), ("vllm", VLLM)])
def test_a_worker_sees_its_npu_alone_and_communicates_over_hccl(engine, expected):
    shown = {"ASCEND_RT_VISIBLE_DEVICES": "1,2,3", "DYNAMIC_EPLB": "true"}
    assert printed(f"ENGINE = {engine!r}\n{WORKER}", **shown) == expected


def test_torch_npu_without_ascends_libraries_does_not_stop_the_cpu(tmp_path):
    """torch loads an installed torch_npu by itself, by its entry point, and fails."""
    version = metadata.version("torch").partition("+")[0]
    installed = tmp_path / f"torch_npu-{version}.dist-info"
    installed.mkdir()
    about = f"Metadata-Version: 2.1\nName: torch-npu\nVersion: {version}\n"
    (installed / "METADATA").write_text(about)
    (installed / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload")

    def run(*words):
        default = dict.fromkeys(devices.NO_AUTOLOAD)
        return python(*words, paths=(tmp_path,), STAND_IN_FAILS="1", **default)

    assert "libhccl.so" in run("-c", "import torch").stderr
    dry_run = ("-m", "easyrl", "grpo", "--dry-run")
    on_cpu = run(*dry_run)
    assert on_cpu.returncode == 0 and "# train-0: cpu" in on_cpu.stdout, on_cpu.stderr
    on_npus = run(*dry_run, "--infer-devices", "0", "--train-devices", "1")
    assert on_npus.returncode == 2 and "Traceback" not in on_npus.stderr
    for word in ("CANN", "libhccl.so", "set_env.sh", "--train-devices"):
        assert word in on_npus.stderr
