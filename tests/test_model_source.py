"""Runs and evaluations start from models, from checkpoints, and from the weights of other runs."""

import hashlib
import json
import os
import shlex
import shutil
import threading
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from easyrl import events
from easyrl.config import ConfigError, load_config
from easyrl.data.datasets import open_hub
from easyrl.data.hub import loadable_model, model_config_from_hub, reach_hub
from easyrl.evaluation.command import check_evaluation
from easyrl.model.export import find_model
from easyrl.model.files import fingerprint, has_fingerprint, read_model_files
from easyrl.rewards.loading import digest_code
from easyrl.runtime import run
from easyrl.runtime.controller import Controller
from easyrl.runtime.preflight import check_run, make_plan
from easyrl.runtime.resolve import resolve
from easyrl.runtime.resume import config_file_of, differing, find_resume, start_from
from mistakes import TINY, change_json, make_run, write_checkpoint
from runs import SMALL, easyrl, finish, lines_of, succeed, summary_of

ON_CPU = ("devices.infer=cpu", "devices.train=cpu")
EXACT = "reward.functions=[exact_match]"


def test_run_folder_gives_its_final_model_or_else_its_newest_checkpoint(tmp_path):
    run = tmp_path / "run"
    make_run(run, {})
    with pytest.raises(ConfigError, match="expected a checkpoint"):
        find_model(str(run))
    shutil.rmtree(run)
    make_run(run, {10: {}, 20: {}})
    (run / "checkpoints" / "best").symlink_to("10")
    best = find_model(str(run / "checkpoints" / "best"))
    assert best.path == str(run / "checkpoints" / "10"), "another one may be the best later"
    found = find_model(str(run))
    assert (found.kind, found.path) == ("checkpoint", str(run / "checkpoints" / "20"))
    assert found.base == "tiny"
    shutil.copytree(TINY, run / "model")
    assert find_model(str(run)).kind == "checkpoint", "the model of a run that has continued since"
    (run / "summary.json").write_text("{}")
    found = find_model(str(run))
    assert (found.kind, found.path) == ("model", str(run / "model"))
    assert found.identity() == find_model("tiny").identity()
    assert found.make(tmp_path / "made") == found.path and not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("changes", "file"),
    [
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, ""),
        ({"quantization": {"group_size": 64, "bits": 4}}, ""),  # MLX
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, ""),
        ({}, "quantize_config.json"),  # AutoGPTQ, when config.json had no key for it
        ({}, "hf_quant_config.json"),  # NVIDIA's Model Optimizer
    ],
)
def test_quantized_model_is_refused_before_anything_is_loaded(tmp_path, changes, file):
    folder = shutil.copytree(TINY, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    (folder / (file or "notes")).write_text("{}")
    for path in (folder, adapter(tmp_path / "adapter", str(folder))):
        with pytest.raises(ConfigError, match=r"model\.path(.|\n)*quantized"):
            find_model(str(path))


def adapter(folder, base, **changes):
    """Write a peft adapter for the built-in model's query projections."""
    folder.mkdir()
    content = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base}
    content |= {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj"]} | changes
    (folder / "adapter_config.json").write_text(json.dumps(content))
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, weight in load_file(TINY / "model.safetensors").items():
        if "q_proj" in name:
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            rows, columns = weight.shape
            weights[f"{prefix}.lora_A.weight"] = torch.randn(2, columns, generator=generator)
            weights[f"{prefix}.lora_B.weight"] = torch.randn(rows, 2, generator=generator)
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({}, 3),
        ({"use_rslora": True}, 6 / 2**0.5),
        ({"alpha_pattern": {"q_proj": 8}}, 4),
    ],
)
def test_adapter_is_merged_into_its_base_model(tmp_path, changes, factor):
    source = find_model(str(adapter(tmp_path / "adapter", str(TINY), **changes)))
    made = Path(source.make(tmp_path / "made"))
    before, merged = (load_file(folder / "model.safetensors") for folder in (TINY, made))
    parts = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for name, weight in [*before.items()]:
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        if "q_proj" in name:
            a, b = (parts[f"{prefix}.lora_{part}.weight"] for part in "AB")
            before[name] = weight + factor * b @ a
        torch.testing.assert_close(merged.pop(name), before[name], rtol=1e-5, atol=1e-5)
    assert not merged
    assert find_model(str(made)).kind == "model", "tokenizer and configuration are there"
    assert source.identity() != find_model("tiny").identity()
    other = find_model(str(adapter(tmp_path / "again", None, **changes)), base="tiny")
    assert other.identity() == source.identity()


def test_adapter_that_does_not_fit_its_base_is_refused(tmp_path):
    """peft would leave the layers whose weights it does not find as they were."""
    for old, new in (("model.layers", "model.text.layers"), ("q_proj", "v_proj")):
        folder = adapter(tmp_path / old, "tiny")
        file = folder / "adapter_model.safetensors"
        save_file({name.replace(old, new): part for name, part in load_file(file).items()}, file)
        with pytest.raises(ConfigError, match=r"--base.*missing adapter keys"):
            find_model(str(folder)).make(tmp_path / "made")
    folder = adapter(tmp_path / "more", "tiny")
    file = folder / "adapter_model.safetensors"
    parts = load_file(file)
    save_file(
        parts | {n.replace("layers.0", "layers.40"): p.clone() for n, p in parts.items()}, file
    )
    with pytest.raises(ConfigError, match=r"--base.*no layer for .*layers\.40"):
        find_model(str(folder)).make(tmp_path / "made")
    for changes in ({"target_modules": ["nope"]}, {"r": 3}):
        folder = adapter(tmp_path / str(*changes), "tiny", **changes)
        with pytest.raises(ConfigError, match="--base"):
            find_model(str(folder)).make(tmp_path / "made")


def test_adapter_brings_its_own_tokenizer_and_embeddings(tmp_path):
    folder = adapter(tmp_path / "own", "tiny")
    before = find_model(str(folder)).identity()
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.chat_template = "{% for m in messages %}<ask>{{ m['content'] }}{% endfor %}"
    tokenizer.add_tokens(["<ask>"])
    tokenizer.save_pretrained(folder)
    source = find_model(str(folder))
    assert source.identity() != before
    before = source.identity()
    change_json("adapter_config.json", lora_alpha=9)(folder)
    assert source.identity() != before
    # Checks of prompts before the model is made: base `tiny` has no template and no such token.
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}')
    words = (f"model.path={folder}", f"data.dataset={tmp_path}/rows.jsonl", "data.chat=true")
    config = load_config(words=[*words, *ON_CPU, "data.max_prompt_length=5", EXACT])
    assert len(check_evaluation(config).problems) == 1
    assert any("<ask>1+1=" in line for line in make_plan(config).text.splitlines())
    config, started = start_from(config)
    assert started == source and check_run(config, None, source).num_prompts_skipped == 0
    with pytest.raises(ConfigError, match=r"--base.*100 tokens"):
        source.make(tmp_path / "made")  # its embedding is missing
    file, embeddings = folder / "adapter_model.safetensors", torch.randn(104, 128)
    save_file(load_file(file) | {"base_model.model.model.embed_tokens.weight": embeddings}, file)
    made = source.make(tmp_path / "made")
    weights = AutoModelForCausalLM.from_pretrained(made).state_dict()
    assert torch.equal(weights["model.embed_tokens.weight"], embeddings)
    chat = [{"role": "user", "content": "1"}]
    ids = AutoTokenizer.from_pretrained(made).apply_chat_template(chat, return_dict=False)
    assert ids == [99, *tokenizer("1")["input_ids"]]


def test_adapter_without_its_base_or_weights_is_refused(tmp_path):
    alone = str(adapter(tmp_path / "alone", None))
    with pytest.raises(ConfigError, match=r"base_model_name_or_path.*model\.lora\.rank=2.*--base"):
        find_model(alone)
    with pytest.raises(ConfigError, match=rf"'{tmp_path}', on which .*--base(.|\n)*config\.json"):
        find_model(alone, str(tmp_path))
    empty = shutil.copytree(alone, tmp_path / "empty")
    (empty / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no adapter_model\.safetensors"):
        find_model(str(empty), "tiny")
    with pytest.raises(ConfigError, match="--base"):
        find_model("tiny", base="tiny")


def test_error_of_the_hub_is_reported(monkeypatch):
    reason = "You must be approved by its owner."

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(403 if "/resolve/" in self.path else 200)
            self.send_header("X-Error-Code", "GatedRepo")
            self.send_header("X-Error-Message", reason)
            self.end_headers()

        do_GET = do_HEAD
        log_message = Mock()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        with pytest.raises(ConfigError, match=rf"model\.path(.|\n)*{reason}"):
            model_config_from_hub("owner/name")
        server.shutdown()


def test_a_silent_hub_leaves_its_clients_as_they_are(tmp_path, monkeypatch):
    import datasets

    cache = tmp_path / "models--owner--name"
    shutil.copytree(TINY, cache / "snapshots" / "abc")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("abc")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    before = dict(os.environ)
    assert read_model_files("owner/name").config["vocab_size"] == 99
    assert loadable_model("owner/name") == str(cache / "snapshots" / "abc")
    assert fingerprint("owner/name") == "abc", "the same as that of a hub that answers"
    for missing, open_it in (("owner/none", read_model_files), ("owner/data", open_hub)):
        with pytest.raises(ConfigError, match=missing):
            open_it(missing)
    assert dict(os.environ) == before, "what child processes see"
    assert not huggingface_hub.constants.HF_HUB_OFFLINE and not datasets.config.HF_HUB_OFFLINE
    assert not datasets.are_progress_bars_disabled()
    monkeypatch.setattr(huggingface_hub, "get_session", Mock())
    assert reach_hub() and loadable_model("owner/name") == "owner/name"


def test_a_commit_on_the_hub_that_changes_other_files_leaves_the_model_as_it_was(
    tmp_path, monkeypatch
):
    cache = tmp_path / "models--owner--name"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    shutil.copytree(TINY, cache / "snapshots" / "abc")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("abc")
    words = ["model.path=owner/name", *ON_CPU, "data.num_held_out=0"]
    config = config_of(tmp_path / "run", *words, "runtime.resume=auto")
    identity = check_run(config).identity
    make_run(
        tmp_path / "run", {10: {"identity": identity, "config": config.model_dump(mode="json")}}
    )
    new = shutil.copytree(TINY, cache / "snapshots" / "def")
    (cache / "refs" / "main").write_text("def")
    (new / "README.md").write_text("with a typo corrected")
    found = find_resume(config, None)
    os.close(found.lock)
    assert check_run(config, found).identity["model.path"] == "def"
    assert has_fingerprint("owner/name", "abc") and not has_fingerprint("owner/name", "unknown")
    change_json("config.json", rope_theta=9.0)(new)
    assert not has_fingerprint("owner/name", "abc")
    with pytest.raises(ConfigError, match=r"^model\.path: .*changed"):
        check_run(config, found)


AUTO = ("runtime.resume=auto",)


@pytest.fixture(autouse=True)
def _no_run_starts(monkeypatch):
    monkeypatch.setattr(Controller, "run", Mock(side_effect=AssertionError))


def config_of(folder, *words):
    return load_config(None, {"output.dir": str(folder)}, words)


@pytest.mark.parametrize("versions", [(60,), (), (50,)])
def test_a_finished_run_is_left_whatever_checkpoints_it_keeps(tmp_path, monkeypatch, versions):
    """A run with train.keep_checkpoints=0 has no checkpoint, and must not start over."""
    folder = tmp_path / "run"
    make_run(folder, {version: {} for version in versions})
    (folder / "summary.json").write_text('{"iterations": 60}')
    there = sorted(folder.rglob("*"))
    monkeypatch.setattr(hashlib, "file_digest", None)  # large checkpoints are not verified
    for words, resume in ((AUTO, None), ((), folder)):
        received = []
        end = run.run(config_of(folder, *words), [received.append], resume)
        assert end == received[-1] and end.exit_code == 0
        assert "has finished its 60 iterations" in received[-1].message
        if not versions:
            with pytest.raises(ConfigError, match=r"has no whole checkpoint"):
                find_resume(config_of(folder, *words, "train.iterations=70"), resume)
    assert sorted(folder.rglob("*")) == there


def test_changed_rows_and_rewards_are_refused(tmp_path):
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
    for key, file in files.items():
        text = file.read_text()
        file.write_text(text.replace("2", "3").replace("5", "6"))
        with pytest.raises(ConfigError, match=rf"^{key}: .*changed"):
            check()
        file.write_text(text)


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
    code, judge = resolve(config).code, config.reward.judge
    before = digest_code(code, judge)
    for name, (key, text) in files.items():
        (tmp_path / name).write_text(text.replace("3", "4"))
        assert differing(before, digest_code(code, judge)) == [key]
        (tmp_path / name).write_text(text)
    assert digest_code(code, judge) == before


def test_the_learning_rate_may_change_and_a_checkpoint_stands_for_its_run(tmp_path, monkeypatch):
    run = tmp_path / "run"
    make_run(run, {10: {}})
    (file := run / "config.yaml").touch()
    assert config_file_of(run / "checkpoints" / "10") == file == config_file_of(run)
    monkeypatch.chdir(run / "checkpoints")
    assert config_file_of("10") == file
    words = ["train.learning_rate=1e-5", "reward.num_workers=3", "train.iterations=70"]
    config = config_of(run, *words)
    found = find_resume(config, run)
    os.close(found.lock)
    assert found.describe(config).splitlines()[1:] == [
        "changed: reward.num_workers 2 -> 3",
        "changed: train.learning_rate 0.0003 -> 1e-05",
    ]


def test_a_run_starts_from_the_weights_and_the_learning_rate_of_a_run(finished_run):
    config, _ = start_from(load_config(None, {"model.path": str(finished_run.folder)}))
    assert Path(config.model.path) == finished_run.folder / "model"
    assert config.learning_rate == 3e-4


@pytest.mark.parametrize("name", ["run", "checkpoint", "adapter", "named adapter"])
def test_a_restart_continues_what_its_command_started(name, finished_run, tmp_path, monkeypatch):
    """The first attempt may end before its first checkpoint, or after it."""
    path = {"run": finished_run.folder, "checkpoint": finished_run.folder / "checkpoints" / "3"}
    words = [f"model.path={path.get(name, tmp_path / 'adapter')}"]
    adapter(tmp_path / "adapter", "tiny")
    if name == "adapter":
        words.append("model.lora.rank=2")
    elif name == "named adapter":
        words = ["model.path=tiny", f"model.lora.adapter={tmp_path}/adapter", "model.lora.rank=2"]
    folder = tmp_path / "run"
    config = config_of(folder, *words, *ON_CPU, *AUTO, "data.num_held_out=0")
    states = []

    def train(controller):
        states.append(controller.state)
        return events.RunEnded(1, "stopped")

    monkeypatch.setattr(run, "_train", train)
    for is_saved in (False, False, True, True):
        if is_saved:
            number = len(states)
            saved = asdict(states[-1]) | {"num_iterations": number, "policy_version": number}
            write_checkpoint(folder, number, saved)
            shutil.rmtree(tmp_path / "adapter", ignore_errors=True)  # the run has a copy
        assert make_plan(config).would_start
        run.run(config)
    first = states[0]
    started = first.config, first.identity, first.given
    for state in states[1:]:
        assert (state.config, state.identity, state.given) == started
    assert [state.num_iterations for state in states] == [0, 0, 2, 3]
    assert first.config["train"]["learning_rate"] == (3e-4 if name in path else None)


def test_a_checkpoint_brings_its_runs_chat_template_and_end_tokens_are_part_of_a_model(tmp_path):
    make_run(tmp_path / "run", {10: {}}, "data.chat_template={{ messages }}")
    words = [f"model.path={tmp_path}/run/checkpoints/10"]
    for given, expected in ((), "messages"), (("data.chat_template={{ tools }}",), "tools"):
        config, _ = start_from(load_config(words=[*words, *given]))
        assert config.data.chat_template == f"{{{{ {expected} }}}}"
    model = shutil.copytree(TINY, tmp_path / "model")
    before = find_model(str(model)).identity()
    assert before == find_model("tiny").identity()
    change_json("generation_config.json", eos_token_id=[1, 5])(model)
    assert find_model(str(model)).identity() != before
    assert fingerprint(str(model)) == fingerprint("tiny"), "runs that exist can be resumed"


def test_nothing_is_left_of_a_run_that_cannot_start(finished_run, tmp_path):
    checkpoint, new = finished_run.folder / "checkpoints" / "3", tmp_path / "new"
    words = ["--model", str(checkpoint), "--output", str(new), "--dataset", "no_such_file.jsonl"]
    result = easyrl("grpo", *words)
    assert result.exit_code == 2 and "data.dataset" in result.stderr and not new.exists()


@pytest.mark.long
def test_a_run_starts_from_the_weights_of_a_checkpoint(finished_run, tmp_path):
    final = load_file(finished_run.folder / "model" / "model.safetensors")
    new, source = tmp_path / "new", str(finished_run.folder / "checkpoints" / "3")
    words = (*SMALL, "train.iterations=2", "data.num_held_out=0")
    succeed("--model", source, "--output", str(new), *words)
    config = load_config(new / "config.yaml")
    model = new / "inputs" / "run-checkpoints-3"
    assert Path(config.model.path) == model and config.learning_rate == 3e-4
    start = load_file(model / "model.safetensors")
    assert start.keys() == final.keys() and all((start[n] == final[n]).all() for n in final)
    assert len(lines_of(new / "metrics.jsonl")) == summary_of(new)["iterations"] == 2
    moved = new.rename(tmp_path / "moved")
    succeed("--resume", str(moved), "--iterations", "3")
    assert find_model(str(moved / "checkpoints" / "3")).base == str(moved / "inputs" / model.name)


@pytest.mark.long
def test_a_resume_with_other_settings_prints_a_command_that_runs(finished_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished_run.folder, run)
    (tmp_path / "run-2").mkdir()  # the name is taken
    code, _, err = finish("--resume", str(run), "train.learning_rate=1e-4", "algorithm.beta=0.1")
    assert code == 2 and "algorithm.beta: expected 0.0 as in the run, got 0.1" in err
    assert "null" not in err
    line = next(line for line in err.splitlines() if "easyrl grpo" in line)
    program, name, *words = shlex.split(line[line.index("easyrl grpo") :])
    assert (program, name) == ("easyrl", "grpo")
    succeed(*words)
    config, before = (load_config(each / "config.yaml") for each in (tmp_path / "run-3", run))
    assert (config.learning_rate, config.algorithm.beta) == (1e-4, 0.1)
    assert config.rollout == before.rollout and config.data == before.data
