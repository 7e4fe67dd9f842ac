"""What `easyrl status` says of a live run, from its events."""

from __future__ import annotations

import time
from typing import Any

import pytest

from easyrl import events
from easyrl.events import FromWorker, Span, SpanKind, UnderWay
from easyrl.observe.report import status_table
from easyrl.observe.text import say_rich
from easyrl.runtime.status import Member, RunStatus
from run_events import METRICS, active

MEMBERS = [
    Member("rollout-0", 11, "cpu"),
    Member("rollout-1", 12, "cpu"),
    Member("train-0", 13, "cpu"),
]


def iteration(
    status: RunStatus, started: float, **activities: list[tuple[SpanKind, float]]
) -> float:
    """Add an iteration in which workers (`rollout_0`) did this one after another, each activity for
    so many seconds; return its end."""
    status.observe(events.IterationStarted(started, 0))
    end = started
    for worker, spans in activities.items():
        now = started
        for kind, seconds in spans:
            span = Span(kind, now, now := now + seconds)
            status.observe(active(worker.replace("_", "-"), span))
        end = max(end, now)
    status.observe(events.IterationFinished(end, METRICS))
    return end


HALF_IDLE: dict[str, Any] = {  # the trainer waits 3 of 9 s, one engine does nothing for 4 s
    "rollout_0": [("weights", 1.0), ("prefill", 1.0), ("generate", 8.0)],
    "rollout_1": [("weights", 1.0), ("generate", 5.0), ("wait", 4.0)],
    "train_0": [("weights", 1.0), ("wait", 3.0), ("train", 6.0)],
}


def test_shares_of_waiting_and_the_number_of_engines_that_balances() -> None:
    status = RunStatus(num_iterations=5)
    assert status.waiting_shares() == {"rollout": None, "train": None}
    assert status.balanced() is None
    iteration(status, 100.0, **HALF_IDLE)
    assert status.waiting_shares() == {"rollout": pytest.approx(0.2), "train": pytest.approx(0.3)}
    assert status.balanced() == 3  # 14 s of generating, 6 s of training


@pytest.mark.parametrize(("engine", "trainer", "num_train", "expected"), [
    (1.0, 9.0, 1, 1),
    (12.0, 10.0, 1, 1),  # a second engine would mostly wait
    (13.0, 10.0, 1, 2),
    (30.0, 10.0, 1, 3),
    (30.0, 10.0, 2, 3),  # train ranks work on the same groups at the same time
])  # fmt: skip
def test_the_balanced_number_follows_from_the_work_of_both_sides(
    engine: float, trainer: float, num_train: int, expected: int
) -> None:
    status = RunStatus(5)
    ranks: dict[str, Any] = {f"train_{rank}": [("train", trainer)] for rank in range(num_train)}
    iteration(status, 0.0, rollout_0=[("generate", engine)], **ranks)
    assert status.balanced() == expected


def test_only_training_counts() -> None:
    """In an evaluation the trainer waits for nothing that more engines would bring."""
    status = RunStatus(5)
    end = iteration(status, 100.0, **HALF_IDLE)
    shares = status.waiting_shares()
    status.observe(events.EvaluationStarted(end, 100))
    status.observe(active("rollout-0", Span("generate", end, end + 50)))
    status.observe(active("train-0", Span("wait", end - 1, end + 50)))
    assert status.balanced() == 3
    assert status.waiting_shares()["rollout"] == shares["rollout"]
    status = RunStatus(5)
    status.observe(events.IterationStarted(0.0, 0))
    status.observe(events.EvaluationStarted(10.0, 100))
    status.observe(active("rollout-0", Span("generate", 0.0, 90.0)))
    status.observe(active("train-0", Span("train", 0.0, 10.0)))
    status.observe(events.IterationFinished(100.0, METRICS))
    assert status.balanced() == 1


def test_the_last_iterations_count_and_old_ones_are_forgotten() -> None:
    status, now = RunStatus(5), 0.0
    for _ in range(5):
        now = iteration(status, now, rollout_0=[("generate", 50.0)], train_0=[("train", 10.0)])
    assert status.balanced() == 5
    for _ in range(3):
        now = iteration(status, now, rollout_0=[("generate", 20.0)], train_0=[("train", 10.0)])
    assert status.balanced() == 2
    for _ in range(10_000):  # short ones
        now = iteration(status, now, rollout_0=[("generate", 0.01)], train_0=[("train", 0.01)])
    assert status.balanced() == 1 and len(status._iterations) < 1100
    status.forget()
    assert status.balanced() is None
    iteration(status, now, rollout_1=[("generate", 30.0)], train_0=[("train", 10.0)])
    assert status.balanced() == 3


def test_what_has_not_ended_counts() -> None:
    status, now = RunStatus(5), time.monotonic()
    status.observe(events.IterationStarted(now - 20, 0))
    status.observe(active("train-0", Span("train", now - 20, now - 15)))
    status.observe(active("train-0", under_way=UnderWay("wait", now - 15)))
    status.observe(active("rollout-0", under_way=UnderWay("generate", now - 25)))
    assert status.waiting_shares()["train"] == pytest.approx(0.75, abs=0.05)
    assert status.balanced() == 4  # 20 s against 5
    status.observe(active("rollout-0", Span("generate", now - 25, now - 10)))  # so it was
    assert status.balanced() == 2


def test_every_worker_has_its_state_and_its_restarts(capsys: pytest.CaptureFixture[str]) -> None:
    status, now = RunStatus(5), time.monotonic()

    def states() -> dict[str, tuple[str, int]]:
        rows = status.reply(MEMBERS)["workers"]
        assert [row["kind"] for row in rows] == ["controller", "rollout", "rollout", "train"]
        return {row["name"]: (row["state"], row["restarts"]) for row in rows}

    assert set(states().values()) == {("starting", 0)}
    for name in ("rollout-0", "rollout-1", "train-0"):
        status.observe(FromWorker(name, now, events.Ready()))
    status.observe(events.IterationStarted(now, 0))
    status.observe(active("rollout-0", under_way=UnderWay("score", now)))
    status.observe(active("train-0", Span("train", now - 1, now)))
    assert states() == {
        "controller": ("training", 0),
        "rollout-0": ("score", 0),
        "rollout-1": ("wait", 0),
        "train-0": ("train", 0),
    }
    status.observe(FromWorker("train-0", now, events.WeightsExchanged(1)))
    assert states()["train-0"] == ("wait", 0)
    status.observe(FromWorker("rollout-0", now, events.Lost("killed by SIGKILL")))
    assert states()["rollout-0"] == ("lost", 1)
    status.observe(FromWorker("rollout-0", now, events.Starting("importing torch")))
    status.observe(FromWorker("rollout-0", now, events.Ready()))
    assert states()["rollout-0"] == ("wait", 1)
    status.observe(events.WorkerLeft(now, "rollout-0"))
    status.observe(FromWorker("rollout-0", now, events.Lost("of another one with that number")))
    assert states()["rollout-0"] == ("lost", 1)
    say_rich(status_table(status.reply([Member("rollout-0", 11, "cuda:0,1", "leaving")])))
    shown = " ".join(capsys.readouterr().out.split())
    assert "rollout-0 11 cuda:0,1 leaving 1" in shown and "iteration 1 of 5" in shown
