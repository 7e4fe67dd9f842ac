"""A run folder of an older EasyRL, and checkpoints that lack newer state, can still be used."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from easyrl.config import load_config
from easyrl.runtime.resume import find_resume
from runs import finish, lines_of, summary_of

FIXTURE = Path(__file__).parent / "fixtures" / "run_before_0_2"
PLACEHOLDER = "/home/user/model"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A copy of the run folder that finds its model."""
    shutil.copytree(FIXTURE, tmp_path, dirs_exist_ok=True)
    for file in ("config.yaml", "checkpoints/2/state.json"):
        path = tmp_path / "run" / file
        text = path.read_text()
        assert PLACEHOLDER in text
        path.write_text(text.replace(PLACEHOLDER, str(tmp_path / "model")))
    return tmp_path / "run"


def easyrl(*words: object) -> None:
    command = [sys.executable, "-m", "easyrl", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr


def test_an_older_run_resumes_exports_and_evaluates(run: Path) -> None:
    file = run / "checkpoints" / "2" / "state.json"
    content = json.loads(file.read_text())
    for missing in ("accuracy_before", "best", "measured_since"):  # of a still older release
        del content["state"][missing]
    for missing in ("reward_errors", "updates_not_finite", "largest_logp_difference"):
        del content["state"]["totals"][missing]
    file.write_text(json.dumps(content))
    code, _, err = finish("--resume", str(run), "--iterations", "4", "--no-live")
    assert (code, err) == (0, ""), err
    assert [line["iteration"] for line in lines_of(run / "metrics.jsonl")] == [0, 1, 2, 3]
    summary = summary_of(run)
    assert summary["groups_trained"] == 8 and summary["reward_errors"] == 0
    assert (run / "checkpoints" / "4").is_dir()
    exported, evaluated = run.parent / "exported", run.parent / "eval"
    easyrl("export", run, exported)
    sizes = ("data.max_prompt_length=32", "eval.max_completion_length=8", "--no-live")
    easyrl("eval", "--model", run / "checkpoints" / "4", "--output", evaluated, *sizes)
    assert (exported / "model.safetensors").is_file()
    assert json.loads((evaluated / "eval.json").read_text())["accuracy"] >= 0.0


def test_a_run_with_a_merged_key_has_the_same_settings_on_resuming(run: Path) -> None:
    for file, old, new in (
        (run / "config.yaml", "code_tests_column: tests", "code_tests_column: answer"),
        (
            run / "checkpoints/2/state.json",
            '"code_tests_column": "tests"',
            '"code_tests_column": "answer"',
        ),
    ):
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new))
    config = load_config(run / "config.yaml", {"train.iterations": 3, "output.dir": str(run)})
    assert config.data.columns == {"tests": "answer"}
    assert find_resume(config, run) is not None
