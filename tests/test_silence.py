"""A run that seems to hang reports what its workers do."""

from __future__ import annotations

import multiprocessing
import os
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from easyrl import events
from easyrl.runtime.supervisor import Watchdog, Worker
from easyrl.workers import rollout
from easyrl.workers.timeline import Timeline


def notes(watchdog: Watchdog, seconds: int, *stopped: str) -> dict[int, str]:
    """The warning after how many seconds."""
    names = ("train-0", "rollout-0")
    stand_ins = [SimpleNamespace(name=name, is_stopped=name in stopped) for name in names]
    workers = cast(list[Worker], cast(Any, stand_ins))
    ticks = {second: watchdog.tick(workers) for second in range(1, seconds + 1)}
    return {second: warning for second, warning in ticks.items() if warning}


def test_warnings_become_rarer_until_the_next_event() -> None:
    watchdog = Watchdog()
    now = time.monotonic()
    watchdog.on_event("rollout-0", events.Activity((), 0, 0, events.UnderWay("wait", now - 9)))
    watchdog.on_event("train-0", events.Activity((), 0, 0, events.UnderWay("train", now - 5)))
    reported = notes(watchdog, 500)
    assert list(reported) == [60, 120, 240, 480]
    assert reported[60].endswith("for 60 s: train-0 train 5 s, rollout-0 idle 9 s")
    watchdog.on_event("train-0", events.Activity((), 20, 0))
    assert list(notes(watchdog, 60)) == [60]


def test_stopped_worker_is_reported_soon_and_once() -> None:
    watchdog = Watchdog()
    watchdog.on_event("train-0", events.Starting("loading the model"))
    reported = notes(watchdog, 100, "rollout-0")
    assert list(reported) == [3, 60]
    assert (
        "rollout-0 is stopped (SIGCONT" in reported[3]
        and "train-0 loading the model" in reported[3]
    )


class SlowPool:
    """Answers nothing, and loses its processes at the third check."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        self.num_checks = 0

    def fileno(self) -> int:
        return self._reader

    @property
    def is_broken(self) -> bool:
        self.num_checks += 1
        return self.num_checks == 3

    def close(self) -> None:
        os.close(self._reader)
        os.close(self._writer)


def test_long_reward_is_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often the rollout worker checks the reward processes."""
    monkeypatch.setattr(rollout, "POLL_SECONDS", 0.01)
    reported: list[events.Activity] = []
    pool, (control, _other_end) = SlowPool(), multiprocessing.Pipe()
    worker = SimpleNamespace(
        engine=SimpleNamespace(has_work=False),
        control=control,
        reward_pool=pool,
        timeline=Timeline(reported.append),
        cores=SimpleNamespace(idle=nullcontext),
        _outbox=[],
        _being_scored={"a group": None},
    )
    rollout.RolloutWorker._wait_for_work(cast(Any, worker))
    assert pool.num_checks == 3
    assert [one.under_way.kind for one in reported if one.under_way is not None] == ["score"]
    pool.close()
