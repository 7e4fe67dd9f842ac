"""The observers of a run, and what protects the run from them."""

from __future__ import annotations

import contextlib
import traceback
from typing import Any

from easyrl import events
from easyrl.config import Config
from easyrl.events import Event, Note, Observer
from easyrl.observe.lines import PlainLines
from easyrl.observe.text import is_live_terminal
from easyrl.observe.trace import TraceWriter
from easyrl.observe.trackers import Trackers
from easyrl.observe.view import LiveView, NotebookView


def make_observers(config: Config, *, live: bool = True, display: Any = None) -> list[Observer]:
    """Return trackers, the trace, and the live view, or plain lines if that is not wanted or
    standard output is no terminal. `display`: of a notebook, for its view. Raises ConfigError if a
    tracker is not installed."""
    trackers: list[Observer] = [Trackers(config)] if config.output.log_to else []
    # The view comes last: if another observer cannot start, the terminal is untouched.
    is_live = live and is_live_terminal()
    name = "the view"
    view = Guard(PlainLines(), name)
    if is_live:
        view = Guard(LiveView(), name, fallback=PlainLines())
    elif display is not None:
        view = Guard(NotebookView(display), name, fallback=PlainLines())
    return [*trackers, Guard(TraceWriter(), "trace.json"), view]


class Guard:
    """Replace an observer that fails after the run's start by the fallback, with a note."""

    def __init__(
        self, observer: Observer, name: str = "observer", *, fallback: Observer | None = None
    ) -> None:
        """`name`: of what fails, for the user."""
        self._name = name
        self._observer, self._fallback = observer, fallback or _ignore
        self._run: events.RunStarted | None = None

    def __call__(self, event: Event) -> Note | None:
        try:
            note = self._observer(event)
        except Exception as error:
            if self._run is None:
                raise
            failed = self._observer
            self._observer = self._fallback
            self._fallback = _ignore
            with contextlib.suppress(Exception):  # most have nothing to close
                failed.close()  # type: ignore[attr-defined]
            self._observer(self._run)
            self._observer(event)
            is_disk = isinstance(error, OSError)  # it is full, for example
            cause = error if is_disk else traceback.format_exc().rstrip()
            return Note(f"{self._name} failed; the run continues without it:\n{cause}")
        if isinstance(event, events.RunStarted):
            self._run = event
        return note


def _ignore(event: Event) -> None:
    pass
