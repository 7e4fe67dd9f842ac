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
from typing import Any, NamedTuple

from easyrl.processes import die_with_parent

MODULES = (
    "easyrl.workers.rollout",
    "easyrl.workers.train",
    "transformers.models.llama.modeling_llama",  # and with it what all models use
)
MAX_FDS = 250  # that a worker inherits; Linux sends at most 253 at once
PROGRAM = "import sys; sys.path[:]={}; from easyrl.runtime.fork_server import serve; serve({},{})"


class ForkServer:
    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket, self._other = socket.socketpair()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let processes of the context `forkserver` that start in this block be copies of this
        server. It starts with the first of them and has the environment of that moment."""
        of_multiprocessing = forkserver.connect_to_new_process
        forkserver.connect_to_new_process = self._start_worker
        try:
            yield
        finally:
            forkserver.connect_to_new_process = of_multiprocessing

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
    """Run the server: fork a worker for each message until the controller ends. `fd` is its end of
    the socket, `parent` the controller's process id."""
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
                if key.fileobj is controller:
                    _fork_worker(controller, selector)
                else:
                    _report_end(key, selector)


class _Child(NamedTuple):
    """A worker that this server has forked."""

    pid: int
    status: int  # descriptor on which its exit code is reported


def _fork_worker(controller: socket.socket, selector: selectors.BaseSelector) -> None:
    """Receive the descriptors of a new worker, fork it, and report its process id."""
    orders, status, tracker, errors, *fds = reduction.recvfds(controller, MAX_FDS)
    pid = os.fork()
    if pid == 0:
        _close_other_workers(selector)
        os.close(status)
        os.dup2(errors, 2)
        try:
            become_worker(orders, tracker, fds)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    forkserver.write_signed(status, pid)
    pidfd = os.pidfd_open(pid)  # readable once the worker has ended
    selector.register(pidfd, selectors.EVENT_READ, _Child(pid, status))
    for each in (orders, tracker, errors, *fds):
        os.close(each)


def _close_other_workers(selector: selectors.BaseSelector) -> None:
    """In a new worker, close the server's descriptors: the controller's socket and the others'."""
    for key in selector.get_map().values():
        os.close(key.fd)
        if isinstance(key.data, _Child):
            os.close(key.data.status)


def _report_end(key: selectors.SelectorKey, selector: selectors.BaseSelector) -> None:
    """Report the exit code of a worker that has ended."""
    child: _Child = key.data
    _, wait_status = os.waitpid(child.pid, 0)
    forkserver.write_signed(child.status, os.waitstatus_to_exitcode(wait_status))
    selector.unregister(key.fd)
    os.close(key.fd)
    os.close(child.status)


def become_worker(orders: int, tracker: int, fds: list[int]) -> None:
    """Execute what the controller writes to `orders`, as a process that multiprocessing started."""
    tracker_module: Any = resource_tracker  # private names, which type checkers do not know
    forkserver_module: Any = forkserver
    tracker_module._resource_tracker._fd = tracker
    forkserver_module._forkserver._inherited_fds = fds
    os._exit(spawn._main(orders, os.dup(orders)))
