"""Quiet and stalled runs: warnings, who is to blame, and the workers' stacks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hanging_worker
import pytest

from easyrl import events
from easyrl.config import load_config
from easyrl.events import Activity, Span, SpanKind, UnderWay
from easyrl.runtime import watchdog as module
from easyrl.runtime.launch import run_worker
from easyrl.runtime.supervisor import Supervisor, Worker
from easyrl.runtime.watchdog import Stall, Watchdog
from own_workers import settings_on_cpu
from runs import SMALL, descendants, start, wait_for_line, wait_until_gone

STALL_SECONDS = 30
GROUP = events.GroupScored(0, 0, 0, [1.0], [], [3], 0, 0.0)
PIDS = {"train-0": 1, "rollout-0": 2, "rollout-1": 3}


class Run:
    """A watchdog of three workers, ticked by a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.states: dict[int, str] = {}
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(module, "process_state", lambda pid: self.states.get(pid, "S"))
        self.watchdog = Watchdog(STALL_SECONDS)

    def waits(self, *workers: str) -> None:
        for worker in workers:
            self.watchdog.on_event(worker, Activity((), 0, UnderWay("wait", self.now)))

    def steps(self, worker: str, kind: SpanKind, **done: Any) -> None:
        span = Span(kind, self.now - 0.5, self.now)
        self.watchdog.on_event(worker, Activity((span,), done.pop("num_groups", 0), **done))

    def ticks(
        self, seconds: int, meanwhile: Callable[[], None] = lambda: None, busy: tuple[str, ...] = ()
    ) -> dict[int, str | Stall]:
        """What the watchdog returns, by second."""
        results = {}
        for second in range(1, seconds + 1):
            self.now += 1.0
            meanwhile()
            if result := self.watchdog.tick(PIDS, busy):
                results[second] = result
        return results


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(monkeypatch)


def stall_of(results: dict[int, str | Stall]) -> Stall:
    assert [*results] == [STALL_SECONDS]
    stall = results[STALL_SECONDS]
    assert isinstance(stall, Stall)
    return stall


def test_warnings_become_rarer_until_the_next_event(run: Run) -> None:
    run.watchdog = Watchdog()
    run.watchdog.on_event("rollout-0", Activity((), 0, UnderWay("wait", run.now - 9)))
    run.watchdog.on_event("train-0", events.Starting("loading the model"))
    reported = run.ticks(500)
    assert list(reported) == [60, 120, 240, 480]
    assert str(reported[60]).endswith(
        "for 60 s: rollout-0 wait 69 s, train-0 loading the model 60 s"
    )
    run.watchdog.on_event("train-0", events.Ready())
    assert list(run.ticks(60)) == [60]


def test_time_in_which_the_controller_did_not_run_does_not_count(run: Run) -> None:
    run.ticks(STALL_SECONDS - 2)
    run.now += 10_000.0  # Ctrl-Z
    assert run.ticks(1) == {} and run.ticks(1) != {}


def test_an_engine_that_reports_steps_without_tokens_is_to_blame(run: Run) -> None:
    run.waits("train-0", "rollout-0")
    stall = stall_of(run.ticks(STALL_SECONDS, lambda: run.steps("rollout-1", "generate")))
    assert stall.workers == ("rollout-1",)
    before, _, after = stall.cause.partition(" wait for ")
    assert "train-0, rollout-0" in before and after.startswith("rollout-1 (generate 30 s")


@pytest.mark.parametrize(
    "progress",
    [
        lambda run: run.steps("rollout-1", "generate", num_tokens=1),
        lambda run: run.steps("train-0", "wait", num_groups=1),
        lambda run: run.steps("rollout-1", "prefill"),
        lambda run: run.steps("train-0", "train"),
        lambda run: run.steps("train-0", "weights"),
        lambda run: run.watchdog.on_event("rollout-1", GROUP),
    ],
)
def test_a_run_that_progresses_is_not_stalled(run: Run, progress: Callable[[Run], None]) -> None:
    run.waits("train-0", "rollout-0")
    for _ in range(5):
        assert run.ticks(STALL_SECONDS - 1, lambda: run.steps("rollout-1", "generate")) == {}
        progress(run)
    run.waits("rollout-1")
    assert run.ticks(STALL_SECONDS - 1, lambda: run.steps("rollout-0", "score")) == {}
    assert run.ticks(1) != {}


def test_a_process_that_does_not_run_is_to_blame_whatever_the_others_report(run: Run) -> None:
    run.waits("train-0", "rollout-1")
    run.steps("rollout-0", "generate")
    run.states[PIDS["rollout-1"]] = "T"
    stall = stall_of(run.ticks(STALL_SECONDS))
    assert stall.workers == ("rollout-1",) and "stopped by a signal" in stall.cause


def test_if_all_wait_those_with_work_to_do_are_to_blame(run: Run) -> None:
    run.waits(*PIDS)
    assert stall_of(run.ticks(STALL_SECONDS, busy=("rollout-0",))).workers == ("rollout-0",)
    assert stall_of(run.ticks(STALL_SECONDS)).workers == ()  # counted anew


def test_a_trainer_without_a_command_waits(run: Run) -> None:
    """As during an evaluation; its checkpoint's writer reports from a thread."""
    run.waits("rollout-0")
    for event in (events.WeightsExchanged(1), events.CheckpointSaved(1, 1.0, 1)):
        run.watchdog.on_event("train-0", event)
    run.steps("rollout-1", "generate")
    assert stall_of(run.ticks(STALL_SECONDS)).workers == ("rollout-1",)


def test_a_worker_that_never_sent_an_event_is_to_blame(run: Run) -> None:
    run.waits(*PIDS)
    run.watchdog.on_event("rollout-0", events.Lost("killed"))  # and replaced
    assert stall_of(run.ticks(STALL_SECONDS)).workers == ("rollout-0",)


# -- stacks ---------------------------------------------------------------------------------------


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    with Supervisor() as supervisor:
        yield supervisor


def test_stacks_of_workers_that_hang(tmp_path: Path, supervisor: Supervisor) -> None:
    """In Python and in C code. The signal does not end a worker that has not set up its handler."""

    def hanging(name: str, kind: str) -> Worker:
        log = str(tmp_path / f"{name}.log")
        settings = settings_on_cpu(name, load_config(), log_file=log)
        return supervisor.spawn(name, run_worker, "hanging_worker", kind, settings)

    workers = [hanging("train-0", "HangsInPython"), hanging("train-1", "HangsInC")]
    early = hanging_worker.hangs_before_its_first_event
    workers.append(supervisor.spawn("rollout-0", early))
    watchdog, num_hanging = Watchdog(), 0
    deadline = time.monotonic() + 60.0
    while num_hanging < 2 and time.monotonic() < deadline:
        for worker, event in supervisor.wait(1.0):
            watchdog.on_event(worker.name, event)
            num_hanging += isinstance(event, events.Note)
    pids = {worker.name: worker.process.pid or 0 for worker in workers}
    watchdog.write_stacks(pids, tmp_path / "easyrl.log")
    for name in ("train-0", "train-1"):
        assert "hanging_worker.py" in (tmp_path / f"{name}.log").read_text()
    assert "test_stacks_of_workers" in (tmp_path / "easyrl.log").read_text()
    assert [worker.process.exitcode for worker in workers] == [None] * 3
    os.kill(pids["rollout-0"], signal.SIGSTOP)
    deadline = time.monotonic() + 10.0
    while module.process_state(pids["rollout-0"]) != "T" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert module.process_state(pids["rollout-0"]) == "T"


@pytest.mark.long
def test_a_stopped_trainer_ends_the_run_with_its_name_and_the_stacks(tmp_path: Path) -> None:
    run = tmp_path / "run"
    iterations = ("--iterations", "100000", *SMALL, "train.save_every=1")
    process = start("--output", str(run), *iterations, "runtime.stall_seconds=15")
    wait_for_line(process, "iteration 2/")
    processes = descendants(process.pid)
    (trainer,) = [p for p in processes if "train-0" in str(Path(f"/proc/{p.pid}/fd/1").readlink())]
    trainer.suspend()
    _, err = process.communicate(timeout=60.0)
    assert process.returncode == 1 and wait_until_gone(processes, 2.0) == []
    assert "train-0 (" in err and "stopped by a signal" in err and "--resume" in err
    assert "rollout.py" in (run / "logs" / "rollout-0.log").read_text()
