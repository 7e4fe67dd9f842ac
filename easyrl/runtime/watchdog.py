"""Watch the workers' events: warn of quiet runs, and find the worker that a stalled run waits for.

    every event ──on_event──►  Watchdog  ──tick──► a warning: no event for a minute, two, four, …
                                                   a Stall: no progress for runtime.stall_seconds

A worker that waits for others and one that is frozen both send nothing, and an engine may report
steps that produce no token. So the watchdog counts progress, and looks at each worker's newest
state and at its process. It counts ticks, not time: Ctrl-Z also stops the controller.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import signal
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from easyrl import events

TICK_SECONDS = 1.0
WARN_SECONDS = 60.0  # without any event, warn; then each time the period has doubled
STACKS_SECONDS = 1.0  # for the workers to write their stacks
STOPPED = {
    "T": ", stopped by a signal",
    "t": ", stopped by a debugger",
    "D": ", waiting for a disk or a device",
}
"""States in /proc/PID/stat of processes that do not run, whatever they reported."""


@dataclass(frozen=True, slots=True)
class Stall:
    """No worker has made progress for `runtime.stall_seconds`."""

    workers: tuple[str, ...]  # that the others wait for; empty if none can be named
    cause: str  # one line: who waits for whom


class Watchdog:
    def __init__(self, stall_seconds: float | None = None) -> None:
        """`stall_seconds` None: never report a stall."""
        self._stall_seconds = stall_seconds or math.inf
        self._doing: dict[str, tuple[str, float]] = {}  # worker -> state, since when
        self._quiet, self._due = 0.0, WARN_SECONDS  # seconds without an event; of the next warning
        self._idle = 0.0  # seconds without progress
        self._ticked = time.monotonic()

    def on_event(self, worker: str, event: events.WorkerEvent) -> None:
        self._quiet, self._due = 0.0, WARN_SECONDS
        if _is_progress(event):
            self._idle = 0.0
        state, since = f"after {type(event).__name__}", time.monotonic()
        before, started_before = self._doing.get(worker, (state, since))
        match event:
            case events.Lost():
                self._doing.pop(worker, None)
                return
            case events.Note() | events.CheckpointSaved():  # beside what the worker does
                return
            case events.Starting(what):
                state = what
            case events.Ready() | events.WeightsExchanged() | events.IterationTrained():
                state = "wait"  # for a command
            case events.ModelSaved() | events.Halted():
                state = "wait"
            case events.Activity(under_way=events.UnderWay(kind, started)):
                state, since = kind, started
            case events.Activity(spans) if spans and spans[-1].kind != "wait":
                state = spans[-1].kind
                since = started_before if state == before else spans[-1].started
        self._doing[worker] = state, since

    def tick(self, pids: Mapping[str, int], busy: Collection[str] = ()) -> str | Stall:
        """Call about once a second, while events arrive as well. Returns a stall or a warning, if
        one is due, else an empty string.

        Args:
            pids: Processes of all living workers, by name.
            busy: Workers that the controller expects an answer from: those with prompts to
                complete, and all that exchange weights. Not a trainer that may wait for groups.
        """
        now = time.monotonic()
        seconds, self._ticked = min(now - self._ticked, TICK_SECONDS), now
        self._quiet += seconds
        self._idle += seconds
        if self._idle >= self._stall_seconds:
            stall, self._idle = self._find_cause(pids, busy), 0.0
            return stall
        if self._quiet < self._due:
            return ""
        self._due *= 2
        states = [f"{name} {self._describe(name)}" for name in self._doing]
        return f"no event from any worker for {self._quiet:.0f} s: {', '.join(states)}"

    def _find_cause(self, pids: Mapping[str, int], busy: Collection[str]) -> Stall:
        """Blame processes that do not run, else workers that work, else those with work to do."""
        stopped = {name: STOPPED.get(process_state(pid), "") for name, pid in pids.items()}
        waiting = {name for name in pids if self._doing.get(name, ("",))[0] == "wait"}
        blamed = (
            [name for name in pids if stopped[name]]
            or [name for name in pids if name not in waiting]
            or [name for name in pids if name in busy]
        )
        others = [name for name in pids if name in waiting and name not in blamed]
        who = ", ".join(
            f"{name} ({self._describe(name)}{stopped[name]})" for name in blamed or pids
        )
        line = f"no progress for {self._idle:,.0f} s: "
        if not blamed:
            line += f"all workers wait: {who}"
        elif others:
            verb = "waits" if len(others) == 1 else "wait"
            line += f"{', '.join(others)} {verb} for {who}"
        else:
            line += who
        return Stall(tuple(blamed), line)

    def _describe(self, worker: str) -> str:
        """Return the worker's newest state, and for how long."""
        state, since = self._doing.get(worker, ("starting", self._ticked))
        return f"{state} {time.monotonic() - since:,.0f} s"

    def write_stacks(self, pids: Mapping[str, int], log: Path) -> None:
        """Let workers append the Python stacks of all their threads to their logs, also while they
        hang in C code; append the stacks of this process to `log`.

        A process that is stopped writes nothing. One that has sent no event yet may not have the
        signal's handler, and is left out.
        """
        for name in pids.keys() & self._doing.keys():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[name], signal.SIGUSR1)
        with contextlib.suppress(OSError), log.open("a") as file:
            faulthandler.dump_traceback(file)
        time.sleep(STACKS_SECONDS)


def _is_progress(event: events.WorkerEvent) -> bool:
    """Return whether work was done. An engine's steps count by their tokens alone."""
    match event:
        case events.Activity(spans, num_groups, num_tokens=num_tokens):
            kinds = {span.kind for span in spans}
            return bool(num_groups or num_tokens or kinds & {"prefill", "train", "weights"})
    return True


def process_state(pid: int) -> str:
    """Return the state in /proc/PID/stat; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
