"""Start workers on the CPU as copies of a process that has imported torch and transformers.

    controller ── pipes of a new worker ──► fork server ── fork ──► worker
               ◄── its pid, its exit code ──────┘

Importing takes four seconds of CPU time, a copy some milliseconds, and copies share the memory of
what was imported. Accelerators do not survive a fork: their workers are spawned. The server ends
with the controller, and the workers with the server.

multiprocessing's own server is shared with the user's program and listens on a socket in a folder.
"""

from __future__ import annotations

import gc
import importlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from multiprocessing import forkserver, reduction, resource_tracker, spawn
from pathlib import Path
from typing import Any

from easyrl.processes import die_with_parent

MODULES = (
    "easyrl.workers.rollout",
    "easyrl.workers.train",
    "transformers.models.llama.modeling_llama",  # and with it what all models use
)
MAX_FDS = 250  # of a worker; Linux sends at most 253 at once
PROGRAM = "import sys; sys.path[:]={}; from easyrl.runtime.fork_server import serve; serve({},{})"


class ForkServer:
    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket, self._other = socket.socketpair()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Processes of the context `forkserver` that start meanwhile are copies of this server,
        which starts with the first one and has its environment."""
        shared = forkserver.connect_to_new_process
        forkserver.connect_to_new_process = self._start_worker
        try:
            yield
        finally:
            forkserver.connect_to_new_process = shared

    def _start_worker(self, fds: Sequence[int]) -> tuple[int, int]:
        """Return the descriptors from which to read the worker's pid and exit code, and to which to
        write what it executes (as `multiprocessing.forkserver.connect_to_new_process`)."""
        if self._process is None:
            fd = self._other.fileno()
            command = [sys.executable, "-B", "-c", PROGRAM.format(sys.path, fd, os.getpid())]
            self._process = subprocess.Popen(command, pass_fds=[fd], stdin=subprocess.DEVNULL)
            self._other.close()
        from_worker, status = os.pipe()
        orders, to_worker = os.pipe()
        tracker = resource_tracker.getfd()
        assert tracker is not None
        reduction.sendfds(self._socket, [orders, status, tracker, 2, *fds])
        os.close(orders)
        os.close(status)
        return from_worker, to_worker

    def close(self) -> None:
        """End the server, and with it the workers that are left."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._socket.close()
        self._other.close()


def serve(fd: int, parent: int) -> None:
    """The server: fork a worker for each message until the controller ends."""
    die_with_parent(parent)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the controller handles them
        signal.signal(signum, signal.SIG_IGN)
    gc.disable()
    with Path(os.devnull).open("w") as null, redirect_stdout(null), redirect_stderr(null):
        for module in MODULES:
            with suppress(Exception):  # the worker imports it again, and reports what is missing
                importlib.import_module(module)
    gc.enable()
    gc.freeze()  # a collection would write to all these objects, and so copy their memory
    with socket.socket(fileno=fd) as controller, selectors.DefaultSelector() as selector:
        selector.register(controller, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not controller:
                    pid, status = key.data
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    forkserver.write_signed(status, code)
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    os.close(status)
                    continue
                orders, status, tracker, errors, *fds = reduction.recvfds(controller, MAX_FDS)
                if (pid := os.fork()) == 0:
                    for other in selector.get_map().values():
                        for each in (other.fd, *(other.data or ())[1:]):
                            os.close(each)
                    os.close(status)
                    os.dup2(errors, 2)
                    try:
                        become_worker(orders, tracker, fds)
                    except BaseException:
                        traceback.print_exc()
                    finally:
                        os._exit(1)
                forkserver.write_signed(status, pid)
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, status))
                for each in (orders, tracker, errors, *fds):
                    os.close(each)


def become_worker(orders: int, tracker: int, fds: list[int]) -> None:
    """Execute what the controller writes to `orders`, as a process that multiprocessing started."""
    own: Any = resource_tracker, forkserver
    own[0]._resource_tracker._fd = tracker
    own[1]._forkserver._inherited_fds = fds
    os._exit(spawn._main(orders, os.dup(orders)))
