"""Reward models: their scores, the process in which they are, whole runs, and what is refused."""

import json
import shutil
from contextlib import suppress

import psutil
import pytest
import torch
from reward_pools import call, config_of, finished, rewards_of
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig

from easyrl.config import load_config
from easyrl.data.hub import BUILT_IN_MODELS
from easyrl.devices import parse_assumed
from easyrl.model import reward_model
from easyrl.model.files import read_model_files
from easyrl.rewards.pool import RewardPool
from easyrl.rewards.worker import Call
from easyrl.runtime.checks.engine import measure_model
from easyrl.runtime.checks.functions import identify_code
from easyrl.runtime.memory_estimate import estimate_memory, memories_of
from easyrl.runtime.placement import resolve_placement
from easyrl.runtime.resolve import resolve
from easyrl.runtime.resume import with_absolute_paths
from easyrl.types import Prompt
from mistakes import change_json
from runs import SMALL, both_schedules, easyrl, lines_of
from tiny_models import SIZES

TEXTS = ["2", " 33 + 33 = 66", "", "1+1=2, so"]
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"


def make_model(folder, num_labels=1, seed=1):
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(BUILT_IN_MODELS["tiny"])
    tokenizer.chat_template = TEMPLATE
    sizes = SIZES | {"vocab_size": len(tokenizer), "max_position_embeddings": 256}
    sizes |= {"pad_token_id": None, "initializer_range": 0.5, "num_labels": num_labels}
    config = LlamaConfig(**sizes)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    make_model(folder / "one")
    make_model(folder / "two", num_labels=2, seed=2)
    shutil.copytree(folder / "two", folder / "unpadded")
    change_json("tokenizer_config.json", pad_token=None)(folder / "unpadded")
    return folder


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    monkeypatch.setattr(reward_model, "_loaded", {})


def logits(folder, texts, label=0):
    """The scores of plain transformers, one text at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        rows = [tokenizer(each, return_tensors="pt")["input_ids"] for each in texts]
        return [model(row).logits[0, label].item() for row in rows]


@pytest.mark.parametrize("name", ["one", "two", "unpadded"])
def test_scores_are_those_of_transformers_one_by_one(name, models):
    folder, label = models / name, 0 if name == "one" else 1
    rewards = rewards_of(folder, reward__model_label=1)  # which a model with one label ignores
    chat = [{"role": "user", "content": "1+1="}]
    begun = [*chat, {"role": "assistant", "content": "It is "}]  # the completion continues it
    for content, template in (
        ("1+1=", "1+1={}"),
        (chat, "<user>1+1=\n<assistant>{}\n"),
        (begun, "<user>1+1=\n<assistant>It is {}\n"),
    ):
        (scores,) = call(rewards, Prompt(0, content, {}), TEXTS).scores
        expected = logits(folder, [template.format(text) for text in TEXTS], label)
        assert scores == pytest.approx(expected, abs=1e-5)
        assert max(expected) - min(expected) > 0.1
    padding = reward_model._loaded[str(folder)][0].config.pad_token_id
    assert (padding is None) == (name == "unpadded")
    (error,) = call(rewards, Prompt(0, "1" * 300, {}), TEXTS).errors
    assert "at most 256 tokens" in error.text


def test_models_are_in_one_process_beside_the_functions_and_survive_its_death(models, tmp_path):
    own = tmp_path / "own.py"
    own.write_text("import sys\n\ndef torch(**_): return [float('torch' in sys.modules)] * 2\n")
    texts = ["2", "33"]
    one, two = (logits(models / name, [f"1+1={text}" for text in texts]) for name in ("one", "two"))
    expected = [pytest.approx(one, abs=1e-5), [0.0, 0.0], pytest.approx(two, abs=1e-5)]
    specs = models / "one", f"{own}:torch", models / "two"
    settings = {"reward__model_label": 0, "reward__memory_limit_gib": 0.25}
    reports, rewards = [], rewards_of(*specs, reward__num_workers=1, **settings)
    pool = RewardPool(rewards, {}, reports.append)
    try:
        for _ in range(2):
            for key in range(3):
                pool.submit(key, Call("1+1=", texts, [[5], [6, 7]], {}))
            scored = finished(pool, 3)
            assert all(not each.errors and each.scores == expected for each in scored), scored
            maps = {}
            for child in psutil.Process().children(recursive=True):
                with suppress(psutil.NoSuchProcess):  # it has just ended
                    maps[child] = str(child.memory_maps())
            (loaded,) = (child for child, files in maps.items() if "libtorch" in files)
            loaded.kill()
        assert reports
    finally:
        pool.close()


@pytest.mark.long
def test_both_schedules_end_in_the_same_bits(models, tmp_path):
    words = ("--iterations", "2", "--reward", str(models / "one"), "--infer-devices", "cpu:2")
    folder = both_schedules(tmp_path, *SMALL, *words)
    line, *_ = lines_of(folder / "metrics.jsonl")
    assert line["rewards/one/std"] > 0.0 and line["grad_norm"] > 0.0


def test_models_and_functions_are_weighted_in_an_evaluation(models, tmp_path):
    words = (
        *("--model", "tiny", "data.num_held_out=4", "--no-live", "--output", f"{tmp_path}/eval"),
        *("--reward", str(models / "one"), "--reward", str(models / "two"), "--reward"),
        *("exact_match", "reward.weights=[0.5,0.25,1.0]", "reward.model_label=1"),
    )
    result = easyrl("eval", *words)
    assert result.exit_code == 0 and "accuracy" in result.stdout, result.output
    found = json.loads((tmp_path / "eval" / "eval.json").read_text())
    assert found["reward.functions_identity"] and found["reward.model_label"] == 1
    for line in lines_of(tmp_path / "eval" / "samples.jsonl"):
        one, two, exact = (line["rewards"][name] for name in ("one", "two", "exact_match"))
        expected = logits(models / "one", [line["prompt"] + line["completion"]])[0]
        assert one == pytest.approx(expected, abs=1e-5)  # rows of a batch are padded
        assert line["reward"] == pytest.approx(0.5 * one + 0.25 * two + exact, abs=1e-5)


def test_other_weights_are_another_model(models, tmp_path, monkeypatch):
    folder = shutil.copytree(models / "one", tmp_path / "copy")
    spec = resolve(config_of(folder, "math"))
    before = identify_code(spec)
    assert before == identify_code(resolve(config_of(models / "one", "format")))
    assert identify_code(resolve(config_of("math")))["reward.functions"] == ""
    make_model(folder, seed=3)
    assert identify_code(spec) != before
    (tmp_path / "math").mkdir()
    monkeypatch.chdir(tmp_path)
    named = with_absolute_paths(config_of("copy", "math")).reward.functions
    assert named == [str(folder), "math"]  # a built-in reward, whatever folders there are


def test_memory_is_counted_on_a_device_of_its_own_or_with_what_else_is_there(models, monkeypatch):
    gpus, path = parse_assumed("4x80GiB"), str(models / "one")

    def planned(*words):
        flags = {"reward.functions": [path, str(models / "two")]}
        spec = resolve(load_config(None, flags, ["reward.model_label=0", *words]))
        placement = resolve_placement(spec, gpus)
        size = measure_model(spec.model).size
        parts = estimate_memory(spec, placement, size)
        of_models = [part for part in parts if part.process.startswith("reward models")]
        found = {part.need.what: part for part in of_models}
        assert found["reward models"].memory in memories_of(placement)
        return placement, found["reward models"]

    placement, part = planned("reward.model_device=3")
    assert (placement.infer.indices, placement.train.indices) == ((0, 1), (2,))
    assert part.memory.name == "cuda:3 (rewards)"
    sizes = [read_model_files(str(models / name)).num_weights for name in ("one", "two")]
    assert part.need.num_bytes == 2 * 4 * sum(sizes)  # by two rollout workers
    _, part = planned("reward.model_device=2", "devices.infer=0-1", "devices.train=2-3")
    assert part.memory.name == "each of cuda:2-3 (train)"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert placement.reward_environment == {"CUDA_VISIBLE_DEVICES": "7"}
    placement, part = planned()
    assert (part.memory.name, part.num_processes, placement.reward_environment) == ("cpu", 3, {})
