"""Whoever watches a run never stops it."""

from __future__ import annotations

from pathlib import Path

import pytest

from easyrl import records
from easyrl.config import load_config
from easyrl.observe.guard import Guard
from easyrl.records import Note, Record

RUN = records.RunStarted(0.0, Path("run"), load_config(), {"train-0": "cpu"}, 4, "")
FIRST, SECOND = records.FirstRollout(1.0), records.IterationStarted(2.0, 0)


class Fails:
    def __init__(self, at: type) -> None:
        self.at = at
        self.is_closed = False

    def __call__(self, record: Record) -> Note | None:
        if isinstance(record, self.at):
            raise KeyError("a bug")
        return None

    def close(self) -> None:
        self.is_closed = True


def test_one_that_fails_in_mid_run_is_closed_dropped_and_told_of_once() -> None:
    observer = Fails(records.FirstRollout)
    guard = Guard(observer)
    assert guard(RUN) is None
    note = guard(FIRST)
    assert note is not None and "Fails failed" in note.text and "KeyError: 'a bug'" in note.text
    assert observer.is_closed
    assert guard(FIRST) is None and guard(SECOND) is None


def test_another_takes_its_place_and_knows_the_run() -> None:
    told: list[Record] = []
    guard = Guard(Fails(records.FirstRollout), instead=told.append)  # type: ignore[arg-type]
    for record in (RUN, FIRST, SECOND):
        guard(record)
    assert told == [RUN, FIRST, SECOND]


def test_one_that_cannot_start_stops_the_run_before_it_begins() -> None:
    with pytest.raises(KeyError):
        Guard(Fails(records.RunStarted))(RUN)
