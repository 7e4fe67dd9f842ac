"""`easyrl grpo --model RUN`: a new run from the weights of another one."""

import shlex
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

from easyrl.cli import app
from easyrl.config import load_config
from easyrl.model.export import find_model
from easyrl.runtime.resume import start_from
from runs import SMALL, finish, lines_of, summary_of

TINY = (*SMALL, "train.iterations=2", "data.num_held_out=0")


def test_a_run_starts_from_the_weights_and_the_learning_rate_of_a_run(finished_run):
    config, _ = start_from(load_config(None, {"model.path": str(finished_run.folder)}))
    assert Path(config.model.path) == finished_run.folder / "model"
    assert config.learning_rate == 3e-4


def test_nothing_is_left_of_a_run_that_cannot_start(finished_run, tmp_path):
    checkpoint, new = finished_run.folder / "checkpoints" / "3", tmp_path / "new"
    words = ["--model", str(checkpoint), "--output", str(new), "--dataset", "no_such_file.jsonl"]
    result = CliRunner().invoke(app, ["grpo", *words])
    assert result.exit_code == 2 and "data.dataset" in result.stderr and not new.exists()


@pytest.mark.long
def test_a_run_starts_from_the_weights_of_a_checkpoint(finished_run, tmp_path):
    final = load_file(finished_run.folder / "model" / "model.safetensors")
    new, source = tmp_path / "new", str(finished_run.folder / "checkpoints" / "3")
    code, _, err = finish("--model", source, "--output", str(new), *TINY)
    assert code == 0, err
    config = load_config(new / "config.yaml")
    model = new / "inputs" / "run-checkpoints-3"
    assert Path(config.model.path) == model and config.learning_rate == 3e-4
    start = load_file(model / "model.safetensors")
    assert start.keys() == final.keys() and all((start[n] == final[n]).all() for n in final)
    assert len(lines_of(new / "metrics.jsonl")) == summary_of(new)["iterations"] == 2
    moved = new.rename(tmp_path / "moved")
    code, _, err = finish("--resume", str(moved), "--iterations", "3")
    assert code == 0, err
    assert find_model(str(moved / "checkpoints" / "3")).base == str(moved / "inputs" / model.name)


@pytest.mark.long
def test_a_resume_with_other_settings_prints_a_command_that_runs(finished_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished_run.folder, run)
    (tmp_path / "run-2").mkdir()  # the name is taken
    code, _, err = finish("--resume", str(run), "train.learning_rate=1e-4", "algorithm.beta=0.1")
    assert code == 2 and "train.learning_rate: expected 0.0003 as in the run, got 0.0001" in err
    assert "algorithm.beta: expected 0.0 as in the run, got 0.1" in err and "null" not in err
    line = next(line for line in err.splitlines() if "easyrl grpo" in line)
    program, name, *words = shlex.split(line[line.index("easyrl grpo") :])
    assert (program, name) == ("easyrl", "grpo")
    code, _, err = finish(*words)
    assert code == 0, err
    config, before = (load_config(each / "config.yaml") for each in (tmp_path / "run-3", run))
    assert (config.learning_rate, config.algorithm.beta) == (1e-4, 0.1)
    assert config.rollout == before.rollout and config.data == before.data
