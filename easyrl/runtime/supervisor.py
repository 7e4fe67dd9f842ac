"""Spawn the workers, watch them, and end them, whatever happens.

    controller                    Supervisor                              workers
    ─────────────────────────────────────────────────────────────────────────────────
    spawn ──────────────────────► start a process ──────────────────────► run
    Worker.send ────────────────► a thread per worker writes to its pipe ─► command
    wait, until something happens:
    ◄── events ────────────────── pipes of the workers ◄───────────────── events
    ◄── Lost ──────────────────── a replaceable worker has failed or died
    ◄── raises WorkerFailure ──── another worker has failed or died
    ◄── raises Interrupted ────── a signal: the user wants to stop
    stop ───────────────────────► Stop; kill what is left after STOP_SECONDS

`Supervisor.wait` is the only place where the controller waits for workers. A worker's last events
are returned before its `Lost`. `stop` leaves no process behind.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from types import FrameType
from typing import IO, Any, Literal, NamedTuple, Self

from easyrl import events
from easyrl.processes import (
    UNGUARDED,
    UNGUARDED_MESSAGE,
    kill_reason,
    oom_kills,
    raise_open_files,
    send_all,
)
from easyrl.runtime.fork_server import ForkServer

STOP_SECONDS = 2.0
"""A worker that has not obeyed `Stop` after this time is killed."""
CAUSE_SECONDS = 0.5
"""How long to look for the first cause when a worker has failed: one's death makes others fail."""
CAUSE_POLL_SECONDS = 0.02
SHOWN_BYTES = 4000
"""How much to show of the standard error of a process that died before it had a log."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that a terminal sends to all processes of the command."""
MERGE_SECONDS = 0.5
"""Signals in this time count once: a wrapper that forwards Ctrl-C repeats the terminal's."""

# Exit codes of a command
FINISHED = 0
FAILED = 1
USER_ERROR = 2
SIGNALLED = 128  # to which the number of the signal that ended the command is added

PENDING = "pending"  # device of a worker that waits for a place on a cluster
WorkerState = Literal["starting", "ready", "joining", "working", "leaving", "lost"]  # see `fleet`
NEXT: dict[WorkerState, tuple[WorkerState, ...]] = {
    "starting": ("ready", "working", "leaving", "lost"),  # working: no exchange in `easyrl eval`
    "ready": ("joining", "working", "leaving", "lost"),
    "joining": ("ready", "working", "leaving", "lost"),  # ready: it could not get the weights
    "working": ("leaving", "lost"),
    "leaving": ("lost",),
    "lost": (),
}
Origin = Literal["start", "replacement", "added"]
"""Why a worker was started: with the run, in the place of a dead one, or by `easyrl scale`."""


class WorkerFailure(RuntimeError):
    """A worker failed or died. The message names it and ends with its traceback."""

    def __init__(self, message: str, *, is_user_error: bool = False) -> None:
        super().__init__(message)
        self.is_user_error = is_user_error


ABOUT_ON_ERROR = (
    "reward.on_error=stop ended it; with skip_group the group is left out (a run takes another "
    "prompt instead), with zero its completions score 0 in this function\n"
    "failed calls with their rows"
)


class RewardFailure(WorkerFailure):
    """A reward call failed, and `reward.on_error` is `stop`. The workers are still there."""


class Interrupted(KeyboardInterrupt):
    """The run is to stop: a signal arrived (SIGINT, SIGTERM, or SIGHUP: the terminal was closed).

    `stopped_by` names what else asked for it, such as `easyrl stop` or a condition; that counts as
    a SIGTERM. `is_planned`: the run's own settings or callbacks asked.
    """

    def __init__(self, signum: int, stopped_by: str = "", *, is_planned: bool = False) -> None:
        super().__init__(stopped_by or signal.Signals(signum).name)
        self.signum = signum
        self.is_planned = is_planned


class StopRequest(NamedTuple):
    """Arguments of the Interrupted that `Supervisor.wait` raises."""

    signum: int
    stopped_by: str = ""


@contextlib.contextmanager
def handle_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle the three signals that stop a run, unless they are ignored (nohup)."""
    before = {}
    if threading.current_thread() is threading.main_thread():  # else Python does not allow it
        for signum in STOP_SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                before[signum] = signal.signal(signum, handler)
    try:
        yield
    finally:
        for signum, handler_before in before.items():
            signal.signal(signum, handler_before)


@contextlib.contextmanager
def signals_as_interrupts() -> Iterator[None]:
    """Let the signals that stop a run raise Interrupted, where no Supervisor handles them."""
    received = list[int]()

    def interrupt(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        time.sleep(MERGE_SECONDS)  # another one raises in here
        raise Interrupted(signum)

    with handle_signals(interrupt):
        try:
            yield
        except KeyboardInterrupt as error:
            if isinstance(error, Interrupted) or not received:
                raise
            raise Interrupted(received[-1]) from None  # Ray's calls raise their own in its place


@dataclass(eq=False)
class Worker:
    """A spawned process and the controller's end of its pipe. A thread sends the commands."""

    name: str  # role and number: "rollout-0", "train-1"
    process: Any  # a multiprocessing.Process, or a `ray_launcher.RemoteProcess`
    control: Connection
    errors: IO[bytes] | None = None  # the process's standard error until its log is open
    is_open: bool = True  # whether more events may arrive
    kill_reason: str = ""  # set by `kill`
    state: WorkerState = "starting"
    origin: Origin = "start"

    def __post_init__(self) -> None:
        self.is_replaceable = self.role == "rollout"
        self._commands: SimpleQueue[events.Command | None] = SimpleQueue()
        self._sender = threading.Thread(
            target=send_all, args=(self._commands, self.control), daemon=True
        )
        self._sender.start()

    def become(self, state: WorkerState) -> None:
        """Change the state, as `NEXT` allows."""
        assert state in NEXT[self.state], (self.name, self.state, state)
        self.state = state

    @property
    def role(self) -> str:
        """`rollout` or `train`, the first part of its name."""
        return self.name.partition("-")[0]

    @property
    def number(self) -> int:
        return int(self.name.rpartition("-")[2])

    @property
    def remote_device(self) -> str:
        """Its node and device on a cluster, or an empty string."""
        return str(getattr(self.process, "device", ""))

    @property
    def local_pid(self) -> int:
        """Its process id; 0 on another machine."""
        if self.remote_device:
            return 0
        return self.process.pid or 0

    @property
    def is_placed(self) -> bool:
        """Whether it has a place to run; on a cluster, it may wait for one."""
        return self.remote_device != PENDING

    def write_stacks(self) -> None:
        """Let the worker append the Python stacks of all its threads to its log."""
        if self.remote_device:
            self.process.write_stacks()
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.local_pid, signal.SIGUSR1)

    def send(self, command: events.Command) -> None:
        """Send without waiting. A dead worker is no error here: `Supervisor.wait` reports it."""
        self._commands.put(command)

    def kill(self, reason: str) -> None:
        """Kill the process; `Supervisor.wait` reports its death with this reason."""
        self.kill_reason = self.kill_reason or reason
        self.process.kill()

    def close(self) -> None:
        """Call after the process has ended: the sending thread ends as well."""
        self._commands.put(None)
        self._sender.join()
        if self.errors is not None:
            self.errors.close()
        self.control.close()


class Supervisor:
    def __init__(self) -> None:
        self._fork_server = ForkServer()
        self._workers: list[Worker] = []
        self._stop_request: StopRequest | None = None  # `wait` raises Interrupted for it
        self._is_stopping = False  # so that `interrupt` has no effect
        self.wait_for: Callable[[Sequence[Any], float | None], list[Any]] = wait
        """Waits until one of these objects is ready, for at most these seconds, and returns what is
        ready, as multiprocessing's `wait`. It may do other work meanwhile (`runtime.control`)."""
        self._oom_kills = oom_kills()  # processes killed for lack of memory so far
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> Self:
        raise_open_files()  # many workers have many pipes
        self._wake_reader, self._wake_writer = os.pipe()  # written by a signal, to end `wait`
        os.set_blocking(self._wake_reader, False)
        for fd in (self._wake_reader, self._wake_writer):
            self._exit.callback(os.close, fd)
        self._exit.enter_context(handle_signals(self._on_signal))
        self._exit.callback(self._fork_server.close)
        self._exit.callback(self.stop)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._exit.close()

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        """Record the signal only: an exception raised here could interrupt a spawn halfway."""
        self._request_stop(StopRequest(signum))

    def interrupt(self) -> None:
        """Let `wait` raise Interrupted for `easyrl stop`, unless the run is stopping already: a
        second one would prevent the last checkpoint."""
        if not self._is_stopping:
            self._request_stop(StopRequest(signal.SIGTERM, "easyrl stop"))

    def begin_to_stop(self) -> None:
        """Ignore `interrupt` from now on, because the run stops already."""
        self._is_stopping = True

    def _request_stop(self, request: StopRequest) -> None:
        self._is_stopping = True
        self._stop_request = request
        os.write(self._wake_writer, b"x")

    def spawn(
        self, name: str, target: Callable[..., None], *arguments: Any, is_copy: bool = False
    ) -> Worker:
        """Start `target(*arguments, control)` in a new process, or in a copy of the fork server."""
        context: Any = multiprocessing.get_context("forkserver" if is_copy else "spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(*arguments, theirs), name=name)
        start_resource_tracker()
        errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the worker)
        # The signals are blocked until the worker ignores them itself.
        with blocked(TERMINAL_SIGNALS), self._fork_server.in_use(), _standard_error_to(errors):
            process.start()
        theirs.close()
        return self.watch(Worker(name, process, ours, errors))

    def watch(self, worker: Worker) -> Worker:
        """Let `wait` return this worker's events, and `stop` end it."""
        self._workers.append(worker)
        return worker

    def wait(
        self, timeout_seconds: float | None = None, *, needed: Sequence[Worker] | None = None
    ) -> list[tuple[Worker, events.WorkerEvent]]:
        """Return new events; wait for one for at most `timeout_seconds` (None: for ever). Raises
        Interrupted once for each signal, and WorkerFailure when a worker (one of `needed`, if
        given) failed or died and cannot be replaced."""
        watched = self._workers if needed is None else needed
        by_sentinel = {worker.process.sentinel: worker for worker in watched}
        open_pipes = [worker.control for worker in self._workers if worker.is_open]
        ready: list[Any] = []
        if self._stop_request is None:
            ready = self.wait_for([*open_pipes, *by_sentinel, self._wake_reader], timeout_seconds)
        if self._stop_request is not None:
            time.sleep(MERGE_SECONDS)
            request = self._stop_request
            self._stop_request = None
            # A signal that arrives now sets the next request, whose byte is perhaps read here.
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_reader, 4096)
            raise Interrupted(*request)

        dead = [worker for sentinel, worker in by_sentinel.items() if sentinel in ready]
        received: list[tuple[Worker, events.WorkerEvent]] = []
        failures: dict[Worker, events.Failed] = {}
        for worker in self._workers:
            for event in self._receive(worker):
                received.append((worker, event))
                if isinstance(event, events.Failed) and worker in watched:
                    failures[worker] = event
        if _is_run_over(dead, failures):
            cause = self._first_cause(failures)
            # A signal to the whole process group. The next `wait` raises it again: otherwise it
            # would report the deaths that the signal has caused.
            if self._stop_request is not None:
                raise Interrupted(*self._stop_request)
            raise cause

        for worker in dict.fromkeys([*dead, *failures]):  # each once
            received.append((worker, self._end(worker, failures.get(worker))))
        return received

    def _receive(self, worker: Worker) -> list[events.WorkerEvent]:
        """Return the events that have arrived from a worker."""
        received: list[events.WorkerEvent] = []
        if not worker.is_open:
            return received
        try:
            while worker.control.poll():
                received.append(worker.control.recv())
        except (EOFError, OSError):
            worker.is_open = False
        return received

    def _end(self, worker: Worker, failed: events.Failed | None) -> events.Lost:
        """End a worker for certain, after all its events have been received."""
        worker.process.kill()
        worker.process.join()
        cause = self._end_of(worker)
        traceback = ""
        if failed is not None:
            cause = f"failed: {failed.message}"
            traceback = failed.traceback.rstrip()
        worker.close()
        self._workers.remove(worker)
        return events.Lost(cause, traceback)

    def _first_cause(self, failures: Mapping[Worker, events.Failed]) -> WorkerFailure:
        """Find whose end made others fail: killed workers before those that lost a connection."""
        deadline = time.monotonic() + CAUSE_SECONDS
        while time.monotonic() < deadline:
            for worker in self._workers:
                exit_code = worker.process.exitcode or 0
                if exit_code == UNGUARDED:
                    return WorkerFailure(UNGUARDED_MESSAGE, is_user_error=True)
                if exit_code < 0:
                    return WorkerFailure(f"{worker.name} {self._end_of(worker)}")
            time.sleep(CAUSE_POLL_SECONDS)

        all_failures = list(failures.items())
        for worker in self._workers:
            for event in self._receive(worker):
                if isinstance(event, events.Failed):
                    all_failures.append((worker, event))
        if all_failures:
            # The first one, but those that lost a connection after all others.
            worker, failed = min(all_failures, key=lambda failure: failure[1].is_consequence)
            cause = f": {failed.message}"
            if failed.traceback:
                cause = f":\n{failed.traceback.rstrip()}"
            return WorkerFailure(f"{worker.name} failed{cause}", is_user_error=failed.is_user_error)
        ended = [worker for worker in self._workers if worker.process.exitcode is not None]
        names = ", ".join(worker.name for worker in ended)
        return WorkerFailure(f"{names} {self._end_of(ended[0])}")

    def _end_of(self, worker: Worker) -> str:
        """Describe how a worker's process has ended, to follow its name."""
        if worker.kill_reason:
            return worker.kill_reason
        exit_code = worker.process.exitcode or 0
        if exit_code >= 0:
            return f"ended unexpectedly with exit code {exit_code}{_standard_error_of(worker)}"
        kills_before = self._oom_kills
        self._oom_kills = oom_kills()
        signal_name = signal.Signals(-exit_code).name
        return f"was killed by {signal_name}{kill_reason(kills_before)}"

    def stop(self) -> None:
        """End all workers; kill those that have not obeyed after STOP_SECONDS."""
        for worker in self._workers:
            worker.send(events.Stop())
        deadline = time.monotonic() + STOP_SECONDS
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.exitcode is None:
                worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.close()
        self._workers.clear()


def _is_run_over(dead: Sequence[Worker], failures: Mapping[Worker, events.Failed]) -> bool:
    """Return whether one of these workers cannot be replaced, or its replacement would fail too."""
    for worker in dead:
        if worker.state == "starting":
            worker.process.join(CAUSE_SECONDS)  # its exit code follows its sentinel
    for worker in dead:
        if worker.process.exitcode == UNGUARDED or not worker.is_replaceable:
            return True
    for worker, failed in failures.items():
        is_start_of_run = worker.state == "starting" and worker.origin == "start"
        if is_start_of_run or not worker.is_replaceable or not failed.is_replaceable:
            return True
    return False


@contextlib.contextmanager
def blocked(signals: Iterable[int]) -> Iterator[None]:
    """Block these signals in this thread, and in processes that start here."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _standard_error_to(file: IO[bytes]) -> Iterator[None]:
    """Redirect this process's standard error, which processes that start here inherit."""
    before = os.dup(2)
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def _standard_error_of(worker: Worker) -> str:
    """The end of what the worker wrote to its standard error before it had a log."""
    if worker.errors is None:
        return ""
    num_bytes = worker.errors.seek(0, os.SEEK_END)
    worker.errors.seek(max(0, num_bytes - SHOWN_BYTES))
    text = worker.errors.read().decode("utf-8", "replace").strip()
    return f":\n{text}" if text else ""


def start_resource_tracker() -> None:
    """Start multiprocessing's resource tracker, if none runs, without its warning at the end about
    workers that end at once. It ignores a terminal's signals: it must clean up after all others."""
    sys.warnoptions.append("ignore:resource_tracker")
    with blocked(TERMINAL_SIGNALS):
        resource_tracker.ensure_running()
    sys.warnoptions.pop()
