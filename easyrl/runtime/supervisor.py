"""Spawns the workers, watches over them, and ends them, whatever happens.

    spawn ─► wait ─► events … ─► stop
               └──► WorkerFailure | Interrupted

`wait` is the only place where the controller waits. It returns events, and raises as soon as a
worker has failed or died, or the user wants to stop. `stop` leaves no process behind.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import SimpleQueue
from types import FrameType, TracebackType
from typing import Any, Self

from easyrl import events

STOP_SECONDS = 2.0
"""How long a worker may take to obey `Stop` before it is killed."""
CAUSE_SECONDS = 0.5
"""How long to look for the first cause once a worker has failed: a death tears others along."""


class WorkerFailure(RuntimeError):
    """A worker failed or died. The message names it and ends with its own traceback."""

    def __init__(self, message: str, *, is_user_error: bool = False) -> None:
        super().__init__(message)
        self.is_user_error = is_user_error


class Interrupted(Exception):
    """The user asked to stop (`signum`: SIGINT, SIGTERM, or SIGHUP: the terminal is gone)."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Worker:
    """A spawned process and the controller's end of its pipe.

    Commands are sent by a thread: where a worker does not read, because it is stopped or is itself
    waiting for us to read, a full pipe must not hold up the only thread that reads and stops.
    """

    def __init__(self, name: str, process: BaseProcess, control: Connection) -> None:
        self.name = name
        self.process = process
        self.control = control
        self.is_open = True
        self._commands: SimpleQueue[events.Command | None] = SimpleQueue()
        self._sender = threading.Thread(target=self._send_commands, daemon=True)
        self._sender.start()

    def send(self, command: events.Command) -> None:
        """Never waits, and never raises for a dead worker: `Supervisor.wait` tells of its death."""
        self._commands.put(command)

    def _send_commands(self) -> None:
        with contextlib.suppress(OSError):
            while (command := self._commands.get()) is not None:
                self.control.send(command)

    @property
    def is_stopped(self) -> bool:
        """Whether a signal (or a debugger) holds the process; False where that cannot be seen."""
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in "Tt"

    def close(self) -> None:
        """Once the process has ended: nobody reads any more, so the thread ends as well."""
        self._commands.put(None)
        self._sender.join()
        self.control.close()


class Supervisor:
    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[Worker] = []
        self._signum: int | None = None
        self._wake_reader, self._wake_writer = os.pipe()
        self._old_handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup
                self._old_handlers[signum] = signal.signal(signum, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
        for signum, handler in self._old_handlers.items():
            signal.signal(signum, handler)
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        """Note the signal: a handler that raised could break off a spawn half-way."""
        self._signum = signum
        os.write(self._wake_writer, b"x")

    def spawn(self, name: str, target: Callable[..., None], *arguments: Any) -> Worker:
        """Start `target(*arguments, control)` in a process of its own."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=target, args=(*arguments, theirs), name=name, daemon=False
        )
        # What a terminal sends to all is blocked until the worker ignores it by itself, and for
        # good in multiprocessing's resource tracker, which starts with the first one: it cleans up
        # after all the others. A mask is inherited.
        of_a_terminal = {signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, of_a_terminal)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        worker = Worker(name, process, ours)
        self._workers.append(worker)
        return worker

    def wait(
        self, timeout_seconds: float | None = None, *, needed: Sequence[Worker] | None = None
    ) -> list[tuple[Worker, events.Event]]:
        """Events that have come, waiting for one at most so long (None: for ever).

        Raises Interrupted once for each SIGINT, SIGTERM or SIGHUP, WorkerFailure when a worker
        failed or died (only one of `needed`, if they are given).
        """
        open_pipes = {worker.control: worker for worker in self._workers if worker.is_open}
        watched = self._workers if needed is None else needed
        sentinels = {worker.process.sentinel: worker for worker in watched}
        ready = wait([*open_pipes, *sentinels, self._wake_reader], timeout_seconds)
        if self._signum is not None:
            signum, self._signum = self._signum, None
            os.read(self._wake_reader, 4096)
            raise Interrupted(signum)
        received = [
            (worker, event)
            for pipe, worker in open_pipes.items()
            if pipe in ready
            for event in self._receive(worker)
        ]
        failures = [
            (worker, event)
            for worker, event in received
            if isinstance(event, events.Failed) and worker in watched
        ]
        if failures or any(sentinel in ready for sentinel in sentinels):
            cause = self._first_cause(failures)
            if self._signum is not None:  # a signal to the whole process group
                raise Interrupted(self._signum)
            raise cause
        return received

    def _receive(self, worker: Worker) -> list[events.Event]:
        received = []
        try:
            while worker.control.poll():
                received.append(worker.control.recv())
        except (EOFError, OSError):
            worker.is_open = False
        return received

    def _first_cause(self, failures: list[tuple[Worker, events.Failed]]) -> WorkerFailure:
        """Among workers that ended, the one that tore the others along: one that was killed
        before one that only lost its connection."""
        deadline = time.monotonic() + CAUSE_SECONDS
        while time.monotonic() < deadline and not any(map(_was_killed, self._workers)):
            time.sleep(0.02)
        for worker in self._workers:
            failures += [(worker, e) for e in self._receive(worker) if isinstance(e, events.Failed)]
        for worker in self._workers:
            if _was_killed(worker):
                code = worker.process.exitcode
                assert code is not None
                return WorkerFailure(f"{worker.name} was killed by {_signal_name(-code)}")
        failures.sort(key=lambda failure: _is_consequence(failure[1]))
        for worker, failed in failures:
            cause = f":\n{failed.traceback.rstrip()}" if failed.traceback else f": {failed.message}"
            return WorkerFailure(f"{worker.name} failed{cause}", is_user_error=failed.is_user_error)
        ended = [w for w in self._workers if w.process.exitcode is not None]
        names = ", ".join(f"{w.name} (exit code {w.process.exitcode})" for w in ended)
        return WorkerFailure(f"ended unexpectedly: {names}")

    def stop(self) -> None:
        """End all workers: those that do not obey within STOP_SECONDS are killed."""
        for worker in self._workers:
            worker.send(events.Stop())
        deadline = time.monotonic() + STOP_SECONDS
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.exitcode is None:
                worker.process.kill()
            worker.process.join()
            worker.close()
        self._workers.clear()


def _was_killed(worker: Worker) -> bool:
    return worker.process.exitcode is not None and worker.process.exitcode < 0


def _is_consequence(failed: events.Failed) -> bool:
    return failed.message.startswith(("ConnectionError", "TimeoutError"))


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
