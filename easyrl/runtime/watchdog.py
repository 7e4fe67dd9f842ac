"""Watch the workers' events: warn of quiet runs, and find the worker that a stalled run waits for.

    every event ──on_event──►  Watchdog  ──tick──► a warning: no event for a minute, two, four, …
                                                   a Stall: no progress for runtime.stall_seconds

A worker that waits for others and one that is frozen both send nothing, and an engine may report
steps that produce no token. So the watchdog counts progress, and looks at each worker's newest
state and at its process. It counts ticks, not time: Ctrl-Z also stops the controller.
"""

import contextlib
import faulthandler
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from easyrl import events
from easyrl.runtime.supervisor import Worker

TICK_SECONDS = 1.0
WARN_SECONDS = 60.0  # without any event, warn; then each time the period has doubled
MAX_PAUSE_SECONDS = 900.0  # between two warnings: the image's health check reads them
STACKS_SECONDS = 1.0  # for the workers to write their stacks


class Stall(NamedTuple):
    """No worker has made progress for `runtime.stall_seconds`."""

    workers: list[str]  # that the others wait for; empty if all wait
    cause: str  # one line: who waits for whom


class Watchdog:
    def __init__(self, stall_seconds: float | None = None) -> None:
        self._stall_seconds = stall_seconds or math.inf
        self._states: dict[str, tuple[str, float]] = {}  # by worker, and since when
        self._quiet, self._due = 0.0, WARN_SECONDS  # seconds without an event; of the next warning
        self._idle = 0.0  # seconds without progress
        self._ticked = time.monotonic()

    def on_event(self, worker: str, event: events.WorkerEvent) -> None:
        self._quiet, self._due = 0.0, WARN_SECONDS
        if _is_progress(event):
            self._idle = 0.0
        now = time.monotonic()
        before, since = self._states.get(worker, ("", now))
        state = before
        match event:
            case events.Lost():
                self._states.pop(worker, None)
                return
            case events.Starting(what):
                state = what
            case events.Ready() | events.WeightsExchanged() | events.IterationTrained():
                state = "wait"  # for a command
            case events.Activity(under_way=events.UnderWay(kind)):
                state = kind
            case events.Activity([*_, newest]):
                state = newest.kind if newest.kind != "wait" else "after a wait"
        self._states[worker] = state, since if state == before else now

    def tick(self, pids: Mapping[str, int]) -> str | Stall:
        """Call once a second. Returns a stall, a warning or "". `pids`: 0 on another machine."""
        now = time.monotonic()
        seconds, self._ticked = min(now - self._ticked, TICK_SECONDS), now
        self._quiet += seconds
        self._idle += seconds
        if self._idle >= self._stall_seconds:
            stall, self._idle = self._find_cause(pids), 0.0
            return stall
        if self._quiet < self._due:
            return ""
        self._due = min(2 * self._due, self._due + MAX_PAUSE_SECONDS)
        states = ", ".join(self._describe(name) for name in self._states)
        return f"no event from any worker for {self._quiet:.0f} s: {states}"

    def _find_cause(self, pids: Mapping[str, int]) -> Stall:
        """Blame processes that are stopped, else workers that do not wait."""
        stopped = [name for name, pid in pids.items() if is_stopped(pid)]
        blamed = stopped or [name for name in pids if self._state_of(name)[0] != "wait"]
        who = ", ".join(self._describe(name) for name in blamed or pids)
        others = ", ".join(name for name in pids if name not in blamed)
        line = f"no progress for {self._idle:,.0f} s: {others or 'the run'} waiting for {who}"
        if not blamed:
            line = f"no progress for {self._idle:,.0f} s: all workers wait: {who}"
        return Stall(blamed, line + (", stopped by a signal" if stopped else ""))

    def _state_of(self, worker: str) -> tuple[str, float]:
        return self._states.get(worker, ("starting", self._ticked))

    def _describe(self, worker: str) -> str:
        state, since = self._state_of(worker)
        return f"{worker} ({state} {time.monotonic() - since:,.0f} s)"

    def write_stacks(self, workers: Sequence[Worker], log: Path) -> None:
        """Let workers append their threads' Python stacks to their logs, and append those of this
        process to `log`. A worker that has sent no event may lack the signal's handler still."""
        for worker in workers:
            if worker.name in self._states:
                worker.write_stacks()
        with contextlib.suppress(OSError), log.open("a") as file:
            faulthandler.dump_traceback(file)
        time.sleep(STACKS_SECONDS)


def _is_progress(event: events.WorkerEvent) -> bool:
    """Return whether work was done. An engine's steps count by their tokens alone."""
    match event:
        case events.Activity(spans, num_tokens=num_tokens):
            return num_tokens > 0 or any(s.kind in ("prefill", "train", "weights") for s in spans)
    return True


def is_stopped(pid: int) -> bool:
    """Return whether a signal or a debugger has stopped the process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False
