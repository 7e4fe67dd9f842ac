"""The observers of a run, and what protects the run from them."""

import contextlib
import traceback
from collections.abc import Sequence

from rich.console import Console

from easyrl import events
from easyrl.events import Event, Note, Observer
from easyrl.observe.lines import PlainLines
from easyrl.observe.model_card import AdapterCard
from easyrl.observe.text import is_live_terminal
from easyrl.observe.trace import TraceWriter
from easyrl.observe.trackers import Trackers
from easyrl.observe.view import LiveView, NotebookView


def make_observers(tracked_by: Sequence[str] = (), *, live: bool = True) -> list[Observer]:
    """Return trackers (`output.log_to`), the trace, the writer of an adapter's card, and the live
    view, or plain lines if standard output is neither a terminal nor a notebook."""
    observers: list[Observer] = []
    if tracked_by:
        observers.append(Trackers())
    observers.append(Guard("trace.json", TraceWriter()))
    observers.append(Guard("the adapter's card", AdapterCard()))
    views: list[Observer] = [PlainLines()]
    if live and is_live_terminal():
        views.insert(0, LiveView())
    elif Console().is_jupyter:
        views.insert(0, NotebookView())
    # The view comes last: if another observer cannot start, the terminal is untouched.
    observers.append(Guard("the view", *views))
    return observers


class Guard:
    """The first of several observers. If it fails after the run's start, the next one replaces it,
    with a note."""

    def __init__(self, name: str, *observers: Observer) -> None:
        self._name = name
        self._observers = list(observers)
        self._run: events.RunStarted | None = None

    def __call__(self, event: Event) -> Note | None:
        if not self._observers:
            return None
        try:
            note = self._observers[0](event)
        except Exception as error:
            if self._run is None:
                raise
            failed = self._observers.pop(0)
            with contextlib.suppress(Exception):  # most have nothing to close
                failed.close()  # type: ignore[attr-defined]
            if self._observers:
                self._observers[0](self._run)
                self._observers[0](event)
            cause = error if isinstance(error, OSError) else traceback.format_exc().rstrip()
            return Note(f"{self._name} failed; the run continues without it:\n{cause}")
        if isinstance(event, events.RunStarted):
            self._run = event
        return note
