"""The observers of a run, and what protects the run from them."""

from __future__ import annotations

import contextlib
import traceback

from easyrl import events
from easyrl.config import Config
from easyrl.events import Event, Note, Observer
from easyrl.observe.report import PlainLines
from easyrl.observe.text import is_live_terminal
from easyrl.observe.trace import TraceWriter
from easyrl.observe.trackers import Trackers
from easyrl.observe.view import LiveView


def make_observers(config: Config, *, live: bool = True) -> list[Observer]:
    """Return trackers, the trace, and the live view, or plain lines if that is not wanted or
    standard output is no terminal. Raises ValueError if a tracker is not installed."""
    trackers: list[Observer] = [Trackers(config)] if config.output.log_to else []
    # The view comes last: if another observer cannot start, the terminal is untouched.
    is_live = live and is_live_terminal()
    view = Guard(LiveView(), fallback=PlainLines()) if is_live else Guard(PlainLines())
    return [*trackers, Guard(TraceWriter()), view]


class Guard:
    """Drop an observer that fails after the run's start, with a note, and use the fallback."""

    def __init__(self, observer: Observer, *, fallback: Observer | None = None) -> None:
        self._observer: Observer | None = observer
        self._fallback = fallback
        self._run: events.RunStarted | None = None

    def __call__(self, event: Event) -> Note | None:
        if self._observer is None:
            return None
        try:
            note = self._observer(event)
        except Exception:
            if self._run is None:
                raise
            return self._replace(event)
        if isinstance(event, events.RunStarted):
            self._run = event
        return note

    def _replace(self, event: Event) -> Note:
        failed, self._observer, self._fallback = self._observer, self._fallback, None
        with contextlib.suppress(Exception):  # most have nothing to close
            getattr(failed, "close", lambda: None)()
        if self._observer is not None and self._run is not None:
            self._observer(self._run)
            self._observer(event)
        cause = traceback.format_exc().rstrip()
        return Note(f"{type(failed).__name__} failed, and the run continues without it:\n{cause}")
