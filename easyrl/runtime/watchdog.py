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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from easyrl import events
from easyrl.runtime.supervisor import Worker

TICK_SECONDS = 1.0
WARN_SECONDS = 60.0
"""Warn after this time without any event, and again each time the period has doubled."""
MAX_PAUSE_SECONDS = 900.0
"""Longest time between two warnings: the image's health check reads them."""
STACKS_SECONDS = 1.0
"""Time that the workers get to write their stacks."""


class Stall(NamedTuple):
    """No worker has made progress for `runtime.stall_seconds`."""

    workers: list[str]  # those that the others wait for; empty if all wait
    cause: str  # one line: who waits for whom


class WorkerActivity(NamedTuple):
    """What a worker does, by its newest event that says so."""

    state: str  # "wait", a kind of span ("train"), or a step of its start ("importing torch")
    since: float


class Watchdog:
    def __init__(self, stall_seconds: float | None = None) -> None:
        self._stall_seconds = stall_seconds or math.inf
        self._activities: dict[str, WorkerActivity] = {}  # by worker
        self._quiet_seconds = 0.0  # without any event
        self._warn_after_seconds = WARN_SECONDS  # of quiet: the next warning
        self._idle_seconds = 0.0  # without progress
        self._ticked = time.monotonic()  # when `tick` was called last

    def on_event(self, worker: str, event: events.WorkerEvent) -> None:
        self._quiet_seconds = 0.0
        self._warn_after_seconds = WARN_SECONDS
        if _is_progress(event):
            self._idle_seconds = 0.0
        if isinstance(event, events.Lost):
            self._activities.pop(worker, None)
            return
        now = time.monotonic()
        before = self._activities.get(worker, WorkerActivity("", now))
        state = _state_after(event, before.state)
        since = before.since if state == before.state else now
        self._activities[worker] = WorkerActivity(state, since)

    def tick(self, pids: Mapping[str, int]) -> str | Stall:
        """Call once a second. Return a stall, a warning or "". `pids` has the process of each
        worker; 0: it is on another machine."""
        now = time.monotonic()
        seconds = min(now - self._ticked, TICK_SECONDS)
        self._ticked = now
        self._quiet_seconds += seconds
        self._idle_seconds += seconds
        if self._idle_seconds >= self._stall_seconds:
            stall = self._find_cause(pids)
            self._idle_seconds = 0.0
            return stall
        if self._quiet_seconds < self._warn_after_seconds:
            return ""
        self._warn_after_seconds += min(self._warn_after_seconds, MAX_PAUSE_SECONDS)
        states = self._describe_all(self._activities)
        return f"no event from any worker for {self._quiet_seconds:.0f} s: {states}"

    def _find_cause(self, pids: Mapping[str, int]) -> Stall:
        """Blame processes that are stopped, else workers that do not wait."""
        stopped = [name for name, pid in pids.items() if is_stopped(pid)]
        working = [name for name in pids if self._activity_of(name).state != "wait"]
        blamed = stopped or working
        if blamed:
            others = ", ".join(name for name in pids if name not in blamed) or "the run"
            who_waits = f"{others} waiting for {self._describe_all(blamed)}"
        else:
            who_waits = f"all workers wait: {self._describe_all(pids)}"
        cause = f"no progress for {self._idle_seconds:,.0f} s: {who_waits}"
        if stopped:
            cause += ", stopped by a signal"
        return Stall(blamed, cause)

    def _activity_of(self, worker: str) -> WorkerActivity:
        return self._activities.get(worker, WorkerActivity("starting", self._ticked))

    def _describe(self, worker: str) -> str:
        activity = self._activity_of(worker)
        seconds = time.monotonic() - activity.since
        return f"{worker} ({activity.state} {seconds:,.0f} s)"

    def _describe_all(self, workers: Iterable[str]) -> str:
        return ", ".join(self._describe(worker) for worker in workers)

    def write_stacks(self, workers: Sequence[Worker], log: Path) -> None:
        """Let workers append their threads' Python stacks to their logs, and append those of this
        process to `log`. A worker that has sent no event may lack the signal's handler still."""
        for worker in workers:
            if worker.name in self._activities:
                worker.write_stacks()
        with contextlib.suppress(OSError), log.open("a") as file:
            faulthandler.dump_traceback(file)
        time.sleep(STACKS_SECONDS)


def _state_after(event: events.WorkerEvent, before: str) -> str:
    """Return a worker's state after an event; `before` if the event does not say it."""
    match event:
        case events.Starting(what):
            return what
        case events.Ready() | events.WeightsExchanged() | events.IterationTrained():
            return "wait"  # for a command
        case events.Activity(under_way=events.UnderWay(kind)):
            return kind
        case events.Activity([*_, newest]):
            return "after a wait" if newest.kind == "wait" else newest.kind
    return before


def _is_progress(event: events.WorkerEvent) -> bool:
    """Return whether work was done. An engine's steps count by their tokens alone."""
    if not isinstance(event, events.Activity) or event.num_tokens > 0:
        return True
    return any(span.kind in ("prefill", "train", "weights") for span in event.spans)


def is_stopped(pid: int) -> bool:
    """Return whether a signal or a debugger has stopped the process."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    after_name = status.rpartition(")")[2]  # "PID (name) state …": a name may contain a ")"
    state = after_name.split()[0]
    return state in ("T", "t")
