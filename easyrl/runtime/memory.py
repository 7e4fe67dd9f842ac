"""Estimate the memory of a run's processes before it starts, from the model's config alone.

    train worker      its share of weights, gradients, AdamW's moments and other policies; a micro-
                      batch; on the CPU also the copy that a checkpoint is written from
    rollout worker    weights, KV cache, a step's tensors
    controller        the ring, and the reward processes

The estimate assumes the largest micro-batch (`train.max_tokens_per_micro_batch`) and prompts and
completions of full length. A process on the CPU includes Python and torch (BASE_BYTES); contexts of
accelerators are not counted. Parts that are certain (weights, optimizer, KV cache, ring) refuse a
run that cannot fit (`check_memory`); the whole estimate only warns (`memory_warnings`).

What a micro-batch takes (`micro_batch_bytes`). A decoder layer of the usual kind (Qwen, Llama,
Mistral: a normed attention and a normed gated MLP, each added to the residual stream) keeps for its
backward pass, per token:

    stream    its input H, and again H between attention and MLP      (inputs of the two norms)
              each of them normed: 2 H                                (input of the projections)
    attention queries and keys before their norm  (Hq + Hkv) D
              queries and keys after it, and the values: Hq D + 2 Hkv D
              its output: Hq D                                        (input of the projection back)
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

import contextlib
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from easyrl import devices
from easyrl.channels import ALONE_BYTES, BUCKET_BYTES, NUM_BUCKETS
from easyrl.channels.memory import available_memory_bytes
from easyrl.config import Config, ConfigError
from easyrl.engines import MAX_PREFILL_TOKENS
from easyrl.model import CHUNK_BYTES
from easyrl.model.checkpoint_files import FILE_BYTES
from easyrl.model.files import DTYPE_BYTES, FLOAT_BYTES, PACKED_LAYERS, ModelFiles
from easyrl.rewards.loading import reward_specs
from easyrl.runtime.placement import Placement

MIB = 2**20
BASE_BYTES = {"train": 375 * MIB, "rollout": 375 * MIB, "controller": 270 * MIB, "reward": 8 * MIB}
"""A CPU process without weights: Python, torch, the model's class. Measured on x86 Linux with
torch 2.13 for the CPU and transformers 5.23."""
HEAP_HOLES = 1.6
"""On the CPU a trainer keeps freed memory (`processes`), and glibc cannot reuse a hole for a block
of the same size. So transient tensors take this many times their size in addition. Measured: 1.3 to
1.8 with models of 13, 42 and 92 million weights."""
CHUNKS_FORWARD, CHUNKS_BACKWARD = 3, 2
"""Tensors of a logit chunk's size that exist at once."""
SAMPLE_BYTES, TRUNCATION_BYTES = 16, 32
"""Per logit while a token is drawn: logit, log-probability, float64 probability; with top-k or
top-p also the sorted ones. Measured, like the next two."""
MATH_BYTES = 40 * MIB
"""Imports of the `math` reward: math-verify and sympy."""
REWARD_BYTES = 36 * MIB
"""A reward process."""
COPIES_TO_SAVE = 3
"""A checkpoint holds weights and AdamW's two moments."""
LABEL_WIDTH, SIZE_WIDTH = 25, 12
"""Table columns: a line fits a terminal of 40 columns behind a comment sign."""
NUM_NAMED = 3
"""Parts that a warning names."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The sizes of a model that memory follows from."""

    num_layers: int
    width: int
    mlp_width: int
    """MLP width of the widest layer: all experts together that process one token."""
    num_heads: int
    num_key_value_heads: int
    head_size: int
    vocabulary_size: int
    is_tied: bool
    """Whether embedding and head share one weight."""
    is_batched: bool
    """Whether an engine can process several groups at once (else `engines.generate` runs one)."""
    num_weights: int = 0
    num_trained: int | None = None
    """Elements of LoRA's adapters; None: all weights are trained."""

    @property
    def head_weights(self) -> int:
        """Elements of the head, and of the embedding."""
        return self.vocabulary_size * self.width

    @property
    def layer_matrices(self) -> tuple[int, ...]:
        """Elements of each matrix of a layer, as far as one token uses them."""
        query, key = (
            self.width * self.head_size * heads
            for heads in (self.num_heads, self.num_key_value_heads)
        )
        return query, key, key, query, *[self.width * self.mlp_width] * 3

    @property
    def outer_weights(self) -> int:
        """Elements outside of the layers."""
        return self.head_weights * (1 if self.is_tied else 2) + self.width

    @property
    def layer_weights(self) -> float:
        """Elements of one layer, on average."""
        return (self.num_weights - self.outer_weights) / self.num_layers


def model_size(
    config: Any, num_weights: int = 0, num_trained: int | None = None
) -> ModelSize | None:
    """Read the sizes from a `config.json`, or from transformers' configuration, which has standard
    names for all. Returns None if they are missing."""
    if isinstance(config, Mapping):
        config = config.get("text_config") or config
        get = config.get
    else:
        config = config.get_text_config()

        def get(name: str) -> Any:
            return getattr(config, name, None)

    layers, width, heads, vocabulary = (
        get(name)
        for name in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
    )
    if not (layers and width and heads and vocabulary):
        return None
    mlp_width = get("intermediate_size") or 4 * width
    if isinstance(mlp_width, Sequence):  # one per layer (Gemma 3n)
        mlp_width = max(mlp_width)
    if get("moe_intermediate_size"):
        mlp_width = get("moe_intermediate_size") * (get("num_experts_per_tok") or 1)
        mlp_width += get("shared_expert_intermediate_size") or 0
    return ModelSize(
        num_layers=int(layers),
        width=int(width),
        mlp_width=int(mlp_width),
        num_heads=int(heads),
        num_key_value_heads=int(get("num_key_value_heads") or heads),
        head_size=int(get("head_dim") or width // heads),
        vocabulary_size=int(vocabulary),
        is_tied=bool(get("tie_word_embeddings")),
        is_batched=set(get("layer_types") or ()) <= set(PACKED_LAYERS),
        num_weights=num_weights,
        num_trained=num_trained,
    )


@dataclass(frozen=True, slots=True)
class Part:
    what: str
    num_bytes: int
    device: str
    """`cpu`, or an accelerator by the user's number, as in `cuda:3`."""
    remedy: str
    """The keys that make it smaller."""
    is_certain: bool
    """Whether the run cannot do without it."""


@dataclass(slots=True)
class ProcessMemory:
    name: str
    device: str
    parts: list[Part] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    def add(
        self,
        what: str,
        num_bytes: float,
        remedy: str = "",
        *,
        device: str | None = None,
        is_certain: bool = False,
    ) -> None:
        if num_bytes > 0:
            device = device or self.device
            self.parts.append(Part(what, int(num_bytes), device, remedy, is_certain))

    def add_loading(self, num_bytes: float) -> None:
        """Add what loading takes on the CPU beyond what the process takes there later."""
        base = self.parts[0].num_bytes if self.device == "cpu" else 0
        later = sum(part.num_bytes for part in self.parts if part.device == "cpu")
        self.add("more while it is loaded", base + num_bytes - later, device="cpu")


# -- the estimate of each process -----------------------------------------------------------------


def estimate_memory(
    config: Config, placement: Placement, model: ModelSize, *, ring_bytes: int
) -> list[ProcessMemory]:
    """Estimate every process, rollout workers first. For vLLM only its weights and KV cache are
    counted, not what its own processes take besides."""
    num_rollout, num_train = placement.num_rollout_workers, placement.train.count
    controller = ProcessMemory("controller, rewards", "cpu")
    controller.add("Python and torch", BASE_BYTES["controller"])
    num_rewards = num_rollout * config.reward.num_workers
    per_process = REWARD_BYTES
    with contextlib.suppress(ConfigError):  # no reward is given: refused elsewhere
        per_process += MATH_BYTES * ("math" in reward_specs(config))
    per_worker = BASE_BYTES["reward"] + config.reward.num_workers * per_process
    controller.add(
        f"{num_rewards} reward process(es)",
        num_rollout * per_worker,
        f"reward.num_workers={config.reward.num_workers}",
    )
    slots = f"rollout.ring_slots={config.ring_slots}"
    controller.add("ring buffer", ring_bytes, slots, is_certain=True)
    return [
        *(_rollout_worker(config, placement, model, number) for number in range(num_rollout)),
        *(_train_worker(config, placement, model, number) for number in range(num_train)),
        controller,
    ]


def _rollout_worker(
    config: Config, placement: Placement, model: ModelSize, number: int
) -> ProcessMemory:
    device = placement.device_name("rollout", number)
    worker = ProcessMemory(f"rollout-{number}", device)
    rollout, dtype, dtype_bytes = (
        config.rollout,
        config.model.dtype,
        DTYPE_BYTES[config.model.dtype],
    )
    if device == "cpu":
        worker.add("Python and torch", BASE_BYTES["rollout"])
    weights = dtype_bytes * model.num_weights
    keys = f"model.path, model.dtype, --infer-devices {placement.infer}"
    worker.add(f"weights ({dtype})", weights, keys, is_certain=True)
    num_groups = placement.max_concurrent_groups if model.is_batched else 1
    rows = num_groups * rollout.num_generations
    per_token = 2 * model.num_layers * model.num_key_value_heads * model.head_size * dtype_bytes
    worker.add(
        "KV cache",
        rows * config.max_sequence_length * per_token,
        f"rollout.max_concurrent_groups={placement.max_concurrent_groups}, "
        f"rollout.num_generations={rollout.num_generations}, "
        f"rollout.max_completion_length={rollout.max_completion_length}, "
        f"data.max_prompt_length={config.data.max_prompt_length}",
        is_certain=True,
    )
    is_embedded = placement.engine.name == "embedded"
    _add_buckets(worker, config, model, is_in_place=device == "cpu" and is_embedded)
    num_drawn = rows + max(1, rows // 4)
    prefill = min(MAX_PREFILL_TOKENS, config.data.max_prompt_length * rows)
    truncates = rollout.top_k > 0 or rollout.top_p < 1.0
    worker.add(
        "engine's step",
        num_drawn * model.vocabulary_size * (SAMPLE_BYTES + TRUNCATION_BYTES * truncates)
        + prefill * dtype_bytes * (2 * model.width + 3 * model.mlp_width),
        f"rollout.max_concurrent_groups={placement.max_concurrent_groups}",
    )
    if is_embedded:
        # Checked in float32, a layer at a time (`Policy.load`).
        checked = 0.0 if dtype == "float32" else model.outer_weights + model.layer_weights
        worker.add_loading(weights + FLOAT_BYTES * checked)
    return worker


def _train_worker(
    config: Config, placement: Placement, model: ModelSize, number: int
) -> ProcessMemory:
    device, ranks = placement.device_name("train", number), placement.train.count
    worker = ProcessMemory(f"train-{number}", device)
    train, dtype_bytes = config.train, DTYPE_BYTES[config.model.dtype]
    if device == "cpu":
        worker.add("Python and torch", BASE_BYTES["train"])
    whole = FLOAT_BYTES * model.num_weights
    weights = whole / ranks
    trained = weights if model.num_trained is None else FLOAT_BYTES * model.num_trained / ranks
    home = "cpu" if "optimizer" in train.offload else device
    offload = "train.offload=[optimizer]"
    beta, updates = config.algorithm.beta, train.updates_per_iteration

    def add(what: str, num_bytes: float, remedy: str, kept_on: str) -> None:
        if model.num_trained is not None and not what.startswith("weights"):
            remedy = f"model.lora.rank={config.model.lora.rank}, {remedy}"
        worker.add(what, num_bytes, remedy, device=kept_on, is_certain=True)

    add("weights (float32)", weights, f"model.path, {offload}, --train-devices", home)
    if model.num_trained is not None:
        add("LoRA adapters", trained, offload, home)
    add("gradients (float32)", trained, offload, home)
    add("AdamW's two moments", 2 * trained, offload, home)
    for name, is_held, key in (
        ("reference", beta > 0.0 and model.num_trained is None, f"algorithm.beta={beta:g}"),
        ("old", updates > 1, f"train.updates_per_iteration={updates}"),
    ):
        kept_on = "cpu" if name in train.offload else device
        add(f"{name} policy", is_held * trained, f"{key}, train.offload=[{name}]", kept_on)
    saved, key = COPIES_TO_SAVE * trained * (train.keep_checkpoints > 0), "train.keep_checkpoints=0"
    worker.add("checkpoint's copy", saved, key, device="cpu", is_certain=device == "cpu")
    worker.add("checkpoint's file", min(saved, FILE_BYTES), key, device="cpu")
    is_cast = config.model.dtype != "float32"
    _add_buckets(worker, config, model, is_in_place=device == "cpu" and not is_cast)
    if ranks > 1 or is_cast or ("optimizer" in train.offload and device != "cpu"):
        # Of a sharded model the outer weights, the layer that computes and the next are whole, and
        # the largest gradient, which is summed in float32.
        outer, layer = model.outer_weights, model.layer_weights
        worker.add("layers gathered", dtype_bytes * (outer + 2 * layer))
        worker.add("gradient being summed", (dtype_bytes + FLOAT_BYTES) * max(outer, layer))
    num_tokens, num_targets = _micro_batch_tokens(config, ranks)
    kept, transient = micro_batch_bytes(
        model,
        num_tokens,
        num_targets,
        dtype_bytes=dtype_bytes,
        on_cpu=device == "cpu",
        checkpointing=train.activation_checkpointing,
    )
    keys = f"train.max_tokens_per_micro_batch={train.max_tokens_per_micro_batch}"
    if not train.activation_checkpointing:
        keys += ", train.activation_checkpointing=true"
    worker.add("activations", kept, keys)
    worker.add("transient tensors", transient)
    if device == "cpu":
        worker.add("holes between tensors", HEAP_HOLES * transient)
    worker.add_loading(whole + (weights if ranks > 1 and device == "cpu" else 0))
    return worker


def _add_buckets(
    worker: ProcessMemory, config: Config, model: ModelSize, *, is_in_place: bool
) -> None:
    """`is_in_place`: large weights are sent from and received into their own memory. (On the CPU a
    bucket that is not written to takes no memory.)"""
    sent = float(model.num_weights)
    if is_in_place:
        matrices = (*model.layer_matrices * model.num_layers, model.head_weights)
        sent = sum(n for n in matrices if n * DTYPE_BYTES[config.model.dtype] < ALONE_BYTES)
    num_bytes = min(NUM_BUCKETS * BUCKET_BYTES, DTYPE_BYTES[config.model.dtype] * sent)
    worker.add("buckets of weights", num_bytes)


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
    head = dtype_bytes * model.head_weights if model.num_trained is None else 0
    stream = dtype_bytes * (model.width + 2 * model.mlp_width) + (layer if checkpointing else 0)
    copies = chunk + head if on_cpu and copies_factors else 0
    transient = max(
        CHUNKS_FORWARD * chunk,
        CHUNKS_BACKWARD * chunk + 2 * head + copies,
        num_tokens * stream + (head if model.is_tied else 0),
    )
    return kept, transient


# -- what is printed ------------------------------------------------------------------------------


def bytes_by_device(processes: Iterable[ProcessMemory]) -> Mapping[str, int]:
    totals: dict[str, int] = {}
    for part in (part for process in processes for part in process.parts):
        totals[part.device] = totals.get(part.device, 0) + part.num_bytes
    return totals


def memory_of_devices(placement: Placement) -> dict[str, int]:
    """Return the bytes of each of the run's devices: on the CPU what this machine and its cgroup
    have left, of an accelerator all of it. The devices of one engine count as one."""
    sizes = {"cpu": available_memory_bytes()}
    for role in ("rollout", "train"):
        for number in range(placement.num_workers(role)):
            name = placement.device_name(role, number)
            if name not in sizes:
                indices = placement.indices_of(role, number)
                kind = placement.accelerator
                sizes[name] = sum(devices.total_memory_bytes(kind, index) for index in indices)
    return sizes


def memory_table(processes: Sequence[ProcessMemory], sizes: Mapping[str, int]) -> str:
    """List every process with its parts, equal processes once; then every device."""

    def line(label: str, num_bytes: int) -> str:
        return f"{label:<{LABEL_WIDTH}}{f'{num_bytes / MIB:,.0f} MiB':>{SIZE_WIDTH}}"

    def signature(process: ProcessMemory) -> tuple[object, ...]:
        kind = process.name.rpartition("-")[0] or process.name
        return kind, *((part.what, part.num_bytes, part.device == "cpu") for part in process.parts)

    lines = ["memory at the most, by estimate:"]
    for _, group in groupby(processes, key=signature):
        equal = list(group)
        first, last = equal[0], equal[-1].name.rpartition("-")[2]
        name = first.name if len(equal) == 1 else f"{first.name} to {last}, each"
        lines.append(line(name, first.num_bytes))
        for part in first.parts:
            where = "" if part.device == first.device else f", {part.device}"
            lines.append(line(f"  {part.what}{where}", part.num_bytes))
    for device, num_bytes in bytes_by_device(processes).items():
        lines.append(line(f"together on {device}", num_bytes))
        lines.append(line("  available" if device == "cpu" else "  of its memory", sizes[device]))
    return "\n".join(lines)


def memory_warnings(
    processes: Sequence[ProcessMemory], sizes: Mapping[str, int], placement: Placement
) -> list[str]:
    """Return a line for each device, or part of a shared one, that the run may not fit."""
    return [
        f"warning: by estimate this run takes up to {as_size(_total(parts))} of {device} memory, "
        f"but {owner.format(as_size(size))}, so it may run out of memory; the largest parts: "
        + "; ".join(_largest(parts)[:NUM_NAMED])
        for device, owner, size, parts in _budgets(processes, sizes, placement)
        if _total(parts) > size
    ]


def check_memory(
    processes: Sequence[ProcessMemory], sizes: Mapping[str, int], placement: Placement
) -> None:
    """Raise ConfigError if the certain parts alone do not fit the CPU's memory, or a group's part
    of a shared device."""
    for device, owner, size, parts in _budgets(processes, sizes, placement):
        certain = [part for part in parts if part.is_certain]
        if _total(certain) <= size or (device != "cpu" and not placement.shares_device):
            continue
        raise ConfigError(
            f"this run needs at least {as_size(_total(certain))} of {device} memory, but "
            f"{owner.format(as_size(size))}. Its parts, and the keys that make them smaller:\n"
            + "\n".join(_largest(certain))
        )


def _budgets(
    processes: Sequence[ProcessMemory], sizes: Mapping[str, int], placement: Placement
) -> Iterable[tuple[str, str, int, list[Part]]]:
    """Yield each device, whose memory it is, its bytes, and the parts that must fit. A device that
    both groups share counts once for each group."""
    for device, size in sizes.items():
        owner = (
            "this machine and its cgroup have {} left" if device == "cpu" else f"{device} has {{}}"
        )
        groups = [(owner, size, list(processes))]
        if device != "cpu" and placement.shares_device:
            groups = []
            for worker in processes[:2]:
                fraction = placement.memory_fraction(worker.name.partition("-")[0])
                assert fraction is not None
                owner = f"rollout.memory_fraction gives {worker.name} {{}}"
                groups.append((owner, int(fraction * size), [worker]))
        for owner, num_bytes, members in groups:
            parts = [part for each in members for part in each.parts if part.device == device]
            yield device, owner, num_bytes, parts


def _total(parts: Iterable[Part]) -> int:
    return sum(part.num_bytes for part in parts)


def _largest(parts: Sequence[Part]) -> list[str]:
    """The parts, summed over the processes by the keys that make them smaller, largest first."""
    by_keys: dict[str, list[Part]] = {}
    for part in parts:
        if part.remedy:
            by_keys.setdefault(part.remedy, []).append(part)
    largest = sorted(by_keys.items(), key=lambda item: -_total(item[1]))
    return [f"{those[0].what} {as_size(_total(those))} (see {keys})" for keys, those in largest]


def check_disk(folder: Path, model: ModelFiles, num_checkpoints: int) -> None:
    """Raise ConfigError if the final model and `num_checkpoints`, with the one that is being
    written, do not fit the disk of `folder`."""
    existing = next(parent for parent in folder.absolute().parents if parent.exists())
    weights, free = FLOAT_BYTES * (model.num_weights or 0), shutil.disk_usage(existing).free
    saved = COPIES_TO_SAVE * weights
    if weights > free:
        raise ConfigError(
            f"output.dir (--output): the final model takes {as_size(weights)}, but the disk of "
            f"'{folder}' has {as_size(free)} left; use a folder on another disk"
        )
    if num_checkpoints and weights + (num_checkpoints + 1) * saved > free:
        raise ConfigError(
            f"train.keep_checkpoints: {num_checkpoints}, and one more while it is written, take "
            f"{as_size(saved)} each, and the final model {as_size(weights)}, but the disk of "
            f"'{folder}' has {as_size(free)} left; keep fewer (0: none, and no --resume), or use "
            "an output.dir (--output) on another disk"
        )


def as_size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**28 else f"{num_bytes / MIB:.1f} MiB"
