"""`easyrl doctor`: check what EasyRL can use on this machine, and print how to fix the rest.

A line is `ok`, a `warning` (some runs cannot start or are slower), or `failed` (no run can start).
The last two contain a remedy. Nothing on the machine is changed.
"""

from __future__ import annotations

import json
import math
import os
import platform
import resource
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from easyrl import devices
from easyrl.channels.memory import available_memory_bytes
from easyrl.engines.vllm import platforms
from easyrl.processes import num_cores
from easyrl.rewards import sandbox

SUPPORTED = {"torch": ">=2.10,<2.16", "transformers": ">=5.14", "peft": ">=0.21"}
"""Lower bounds as in pyproject.toml; the upper bound is above the newest version tested."""
OPTIONAL = {"peft": "LoRA"}
MIB, GIB = 2**20, 2**30
MEMORY_BYTES = 1 * GIB, 4 * GIB  # needed by any run; by models of 1.7B
DISK_BYTES = 16 * MIB, 10 * GIB  # needed by the demo; by models of 1.7B
OPEN_FILES = 64, 1024  # needed by the demo; by runs with many workers
SHARED_MEMORY_BYTES = 1 * GIB
MIN_FREE_FRACTION = 0.5  # of a device's memory: with less, another program uses it
Status = Literal["ok", "warning", "failed"]


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    status: Status
    text: str
    remedy: str = ""


def run_doctor(*, as_json: bool) -> int:
    """Print the report; return the exit code: 1 if no run can start."""
    lines = list(check())
    can_run = all(line.status != "failed" for line in lines)
    if as_json:
        print(json.dumps({"can_run": can_run, "lines": [asdict(line) for line in lines]}, indent=2))
    else:
        _print(lines, can_run)
    return 0 if can_run else 1


def check() -> Iterator[Line]:
    """Check this machine in a second or two, most of it to import torch."""
    yield Line("python", "ok", f"{platform.python_version()}, {platform.machine()}")
    yield from _packages()
    kind, lines = _accelerators()
    yield from lines
    yield _vllm(kind)
    yield Line("CPU cores", "ok", f"{num_cores()} of {os.cpu_count()} usable")
    yield from _resources(
        needs_shared_memory=len(lines) > 1 or platforms.vllm_version() is not None
    )
    yield _code_sandbox()


def _packages() -> Iterator[Line]:
    versions = {name: _version(name) for name in (*SUPPORTED, *devices.BACKEND_PACKAGES.values())}
    supported = dict(SUPPORTED)
    for name in devices.BACKEND_PACKAGES.values():
        if versions["torch"] and versions[name]:  # its minor version is torch's
            release = Version(versions["torch"]).release
            supported[name] = f"=={release[0]}.{release[1]}.*"
    for name, bounds in supported.items():
        version, remedy = versions[name], f"pip install '{name}{bounds}'"
        if version is None and name in OPTIONAL:
            yield Line(name, "ok", f"not installed; only {OPTIONAL[name]} needs it")
        elif version is None:
            yield Line(name, "failed", "not installed", remedy)
        elif not SpecifierSet(bounds).contains(Version(version).base_version):
            yield Line(name, "failed", f"expected {bounds}, got {version}", remedy)
        elif name == "torch" and (error := _import_error()):
            remedy = f"install what is missing, or install it again: {remedy}"
            yield Line(name, "failed", f"{version} cannot be imported: {error}", remedy)
        else:
            yield Line(name, "ok", version)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _import_error() -> str | None:
    try:
        import torch  # noqa: F401
    except Exception as error:  # any: a broken installation raises many types
        return _one_line(error)
    return None


def _accelerators() -> tuple[str, list[Line]]:
    """Return the kind, and a line for each device."""
    present = [kind for kind in devices.VISIBLE_DEVICES if devices.num_device_nodes(kind)]
    variables = [name for name in devices.VISIBLE_DEVICES.values() if name in os.environ]
    visible = "".join(f" ({name}={os.environ[name]})" for name in variables)
    try:
        kind, count = devices.accelerator()
        if count:
            return kind, [_accelerator(kind, index, visible) for index in range(count)]
    except Exception as error:  # also of a torch that cannot be imported
        text, _, remedy = _one_line(error).removeprefix("devices: ").partition("; ")
        status: Status = "failed" if present else "warning"
        return "cpu", [Line("accelerators", status, text, remedy or devices.USE_THE_CPU)]
    if present:
        text = f"devices of kind {present[0]}, but torch finds none{visible}: runs use the CPU"
        line = Line("accelerators", "warning", text, devices.HOW_TO_SEE[present[0]])
    else:
        line = Line("accelerators", "ok", f"none{visible}: runs use the CPU")
    return "cpu", [line]


def _accelerator(kind: str, index: int, visible: str) -> Line:
    free, total = devices.free_memory_bytes(kind, index), devices.total_memory_bytes(kind, index)
    dtypes = "bfloat16" if devices.supports_bfloat16(kind) else "float32 only"
    label, name = devices.device_label(kind, index), f"{kind}:{index}"
    text = f"{label}, {_size(free)} of {_size(total)} free, {dtypes}{visible}"
    if free >= MIN_FREE_FRACTION * total:
        return Line(name, "ok", text)
    remedy = f"find the program that uses it ({devices.SEE_PROCESSES}), or use other devices"
    return Line(name, "warning", text, remedy)


def _vllm(kind: str) -> Line:
    version, ascend = platforms.vllm_version(), platforms.vllm_ascend_version()
    if version is None:
        return Line("vllm", "ok", "not installed; only rollout.engine=vllm needs it")
    if (reason := platforms.unsupported_reason(kind)) is not None:
        text, _, remedy = reason.rpartition(": ")
        return Line("vllm", "warning", f"{text}; runs use the embedded engine", remedy)
    if ascend is not None:
        return Line("vllm", "ok", f"{version}, vllm-ascend {ascend} (not yet run on an NPU)")
    return Line("vllm", "ok", version)


def _resources(*, needs_shared_memory: bool) -> Iterator[Line]:
    available = available_memory_bytes()
    remedy = "end other programs, or raise the memory limit"
    yield _judge("memory", f"{_size(available)} available", available, MEMORY_BYTES, remedy)

    shared = _free_bytes(Path("/dev/shm"))
    limits = 0, SHARED_MEMORY_BYTES * needs_shared_memory
    remedy = "--shm-size=8g or --ipc=host (docker run): vLLM and several devices need it"
    yield _judge("shared memory", f"{_size(shared)} free in /dev/shm", shared, limits, remedy)

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    num_files = math.inf if limit == resource.RLIM_INFINITY else limit
    yield _judge("open files", f"at most {num_files}", num_files, OPEN_FILES, "ulimit -n 65536")

    runs = Path("runs").absolute()
    disk = _free_bytes(runs) if _is_writable(runs) else 0
    text = f"{_size(disk)} free for {runs}" if disk else f"{runs} is not writable"
    yield _judge("disk", text, disk, DISK_BYTES, "use a folder on another disk with --output")

    from huggingface_hub.constants import HF_HUB_CACHE

    is_writable = _is_writable(Path(HF_HUB_CACHE))
    text = HF_HUB_CACHE if is_writable else f"{HF_HUB_CACHE} is not writable: nothing is downloaded"
    remedy = "" if is_writable else "set HF_HUB_CACHE to a writable folder"
    yield Line("hub cache", "ok" if is_writable else "warning", text, remedy)


def _code_sandbox() -> Line:
    try:
        sandbox.find_variant("bwrap")
    except sandbox.SandboxError as error:
        text, _, remedy = str(error).rpartition("\n")
        return Line("code sandbox", "warning", f"--reward code cannot run: {text}", remedy)
    return Line("code sandbox", "ok", "bwrap")


def _judge(name: str, text: str, value: float, limits: tuple[int, int], remedy: str) -> Line:
    """`failed` below the first limit, `warning` below the second."""
    if value >= max(limits):
        return Line(name, "ok", text)
    if value >= limits[0]:
        return Line(name, "warning", f"{text}: enough for small runs only", remedy)
    return Line(name, "failed", text, remedy)


def _existing(path: Path) -> Path:
    """The folder itself, or its nearest parent that exists."""
    return next(folder for folder in (path, *path.parents) if os.access(folder, os.F_OK))


def _is_writable(folder: Path) -> bool:
    """Try it: permissions do not show a read-only disk."""
    try:
        with tempfile.TemporaryFile(dir=_existing(folder)):
            return True
    except OSError:
        return False


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(_existing(folder)).free


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.1f} GiB" if num_bytes >= GIB // 4 else f"{num_bytes // MIB} MiB"


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split()).removeprefix("ValueError: ")


def _print(lines: list[Line], can_run: bool) -> None:
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    console = Console(highlight=False)
    marks = {"ok": ("ok", "green"), "warning": ("warn", "yellow"), "failed": ("FAIL", "bold red")}
    table = Table.grid(Column(), Column(), Column(overflow="fold"), padding=(0, 2))
    for line in lines:
        table.add_row(Text(*marks[line.status]), Text(line.name), Text(line.text))
        if line.remedy:
            table.add_row("", "", Text(f"-> {line.remedy}"))
    console.print(table, width=min(console.width, 80))
    console.print("runs can start" if can_run else "no run can start before each FAIL is fixed")
