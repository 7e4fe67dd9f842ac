"""Estimate the memory of a run's processes before it starts, from the model's config alone.

    train worker      its share of weights, gradients, AdamW's moments and other policies; a micro-
                      batch; on the CPU also the copy that a checkpoint is written from
    rollout worker    weights, KV cache, a step's tensors
    controller        the ring, and the reward processes

The estimate assumes the largest micro-batch (`train.max_tokens_per_micro_batch`) and prompts and
completions of full length. A process on the CPU includes Python and torch; contexts of accelerators
are not counted. A run whose certain parts (weights, optimizer, KV cache, ring) do not fit is
refused; the whole estimate only warns.

For a micro-batch (`micro_batch_bytes`), a decoder layer with normed attention and normed gated MLP
keeps for its backward pass, per token:

    stream    its input H, and again H between attention and MLP; each of them normed: 2 H
    attention queries and keys before their norm  (Hq + Hkv) D
              queries and keys after it, and the values: Hq D + 2 Hkv D
              its output: Hq D
    MLP       gate, silu(gate), up, and their product: 4 I

    4 H + (3 Hq + 3 Hkv) D + 4 I elements in the type of the computation

and in float32 one number for each normed row (2 + Hq + Hkv) and a log-sum-exp for each query head
(Hq). Scores are never kept (`shared_prompt`), nor copies of a prompt's keys. A norm that is not one
function (`cpu_layers`: float32 on the CPU) also keeps its normed input, in float32 if the
computation is narrower. With activation checkpointing only the input H of each layer is
kept, and one layer's activations exist during its backward pass.

On top of that comes the largest of three moments that never coincide:

    logits forward    three times a chunk's logits (`logprobs`)
    logits backward   twice a chunk's, and twice the head's weight (the sum of the chunks' gradients
                      and the one being added); on the CPU a copy of each in oneDNN's layout
    first MLP back    the gradient of the stream (H) and of the MLP's halves (2 I); if embedding and
                      head are tied, the head's gradient still waits for the embedding's part

Shapes: H the model's width, I the MLP's, Hq query and Hkv key heads of size D. Tests compare the
formula with measured allocations, and the estimate with measured peaks, to 15 %.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from easyrl import devices
from easyrl.channels import BUCKET_BYTES, NUM_BUCKETS
from easyrl.channels.memory import available_memory_bytes
from easyrl.config import Config, ConfigError
from easyrl.engines import MAX_PREFILL_TOKENS
from easyrl.model import CHUNK_BYTES
from easyrl.model.checkpoint_files import FILE_BYTES
from easyrl.model.files import DTYPE_BYTES, FLOAT_BYTES, PACKED_LAYERS, ModelFiles
from easyrl.rewards.loading import reward_specs
from easyrl.runtime.placement import Placement, device_names

MIB = 2**20
WORKER_BYTES, CONTROLLER_BYTES = 375 * MIB, 270 * MIB
"""A CPU process without weights: Python, torch, the model's class. Measured on x86 Linux with
torch 2.13 for the CPU and transformers 5.23, like the next ones."""
REWARD_BYTES, MATH_BYTES = 36 * MIB, 40 * MIB
"""A reward process, and its imports of math-verify and sympy for the `math` reward."""
HEAP_HOLES = 1.6
"""On the CPU a trainer keeps freed memory (`processes`), and glibc cannot reuse a hole for a block
of the same size. So transient tensors take this many times their size in addition. Measured: 1.3 to
1.8 with models of 13, 42 and 92 million weights."""
CHUNKS_FORWARD, CHUNKS_BACKWARD = 3, 2
"""Tensors of a logit chunk's size that exist at once."""
SAMPLE_BYTES, TRUNCATION_BYTES = 16, 32
"""Per logit while a token is drawn: logit, log-probability, float64 probability; with top-k or
top-p also the sorted ones. Measured."""
VLLM_FRACTION = 0.9
"""Part of its own accelerator that vLLM takes where rollout.memory_fraction is null."""
COPIES_TO_SAVE = 3
"""A checkpoint holds weights and AdamW's two moments."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The sizes of a model that memory follows from."""

    num_layers: int
    width: int
    mlp_width: int
    """Of the widest layer: all experts together that process one token."""
    num_heads: int
    num_key_value_heads: int
    head_size: int
    vocabulary_size: int
    is_tied: bool
    """Whether embedding and head share one weight."""
    is_batched: bool
    """Whether an engine can process several groups at once (else `engines.generate` runs one)."""
    num_weights: int
    outer_weights: int
    """Elements outside of the layers."""
    layer_weights: float
    """Elements of one layer, on average."""
    num_trained: int | None
    """Elements of LoRA's adapters; None: all weights are trained."""


def model_size(
    config: Any, num_weights: int = 0, num_trained: int | None = None
) -> ModelSize | None:
    """Read the sizes from a `config.json`, or from transformers' configuration, which has standard
    names for all. Returns None if they are missing."""
    if isinstance(config, Mapping):
        config = SimpleNamespace(**(config.get("text_config") or config))
    else:
        config = config.get_text_config()

    def get(name: str, default: Any = None) -> Any:
        return getattr(config, name, None) or default

    layers, width = get("num_hidden_layers"), get("hidden_size")
    heads, vocabulary = get("num_attention_heads"), get("vocab_size")
    if not (layers and width and heads and vocabulary):
        return None
    mlp_width = get("intermediate_size", 4 * width)
    if get("moe_intermediate_size"):
        mlp_width = get("moe_intermediate_size") * get("num_experts_per_tok", 1)
        mlp_width += get("shared_expert_intermediate_size", 0)
    is_tied = get("tie_word_embeddings", False)
    outer_weights = vocabulary * width * (1 if is_tied else 2) + width
    return ModelSize(
        num_layers=layers,
        width=width,
        mlp_width=max(mlp_width) if isinstance(mlp_width, Sequence) else mlp_width,  # Gemma 3n
        num_heads=heads,
        num_key_value_heads=get("num_key_value_heads", heads),
        head_size=get("head_dim", width // heads),
        vocabulary_size=vocabulary,
        is_tied=is_tied,
        is_batched=set(get("layer_types", ())) <= set(PACKED_LAYERS),
        num_weights=num_weights,
        outer_weights=outer_weights,
        layer_weights=(num_weights - outer_weights) / layers,
        num_trained=num_trained,
    )


@dataclass(frozen=True, slots=True)
class Part:
    what: str
    num_bytes: int
    device: str
    """`cpu`, or an accelerator by the user's number, as in `cuda:3`."""
    keys: str
    """The keys that make it smaller."""
    is_certain: bool
    """Whether the run cannot do without it."""


@dataclass(slots=True)
class ProcessMemory:
    name: str
    device: str
    fraction: float = 1.0
    """Part of the memory of its accelerator that it may take."""
    parts: list[Part] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return _total(self.parts)

    def add(
        self,
        what: str,
        num_bytes: float,
        keys: str = "",
        *,
        device: str = "",
        certain: bool = False,
    ) -> None:
        if num_bytes > 0:
            self.parts.append(Part(what, int(num_bytes), device or self.device, keys, certain))

    def add_loading(self, num_bytes: float) -> None:
        """Add what loading takes on the CPU beyond what the process takes there later."""
        base = self.parts[0].num_bytes if self.device == "cpu" else 0
        later = _total(part for part in self.parts if part.device == "cpu")
        self.add("more while it is loaded", base + num_bytes - later, device="cpu")


def _total(parts: Iterable[Part]) -> int:
    return sum(part.num_bytes for part in parts)


# -- the estimate of each process -----------------------------------------------------------------


def estimate_memory(
    config: Config, placement: Placement, model: ModelSize, *, ring_bytes: int
) -> list[ProcessMemory]:
    """Estimate every process, rollout workers first. For vLLM only its weights and KV cache are
    counted, not what its own processes take besides."""
    num_rollout, num_train = placement.num_rollout_workers, placement.train.count
    controller = ProcessMemory("controller, rewards", "cpu")
    controller.add("Python and torch", CONTROLLER_BYTES)
    num_rewards = num_rollout * config.reward.num_workers
    controller.add(
        f"{num_rewards} reward process(es)",
        num_rewards * (REWARD_BYTES + MATH_BYTES * ("math" in reward_specs(config))),
        f"reward.num_workers={config.reward.num_workers}",
    )
    slots = f"rollout.ring_slots={config.ring_slots}"
    controller.add("ring buffer", ring_bytes, slots, certain=True)
    return [
        *(_rollout_worker(config, placement, model, number) for number in range(num_rollout)),
        *(_train_worker(config, placement, model, number) for number in range(num_train)),
        controller,
    ]


def _rollout_worker(
    config: Config, placement: Placement, model: ModelSize, number: int
) -> ProcessMemory:
    worker = _worker(placement, "rollout", number)
    rollout, dtype, on_cpu = config.rollout, config.model.dtype, worker.device == "cpu"
    dtype_bytes = DTYPE_BYTES[dtype]
    weights = dtype_bytes * model.num_weights
    keys = "model.path, model.dtype, rollout.memory_fraction, --infer-devices"
    worker.add(f"weights ({dtype})", weights, keys, certain=True)
    num_groups = placement.max_concurrent_groups if model.is_batched else 1
    rows = num_groups * rollout.num_generations
    is_embedded = placement.engine.name == "embedded"
    is_paged = not is_embedded and not on_cpu  # as many sequences at a time as fit
    if is_paged and not placement.shares_device:
        worker.fraction = rollout.memory_fraction or VLLM_FRACTION
    cache = 2 * model.num_layers * model.num_key_value_heads * model.head_size * dtype_bytes
    in_flight = f"rollout.max_concurrent_groups={placement.max_concurrent_groups}"
    worker.add(
        "KV cache, one sequence" if is_paged else "KV cache",
        (1 if is_paged else rows) * config.max_sequence_length * cache,
        f"{in_flight}, rollout.num_generations, rollout.max_completion_length, "
        "data.max_prompt_length",
        certain=True,
    )
    if not (on_cpu and is_embedded):  # else weights are received into their own memory
        worker.add("buckets of weights", min(NUM_BUCKETS * BUCKET_BYTES, weights))
    num_drawn = rows + max(1, rows // 4)
    prefill = min(MAX_PREFILL_TOKENS, config.data.max_prompt_length * rows)
    truncates = rollout.top_k > 0 or rollout.top_p < 1.0
    worker.add(
        "engine's step",
        num_drawn * model.vocabulary_size * (SAMPLE_BYTES + TRUNCATION_BYTES * truncates)
        + prefill * dtype_bytes * (2 * model.width + 3 * model.mlp_width),
        in_flight,
    )
    if is_embedded:
        # Checked in float32, a layer at a time (`Policy.load`).
        checked = 0.0 if dtype == "float32" else model.outer_weights + model.layer_weights
        worker.add_loading(weights + FLOAT_BYTES * checked)
    return worker


def _train_worker(
    config: Config, placement: Placement, model: ModelSize, number: int
) -> ProcessMemory:
    worker = _worker(placement, "train", number)
    device, on_cpu, ranks = worker.device, worker.device == "cpu", placement.train.count
    train, dtype_bytes = config.train, DTYPE_BYTES[config.model.dtype]
    is_lora, is_cast = model.num_trained is not None, config.model.dtype != "float32"
    whole = FLOAT_BYTES * model.num_weights
    weights = whole / ranks
    trained = weights if model.num_trained is None else FLOAT_BYTES * model.num_trained / ranks
    has_reference = config.algorithm.beta > 0.0 and not is_lora
    has_old = train.updates_per_iteration > 1
    for what, num_bytes, key, group in (
        ("weights (float32)", weights, "model.path, --train-devices", "optimizer"),
        ("LoRA adapters", trained * is_lora, "model.lora.rank", "optimizer"),
        ("gradients (float32)", trained, "model.lora.rank", "optimizer"),
        ("AdamW's two moments", 2 * trained, "model.lora.rank", "optimizer"),
        ("reference policy", trained * has_reference, "algorithm.beta", "reference"),
        ("old policy", trained * has_old, "train.updates_per_iteration", "old"),
    ):
        kept_on = "cpu" if group in train.offload else device
        worker.add(what, num_bytes, f"{key}, train.offload=[{group}]", device=kept_on, certain=True)
    saved, key = COPIES_TO_SAVE * trained * (train.keep_checkpoints > 0), "train.keep_checkpoints=0"
    worker.add("checkpoint's copy", saved, key, device="cpu", certain=on_cpu)
    worker.add("checkpoint's file", min(saved, FILE_BYTES), key, device="cpu")
    if is_cast or not on_cpu:  # else weights are sent from their own memory
        sent = dtype_bytes * model.num_weights
        worker.add("buckets of weights", min(NUM_BUCKETS * BUCKET_BYTES, sent))
    if ranks > 1 or is_cast or ("optimizer" in train.offload and not on_cpu):
        # Of a sharded model the outer weights, the layer that computes and the next are whole, and
        # the largest gradient, which is summed in float32.
        outer, layer = model.outer_weights, model.layer_weights
        gradient = (dtype_bytes + FLOAT_BYTES) * max(outer, layer)
        worker.add("layers gathered", dtype_bytes * (outer + 2 * layer) + gradient)
    kept, transient = micro_batch_bytes(
        model,
        *_micro_batch_tokens(config, ranks),
        dtype_bytes=dtype_bytes,
        on_cpu=on_cpu,
        checkpointing=train.activation_checkpointing,
    )
    keys = f"train.max_tokens_per_micro_batch={train.max_tokens_per_micro_batch}"
    if not train.activation_checkpointing:
        keys += ", train.activation_checkpointing=true"
    worker.add("activations", kept, keys)
    worker.add("transient tensors", transient)
    worker.add("holes between tensors", HEAP_HOLES * transient * on_cpu)
    worker.add_loading(whole + (weights if ranks > 1 and on_cpu else 0))
    return worker


def _worker(placement: Placement, role: str, number: int) -> ProcessMemory:
    device, fraction = placement.device_name(role, number), placement.memory_fraction(role)
    worker = ProcessMemory(f"{role}-{number}", device, 1.0 if fraction is None else fraction)
    worker.add("Python and torch", WORKER_BYTES * (device == "cpu"))
    return worker


def _micro_batch_tokens(config: Config, ranks: int) -> tuple[int, int]:
    """Return the tokens of the largest micro-batch, and how many of them are completion tokens, if
    all prompts and completions have full length."""
    rollout, train = config.rollout, config.train
    prompt, completion = config.data.max_prompt_length, rollout.max_completion_length
    num_prompts = rollout.num_generations if config.model.attention == "repeated" else 1
    per_group = num_prompts * prompt + rollout.num_generations * completion
    per_rank = -(-train.prompts_per_iteration // train.updates_per_iteration * per_group // ranks)
    num_tokens = min(train.max_tokens_per_micro_batch, max(per_rank, prompt + completion))
    return num_tokens, -(-num_tokens * rollout.num_generations * completion // per_group)


def micro_batch_bytes(
    model: ModelSize,
    num_tokens: int,
    num_targets: int,
    *,
    dtype_bytes: int,
    on_cpu: bool,
    checkpointing: bool,
    copies_factors: bool = True,
) -> tuple[int, int]:
    """Return the bytes that all layers keep of a packed row when backward begins, and those of the
    largest transient tensors. See the module's docstring for the formula.

    `num_targets`: tokens whose logits are computed. `copies_factors`: on the CPU, count the copies
    that oneDNN makes inside of a matrix product.
    """
    query, key = model.num_heads * model.head_size, model.num_key_value_heads * model.head_size
    normed = 2 * model.width + query + key
    elements = 4 * model.width + 3 * query + 3 * key + 4 * model.mlp_width
    rows = 2 + 2 * model.num_heads + model.num_key_value_heads
    layer = dtype_bytes * elements + FLOAT_BYTES * rows
    if dtype_bytes < FLOAT_BYTES:
        layer += (FLOAT_BYTES + dtype_bytes) * normed
    elif not on_cpu:
        layer += dtype_bytes * normed
    ends = 2 * dtype_bytes * model.width  # the last norm's input, and the head's
    per_layer = dtype_bytes * model.width if checkpointing else layer
    kept = num_tokens * (model.num_layers * per_layer + ends)

    num_chunks = -(-num_targets * model.vocabulary_size * FLOAT_BYTES // CHUNK_BYTES)
    chunk = -(-num_targets // num_chunks) * model.vocabulary_size * FLOAT_BYTES
    is_lora = model.num_trained is not None
    head = 0 if is_lora else dtype_bytes * model.vocabulary_size * model.width
    stream = dtype_bytes * (model.width + 2 * model.mlp_width) + (layer if checkpointing else 0)
    copies = chunk + head if on_cpu and copies_factors else 0
    transient = max(
        CHUNKS_FORWARD * chunk,
        CHUNKS_BACKWARD * chunk + 2 * head + copies,
        num_tokens * stream + (head if model.is_tied else 0),
    )
    return kept, transient


# -- against what there is -------------------------------------------------------------------------


def bytes_by_device(processes: Iterable[ProcessMemory]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for part in (part for process in processes for part in process.parts):
        totals[part.device] = totals.get(part.device, 0) + part.num_bytes
    return totals


def memory_of_devices(placement: Placement) -> dict[str, int]:
    """Return the bytes of each of the run's devices: on the CPU what this machine and its cgroup
    have left, of an accelerator all of it. The devices of one engine count as one."""
    sizes = {"cpu": available_memory_bytes()}
    for name in device_names(placement).values():
        kind, _, numbers = name.partition(":")
        if name not in sizes:
            indices = map(int, numbers.split(","))
            sizes[name] = sum(devices.total_memory_bytes(kind, index) for index in indices)
    return sizes


def memory_table(processes: Sequence[ProcessMemory], sizes: Mapping[str, int]) -> str:
    """List every process with its parts, equal processes once; then every device. A line fits a
    terminal of 40 columns behind a comment sign."""

    def line(label: str, num_bytes: int) -> str:
        return f"{label:<25}{f'{num_bytes / MIB:,.0f} MiB':>12}"

    def sizes_of(process: ProcessMemory) -> list[tuple[str, int]]:
        return [(part.what, part.num_bytes) for part in process.parts]

    lines = ["memory at the most, by estimate:"]
    for _, (first, *others) in groupby(processes, key=sizes_of):
        last = f" to {others[-1].name.rpartition('-')[2]}, each" if others else ""
        lines.append(line(first.name + last, first.num_bytes))
        for part in first.parts:
            where = "" if part.device == first.device else f", {part.device}"
            lines.append(line(f"  {part.what}{where}", part.num_bytes))
    for device, num_bytes in bytes_by_device(processes).items():
        lines.append(line(f"together on {device}", num_bytes))
        lines.append(line("  available" if device == "cpu" else "  of its memory", sizes[device]))
    return "\n".join(lines)


def check_memory(processes: Sequence[ProcessMemory], sizes: Mapping[str, int]) -> list[str]:
    """Return a warning for each device that the run may not fit. Raises ConfigError if the certain
    parts alone do not fit."""
    warnings = []
    for device, available, size, parts in _budgets(processes, sizes):
        certain = [part for part in parts if part.is_certain]
        if _total(certain) > size:
            raise ConfigError(
                f"this run needs at least {as_size(_total(certain))} of {device} memory, but "
                f"{available} {as_size(size)}. Its parts, and the keys that make them smaller:\n"
                + "\n".join(_largest(certain))
            )
        if _total(parts) > size:
            warnings.append(
                f"warning: by estimate this run takes up to {as_size(_total(parts))} of {device} "
                f"memory, but {available} {as_size(size)}, so it may run out of memory; the "
                f"largest parts: {'; '.join(_largest(parts)[:3])}"
            )
    return warnings


def _budgets(
    processes: Sequence[ProcessMemory], sizes: Mapping[str, int]
) -> Iterator[tuple[str, str, int, list[Part]]]:
    """Yield device, whose memory it is, its bytes, and the parts that must fit: on the CPU those of
    all processes, on an accelerator those of one."""
    on_cpu = [part for each in processes for part in each.parts if part.device == "cpu"]
    yield "cpu", "this machine (or its cgroup) has", sizes["cpu"], on_cpu
    for process in processes:
        device, fraction = process.device, process.fraction
        if device != "cpu":
            parts = [part for part in process.parts if part.device == device]
            given = f"rollout.memory_fraction gives {process.name}"
            available = f"{device} has" if fraction == 1.0 else given
            yield device, available, int(fraction * sizes[device]), parts


def _largest(parts: Sequence[Part]) -> list[str]:
    """The parts, summed over the processes by the keys that make them smaller, largest first."""
    by_keys: dict[str, list[Part]] = {}
    for part in parts:
        if part.keys:
            by_keys.setdefault(part.keys, []).append(part)
    largest = sorted(by_keys.items(), key=lambda item: -_total(item[1]))
    return [f"{those[0].what} {as_size(_total(those))} (see {keys})" for keys, those in largest]


def check_disk(folder: Path, model: ModelFiles, num_checkpoints: int) -> None:
    """Raise ConfigError if the final model and `num_checkpoints`, with the one that is being
    written, do not fit the disk of `folder`."""
    existing = next(parent for parent in folder.absolute().parents if parent.exists())
    weights, free = FLOAT_BYTES * (model.num_weights or 0), shutil.disk_usage(existing).free
    saved = COPIES_TO_SAVE * weights * (num_checkpoints + 1 if num_checkpoints else 0)
    if weights + saved > free:
        raise ConfigError(
            f"output.dir (--output): the final model takes {as_size(weights)} and the checkpoints "
            f"{as_size(saved)} (train.keep_checkpoints), but the disk of '{folder}' has "
            f"{as_size(free)} left; keep fewer (0: none, and no --resume), or use another disk"
        )


def as_size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB"
