"""`easyrl grpo --model RUN`: a new run from the weights of another one."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from easyrl.config import load_config
from easyrl.model.export import find_model
from easyrl.runtime.run import start_from
from runs import SMALL, Finished, finish, lines_of, summary_of

TINY = (*SMALL, "train.iterations=2", "data.num_held_out=0")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("trained") / "run"
    words = ("rollout.max_completion_length=80", "runtime.deterministic=true")
    code, out, err = finish("--output", str(folder), *TINY, *words)
    assert code == 0, err
    return Finished(folder, out)


def test_a_run_starts_from_the_weights_of_a_run_or_of_its_checkpoint(
    trained: Finished, tmp_path: Path
) -> None:
    config, _ = start_from(load_config(None, {"model.path": str(trained.folder)}))
    assert Path(config.model.path) == trained.folder / "model"
    assert config.learning_rate == 3e-4  # as in the other run
    final = load_file(trained.folder / "model" / "model.safetensors")
    new = tmp_path / "new"
    source = str(trained.folder / "checkpoints" / "2")
    code, _, err = finish("--model", source, "--output", str(new), *TINY)
    assert code == 0, err
    config = load_config(new / "config.yaml")
    model = new / "inputs" / "run-checkpoints-2"
    assert Path(config.model.path) == model and config.learning_rate == 3e-4
    start = load_file(model / "model.safetensors")
    assert start.keys() == final.keys() and all((start[n] == final[n]).all() for n in final)
    assert len(lines_of(new / "metrics.jsonl")) == summary_of(new)["iterations"] == 2
    moved = new.rename(tmp_path / "moved")
    code, _, err = finish("--resume", str(moved), "--iterations", "3")
    assert code == 0, err
    assert find_model(str(moved / "checkpoints" / "3")).base == str(moved / "inputs" / model.name)
    code, out, _ = finish("--model", str(trained.folder), "--dry-run")
    assert code == 0 and "model" in out


def test_a_resume_with_other_settings_prints_a_command_that_runs(trained: Finished) -> None:
    resume = ("--resume", str(trained.folder))
    trained.folder.with_name("run-2").mkdir()  # the name is taken
    code, _, err = finish(*resume, "train.learning_rate=1e-4", "algorithm.beta=0.1")
    assert code == 2 and "train.learning_rate: expected 0.0003 as in the run, got 0.0001" in err
    assert "algorithm.beta: expected 0.0 as in the run, got 0.1" in err and "null" not in err
    line = next(line for line in err.splitlines() if "easyrl grpo" in line)
    program, name, *words = shlex.split(line[line.index("easyrl grpo") :])
    assert (program, name) == ("easyrl", "grpo")
    code, _, err = finish(*words)
    assert code == 0, err
    new = trained.folder.with_name("run-3")
    config, before = (load_config(each / "config.yaml") for each in (new, trained.folder))
    assert (config.learning_rate, config.algorithm.beta) == (1e-4, 0.1)
    assert config.rollout == before.rollout and config.data == before.data


def test_nothing_is_left_of_a_run_that_cannot_start(trained: Finished, tmp_path: Path) -> None:
    checkpoint, new = trained.folder / "checkpoints" / "2", tmp_path / "new"
    words = ("--model", str(checkpoint), "--output", str(new))
    code, _, err = finish(*words, "--dataset", "no_such_file.jsonl")
    assert code == 2 and "data.dataset" in err and not new.exists()
