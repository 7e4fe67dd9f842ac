"""Rollout workers come and go: how long iterations take then. Engine and trainer sleep for given
times (`altered_run.py`), so that two cores are enough."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from test_clean_ends import log_of

from easyrl.runtime.control import request
from runs import SMALL, descendants, start_altered, summary_of, wait_for_line, wait_until_gone

pytestmark = [pytest.mark.long, pytest.mark.alone]

WORDS = (
    *SMALL,
    *("--no-live", "data.num_held_out=0", "rollout.max_concurrent_groups=2"),
    *("algorithm.beta=0.04", "train.learning_rate=0"),  # lengths stay as they are
    *("train.max_tokens_per_micro_batch=100", "devices.threads=1"),
)
"""Two groups take about 25 steps of an engine. With a reference, every group is trained."""


@contextmanager
def slow_run(
    folder: Path, *words: str, completion_seconds: float = 0.0
) -> Iterator[subprocess.Popen[str]]:
    """A run whose engines and trainer sleep; it ends well."""
    times = {"STEP_SECONDS": "0.1", "COMPLETION_SECONDS": str(completion_seconds)}
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


def times(folder: Path, name: str, ph: str = "i", worker: str = "") -> list[float]:
    """When events of this name happened, as Unix seconds."""
    trace = (folder / "trace.json").read_text().splitlines()[1:]
    lines = sorted((json.loads(line.rstrip(",")) for line in trace), key=lambda line: line["ts"])
    return [
        line["ts"] / 1e6
        for line in lines
        if (line["name"], line["ph"]) == (name, ph) and worker in ("", line["args"].get("worker"))
    ]


def iterations_of(folder: Path) -> list[tuple[float, float]]:
    """Begin and end of each iteration."""
    return list(zip(*(times(folder, "iteration", ph) for ph in "BE"), strict=True))


def test_a_lost_worker_costs_little_more_than_its_capacity(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ("--infer-devices", "cpu:2", "--iterations", "3", "train.prompts_per_iteration=56")
    with slow_run(folder, *words) as process:
        wait_for_line(process, "iteration 1/")
        time.sleep(12.0)
        killed = time.time()
        workers = psutil.Process(process.pid).children()
        next(each for each in workers if log_of(each).stem == "rollout-1").kill()
    first, (began, ended), last = iterations_of(folder)
    undisturbed = (first[1] - first[0] + last[1] - last[0]) / 2
    assert undisturbed >= 30.0 and began < killed < ended
    loaded = next(each for each in times(folder, "Ready", worker="rollout-1") if each > killed)
    lost = (min(loaded, ended) - killed) / 2  # of two workers
    assert ended - began - undisturbed - lost < 0.25 * undisturbed
    reports = times(folder, "GroupScored", worker="rollout-1")
    assert any(loaded < each < ended for each in reports), "its replacement works at once"
    summary = summary_of(folder)
    assert (summary["groups_trained"], summary["worker_restarts"]) == (3 * 56, 1)


def test_autoscale_reaches_the_balanced_number_and_stays_there(tmp_path: Path) -> None:
    """One engine takes about 1.25 s for a group, the trainer half of that."""
    folder, numbers = tmp_path / "run", []
    words = ("--infer-devices", "cpu:1", "--spare-devices", "cpu:2", "runtime.autoscale=true")
    words += ("train.prompts_per_iteration=50", "--iterations", "7")
    with slow_run(folder, *words, completion_seconds=0.6 / 4) as process:
        for iteration in range(1, 7):
            wait_for_line(process, f"iteration {iteration}/")
            workers = request(folder, {"command": "status"})["workers"]
            rollout = [each for each in workers if each["kind"] == "rollout"]
            numbers.append(len([each for each in rollout if each["state"] != "leaving"]))
    assert numbers[2:] == [2, 2, 2, 2]
    assert all(ended - began >= 30.0 for began, ended in iterations_of(folder))
    assert summary_of(folder)["groups_trained"] == 7 * 50
