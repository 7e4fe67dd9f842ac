"""`easyrl doctor`: of every check the side that fails, from made-up facts; and this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from easyrl import devices
from easyrl.doctor import checks, facts
from easyrl.doctor.checks import Line, can_run, check, summary_of_links
from easyrl.doctor.facts import DeviceFacts, Facts
from easyrl.doctor.report import to_json, to_text
from easyrl.engines.vllm_ascend import INSTALL as ASCEND
from easyrl.rewards.sandbox import Walls

MIB, GIB = 2**20, 2**30
VERSIONS = {
    "torch": "2.13.0+cpu",
    "transformers": "5.23.0",
    "peft": None,
    "torch_npu": None,
}
GPU = DeviceFacts("cuda:0", "H200", 140 * GIB, 139 * GIB, bfloat16=True)
HEALTHY = Facts(
    python="3.11.7",
    system="Linux x86_64",
    packages=VERSIONS,
    torch_error=None,
    vllm=None,
    vllm_obstacle=None,
    vllm_ascend=None,
    device_error=None,
    kind="cpu",
    accelerators=[],
    num_nodes={"cuda": 0, "npu": 0},
    visible={},
    links="",
    machine_cores=8,
    allowed_cores=8,
    usable_cores=8,
    memory_bytes=32 * GIB,
    available_bytes=20 * GIB,
    shared_memory_bytes=64 * MIB,
    has_memfd=True,
    open_files=65536,
    open_files_hard=65536,
    runs_folder="/home/me/runs",
    runs_writable=True,
    disk_free_bytes=100 * GIB,
    hub_cache="/home/me/.cache/huggingface/hub",
    hub_cache_writable=True,
    code_walls=Walls("namespaces", 7, seccomp=True, own_user=True),
    code_error=None,
)


def line_of(name: str, **changes: Any) -> Line:
    """The line `name` where the facts are changed so; all others stay as they are."""
    changed = {line.name: line for line in check(replace(HEALTHY, **changes))}
    return changed[name]


def versions(**changed: str | None) -> dict[str, dict[str, str | None]]:
    return {"packages": {**VERSIONS, **changed}}


def test_a_healthy_machine_has_no_remedies() -> None:
    lines = check(HEALTHY)
    assert can_run(lines) and all(line.status == "ok" and not line.remedy for line in lines)


FAILING: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "no torch": ("torch", versions(torch=None), "not installed", "pip install 'torch>=2.10,<2.14'"),
    "old torch": ("torch", versions(torch="2.9.1"), "2.9.1 came, supported: >=2.10", "<2.14"),
    "new torch": ("torch", versions(torch="2.14.0"), "2.14.0 came", "pip install 'torch"),
    "broken torch": ("torch", {"torch_error": "OSError: libc10"}, "libc10", "install torch again"),
    "no transformers": ("transformers", versions(transformers=None), "not installed", "pip"),
    "old transformers": ("transformers", versions(transformers="5.9.0"), ">=5.14", "pip install"),
    "torch_npu of another torch": (
        "torch_npu",
        versions(torch_npu="2.11.0.post3"),
        "not made for torch 2.13.0+cpu",
        "pip install torch_npu==2.13.*",
    ),
    "NPUs without CANN": (
        "accelerators",
        {"device_error": "devices: no CANN; install it", "num_nodes": {"cuda": 0, "npu": 2}},
        "no CANN",
        "install it",
    ),
    "no memory": ("memory", {"available_bytes": 600 * MIB}, "1.0 GiB before", "memory limit"),
    "no shared memory of either kind": (
        "shared memory",
        {"has_memfd": False},
        "64 MiB free in /dev/shm, and no memfd",
        "--shm-size",
    ),
    "hardly any open files": (
        "open files",
        {"open_files": 40, "open_files_hard": 4096},
        "40 may be open",
        "ulimit -n 4096",
    ),
    "hard limit of open files": (
        "open files",
        {"open_files": 40, "open_files_hard": 40},
        "40 may be open",
        "raise the hard limit",
    ),
    "read-only folder": ("disk", {"runs_writable": False}, "cannot be written", "--output"),
    "full disk": ("disk", {"disk_free_bytes": MIB}, "1 MiB free", "--output"),
}


@pytest.mark.parametrize("case", FAILING)
def test_what_keeps_a_run_from_starting_fails_with_its_remedy(case: str) -> None:
    name, changes, text, remedy = FAILING[case]
    line = line_of(name, **changes)
    assert line.status == "failed"
    assert text in line.text and remedy in line.remedy
    assert not can_run(check(replace(HEALTHY, **changes)))


WARNING: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "GPUs that torch does not see": (
        "accelerators",
        {"num_nodes": {"cuda": 4, "npu": 0}, "visible": {"CUDA_VISIBLE_DEVICES": ""}},
        "4 of kind cuda here, but torch sees none (CUDA_VISIBLE_DEVICES=)",
        "torch's build for CUDA",
    ),
    "torch_npu that fails without an NPU": (
        "accelerators",
        {"device_error": "cannot load CANN"},
        "CANN",
        "--train-devices cpu",
    ),
    "a device that somebody uses": (
        "cuda:0",
        {"accelerators": [replace(GPU, free_bytes=20 * GIB)]},
        "20.0 GiB of 140.0 GiB free",
        "see who holds it",
    ),
    "little memory": ("memory", {"available_bytes": 2 * GIB}, "small models", "end other programs"),
    "small /dev/shm for several devices": (
        "shared memory",
        {"accelerators": [GPU, replace(GPU, name="cuda:1")]},
        "64 MiB free in /dev/shm: several devices",
        "--ipc=host",
    ),
    "small /dev/shm for vLLM": (
        "shared memory",
        {"vllm": "0.32.0"},
        "64 MiB free in /dev/shm: vLLM's processes",
        "--shm-size",
    ),
    "few open files": ("open files", {"open_files": 256}, "few workers", "ulimit -n 65536"),
    "little disk": ("disk", {"disk_free_bytes": GIB}, "1.0 GiB free", "--output"),
    "hub cache that cannot be written": (
        "hub cache",
        {"hub_cache_writable": False},
        "cannot be written",
        "HF_HUB_CACHE",
    ),
    "no namespaces": (
        "code sandbox",
        {"code_walls": Walls("plain", 7, seccomp=True, own_user=True)},
        "Landlock 7, seccomp; a program that is scored could fill the disk",
        "user namespaces",
    ),
    "no walls": (
        "code sandbox",
        {"code_walls": Walls("plain", 0, seccomp=False, own_user=False)},
        "limits alone; a program that is scored could read and write what its user can",
        "reward.code_sandbox=best_effort",
    ),
    "no sandbox": (
        "code sandbox",
        {"code_walls": None, "code_error": "no such thing"},
        "--reward code cannot be used: no such thing",
        "user namespaces",
    ),
}


@pytest.mark.parametrize("case", WARNING)
def test_what_only_limits_runs_warns_with_its_remedy(case: str) -> None:
    name, changes, text, remedy = WARNING[case]
    line = line_of(name, **changes)
    assert line.status == "warning"
    assert text in line.text and remedy in line.remedy
    assert can_run(check(replace(HEALTHY, **changes)))


def test_accelerators_are_told_with_what_they_can_do() -> None:
    line = line_of("cuda:0", accelerators=[GPU], kind="cuda")
    assert line == Line("cuda:0", "ok", "H200, 139.0 GiB of 140.0 GiB free, bfloat16")
    shown = {"accelerators": [GPU], "visible": {"CUDA_VISIBLE_DEVICES": "3"}}
    assert "(CUDA_VISIBLE_DEVICES=3)" in line_of("visible", **shown).text


def test_masks_and_quotas_are_told() -> None:
    text = line_of("CPU cores", allowed_cores=6, usable_cores=2).text
    assert text == "2 of 8 usable, 6 by this process's mask, by the container's quota"


def test_optional_packages_are_not_missed() -> None:
    assert line_of("peft").status == "ok"
    assert line_of("vllm").status == "ok"
    assert line_of("vllm", vllm="0.32.0").text == "0.32.0"
    assert line_of("torch_npu", **versions(torch_npu="2.13.0")).status == "ok"


def test_a_vllm_that_cannot_be_used_is_told_with_what_mends_it() -> None:
    obstacle = (
        "vLLM 0.33.1 is installed, EasyRL works with 0.28 to 0.32: pip install 'easyrl[vllm]'"
    )
    line = line_of("vllm", vllm="0.33.1", vllm_obstacle=obstacle)
    assert (line.status, line.remedy) == ("warning", "pip install 'easyrl[vllm]'")
    assert "0.28 to 0.32; runs take the embedded engine" in line.text


def test_what_makes_vllm_run_on_npus_is_told_with_what_it_has_not_done() -> None:
    line = line_of("vllm-ascend", vllm="0.30.0", vllm_ascend="0.30.0rc2")
    assert line.status == "ok" and line.text.startswith("0.30.0rc2, read and not run")
    assert "model.dtype=bfloat16" in line.text
    no_pair = "vllm-ascend 0.29.0rc1 is for vLLM 0.29.0, but vLLM 0.30.0 is installed: " + ASCEND
    line = line_of("vllm", vllm="0.30.0", vllm_obstacle=no_pair)
    assert (line.status, line.remedy) == ("warning", ASCEND)


def test_the_versions_supported_are_those_that_the_package_asks_for() -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"].values()
    asked = [*project["project"]["dependencies"], *(one for extra in extras for one in extra)]
    by_name = dict(word.split(">=") for word in asked if ">=" in word)
    for name in {*checks.SUPPORTED} & {*by_name}:
        assert checks.SUPPORTED[name][0] == by_name[name]
    assert {*checks.NEEDED} <= {*by_name}
    constraints = (Path(__file__).parent.parent / "constraints.txt").read_text()
    assert f"torch<{checks.SUPPORTED['torch'][1]}" in constraints
    lowest = (Path(__file__).parent.parent / "constraints-lowest.txt").read_text()
    for name in checks.NEEDED:  # what `make test-lowest` tests
        assert re.search(rf"^{name}=={by_name[name]}\.", lowest, re.MULTILINE)


MATRIX = """\
\tGPU0\tGPU1\tGPU2\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tNV18\tSYS\t0-23\t0\t\tN/A
GPU1\tNV18\t X \tSYS\t0-23\t0\t\tN/A
GPU2\tSYS\tSYS\t X \t24-47\t1\t\tN/A

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def test_links_are_counted_by_pairs() -> None:
    assert summary_of_links(MATRIX) == "SYS: 2 pair(s), NV18: 1 pair(s)"
    assert summary_of_links("") == summary_of_links("No devices were found") == ""
    assert line_of("links", links=MATRIX).text.startswith("SYS: 2")


@pytest.mark.alone
def test_a_command_that_is_not_there_or_hangs_costs_only_its_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(facts, "COMMAND_SECONDS", 0.2)
    python = (sys.executable, "-c")
    for command, expected in (
        (("no-such-command",), ""),
        ((*python, "import time; time.sleep(60)"), ""),
        ((*python, "print('lines'); raise SystemExit(9)"), ""),
        (("echo", "\x1b[4mGPU0\x1b[0m X"), "GPU0 X\n"),
    ):
        monkeypatch.setitem(devices.LINK_COMMANDS, "cuda", command)
        assert facts._links("cuda") == expected


def test_a_folder_is_tried_by_its_nearest_parent(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert facts._is_writable(tmp_path / "not" / "yet" / "there")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
    assert not facts._is_writable(Path("/proc/self/fd"))


def test_a_folder_that_cannot_be_looked_at_is_not_writable_or_goes_by_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert facts._is_writable(tmp_path / ("x" * 300))  # no file system takes such a name

    def refuse(path: Path) -> bool:
        if path == Path("/"):
            return True
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", refuse)
    assert facts._there(tmp_path / "home" / "hub") == Path("/")


@pytest.mark.parametrize("width", [40, 80])
def test_lines_are_folded_to_the_terminal(width: int) -> None:
    every = [
        line for _, changes, *_ in FAILING.values() for line in check(replace(HEALTHY, **changes))
    ]
    for line in [*every, Line("disk", "failed", "/a" * 90, "see https://" + "x" * 90)]:
        assert all(len(text) <= width for text in to_text(line, width))
    assert to_text(Line("memory", "failed", "none", "buy some"), 80) == [
        "FAIL  memory         none",
        "                     -> buy some",
    ]


def test_json_has_lines_facts_and_the_verdict() -> None:
    report = json.loads(to_json(HEALTHY, check(HEALTHY)))
    assert report["can_run"] and report["facts"]["packages"]["torch"] == "2.13.0+cpu"
    assert {"name", "status", "text", "remedy"} == set(report["lines"][0])


def doctor(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "easyrl", "doctor", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, **environment},
    )


@pytest.mark.alone
def test_this_machine_can_run(tmp_path: Path) -> None:
    done = doctor("--json")
    assert done.returncode == 0 and done.stderr == ""
    report = json.loads(done.stdout)
    assert report["can_run"] and report["facts"]["memory_bytes"] > 0
    plain = doctor(NO_COLOR="1", FORCE_COLOR="1", COLUMNS="200")
    assert plain.returncode == 0 and "\x1b[3" not in plain.stdout
    assert all(len(line) <= 80 for line in plain.stdout.splitlines())
    assert plain.stdout.splitlines()[-1].startswith("runs can start")
    assert "\x1b[32mok" in doctor(FORCE_COLOR="1", TERM="xterm-256color", NO_COLOR="").stdout


def test_a_machine_that_cannot_run_ends_with_code_1(tmp_path: Path) -> None:
    """A torch that cannot be imported: its place is taken by a module that fails."""
    (tmp_path / "torch.py").write_text("raise OSError('libtorch.so: no such file')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = doctor(PYTHONPATH=path, COLUMNS="80")
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    (failed,) = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert failed.startswith("FAIL  torch")
    assert "libtorch.so" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("no run can start")
