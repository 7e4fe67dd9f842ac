"""Nothing comes from any worker: a run that seems to hang says what it is at.

A worker that does nothing because others wait for it, and one that is frozen, look alike from here;
but a worker tells when it begins what may last, and the system tells of a process that is stopped.
So nothing is claimed that is not known, and nobody is killed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from easyrl import events
from easyrl.runtime.supervisor import Worker

TICK_SECONDS = 1.0
LONG_SECONDS = 60.0
"""After so long, and then each time it has doubled, it is told what the workers are at."""
STOPPED_SECONDS = 3.0
"""The same where one of them is stopped."""


class Silence:
    """Counts the ticks without a word. (A clock would count the time that all of us, the controller
    among us, have been stopped by Ctrl-Z.)"""

    def __init__(self) -> None:
        self._doing: dict[str, tuple[str, float]] = {}  # of each worker, and since when
        self._seconds = 0.0
        self._told_at = 0.0  # of those seconds, at the last note

    def hear(self, worker: str, event: events.Event) -> None:
        """`worker` has told of something."""
        self._seconds = self._told_at = 0.0
        match event:
            case events.Starting(what):
                self._doing[worker] = what, time.monotonic()
            case events.Activity(under_way=events.UnderWay(kind, started)):
                self._doing[worker] = "idle" if kind == "wait" else kind, started
            case _:
                self._doing.pop(worker, None)

    def note(self, workers: Sequence[Worker]) -> str:
        """Another tick without a word: what is to be told of it, mostly nothing."""
        self._seconds += TICK_SECONDS
        stopped = [worker.name for worker in workers if worker.is_stopped]
        first = STOPPED_SECONDS if stopped else LONG_SECONDS
        if self._seconds < (max(LONG_SECONDS, 2 * self._told_at) if self._told_at else first):
            return ""
        self._told_at = self._seconds
        told = ", ".join(self._told(worker.name, worker.name in stopped) for worker in workers)
        return f"no word from any worker for {self._seconds:.0f} s: {told}"

    def _told(self, worker: str, is_stopped: bool) -> str:
        if is_stopped:
            return f"{worker} is stopped (SIGCONT lets it go on)"
        if worker not in self._doing:
            return f"{worker} told of nothing under way"
        what, since = self._doing[worker]
        return f"{worker} {what} {time.monotonic() - since:.0f} s"
