"""Rollout workers come and go: how long iterations take then. Engine and trainer sleep for given
times (`altered_run.py`), so that two cores are enough."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_clean_ends import log_of

from runs import (
    SMALL,
    descendants,
    lines_of,
    start_altered,
    summary_of,
    wait_for_line,
    wait_until_gone,
)

pytestmark = [pytest.mark.long, pytest.mark.alone]

STEP_SECONDS = 0.1
WORDS = (
    *SMALL,
    *("--no-live", "data.num_held_out=0", "rollout.max_concurrent_groups=2"),
    *("algorithm.beta=0.04", "train.learning_rate=0"),  # lengths stay as they are
    *("train.max_tokens_per_micro_batch=100", "devices.threads=1"),
)
"""Two groups take about 25 steps of an engine. With a reference, every group is trained."""
TOLERANCE = 1.25


@contextmanager
def slow_run(
    folder: Path, *words: str, completion_seconds: float = 0.0
) -> Iterator[subprocess.Popen[str]]:
    """A run whose engines and trainer sleep; it ends well."""
    times = {"STEP_SECONDS": str(STEP_SECONDS), "COMPLETION_SECONDS": str(completion_seconds)}
    process = start_altered("--output", str(folder), *WORDS, *words, **times)
    try:
        yield process
        _, err = process.communicate(timeout=400)
        assert (process.returncode, err) == (0, "")
    finally:
        workers = descendants(process.pid) if process.poll() is None else []
        process.kill()
        process.communicate()
        wait_until_gone(workers, 5.0)


def easyrl(*words: str) -> str:
    """Output of a command."""
    done = [sys.executable, "-m", "easyrl", *words]
    return subprocess.run(done, check=True, capture_output=True, text=True, timeout=60).stdout


def rollout_workers(folder: Path) -> list[dict[str, Any]]:
    reply = json.loads(easyrl("status", str(folder), "--json"))
    return [worker for worker in reply["workers"] if worker["kind"] == "rollout"]


class Trace:
    """Activities of the workers. Times are Unix seconds."""

    def __init__(self, folder: Path) -> None:
        lines = [
            json.loads(x.rstrip(",")) for x in (folder / "trace.json").read_text().splitlines()[1:]
        ]
        self.lines = sorted(lines, key=lambda line: line["ts"])
        self.iterations = list(
            zip(self.times("iteration", "B"), self.times("iteration", "E"), strict=True)
        )

    def times(self, name: str, ph: str = "i", worker: str = "") -> list[float]:
        """When events of this name happened."""
        return [
            line["ts"] / 1e6
            for line in self.lines
            if (line["name"], line["ph"]) == (name, ph)
            and worker in ("", line["args"].get("worker"))
        ]

    def seconds(self, iteration: int) -> float:
        began, ended = self.iterations[iteration]
        return ended - began

    def num_groups(self, began: float, ended: float) -> int:
        return sum(began <= each < ended for each in self.times("GroupScored"))


def wait_for_iteration(folder: Path, number: int, timeout: float = 200) -> None:
    """Wait until iteration `number` (from 0) has started."""
    deadline = time.monotonic() + timeout
    trace, begin = folder / "trace.json", '"ph": "B", "name": "iteration"'
    while not trace.exists() or trace.read_text().count(begin) <= number:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_a_lost_worker_costs_little_more_than_its_capacity(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ("--infer-devices", "cpu:2", "--iterations", "3", "train.prompts_per_iteration=56")
    with slow_run(folder, *words) as process:
        wait_for_line(process, "iteration 1/")
        time.sleep(12.0)
        killed = time.time()
        workers = psutil.Process(process.pid).children()
        next(each for each in workers if log_of(each).stem == "rollout-1").kill()
    trace = Trace(folder)
    first, with_loss, last = map(trace.seconds, range(3))
    undisturbed = (first + last) / 2
    assert undisturbed >= 30.0
    began, ended = trace.iterations[1]
    assert began < killed < ended
    loaded = next(each for each in trace.times("Ready", worker="rollout-1") if each > killed)
    lost = (min(loaded, ended) - killed) / 2  # of two workers
    print(
        f"{undisturbed:.1f} s, with a loss {with_loss:.1f} s, of these {lost:.1f} s lost capacity"
    )
    assert with_loss - undisturbed - lost < 0.25 * undisturbed
    assert any(loaded < each < ended for each in trace.times("GroupScored", worker="rollout-1"))
    summary = summary_of(folder)
    assert (summary["groups_trained"], summary["worker_restarts"]) == (3 * 56, 1)


def test_throughput_follows_the_number_of_workers(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ("--infer-devices", "cpu:1", "devices.max_rollout_workers=3", "--iterations", "4")
    with slow_run(folder, *words, "train.prompts_per_iteration=84") as process:
        wait_for_iteration(folder, 0)
        time.sleep(20.0)
        scaled_up = time.time()
        easyrl("scale", str(folder), "--infer-devices", "cpu:3")
        wait_for_line(process, "iteration 2/")
        easyrl("scale", str(folder), "--infer-devices", "cpu:2")
    trace = Trace(folder)
    began, ended = trace.iterations[0]
    rate = trace.num_groups(began, scaled_up) / (scaled_up - began)  # of one worker
    seconds = [trace.seconds(iteration) for iteration in range(4)]
    print(f"one worker: {rate:.2f} groups/s; iterations of 84 groups: {seconds}")
    for new in ("rollout-1", "rollout-2"):  # they work as soon as they are loaded
        assert any(each < ended for each in trace.times("GroupScored", worker=new))
    assert 30.0 * 0.9 <= seconds[1] <= TOLERANCE * 84 / rate / 3
    assert seconds[1] * TOLERANCE <= seconds[3] <= TOLERANCE * 84 / rate / 2
    assert summary_of(folder)["groups_trained"] == 4 * 84
    assert [line["iteration"] for line in lines_of(folder / "metrics.jsonl")] == [0, 1, 2, 3]


def test_autoscale_reaches_the_balanced_number_and_stays_there(tmp_path: Path) -> None:
    """One engine takes about 1.25 s for a group, the trainer half of that."""
    folder, numbers = tmp_path / "run", []
    words = ("--infer-devices", "cpu:1", "--spare-devices", "cpu:2", "runtime.autoscale=true")
    words += ("train.prompts_per_iteration=50", "--iterations", "7")
    with slow_run(folder, *words, completion_seconds=0.6 / 4) as process:
        for iteration in range(1, 7):
            wait_for_line(process, f"iteration {iteration}/")
            workers = rollout_workers(folder)
            numbers.append(len([each for each in workers if each["state"] != "leaving"]))
    print(f"rollout workers after each iteration: {numbers}")
    assert numbers[2:] == [2, 2, 2, 2]
    assert all(Trace(folder).seconds(iteration) >= 30.0 for iteration in range(7))
    assert summary_of(folder)["groups_trained"] == 7 * 50
