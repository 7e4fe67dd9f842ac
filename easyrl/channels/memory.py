"""Memory from the operating system: shared memory without a name, how much is available, and kills
for lack of it."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
from collections.abc import Iterator
from pathlib import Path


def anonymous_memory(num_bytes: int) -> int:
    """Return the descriptor of zeroed shared memory without a name, of fixed size."""
    fd = os.memfd_create("easyrl", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return fd


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Return the available memory: the minimum of the machine's and that of every cgroup above.

    Page cache counts as available. `root` is the folder that contains /proc and /sys.
    """
    cgroups = (available for _, available in _cgroup_memory_bytes(root))
    return max(0, min([_machine_bytes(root, "MemAvailable"), *cgroups]))


def oom_kills(root: Path = Path("/")) -> int:
    """Return how many processes of this process's cgroup have been killed for lack of memory."""
    for group, version in _memory_cgroups(root):
        file = group / ("memory.events" if version == 2 else "memory.oom_control")
        with contextlib.suppress(OSError):
            return int(_counts(file).get("oom_kill", 0))
    return 0


def kill_reason(kills_before: int, root: Path = Path("/")) -> str:
    """Return what to add to "… was killed by SIGKILL", with `oom_kills` from before: the memory
    limit that was reached and what to lower; empty if nothing was killed for lack of memory."""
    if oom_kills(root) <= kills_before:
        return ""
    limit = min((limit for limit, _ in _cgroup_memory_bytes(root)), default=math.inf)
    is_cgroup = limit < _machine_bytes(root, "MemTotal")
    reached = f"the memory limit of its cgroup ({limit / 2**20:,.0f} MiB)"
    return (
        f" because {reached if is_cgroup else 'the memory of the machine'} was reached; use fewer "
        "workers (devices.infer, devices.train), or lower rollout.max_concurrent_groups or "
        "train.max_tokens_per_micro_batch; --dry-run estimates the memory of a run"
    )


def _machine_bytes(root: Path, name: str) -> int:
    lines = (root / "proc/meminfo").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _memory_cgroups(root: Path) -> Iterator[tuple[Path, int]]:
    """Yield each memory cgroup of this process, its own first, up to the topmost visible one, and
    the version of cgroups."""
    own, mount = root / "proc/self/cgroup", root / "sys/fs/cgroup"
    lines = own.read_text().splitlines() if own.exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, version = mount, 2
        elif "memory" in controllers.split(","):
            base, version = mount / "memory", 1
        else:
            continue
        folder = base / path.lstrip("/")
        for group in [folder, *folder.parents]:
            if group.is_relative_to(base):
                yield group, version


def _cgroup_memory_bytes(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit and the available memory of each memory cgroup of this process."""
    for group, version in _memory_cgroups(root):
        if version == 2:
            limit, usage, prefix = "memory.max", "memory.current", ""
        else:
            limit, usage, prefix = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
        try:
            limit_bytes = int((group / limit).read_text())
            used_bytes = int((group / usage).read_text())
            stat = _counts(group / "memory.stat")
        except (OSError, ValueError):  # no such file, or "max": no limit
            continue
        cache = (stat.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
        yield limit_bytes, limit_bytes - used_bytes + sum(map(int, cache))


def _counts(file: Path) -> dict[str, str]:
    return dict(row.split() for row in file.read_text().splitlines())
