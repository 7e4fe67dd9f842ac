"""vLLM's processes are removed with their rollout worker, and a stuck weight update is noticed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from easyrl.engines.vllm import processes
from easyrl.engines.vllm.processes import (
    DONE,
    FOLDER,
    LOADING,
    WAITING,
    Cleanup,
    RankProgress,
    UpdateProgress,
    processes_of,
    remove,
)

SECONDS = 5.0
TIMEOUT_SECONDS = 0.2
HOLDER = """
import subprocess, time
from easyrl.engines.vllm.processes import Cleanup
cleanup = Cleanup()
open(cleanup.folder + "/socket", "w")
subprocess.Popen(["sleep", "1000"])
print(cleanup.folder, flush=True)
time.sleep(1000)
"""


def test_killed_worker_leaves_no_names_and_no_processes() -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    folder = holder.stdout.readline().strip()
    deadline = time.monotonic() + SECONDS
    while not processes_of(folder) and time.monotonic() < deadline:
        time.sleep(0.02)  # a process that is just starting shows no environment yet
    assert processes_of(folder) and Path(folder, "socket").exists()
    holder.kill()
    holder.communicate()
    deadline = time.monotonic() + SECONDS
    while (Path(folder).exists() or processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(folder).exists() and not processes_of(folder)


def test_folder_path_is_short_enough_for_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    cleanup = Cleanup()
    assert os.environ[FOLDER] == cleanup.folder
    cleanup.stop_marking()
    assert FOLDER not in os.environ
    assert cleanup.folder.startswith("/tmp/") and not list(long.iterdir())
    cleanup.close()
    assert not Path(cleanup.folder).exists()


def test_process_that_cannot_be_killed_is_not_waited_for_forever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "names"
    folder.mkdir()
    monkeypatch.setattr(processes, "KILL_SECONDS", 0.2)
    monkeypatch.setattr("os.kill", lambda pid, signum: None)
    stuck = subprocess.Popen(["sleep", "100"], env={**os.environ, FOLDER: str(folder)})
    try:
        remove(str(folder))
    finally:
        monkeypatch.undo()
        stuck.kill()
        stuck.wait()
    assert not folder.exists()


# -- progress of a weight update ------------------------------------------------------------------


@pytest.fixture
def progress() -> UpdateProgress:
    return UpdateProgress(num_ranks=2, first_rank=3, timeout_seconds=TIMEOUT_SECONDS)


def ranks_of(progress: UpdateProgress) -> list[RankProgress]:
    return [RankProgress(progress.path, rank) for rank in range(2)]


def test_rank_that_hangs_while_loading_is_reported_with_its_bucket(
    progress: UpdateProgress,
) -> None:
    first, second = ranks_of(progress)
    first.report(WAITING, 8)
    second.report(LOADING, 7)
    progress.check()
    time.sleep(TIMEOUT_SECONDS)
    with pytest.raises(
        TimeoutError, match=r"rank 4 .*bucket 8 .*runtime\.timeout_seconds"
    ) as error:
        progress.check()
    assert "rank 3" not in str(error.value), "it only waits"


def test_ranks_that_report_are_waited_for(progress: UpdateProgress) -> None:
    first, second = ranks_of(progress)
    began = time.monotonic()
    while time.monotonic() < began + 2 * TIMEOUT_SECONDS:
        first.report(LOADING, 0)  # another piece of the same bucket
        second.report(LOADING, 0)
        progress.check()
        time.sleep(TIMEOUT_SECONDS / 10)


@pytest.mark.parametrize("has_begun", [True, False])
def test_the_weight_channels_own_timeout_comes_first(
    progress: UpdateProgress, monkeypatch: pytest.MonkeyPatch, has_begun: bool
) -> None:
    first, second = ranks_of(progress)
    if has_begun:
        first.report(WAITING, 2)
        second.report(DONE)
    progress.check()
    time.sleep(TIMEOUT_SECONDS)
    progress.check()
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.0)
    with pytest.raises(TimeoutError, match=r"rank 3 .*rank 4 "):
        progress.check()
