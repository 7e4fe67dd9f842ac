"""What multiprocessing's fork server imports as it starts, and nobody else does: what every reward
process needs; and that the folder of its socket goes with it.

It ends once the process that started it has, however that came about. (Multiprocessing removes the
folder only where that process ends in peace.)
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal

SOCKET_FOLDER = "EASYRL_SOCKET_FOLDER"
"""The variable in which it is told."""

if SOCKET_FOLDER in os.environ:
    atexit.register(shutil.rmtree, os.environ.pop(SOCKET_FOLDER), ignore_errors=True)
    for signum in (signal.SIGTERM, signal.SIGHUP):  # to a whole group: whoever starts it decides
        signal.signal(signum, signal.SIG_IGN)

import easyrl.rewards.calls  # noqa: E402, F401
