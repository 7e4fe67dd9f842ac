"""The memory estimate against measured memory."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from easyrl.bench.harness import peak_bytes
from easyrl.config import Config, ConfigError, load_config
from easyrl.config.devices import parse_device_set
from easyrl.data.hub import resolve_model
from easyrl.data.packing import Rollout, pack
from easyrl.engines.base import GroupRequest, SamplingSettings
from easyrl.engines.embedded import EmbeddedEngine
from easyrl.model.files import read_model_files
from easyrl.model.policy import Policy
from easyrl.runtime import memory
from easyrl.runtime.memory import (
    ProcessMemory,
    check_memory,
    estimate_memory,
    micro_batch_bytes,
    model_size,
)
from easyrl.runtime.placement import EngineChoice, Placement, resolve_placement, ring_layout
from easyrl.runtime.preflight import check_run, describe_memory
from easyrl.types import MicroBatch
from easyrl.workers.learner import Learner
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


def qwen3(sizes: tuple[int, ...], head_size: int = 64, *, is_tied: bool = True) -> Qwen3Config:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names = (*names, "num_key_value_heads", "vocab_size")
    return Qwen3Config(
        **dict(zip(names, sizes, strict=True)),
        head_dim=head_size,
        tie_word_embeddings=is_tied,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )


def save_model(name: str, folder: Path) -> None:
    """Save a model with random weights, whose completions hardly ever end early."""
    torch.manual_seed(0)
    config = qwen3(SIZES[name], is_tied=name != "13M")
    Qwen3ForCausalLM(config).save_pretrained(folder)
    for file in Path(resolve_model("tiny")).glob("tok*"):
        shutil.copy(file, folder)


# -- the formula of a micro-batch


def full_micro_batch(vocabulary: int) -> MicroBatch:
    """Eight completions of 60 tokens, of a prompt of 60."""
    tokens = np.random.default_rng(0).integers(3, vocabulary, (9, 60)).astype(np.int32)
    logprobs, mask = np.full(60, -5.0, np.float32), np.ones(60, np.bool_)
    return pack([Rollout(0, tokens[0], tokens[i], logprobs, mask, 1.0 - i) for i in range(1, 9)])


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("vocabulary", [500, 20000])  # the last layer, and the head, need most
def test_micro_batch_formula_equals_measured_allocations(
    vocabulary: int, checkpointing: bool, tmp_path: Path
) -> None:
    model_config = qwen3((64, 256, 3, 4, 2, vocabulary), head_size=16)
    Qwen3ForCausalLM(model_config).save_pretrained(tmp_path)
    policy = Policy.load(str(tmp_path))
    words = [f"train.activation_checkpointing={str(checkpointing).lower()}"]
    learner = Learner(policy, load_config(None, {}, words))
    batch = full_micro_batch(vocabulary)
    learner.accumulate(batch)  # what is made once is there
    taken = peak_bytes(lambda: learner.accumulate(batch), torch.device("cpu"))
    size = model_size(model_config)
    assert size is not None
    kept, transient = micro_batch_bytes(
        size,
        len(batch.input_ids),
        len(batch.targets),
        dtype_bytes=4,
        on_cpu=True,
        checkpointing=checkpointing,
        copies_factors=False,  # allocated inside of an operation, where they are not seen
    )
    assert kept + transient == pytest.approx(taken, rel=TOLERANCE)


# -- the whole estimate


def peak_of(pid: int) -> int:
    """Return the peak resident size of a process (VmHWM) in bytes; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def measured_peaks(*words: str) -> list[int]:
    """Return the peaks of a run's workers in bytes, rollout before train."""
    process = subprocess.Popen(
        command("--no-live", *words), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    found: dict[int, int] = {}
    while process.poll() is None:
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(process.pid).children():
                if "spawn_main" in " ".join(child.cmdline()):
                    found[child.pid] = max(found.get(child.pid, 0), peak_of(child.pid))
        time.sleep(0.05)
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert len(found) == 2
    return [found[pid] for pid in sorted(found)]


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
@pytest.mark.long
@pytest.mark.parametrize("name", list(SIZES))
def test_estimate_equals_the_measured_peak(name: str, tmp_path: Path) -> None:
    save_model(name, tmp_path / "model")
    (tmp_path / "reward.py").write_text(
        "def hashed(completion_ids, **_):\n"
        "    return [float(sum(ids) % 7) for ids in completion_ids]\n"
    )
    rows = [json.dumps({"prompt": f"{number:064d}"}) for number in range(8)]
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    words = (
        *("--model", str(tmp_path / "model"), "--dataset", str(tmp_path / "data.jsonl")),
        *("--reward", f"{tmp_path}/reward.py:hashed", "--output", str(tmp_path / "run")),
        *("--infer-devices", "cpu", "--train-devices", "cpu", *FULL),
    )
    expected = estimated(
        f"model.path={tmp_path / 'model'}", "devices.infer=cpu", "devices.train=cpu", *FULL
    )
    took = measured_peaks(*words)
    assert [each.name for each in expected[:2]] == ["rollout-0", "train-0"]
    for each, peak in zip(expected[:2], took, strict=True):
        assert each.num_bytes == pytest.approx(peak, rel=TOLERANCE), each.name
    assert sum(each.num_bytes for each in expected[:2]) == pytest.approx(sum(took), rel=TOLERANCE)


def placed(config: Config) -> Placement:
    """On the devices that the config names, without looking for accelerators."""
    infer, train = config.devices.infer or "cpu", config.devices.train or "cpu"
    sets = parse_device_set(infer), parse_device_set(train)
    fraction = config.rollout.memory_fraction or 0.5
    engine = EngineChoice("vllm" if config.rollout.engine == "vllm" else "embedded")
    return Placement(*sets, "cuda", 1, 4, engine, infer_memory_fraction=fraction)


def estimated(*words: str) -> list[ProcessMemory]:
    config = load_config(None, {}, words)
    files = read_model_files(config.model.path)
    assert files.num_weights is not None
    num_trained = None if config.model.lora.rank is None else 1000
    size = model_size(files.config, files.num_weights, num_trained)
    assert size is not None
    placement = placed(config)
    ring_bytes = ring_layout(config, placement).total_bytes
    return estimate_memory(config, placement, size, ring_bytes=ring_bytes)


def part(processes: list[ProcessMemory], process: str, what: str) -> int:
    (found,) = [each for each in processes if each.name == process]
    return sum(each.num_bytes for each in found.parts if each.what.startswith(what))


def test_estimate_follows_the_settings() -> None:
    plain = estimated()
    weights = part(plain, "train-0", "weights")
    assert part(plain, "train-0", "gradients") == weights
    assert part(plain, "train-0", "AdamW") == 2 * weights
    sparing = estimated("train.activation_checkpointing=true")
    activations = part(plain, "train-0", "activations")
    assert part(sparing, "train-0", "activations") < 0.5 * activations
    half = estimated("train.max_tokens_per_micro_batch=2048")
    assert 2 * part(half, "train-0", "activations") == activations
    assert part(plain, "train-0", "layers") == 0
    assert part(estimated("devices.train=cpu:2"), "train-0", "layers") > 0
    small = estimated("model.dtype=bfloat16")
    assert 2 * part(small, "rollout-0", "KV cache") == part(plain, "rollout-0", "KV cache")
    assert 2 * part(small, "rollout-0", "weights") == weights
    assert part(small, "train-0", "weights") == weights  # float32 all the same


def test_estimated_kv_cache_equals_the_allocated_one() -> None:
    words = ("data.max_prompt_length=50", "rollout.max_completion_length=30")
    counted = part(estimated(*words, "rollout.num_generations=3"), "rollout-0", "KV cache")
    sampling = SamplingSettings(max_prompt_length=50, max_completion_length=30)
    engine = EmbeddedEngine(Policy.load("tiny"), sampling, num_rows=4 * 3)  # 4 groups
    engine.submit(GroupRequest((0,), [5, 6, 7], 2))
    while engine.has_work:
        engine.step()
    cache = engine._cache
    assert counted == sum(tensor.nbytes for layer in cache.layers for tensor in layer)


def test_sizes_of_unusual_models_are_read() -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9}
    linear = model_size(sizes | {"layer_types": ["full_attention", "linear_attention"]})
    one_per_layer = model_size(sizes | {"intermediate_size": [16, 32]})
    experts = model_size(sizes | {"moe_intermediate_size": 4, "num_experts_per_tok": 3})
    assert linear is not None and one_per_layer is not None and experts is not None
    assert one_per_layer.is_batched and not linear.is_batched
    assert [each.mlp_width for each in (linear, one_per_layer, experts)] == [32, 32, 12]


@pytest.mark.parametrize(("dtype", "share"), [("float32", 1.0), ("bfloat16", 0.5)])
def test_loading_on_the_host_for_an_accelerator_is_counted(dtype: str, share: float) -> None:
    """An engine's weights pass through the host in their own type, a trainer's in float32."""
    words = ("devices.infer=0-3", "devices.train=4", f"model.dtype={dtype}")
    processes = estimated(*words, "train.keep_checkpoints=0")
    weights = part(estimated(), "train-0", "weights")
    assert share <= part(processes, "rollout-3", "more while") / weights < share + 0.3
    assert part(processes, "train-0", "more while it is loaded") == weights


# -- refused runs

LEAST = ("data.max_prompt_length=30", "rollout.max_completion_length=10", "rollout.ring_slots=1")
APART = ("devices.infer=0", "devices.train=1")
WEIGHTS = 767744 * 4


def certain_parts(*words: str) -> dict[str, int]:
    """Bytes on the CPU that the run cannot do without."""
    totals: dict[str, int] = {}
    for each in (each for process in estimated(*LEAST, *words) for each in process.parts):
        if each.is_certain and each.device == "cpu":
            totals[each.what] = totals.get(each.what, 0) + each.num_bytes
    return totals


@pytest.mark.parametrize(
    ("words", "copies"),
    [
        ((), 1 + 4 + 3),  # rollout, trainer, what a checkpoint is written from
        (("devices.infer=cpu:2",), 2 + 4 + 3),
        (("train.keep_checkpoints=0", "algorithm.beta=0.1"), 1 + 5),
        (("train.updates_per_iteration=2", "rollout.ring_slots=128"), 1 + 5 + 3),
        (("devices.train=cpu:2",), 1 + 4 + 3),
        ((*APART, "algorithm.beta=0.1", "train.offload=[reference]"), 1),
        ((*APART, "train.offload=[optimizer]"), 4),
        ((*APART, "model.lora.rank=2"), 0),
        ((*APART, "model.lora.rank=2", "train.offload=[optimizer]"), 1),  # the frozen weights
        (("model.lora.rank=2", "algorithm.beta=0.1"), 2),  # the adapters are tiny
    ],
)
def test_certain_memory_is_counted_in_copies_of_the_model(
    words: tuple[str, ...], copies: int
) -> None:
    parts = certain_parts(*words)
    of_model = sum(parts.values()) - parts.get("KV cache", 0) - parts["ring buffer"]
    assert of_model == pytest.approx(copies * WEIGHTS, abs=0.1 * WEIGHTS)


def test_run_that_cannot_fit_is_refused_with_the_keys_of_its_largest_parts() -> None:
    needed = sum(certain_parts().values())
    check_memory(estimated(*LEAST), {"cpu": needed})
    with pytest.raises(ConfigError) as error:
        check_memory(estimated(*LEAST), {"cpu": needed - 1})
    lines = str(error.value).splitlines()
    assert "train.offload" in lines[1] and "model.path" in str(error.value)
    assert any("train.keep_checkpoints=0" in line for line in lines)


@pytest.mark.parametrize(
    ("fraction", "words", "refused"),
    [
        (0.3, (), ""),  # 1.8 for 1 model, 4.2 for 4
        (0.1, (), "rollout"),
        (0.6, (), "train"),
        (1.0, (), "train"),
        (0.15, ("model.dtype=bfloat16",), ""),
        (0.7, ("model.lora.rank=2",), ""),  # the frozen weights
        (0.9, ("model.lora.rank=2",), "train"),
        (0.9, ("model.lora.rank=2", "train.offload=[optimizer]"), ""),
        (0.3, ("rollout.engine=vllm", "devices.train=1"), ""),
        (0.1, ("rollout.engine=vllm", "devices.train=1"), "rollout"),
    ],
)
def test_too_small_fraction_of_a_device_is_refused(
    fraction: float, words: tuple[str, ...], refused: str
) -> None:
    shared = ("devices.infer=0", "devices.train=0", f"rollout.memory_fraction={fraction}")
    processes = estimated(*LEAST, "rollout.num_generations=2", *shared, *words)
    sizes = {"cpu": 2**40, "cuda:0": 6 * WEIGHTS, "cuda:1": 6 * WEIGHTS}
    expected = pytest.raises(ConfigError, match=f"memory_fraction gives {refused}-0")
    with expected if refused else contextlib.nullcontext():
        check_memory(processes, sizes)


# -- output


def dry_run(*words: str) -> list[str]:
    config = load_config(None, {}, ["devices.infer=cpu", "devices.train=cpu", *words])
    return describe_memory(config, resolve_placement(config)).splitlines()


def test_the_table_adds_up_and_fits_a_narrow_terminal() -> None:
    lines = dry_run("devices.train=cpu:2", "train.prompts_per_iteration=4")
    assert max(map(len, lines)) <= 38  # 40 behind a comment sign
    assert "train-0 to 1, each" in "\n".join(lines)
    (first,) = [number for number, line in enumerate(lines) if line.startswith("rollout-0")]
    sizes = [int(line.split()[-2].replace(",", "")) for line in lines[first:]]
    end = next(n for n, line in enumerate(lines[first + 1 :]) if not line.startswith("  "))
    assert sizes[0] == pytest.approx(sum(sizes[1 : end + 1]), abs=end)  # each is rounded


def test_dry_run_needs_only_the_models_config(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 2**40)
    shutil.copy(Path(resolve_model("tiny")) / "config.json", tmp_path)
    assert dry_run(f"model.path={tmp_path}") == dry_run()


def test_dry_run_reports_a_missing_model(tmp_path: Path) -> None:
    (line,) = dry_run(f"model.path={tmp_path / 'none'}")
    assert line.startswith("a run would not start: model.path (--model)")


def test_run_that_may_not_fit_gives_a_warning_with_keys(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 2**30)
    (warning,) = [line for line in dry_run() if line.startswith("warning")]
    assert "cgroup) has 1.00 GiB" in warning
    assert "train.max_tokens_per_micro_batch=4096" in warning
    assert "train.activation_checkpointing=true" in warning
    words = ["devices.infer=cpu", "devices.train=cpu", f"output.dir={tmp_path / 'run'}"]
    assert list(check_run(load_config(None, {}, words)).warnings) == [warning]
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 2**40)
    assert list(check_run(load_config(None, {}, words)).warnings) == []
