"""What ties a spawned process to the one that spawned it."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing.connection import wait

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """End this process when its parent ends, however that comes about: SIGKILL included.

    On Linux the kernel sees to it, even while this process is stuck in code that holds Python's
    lock; elsewhere a thread watches.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent.sentinel,), daemon=True).start()
    if os.getppid() != parent.pid:  # it died before the lines above
        os._exit(1)


def _watch(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
