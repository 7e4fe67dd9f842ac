"""A run that seems to hang says what it is at."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from easyrl import events
from easyrl.runtime.silence import Silence
from easyrl.runtime.supervisor import Worker
from easyrl.workers import rollout
from easyrl.workers.timeline import Timeline
from runs import SMALL, descendants, start, wait_for_line, wait_until_gone

pytestmark = pytest.mark.alone


def notes(silence: Silence, seconds: int, *stopped: str) -> dict[int, str]:
    """What is told after how many seconds."""
    names = ("train-0", "rollout-0")
    there = [SimpleNamespace(name=name, is_stopped=name in stopped) for name in names]
    workers = cast(list[Worker], cast(Any, there))
    told = {second: silence.note(workers) for second in range(1, seconds + 1)}
    return {second: note for second, note in told.items() if note}


def test_a_long_silence_is_told_ever_more_rarely_and_ends_with_a_word() -> None:
    silence = Silence()
    now = time.monotonic()
    silence.hear("rollout-0", events.Activity((), 0, 0, events.UnderWay("wait", now - 9)))
    silence.hear("train-0", events.Activity((), 0, 0, events.UnderWay("train", now - 5)))
    told = notes(silence, 500)
    assert list(told) == [60, 120, 240, 480]
    assert told[60].endswith("for 60 s: train-0 train 5 s, rollout-0 idle 9 s")
    silence.hear("train-0", events.Activity((), 20, 0))
    assert list(notes(silence, 60)) == [60]


def test_a_stopped_worker_is_told_soon_and_once() -> None:
    silence = Silence()
    silence.hear("train-0", events.Starting("loading the model"))
    told = notes(silence, 100, "rollout-0")
    assert list(told) == [3, 60]
    assert "rollout-0 is stopped (SIGCONT" in told[3] and "train-0 loading the model" in told[3]


class SlowScorer:
    """Answers nothing, and loses its processes at the third look."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        self.num_looks = 0

    def fileno(self) -> int:
        return self._reader

    @property
    def is_lost(self) -> bool:
        self.num_looks += 1
        return self.num_looks == 3

    def close(self) -> None:
        os.close(self._reader)
        os.close(self._writer)


def test_a_long_reward_is_one_wait_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often its rollout worker looks whether the reward processes are there."""
    monkeypatch.setattr(rollout, "LOOK_SECONDS", 0.01)
    told: list[events.Activity] = []
    scorer, (control, _other_end) = SlowScorer(), multiprocessing.Pipe()
    worker = SimpleNamespace(
        engine=SimpleNamespace(has_work=False),
        control=control,
        scorer=scorer,
        timeline=Timeline(told.append),
        cores=SimpleNamespace(resting=nullcontext),
        _outbox=[],
        _being_scored={"a group": None},
    )
    rollout.RolloutWorker._wait_for_something_to_do(cast(Any, worker))
    assert scorer.num_looks == 3
    assert [one.under_way.kind for one in told if one.under_way is not None] == ["score"]
    scorer.close()


def test_a_worker_that_is_stopped_in_mid_run_is_named_and_may_go_on(tmp_path: Path) -> None:
    process = start("--output", str(tmp_path / "run"), "--iterations", "100000", *SMALL)
    try:
        wait_for_line(process, "iteration 2/")
        workers = psutil.Process(process.pid).children()
        (trainer,) = [w for w in workers if "train-0" in _log_of(w)]
        trainer.suspend()
        wait_for_line(process, "no word from any worker for 3 s: train-0 is stopped")
        trainer.resume()
        wait_for_line(process, "iteration ")
    finally:
        processes = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
        assert wait_until_gone(processes, 5) == []


def _log_of(process: psutil.Process) -> str:
    return str(Path(f"/proc/{process.pid}/fd/1").readlink())
