"""`easyrl doctor`: each check on machines that fail it, and this machine."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from easyrl import devices
from easyrl.cli import doctor
from easyrl.cli.doctor import GIB, SUPPORTED, check
from easyrl.engines.vllm import platforms
from easyrl.rewards import sandbox
from easyrl.rewards.sandbox import find_variant

ROOT = Path(__file__).parent.parent


def no_cann():
    raise OSError("CANN")


class Machine:
    """A healthy machine without accelerators, of which tests change facts."""

    def __init__(self, monkeypatch):
        self.versions = {"torch": "2.13.0+cpu", "transformers": "5.23.0"}
        self.free_bytes = {"/dev/shm": GIB // 16}
        self.vllm = None
        self.set = monkeypatch.setattr
        self.set(platforms, "package_version", self.versions.get)
        self.set(doctor, "_free_bytes", lambda path: self.free_bytes.get(str(path), 100 * GIB))
        self.set(doctor, "available_memory_bytes", lambda: 20 * GIB)
        self.set(sandbox, "find_variant", lambda kind: kind)
        self.set(devices, "accelerator", lambda: ("cpu", 0))
        self.set(devices, "num_device_nodes", lambda kind: 0)
        self.set(devices, "has_c_compiler", lambda: True)
        self.set(devices, "total_memory_bytes", lambda kind, index: 140 * GIB)
        self.set(devices, "device_label", lambda kind, index: "H200")
        self.set(platforms, "vllm_version", lambda: self.vllm)
        self.set(platforms, "unsupported_reason", lambda kind: None)

    def without_bwrap(self):
        self.set(sandbox, "find_variant", find_variant.__wrapped__)
        self.set(sandbox, "_bwrap_command", lambda variant: ["no-such-bwrap"])

    def with_unusable_vllm(self):
        self.vllm = "0.34.1"
        reason = f"expected vLLM >=0.28,<0.34, got 0.34.1: {platforms.INSTALL_ASCEND}"
        self.set(platforms, "unsupported_reason", lambda kind: reason)

    def line(self, name):
        return {line.name: line for line in check()}[name]


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def test_a_healthy_machine_has_no_remedies(machine):
    assert all(line.status == "ok" and not line.remedy for line in check())
    machine.versions |= {"torch": "2.15.0+cu132", "peft": "0.21.2"}
    machine.set(devices, "accelerator", lambda: ("cuda", 1))
    assert all(line.status == "ok" for line in check())


CASES = [
    ("torch", "failed", lambda m: m.versions.update(torch=None)),
    ("torch", "failed", lambda m: m.versions.update(torch="2.16.0")),
    ("transformers", "failed", lambda m: m.versions.update(transformers="5.9.0")),
    ("memory", "failed", lambda m: m.set(doctor, "available_memory_bytes", lambda: GIB // 2)),
    ("disk", "failed", lambda m: m.free_bytes.update({str(Path.cwd()): 0})),
    ("shared memory", "warning", lambda m: m.set(devices, "accelerator", lambda: ("cuda", 2))),
    ("shared memory", "warning", lambda m: setattr(m, "vllm", "0.32.0")),
    ("vllm", "warning", lambda m: m.with_unusable_vllm()),
    ("code sandbox", "warning", lambda m: m.without_bwrap()),
    ("accelerators", "warning", lambda m: m.set(devices, "num_device_nodes", lambda kind: 4)),
    ("accelerators", "failed", lambda m: m.set(devices, "accelerator", no_cann)),
]


@pytest.mark.parametrize(("name", "status", "change"), CASES)
def test_limited_machine_fails_or_warns_with_a_remedy(machine, name, status, change):
    change(machine)
    line = machine.line(name)
    assert line.status == status
    if name in SUPPORTED:
        assert line.remedy == f"pip install '{name}{SUPPORTED[name]}'"
    if name == "vllm":
        assert line.remedy == platforms.INSTALL_ASCEND


def test_supported_versions_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for extra in project["optional-dependencies"].values() for line in extra]
    lower = dict(line.split(">=") for line in [*project["dependencies"], *extras] if ">=" in line)
    newest, lowest = (ROOT / f"constraints-{name}.txt" for name in ("newest", "lowest"))
    tested = re.search(r"^torch==(.*)$", newest.read_text(), re.MULTILINE)
    assert tested and SpecifierSet(SUPPORTED["torch"]).contains(tested[1])
    for name, supported in SUPPORTED.items():
        oldest = supported.removeprefix(">=").partition(",")[0]
        assert oldest == lower[name]
        if name not in doctor.OPTIONAL:
            assert re.search(rf"^{name}=={oldest}\.", lowest.read_text(), re.MULTILINE)


def run_doctor(*words, **environment):
    return subprocess.run(
        [sys.executable, "-m", "easyrl", "doctor", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, **environment},
    )


@pytest.mark.alone
def test_this_machine_can_run():
    done = run_doctor("--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["can_run"] and set(report["lines"][0]) == {"name", "status", "text", "remedy"}


def test_torch_that_cannot_be_imported_ends_with_exit_code_1(tmp_path):
    (tmp_path / "torch.py").write_text("raise OSError('libtorch.so: no such file')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = run_doctor(PYTHONPATH=path)
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    (failed,) = [line for line in done.stdout.splitlines() if line.startswith("failed")]
    assert "torch" in failed and "libtorch.so" in failed
