"""Runs that are quiet, stall or cannot learn: warnings, who is to blame, the workers' stacks."""

from pathlib import Path

import pytest

from easyrl import events
from easyrl.config import load_config
from easyrl.events import Activity, Span, UnderWay
from easyrl.runtime import watchdog as module
from easyrl.runtime.metrics import no_learning_warning, no_requests_warning
from easyrl.runtime.resolve import resolve
from easyrl.runtime.watchdog import Watchdog
from own_processes import WAIT_SECONDS
from runs import SMALL, descendants, start, wait_for_line, wait_until_gone, workers

STALL_SECONDS = 30
GROUP = events.GroupScored(0, 0, 0, [1.0], [], [3], 0, 0.0)
PIDS = {"train-0": 1, "rollout-0": 2, "rollout-1": 3}


class Run:
    """A watchdog of three workers, ticked by a clock."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        self.stopped = set()
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(module, "is_stopped", self.stopped.__contains__)
        self.watchdog = Watchdog(STALL_SECONDS)

    def waits(self, *workers):
        for worker in workers:
            self.watchdog.on_event(worker, Activity((), UnderWay("wait", self.now)))

    def steps(self, worker, kind, num_tokens=0):
        span = Span(kind, self.now - 0.5, self.now)
        self.watchdog.on_event(worker, Activity((span,), num_tokens=num_tokens))

    def ticks(self, seconds, meanwhile=lambda: None):
        results = {}
        for second in range(1, seconds + 1):
            self.now += 1.0
            meanwhile()
            if result := self.watchdog.tick(PIDS):
                results[second] = result
        return results

    def stall(self, meanwhile=lambda: None):
        results = self.ticks(STALL_SECONDS, meanwhile)
        assert [*results] == [STALL_SECONDS]
        return results[STALL_SECONDS]


@pytest.fixture
def run(monkeypatch):
    return Run(monkeypatch)


def test_warnings_become_rarer_until_the_next_event(run):
    run.watchdog = Watchdog()
    run.watchdog.on_event("train-0", events.Starting("loading the model"))
    reported = run.ticks(500)
    assert list(reported) == [60, 120, 240, 480]
    assert "train-0 (loading the model 60 s)" in str(reported[60])
    run.watchdog.on_event("train-0", events.Ready())
    assert list(run.ticks(60)) == [60]


def test_an_engine_that_reports_steps_without_tokens_is_to_blame(run):
    run.waits("train-0", "rollout-0")
    # A trainer without a command waits, as during an evaluation; its writer reports from a thread.
    for event in (events.WeightsExchanged(1), events.CheckpointSaved(1, 1.0, 1)):
        run.watchdog.on_event("train-0", event)
    stall = run.stall(lambda: run.steps("rollout-1", "generate"))
    assert stall.workers == ["rollout-1"]
    before, _, after = stall.cause.partition(" waiting for ")
    assert "train-0, rollout-0" in before and "rollout-1 (generate 29 s)" in after
    run.stopped.add(PIDS["rollout-0"])  # to blame, whatever the others report
    stall = run.stall()
    assert stall.workers == ["rollout-0"] and "stopped by a signal" in stall.cause


@pytest.mark.parametrize(
    "progress",
    [
        lambda run: run.steps("rollout-1", "generate", num_tokens=1),
        lambda run: run.steps("train-0", "train"),
        lambda run: run.watchdog.on_event("rollout-1", GROUP),
    ],
)
def test_a_run_that_progresses_is_not_stalled(run, progress):
    run.waits("train-0", "rollout-0")
    for _ in range(3):
        assert run.ticks(STALL_SECONDS - 1, lambda: run.steps("rollout-1", "generate")) == {}
        progress(run)
    assert run.ticks(STALL_SECONDS - 1, lambda: run.steps("rollout-0", "score")) == {}
    assert run.ticks(1) != {}


@pytest.mark.long
def test_a_stopped_trainer_ends_the_run_with_its_name_and_the_stacks(tmp_path):
    run = tmp_path / "run"
    iterations = ("--iterations", "100000", *SMALL, "train.save_every=1")
    process = start("--output", str(run), *iterations, "runtime.stall_seconds=15")
    wait_for_line(process, "iteration 2/")
    processes = descendants(process.pid)
    workers(process.pid)["train-0"].suspend()
    _, err = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 1 and wait_until_gone(processes) == []
    assert "waiting for train-0" in err and "stopped by a signal" in err and "--resume" in err
    assert "rollout.py" in (run / "logs" / "rollout-0.log").read_text()


HEALTHY = {
    "reward": 0.5,
    "frac_reward_zero_std": 0.5,
    "completions/clipped_ratio": 0.1,
    "completions/mean_length": 40.0,
}


def warning(*changes):
    lines = [{"iteration": number, **HEALTHY, **each} for number, each in enumerate(changes, 5)]
    spec = resolve(load_config())
    return no_learning_warning(lines, spec.batches, spec.limits, Path("my run"))


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"frac_reward_zero_std": 1.0}, "does not find the answers"),
        ({"completions/clipped_ratio": 0.97}, "rollout.max_completion_length"),
        ({"completions/mean_length": 1.0}, "data.chat"),
    ],
)
def test_three_iterations_at_an_extreme_are_explained(change, cause):
    text = warning(change, change, change)
    assert cause in text and "iterations 5 to 7" in text
    assert "easyrl samples 'my run' --iteration 7" in text
    assert not warning(change, change) and not warning(change, {}, change)
    skipped = {**change, "reward": None, "frac_reward_zero_std": None}
    assert not warning(skipped, change, change)


@pytest.mark.parametrize(
    ("shares", "is_warned"), [((), False), ((0.0, 0.4), False), ((0.0, 0.6), True), ((1.0,), True)]
)
def test_episodes_that_ask_nothing_are_named(shares, is_warned):
    logged = [{}]  # without an agent
    for share in shares:
        logged.append({"episodes/without_requests": share})
    assert ("no answer from the model" in no_requests_warning(logged)) == is_warned


def test_a_teacher_alone_gets_the_warnings_that_need_no_rewards():
    without = {"reward": None, "frac_reward_zero_std": None}
    assert not warning(without, without, without)
    cut_off = {**without, "completions/clipped_ratio": 1.0}
    text = warning(cut_off, cut_off, cut_off)
    assert "rollout.max_completion_length" in text and "reward" not in text
