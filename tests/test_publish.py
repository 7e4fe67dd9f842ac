"""`easyrl export`: the model card."""

import shutil
from pathlib import Path

import yaml

from easyrl.config import load_config
from easyrl.observe.history import History
from easyrl.observe.model_card import model_card
from easyrl.runtime.resolve import resolve
from easyrl.runtime.run_folder import read_lines
from runs import easyrl, summary_of


def test_an_exported_model_has_a_card(finished_run, tmp_path):
    source, folder = finished_run.folder, tmp_path / "sums"
    done = easyrl("export", source, folder)
    assert done.exit_code == 0, done.output
    names = {path.name for path in (source / "model").iterdir()}
    assert names | {"README.md"} == {path.name for path in folder.iterdir()}
    card = (folder / "README.md").read_text()
    summary, lines = summary_of(source), read_lines(source / "metrics.jsonl")
    for fact in (
        *("# sums", "data: arithmetic", "easyrl.data.tasks:score"),
        *("3 iterations", *(f"{summary[f'accuracy_{when}']:.3f}" for when in ("before", "after"))),
        *(f"{line['reward']:.3f}" for line in (lines[0], lines[-1])),
    ):
        assert fact in card
    copy = shutil.copytree(next((source / "checkpoints").glob("[0-9]*")), tmp_path / "copy")
    done = easyrl("export", copy, tmp_path / "alone")
    assert done.exit_code == 0, done.output  # without its run there is nothing to tell
    assert {path.name for path in (tmp_path / "alone").iterdir()} == names


def test_a_card_names_the_hubs_sources_and_hides_local_folders():
    config = load_config(
        words=[
            *("model.path=Qwen/Qwen3-0.6B", "output.dir=/home/ann/run"),
            "data.dataset=[gsm8k, /home/ann/data.jsonl, owner/rows:main:train]",
            "reward.functions=[/home/ann/my_rewards.py:correct]",
        ]
    )
    lines = {n + 1: {"reward": n / 10, "eval/accuracy": None} for n in range(10)}
    card = model_card(History(Path(), resolve(config), {}, lines=lines), "sums")
    _, metadata, text = card.split("---\n", 2)
    found = yaml.safe_load(metadata)
    assert found["base_model"] == "Qwen/Qwen3-0.6B"
    assert found["datasets"] == ["openai/gsm8k", "owner/rows"]
    assert "/home" not in card and "my_rewards.py:correct" in text and "data.jsonl" in text
    assert "0.200 → 0.700" in text  # of five iterations each
    assert "accuracy" not in text
