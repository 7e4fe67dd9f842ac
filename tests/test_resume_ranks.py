"""Runs over several train ranks that are cut off, and go on over as many or over another number."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file
from test_resume import SMALL_AND_SAME, kill, resume, told_of
from test_sharded_runs import train_workers

from easyrl.model.checkpoint_files import UNFINISHED, checkpoints_in, read_checkpoint
from runs import descendants, finish, lines_of, start, summary_of, wait_for_line, wait_until_gone

TINY = Path(__file__).parent.parent / "easyrl/tasks/tiny/model.safetensors"


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), [("cpu:2", "cpu"), ("cpu", "cpu:2")])
def test_another_number_of_ranks_goes_on_to_the_same_weights(
    tmp_path: Path, before: str, after: str
) -> None:
    words = (*SMALL_AND_SAME, "algorithm.beta=0.05", "--iterations", "6", "--train-devices")
    once, twice = tmp_path / "once", tmp_path / "twice"
    assert finish("--output", str(once), *words, before)[0] == 0
    process = start("--output", str(twice), *words, before)
    wait_for_line(process, "checkpoint of iteration 3:")
    kill(process)
    newest = checkpoints_in(twice / "checkpoints")[-1]
    assert len(list(newest.glob("*.safetensors"))) == (2 if before == "cpu:2" else 1)
    out = resume(twice, "--train-devices", after)
    assert ("train-1: cpu" in out) == (after == "cpu:2")
    assert f"{newest.name} of 6 iterations done" in out
    got, expected = (load_file(folder / "model/model.safetensors") for folder in (twice, once))
    start_weights = load_file(TINY)
    for name, weight in expected.items():
        gap = float((got[name] - weight).norm() / weight.norm())
        moved = float((start_weights[name] - weight).norm() / weight.norm())
        assert gap <= 1e-5 and gap < moved / 100, name
    assert summary_of(twice)["groups_trained"] == summary_of(once)["groups_trained"] == 24
    assert summary_of(twice)["groups_off_policy"] == 0


# -- in the middle of saving ---------------------------------------------------------------------


def wait_for_saving(process: subprocess.Popen[str], folder: Path, beyond: int) -> None:
    """Until a checkpoint later than the iteration `beyond` is being written."""
    deadline = time.monotonic() + 120
    while not any(
        int(path.name.removesuffix(UNFINISHED)) > beyond
        for path in (folder / "checkpoints").glob(f"*{UNFINISHED}")
    ):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.0005)


@pytest.mark.long
def test_ranks_killed_while_they_save_repeat_and_skip_no_group(tmp_path: Path) -> None:
    chance = random.Random(5)
    once, folder = tmp_path / "once", tmp_path / "run"
    words = (*SMALL_AND_SAME, "--iterations", "9", "--train-devices", "cpu:2")
    words = (*words, "train.keep_checkpoints=1", "runtime.resume=auto")
    assert finish("--output", str(once), *words)[0] == 0
    num_done = 0
    for victim in ("controller", "rank 0", "rank 1"):
        process = start("--output", str(folder), *words)
        wait_for_line(process, f"iteration {num_done + 1}/")  # nothing is left over any more
        wait_for_saving(process, folder, num_done + 1)
        time.sleep(chance.random() * 0.03)
        processes = descendants(process.pid)
        if victim == "controller":
            process.kill()
        else:
            train_workers(process.pid)[int(victim[-1])].kill()
        _, err = process.communicate(timeout=60)
        assert wait_until_gone(processes, 10.0) == []
        if victim != "controller":
            assert f"train-{victim[-1]} was killed by SIGKILL" in err
        for path in checkpoints_in(folder / "checkpoints"):
            num_done = int(read_checkpoint(path).state["num_iterations"])  # whole, every one
        assert num_done >= 1
    code, _, err = finish("--output", str(folder), *words)
    assert (code, err) == (0, "")
    assert told_of(folder) == told_of(once)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["9"]


@pytest.mark.long
@pytest.mark.parametrize("devices", ["cpu", "cpu:2"])
def test_a_signal_while_a_checkpoint_is_written_waits_for_the_last_one(
    tmp_path: Path, devices: str
) -> None:
    once, folder = tmp_path / "once", tmp_path / "run"
    words = (*SMALL_AND_SAME, "--iterations", "6", "--train-devices", devices)
    assert finish("--output", str(once), *words)[0] == 0
    process = start("--output", str(folder), *words)
    wait_for_saving(process, folder, 1)
    psutil.Process(process.pid).send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM and err == ""
    assert not list((folder / "checkpoints").glob(f"*{UNFINISHED}"))
    newest = read_checkpoint(checkpoints_in(folder / "checkpoints")[-1])
    assert newest.state["num_iterations"] == len(lines_of(folder / "metrics.jsonl")) >= 2
    resume(folder)
    assert told_of(folder) == told_of(once)
