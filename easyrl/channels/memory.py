"""Memory from the operating system: shared memory without a name, and how much is available."""

from __future__ import annotations

import fcntl
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
    lines = (root / "proc/meminfo").read_text().splitlines()
    kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return max(0, min([kib * 1024, *_cgroup_memory_bytes(root)]))


def _cgroup_memory_bytes(root: Path) -> Iterator[int]:
    """Yield the available memory of each cgroup of this process, up to the topmost visible one."""
    own, mount = root / "proc/self/cgroup", root / "sys/fs/cgroup"
    lines = own.read_text().splitlines() if own.exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            base, limit, usage, prefix = mount, "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):  # version 1
            base, prefix = mount / "memory", "total_"
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = base / path.lstrip("/")
        for group in [folder, *folder.parents]:
            if not group.is_relative_to(base):
                break
            try:
                limit_bytes = int((group / limit).read_text())
                used_bytes = int((group / usage).read_text())
                stat = dict(row.split() for row in (group / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):  # no such file, or "max": no limit
                continue
            cache = (stat.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
            yield limit_bytes - used_bytes + sum(map(int, cache))
