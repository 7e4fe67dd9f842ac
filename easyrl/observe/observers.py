"""The observers of a run, and what protects the run from them."""

import contextlib
import traceback
from collections.abc import Sequence

from rich.console import Console

from easyrl import events
from easyrl.events import Event, Note, Observer
from easyrl.observe.lines import PlainLines
from easyrl.observe.text import is_live_terminal
from easyrl.observe.trace import TraceWriter
from easyrl.observe.trackers import Trackers
from easyrl.observe.view import LiveView, NotebookView


def make_observers(tracked_by: Sequence[str] = (), *, live: bool = True) -> list[Observer]:
    """Return trackers (`output.log_to`), the trace, and the live view, or plain lines if standard
    output is neither a terminal nor a notebook."""
    trackers: list[Observer] = [Trackers()] if tracked_by else []
    views: list[Observer] = [PlainLines()]
    if live and is_live_terminal():
        views.insert(0, LiveView())
    elif Console().is_jupyter:
        views.insert(0, NotebookView())
    # The view comes last: if another observer cannot start, the terminal is untouched.
    return [*trackers, Guard("trace.json", TraceWriter()), Guard("the view", *views)]


class Guard:
    """Replace an observer that fails after the run's start by the next one, with a note."""

    def __init__(self, name: str, *observers: Observer) -> None:
        self._name, self._observers = name, list(observers)
        self._run: events.RunStarted | None = None

    def __call__(self, event: Event) -> Note | None:
        if not self._observers:
            return None
        try:
            note = self._observers[0](event)
        except Exception as error:
            if self._run is None:
                raise
            with contextlib.suppress(Exception):  # most have nothing to close
                self._observers.pop(0).close()  # type: ignore[attr-defined]
            for observer in self._observers[:1]:
                observer(self._run)
                observer(event)
            cause = error if isinstance(error, OSError) else traceback.format_exc().rstrip()
            return Note(f"{self._name} failed; the run continues without it:\n{cause}")
        if isinstance(event, events.RunStarted):
            self._run = event
        return note
