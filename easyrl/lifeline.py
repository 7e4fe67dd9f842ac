"""What ties a process to the one that asked for it."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing import forkserver
from multiprocessing.connection import wait
from typing import Any

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """End this process when the one that asked for it ends, however that comes about: SIGKILL
    included. Where multiprocessing's fork server stands between the two, that one ends as well.

    On Linux the kernel sees to it, even while this process is stuck in code that holds Python's
    lock; elsewhere a thread watches.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent.sentinel,), daemon=True).start()
    is_forked = _let_go_of_the_fork_server()
    if not is_forked and os.getppid() != parent.pid:  # it died before the lines above
        os._exit(1)


def _let_go_of_the_fork_server() -> bool:
    """Whether this process is forked from one. It goes on for as long as anybody holds the writing
    end of its pipe, and hands that to each process that it forks: only their parent is to have it.
    """
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    if server._forkserver_alive_fd is None:
        return False
    os.close(server._forkserver_alive_fd)
    server._forkserver_alive_fd = None
    return True


def _watch(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
