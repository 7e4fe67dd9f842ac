"""A run folder of an older EasyRL, and checkpoints that lack newer state, can still be used."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
    seconds_before = content["state"]["totals"]["_earlier_seconds"]
    content["state"]["config"]["reward"]["code_tests_column"] = "answer"  # renamed since
    del content["state"]["accuracy_before"]  # of a still older release
    file.write_text(json.dumps(content))
    settings = (run / "config.yaml").read_text().replace("_column: tests", "_column: answer")
    (run / "config.yaml").write_text(settings)
    code, _, err = finish("--resume", str(run), "--iterations", "4", "--no-live")
    assert code == 0 and "reward.code_tests_column is now data.columns.tests" in err
    assert [line["iteration"] for line in lines_of(run / "metrics.jsonl")] == [0, 1, 2, 3]
    summary = summary_of(run)
    assert summary["groups_trained"] == 8 and summary["reward_errors"] == 0
    assert summary["wall_seconds"] > seconds_before > 0
    assert (run / "checkpoints" / "4").is_dir()
    exported, evaluated = run.parent / "exported", run.parent / "eval"
    easyrl("export", run, exported)
    sizes = ("data.max_prompt_length=32", "eval.max_completion_length=8", "--no-live")
    easyrl("eval", "--model", run / "checkpoints" / "4", "--output", evaluated, *sizes)
    assert (exported / "model.safetensors").is_file()
    assert json.loads((evaluated / "eval.json").read_text())["accuracy"] >= 0.0
