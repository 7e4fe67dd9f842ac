"""`easyrl export --push`, against a stand-in for the hub's client."""

import json
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import yaml
from typer.testing import CliRunner

from easyrl.cli import app
from easyrl.config import load_config
from easyrl.data import hub as hub_module
from easyrl.observe.history import History
from easyrl.observe.model_card import model_card
from easyrl.runtime.run_folder import read_lines


class Hub:
    """The client's calls that create a repository and commit files to it."""

    def __init__(self):
        self.created = []
        self.files = {}
        self.is_logged_in = self.is_reachable = True

    def whoami(self):
        if not self.is_logged_in:
            raise ValueError("401")

    def create_repo(self, name, *, exist_ok):
        self.created.append(name)

    def create_commit(self, name, operations, *, commit_message):
        for operation in operations:
            with operation.as_file() as file:
                self.files[operation.path_in_repo] = file.read()
        return SimpleNamespace(repo_url=f"https://hub.test/{name}")


@pytest.fixture
def hub(monkeypatch):
    hub = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda endpoint: hub)
    monkeypatch.setattr(hub_module, "reach_hub", lambda: hub.is_reachable)
    return hub


def export(*words):
    return CliRunner().invoke(app, ["export", *map(str, words)])


def test_the_model_of_a_run_is_published_with_its_card(finished_run, hub):
    done = export(finished_run.folder, "--push", "me/sums")
    assert done.exit_code == 0 and "https://hub.test/me/sums" in done.stdout
    assert hub.created == ["me/sums"]
    model = finished_run.folder / "model"
    assert {path.name for path in model.iterdir()} | {"README.md"} == set(hub.files)
    assert hub.files["model.safetensors"] == (model / "model.safetensors").read_bytes()
    card = hub.files["README.md"].decode()
    summary = json.loads((finished_run.folder / "summary.json").read_text())
    lines = read_lines(finished_run.folder / "metrics.jsonl")
    for fact in (
        *("`arithmetic`", "easyrl.data.tasks:score", "num_generations: 4", "3 iterations"),
        *(f"{summary[key]:.3f}" for key in ("accuracy_before", "accuracy_after")),
        *(f"{line['reward']:.3f}" for line in (lines[0], lines[-1])),
    ):
        assert fact in card
    assert not (model / "README.md").exists()


@pytest.mark.parametrize(
    ("words", "is_reachable", "expected"),
    [
        ("DIR --push me/sums", True, "OWNER/NAME"),
        ("--push me/sums", True, "hf auth login"),
        ("--push me/sums", False, "cannot be reached"),
    ],
)
def test_an_impossible_export_is_reported(words, is_reachable, expected, finished_run, hub):
    hub.is_reachable, hub.is_logged_in = is_reachable, False
    result = export(finished_run.folder, *words.split())
    assert result.exit_code == 2 and expected in result.stderr and not hub.created


def test_a_card_names_the_hubs_sources_and_hides_local_folders():
    config = load_config(
        words=[
            *("model.path=Qwen/Qwen3-0.6B", "output.dir=/home/ann/run"),
            "data.dataset=[gsm8k, /home/ann/data.jsonl, owner/rows:main:train]",
            "reward.functions=[/home/ann/my_rewards.py:correct]",
        ]
    )
    lines = {n + 1: {"reward": n / 10, "eval/accuracy": None} for n in range(10)}
    card = model_card(History(Path(), config, lines=lines), "me/sums")
    _, metadata, text = card.split("---\n", 2)
    found = yaml.safe_load(metadata)
    assert found["base_model"] == "Qwen/Qwen3-0.6B"
    assert found["datasets"] == ["openai/gsm8k", "owner/rows"]
    assert "/home" not in card and "my_rewards.py:correct" in text and "data.jsonl" in text
    assert "0.200 → 0.700" in text  # of five iterations each
    assert "accuracy" not in text
