"""Runs survive the death of any of their processes at any moment (`tests/chaos.py`)."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.long
def test_runs_survive_lost_processes(tmp_path):
    words = ("--trials", "100", "--seed", "1", "--jobs", "2", "--folder", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
