"""The memory that each process of a run takes at its fullest, part by part, by the model's config.

    train worker      its share of weights, gradients, AdamW's moments and other policies, and while
                      a micro-batch is trained what `model.activations` tells; on the CPU also what
                      a checkpoint is written from, and what loading takes if that is more
    rollout worker    weights, KV cache, and what a step takes
    controller        the ring, and the reward processes

It is counted with all that the config allows: micro-batches of `train.max_tokens_per_micro_batch`
tokens, prompts and completions of the greatest length. In a process on the CPU what Python, torch
and the model's code take is counted too (BASE_BYTES); accelerators' own contexts are not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from easyrl.channels import ALONE_BYTES, BUCKET_BYTES, NUM_BUCKETS
from easyrl.config import Config, ConfigError
from easyrl.engines import MAX_PREFILL_TOKENS
from easyrl.model.activations import ModelShape, activation_bytes, passing_bytes
from easyrl.model.checkpoint_files import FILE_BYTES
from easyrl.model.files import DTYPE_BYTES, FLOAT_BYTES, ModelFiles, kv_bytes_per_token
from easyrl.rewards.loading import reward_specs
from easyrl.runtime.memory import COPIES_TO_SAVE, num_rows, other_policies
from easyrl.runtime.placement import Placement

MIB = 2**20
BASE_BYTES = {"train": 375 * MIB, "rollout": 375 * MIB, "controller": 270 * MIB, "reward": 50 * MIB}
"""Of a process on the CPU without weights: Python, torch, the model's class. Measured on x86 Linux
with torch 2.13 for the CPU and transformers 5.23."""
HEAP_HOLES = 1.6
"""On the CPU, so many times what is computed in passing. A trainer there keeps what it has freed
(`heap`), and glibc, which aligns a block by asking for more than it gives, cannot put one into the
hole of another of its size: logits and gradients of the head, larger than any hole that activations
leave, are placed beside each other's holes. Measured: 1.3 to 1.8 times, at models of 13, 42 and 92
million weights. Where large blocks are given back, peaks are to 7 % what is counted without it."""
SAMPLE_BYTES = 16
"""Of a logit while a token is drawn: itself, its log-probability, its probability in float64."""
PENALTY_BYTES, TRUNCATION_BYTES = 12, 32
"""More of it with a repetition penalty (the logits that are drawn from are others), and with top-k
or top-p (sorted, with their places and sums). Measured, like the next."""
MATH_BYTES = 38 * MIB
"""More for a rollout worker's rewards where one is `math`: math-verify and sympy."""
REWARD_BYTES = 16 * MIB
"""Of a reward process alone: what it shares with the one it is forked from is counted there."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A model, as far as memory depends on it."""

    files: ModelFiles
    shape: ModelShape
    num_weights: int
    num_trained: int | None = None
    """Elements of LoRA's adapters; None: all weights are trained."""


@dataclass(frozen=True, slots=True)
class Part:
    what: str
    num_bytes: int
    device: str
    """`cpu`, or an accelerator by the user's number, as in `cuda:3`."""
    remedy: str = ""
    """The keys that make it smaller."""


@dataclass(slots=True)
class ProcessMemory:
    name: str
    device: str
    parts: list[Part] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    def add(self, what: str, num_bytes: float, remedy: str = "", device: str | None = None) -> None:
        if num_bytes > 0:
            self.parts.append(Part(what, int(num_bytes), device or self.device, remedy))


def estimate_memory(
    config: Config, placement: Placement, model: ModelSize, *, ring_bytes: int
) -> list[ProcessMemory]:
    """Of every process, rollout workers first. Of vLLM its weights and cache alone are counted, not
    what its own processes take besides."""
    num_rollout, num_train = placement.num_rollout_workers, placement.train.count
    controller = ProcessMemory("controller, rewards", "cpu")
    controller.add("Python and torch", BASE_BYTES["controller"])
    num_rewards = num_rollout * config.reward.num_workers
    controller.add(
        f"{num_rewards} reward process(es)",
        num_rollout * _reward_bytes(config),
        f"reward.num_workers={config.reward.num_workers}",
    )
    controller.add("ring buffer", ring_bytes, f"rollout.ring_slots={config.ring_slots}")
    return [
        *(_rollout_worker(config, placement, model, number) for number in range(num_rollout)),
        *(_train_worker(config, placement, model, number) for number in range(num_train)),
        controller,
    ]


def bytes_by_device(processes: Sequence[ProcessMemory]) -> Mapping[str, int]:
    totals: dict[str, int] = {}
    for part in (part for process in processes for part in process.parts):
        totals[part.device] = totals.get(part.device, 0) + part.num_bytes
    return totals


def _rollout_worker(
    config: Config, placement: Placement, model: ModelSize, number: int
) -> ProcessMemory:
    device = placement.device_name("rollout", number)
    worker = ProcessMemory(f"rollout-{number}", device)
    rollout, dtype_bytes = config.rollout, DTYPE_BYTES[config.model.dtype]
    if device == "cpu":
        worker.add("Python and torch", BASE_BYTES["rollout"])
    weights = dtype_bytes * model.num_weights
    worker.add(f"weights ({config.model.dtype})", weights, "model.dtype")
    rows = num_rows(config, placement, model.files)
    row_tokens = config.max_sequence_length
    worker.add(
        "KV cache",
        rows * row_tokens * kv_bytes_per_token(model.files.config) * dtype_bytes / FLOAT_BYTES,
        f"rollout.max_concurrent_groups={placement.max_concurrent_groups}, "
        f"rollout.num_generations={rollout.num_generations}, "
        f"rollout.max_completion_length={rollout.max_completion_length}",
    )
    has_them_there = device == "cpu" and placement.engine.name == "embedded"
    _add_buckets(worker, config, model, is_straight=has_them_there)
    num_drawn = rows + max(1, rows // 4)
    prefill = min(MAX_PREFILL_TOKENS, config.data.max_prompt_length * rows)
    shape = model.shape
    worker.add(
        "engine's step",
        num_drawn * shape.vocabulary_size * _sample_bytes(config)
        + prefill * dtype_bytes * (2 * shape.width + 3 * shape.mlp_width),
        f"rollout.max_concurrent_groups={placement.max_concurrent_groups}",
    )
    if device == "cpu":
        _add_loading(worker, model)
    return worker


def _sample_bytes(config: Config) -> int:
    """Of a logit."""
    rollout = config.rollout
    penalty = PENALTY_BYTES * (rollout.repetition_penalty != 1.0)
    return SAMPLE_BYTES + penalty + TRUNCATION_BYTES * (rollout.top_k > 0 or rollout.top_p < 1.0)


def _reward_bytes(config: Config) -> int:
    """Of the reward processes of one rollout worker, and of what they are forked from."""
    num_bytes = BASE_BYTES["reward"] + config.reward.num_workers * REWARD_BYTES
    with contextlib.suppress(ConfigError):  # none came: the run is refused for that, elsewhere
        num_bytes += MATH_BYTES * ("math" in reward_specs(config))
    return num_bytes


def _train_worker(
    config: Config, placement: Placement, model: ModelSize, number: int
) -> ProcessMemory:
    device, ranks = placement.device_name("train", number), placement.train.count
    worker = ProcessMemory(f"train-{number}", device)
    train = config.train
    if device == "cpu":
        worker.add("Python and torch", BASE_BYTES["train"])
    weights = FLOAT_BYTES * model.num_weights / ranks
    trained = weights if model.num_trained is None else FLOAT_BYTES * model.num_trained / ranks
    home = "cpu" if "optimizer" in train.offload else device
    worker.add("weights (float32)", weights, "train.offload=[optimizer], --train-devices", home)
    if model.num_trained is not None:
        worker.add("LoRA adapters", trained, f"model.lora.rank={config.model.lora.rank}", home)
    worker.add("gradients (float32)", trained, "train.offload=[optimizer]", home)
    worker.add("AdamW's two moments", 2 * trained, "train.offload=[optimizer]", home)
    for name, key in other_policies(config).items():
        kept = "cpu" if name in train.offload else device
        worker.add(f"{name} policy", trained, f"{key}, train.offload=[{name}]", kept)
    if train.keep_checkpoints:
        saved = COPIES_TO_SAVE * trained
        worker.add("checkpoint's copy", saved, "train.keep_checkpoints=0", "cpu")
        worker.add("checkpoint's file", min(saved, FILE_BYTES), "train.keep_checkpoints=0", "cpu")
    is_cast = config.model.dtype != "float32"
    _add_buckets(worker, config, model, is_straight=device == "cpu" and not is_cast)
    _add_gathered(worker, config, model, ranks)
    _add_micro_batch(worker, config, model, ranks)
    if device == "cpu":
        _add_loading(worker, model)
    return worker


def _add_buckets(
    worker: ProcessMemory, config: Config, model: ModelSize, *, is_straight: bool
) -> None:
    """`is_straight`: on the CPU, where memory that is not written to is not taken, large weights go
    from where they lie to where they belong."""
    dtype_bytes, shape = DTYPE_BYTES[config.model.dtype], model.shape
    sent = dtype_bytes * model.num_weights
    if is_straight:
        matrices = (*shape.layer_matrices * shape.num_layers, shape.head_weights)
        sent = dtype_bytes * sum(n for n in matrices if n * dtype_bytes < ALONE_BYTES)
    worker.add("buckets of weights", min(NUM_BUCKETS * BUCKET_BYTES, sent))


def _add_gathered(worker: ProcessMemory, config: Config, model: ModelSize, ranks: int) -> None:
    """Of a sharded model what is whole at a time: what is in no layer, and two layers, the one
    that computes and the next; of one layer the gradient, which is summed in float32."""
    is_offloaded = "optimizer" in config.train.offload and worker.device != "cpu"
    if ranks == 1 and config.model.dtype == "float32" and not is_offloaded:
        return
    dtype_bytes = DTYPE_BYTES[config.model.dtype]
    outer = model.shape.outer_weights
    layer = (model.num_weights - outer) / model.shape.num_layers
    worker.add("layers gathered", dtype_bytes * (outer + 2 * layer))
    largest = max(outer, layer)
    worker.add("gradient being summed", (dtype_bytes + FLOAT_BYTES) * largest)


def _add_micro_batch(worker: ProcessMemory, config: Config, model: ModelSize, ranks: int) -> None:
    train, dtype_bytes = config.train, DTYPE_BYTES[config.model.dtype]
    num_tokens, num_targets = _micro_batch_tokens(config, ranks)
    keys = f"train.max_tokens_per_micro_batch={train.max_tokens_per_micro_batch}"
    if not train.activation_checkpointing:
        keys += ", train.activation_checkpointing=true"
    is_here = worker.device == "cpu"
    kept = activation_bytes(
        model.shape,
        num_tokens,
        dtype_bytes=dtype_bytes,
        fuses_norms=is_here,
        checkpointing=train.activation_checkpointing,
    )
    passing = passing_bytes(
        model.shape,
        num_tokens,
        num_targets=num_targets,
        dtype_bytes=dtype_bytes,
        trains_head=model.num_trained is None,
        fuses_norms=is_here,
        copies_factors=is_here,
        checkpointing=train.activation_checkpointing,
    )
    worker.add("activations", kept, keys)
    worker.add("computed in passing", passing)
    if is_here:
        worker.add("holes between tensors", HEAP_HOLES * passing)


def _micro_batch_tokens(config: Config, ranks: int) -> tuple[int, int]:
    """Tokens of the largest micro-batch, and completion tokens in it, where all are as long as they
    may be."""
    rollout, train = config.rollout, config.train
    prompt, completion = config.data.max_prompt_length, rollout.max_completion_length
    groups = train.prompts_per_iteration // train.updates_per_iteration
    num_prompts = rollout.num_generations if config.model.attention == "repeated" else 1
    of_group = num_prompts * prompt + rollout.num_generations * completion
    of_rank = -(-groups * of_group // ranks)
    num_tokens = min(train.max_tokens_per_micro_batch, max(of_rank, prompt + completion))
    return num_tokens, -(-num_tokens * rollout.num_generations * completion // of_group)


def _add_loading(worker: ProcessMemory, model: ModelSize) -> None:
    """A model is loaded whole in float32, and its share made of that in its own type: this may be
    more than what the process takes later on."""
    base, own = (part.num_bytes for part in worker.parts[:2])
    whole = FLOAT_BYTES * model.num_weights
    loading = base + whole + (own if own < whole else 0)
    here = sum(part.num_bytes for part in worker.parts if part.device == "cpu")
    worker.add("more while it is loaded", loading - here)
