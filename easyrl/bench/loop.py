"""Whole runs on random models of real shapes: how well a machine's devices are used.

The shapes of Qwen3-0.6B and Qwen3-1.7B in bfloat16 on accelerators, a small one in float32 on the
CPU. Nothing is downloaded: weights are random, prompts are digits, rewards follow from the tokens.
A completion ends at any of so many tokens that lengths are geometric, as in training. The learning
rate is 0, so that every iteration does the same work.

    periodic    the rates, and the share of the time in which each group, and both, were busy
    sync        training alone, even on a shared device: MFU, the operations that forward and
                backward need (`attention.model_flops`) over the peak that the vendor states
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from easyrl import devices
from easyrl.bench.attention import QWEN3_06B, SMALL, model_flops
from easyrl.bench.report import progress
from easyrl.bench.runs import NUM_WARM_UP, Recorder, record
from easyrl.config import Config, ConfigError, DType, load_config
from easyrl.data.chat import render_prompt
from easyrl.model.files import DTYPE_BYTES, load_tokenizer
from easyrl.runtime.placement import resolve_placement

SIZES: dict[str, dict[str, Any]] = {
    "0.6B": QWEN3_06B,
    "1.7B": QWEN3_06B | {"hidden_size": 2048, "intermediate_size": 6144},
    "small": SMALL | {"tie_word_embeddings": True},
}
PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
}
"""Dense bfloat16 by the vendors' data sheets. The first name that is part of a device's counts."""
REWARD = """
import zlib

def spread(completion_ids, **_):
    return [zlib.crc32(repr(list(ids)).encode()) % 1000 / 1000 for ids in completion_ids]
"""
COLUMNS = {
    "model": "model",
    "tokens_per_second": "tokens/s",
    "infer_busy": "infer busy",
    "train_busy": "train busy",
    "both_busy": "both busy",
    "mfu": "MFU",
    "weight_gigabytes_per_second": "weights, GB/s",
}


@dataclass(frozen=True, slots=True)
class Load:
    """An iteration's work."""

    prompt_len: int
    mean_completion_len: int
    max_completion_len: int
    num_generations: int
    num_prompts: int
    groups_in_flight: int
    max_tokens: int
    """Token budget of a micro-batch."""


ON_ACCELERATORS = Load(256, 300, 512, 16, 32, 8, 16384)
ON_CPU = Load(24, 24, 48, 4, 8, 4, 1024)


def run(
    infer_devices: str | None = None,
    train_devices: str | None = None,
    model: str | None = None,
    dtype: DType | None = None,
    *,
    words: Sequence[str] = (),
    iterations: int = 3,
    load: Load | None = None,
) -> list[dict[str, Any]]:
    """One row per model (`model`: only this one of SIZES). `words` win over what is set here.

    `train_seconds`, `mfu` (None if the peak is unknown) and `sync_tokens_per_second` are of sync,
    all other figures of periodic. Tokens are completion tokens trained.
    """
    if model is not None and model not in SIZES:
        raise ConfigError(f"--model: expected one of {', '.join(SIZES)}, got '{model}'")
    flags: dict[str, Any] = {"devices.infer": infer_devices, "devices.train": train_devices}
    on_cpu = resolve_placement(load_config(None, flags, words)).train.kind == "cpu"
    names = [model] if model is not None else ["small"] if on_cpu else ["0.6B", "1.7B"]
    flags["model.dtype"] = dtype or ("float32" if on_cpu else "bfloat16")
    load = load or (ON_CPU if on_cpu else ON_ACCELERATORS)
    rows = []
    for name in names:
        recorders = {}
        with tempfile.TemporaryDirectory(prefix="easyrl-bench-") as folder:
            num_weights = write_model(
                Path(folder, "model"), SIZES[name], load, flags["model.dtype"]
            )
            for schedule in ("sync", "periodic"):
                own = {**flags, "runtime.schedule": schedule}
                config = config_of(Path(folder), own, words, iterations, load)
                recorders[schedule] = done = record(config, Recorder(), name)
                progress(
                    f"{name}, {schedule}: {done.median('perf/tokens_per_second'):.0f} tokens/s, "
                    f"{done.median('perf/iteration_seconds'):.2f} s per iteration"
                )
        rows.append(_row(name, config, num_weights, load, **recorders))
    return rows


def _row(
    name: str,
    config: Config,
    num_weights: int,
    load: Load,
    *,
    sync: Recorder,
    periodic: Recorder,
) -> dict[str, Any]:
    placement = resolve_placement(config)
    infer_busy, train_busy, both_busy = periodic.busy_shares()
    weight_bytes = DTYPE_BYTES[config.model.dtype] * num_weights
    device = peak = None
    if placement.train.kind != "cpu":
        device = devices.device_label(placement.accelerator, placement.train.indices[0])
        if config.model.dtype == "bfloat16":
            peak = next((flops for kind, flops in PEAK_FLOPS.items() if kind in device), None)
    flops = iteration_flops(SIZES[name], config, load.prompt_len, sync.completion_tokens)
    train_seconds = sync.median("perf/train_seconds")
    return {
        "model": name,
        "num_weights": num_weights,
        "dtype": config.model.dtype,
        "infer_devices": str(placement.infer),
        "train_devices": str(placement.train),
        "device": device,
        "tokens_per_second": periodic.median("perf/tokens_per_second"),
        "iteration_seconds": periodic.median("perf/iteration_seconds"),
        "infer_busy": infer_busy,
        "train_busy": train_busy,
        "both_busy": both_busy,
        "weight_gigabytes_per_second": weight_bytes / 1e9 / periodic.median("perf/weights_seconds"),
        "sync_tokens_per_second": sync.median("perf/tokens_per_second"),
        "train_seconds": train_seconds,
        "mfu": peak and flops / train_seconds / (peak * placement.train.count),
    }


def config_of(
    folder: Path, flags: Mapping[str, Any], words: Sequence[str], iterations: int, load: Load
) -> Config:
    """The config of a run on the model in `folder`. `words` win over `flags`, and both over what is
    set here."""
    file, reward, model = folder / "prompts.jsonl", folder / "reward.py", str(folder / "model")
    drawn = random.Random(0)
    num_prompts = (NUM_WARM_UP + iterations) * load.num_prompts
    texts = ["".join(drawn.choices("0123456789", k=load.prompt_len)) for _ in range(num_prompts)]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    reward.write_text(REWARD)
    tokenizer = load_tokenizer(model)
    shares_device = resolve_placement(load_config(None, dict(flags), words)).shares_device
    own: dict[str, Any] = {
        "model.path": model,
        "data.dataset": str(file),
        "data.max_prompt_length": max(len(render_prompt(text, tokenizer)) for text in texts),
        "data.num_held_out": 0,
        "reward.functions": [f"{reward}:spread"],
        "output.dir": tempfile.mkdtemp(dir=folder) + "/run",
        "rollout.engine": "embedded",
        "rollout.num_generations": load.num_generations,
        "rollout.max_completion_length": load.max_completion_len,
        "rollout.max_concurrent_groups": load.groups_in_flight,
        "rollout.memory_fraction": 0.3,  # of a shared device: a trainer needs several times as much
        "train.iterations": NUM_WARM_UP + iterations,
        "train.prompts_per_iteration": load.num_prompts,
        "train.max_tokens_per_micro_batch": load.max_tokens,
        "train.learning_rate": 0.0,
        "train.keep_checkpoints": 0,
        "train.activation_checkpointing": shares_device,
    }
    return load_config(None, own | dict(flags), words)


def write_model(folder: Path, size: Mapping[str, Any], load: Load, dtype: DType) -> int:
    """Write a random model with the tokenizer of `tiny`; return its number of weights."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(Qwen3Config(**size, max_position_embeddings=4096))
    num_ends = max(1, size["vocab_size"] // load.mean_completion_len)
    ends = list(range(size["vocab_size"] - num_ends, size["vocab_size"]))
    model.generation_config = GenerationConfig(eos_token_id=ends)  # type: ignore[no-untyped-call]
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    load_tokenizer("tiny").save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def iteration_flops(
    size: Mapping[str, Any], config: Config, prompt_len: int, num_tokens: float
) -> float:
    """For this many completion tokens, with all completions equally long."""
    prompts, generations = config.train.prompts_per_iteration, config.rollout.num_generations
    lengths = [round(num_tokens / (prompts * generations))] * generations
    return prompts * model_flops(size, prompt_len, lengths, prompt_len + sum(lengths))
