"""What reward processes are forked from: multiprocessing's fork server, which has imported what all
of them need.

    start_template ──a variable, TOLD: what to import, what to undo──► begin, in the fork server

It ends with the process that has started it, however that came about, and takes the folder of its
socket along: a folder of its own, since multiprocessing removes the one that it shares among a
process's sockets only where the process ends in peace.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing import current_process, forkserver, get_context
from multiprocessing.context import BaseContext
from pathlib import Path
from types import FrameType
from typing import Any

from easyrl.lifeline import PR_SET_PDEATHSIG

TOLD = "EASYRL_TEMPLATE"


def start_template(imports: Sequence[str]) -> BaseContext:
    """The context whose processes are forked from one that has these modules.

    That one is started, unless it runs, and not waited for. Without a folder for its socket, or
    with one whose path is too long for a socket, there is none: each process imports for itself.
    """
    forkserver.set_forkserver_preload([__name__])
    # By itself Python would look into the working folder first, and (up to 3.13) go on doing so: a
    # `token.py` there would be run.
    environment = {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    before = {name: os.environ.get(name) for name in environment}
    multiprocessings: dict[str, Any] = current_process()._config  # type: ignore[attr-defined]
    shared_folder = multiprocessings.get("tempdir")
    folder = None
    try:
        folder = tempfile.mkdtemp(prefix="easyrl-")
        multiprocessings["tempdir"] = folder  # where the socket is made
        told = {"folder": folder, "imports": imports, "environment": before}
        os.environ.update(environment, **{TOLD: json.dumps(told)})
        forkserver.ensure_running()
    except OSError:
        return get_context("spawn")
    finally:
        multiprocessings["tempdir"] = shared_folder
        os.environ.pop(TOLD, None)
        _restore(before)
        if folder is not None:
            with contextlib.suppress(OSError):  # not empty: the socket is there
                Path(folder).rmdir()
    return get_context("forkserver")


def begin(told: dict[str, Any]) -> None:
    """In the fork server, as it starts."""
    _restore(told["environment"])
    folder, template = told["folder"], os.getpid()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)

    def end(signum: int, frame: FrameType | None) -> None:
        if os.getpid() == template:  # not one that it has just forked
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(128 + signum)

    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, end)
    if sys.platform == "linux":  # later it sees that its pipe has ended, not while it imports
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    for module in told["imports"]:
        with contextlib.suppress(BaseException):  # the process that needs it will tell
            importlib.import_module(module)


def _restore(environment: dict[str, str | None]) -> None:
    for name, value in environment.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


if TOLD in os.environ:
    begin(json.loads(os.environ.pop(TOLD)))
