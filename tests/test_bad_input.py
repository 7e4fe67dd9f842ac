"""Mistakes at the command line: answered by name, before anything starts, with exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from runs import SMALL, finish


def write(folder: Path) -> None:
    (folder / "good.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (folder / "empty.jsonl").write_text("")
    (folder / "broken.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": \n')
    (folder / "other.jsonl").write_text('{"question": "1+1="}\n')
    (folder / "no_config").mkdir()
    (folder / "no_weights").mkdir()
    (folder / "no_weights" / "config.json").write_text("{}")
    (folder / "r.py").write_text("def score(completions, **columns):\n    return [0.0]\n")
    (folder / "fails.py").write_text("import nothing_of_that_name\n")
    (folder / "taken").mkdir()


MISTAKES = {
    "overlapping device sets": (["--infer-devices", "0-1", "--train-devices", "1-2"], "overlap"),
    "malformed device set": (["--infer-devices", "3-1"], "--infer-devices"),
    "accelerators that are not there": (["--infer-devices", "0-3"], "this machine has none"),
    "unknown key": (["train.learning_rat=1"], "did you mean train.learning_rate"),
    "wrong type": (["train.iterations=many"], "train.iterations"),
    "missing model folder": (["--model", "./nowhere"], "model.path"),
    "model that the hub does not give": (["--model", "nobody/nothing"], "model.path"),
    "model folder without config": (["--model", "{folder}/no_config"], "config.json"),
    "model folder without weights": (["--model", "{folder}/no_weights"], "no weights"),
    "more slots than the ring can have": (["train.prompts_per_iteration=8000"], "ring_slots"),
    "more memory than there is": (
        [
            "rollout.max_completion_length=20000000",
            "train.max_tokens_per_micro_batch=60000000",
            "train.prompts_per_iteration=4000",
        ],
        "this machine and its cgroup have",
    ),
    "a group larger than a slot can be": (
        ["rollout.max_completion_length=50000000", "train.max_tokens_per_micro_batch=60000000"],
        "rollout.max_completion_length",
    ),
    "missing prompt column": (["--dataset", "{folder}/other.jsonl"], "question"),
    "empty data set": (["--dataset", "{folder}/empty.jsonl"], "data.dataset"),
    "broken line": (["--dataset", "{folder}/broken.jsonl"], "broken.jsonl:2"),
    "data without a reward": (["--dataset", "{folder}/good.jsonl"], "--reward"),
    "reward file that fails": (["--reward", "{folder}/fails.py:score"], "nothing_of_that_name"),
    "reward that is not there": (["--reward", "{folder}/r.py:scores"], "score"),
    "ring too small for sync": (["--schedule", "sync", "rollout.ring_slots=2"], "ring_slots"),
    "ring too small for deterministic": (
        ["runtime.deterministic=true", "rollout.ring_slots=2"],
        "ring_slots",
    ),
    "unknown schedule": (["--schedule", "async"], "periodic"),
    "two train devices": (["--train-devices", "cpu:2"], "one train device"),
    "folder that exists": (["--output", "{folder}/taken"], "--output"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_before_anything_starts(tmp_path: Path, mistake: str) -> None:
    write(tmp_path)
    words, expected = MISTAKES[mistake]
    output = [] if "--output" in words else ["--output", str(tmp_path / "run")]
    code, out, err = finish(*output, *(word.format(folder=tmp_path) for word in words), timeout=60)
    assert code == 2, (out, err)
    assert expected in err
    assert err.startswith("easyrl: ")
    assert "easyrl/" not in err  # no frame of ours: at most those of the user's own file
    assert not (tmp_path / "run").exists()


def test_a_prompt_that_is_too_long_is_named(tmp_path: Path) -> None:
    words = (*SMALL, "data.max_prompt_length=4", "--iterations", "1")
    code, _, err = finish("--output", str(tmp_path / "run"), *words)
    assert code == 2
    assert "data.max_prompt_length" in err and "Traceback" not in err
