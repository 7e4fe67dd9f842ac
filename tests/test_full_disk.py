"""A disk that is full during a run: one message, nothing corrupted, and the run can be resumed."""

import contextlib
import subprocess

import pytest

from easyrl.model.checkpoint_files import checkpoints_in, read_checkpoint
from easyrl.runtime.run_folder import read_lines
from runs import SMALL, start, wait_for_line

WORDS = ("train.save_every=2", "train.keep_checkpoints=1", *SMALL)


@pytest.fixture
def disk(tmp_path):
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
    assert content.endswith(b"\n") and done == list(range(1, len(done) + 1))
    (saved,) = checkpoints_in(folder / "checkpoints")
    assert read_checkpoint(saved).state["num_iterations"] >= 2
