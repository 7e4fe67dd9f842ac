"""Whole runs on random models of real shapes: how well a machine's devices are used.

Prompts are digits, rewards follow from the tokens, lengths are geometric as in training, and the
learning rate is 0, so that every iteration does the same work.

    periodic    completion tokens, the share of the time in which each group, and both, were busy
    sync        training alone, even on a shared device: MFU, the operations that forward and
                backward need (`training_flops`) over the peak that the vendor states
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from easyrl import devices
from easyrl.bench.harness import QWEN3_06B, Row, record, write_model_and_prompts
from easyrl.config import ConfigError, load_config
from easyrl.config.spec import RunSpec
from easyrl.model.files import DTYPE_BYTES, read_loaded_files
from easyrl.runtime.placement import resolve_placement
from easyrl.runtime.resolve import resolve
from easyrl.runtime.self_test_part import SMALL, random_model

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
    "RTX 4090": 165e12,
    "L4": 121e12,
}
"""Dense bfloat16 operations per second, by the vendors' data sheets. Of the names that are part of
a device's name, the first one counts."""
ACCELERATOR_SETTINGS = {
    "rollout.max_completion_length": 512,
    "rollout.num_generations": 16,
    "rollout.max_concurrent_groups": 8,
    "train.prompts_per_iteration": 16,
    "train.max_tokens_per_micro_batch": 16384,
}
CPU_SETTINGS = {
    "rollout.max_completion_length": 48,
    "rollout.num_generations": 4,
    "rollout.max_concurrent_groups": 4,
    "train.prompts_per_iteration": 8,
    "train.max_tokens_per_micro_batch": 1024,
}


def run(
    infer_devices: str | None = None,
    train_devices: str | None = None,
    model: str | None = None,
    dtype: str | None = None,
    *,
    words: Sequence[str] = (),
    iterations: int = 3,
) -> Iterator[Row]:
    """Yield a row per model. `model`: only this one of SIZES. `words` win over what is set here.

    `both_busy` is a lower bound: it is exact if something is busy all the time.
    """
    flags: dict[str, Any] = {"devices.infer": infer_devices, "devices.train": train_devices}
    config = load_config(None, flags, words)
    if "iterations" in config.train.model_fields_set:
        raise ConfigError(
            "train.iterations: expected --iterations N, the measured ones of each run, got "
            f"train.iterations={config.train.iterations}"
        )
    placement = resolve_placement(resolve(config))
    on_cpu = placement.train.kind == "cpu"
    flags |= CPU_SETTINGS if on_cpu else ACCELERATOR_SETTINGS
    flags |= {
        "model.dtype": dtype or ("float32" if on_cpu else "bfloat16"),
        "rollout.engine": "embedded",
        "rollout.memory_fraction": 0.3,  # of a shared device: a trainer needs several times as much
        "train.activation_checkpointing": placement.shares_device,
    }
    if model not in (None, *SIZES):
        raise ConfigError(f"--model: expected one of {', '.join(SIZES)} for loop, got {model}")
    names = ["small"] if on_cpu else ["0.6B", "1.7B"]
    if model is not None:
        names = [model]
    for name in names:
        yield {"model": name} | _measure(SIZES[name], flags, words, iterations)


def _measure(
    size: Mapping[str, Any], flags: Mapping[str, Any], words: Sequence[str], iterations: int
) -> Row:
    with tempfile.TemporaryDirectory(prefix="easyrl-bench-") as folder:
        inputs = write_inputs(Path(folder), size, resolve(load_config(None, flags, words)))
        flags = {**flags, **inputs}
        runs = {}
        for schedule in ("sync", "periodic"):
            of_schedule = {**flags, "runtime.schedule": schedule}
            runs[schedule] = record(schedule, of_schedule, words, iterations=iterations)
        num_weights = read_loaded_files(f"{folder}/model").num_weights or 0
        spec = resolve(load_config(None, flags, words))
    placement = resolve_placement(spec)
    sync = runs["sync"]
    periodic = runs["periodic"]
    device = None
    mfu = None
    if placement.train.kind != "cpu":
        device = devices.device_label(placement.accelerator, placement.train.indices[0])
        peak = next((flops for kind, flops in PEAK_FLOPS.items() if kind in device), None)
        if peak is not None and spec.model.dtype == "bfloat16":
            flops = training_flops(size, num_weights, spec, sync["completion_tokens"])
            mfu = flops / sync["train_seconds"] / (peak * placement.train.count)
    iteration = periodic["iteration_seconds"]
    infer = periodic["infer_seconds"]
    train = periodic["train_seconds"]
    weights = periodic["weights_seconds"]
    weight_bytes = DTYPE_BYTES[spec.model.dtype] * num_weights
    return {
        "dtype": spec.model.dtype,
        "infer_devices": str(placement.infer),
        "train_devices": str(placement.train),
        "device": device,
        "tokens_per_second": periodic["tokens_per_second"],
        "infer_busy": infer / iteration,
        "train_busy": train / iteration,
        "both_busy": max(0.0, (infer + train + weights) / iteration - 1),
        "weight_gigabytes_per_second": weight_bytes / 1e9 / weights,
        "mfu": mfu,
    }


def write_inputs(folder: Path, size: Mapping[str, Any], spec: RunSpec) -> dict[str, Any]:
    """Write a random model and prompts. Prompts, and completions on average, have half the maximum
    length of a completion."""
    length = spec.limits.max_completion_length // 2
    vocab_size = size["vocab_size"]
    num_ends = max(1, vocab_size // length)  # so many that one is sampled every `length` tokens
    ends = list(range(vocab_size - num_ends, vocab_size))
    model = random_model(size)
    model.generation_config = GenerationConfig(eos_token_id=ends)  # type: ignore[no-untyped-call]
    return write_model_and_prompts(
        folder,
        model,
        spec.model.dtype,
        spec.schedule.prompts_per_iteration,
        length,
    )


def training_flops(
    size: Mapping[str, Any], num_weights: int, spec: RunSpec, num_tokens: float
) -> float:
    """Return the floating-point operations that forward and backward of an iteration need, without
    recomputation: 6 per weight and token, and those of attention.

    `num_tokens`: of all completions, taken as equally long. A group shares its prompt. The tied
    head reads completions only.
    """
    num_prompts = spec.schedule.prompts_per_iteration
    prompt_length = spec.limits.max_prompt_length
    completion_length = num_tokens / (num_prompts * spec.schedule.num_generations)
    # Pairs of a query and a key: within the prompts, and from completions to what is before them.
    prompt_pairs = num_prompts * prompt_length**2 / 2
    completion_pairs = num_tokens * (prompt_length + completion_length / 2)
    width = size["num_attention_heads"] * size["head_dim"]
    head_weights = size["hidden_size"] * size["vocab_size"]
    return float(
        6 * (num_weights - head_weights) * num_prompts * prompt_length
        + 6 * num_weights * num_tokens
        + 12 * size["num_hidden_layers"] * width * (prompt_pairs + completion_pairs)
    )
