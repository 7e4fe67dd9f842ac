"""`easyrl doctor`: each check on machines that fail it, and this machine."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from easyrl import devices
from easyrl.cli import doctor
from easyrl.cli.doctor import GIB, SUPPORTED, check
from easyrl.engines.vllm import platforms
from easyrl.rewards import sandbox

ROOT = Path(__file__).parent.parent


DISK = SimpleNamespace(free=GIB // 16)
VLLM, UNUSABLE = {"vllm_version": lambda: "0.34.1"}, {"unsupported_reason": lambda kind: "too new"}


@pytest.mark.parametrize(
    ("name", "status", "module", "facts"),
    [
        ("torch", "failed", platforms, {"package_version": lambda name: None}),
        ("torch", "failed", platforms, {"package_version": lambda name: "2.16.0"}),
        ("workers", "failed", doctor, {"MODULES": ("no_such_module",)}),
        ("shared memory", "warning", shutil, {"disk_usage": lambda path: DISK}),
        ("vllm", "warning", platforms, VLLM | UNUSABLE),
        ("code sandbox", "warning", sandbox, {"_bwrap_command": lambda variant: ["no-such-bwrap"]}),
        ("accelerators", "warning", devices, {"num_device_nodes": lambda kind: 4}),
        ("accelerators", "failed", devices, {"accelerator": Mock(side_effect=OSError("CANN"))}),
    ],
)
def test_limited_machine_fails_or_warns_with_a_remedy(monkeypatch, name, status, module, facts):
    monkeypatch.setattr(platforms, "vllm_version", lambda: "0.32.0")
    monkeypatch.setattr(sandbox, "find_variant", sandbox.find_variant.__wrapped__)
    monkeypatch.setattr(doctor, "MODULES", ("json",))  # not torch, which takes seconds
    for fact, value in facts.items():
        monkeypatch.setattr(module, fact, value)
    line = next(line for line in check() if line.name == name)
    assert line.status == status
    assert name != "torch" or line.remedy == f"pip install 'torch{SUPPORTED[name]}'"


def test_supported_versions_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for extra in project["optional-dependencies"].values() for line in extra]
    needed = [Requirement(line) for line in (*project["dependencies"], *extras)]
    bounds = {each.name: each.specifier for each in needed}
    assert bounds["vllm"] == platforms.VLLM and bounds["vllm-ascend"] == platforms.VLLM_ASCEND
    tested = re.search(r"^torch==(.*)$", (ROOT / "constraints-newest.txt").read_text(), re.M)
    assert tested and SpecifierSet(SUPPORTED["torch"]).contains(tested[1])
    lowest = (ROOT / "constraints-lowest.txt").read_text()
    for name, supported in SUPPORTED.items():
        oldest = supported.removeprefix(">=").partition(",")[0]
        assert f">={oldest}" in str(bounds[name])
        assert name == "peft" or re.search(rf"^{name}=={oldest}\.", lowest, re.M)


@pytest.mark.alone
@pytest.mark.parametrize("is_broken", [False, True])
def test_this_machine_can_run_unless_torch_cannot_be_imported(is_broken, tmp_path):
    if is_broken:
        (tmp_path / "torch.py").write_text("raise OSError('libtorch.so: no such file')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    how = {"capture_output": True, "text": True, "env": {**os.environ, "PYTHONPATH": path}}
    done = subprocess.run([sys.executable, "-m", "easyrl", "doctor"], check=False, **how)
    assert (done.returncode, done.stderr) == (int(is_broken), "")
    failed = "".join(re.findall(r"^failed .*", done.stdout, re.MULTILINE))
    assert ("libtorch.so" in failed) == is_broken == ("\nruns can start\n" not in done.stdout)
