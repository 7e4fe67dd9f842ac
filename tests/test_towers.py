"""Models with a text model inside: it is trained, and the rest of the folder stays as it was."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
)

from easyrl.config import ConfigError, load_config
from easyrl.config.model import LoraConfig
from easyrl.config.spec import ModelSpec
from easyrl.data.hub import resolve_model
from easyrl.model.export import find_model
from easyrl.model.files import fingerprint, load_model_config, read_loaded_files
from easyrl.model.loading import load_policy
from easyrl.model.saving import save_policy
from easyrl.model.towers import find_kept_parts, find_parts
from easyrl.model.weight_files import read_headers
from easyrl.runtime.checks.devices import written_by_run
from easyrl.runtime.checks.engine import describe_weights, measure_model
from easyrl.runtime.resolve import resolve
from mistakes import change_json
from multimodal_models import FAMILIES, multimodal_folder, same_bits, stored
from runs import SMALL, easyrl, succeed, summary_of
from tiny_models import packed_logits

TOKENS = torch.arange(3, 20)
SMALL_FILES = ("preprocessor_config.json", "video_preprocessor_config.json")


def tokenizer():
    return AutoTokenizer.from_pretrained(resolve_model("tiny"))


def save_trained(source, target, **options):
    """Load the folder `source`, change what is trained, and write it to `target`."""
    policy = load_policy(str(source))
    kept = find_kept_parts(str(source), policy.model)
    with torch.no_grad():
        for weight in policy.trained_parameters():
            weight.add_(0.01)
    save_policy(policy, target, tokenizer(), kept=kept, **options)
    return policy


@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_model_is_trained_and_everything_else_stays_as_it_was(tmp_path, family):
    source = multimodal_folder(tmp_path / "source", family)
    before = stored(source)
    policy = save_trained(source, tmp_path / "model")
    after = stored(tmp_path / "model")
    assert after.keys() == before.keys()
    kept = find_parts(load_model_config(str(source)), before).kept
    assert kept and all(before[name].dtype == torch.bfloat16 for name in kept)
    for name, weight in before.items():
        assert same_bits(weight, after[name]) == (name in kept), name
        assert name in kept or torch.equal(weight + 0.01, after[name])
    for name in (*SMALL_FILES, "config.json"):
        assert json.loads((tmp_path / "model" / name).read_text()) == json.loads(
            (source / name).read_text()
        )
    # Other loaders build the whole class.
    names = [AutoModelForImageTextToText]
    if family in ("qwen3_5", "llama4"):
        names.append(AutoModelForCausalLM)
    with torch.no_grad():
        expected = packed_logits(policy, [TOKENS, TOKENS])[: len(TOKENS)]
    for auto in names:
        model, info = auto.from_pretrained(
            tmp_path / "model", dtype=torch.float32, output_loading_info=True
        )
        assert not info["missing_keys"] and not info["mismatched_keys"]
        if auto is AutoModelForImageTextToText:
            assert not info["unexpected_keys"]
            assert (
                type(model).__name__
                in json.loads((source / "config.json").read_text())["architectures"]
            )
        if family != "llama4" or auto is AutoModelForCausalLM:  # a fault of transformers 5.24
            with torch.no_grad():
                got = model.eval()(input_ids=TOKENS[None], use_cache=False).logits[0]
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_what_is_loaded_is_counted_and_printed(tmp_path):
    source = multimodal_folder(tmp_path / "source", "qwen3_5")
    spec = ModelSpec.of(load_config(words=[f"model.path={source}"]))
    measured = measure_model(spec)
    policy = load_policy(str(source))
    of_tower = [w for w in stored(source).values() if w.dtype == torch.bfloat16]
    num_kept = sum(weight.numel() for weight in of_tower)
    num_loaded = sum(weight.numel() for weight in policy.model.parameters())
    assert measured.num_weights == measured.size.num_weights == num_loaded
    assert measured.files.kept == (num_kept, 2 * num_kept, ("model.visual",))
    assert measured.files.stored_dtype == "float32", "that of the text model"
    line = describe_weights(measured, spec)
    assert f"{num_loaded:,} weights" in line and f"{num_kept:,}" in line
    assert measured.size.vocabulary_size == 128 and measured.size.num_layers == 2
    of_run = resolve(load_config(words=["train.keep_checkpoints=0"]))
    written = written_by_run(of_run, measured, None, is_resumed=False)
    assert written.num_bytes == 4 * num_loaded + 2 * num_kept
    before = fingerprint(str(source))
    file = source / "model.safetensors"
    weights = load_file(file)
    save_file({n: w + 1 if w.dtype == torch.bfloat16 else w for n, w in weights.items()}, file)
    assert fingerprint(str(source)) != before, "the tower is part of the model's identity"


def test_sharded_files_and_old_names_are_kept_as_they_are(tmp_path):
    """Folders from before transformers 4.52 have other names than the class."""
    source = multimodal_folder(tmp_path / "source", "qwen3_5")
    weights = load_file(source / "model.safetensors")
    weights["mtp.layers.0.weight"] = torch.randn(3)  # a draft head
    names = sorted(weights)
    shards = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    (source / "model.safetensors").unlink()
    for shard, part in shards.items():
        save_file({name: weights[name] for name in part}, source / shard)
    index = {name: shard for shard, part in shards.items() for name in part}
    (source / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    save_trained(source, tmp_path / "model")
    after = stored(tmp_path / "model")
    assert after.keys() == weights.keys()
    assert same_bits(after["mtp.layers.0.weight"], weights["mtp.layers.0.weight"])
    found = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert found["weight_map"].keys() == weights.keys()
    assert read_headers(tmp_path / "model", is_whole=True).keys() == weights.keys()


def test_the_source_may_be_removed_but_not_changed_during_a_run(tmp_path):
    source = multimodal_folder(tmp_path / "source", "qwen3_5")
    before = stored(source)
    policy = load_policy(str(source))
    parts = [find_kept_parts(str(source), policy.model) for _ in range(2)]
    shutil.rmtree(source)
    save_policy(policy, tmp_path / "model", tokenizer(), kept=parts[0])
    assert all(
        same_bits(before[name], weight) for name, weight in stored(tmp_path / "model").items()
    )
    changed = multimodal_folder(tmp_path / "changed", "qwen3_5")
    kept = find_kept_parts(str(changed), policy.model)
    file = changed / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(OSError, match=str(file)):
        save_policy(policy, tmp_path / "again", tokenizer(), kept=kept)


def test_dtype_of_an_export_is_written_to_the_configuration(tmp_path):
    source = multimodal_folder(tmp_path / "source", "mistral3")
    change_json("config.json", dtype="bfloat16", ours=[1])(source)
    save_trained(source, tmp_path / "model", dtype="bfloat16")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and config["ours"] == [1]
    assert {weight.dtype for weight in stored(tmp_path / "model").values()} == {torch.bfloat16}


def test_folder_that_cannot_be_kept_is_refused(tmp_path):
    source = multimodal_folder(tmp_path / "source", "qwen3_5")
    weights = load_file(source / "model.safetensors")
    without = {name: weight for name, weight in weights.items() if "visual.blocks.1" not in name}
    save_file(without, source / "model.safetensors")
    with pytest.raises(ConfigError, match=r"^model\.path.*model\.visual\.blocks\.1"):
        read_loaded_files(str(source))
    (source / "model.safetensors").unlink()
    torch.save(weights, source / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"^model\.path.*safetensors"):
        read_loaded_files(str(source))


def test_type_without_a_causal_text_model_is_refused(tmp_path):
    for model_type, changes in (("florence2", {}), ("clip", {}), ("t5", {})):
        folder = tmp_path / model_type
        AutoConfig.for_model(model_type, **changes).save_pretrained(folder)
        with pytest.raises(ConfigError, match=rf"^model\.path.*'{model_type}'") as error:
            load_model_config(str(folder))
        assert "trust_remote_code" not in str(error.value)


def test_tower_whose_library_is_missing_is_not_needed(tmp_path, monkeypatch):
    source = multimodal_folder(tmp_path / "source", "llava_next")
    policy = load_policy(str(source))
    whole = type(policy.model).__mro__[1]
    from transformers import AutoModel

    def make(config, **_):
        if "vision" in config.model_type:
            raise ImportError("requires the timm library: pip install timm")
        return original(config)

    original = AutoModel.from_config
    monkeypatch.setattr(AutoModel, "from_config", make)
    again = load_policy(str(source))
    assert again.weights_sha256() == policy.weights_sha256()
    monkeypatch.setattr(whole, "__init__", Mock(side_effect=ImportError("pip install timm")))
    with pytest.raises(ConfigError, match=r"^model\.path.*pip install timm"):
        load_policy(str(source))


def test_adapters_are_merged_beside_the_tower(tmp_path):
    source = multimodal_folder(tmp_path / "source", "qwen2_5_vl")
    policy = load_policy(str(source))
    policy.add_adapter(LoraConfig(rank=2), path=str(source), seed=0)
    assert all("visual" not in weight.name for weight in policy.weights())
    with torch.no_grad():
        for weight in policy.trained_parameters():
            weight.normal_()
    policy.adapter.save(tmp_path / "adapter")
    found = find_model(str(tmp_path / "adapter"))
    assert found.base == str(source)
    made = Path(found.make(tmp_path / "made"))
    before = stored(source)
    after = stored(made)
    assert after.keys() == before.keys()
    changed = {name for name, weight in before.items() if not same_bits(weight, after[name])}
    assert changed and all("_proj" in name and "visual" not in name for name in changed)
    assert (made / SMALL_FILES[0]).is_file()


@pytest.mark.long
def test_page_has_what_is_decided_about_types():
    """The page has a row for every type; some of them are tried again here."""
    script = Path(__file__).parents[1] / "docs" / "multimodal.py"
    page = script.with_suffix(".md").read_text()
    if f"\n{transformers.__version__}: its folder" not in page:
        pytest.skip("it was made with another release of transformers")
    types = ("internvl", "voxtral", "gemma3n", "fast_vlm", "florence2")
    command = [sys.executable, str(script), *types]
    rows = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert len(rows) == len(types)
    for row in rows:
        assert row in page


@pytest.mark.long
def test_run_starts_from_a_multimodal_folder_and_another_from_its_result(tmp_path):
    source = multimodal_folder(tmp_path / "source", "qwen3_5")
    rewards = tmp_path / "rewards.py"
    rewards.write_text(
        "def f(completions, **_):\n    return [float(len(c)) for c in completions]\n"
    )
    words = (*SMALL, "train.iterations=1", "data.num_held_out=0", f"reward.functions=[{rewards}:f]")
    run = tmp_path / "run"
    succeed("--model", str(source), "--output", str(run), *words)
    before, after = stored(source), stored(run / "model")
    assert after.keys() == before.keys()
    unchanged = {name for name in before if same_bits(before[name], after[name])}
    of_tower = {name for name in before if name.startswith("model.visual")}
    assert of_tower <= unchanged and unchanged != before.keys()
    again = tmp_path / "again"
    succeed("--model", str(run / "model"), "--output", str(again), *words)
    assert summary_of(again)["iterations"] == 1
    assert all(same_bits(before[name], stored(again / "model")[name]) for name in of_tower)
    result = easyrl("export", str(again), str(tmp_path / "exported"))
    assert result.exit_code == 0
    exported = stored(tmp_path / "exported")
    assert all(
        same_bits(exported[name], weight) for name, weight in stored(again / "model").items()
    )
