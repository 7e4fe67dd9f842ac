"""The memory estimate against measured memory."""

import contextlib
import re
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.measuring import peak_bytes
from easyrl import devices
from easyrl.config import ConfigError, load_config
from easyrl.config.devices import parse_device_set
from easyrl.data.hub import resolve_model
from easyrl.devices import parse_assumed
from easyrl.engines.base import GroupRequest, SamplingSettings
from easyrl.engines.embedded import EmbeddedEngine
from easyrl.engines.sizes import SCORE_BYTES
from easyrl.engines.vllm.sizes import MORE_CACHE, STEP_FRACTION, cache_bytes
from easyrl.layout.row import Rollout, pack
from easyrl.layout.tree import TokenTree
from easyrl.model.files import model_size, read_model_files
from easyrl.model.loading import load_policy
from easyrl.model.mixers import elements_of_states, sdpa
from easyrl.model.sizes import (
    TRAINED_SCORE_BYTES,
    TrainedBatch,
    activation_bytes,
    largest_batch,
)
from easyrl.runtime import memory_estimate
from easyrl.runtime.checks.engine import measure_model
from easyrl.runtime.memory_estimate import check_memory, estimate_memory, memory_table
from easyrl.runtime.memory_fit import use_memory
from easyrl.runtime.placement import EngineChoice, Placement, resolve_placement
from easyrl.runtime.preflight import check_run, make_plan
from easyrl.runtime.resolve import ResolvedRun, resolve
from easyrl.workers.learner import Learner
from mistakes import QWEN
from own_processes import popen
from runs import command, workers, write_rows
from tiny_models import WITH_STATES, tiny_model

TOLERANCE = 0.15
WEIGHTS = 767744 * 4  # bytes of the tiny model
LEAST = ("data.max_prompt_length=30", "rollout.max_completion_length=10", "rollout.ring_slots=1")
APART, SHARED = (("devices.infer=0", f"devices.train={train}") for train in (1, 0))
HASHED = "def hashed(completion_ids, **_): return [float(sum(ids) % 7) for ids in completion_ids]"
"""A reward in which the completions of a group differ, so that every group has a gradient."""


@pytest.fixture(autouse=True)
def large_accelerators(monkeypatch):
    monkeypatch.setattr(devices, "total_memory_bytes", lambda kind, index: 2**40)


def save_model(folder, sizes, head_size=64, *, is_tied=True):
    """`sizes`: width, MLP's width, layers, heads, key and value heads, vocabulary."""
    torch.manual_seed(0)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    named = zip((*names, "num_key_value_heads", "vocab_size"), sizes, strict=True)
    ends = {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    config = Qwen3Config(**dict(named), head_dim=head_size, tie_word_embeddings=is_tied, **ends)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    for file in Path(resolve_model("tiny")).glob("tok*"):
        shutil.copy(file, folder)
    return config


def write_task(folder, sizes, **how):
    """Save a random model, whose completions hardly ever end early; return settings with prompts,
    completions and micro-batches of full length."""
    save_model(folder / "model", sizes, **how)
    (folder / "own.py").write_text(HASHED)
    write_rows(folder / "data.jsonl", [{"prompt": f"{number:064d}"} for number in range(8)])
    return (
        *(f"model.path={folder}/model", f"data.dataset={folder}/data.jsonl"),
        *(f"reward.functions=[{folder}/own.py:hashed]", "data.num_held_out=0"),
        *("runtime.schedule=sync", "train.iterations=2", "train.prompts_per_iteration=4"),
        *("data.max_prompt_length=64", "rollout.max_completion_length=120"),
        "rollout.num_generations=8",
    )


def placed(config):
    names = config.devices.infer, config.devices.train
    sets = [parse_device_set(each or "cpu") for each in names]
    fraction = config.rollout.memory_fraction or 0.5
    return Placement(*sets, "cuda", 1, 4, infer_memory_fraction=fraction)


def estimated(*words, **placed_as):
    config = load_config(words=words)
    files = read_model_files(config.model.path)
    num_trained = None if config.model.lora.rank is None else 1000
    size = model_size(files.config, files.num_weights or 0, num_trained)
    return estimate_memory(resolve(config), replace(placed(config), **placed_as), size)


def of(role, *words, **placed_as):
    parts = estimated(*words, **placed_as)
    needs = [part.need for part in parts if part.process.startswith(role)]
    return {need.what: need.num_bytes for need in needs}


def test_model_that_gives_no_number_of_layers_has_no_states():
    gpt = {"model_type": "openai-gpt", "n_layer": 12, "n_embd": 768}
    assert elements_of_states(gpt) == 0


@pytest.mark.parametrize("checkpointing", ["false", "true"])
@pytest.mark.parametrize("vocabulary", [500, 20000])  # the last layer, and the head, need most
def test_micro_batch_formula_equals_measured_allocations(vocabulary, checkpointing, tmp_path):
    model_config = save_model(tmp_path, (64, 256, 3, 4, 2, vocabulary), head_size=16)
    lengths = "data.max_prompt_length=60", "rollout.max_completion_length=60"
    group = "rollout.num_generations=8", "train.prompts_per_iteration=1"
    words = *lengths, *group, f"train.activation_checkpointing={checkpointing}"
    config = load_config(words=words)
    spec = resolve(config)
    learner = Learner(load_policy(str(tmp_path)), spec.for_training)
    tokens = np.random.default_rng(0).integers(3, vocabulary, (9, 60)).astype(np.int32)
    logprobs, mask = np.full(60, -5.0, np.float32), np.ones(60, np.bool_)
    batch = pack([Rollout(0, tokens[0], tokens[i], logprobs, mask, 1.0 - i) for i in range(1, 9)])
    learner.accumulate(batch)  # what is made once is there
    taken = peak_bytes(lambda: learner.accumulate(batch), torch.device("cpu"))
    size = model_size(model_config.to_dict(), num_weights=0)
    repeats = {"num_ranks": 1, "repeats_prompts": False}
    expected = activation_bytes(
        size,
        largest_batch(spec.limits, spec.batches, **repeats),
        dtype="float32",
        is_on_cpu=True,
        is_fused=True,
        is_checkpointed=spec.optimizer.activation_checkpointing,
    )
    assert expected.kept + expected.transient == pytest.approx(taken, rel=TOLERANCE)


def test_transients_of_layers_and_of_the_head_are_compared_as_they_are_counted():
    """The estimate never falls with more tokens, although beyond some number a layer needs more
    than the head."""
    size = model_size(QWEN, num_weights=0)
    how = {"dtype": "float32", "is_on_cpu": True, "is_fused": True, "is_checkpointed": False}
    totals = []
    for num_tokens in range(2_000, 60_000, 500):
        batch = TrainedBatch(num_tokens, num_targets=1_000, num_keys=500)
        totals.append(sum(activation_bytes(size, batch, **how, transient_factor=3.9)))
    assert totals == sorted(totals)


@pytest.mark.parametrize(
    ("words", "engine", "num_bytes"),
    [
        (("devices.infer=cpu", "devices.train=cpu"), "embedded", 2**27),
        (("devices.infer=cpu:2", "devices.train=cpu:2"), "embedded", 2**27),
        (("devices.infer=cpu", "devices.train=cpu"), "vllm", 2**27),
        (("devices.infer=cpu", "devices.train=0"), "embedded", 2**27),
        (APART, "embedded", 2 * 2**27),
    ],
)
def test_buckets_that_workers_share_are_counted_once(words, engine, num_bytes, tmp_path):
    save_model(tmp_path, (768, 2304, 4, 12, 6, 28000))  # more weights than the buckets hold
    parts = estimated(f"model.path={tmp_path}", *words, engine=EngineChoice(engine))
    buckets = [
        part.num_processes * part.need.num_bytes for part in parts if part.need.what == "buckets"
    ]
    assert sum(buckets) == num_bytes


def measured_peaks(*words):
    """Return the most memory of each worker, without the trainer's buckets in a rollout worker."""
    run = popen(command("--no-live", *words), stdout=subprocess.DEVNULL)
    peaks = {}
    while run.poll() is None:
        with contextlib.suppress(psutil.Error, OSError):
            for name, worker in workers(run.pid).items():
                status = Path(f"/proc/{worker.pid}/status").read_text()
                if peak := re.search(r"VmHWM:\s+(\d+)", status):
                    shared = re.search(r"RssShmem:\s+(\d+)", status)
                    num_shared = 0 if name.startswith("train") else int(shared[1])
                    peaks[name] = max(peaks.get(name, 0), 1024 * (int(peak[1]) - num_shared))
        time.sleep(0.05)
    assert run.returncode == 0
    # The process that checks the reward's functions imports no torch, so it is smaller.
    return [peaks[pid] for pid in sorted(peaks) if peaks[pid] > devices.TORCH_BYTES / 2]


@pytest.mark.long
def test_estimate_equals_the_measured_peak(tmp_path):
    words = (
        *write_task(tmp_path, (768, 2304, 10, 12, 6, 28000)),  # 92 million weights
        *("devices.infer=cpu", "devices.train=cpu", "train.max_tokens_per_micro_batch=2048"),
        f"output.dir={tmp_path}/run",
        # The copy of a checkpoint is held beside activations only while a slow disk is written. The
        # heap of the trainer grows for some iterations.
        *("train.keep_checkpoints=0", "train.iterations=4"),
    )
    expected = [sum(of(role, *words).values()) for role in ("rollout", "train")]
    assert expected == pytest.approx(measured_peaks(*words), rel=TOLERANCE)


# Values of deepseek_v3 are smaller than keys; the others have layers with a state.
@pytest.mark.parametrize(
    "family", ["tiny", "deepseek_v3", "qwen3_5_text", "lfm2", "nemotron_h", "zamba2"]
)
def test_estimated_cache_covers_the_allocated_one(family, tmp_path):
    path = family
    if family != "tiny":
        model = tiny_model(family, **WITH_STATES.get(family, {}))
        model.save_pretrained(path := str(tmp_path))
        shutil.copy(Path(resolve_model("tiny")) / "tokenizer.json", tmp_path)
    words = ("data.max_prompt_length=50", "rollout.max_completion_length=30", f"model.path={path}")
    estimate = of("rollout", *words, "rollout.num_generations=3", "train.eval_every=1")
    sampling = SamplingSettings(max_prompt_length=50, max_completion_length=30)
    engine = EmbeddedEngine(load_policy(path), sampling, num_rows=4 * 3)  # 4 groups
    for number in range(40):  # an evaluation
        engine.submit(GroupRequest((number,), [5] * 50, 1))
    while engine.has_work:
        engine.step()
    assert 0.9 < engine.cache.keys_values.num_bytes / estimate["KV cache"] <= 1.0
    assert ("states" in estimate) == (family in WITH_STATES)
    if engine.cache.states is not None:
        assert 0.9 < engine.cache.states.num_bytes / estimate["states"] <= 1.0


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_copies_for_decoding_are_of_the_layers_and_the_head(is_tied, tmp_path):
    model = tiny_model("qwen3", tie_word_embeddings=is_tied)
    model.save_pretrained(tmp_path)
    shutil.copy(Path(resolve_model("tiny")) / "tokenizer.json", tmp_path)
    copied = [*model.model.layers.parameters(), model.lm_head.weight]
    num_weights = sum(weight.numel() for weight in copied)
    assert of("rollout", f"model.path={tmp_path}")["weights for decoding"] == 4 * num_weights
    assert "weights for decoding" not in of("rollout", "model.path=tiny-hybrid")


def test_whether_weights_are_tied_is_read_as_the_model_does():
    text = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "vocab_size": 9}
    for whole, part in ((True, False), (False, True)):
        named = {"tie_word_embeddings": whole}
        both = {**named, "text_config": {**text, "tie_word_embeddings": part}}
        assert model_size(both, 1).is_tied is whole
        assert model_size({**text, **named}, 1).is_tied is whole
        assert model_size({"text_config": {**text, **named}}, 1).is_tied is whole


@pytest.mark.parametrize("total", [2**25, 2**40])
def test_the_kv_cache_of_vllm_is_the_one_that_it_is_given(total, monkeypatch):
    """On a shared device at most what it can use; on one of its own all that is left."""
    monkeypatch.setattr(devices, "total_memory_bytes", lambda kind, index: total)
    monkeypatch.setattr(devices, "memory_in_use", lambda kind, index: (0, ""))
    lengths = "data.max_prompt_length=50", "rollout.max_completion_length=30"
    words = *lengths, "rollout.num_generations=8", "rollout.memory_fraction=0.5"
    tiny, vllm = ("tiny", "float32", 4 * 8, 80), {"engine": EngineChoice("vllm")}
    for where, device, part in (((), "cpu", None), (SHARED, "cuda:0", 0.5)):
        parts = of("rollout", *words, *where, **vllm)
        shown = parts["KV cache"] + parts.get(MORE_CACHE, 0)
        assert shown == pytest.approx(cache_bytes(*tiny, device=device, shared_part=part), abs=2)
    parts = of("rollout", *words, *APART, **vllm)
    left = int(0.5 * (1 - STEP_FRACTION) * total) - WEIGHTS
    left -= devices.CONTEXT_BYTES + parts["buckets"]
    more = parts.get(MORE_CACHE, 0)
    assert parts["KV cache"] + more == max(left, parts["KV cache"])
    # It takes no part in what fits.
    counted = memory_estimate.bytes_by_memory(estimated(*words, *APART, **vllm))
    (on_device,) = [n for where, n in counted.items() if "rollout" in where.name]
    assert on_device == sum(parts.values()) - more


@pytest.mark.parametrize(("softcap", "is_trained"), [(50.0, False), (None, True)])
def test_a_score_without_a_fused_kernel_takes_as_many_bytes_as_estimated(
    softcap, is_trained, monkeypatch
):
    monkeypatch.setattr(sdpa, "is_fused", lambda block, settings: False)
    layout = sdpa.SdpaAttention(TokenTree.of_sequences([512]), torch.device("cpu"))
    settings = sdpa.LayerSettings(0, 1.0, sliding_window=None, softcap=softcap)
    query_key_value = torch.zeros(3, 512, 8, 16, requires_grad=is_trained)

    def attend():
        output = layout.attend(*query_key_value, settings)
        if is_trained:
            output.sum().backward()

    with torch.inference_mode(not is_trained):
        peak = peak_bytes(attend, torch.device("cpu"))
    expected = TRAINED_SCORE_BYTES if is_trained else SCORE_BYTES
    assert peak / (8 * 512**2) == pytest.approx(expected, rel=TOLERANCE)


def test_accelerators_hold_contexts_buckets_graphs_scores_and_converted_weights():
    npu = {"accelerator": "npu"}
    halves = (*APART, "model.dtype=bfloat16", "train.max_tokens_per_micro_batch=4096")
    on_gpu, on_npu = of("train", *halves), of("train", *halves, **npu)
    assert on_gpu["driver, communication"] < on_npu["driver, communication"]  # HCCL's buffers
    # Where nothing is converted, workers share the pages of the files.
    loading = [of("rollout", *words).get("weights being loaded", 0) for words in (APART, halves)]
    assert loading == [0, WEIGHTS / 2]
    scores = TRAINED_SCORE_BYTES * 4 * 4096 * 512  # heads, tokens, keys
    assert on_npu["logits, transients"] == scores > on_gpu["logits, transients"]
    assert of("train", *halves, "model.dtype=float32")["logits, transients"] == scores
    for words, buckets in ((APART, (2**27, 2**27)), (SHARED, (0, 2**26))):
        found = of("rollout", *words), of("train", *words)
        assert tuple(parts.get("buckets", 0) for parts in found) == buckets
        assert "CUDA graphs" in found[0] and "CUDA graphs" not in of("rollout", *words, **npu)


@pytest.mark.parametrize(
    ("words", "reshard", "tokens"),
    [
        ((), False, 32_768),
        (("train.max_tokens_per_micro_batch=5000",), False, 5_000),
        (("runtime.deterministic=true",), "auto", 4_096),
    ],
)
def test_trainer_uses_the_memory_that_there_is(words, reshard, tokens):
    size = model_size(QWEN, num_weights=1_720_574_976)
    split = ("devices.infer=0-3", "devices.train=4-7", "model.dtype=bfloat16")
    lengths = ("data.max_prompt_length=512", "rollout.max_completion_length=2048")
    config = load_config(words=[*split, *lengths, "train.prompts_per_iteration=64", *words])
    placement = resolve_placement(resolve(config), parse_assumed("8x140GiB"))
    changed = use_memory(ResolvedRun.of(config), placement, size).config
    assert (changed.train.reshard, changed.max_tokens_per_micro_batch) == (reshard, tokens)


def test_plan_with_pictures_chooses_settings_for_the_model_with_its_tower():
    shared = ("devices.infer=0", "devices.train=0", "rollout.memory_fraction=0.5")
    words = ("model.path=tiny-vision", "model.dtype=bfloat16", "data.dataset=picture-sums")
    config = load_config(words=[*words, *shared, "rollout.max_completion_length=400"])
    assumed = parse_assumed("2.4GiB")
    tables = {}
    for has_pictures, num_tokens in ((False, 16_384), (True, 8_192)):
        run = ResolvedRun.of(config).with_pictures(has_pictures)
        size = measure_model(run.spec.model).size
        placement = resolve_placement(run.spec, assumed)
        run = use_memory(run, placement, size)
        assert run.config.max_tokens_per_micro_batch == num_tokens
        tables[has_pictures] = memory_table(estimate_memory(run.spec, placement, size))
    text = make_plan(config, assumed).text
    assert tables[True] in text and tables[False] not in text


@pytest.mark.parametrize(
    ("fraction", "words", "refused"),
    [
        (0.3, "", ""),  # 1.8 for 1 model, 4.2 for 4
        (0.1, "", "rollout"),
        (0.6, "", "train"),
        (0.6, "model.lora.rank=2", ""),  # the frozen weights
        (0.9, "model.lora.rank=2", "train"),
    ],
)
def test_part_of_a_device_that_cannot_suffice_is_refused(fraction, words, refused, monkeypatch):
    monkeypatch.setattr(devices, "total_memory_bytes", lambda kind, index: 6 * WEIGHTS)
    monkeypatch.setattr(memory_estimate, "available_memory_bytes", lambda: 2**40)
    shared = "devices.infer=0", "devices.train=0", f"rollout.memory_fraction={fraction}"
    all_words = *LEAST, "rollout.num_generations=2", *shared, *words.split()
    match = rf"cuda:0 \({refused}\).*rollout\.memory_fraction"
    expected = pytest.raises(ConfigError, match=match)
    with expected if refused else contextlib.nullcontext():
        check_memory(estimated(*all_words))


def dry_run(*words):
    config = load_config(words=["devices.infer=cpu", "devices.train=cpu", *words])
    plan = make_plan(config)
    lines = plan.text.partition("\n\n")[2].splitlines()
    if not plan.would_start:
        lines = [plan.verdict, *lines]
    return [line for line in lines if "prompt" not in line and not line.startswith("  12")]


def test_dry_run_needs_only_the_models_config_and_warns_as_a_start_does(monkeypatch, tmp_path):
    monkeypatch.setattr(memory_estimate, "available_memory_bytes", lambda: 2**30)
    (line,) = dry_run(f"model.path={tmp_path}")
    assert line.startswith("a run would not start: model.path (--model)")
    shutil.copy(Path(resolve_model("tiny")) / "config.json", tmp_path)
    lines = dry_run("train.learning_rate=0.001")
    assert dry_run(f"model.path={tmp_path}", "train.learning_rate=0.001") == lines
    (warning,) = [line for line in lines if line.startswith("warning")]
    assert "train.max_tokens_per_micro_batch" in warning
    words = ["devices.infer=cpu", "devices.train=cpu", f"output.dir={tmp_path / 'run'}"]
    assert check_run(load_config(words=words)).warnings == [warning]
    monkeypatch.setattr(memory_estimate, "available_memory_bytes", lambda: 11 * WEIGHTS)
    with pytest.raises(ConfigError, match=r"train\.keep_checkpoints=0.*model\.path"):
        check_memory(estimated(*LEAST))
