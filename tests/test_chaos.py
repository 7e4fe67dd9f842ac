"""Runs survive the death of any of their processes at any moment (`tests/chaos.py`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("num_trials", "seed", "jobs"), [(2, 1912, 1), pytest.param(100, 1, 2, marks=pytest.mark.long)]
)
def test_runs_survive_lost_processes(tmp_path: Path, num_trials: int, seed: int, jobs: int) -> None:
    words = ("--trials", num_trials, "--seed", seed, "--jobs", jobs, "--folder", tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
