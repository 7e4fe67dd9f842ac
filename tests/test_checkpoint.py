"""Checkpoints: restored to the same bits, never incomplete under their name, and exported."""

import contextlib
import json
import shutil
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

from easyrl.config import ConfigError, load_config
from easyrl.events import SaveCheckpoint
from easyrl.model import checkpoint
from easyrl.model.checkpoint import copy_of_training, read_tensors, write_tensors
from easyrl.model.checkpoint_files import (
    checkpoints_in,
    find_checkpoint,
    keep_newest,
    name_best,
    newest_checkpoint,
    publish,
    read_checkpoint,
    unfinished_name,
)
from easyrl.model.export import export_checkpoint, find_model, run_of
from easyrl.model.files import fingerprint, read_loaded_files
from easyrl.model.loading import load_policy
from easyrl.runtime.resolve import resolve
from easyrl.workers.learner import Learner
from easyrl.workers.saver import CheckpointSaver
from mistakes import TINY
from own_training import model, ranks
from runs import wait_until
from tiny_models import tiny_model

__all__ = ["model", "ranks"]  # fixtures


def test_restored_learner_continues_with_the_same_bits(tmp_path):
    spec = resolve(load_config(words=["train.learning_rate=1e-2"])).for_training
    one, other = (Learner(load_policy("tiny"), spec) for _ in range(2))

    def step(learner, seed):
        generator = torch.Generator().manual_seed(seed)
        for parameter in learner.policy.model.parameters():
            parameter.grad.copy_(torch.randn(parameter.shape, generator=generator))
        learner.step(num_completions=1, num_tokens=1)

    step(one, 1)
    step(one, 2)
    state = one.state()
    step(one, 3)  # while the copy is written
    write_tensors(unfinished_name(tmp_path / "2"), state)
    publish(tmp_path / "2", {})
    for file in (tmp_path / "2").iterdir():  # none has pickles
        assert file.suffix in (".json", ".safetensors")
        assert not file.read_bytes().startswith((b"\x80", b"PK"))
    other.restore(tmp_path / "2", 2)
    assert other.policy_version == 2
    assert other.policy.weights_sha256() != one.policy.weights_sha256()
    step(other, 3)
    assert one.policy.weights_sha256() == other.policy.weights_sha256()


def stepped(model, ranks=None):
    """Take one step of AdamW with given gradients; shard the model over `ranks`, a mesh."""
    if ranks is not None:
        for layer in model.model.layers:
            fully_shard(layer, mesh=ranks)
        fully_shard(model, mesh=ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 0.1 * (number + 1))
    optimizer.step()
    return model, optimizer


def save_and_read(folder, ranks):
    model, optimizer = stepped(tiny_model("qwen3"), ranks.mesh)
    path, writers = Path(folder) / "1", ranks.group_for_files
    write_tensors(unfinished_name(path), copy_of_training(model, optimizer), writers)
    if ranks.rank == 0:
        publish(path, {})
    torch.distributed.barrier()
    # Read the checkpoint into a sharded model that differs from it.
    again, fresh = stepped(tiny_model("qwen3", spread=0.1), ranks.mesh)
    fresh.state.clear()
    read_tensors(path, again, fresh, writers)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a.full_tensor(), b.full_tensor())
        for kind in ("exp_avg", "exp_avg_sq"):
            moments = optimizer.state[a][kind], fresh.state[b][kind]
            assert torch.equal(moments[0].full_tensor(), moments[1].full_tensor())
    # The folder of the first of two further checkpoints cannot be created.
    saved, tensors = [], {"model.weight": torch.zeros(8)}
    saver = CheckpointSaver(saved.append, keep=2, ranks=ranks)
    for path in ("file/1", "checkpoints/2"):
        saver.save(SaveCheckpoint(f"{folder}/{path}", int(path[-1]), {}), tensors)
    wait_until(lambda: len(saved) == 2)
    with pytest.MonkeyPatch.context() as patch:  # one rank writes, and its disk fails
        failing = Mock(side_effect=OSError("Input/output error"))
        patch.setattr(checkpoint, "finish_file", failing)
        saver.save(SaveCheckpoint(f"{folder}/checkpoints/3", 3, {}), tensors)
        wait_until(lambda: len(saved) == 3)
    return [bool(event.error) for event in saved]


def test_two_ranks_write_and_one_reads_and_none_waits_for_a_write_that_fails(ranks, tmp_path):
    (tmp_path / "file").touch()
    assert ranks.each_does(partial(save_and_read, str(tmp_path))) == [[True, False, True]] * 2
    assert [path.name for path in checkpoints_in(tmp_path / "checkpoints")] == ["2"]
    names = [file.name for file in sorted((tmp_path / "1").glob("*.safetensors"))]
    assert [name.split("-model")[0] for name in names] == ["shard-00001", "shard-00002"]
    whole = tiny_model("qwen3")
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2, fused=True)
    once, reference = stepped(tiny_model("qwen3"))
    read_tensors(tmp_path / "1", whole, optimizer)
    for a, b in zip(whole.parameters(), once.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-7)
        for kind in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.allclose(optimizer.state[a][kind], reference.state[b][kind])


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    for path in (folder / "9", folder / "10"):
        write_tensors(unfinished_name(path), {"model.weight": torch.ones(8)})
        publish(path, {"policy_version": int(path.name), "note": "ü", "shares": [1e-6, None]})
    return folder


def harm(folder, pattern, change):
    (file,) = folder.glob(pattern)
    file.write_bytes(change(file.read_bytes()))


def without_end(content):
    return content[:-1]


def with_flipped_bit(content):
    return content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]


@pytest.mark.parametrize(("pattern", "change", "reason"), [
    ("state.json", None, "state.json"),
    ("state.json", without_end, "state.json"),
    ("state.json", lambda c: json.dumps(json.loads(c) | {"format": 99}).encode(), "1, got 99"),
    ("*.safetensors", None, "shard-00001"),
    ("*.safetensors", without_end, "shard"),
    ("*.safetensors", with_flipped_bit, "shard"),
])  # fmt: skip
def test_damaged_checkpoint_is_refused_and_the_older_one_taken(
    two, tmp_path, pattern, change, reason
):
    folder = Path(shutil.copytree(two, tmp_path / "checkpoints"))
    if change is None:
        next((folder / "10").glob(pattern)).unlink()
    else:
        harm(folder / "10", pattern, change)
    # The error of one that was named names the run's folder, too.
    expected = rf"(?s)checkpoints/10.*{reason}.*'{tmp_path}'|expected a checkpoint"
    with pytest.raises(ValueError, match=expected):
        find_checkpoint(folder / "10")
    found, damaged = newest_checkpoint(folder)
    assert list(damaged) == [folder / "10"]
    assert found is not None and found.path.name == "9" and found.state["note"] == "ü"


def test_no_flipped_bit_of_the_state_is_accepted(two, tmp_path):
    """The same value in another notation (1e-6, 1E-6) is no damage."""
    path = Path(shutil.copytree(two / "9", tmp_path / "9"))
    whole, state = (path / "state.json").read_bytes(), read_checkpoint(path).state
    for position, byte in enumerate(whole):
        flipped = bytes([byte ^ 1 << position % 8])
        content = flipped.join((whole[:position], whole[position + 1 :]))
        (path / "state.json").write_bytes(content)
        with contextlib.suppress(ValueError):
            assert read_checkpoint(path).state == state
            assert json.loads(content) == json.loads(whole)


def test_newest_and_best_checkpoints_are_kept_and_leftovers_deleted(two, tmp_path):
    def kept(number):
        keep_newest(tmp_path, number)
        return {path.name for path in tmp_path.iterdir()}

    for version in ("2", "10", "9", "100"):
        shutil.copytree(two / "9", tmp_path / version)
    unfinished_name(tmp_path / "101").mkdir()
    (unfinished_name(tmp_path / "101") / "shard.safetensors").write_text("half")
    found, damaged = newest_checkpoint(tmp_path)
    assert found is not None and found.path.name == "100" and not damaged
    assert kept(3) == {"9", "10", "100"}  # as numbers
    name_best(tmp_path, 9)
    assert kept(1) == {"9", "100", "best"}
    assert read_checkpoint(tmp_path / "best").path.resolve() == tmp_path / "9"
    assert [path.name for path in checkpoints_in(tmp_path)] == ["9", "100"]
    name_best(tmp_path, 100)
    name_best(tmp_path, 101)  # it could not be written
    (tmp_path / "mine.unfinished").mkdir()
    assert kept(1) == {"100", "best", "mine.unfinished"}


def make_checkpoint(folder, family, *, change=lambda model: None, **changes):
    """Write a checkpoint that differs in every weight from the run's model. `change`: of the folder
    of that model."""
    model = tiny_model(family, **changes)
    model.save_pretrained(folder / "model")
    for file in TINY.glob("token*"):
        shutil.copy(file, folder / "model")
    change(folder / "model")
    config = load_config(words=[f"model.path={folder / 'model'}"])
    policy = load_policy(config.model.path)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.01)
    path = folder / "run" / "checkpoints" / "7"
    optimizer = torch.optim.AdamW(policy.model.parameters(), fused=True)
    write_tensors(unfinished_name(path), copy_of_training(policy.model, optimizer))
    identity = {"model.path": fingerprint(config.model.path)}
    state = {"config": config.model_dump(mode="json"), "identity": identity, "num_iterations": 3}
    publish(path, state)
    return path, policy


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3", {"tie_word_embeddings": True}),
        ("llama", {"tie_word_embeddings": False}),
        ("qwen3_moe", {}),
    ],
)
def test_exported_model_is_that_of_the_checkpoint(tmp_path, family, changes):
    path, policy = make_checkpoint(tmp_path, family, **changes)
    message = export_checkpoint(path.parent.parent, tmp_path / "exported")
    assert str(path) in message and policy.weights_sha256() in message
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    ids = torch.arange(3, 20)[None]
    trained = AutoModelForCausalLM.from_config(policy.model.config)  # in transformers' own code
    trained.load_state_dict(policy.model.state_dict())
    trained.config._attn_implementation = loaded.config._attn_implementation = "eager"
    with torch.no_grad():
        expected = trained.eval()(input_ids=ids, use_cache=False).logits
        assert torch.equal(loaded.eval()(input_ids=ids, use_cache=False).logits, expected)
    tokenizers = (AutoTokenizer.from_pretrained(each) for each in (tmp_path / "exported", TINY))
    assert len({tuple(tokenizer("12")["input_ids"]) for tokenizer in tokenizers}) == 1
    exported, initial = (
        safe_open(tmp_path / name / "model.safetensors", framework="pt").keys()
        for name in ("exported", "model")
    )
    assert {*exported} == {*initial}
    message = export_checkpoint(path, tmp_path / "narrow", dtype="bfloat16")
    assert "in bfloat16" in message and policy.weights_sha256() in message
    narrow = load_file(tmp_path / "narrow" / "model.safetensors")
    wide = load_file(tmp_path / "exported" / "model.safetensors")
    assert all(torch.equal(narrow[name], wide[name].bfloat16()) for name in wide)
    assert json.loads((tmp_path / "narrow" / "config.json").read_text())["dtype"] == "bfloat16"


def test_export_of_a_model_with_a_few_weights_in_float32_is_as_large_as_the_model(tmp_path):
    def with_a_wide_norm(folder):
        weights = load_file(folder / "model.safetensors")
        weights["model.norm.weight"] = weights["model.norm.weight"].float()
        save_file(weights, folder / "model.safetensors", {"format": "pt"})

    path, policy = make_checkpoint(tmp_path, "qwen3", dtype="bfloat16", change=with_a_wide_norm)
    assert "in bfloat16" in export_checkpoint(path, tmp_path / "out")
    trained = policy.model.state_dict()
    for name, weight in load_file(tmp_path / "out" / "model.safetensors").items():
        is_wide = name == "model.norm.weight"
        assert weight.dtype == (torch.float32 if is_wide else torch.bfloat16)
        assert torch.equal(weight, trained[name].to(weight.dtype))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    # Ranks that share the weights load them as one rank does: none is rounded.
    files = read_loaded_files(str(tmp_path / "model"))
    assert (files.stored_dtype, files.main_dtype) == ("float32", "bfloat16")


def test_fingerprint_covers_tokenizer_and_configuration(tmp_path):
    folder = Path(shutil.copytree(TINY, tmp_path / "model"))
    (folder / "notes.txt").write_text("changes nothing")
    seen = {fingerprint("tiny"), fingerprint(str(folder))}
    assert len(seen) == 1
    for name in ("chat_template.jinja", "tokenizer.json", "config.json"):
        (folder / name).write_text((TINY / "config.json").read_text() + " ")
        seen.add(fingerprint(str(folder)))
    assert len(seen) == 4


def test_impossible_export_is_refused_and_removes_nothing(tmp_path):
    path, _ = make_checkpoint(tmp_path, "qwen3", dtype="bfloat16")
    for name in ("notes", "out.old", "out.unfinished"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").touch()
    before = {*tmp_path.rglob("*")}
    assert "in bfloat16" in export_checkpoint(path, tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors").values()
    assert {weight.dtype for weight in stored} == {torch.bfloat16}
    for name, force in (("out", False), ("notes", False), ("notes", True)):
        with pytest.raises(ConfigError, match=f"/{name}'"):
            export_checkpoint(path, tmp_path / name, force=force)
    (tmp_path / "out" / "config.json").write_text("{}")
    export_checkpoint(path, tmp_path / "out", force=True)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "qwen3"
    newer = Path(shutil.copytree(path, path.with_name("8")))
    harm(newer, "*.safetensors", with_flipped_bit)
    for source, reason in ((newer, "checkpoints/8.*shard"), (tmp_path / "model", "a checkpoint")):
        with pytest.raises(ConfigError, match=reason):
            export_checkpoint(source, tmp_path / "new")
    shutil.rmtree(newer)
    harm(tmp_path / "model", "*.safetensors", with_flipped_bit)
    with pytest.raises(ConfigError, match=r"model\.path"):
        export_checkpoint(path, tmp_path / "new")
    out = tmp_path / "out"
    assert {*tmp_path.rglob("*")} == before | {out, *out.iterdir()}


def test_forced_export_keeps_what_is_no_model(tmp_path, monkeypatch):
    path, _ = make_checkpoint(tmp_path, "qwen3")
    out = tmp_path / "out"
    stale = ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "merges.txt")
    kept = ("LICENSE", "use.py", ".git/HEAD", ".git/objects/1", "evals/config.json")
    export_checkpoint(path, out, card=lambda _: "# first\n")
    for name in (*stale, *kept):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(name)
    (out / "latest").symlink_to("evals")
    (out / "nowhere").symlink_to("missing")
    before = {*tmp_path.rglob("*")}
    export_checkpoint(path, out, force=True, card=lambda _: "# second\n")
    assert {*tmp_path.rglob("*")} == before - {out / name for name in stale}
    assert all((out / name).read_text() == name for name in kept)
    assert (out / "latest").readlink() == Path("evals")
    assert (out / "README.md").read_text().startswith("# second\n")
    AutoModelForCausalLM.from_pretrained(out)
    # A card that somebody has changed is theirs; and some file systems have no hard links.
    monkeypatch.setattr("os.link", Mock(side_effect=OSError))
    mine = (out / "README.md").read_text().replace("second", "mine")
    (out / "README.md").write_text(mine)
    message = export_checkpoint(path, out, force=True, card=lambda _: "# third\n")
    assert "README.md" in message and (out / "README.md").read_text() == mine
    assert all((out / name).read_text() == name for name in kept)
    # What cannot be kept ends the export, and nothing has changed.
    monkeypatch.setattr("shutil.copy2", Mock(side_effect=OSError("no space")))
    before = {*tmp_path.rglob("*")}
    with pytest.raises(ConfigError, match="no space"):
        export_checkpoint(path, out, force=True)
    assert {*tmp_path.rglob("*")} == before


def test_what_a_checkpoint_says_runs_no_code_of_a_model(tmp_path):
    path, _ = make_checkpoint(tmp_path, "qwen3")
    model, state = tmp_path / "model", json.loads((path / "state.json").read_text())["state"]
    code = "from transformers import {0}Config\nopen({1!r}, 'a').close()\nclass C({0}Config): ..."
    (model / "c.py").write_text(code.format("Qwen3", str(tmp_path / "was_run")))
    own_code = {"auto_map": {"AutoConfig": "c.C"}, "model_type": "mine"}
    config = json.loads((model / "config.json").read_text()) | own_code
    (model / "config.json").write_text(json.dumps(config))
    state["config"]["model"]["trust_remote_code"] = True
    state["identity"]["model.path"] = fingerprint(str(model))
    path.rename(unfinished_name(path))
    (unfinished_name(path) / "state.json").unlink()
    publish(path, state)
    (path.parent.parent / "config.yaml").write_text("model: {trust_remote_code: true}")
    for make in (find_model(str(path)).make, lambda out: export_checkpoint(path, out)):
        with pytest.raises(ConfigError, match="--trust-remote-code"):
            make(tmp_path / "out")
    config_of_run = run_of(str(path))
    assert config_of_run is not None and not config_of_run.model.trust_remote_code
    assert not (tmp_path / "was_run").exists()
    with pytest.raises(ConfigError):  # the code makes a configuration, but no model
        export_checkpoint(path, tmp_path / "out", trust=True)
    assert (tmp_path / "was_run").exists()
