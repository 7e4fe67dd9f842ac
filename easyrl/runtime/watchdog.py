"""Warn about quiet runs."""

from __future__ import annotations

import time

from easyrl import events

TICK_SECONDS = 1.0
WARN_SECONDS = 60.0  # without any event, warn; then each time the period has doubled


class Watchdog:
    """Warn when no worker has sent an event for long, and name what each is doing.

    A worker that waits for others and one that is frozen look the same from here. It counts ticks,
    not time: Ctrl-Z also stops the controller.
    """

    def __init__(self) -> None:
        self._doing: dict[str, tuple[str, float]] = {}  # worker -> work, start
        self._seconds, self._due = 0.0, WARN_SECONDS

    def on_event(self, worker: str, event: events.WorkerEvent) -> None:
        self._seconds, self._due = 0.0, WARN_SECONDS
        doing = f"after {type(event).__name__}", time.monotonic()
        match event:
            case events.Starting(what):
                doing = what, doing[1]
            case events.Activity(under_way=events.UnderWay(kind, started)):
                doing = kind, started
        self._doing[worker] = doing

    def tick(self) -> str:
        """Call after each TICK_SECONDS without an event. Returns the warning, if one is due."""
        self._seconds += TICK_SECONDS
        if self._seconds < self._due:
            return ""
        self._due *= 2
        now = time.monotonic()
        states = [
            f"{name} {what} {now - since:.0f} s" for name, (what, since) in self._doing.items()
        ]
        return f"no event from any worker for {self._seconds:.0f} s: {', '.join(states)}"
