"""A disk that is full during a run: one message, nothing corrupted, and the run can be resumed."""

from __future__ import annotations

import contextlib
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from easyrl.model.checkpoint_files import checkpoints_in, read_checkpoint
from easyrl.runtime.run_folder import read_lines
from runs import SMALL, command, start, wait_for_line

WORDS = ("train.save_every=2", "train.keep_checkpoints=1", *SMALL)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 40 MiB: a checkpoint of the built-in model takes 9."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.long
def test_run_on_a_full_disk_ends_with_the_cause_and_a_whole_checkpoint(disk):
    folder, filler = disk / "run", disk / "filler"
    process = start("--output", str(folder), "--iterations", "1000000", *WORDS)
    wait_for_line(process, "checkpoint of iteration 2:")
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "No space left" in err and f"--resume {folder}" in err
    assert "Traceback" not in out + err
    content = (folder / "metrics.jsonl").read_bytes()
    done = [line["iteration"] for line in read_lines(folder / "metrics.jsonl")]
    assert content.endswith(b"\n") and done == list(range(len(done)))
    (saved,) = checkpoints_in(folder / "checkpoints")
    assert read_checkpoint(saved).state["num_iterations"] >= 2


@pytest.mark.long
def test_checkpoints_that_do_not_fit_do_not_end_a_run_and_a_model_does(tmp_path):
    """No file may have more than 2 MiB: neither a checkpoint nor the model can be written."""
    folder, limit = tmp_path / "run", (resource.RLIMIT_FSIZE, (2**21, 2**21))
    done = subprocess.run(
        command("--output", str(folder), "--iterations", "2", "train.save_every=1", *SMALL),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        preexec_fn=lambda: resource.setrlimit(*limit),
    )
    notes = [line for line in done.stdout.splitlines() if "could not be written" in line]
    assert len(notes) == 2 and "File too large" in notes[0] and "iteration 2/2" in done.stdout
    assert list((folder / "checkpoints").iterdir()) == []
    assert done.returncode == 1
    assert f"'{folder}/model'" in done.stderr and "File too large" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert not list(folder.glob("model*")) and not (folder / "summary.json").exists()
