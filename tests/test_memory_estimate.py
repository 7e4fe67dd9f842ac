"""The memory estimate against measured memory."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.measuring import peak_bytes
from easyrl import devices
from easyrl.config import Config, ConfigError, change_config, load_config
from easyrl.config.devices import parse_device_set
from easyrl.data.hub import resolve_model
from easyrl.devices import parse_assumed
from easyrl.engines.base import GroupRequest, SamplingSettings
from easyrl.engines.embedded import EmbeddedEngine
from easyrl.engines.vllm.platforms import cache_bytes
from easyrl.model import shared_prompt
from easyrl.model.files import read_model_files
from easyrl.model.policy import Policy
from easyrl.runtime import memory
from easyrl.runtime.memory import (
    Part,
    bytes_by_memory,
    check_memory,
    estimate_memory,
    memory_budgets,
    micro_batch_bytes,
    model_size,
    use_memory,
)
from easyrl.runtime.placement import EngineChoice, Placement, resolve_placement
from easyrl.runtime.plan import make_plan
from easyrl.runtime.preflight import check_run
from easyrl.workers.learner import Learner
from easyrl.workers.packing import Rollout, pack
from runs import command

TOLERANCE = 0.15
SIZES = {
    "13M": (256, 768, 4, 4, 2, 20000),
    "42M": (512, 1536, 8, 8, 4, 32000),
    "92M": (768, 2304, 10, 12, 6, 28000),
}
"""Width, MLP's width, layers, heads, key and value heads, vocabulary."""
FULL = (
    "runtime.schedule=sync",  # so that micro-batches are as full as they may be
    "data.num_held_out=0",
    "data.max_prompt_length=64",
    "rollout.max_completion_length=120",
    "rollout.num_generations=8",
    "train.prompts_per_iteration=4",
    "train.max_tokens_per_micro_batch=2048",
    "train.iterations=2",
)
"""Prompts and completions of full length."""


def save_model(
    folder: Path, sizes: tuple[int, ...], head_size: int = 64, *, is_tied: bool = True
) -> Qwen3Config:
    """Save a model with random weights, whose completions hardly ever end early."""
    torch.manual_seed(0)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    named = zip((*names, "num_key_value_heads", "vocab_size"), sizes, strict=True)
    ends = {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    config = Qwen3Config(**dict(named), head_dim=head_size, tie_word_embeddings=is_tied, **ends)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    for file in Path(resolve_model("tiny")).glob("tok*"):
        shutil.copy(file, folder)
    return config


QWEN3 = {  # 1.7B
    "num_hidden_layers": 28,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "head_dim": 128,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize(
    ("devices", "words", "reshard", "tokens"),
    [
        ("8x140GiB", (), False, 32_768),
        ("8x48GiB", (), False, 4_096),
        ("8x140GiB", ("train.reshard=true",), True, 32_768),
        ("8x140GiB", ("train.max_tokens_per_micro_batch=5000",), False, 5_000),
        ("8x140GiB", ("runtime.deterministic=true",), "auto", 4_096),
    ],
)
def test_trainer_uses_the_memory_that_there_is(
    devices: str, words: tuple[str, ...], reshard: bool | str, tokens: int
) -> None:
    split = ("devices.infer=0-3", "devices.train=4-7", "model.dtype=bfloat16")
    lengths = ("data.max_prompt_length=512", "rollout.max_completion_length=2048")
    config = load_config(words=[*split, *lengths, "train.prompts_per_iteration=64", *words])
    size = model_size(QWEN3, num_weights=1_720_574_976)
    changed = use_memory(config, resolve_placement(config, parse_assumed(devices)), size)
    assert (changed.train.reshard, changed.max_tokens_per_micro_batch) == (reshard, tokens)


# -- the formula of a micro-batch


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("vocabulary", [500, 20000])  # the last layer, and the head, need most
def test_micro_batch_formula_equals_measured_allocations(
    vocabulary: int, checkpointing: bool, tmp_path: Path
) -> None:
    model_config = save_model(tmp_path, (64, 256, 3, 4, 2, vocabulary), head_size=16)
    config = load_config(words=[f"train.activation_checkpointing={str(checkpointing).lower()}"])
    learner = Learner(Policy.load(str(tmp_path)), config)
    # Eight completions of 60 tokens, of a prompt of 60.
    tokens = np.random.default_rng(0).integers(3, vocabulary, (9, 60)).astype(np.int32)
    logprobs, mask = np.full(60, -5.0, np.float32), np.ones(60, np.bool_)
    batch = pack([Rollout(0, tokens[0], tokens[i], logprobs, mask, 1.0 - i) for i in range(1, 9)])
    learner.accumulate(batch)  # what is made once is there
    taken = peak_bytes(lambda: learner.accumulate(batch), torch.device("cpu"))
    size = model_size(model_config.to_dict(), num_weights=0)
    assert size is not None
    num_tokens = len(batch.input_ids), len(batch.targets)
    expected = micro_batch_bytes(config, size, *num_tokens, on_cpu=True)
    assert sum(expected) == pytest.approx(taken, rel=TOLERANCE)


# -- the whole estimate


def measured_peaks(*words: str) -> list[int]:
    """Return the peaks of a run's workers in bytes, rollout before train."""
    process = subprocess.Popen(
        command("--no-live", *words), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    peaks: dict[int, int] = {}
    while process.poll() is None:
        with contextlib.suppress(psutil.Error, OSError):
            for child in psutil.Process(process.pid).children():
                peak = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{child.pid}/status").read_text())
                if peak and "spawn_main" in " ".join(child.cmdline()):
                    peaks[child.pid] = 1024 * int(peak[1])
        time.sleep(0.05)
    _, err = process.communicate()
    assert process.returncode == 0, err
    # The process that checks the reward's functions imports no torch, so it is smaller.
    workers = [peaks[pid] for pid in sorted(peaks) if peaks[pid] > memory.WORKER_BYTES / 2]
    assert len(workers) == 2
    return workers


@pytest.mark.long
@pytest.mark.parametrize("name", list(SIZES))
def test_estimate_equals_the_measured_peak(name: str, tmp_path: Path) -> None:
    save_model(tmp_path / "model", SIZES[name], is_tied=name != "13M")
    (tmp_path / "reward.py").write_text(
        "def hashed(completion_ids, **_):\n"
        "    return [float(sum(ids) % 7) for ids in completion_ids]\n"
    )
    rows = [json.dumps({"prompt": f"{number:064d}"}) for number in range(8)]
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    words = (
        *(f"model.path={tmp_path}/model", f"data.dataset={tmp_path}/data.jsonl"),
        *(f"reward.functions=[{tmp_path}/reward.py:hashed]", f"output.dir={tmp_path}/run"),
        *("devices.infer=cpu", "devices.train=cpu", *FULL),
    )
    expected = [sum(of(estimated(*words), worker).values()) for worker in ("rollout-0", "train-0")]
    took = measured_peaks(*words)
    assert expected == pytest.approx(took, rel=TOLERANCE)


def placed(config: Config) -> Placement:
    """Place a run on the devices that the config names, without looking for accelerators."""
    sets = [
        parse_device_set(each or "cpu") for each in (config.devices.infer, config.devices.train)
    ]
    fraction = config.rollout.memory_fraction or 0.5
    return Placement(*sets, "cuda", 1, 4, infer_memory_fraction=fraction)


def estimated(*words: str) -> list[Part]:
    config = load_config(words=words)
    files = read_model_files(config.model.path)
    num_trained = None if config.model.lora.rank is None else 1000
    size = model_size(files.config, files.num_weights or 0, num_trained)
    assert size is not None
    return estimate_memory(config, placed(config), size)


def of(parts: list[Part], process: str) -> dict[str, int]:
    return {part.what: part.num_bytes for part in parts if part.process == process}


def test_estimate_follows_the_settings() -> None:
    plain, rollout = of(estimated(), "train-0"), of(estimated(), "rollout-0")
    assert plain["gradients (float32)"] == WEIGHTS and plain["AdamW's two moments"] == 2 * WEIGHTS
    sparing = of(estimated("train.activation_checkpointing=true"), "train-0")
    assert sparing["activations"] < 0.5 * plain["activations"]
    half = of(estimated("train.max_tokens_per_micro_batch=2048"), "train-0")
    assert 2 * half["activations"] == plain["activations"]
    sharded = of(estimated("devices.train=cpu:2"), "train-1")
    assert 2 * sharded["weights (float32)"] == WEIGHTS and sharded["buckets, gathered layers"] > 0
    small = estimated("model.dtype=bfloat16")
    assert 2 * of(small, "rollout-0")["KV cache"] == rollout["KV cache"]
    assert 2 * of(small, "rollout-0")["weights (bfloat16)"] == WEIGHTS
    assert of(small, "train-0")["weights (float32)"] == WEIGHTS
    on_gpus = ("devices.infer=0-3", "devices.train=4", "train.keep_checkpoints=0")
    for dtype, share in (("float32", 1), ("bfloat16", 2)):
        parts = estimated(*on_gpus, f"model.dtype={dtype}")
        assert share * of(parts, "rollout-3")["weights being loaded"] == WEIGHTS  # on the host
        assert of(parts, "train-0")["weights being loaded"] == WEIGHTS


def test_accelerators_hold_contexts_buffers_and_scores() -> None:
    config = load_config(words=[*APART, "train.max_tokens_per_micro_batch=4096"])
    size = model_size(read_model_files("tiny").config, 2**20)
    assert size is not None

    def estimate(kind: str, dtype: str = "bfloat16", **placed_as: Any) -> dict[str, int]:
        changed = change_config(config, {"model.dtype": dtype})
        placement = replace(placed(changed), accelerator=kind, **placed_as)
        return of(estimate_memory(changed, placement, size), "train-0")

    on_gpu, on_npu = estimate("cuda"), estimate("npu")
    assert on_gpu["driver's context"] == on_npu["driver's context"] == memory.CONTEXT_BYTES
    buffers = "communication buffers"
    assert buffers not in on_gpu and on_npu[buffers] == devices.COMMUNICATOR_BYTES["npu"]
    # No fused kernel: in float32, and on NPUs.
    keys = max(config.data.max_prompt_length, config.rollout.max_completion_length)
    scores = memory.TRAINED_SCORE_BYTES * size.num_heads * 4096 * keys
    what = "logits, transients"
    assert on_npu[what] - on_gpu[what] == scores
    assert estimate("cuda", "float32")[what] > scores


def test_the_base_that_lora_freezes_is_counted_in_its_type() -> None:
    lora = estimated("model.lora.rank=2", "model.dtype=bfloat16", "devices.train=cpu:2")
    whole = estimated("model.dtype=bfloat16", "devices.train=cpu:2")
    assert of(lora, "train-0")["weights (bfloat16)"] == pytest.approx(WEIGHTS / 4, rel=0.02)
    what = "buckets, gathered layers"  # with it, no gradient of the head is gathered
    assert of(lora, "train-0")[what] < of(whole, "train-0")[what]


@pytest.mark.parametrize("fraction", [0.1, 0.2, 0.3, 0.5, 0.7])
def test_a_part_of_a_device_is_refused_just_where_vllm_has_no_cache(
    fraction: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "total_memory_bytes", lambda kind, index: 6 * WEIGHTS)
    words = (*LEAST, "devices.infer=0", "devices.train=0", f"rollout.memory_fraction={fraction}")
    config = load_config(words=words)
    placement = replace(placed(config), engine=EngineChoice("vllm"))
    size = model_size(read_model_files("tiny").config, WEIGHTS // 4)
    assert size is not None
    parts = [p for p in estimate_memory(config, placement, size) if p.process == "rollout-0"]
    on_device = [part for part in parts if part.memory != "cpu" and part.is_certain]
    needed = sum(part.num_bytes for part in on_device)
    how = {"device": "cuda:0", "shared_part": fraction}
    cache = cache_bytes("tiny", "float32", 1, config.max_sequence_length, **how)
    (row,) = (part.num_bytes for part in on_device if part.what == "KV cache")
    assert (needed <= fraction * 6 * WEIGHTS) == (cache is not None and cache >= row)
    assert (cache is not None and cache >= row) == (fraction >= 0.2)


def test_estimated_kv_cache_equals_the_allocated_one() -> None:
    words = ("data.max_prompt_length=50", "rollout.max_completion_length=30")
    parts = of(estimated(*words, "rollout.num_generations=3"), "rollout-0")
    sampling = SamplingSettings(max_prompt_length=50, max_completion_length=30)
    engine = EmbeddedEngine(Policy.load("tiny"), sampling, num_rows=4 * 3)  # 4 groups
    for number in range(40):  # an evaluation
        engine.submit(GroupRequest((number,), [5] * 50, 1))
    while engine.has_work:
        engine.step()
    rows = sum(cache.nbytes for layer in engine.cache.rows for cache in layer)
    assert parts["KV cache"] == rows
    assert 0.7 < (engine.cache.num_bytes - rows) / parts["prompts in the KV cache"] <= 1.0


def test_sizes_of_unusual_models_are_read() -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9}
    linear = model_size({**sizes, "layer_types": ["full_attention", "linear_attention"]}, 1000)
    one_per_layer = model_size({"text_config": {**sizes, "intermediate_size": [16, 24]}}, 1000)
    experts = {"moe_intermediate_size": 4, "num_experts_per_tok": 3}
    mixture = model_size({**sizes, **experts}, 1000)
    assert linear is not None and one_per_layer is not None and mixture is not None
    assert one_per_layer.is_batched and not linear.is_batched
    assert [each.mlp_width for each in (linear, one_per_layer, mixture)] == [32, 24, 12]
    assert model_size({"n_layer": 2}, 1000) is None


# -- refused runs

LEAST = ("data.max_prompt_length=30", "rollout.max_completion_length=10", "rollout.ring_slots=1")
APART = ("devices.infer=0", "devices.train=1")
WEIGHTS = 767744 * 4


@pytest.mark.parametrize(
    ("words", "copies"),
    [
        ((), 1 + 4 + 6),  # rollout, trainer, a checkpoint's copy and its file
        (("devices.infer=cpu:2", "devices.train=cpu:2"), 2 + 4 + 6),
        (("train.keep_checkpoints=0", "algorithm.beta=0.1"), 1 + 5),
        (("train.updates_per_iteration=2", "rollout.ring_slots=128"), 1 + 5 + 6),
        ((*APART, "algorithm.beta=0.1", "train.offload=[reference]"), 1),
        ((*APART, "model.lora.rank=2", "train.offload=[optimizer]"), 1),  # the frozen weights
        (("model.lora.rank=2", "algorithm.beta=0.1"), 2),  # the adapters are tiny
    ],
)
def test_certain_memory_is_counted_in_copies_of_the_model(
    words: tuple[str, ...], copies: int
) -> None:
    parts = [p for p in estimated(*LEAST, *words) if p.is_certain and p.memory == "cpu"]
    of_model = sum(p.num_bytes for p in parts if p.what not in ("KV cache", "ring buffer"))
    assert of_model == pytest.approx(copies * WEIGHTS, abs=0.1 * WEIGHTS)


def test_run_that_cannot_fit_is_refused_with_the_keys_of_its_largest_parts() -> None:
    parts = estimated(*LEAST)
    needed = bytes_by_memory(part for part in parts if part.is_certain)["cpu"]
    check_memory(parts, {"cpu": needed})
    with pytest.raises(ConfigError, match=r"train\.keep_checkpoints=0.*model\.path"):
        check_memory(parts, {"cpu": needed - 1})


@pytest.mark.parametrize(
    ("fraction", "words", "refused"),
    [
        (0.3, (), ""),  # 1.8 for 1 model, 4.2 for 4
        (0.1, (), "rollout"),
        (0.6, (), "train"),
        (0.7, ("model.lora.rank=2",), ""),  # the frozen weights
        (0.9, ("model.lora.rank=2",), "train"),
        (0.9, ("model.lora.rank=2", "train.offload=[optimizer]"), ""),
    ],
)
def test_too_small_fraction_of_a_device_is_refused(
    fraction: float, words: tuple[str, ...], refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "total_memory_bytes", lambda kind, index: 6 * WEIGHTS)
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 2**40)
    shared = ("devices.infer=0", "devices.train=0", f"rollout.memory_fraction={fraction}")
    words = (*LEAST, "rollout.num_generations=2", *shared, *words)
    match = rf"cuda:0 \({refused}-0\).*rollout\.memory_fraction"
    expected = pytest.raises(ConfigError, match=match)
    with expected if refused else contextlib.nullcontext():
        check_memory(estimated(*words), memory_budgets(placed(load_config(words=words))))


# -- output


def dry_run(*words: str) -> list[str]:
    config = load_config(words=["devices.infer=cpu", "devices.train=cpu", *words])
    lines = make_plan(config).text.splitlines()
    return lines[lines.index("") + 1 :]


def test_the_table_adds_up_and_fits_a_narrow_terminal() -> None:
    lines = dry_run("devices.train=cpu:2", "train.prompts_per_iteration=4")
    assert max(map(len, lines)) <= 38  # 40 behind a comment sign
    assert any(line.startswith("train-0 to 1, each") for line in lines)
    sizes = [int(line.split()[-2].replace(",", "")) for line in lines[1:]]
    end = next(n for n, line in enumerate(lines[2:]) if not line.startswith("  "))
    assert sizes[0] == pytest.approx(sum(sizes[1 : end + 1]), abs=end)  # each is rounded


def test_dry_run_needs_only_the_models_config(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 2**40)
    (line,) = dry_run(f"model.path={tmp_path}")
    assert line.startswith("a run would not start: model.path (--model)")
    shutil.copy(Path(resolve_model("tiny")) / "config.json", tmp_path)
    assert dry_run(f"model.path={tmp_path}") == dry_run()


def test_run_that_may_not_fit_gives_a_warning_with_keys(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 2**30)
    (warning,) = [line for line in dry_run() if line.startswith("warning")]
    assert "train.max_tokens_per_micro_batch=4096" in warning
    assert "train.activation_checkpointing=true" in warning
    words = ["devices.infer=cpu", "devices.train=cpu", f"output.dir={tmp_path / 'run'}"]
    assert check_run(load_config(words=words)).warnings == [warning]
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 2**40)
    assert check_run(load_config(words=words)).warnings == []


@pytest.mark.parametrize(("softcap", "is_trained"), [(None, False), (50.0, False), (None, True)])
def test_attention_without_a_fused_kernel_holds_as_many_bytes_per_score_as_estimated(
    monkeypatch: pytest.MonkeyPatch, softcap: float | None, is_trained: bool
) -> None:
    monkeypatch.setattr(shared_prompt, "is_fused", lambda block, settings: False)
    heads, length = 8, 512
    layout = shared_prompt.SharedPrompt([(length, ())], torch.device("cpu"))
    settings = shared_prompt.AttentionSettings(0, 1.0, sliding_window=None, softcap=softcap)
    query, key, value = torch.zeros(3, length, heads, 16, requires_grad=is_trained)

    def attend() -> None:
        output = layout.attend(query, key, value, settings)
        if is_trained:
            output.sum().backward()  # type: ignore[no-untyped-call]

    with torch.inference_mode(not is_trained):
        peak = peak_bytes(attend, torch.device("cpu"))
    expected = memory.TRAINED_SCORE_BYTES if is_trained else memory.SCORE_BYTES
    assert peak / (heads * length**2) == pytest.approx(expected, rel=TOLERANCE)
