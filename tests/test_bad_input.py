"""Mistakes at the command line: answered by name, before anything starts, with exit code 2."""

import errno
import functools
import importlib.util
import os
import shlex
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from safetensors.numpy import load_file, save_file

from easyrl import devices
from easyrl.bench import peer
from easyrl.config import load_config
from easyrl.data import chat
from easyrl.evaluation import command
from easyrl.model.loading import load_policy
from easyrl.runtime import memory_estimate, run
from easyrl.runtime.preflight import check_run
from mistakes import MISTAKES, NO_OUTPUT, TINY, change_json, write_files
from runs import easyrl, write_rows

PACKAGE = Path(devices.__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    files = tmp_path_factory.mktemp("files")
    write_files(files)
    return files


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch):
    """A run that gets past the checks fails the test; nothing listens at the hub's address."""
    start = Mock(side_effect=AssertionError("a run was started"))
    monkeypatch.setattr(run, "_train", start)
    monkeypatch.setattr(command, "answers_of_workers", start)
    monkeypatch.setattr(peer, "run_easyrl", start)
    monkeypatch.setattr(peer, "require", lambda *extra: None)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")


def assert_names(result, key):
    message = " ".join(result.output.split())  # Typer draws boxes as wide as the terminal
    assert result.exit_code == 2, (result.output, result.exception)
    assert key in message
    assert f"{PACKAGE}/" not in result.output  # no frame of ours: at most those of the user's file
    # No library's output before it; a dry run is a config file with remarks.
    assert result.output.startswith(("easyrl: ", "Usage: ", "# "))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_before_anything_starts(tmp_path, folder, mistake):
    words = shlex.split(mistake.replace("FOLDER", str(folder)))
    has_output = words[0] in ("grpo", "eval") and {"--output", NO_OUTPUT}.isdisjoint(words)
    output = ["--output", str(tmp_path / "parent" / "run")] if has_output else []
    before = sorted(folder.rglob("*"))
    assert_names(easyrl(*words, *output), MISTAKES[mistake])
    assert list(tmp_path.iterdir()) == []
    assert [p for p in sorted(folder.rglob("*")) if "__pycache__" not in p.parts] == before


def checked(*words):
    return check_run(load_config(None, {"reward.functions": ["exact_match"]}, words))


def test_the_first_prompt_is_shown_as_the_model_sees_it(folder):
    template = "data.chat_template={% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    words = f"data.dataset={folder}/chat.jsonl", template, "train.prompts_per_iteration=8"
    about = checked(*words, "train.iterations=3").about_prompts
    shown = "".join(about[3:])
    rows, held_out = about[0].split("; ")
    assert rows == "prompts: 2 rows, 12 epochs in 3 iterations of 8 x 8 completions"
    assert held_out == "0 held-out problems"
    assert about[1] == "learning rate: 0.0003 (linear, 2 iterations of warm-up)"
    assert about[2] == f"first prompt, {len(shown) - 2} tokens:"
    assert shown.startswith("  <user>")
    template = "{{ tools | length }}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    template += "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}"
    template += "</tool_call>{% endfor %}<eos>{% endfor %}"
    tools = f"rollout.tools={folder}/t.py:f", f"data.chat_template={template}"
    result = easyrl("grpo", "--dry-run", "--reward", "exact_match", words[0], *tools)
    assert "does not show the tools f" in result.output


def test_plain_prompts_for_chats_and_sources_without_a_column_are_warnings(folder, tmp_path):
    model = shutil.copytree(TINY, tmp_path / "model")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    words = ["grpo", "--dry-run", "--model", str(model), "--dataset", f"{folder}/good.jsonl"]
    assert "prompts are plain text" in easyrl(*words, "--reward", "exact_match").output
    words += ["--dataset", f"{folder}/other.jsonl", "--reward", f"{folder}/r.py:contains"]
    words += ["data.columns=[{}, {prompt: question, truth: answer}]", "data.chat=false"]
    result = easyrl(*words)
    assert "requires string" in result.output and f"('{folder}/other.jsonl')" in result.output
    assert result.exit_code == 0 and "plain text" not in result.output


def test_a_first_row_without_an_answer_is_no_missing_column(tmp_path):
    file = tmp_path / "rows.jsonl"
    write_rows(file, [{"prompt": "1+1=", "answer": answer} for answer in (None, "2")])
    for name in (file, f"[{file}, arithmetic]"):
        assert checked(f"data.dataset={name}").prompts


def test_a_preset_in_a_mixture_adds_its_held_out_problems_only_where_asked(folder):
    mixed = f"data.dataset=[arithmetic, {folder}/good.jsonl]"
    assert not checked(mixed).held_out
    for more, number in (("train.eval_every=1", 512), ("data.num_held_out=3", 3)):
        assert len(checked(mixed, more).held_out) == number


def test_long_prompts_are_skipped_and_counted(folder):
    words = f"data.dataset={folder}/long.jsonl", "data.max_prompt_length=6"
    preflight = checked(*words, "data.long_prompts=skip")
    assert preflight.num_prompts_skipped == 1
    assert {preflight.prompts.prompt(index).content for index in range(5)} == {"1+1="}
    exact = ("reward.functions=[exact_match]", "data.long_prompts=skip")
    assert easyrl("grpo", "--dry-run", *words, *exact).exit_code == 0


def test_a_chat_template_is_named_where_the_tokenizer_has_none(folder):
    with pytest.raises(ValueError, match=r"chat\.jsonl:1: .*data\.chat_template"):
        checked(f"data.dataset={folder}/chat.jsonl")
    with pytest.raises(ValueError, match=r"good\.jsonl:1: .*data\.chat=false"):
        checked(f"data.dataset={folder}/good.jsonl", "data.chat=true")
    word = shlex.split(chat.NO_CHAT_TEMPLATE[chat.NO_CHAT_TEMPLATE.index("'data.") :])[0]
    assert checked(f"data.dataset={folder}/chat.jsonl", word).prompts.epoch_length == 2


def test_weights_that_are_missing_or_of_another_shape_are_named(tmp_path):
    model = shutil.copytree(TINY, tmp_path / "model")
    change_json("config.json", intermediate_size=380)(model)
    with pytest.raises(ValueError, match=r"model.path: .* \[128, 380\] .* \[128, 384\]"):
        load_policy(str(model))
    change_json("config.json", intermediate_size=384)(model)
    weights = load_file(model / "model.safetensors")
    weights.pop("model.layers.0.mlp.up_proj.weight")
    save_file(weights, model / "model.safetensors")
    with pytest.raises(ValueError, match=r"model.path: .*layers.0.mlp.up_proj"):
        load_policy(str(model))


def test_accelerators_that_a_machine_lacks_are_answered_without_torch(monkeypatch):
    monkeypatch.setattr(devices, "has_driver", lambda kind: False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "torch", None)
    for key, text in (("infer", "0,2"), ("train", "0-3")):
        result = easyrl("grpo", f"--{key}-devices", text)
        assert_names(result, f"devices.{key}")
        assert f"'{text}'" in result.stderr and "--assume" in result.stderr


def test_a_driver_that_is_too_old_is_named(monkeypatch):
    monkeypatch.setattr(devices, "has_driver", lambda kind: kind == "cuda")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.init", Mock(side_effect=RuntimeError("driver is too old")))
    assert_names(easyrl("grpo", "--infer-devices", "0"), "too old")
    found = easyrl("grpo", "--dry-run")
    assert found.exit_code == 0 and "driver is too old" in found.output


def test_a_disk_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    full = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    words = "--output", str(tmp_path / "parent" / "run")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", full)
        assert_names(easyrl("grpo", *words), "No space left on device")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    assert_names(easyrl("grpo", *words), "output.dir")
    assert not (tmp_path / "parent" / "run").exists()


def test_facts_about_gpus_are_warnings_or_errors(monkeypatch, tmp_path):
    def check(*words, **facts):
        for name, fact in facts.items():
            monkeypatch.setattr(devices, name, functools.cache(lambda *_, fact=fact, **__: fact))
        apart = f"output.dir={tmp_path}/run", "devices.infer=0", "devices.train=1"
        return check_run(load_config(words=[*apart, *words])).warnings

    monkeypatch.setattr(memory_estimate, "available_memory_bytes", lambda: 2**40)
    gpus = {"accelerator": ("cuda", 2), "total_memory_bytes": 2**36, "memory_in_use": (0, "")}
    assert not check(**gpus, has_peer_access=True, has_c_compiler=True)
    (warning,) = check(has_peer_access=False)
    assert "0 and 1" in warning and not check("devices.train=0")  # the latter uses one
    with pytest.raises(ValueError, match="C compiler"):
        check("model.dtype=bfloat16", has_c_compiler=False)
    with pytest.raises(ValueError, match=r"fits, by estimate: .*memory_fraction"):
        check("devices.train=0", "rollout.memory_fraction=0.998", total_memory_bytes=2**32)
    with pytest.raises(ValueError, match=r"blender \(pid 77"):
        check(memory_in_use=(2**32 - 2**20, "blender (pid 77, 4095 MiB)"))
