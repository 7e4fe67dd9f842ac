"""Checkpoints: the same bits again, never half of one under its name, and what is exported."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing
from safetensors import safe_open
from torch.distributed.fsdp import fully_shard

from easyrl.config import load_config
from easyrl.data.hub import resolve_model
from easyrl.events import CheckpointSaved, SaveCheckpoint
from easyrl.model.checkpoint import copy_of_training, read_tensors, write_tensors
from easyrl.model.checkpoint_files import (
    BrokenCheckpoint,
    checkpoints_in,
    keep_newest,
    name_best,
    newest_checkpoint,
    publish,
    read_checkpoint,
    set_aside,
    unfinished,
)
from easyrl.model.export import export_checkpoint
from easyrl.model.files import fingerprint
from easyrl.model.policy import Policy
from easyrl.model.sharding import TrainRanks
from easyrl.workers.learner import Learner
from easyrl.workers.saver import CheckpointSaver
from tiny_models import tiny_model

TINY = Path(resolve_model("tiny"))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def learner() -> Learner:
    return Learner(Policy.load("tiny"), load_config(words=["train.learning_rate=1e-2"]))


def step(learner: Learner, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in learner.policy.model.parameters():
        parameter.grad.copy_(torch.randn(parameter.shape, generator=generator))
    learner.step(num_completions=1, num_tokens=1)


def save(folder: Path, version: int, learner: Learner, **state: Any) -> Path:
    path = folder / str(version)
    write_tensors(unfinished(path), learner.state())
    publish(path, {"policy_version": version, **state})
    return path


# -- tensors -------------------------------------------------------------------------------------


def test_a_restored_learner_goes_on_in_the_same_bits(tmp_path: Path) -> None:
    one, other = learner(), learner()
    step(one, 1)
    step(one, 2)
    path = save(tmp_path, 2, one)
    drawn = random.random(), np.random.rand(), float(torch.rand(1))
    other.restore(path, 2)
    assert (random.random(), np.random.rand(), float(torch.rand(1))) == drawn
    assert other.policy_version == 2
    for a in (one, other):
        step(a, 3)
    assert one.policy.weights_sha256() == other.policy.weights_sha256()
    assert other.policy.weights_sha256() != learner().policy.weights_sha256()


def test_the_accelerators_generator_is_kept_where_its_weights_are_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with train.offload=[optimizer]. The accelerator is a stand-in that has a generator."""
    drawn = {"cuda": torch.arange(7, dtype=torch.uint8)}
    generator = SimpleNamespace(
        get_rng_state=lambda device: drawn[device.type].clone(),
        set_rng_state=lambda state, device: drawn.update({device.type: state}),
    )
    one = learner()
    step(one, 1)
    one.policy.device = torch.device("cuda")
    with monkeypatch.context() as patched:
        patched.setattr(torch, "get_device_module", lambda device: generator)
        path = save(tmp_path, 1, one)
        drawn["cuda"] = torch.zeros(7, dtype=torch.uint8)
        one.restore(path, 1)
    assert drawn["cuda"].tolist() == list(range(7))
    learner().restore(path, 1)  # where there is none it is left


def test_the_copy_is_of_the_boundary_whatever_is_trained_meanwhile(tmp_path: Path) -> None:
    one, other = learner(), learner()
    step(one, 1)
    state, sha256 = one.state(), one.policy.weights_sha256()
    step(one, 2)
    write_tensors(unfinished(tmp_path / "1"), state)
    publish(tmp_path / "1", {})
    other.restore(tmp_path / "1", 1)
    assert other.policy.weights_sha256() == sha256


def test_frozen_parameters_are_left_out(tmp_path: Path) -> None:
    one = learner()
    model = one.policy.model
    names = [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == names[0])
    optimizer = torch.optim.AdamW([model.get_parameter(names[0])], fused=True)
    assert set(copy_of_training(model, optimizer)) == {f"model.{names[0]}", "random.0"}


def test_a_checkpoint_of_another_model_is_told_by_its_first_difference(tmp_path: Path) -> None:
    path = save(tmp_path, 1, learner())
    other = tiny_model("qwen3")
    optimizer = torch.optim.AdamW(other.parameters(), fused=True)
    before = {name: p.clone() for name, p in other.named_parameters()}
    with pytest.raises(ValueError, match=r"checkpoint of another model: weight"):
        read_tensors(path, other, optimizer)
    assert all(torch.equal(before[name], p) for name, p in other.named_parameters())


def shard_and_save(rank: int, folder: str) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = dist.init_device_mesh("cpu", (2,))
    model = tiny_model("qwen3")
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 0.1 * (number + 1))
    optimizer.step()
    writers = dist.new_group(backend="gloo")
    path = Path(folder) / "1"
    if rank == 0:
        unfinished(path)
    dist.barrier()
    write_tensors(
        path.with_name("1.unfinished"), copy_of_training(model, optimizer, rank=rank), writers
    )
    if rank == 0:
        publish(path, {})
    dist.barrier()
    # Read again, sharded, into what is not trained yet.
    again = tiny_model("qwen3")
    fully_shard(again, mesh=mesh)
    fresh = torch.optim.AdamW(again.parameters(), lr=1e-2, fused=True)
    read_tensors(path, again, fresh, rank=rank, process_group=writers)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a.full_tensor(), b.full_tensor())
        for kind in ("exp_avg", "exp_avg_sq"):
            moments = optimizer.state[a][kind], fresh.state[b][kind]
            assert torch.equal(moments[0].full_tensor(), moments[1].full_tensor())
    dist.destroy_process_group()


def test_two_ranks_write_and_one_reads(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(shard_and_save, (str(tmp_path),), nprocs=2)
    names = [file.name for file in sorted((tmp_path / "1").glob("*.safetensors"))]
    assert [name.split("-model")[0] for name in names] == ["shard-00001", "shard-00002"]
    whole, once = tiny_model("qwen3"), tiny_model("qwen3")
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2, fused=True)
    reference = torch.optim.AdamW(once.parameters(), lr=1e-2, fused=True)
    for number, parameter in enumerate(once.parameters()):
        parameter.grad = torch.full_like(parameter, 0.1 * (number + 1))
    reference.step()
    read_tensors(tmp_path / "1", whole, optimizer)
    for a, b in zip(whole.parameters(), once.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-7)
        for kind in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.allclose(optimizer.state[a][kind], reference.state[b][kind])


def save_twice(rank: int, folder: str) -> None:
    """The first rank cannot make the first checkpoint's folder."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    ranks = TrainRanks.join(
        f"{folder}/store", rank=rank, size=2, device=torch.device("cpu"), timeout_seconds=60
    )
    saved: list[CheckpointSaved] = []
    saver = CheckpointSaver(saved.append, keep=2, ranks=ranks)
    tensors = {f"random.{rank}": torch.zeros(8, dtype=torch.uint8)}
    for path in (f"{folder}/file/1", f"{folder}/checkpoints/2"):
        saver.save(SaveCheckpoint(path, int(path[-1]), {}), tensors)
    saver.save(SaveCheckpoint(f"{folder}/checkpoints/3", 3, {}), tensors)
    while len(saved) < 3:
        time.sleep(0.01)
    assert ["" if event.error == "" else "told" for event in saved] == ["told", "", ""]
    assert all(event.seconds < 30 for event in saved)
    torch.distributed.destroy_process_group()


def test_a_folder_that_one_rank_cannot_make_keeps_no_other_waiting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    torch.multiprocessing.spawn(save_twice, (str(tmp_path),), nprocs=2)
    assert [path.name for path in checkpoints_in(tmp_path / "checkpoints")] == ["2", "3"]


# -- folders -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints 9 and 10."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("checkpoints")
    one = learner()
    step(one, 1)
    for version in (9, 10):
        save(folder, version, one, note="ü")
    return folder


def files_of_ten() -> list[tuple[str, float]]:
    names = ("state.json", "shard-00001-model-00001-of-00001.safetensors")
    return [(name, share) for name in names for share in (0.0, 0.001, 0.5, 0.999, 1.0)]


@pytest.mark.parametrize(("name", "share"), files_of_ten())
def test_a_file_cut_anywhere_shows_and_the_one_before_is_taken(
    two: Path, tmp_path: Path, name: str, share: float
) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(two, folder)
    file = folder / "10" / name
    os.truncate(file, min(int(file.stat().st_size * share), file.stat().st_size - 1))
    found, broken = newest_checkpoint(folder)
    assert found is not None and found.path.name == "9" and found.state["note"] == "ü"
    assert [path.name for path in broken] == ["10"]
    assert name in broken[folder / "10"]


@pytest.mark.parametrize("start", [0, 8, 30])  # the header's length, its beginning, its middle
def test_a_corrupt_header_falls_back_to_the_checkpoint_before(
    two: Path, tmp_path: Path, start: int
) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(two, folder)
    file = next((folder / "10").glob("*.safetensors"))
    with file.open("r+b") as content:  # of the same size
        content.seek(start)
        content.write(b"\xff" * 8)
    found, broken = newest_checkpoint(folder)
    assert found is not None and found.path.name == "9"
    assert file.name in broken[folder / "10"]


def change_format(folder: Path) -> None:
    content = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(content | {"format": 99}))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no state": (lambda folder: (folder / "state.json").unlink(), "has no state.json"),
    "no tensors": (
        lambda folder: next(folder.glob("*.safetensors")).unlink(),
        "safetensors is missing",
    ),
    "a list": (lambda folder: (folder / "state.json").write_text("[1]"), "state"),
    "another format": (change_format, "format 99"),
    "tensors of another": (
        lambda folder: (folder / "copy.safetensors").write_bytes(b""),
        "copy.safetensors",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_no_whole_checkpoint_is_told(two: Path, tmp_path: Path, damage: str) -> None:
    shutil.copytree(two / "9", tmp_path / "9")
    harm, expected = DAMAGE[damage]
    harm(tmp_path / "9")
    with pytest.raises(BrokenCheckpoint, match=expected):
        read_checkpoint(tmp_path / "9")
    assert newest_checkpoint(tmp_path)[0] is None


def test_one_that_its_run_removes_while_it_is_looked_at_is_passed_over(
    two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(two, tmp_path / "c")
    oldest, newest = checkpoints_in(tmp_path / "c")
    read_text = Path.read_text

    def then_remove(file: Path, *words: Any, **more: Any) -> str:
        text = read_text(file, *words, **more)
        if file.parent == newest:
            shutil.rmtree(newest)
        return text

    def is_file(file: Path) -> bool:
        return True  # it was there a moment ago

    monkeypatch.setattr(Path, "read_text", then_remove)
    monkeypatch.setattr(Path, "is_file", is_file)
    found, broken = newest_checkpoint(tmp_path / "c")
    assert found is not None and found.path == oldest
    assert "is missing" in broken[newest]


def test_the_newest_stay_and_what_is_left_over_goes(two: Path, tmp_path: Path) -> None:
    for version in (2, 10, 9, 100):
        shutil.copytree(two / "9", tmp_path / str(version))
    (unfinished(tmp_path / "101") / "shard.safetensors").write_text("half")
    found, broken = newest_checkpoint(tmp_path)
    assert found is not None and found.path.name == "100" and not broken
    keep_newest(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "100"]
    assert [path.name for path in checkpoints_in(tmp_path)] == ["10", "100"]  # as numbers
    aside = set_aside(tmp_path / "100")
    assert aside.is_dir() and [path.name for path in checkpoints_in(tmp_path)] == ["10"]


def test_the_best_stays_beside_the_newest_and_has_a_name(two: Path, tmp_path: Path) -> None:
    for version in (2, 9, 10, 100):
        shutil.copytree(two / "9", tmp_path / str(version))
    name_best(tmp_path, 9)
    keep_newest(tmp_path, 1, best_version=9)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["100", "9", "best"]
    assert read_checkpoint(tmp_path / "best").path.resolve() == tmp_path / "9"
    assert [path.name for path in checkpoints_in(tmp_path)] == ["9", "100"]
    name_best(tmp_path, 100)
    shutil.copytree(two / "9", tmp_path / "102")
    kept = name_best(tmp_path, 101)  # it could not be written
    keep_newest(tmp_path, 1, best_version=kept)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["100", "102", "best"]
    shutil.rmtree(tmp_path / "102")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["100", "best"]
    assert read_checkpoint(tmp_path / "best").path.resolve() == tmp_path / "100"


def test_what_is_broken_takes_no_whole_ones_place(two: Path, tmp_path: Path) -> None:
    for version in (2, 9, 10):
        shutil.copytree(two / "9", tmp_path / str(version))
    (tmp_path / "10" / "state.json").unlink()
    (tmp_path / "99").write_text("a file of somebody's")
    (tmp_path / "9" / "notes.txt").write_text("somebody's too")
    keep_newest(tmp_path, 1)
    assert [path.name for path in checkpoints_in(tmp_path)] == ["9", "10", "99"]
    found, broken = newest_checkpoint(tmp_path)
    assert found is not None and found.path.name == "9"
    assert [path.name for path in broken] == ["99", "10"]


def test_nothing_in_a_checkpoint_is_a_pickle(two: Path) -> None:
    for file in (two / "10").iterdir():
        assert file.suffix in (".json", ".safetensors")
        assert not file.read_bytes().startswith((b"\x80", b"PK"))


# -- export --------------------------------------------------------------------------------------


def make_checkpoint(folder: Path, family: str, **changes: Any) -> tuple[Path, Policy]:
    """A checkpoint of a model that differs in every weight from the one it started from."""
    model = tiny_model(family, **changes)
    model.save_pretrained(folder / "model")
    for file in TINY.glob("token*"):
        shutil.copy(file, folder / "model")
    config = load_config(words=[f"model.path={folder / 'model'}"])
    policy = Policy.load(config.model.path)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.01)
    path = folder / "run" / "checkpoints" / "7"
    optimizer = torch.optim.AdamW(policy.model.parameters(), fused=True)
    write_tensors(unfinished(path), copy_of_training(policy.model, optimizer))
    state = {
        "config": config.model_dump(mode="json"),
        "identity": {"model.path": fingerprint(config.model.path)},
        "num_iterations": 3,
    }
    publish(path, state)
    return path, policy


KINDS = {
    "dense, tied": ("qwen3", {"tie_word_embeddings": True}),
    "dense, untied": ("llama", {"tie_word_embeddings": False}),
    "mixture of experts": ("qwen3_moe", {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_exported_model_is_the_checkpoints(tmp_path: Path, kind: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    family, changes = KINDS[kind]
    path, policy = make_checkpoint(tmp_path, family, **changes)
    told = export_checkpoint(path.parent.parent, tmp_path / "exported")
    assert str(path) in told and policy.weights_sha256() in told
    export_checkpoint(path, tmp_path / "again")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    ids = torch.arange(3, 20)[None]
    trained = AutoModelForCausalLM.from_config(policy.model.config)  # in transformers' own code
    trained.load_state_dict(policy.model.state_dict())
    trained.config._attn_implementation = loaded.config._attn_implementation = "eager"
    with torch.no_grad():
        expected = trained.eval()(input_ids=ids, use_cache=False).logits
        assert torch.equal(loaded.eval()(input_ids=ids, use_cache=False).logits, expected)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert tokenizer("12")["input_ids"] == AutoTokenizer.from_pretrained(TINY)("12")["input_ids"]
    assert (tmp_path / "exported" / "generation_config.json").is_file()
    assert names_in(tmp_path / "exported") == names_in(tmp_path / "model")
    if family == "qwen3_moe":
        assert any("experts.3.gate_proj.weight" in name for name in names_in(tmp_path / "again"))


def names_in(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", framework="pt") as tensors:
        return set(tensors.keys())


def test_another_tokenizer_is_another_model(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    assert fingerprint(str(folder)) == fingerprint("tiny")
    (folder / "notes.txt").write_text("changes nothing")
    (folder / "tokenizer_before").mkdir()
    assert fingerprint(str(folder)) == fingerprint("tiny")
    seen = {fingerprint("tiny")}
    for name in ("chat_template.jinja", "tokenizer.json", "config.json"):
        (folder / name).write_text((TINY / "config.json").read_text() + " ")
        seen.add(fingerprint(str(folder)))
    assert len(seen) == 4


def test_an_impossible_export_is_an_error(tmp_path: Path) -> None:
    path, _ = make_checkpoint(tmp_path, "qwen3")
    (tmp_path / "taken").mkdir()
    with pytest.raises(ValueError, match="taken"):
        export_checkpoint(path, tmp_path / "taken")
    with pytest.raises(ValueError, match="expected a checkpoint"):
        export_checkpoint(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(ValueError, match="expected a checkpoint"):
        export_checkpoint(tmp_path / "model", tmp_path / "out")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\x00\x00\x00\x01")
    with pytest.raises(ValueError, match=r"model\.path"):
        export_checkpoint(path, tmp_path / "out")
    os.truncate(path / "state.json", 10)
    with pytest.raises(ValueError, match=r"state\.json"):
        export_checkpoint(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
