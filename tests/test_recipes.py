"""Every file in `configs/` is a run that would start: on a stand-in for its model, and rows as its
data set has them."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from easyrl.cli import app
from easyrl.config import load_config
from easyrl.data.hub import BUILT_IN_MODELS
from easyrl.runtime.preflight import check_run
from easyrl.runtime.resume import with_absolute_paths
from hub_rows import put_in_place_of_the_hub
from judges import judge_server
from mistakes import TINY, change_json

RECIPES = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))
CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
CPU = {"devices.infer": "cpu", "devices.train": "cpu"}
recipe = pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    """A model with a chat template, and with the positions of those that recipes name."""
    folder = tmp_path_factory.mktemp("model") / "stand-in"
    shutil.copytree(TINY, folder)
    change_json("tokenizer_config.json", chat_template=CHAT)(folder)
    change_json("config.json", max_position_embeddings=32768)(folder)
    return folder


@pytest.fixture(autouse=True)
def _user_files(tmp_path, monkeypatch):
    """Make the user's files that recipes name, and the hub's rows."""
    monkeypatch.chdir(tmp_path)
    put_in_place_of_the_hub(monkeypatch)
    monkeypatch.setattr(
        "easyrl.rewards.sandbox.find_variant", lambda kind: kind
    )  # the machine's matter
    shutil.copytree(TINY, tmp_path / "demo" / "model")  # a teacher
    (tmp_path / "data.jsonl").write_text('{"prompt": "What is 17+58?", "answer": "75"}\n')
    (tmp_path / "my_rewards.py").write_text(
        "def score(completions, answer, **columns):\n    return [0.0 for _ in completions]\n"
    )
    row = {"question": "Write add(a, b).", "tests": ["assert add(1, 2) == 3"]}
    (tmp_path / "problems.jsonl").write_text(json.dumps(row) + "\n")


@recipe
def test_a_recipe_would_start_and_runs_dry(file, stand_in):
    flags = CPU
    if load_config(file).model.path not in BUILT_IN_MODELS:
        flags = {**CPU, "model.path": str(stand_in)}
    with judge_server() as server:
        if file.stem == "judge":
            flags = {**flags, "reward.judge.url": server.url}
        check_dry(file, flags)


def check_dry(file, flags):
    config = load_config(file, flags)
    preflight = check_run(config)
    assert preflight.prompts.prompt(config.train.prompts_per_iteration).content
    assert preflight.num_prompts_skipped == 0
    words = [f"{key}={value}" for key, value in flags.items()]
    result = CliRunner().invoke(app, ["grpo", "--config", str(file), "--dry-run", *words])
    assert result.exit_code == 0, result.output
    assert "a run would not start" not in result.output
    assert "\n# train-0: cpu" in result.output and "# all on cpu" in result.output
    shown = Path("shown.yaml")
    shown.write_text(result.output)
    assert load_config(shown) == with_absolute_paths(config)  # as in config.yaml
