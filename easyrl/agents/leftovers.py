"""End the processes that an episode of an agent leaves, also those in sessions of their own.

    host process (adopts orphans)
      ├─ thread of an episode ─ command or child of a function ─ …     found by the thread
      └─ first thread         ─ orphan of a command                    found by its api key

Linux gives orphans to the first thread of the process that adopts them. An orphan of a function, or
a child of a coroutine, shows no episode: it is ended when no episode runs.
"""

import contextlib
import ctypes
import os
from collections.abc import Collection
from multiprocessing import resource_tracker
from pathlib import Path

from easyrl.processes import children_of, kill_with_descendants

LIBC = ctypes.CDLL(None)
PR_SET_CHILD_SUBREAPER = 36  # option of prctl
MAX_ROUNDS = 10
"""Processes may start others while they are ended: they are looked for again, so many times."""


def adopt_orphans() -> None:
    """Make this process the parent of all its descendants that lose their own."""
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children(process: int, thread: int) -> set[int]:
    """Return the processes that a thread has started or adopted."""
    try:
        text = Path(f"/proc/{process}/task/{thread}/children").read_text()
    except OSError:  # it has ended
        return set()
    return set(map(int, text.split()))


def end_leftovers(thread: int, api_key: str) -> None:
    """End what an episode has left. `thread`: that it has run in; `api_key`: its own, which the
    environment of its commands has."""
    own = os.getpid()
    for _ in range(MAX_ROUNDS):
        left = children(own, thread) - _helpers()
        left |= {each for each in children(own, own) if _has_key(each, api_key)}
        if not left:
            return
        _end(left)


def end_all(kept: Collection[int]) -> None:
    """End all processes that this one has started or adopted, but for `kept`."""
    for _ in range(MAX_ROUNDS):
        left = children_of(os.getpid()) - _helpers() - set(kept)
        if not left:
            return
        _end(left)


def _helpers() -> set[int]:
    """Return the process that Python starts by itself."""
    pid = getattr(resource_tracker._resource_tracker, "_pid", None)
    return set() if pid is None else {pid}


def _has_key(process: int, api_key: str) -> bool:
    try:
        return api_key.encode() in Path(f"/proc/{process}/environ").read_bytes()
    except OSError:
        return False


def _end(processes: set[int]) -> None:
    """Kill processes with their descendants."""
    kill_with_descendants(processes)
    for process in processes:
        with contextlib.suppress(ChildProcessError):  # its own code has waited for it
            os.waitpid(process, 0)
