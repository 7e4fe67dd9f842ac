"""Shared memory without a name, how much memory is available, and kills for lack of it."""

import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

NAME, MARK_BYTES = "easyrl", 16


def anonymous_memory(num_bytes: int) -> int:
    """Return the descriptor of zeroed shared memory without a name, of fixed size."""
    fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return fd


def mark_memory(memory: memoryview, fd: int) -> str:
    """Mark anonymous memory of descriptor `fd`; return a handle that other processes can open."""
    mark = os.urandom(MARK_BYTES)
    memory[:MARK_BYTES] = mark
    return f"/proc/{os.getpid()}/fd/{fd} {mark.hex()}"


def open_memory(handle: str) -> mmap.mmap:
    """Map the memory of another process of this machine, until it is marked anew. Raises
    RuntimeError if the handle is of another machine or container, or the system refuses."""
    name, mark = handle.split()
    try:
        if (path := Path(name)).readlink().name.startswith(f"memfd:{NAME}"):
            with path.open("r+b", buffering=0) as file:
                memory = mmap.mmap(file.fileno(), 0)
            if memory[:MARK_BYTES].hex() == mark:
                return memory
    except OSError as error:
        raise RuntimeError(str(error)) from error
    raise RuntimeError(f"{name} is not the sender's memory")


class Cgroup(NamedTuple):
    limit_bytes: float
    available_bytes: float
    oom_kills: int


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Return the available memory, page cache included: the minimum of the machine's and that of
    every cgroup above. `root`: the folder that contains /proc and /sys."""
    cgroups = (group.available_bytes for group in _memory_cgroups(root))
    return int(max(0, min([_machine_bytes(root, "MemAvailable"), *cgroups])))


def oom_kills(root: Path = Path("/")) -> int:
    """Return how many processes of this process's cgroup have been killed for lack of memory."""
    return next((group.oom_kills for group in _memory_cgroups(root)), 0)


def kill_reason(kills_before: int, root: Path = Path("/")) -> str:
    """Return what to add to "… was killed by SIGKILL", with `oom_kills` from before: the memory
    limit that was reached and what to lower; empty if nothing was killed for lack of memory."""
    if oom_kills(root) <= kills_before:
        return ""
    limits = (group.limit_bytes for group in _memory_cgroups(root))
    limit = min([_machine_bytes(root, "MemTotal"), *limits])
    return (
        f" because the memory limit of the machine or its cgroup ({limit / 2**20:,.0f} MiB) was "
        "reached; use fewer workers (devices.infer, devices.train), or lower "
        "rollout.max_concurrent_groups or train.max_tokens_per_micro_batch; --dry-run estimates "
        "the memory of a run"
    )


def _machine_bytes(root: Path, name: str) -> float:
    lines = (root / "proc/meminfo").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _memory_cgroups(root: Path) -> Iterator[Cgroup]:
    """Yield each cgroup (version 2) of this process, its own first, up to the topmost visible."""
    own, mount = root / "proc/self/cgroup", root / "sys/fs/cgroup"
    lines = own.read_text().splitlines() if own.exists() else []
    for path in (line.removeprefix("0::/") for line in lines if line.startswith("0::")):
        for group in [mount / path, *(mount / path).parents]:
            try:
                limit, usage, *tables = (
                    (group / f"memory.{name}").read_text()
                    for name in ("max", "current", "events", "stat")
                )
            except OSError:  # not visible, or the root, which has no limit
                continue
            kills, stat = (dict(row.split() for row in table.splitlines()) for table in tables)
            cache = (int(stat.get(f"{kind}_file", 0)) for kind in ("active", "inactive"))
            limit_bytes = float(limit.replace("max", "inf"))
            available_bytes = limit_bytes - int(usage) + sum(cache)
            yield Cgroup(limit_bytes, available_bytes, int(kills.get("oom_kill", 0)))
