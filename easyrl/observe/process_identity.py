"""Whether the process that writes a run's files still lives, as far as it can be seen from here."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def identity_of_this_process() -> dict[str, Any]:
    """What another process needs to look for this one: process ids mean something on one machine
    and in one container, and are given again."""
    return {"pid": os.getpid(), "pid_started": _started(os.getpid()), "pid_space": _pid_space()}


def is_alive(identity: Mapping[str, Any]) -> bool | None:
    """None: cannot be known from here (another machine or container)."""
    if identity.get("pid_space") != _pid_space() or identity["pid_started"] is None:
        return None
    return bool(_started(identity["pid"]) == identity["pid_started"])


def _started(pid: int) -> int | None:
    """When a process began, in ticks since the machine did; None where there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # from the third on; a name may hold anything
    return None if fields[0] in "ZX" else int(fields[19])


def _pid_space() -> str:
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        namespace = ""
    return f"{socket.gethostname()} {namespace}"
