"""`easyrl doctor`: check what EasyRL can use on this machine, and print how to fix the rest.

A line is `ok`, a `warning` (some runs cannot start or are slower), or `failed` (no run can start).
The last two contain a remedy.
"""

import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from easyrl import devices
from easyrl.engines.vllm import platforms
from easyrl.formatting import EXTRAS, install_command
from easyrl.processes import available_memory_bytes, num_cores
from easyrl.rewards import sandbox
from easyrl.runtime import self_test
from easyrl.runtime.fork_server import MODULES
from easyrl.runtime.memory_estimate import GIB, in_gib

SUPPORTED = {"torch": ">=2.10,<2.16", "transformers": ">=5.14", "peft": ">=0.21"}
"""Lower bounds as in pyproject.toml; the upper bound is above the newest version tested."""


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    status: Literal["ok", "warning", "failed"]
    text: str
    remedy: str = ""


def run_doctor(*, has_test: bool) -> int:
    """Print the report; return the exit code: 1 if no run can start or a part of the test fails."""
    lines: list[Line] = []

    def add(line: Line) -> None:
        lines.append(line)
        print(f"{line.status:<8} {line.name:<13} {line.text}", flush=True)
        if line.remedy:
            print(f"{'':<22} -> {line.remedy}")

    for line in check():
        add(line)
    can_run = all(line.status != "failed" for line in lines)
    if has_test and can_run:
        for result in self_test.check_all():
            add(_line_of_test(result))
    print("runs can start" if can_run else "no run can start before each failed line is fixed")
    return int(any(line.status == "failed" for line in lines))


def _line_of_test(result: self_test.Result) -> Line:
    part, seconds, error, safe = result
    if not error:
        return Line(part, "ok", f"passed ({seconds:.0f} s)")
    remedy = f"passes with {safe}" if safe else "use other devices"
    return Line(part, "failed", f"{error} ({seconds:.0f} s)", remedy)


def check() -> Iterator[Line]:
    """Check this machine in some seconds, most of them to import torch and transformers."""
    yield Line("python", "ok", f"{platform.python_version()}, {platform.machine()}")
    packages = list(map(_package, SUPPORTED))
    yield from packages
    if all(line.status == "ok" for line in packages):
        yield _workers()
    kind, lines = _accelerators()
    yield from lines
    if kind not in ("cpu", devices.ASCEND) and not devices.has_c_compiler():
        yield Line("C compiler", "warning", "none: GPU kernels need one", "apt install gcc")
    yield _vllm(kind)
    yield _extras()
    yield Line("memory", "ok", f"{in_gib(available_memory_bytes())}, {num_cores()} CPU cores")
    uses_shared_memory = len(lines) > 1 or platforms.vllm_version() is not None
    free = shutil.disk_usage("/dev/shm").free
    if uses_shared_memory and free < GIB:
        text = f"{in_gib(free)} free in /dev/shm; vLLM and several devices need 1 GiB"
        yield Line("shared memory", "warning", text, "docker run --shm-size=8g")
    yield _code_sandbox()


def _extras() -> Line:
    missing = sorted(name for name, module in EXTRAS.items() if find_spec(module) is None)
    if not missing:
        return Line("extras", "ok", "all are installed")
    text = f"missing: {', '.join(missing)} (to install: {install_command('NAME')})"
    return Line("extras", "ok", text)


def _package(name: str) -> Line:
    bounds = SUPPORTED[name]
    version = platforms.package_version(name)
    remedy = f"pip install '{name}{bounds}'"
    if version is None and name == "peft":
        return Line(name, "ok", "not installed; only LoRA needs it")
    if version is None:
        return Line(name, "failed", "not installed", remedy)
    if not SpecifierSet(bounds).contains(Version(version).base_version):
        return Line(name, "failed", f"expected {bounds}, got {version}", remedy)
    return Line(name, "ok", version)


def _workers() -> Line:
    """Import what workers import, as they do: in a process of its own."""
    program = f"import {', '.join(MODULES)}"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return Line("workers", "ok", "can be imported")
    text = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
    remedy = f"see the whole error: {shlex.join(command)}"
    return Line("workers", "failed", f"cannot be imported: {text}", remedy)


def _accelerators() -> tuple[str, list[Line]]:
    """Return the kind of the accelerators that runs use, `cpu` if there are none, and what is known
    of each."""
    try:
        kind, count = devices.accelerator()
    except Exception as error:  # also of a torch that cannot be imported
        text, _, remedy = " ".join(f"{type(error).__name__}: {error}".split()).partition("; ")
        return "cpu", [Line("accelerators", "failed", text, remedy)]
    lines = []
    for index in range(count):
        size = in_gib(devices.total_memory_bytes(kind, index))
        lines.append(Line(f"{kind}:{index}", "ok", f"{devices.device_label(kind, index)}, {size}"))
    if lines:
        return kind, lines
    for kind in devices.VISIBLE_DEVICES:
        if devices.num_device_nodes(kind):
            remedy = "install torch's build and the driver for them (docs/ascend.md for NPUs)"
            reason = devices.unusable_reason() or "torch gives no reason"
            text = f"torch cannot use the devices of kind {kind} ({reason}): runs use the CPU"
            return "cpu", [Line("accelerators", "warning", text, remedy)]
    return "cpu", [Line("accelerators", "ok", "none: runs use the CPU")]


def _vllm(kind: str) -> Line:
    version = platforms.vllm_version()
    if version is None:
        return Line("vllm", "ok", "not installed; only rollout.engine=vllm needs it")
    reason = platforms.unsupported_reason(kind)
    if reason is not None:
        text, _, remedy = reason.rpartition(": ")
        return Line("vllm", "warning", f"{text}; runs use the embedded engine", remedy)
    ascend = platforms.package_version("vllm-ascend")
    return Line("vllm", "ok", f"{version}, vllm-ascend {ascend}" if ascend else version)


def _code_sandbox() -> Line:
    try:
        sandbox.find_variant("bwrap")
    except sandbox.SandboxError as error:
        text, _, remedy = str(error).rpartition("\n")
        return Line("code sandbox", "warning", f"--reward code cannot run: {text}", remedy)
    return Line("code sandbox", "ok", "bwrap")
