"""Closed output pipes and closed standard streams do not change a run."""

import os
import shlex
import subprocess

import pytest

from easyrl.runtime.run_folder import read_lines
from runs import SMALL, command


def in_a_shell(line):
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    return subprocess.run(
        ["bash", "-c", line], check=False, capture_output=True, text=True, env=environment
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "line",
    [
        "COMMAND | head -n 1; exit ${PIPESTATUS[0]}",
        "COMMAND 2>&1 | true; exit ${PIPESTATUS[0]}",
        "COMMAND >&- 2>&- <&-",
    ],
)
def test_run_with_closed_output_ends_as_any_other(tmp_path, line):
    folder = tmp_path / "run"
    run = shlex.join(command("--output", str(folder), "--iterations", "2", *SMALL))
    done = in_a_shell(line.replace("COMMAND", run))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (f"run folder {folder}\n" if "head" in line else "")
    assert len(read_lines(folder / "metrics.jsonl")) == 2
    assert (folder / "summary.json").is_file()
