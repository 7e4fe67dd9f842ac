"""Whoever watches a run never stops it."""

from __future__ import annotations

import contextlib
import traceback

from easyrl import records
from easyrl.records import Note, Observer, Record


class Guard:
    """An observer that is dropped when it fails in mid-run: with a note, and with another one in
    its place where there is one. Before the run has started, its failure is the run's."""

    def __init__(self, observe: Observer, *, instead: Observer | None = None) -> None:
        self.observer: Observer | None = observe
        self._instead = instead
        self._run: records.RunStarted | None = None

    def __call__(self, record: Record) -> Note | None:
        if self.observer is None:
            return None
        try:
            note = self.observer(record)
        except Exception:
            if self._run is None:
                raise
            return self._replace(record)
        if isinstance(record, records.RunStarted):
            self._run = record
        return note

    def _replace(self, record: Record) -> Note:
        failed, self.observer, self._instead = self.observer, self._instead, None
        with contextlib.suppress(Exception):  # most have nothing to close
            getattr(failed, "close", lambda: None)()
        if self.observer is not None and self._run is not None:
            self.observer(self._run)
            self.observer(record)
        cause = traceback.format_exc().rstrip()
        return Note(f"{type(failed).__name__} failed, and the run goes on without it:\n{cause}")
