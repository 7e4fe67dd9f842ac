"""The checkpoint that a run resumes from, and refusals before anything starts."""

import hashlib
import json
import os

import pytest

from easyrl.config import ConfigError, load_config
from easyrl.rewards.loading import digest_code
from easyrl.runtime import run
from easyrl.runtime.controller import Controller
from easyrl.runtime.preflight import check_run
from easyrl.runtime.resume import differing, find_resume, run_folder_of
from mistakes import make_run

AUTO = ("runtime.resume=auto",)


class Started(BaseException):
    """A run would have spawned its workers."""


@pytest.fixture(autouse=True)
def _no_run_starts(monkeypatch):
    def start(controller):
        raise Started

    monkeypatch.setattr(Controller, "run", start)


def config_of(folder, *words):
    return load_config(None, {"output.dir": str(folder)}, words)


def finished(folder, *versions):
    """The folder of a run of the default number of iterations, with these checkpoints."""
    make_run(folder, {version: {} for version in versions})
    summary = {"iterations": config_of(folder).train.iterations}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


@pytest.mark.parametrize("versions", [(60,), (), (50,)])
def test_a_finished_run_is_left_whatever_checkpoints_it_keeps(tmp_path, monkeypatch, versions):
    """A run with train.keep_checkpoints=0 has no checkpoint, and must not start over."""
    folder = finished(tmp_path / "run", *versions)
    there = sorted(folder.rglob("*"))
    monkeypatch.setattr(hashlib, "file_digest", None)  # large checkpoints are not verified
    for words, resume in ((AUTO, None), ((), folder)):
        received = []
        assert run.run(config_of(folder, *words), [received.append], resume) == 0
        assert "has finished its 60 iterations" in received[-1].message
        if not versions:
            with pytest.raises(ConfigError, match=r"has no whole checkpoint"):
                find_resume(config_of(folder, *words, "train.iterations=70"), resume)
    assert sorted(folder.rglob("*")) == there


@pytest.mark.parametrize("changed", ["data.dataset", "eval.dataset", "reward.functions"])
def test_changed_rows_and_rewards_are_refused(tmp_path, changed):
    files = {key: tmp_path / f"{key}.jsonl" for key in ("data.dataset", "eval.dataset")}
    for file in files.values():
        file.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    words = [f"{key}={file}" for key, file in files.items()]
    files["reward.functions"] = tmp_path / "r.py"
    files["reward.functions"].write_text("def f(completions, **_):\n    return [0.0] * 5\n")
    words = [*words, f"reward.functions=[{tmp_path}/r.py:f]", "reward.check=false", *AUTO]
    folder = tmp_path / "run"
    config = config_of(folder, *words)
    identity = check_run(config).identity
    make_run(folder, {10: {"identity": identity, "config": config.model_dump(mode="json")}})

    def check():
        found = find_resume(config, None)
        assert found is not None
        os.close(found.lock)
        check_run(config, found)

    check()
    text = files[changed].read_text()
    files[changed].write_text(text.replace("2", "3").replace("5", "6"))
    with pytest.raises(ConfigError, match=rf"^{changed}: .*changed"):
        check()


def test_identity_has_the_users_files_and_the_modules_beside_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    score = "def f(completions, **_):\n    return 3\n"
    files = {
        "rewards.py": ("reward.functions", "# 3\nfrom helper import f\n"),
        "helper.py": ("reward.functions", "import json, pack  # 3\nfrom pack.inner import f\n"),
        "pack/__init__.py": ("reward.functions", "# 3\n"),
        "pack/inner.py": ("reward.functions", score),
        "rooms.py": ("rollout.environment", "class Room:\n    size = 3\n"),
        "loss.py": ("algorithm.loss_type", "def loss(inputs, config):\n    return 3\n"),
    }
    (tmp_path / "pack").mkdir()
    for name, (_, text) in files.items():
        (tmp_path / name).write_text(text)
    words = [f"reward.functions=[{tmp_path}/rewards.py:f]"]
    words += [f"rollout.environment={{a: guess, b: '{tmp_path}/rooms.py:Room'}}"]
    config = load_config(words=[*words, f"algorithm.loss_type={tmp_path}/loss.py:loss"])
    before = digest_code(config)
    for name, (key, text) in files.items():
        (tmp_path / name).write_text(text.replace("3", "4"))
        assert differing(before, digest_code(config)) == [key]
        (tmp_path / name).write_text(text)
    assert digest_code(config) == before


def test_the_learning_rate_may_change_and_a_checkpoint_stands_for_its_run(tmp_path):
    make_run(tmp_path / "run", {10: {}})
    run = tmp_path / "run"
    assert run_folder_of(run / "checkpoints" / "10") == run
    assert run_folder_of(tmp_path / "model") == tmp_path / "model"  # of no run
    (run / "config.yaml").touch()
    assert run_folder_of(run / "model") == run
    (run / "config.yaml").unlink()
    config = config_of(tmp_path / "run", "train.learning_rate=1e-5", "train.iterations=70")
    found = find_resume(config, tmp_path / "run")
    os.close(found.lock)
    assert found.describe(config).splitlines()[1:] == [
        "changed: train.learning_rate 0.0003 -> 1e-05"
    ]
