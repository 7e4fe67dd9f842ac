"""Estimate the memory of a run's processes before it starts, from the model's config and the
headers of its weight files.

The estimate assumes the largest micro-batch (`train.max_tokens_per_micro_batch`) and prompts and
completions of full length. A process includes Python and torch, on an accelerator the driver's
context. A run whose certain parts (weights, optimizer, KV cache, ring) do not fit is refused; the
whole estimate only warns. Tests compare the formula of a micro-batch with measured
allocations, and the estimate with measured peaks, to 15 %.
"""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, product
from pathlib import Path
from typing import Any

from easyrl import devices
from easyrl.channels import BUCKET_BYTES, NUM_BUCKETS
from easyrl.channels.memory import available_memory_bytes
from easyrl.config import Config, ConfigError, change_config
from easyrl.engines import MAX_PREFILL_TOKENS, padded, row_cells
from easyrl.engines.vllm.platforms import STEP_FRACTION
from easyrl.model import CHUNK_BYTES, CPU_CHUNK_BYTES
from easyrl.model.checkpoint_files import FILE_BYTES
from easyrl.model.files import DTYPE_BYTES, FLOAT_BYTES, PACKED_LAYERS, ModelFiles
from easyrl.runtime.placement import Placement, device_names, ring_layout

MIB, GIB = 2**20, 2**30
WORKER_BYTES, CONTROLLER_BYTES, REWARD_BYTES = 375 * MIB, 270 * MIB, 76 * MIB
"""A process on the CPU without weights: Python, torch, the model's class; for a reward Python and
math-verify. Measured on x86 Linux with torch 2.13 for the CPU and transformers 5.23."""
HEAP_FACTOR = 3.9
"""On the CPU a trainer keeps freed memory (`processes`), and glibc cannot reuse a hole for a block
of the same size. So transient tensors take this many times their size. Measured with models of 13,
42 and 92 million weights."""
SAMPLE_BYTES = 12  # of a logit while a token is drawn: also its score, and that exponentiated
TRUNCATING_BYTES = 32  # with top-k or top-p: also sorted, their indices, sums and sums before
SCORE_BYTES, TRAINED_SCORE_BYTES = 12, 20
"""Bytes of an attention score without a fused kernel: three float32 tensors, five in backward."""
CONTEXT_BYTES = GIB // 2
"""Memory of driver, kernels and libraries: each process needs it on each of its accelerators."""
HEADROOM = 0.95
"""Part of each memory that a proposal may fill: gaps between tensors are not estimated."""
MICRO_BATCH_TOKENS = (32_768, 16_384, 8_192)  # instead of 4,096, where they fit
COPIES_TO_SAVE = 3  # in a checkpoint: weights and AdamW's two moments


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The sizes of a model that memory follows from."""

    num_layers: int
    width: int
    mlp_width: int  # of the widest layer: all experts together that process one token
    num_heads: int
    num_key_value_heads: int
    head_size: int
    vocabulary_size: int
    is_tied: bool  # embedding and head share one weight
    is_batched: bool  # an engine can process several groups at once (else `engines.generate`)
    num_weights: int
    num_trained: int | None  # elements of LoRA's adapters; None: all weights are trained

    @property
    def outer_weights(self) -> int:  # elements outside of the layers
        return self.vocabulary_size * self.width * (1 if self.is_tied else 2) + self.width

    @property
    def layer_weights(self) -> int:  # elements of one layer, on average
        return (self.num_weights - self.outer_weights) // self.num_layers


def model_size(
    config: Mapping[str, Any], num_weights: int, num_trained: int | None = None
) -> ModelSize | None:
    """Read the sizes from a `config.json`. Returns None if they do not have the usual names."""
    config = {k: v for k, v in (config.get("text_config") or config).items() if v is not None}
    try:
        layers, width = config["num_hidden_layers"], config["hidden_size"]
        heads, vocabulary = config["num_attention_heads"], config["vocab_size"]
    except KeyError:
        return None
    mlp_width = config.get("intermediate_size", 4 * width)
    if experts := config.get("moe_intermediate_size"):
        mlp_width = experts * config.get("num_experts_per_tok", 1)
        mlp_width += config.get("shared_expert_intermediate_size", 0)
    return ModelSize(
        num_layers=layers,
        width=width,
        mlp_width=max(mlp_width) if isinstance(mlp_width, list) else mlp_width,  # Gemma 3n
        num_heads=heads,
        num_key_value_heads=config.get("num_key_value_heads", heads),
        head_size=config.get("head_dim", width // heads),
        vocabulary_size=vocabulary,
        is_tied=config.get("tie_word_embeddings", False),
        is_batched=set(config.get("layer_types", ())) <= set(PACKED_LAYERS),
        num_weights=num_weights,
        num_trained=num_trained,
    )


@dataclass(frozen=True, slots=True)
class Part:
    process: str
    memory: str  # a key of `memory_budgets`
    what: str
    num_bytes: int
    keys: str = ""  # that make it smaller
    is_certain: bool = False  # the run cannot do without it


# -- the estimate of each process -----------------------------------------------------------------


def estimate_memory(config: Config, placement: Placement, model: ModelSize) -> list[Part]:
    """Estimate every process, rollout workers first. Of vLLM's processes the host's memory is not
    counted."""
    parts = []
    for worker, device in device_names(placement).items():
        is_rollout, memory = worker.startswith("rollout"), _memory_of(worker, device)
        part, num_devices = partial(Part, worker, memory), device.count(",") + 1
        programs = "driver's context", num_devices * CONTEXT_BYTES
        parts.append(part(*(("Python and torch", WORKER_BYTES) if memory == "cpu" else programs)))
        make_parts = _rollout_parts if is_rollout else _train_parts
        parts += make_parts(config, placement, model, worker, memory)
        if num_bytes := devices.COMMUNICATOR_BYTES.get(device.partition(":")[0], 0):
            num_groups = int(not placement.weights_cross_on_cpu)
            num_groups += (num_devices if is_rollout else placement.train.count) > 1
            parts.append(part("communication buffers", num_groups * num_devices * num_bytes))
    # An evaluation has no train workers, and no ring.
    ring_bytes = ring_layout(config, placement).total_bytes if placement.train.count else 0
    num_rewards = placement.num_rollout_workers * config.reward.num_workers
    keys = f"reward.num_workers={config.reward.num_workers}"
    controller = partial(Part, "controller, rewards", "cpu")
    parts += [
        controller("Python", CONTROLLER_BYTES + num_rewards * REWARD_BYTES, keys),
        controller(
            "ring buffer", ring_bytes, f"rollout.ring_slots={config.ring_slots}", is_certain=True
        ),
    ]
    return [part for part in parts if part.num_bytes > 0]


def _rollout_parts(
    config: Config, placement: Placement, model: ModelSize, worker: str, memory: str
) -> list[Part]:
    rollout, dtype, on_cpu = config.rollout, config.model.dtype, memory == "cpu"
    dtype_bytes, is_embedded = DTYPE_BYTES[dtype], placement.engine.name == "embedded"
    weights = dtype_bytes * model.num_weights
    rows = (placement.max_concurrent_groups if model.is_batched else 1) * rollout.num_generations
    is_batched = is_embedded and model.is_batched
    prompts = 0  # stored besides the rows, at most: an evaluation may have one for each row
    if is_batched:
        lengths = config.data.max_prompt_length, rollout.max_completion_length
        cached = rows * row_cells(*lengths)
        prompts = (rows + max(1, rows // 4)) * padded(lengths[0])
    else:  # on accelerators vLLM takes as many sequences as fit, at least 1
        cached = (rows if on_cpu else 1) * config.max_sequence_length
    per_token = 2 * model.num_layers * model.num_key_value_heads * model.head_size * dtype_bytes
    in_flight = f"rollout.max_concurrent_groups={placement.max_concurrent_groups}"
    longest_prompt = config.data.max_prompt_length
    prefill = max(longest_prompt, min(MAX_PREFILL_TOKENS, longest_prompt * rows))
    truncates = rollout.top_k > 0 or rollout.top_p < 1.0
    of_logit = TRUNCATING_BYTES if truncates else SAMPLE_BYTES
    step = (rows + max(1, rows // 4)) * model.vocabulary_size * of_logit
    if is_batched and not on_cpu:
        # CUDA graphs have memory of their own, for the logits and scores of decode steps. Attention
        # to prompts is padded to as many rows for each of them.
        row, prompt = row_cells(*lengths), padded(longest_prompt)
        decode = rows * max(row, 2 * prompt)
        resume = MAX_PREFILL_TOKENS * max(row, prompt) if rollout.has_environments else 0
        scores = model.num_heads * (decode + max(decode, prefill * prompt, resume))
        # One layer's keys or values: of prompts that are gathered, and of rows on Ascend NPUs,
        # where keys in half precision are also copied to float32.
        copied = (cached + prompts) * per_token // (2 * model.num_layers)
        if placement.accelerator == devices.ASCEND and dtype_bytes == 2:
            copied *= 3
        step = 2 * step + SCORE_BYTES * scores + copied
    step += prefill * dtype_bytes * (2 * model.width + 3 * model.mlp_width)
    kept_free = 0  # by vLLM, of an accelerator, for its step and graphs
    if not is_embedded and not on_cpu:
        fraction = 1.0 if placement.shares_device else rollout.memory_fraction or 0.9
        budget = memory_budgets(placement).get(memory, 0)
        step, kept_free = 0, int((1.0 - (1.0 - STEP_FRACTION) * fraction) * budget)
    if not (on_cpu and is_embedded):  # else weights are received into their own memory
        step += min(NUM_BUCKETS * BUCKET_BYTES, weights)
    is_copied = on_cpu and is_batched and dtype == "float32"  # engines.fused_decoder
    copied = (model.num_weights - model.outer_weights) * FLOAT_BYTES if is_copied else 0
    part = partial(Part, worker, memory)
    model_keys = "model.path, model.dtype, rollout.memory_fraction, --infer-devices"
    cache_keys = f"{in_flight}, rollout.num_generations, rollout.max_completion_length"
    return [
        part(f"weights ({dtype})", weights, model_keys, is_certain=True),
        part(
            "KV cache",
            cached * per_token,
            cache_keys,
            is_certain=True,
        ),
        part(
            "prompts in the KV cache", prompts * per_token, f"{in_flight}, data.max_prompt_length"
        ),
        part("vLLM's step, reserve", kept_free, is_certain=placement.shares_device),
        part("engine's step, buckets", step, in_flight),
        part("weights for decoding", copied, "model.path"),
        Part(worker, "cpu", "weights being loaded", 0 if on_cpu else weights),
    ]


def _train_parts(
    config: Config, placement: Placement, model: ModelSize, worker: str, memory: str
) -> list[Part]:
    train, ranks, on_cpu = config.train, placement.train.count, memory == "cpu"
    dtype_bytes, is_cast = DTYPE_BYTES[config.model.dtype], config.model.dtype != "float32"
    is_lora = model.num_trained is not None
    # LoRA's frozen base is kept in the type of the computation.
    whole = (dtype_bytes if is_lora else FLOAT_BYTES) * model.num_weights
    trained = FLOAT_BYTES * (model.num_trained or 0) // ranks if is_lora else whole // ranks
    weights = whole // ranks + (trained if is_lora else 0)
    kept_as = config.model.dtype if is_lora else "float32"
    has_reference = config.algorithm.beta > 0.0 and not is_lora
    has_old = train.updates_per_iteration > 1
    part, on_host = partial(Part, worker, memory), partial(Part, worker, "cpu")
    parts = []
    model_keys = "model.path, rollout.memory_fraction, --train-devices"
    for what, num_bytes, keys, group in (
        (f"weights ({kept_as})", weights, model_keys, "optimizer"),
        ("gradients (float32)", trained, "model.lora.rank", "optimizer"),
        ("AdamW's two moments", 2 * trained, "model.lora.rank", "optimizer"),
        ("reference policy", trained if has_reference else 0, "algorithm.beta", "reference"),
        ("old policy", trained if has_old else 0, "train.updates_per_iteration", "old"),
    ):
        held = on_host if group in train.offload else part
        parts.append(held(what, num_bytes, f"{keys}, train.offload=[{group}]", is_certain=True))
    saved = COPIES_TO_SAVE * trained if train.keep_checkpoints > 0 else 0
    saved += min(saved, FILE_BYTES)  # a file of it, as it is written
    parts.append(on_host("checkpoint's copy", saved, "train.keep_checkpoints=0", is_certain=on_cpu))
    loading = 0 if on_cpu else whole - bytes_by_memory(parts)["cpu"]
    parts.append(on_host("weights being loaded", loading))

    buffers = 0
    if is_cast or not on_cpu:  # else weights are sent from their own memory
        buffers += min(NUM_BUCKETS * BUCKET_BYTES, dtype_bytes * model.num_weights)
    if ranks > 1 or is_cast or ("optimizer" in train.offload and not on_cpu):
        # Of a sharded model the outer weights, the layer that computes and the next are whole, and
        # the largest gradient, which is summed in float32, or all of them; LoRA has gradients of
        # adapters only.
        outer, layer = model.outer_weights, model.layer_weights
        if train.reshard is False:
            num_trained = model.num_trained or model.num_weights
            buffers += dtype_bytes * model.num_weights + FLOAT_BYTES * num_trained
        else:
            buffers += dtype_bytes * (outer + 2 * layer)
        buffers += 0 if is_lora else (dtype_bytes + FLOAT_BYTES) * max(outer, layer)
    num_tokens, num_targets = _micro_batch_tokens(config, ranks)
    kept, transient = micro_batch_bytes(config, model, num_tokens, num_targets, on_cpu=on_cpu)
    if not on_cpu and (not is_cast or placement.accelerator == devices.ASCEND):
        # No fused kernel (`model.attention`): the scores of a layer's backward.
        lengths = config.data.max_prompt_length, config.rollout.max_completion_length
        num_keys = sum(lengths) if config.model.attention == "repeated" else max(lengths)
        transient += TRAINED_SCORE_BYTES * model.num_heads * num_tokens * min(num_tokens, num_keys)
    keys = f"train.max_tokens_per_micro_batch={config.max_tokens_per_micro_batch}"
    if not train.activation_checkpointing:
        keys += ", train.activation_checkpointing=true"
    return [
        *parts,
        part("buckets, gathered layers", buffers),
        part("activations", kept, keys),
        part("logits, transients", int(transient * (HEAP_FACTOR if on_cpu else 1))),
    ]


def _micro_batch_tokens(config: Config, ranks: int) -> tuple[int, int]:
    """Return the tokens of the largest micro-batch, and how many of them are completion tokens, if
    all prompts and completions have full length."""
    rollout, train = config.rollout, config.train
    prompt, completion = config.data.max_prompt_length, rollout.max_completion_length
    num_prompts = rollout.num_generations if config.model.attention == "repeated" else 1
    per_group = num_prompts * prompt + rollout.num_generations * completion
    per_rank = -(-train.prompts_per_iteration // train.updates_per_iteration * per_group // ranks)
    num_tokens = min(config.max_tokens_per_micro_batch, max(per_rank, prompt + completion))
    return num_tokens, -(-num_tokens * rollout.num_generations * completion // per_group)


def micro_batch_bytes(
    config: Config, model: ModelSize, num_tokens: int, num_targets: int, *, on_cpu: bool
) -> tuple[int, int]:
    """Return the bytes that all layers keep of a packed row when backward begins, and those of the
    largest transient tensors. `num_targets`: tokens whose logits are computed.

    A decoder layer with normed attention and normed gated MLP keeps per token, with H the model's
    width, I the MLP's, and Hq query and Hkv key heads of size D:

        stream       4 H              its input, and again before the MLP; each of them normed
        attention    3 (Hq + Hkv) D   queries and keys before and after their norm; values; output
        MLP          4 I              gate, silu(gate), up, and their product

    and in float32 a number for each normed row (2 + Hq + Hkv) and a log-sum-exp for each query head
    (Hq). A norm also keeps its normed input before the weight, and if the computation is narrower
    its input in float32. With activation checkpointing only the input of each layer is kept, and
    one layer's activations exist during its backward pass.
    """
    dtype_bytes = DTYPE_BYTES[config.model.dtype]
    checkpointing = config.train.activation_checkpointing
    query, key = model.num_heads * model.head_size, model.num_key_value_heads * model.head_size
    normed = 2 * model.width + query + key
    elements = 4 * model.width + 3 * query + 3 * key + 4 * model.mlp_width
    rows = 2 + 2 * model.num_heads + model.num_key_value_heads
    layer = dtype_bytes * (elements + normed) + FLOAT_BYTES * rows
    if dtype_bytes < FLOAT_BYTES:
        layer += FLOAT_BYTES * normed
    ends = 2 * dtype_bytes * model.width  # the last norm's input, and the head's
    per_layer = dtype_bytes * model.width if checkpointing else layer
    kept = num_tokens * (model.num_layers * per_layer + ends)

    most = CPU_CHUNK_BYTES if on_cpu else CHUNK_BYTES
    num_chunks = -(-num_targets * model.vocabulary_size * FLOAT_BYTES // most)
    chunk = -(-num_targets // num_chunks) * model.vocabulary_size * FLOAT_BYTES
    is_trained = model.num_trained is None
    head = model.vocabulary_size * model.width if is_trained else 0  # elements of its gradient
    stream = dtype_bytes * (model.width + 2 * model.mlp_width) + (layer if checkpointing else 0)
    return kept, max(  # three moments that never coincide
        3 * chunk,  # the logits of a chunk (`logprobs`), forward
        # Backward: with the sum of the chunks' gradients, and one of them.
        2 * chunk + (FLOAT_BYTES + dtype_bytes) * head,
        # The first MLP in backward; a tied head's gradient waits for the embedding's.
        num_tokens * stream + (dtype_bytes * head if model.is_tied else 0),
    )


# -- against what there is -------------------------------------------------------------------------


def _memory_of(worker: str, device: str) -> str:
    return "cpu" if device == "cpu" else f"{device} ({worker})"


def memory_budgets(placement: Placement) -> dict[str, float]:
    """Return the bytes that may be taken: on the CPU together what this machine and its cgroup have
    left, by each other worker the memory of its accelerators, or its part of a shared one."""
    if placement.is_ray:  # what its nodes have is not known here
        return {}
    assumed = placement.assumed  # says nothing about the host's memory
    budgets: dict[str, float] = {} if assumed else {"cpu": available_memory_bytes()}
    for worker, device in device_names(placement).items():
        if device != "cpu":
            kind, _, numbers = device.partition(":")
            indices = [int(number) for number in numbers.split(",")]
            if assumed:
                num_bytes = len(indices) * assumed.num_bytes
            else:
                num_bytes = sum(devices.total_memory_bytes(kind, index) for index in indices)
                num_bytes -= sum(devices.memory_in_use(kind, index)[0] for index in indices)
            fraction = placement.memory_fraction(worker.partition("-")[0]) or 1.0
            budgets[_memory_of(worker, device)] = int(fraction * num_bytes)
    return budgets


def held_by_others(placement: Placement) -> str:
    """Describe what other programs hold of the accelerators; an empty string if nothing."""
    if placement.is_ray or placement.assumed:
        return ""
    found = []
    for device in dict.fromkeys(device_names(placement).values()):
        kind, _, numbers = device.partition(":")
        for number in filter(None, numbers.split(",")):
            num_bytes, programs = devices.memory_in_use(kind, int(number))
            if num_bytes > CONTEXT_BYTES:  # less is the driver's
                found.append(f"{_gib(num_bytes)} of {kind}:{number}: {programs or 'unknown'}")
    return f"; other programs hold {', '.join(found)}" if found else ""


def bytes_by_memory(parts: Iterable[Part]) -> Counter[str]:
    totals = Counter[str]()
    for part in parts:
        totals[part.memory] += part.num_bytes
    return totals


def check_memory(parts: Sequence[Part], budgets: Mapping[str, float], held: str = "") -> list[str]:
    """Return a warning for each memory that the run may not fit. Raises ConfigError if the certain
    parts alone do not fit. `held`: see `held_by_others`."""
    warnings = []
    for counted in ([part for part in parts if part.is_certain], parts):
        needs = bytes_by_memory(counted)
        for memory, *others in _alike(needs, budgets):
            needed = needs[memory]
            if needed <= budgets.get(memory, math.inf):
                continue
            totals = Counter[tuple[str, str]]()  # of all processes
            for part in counted:
                if part.memory == memory and part.keys:
                    totals[part.what, part.keys] += part.num_bytes
            largest = [f"{what} {_gib(n)} ({keys})" for (what, keys), n in totals.most_common(5)]
            least = "" if counted is parts else ", even without activations and buffers, at least"
            message = (
                f"this run needs{least} {_gib(needed)} of memory on {memory}"
                f"{f' and {len(others)} more' if others else ''}, but only "
                f"{_gib(budgets[memory])} are available{held}; the largest parts, and keys that "
                f"make them smaller: {'; '.join(largest)}"
            )
            if counted is not parts:
                raise ConfigError(message)
            warnings.append(f"warning: by estimate, at its peak {message}")
    return warnings


def fits(
    config: Config, placement: Placement, size: ModelSize, *, headroom: float = HEADROOM
) -> bool:
    """Whether the whole estimate fits every memory."""
    parts = estimate_memory(config, placement, size)
    budgets = {name: headroom * n for name, n in memory_budgets(placement).items()}
    try:
        return not check_memory(parts, budgets)
    except ConfigError:
        return False


def use_memory(config: Config, placement: Placement, size: ModelSize | None) -> Config:
    """Choose what `train.reshard` and `train.max_tokens_per_micro_batch` leave open: on this node's
    accelerators what fits. The sums of a deterministic run do not depend on memory."""
    train, least = config.train, config.max_tokens_per_micro_batch
    has_choice = placement.train.kind != "cpu" and not placement.is_ray
    if size is None or not has_choice or config.runtime.deterministic:
        return config
    more = [] if train.max_tokens_per_micro_batch else [n for n in MICRO_BATCH_TOKENS if n > least]
    reshard = (False, True) if train.reshard == "auto" else (train.reshard,)
    for drops, tokens in product(reshard, (*more, least)):
        changes = {"train.reshard": drops, "train.max_tokens_per_micro_batch": tokens}
        if fits(changed := change_config(config, changes), placement, size):
            return changed
    return config


def _alike(needs: Mapping[str, int], budgets: Mapping[str, float]) -> list[list[str]]:
    """Group the memories of one role's workers that need and have the same; the CPU is last."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for memory in sorted(needs, key=lambda memory: memory == "cpu"):
        role = memory.partition("(")[2].partition("-")[0]
        groups.setdefault((role, needs[memory], budgets.get(memory)), []).append(memory)
    return list(groups.values())


def memory_table(parts: Sequence[Part], budgets: Mapping[str, float]) -> str:
    """List the parts of one worker of each role, then the sum on each device."""
    totals = bytes_by_memory(parts)
    unit = "GiB" if max(totals.values()) > 16 * GIB else "MiB"

    def line(label: str, num_bytes: float) -> str:
        size = f"{num_bytes / GIB:,.1f}" if unit == "GiB" else f"{num_bytes / MIB:,.0f}"
        return f"{label:<27}{f'{size} {unit}':>11}"

    lines = ["memory at the most, by estimate:"]
    names = dict.fromkeys(part.process for part in parts)
    for _, (first, *others) in groupby(names, key=lambda name: name.partition("-")[0]):
        own = [part for part in parts if part.process == first]
        label = f"{first} to {others[-1].partition('-')[2]}, each" if others else first
        lines.append(line(label, sum(part.num_bytes for part in own)))
        for part in own:
            where = "" if part.memory == own[0].memory else f", {part.memory.partition(' ')[0]}"
            lines.append(line(f"  {part.what}{where}", part.num_bytes))
    for memory, *others in _alike(totals, budgets):
        label = f"all on {memory}"
        if others:
            first, last = (each.partition("(")[2].rstrip(")") for each in (memory, others[-1]))
            label = f"on each of {first} to {last.partition('-')[2]}"
        lines.append(line(label, totals[memory]))
        lines += [line("  available", budgets[memory])] if memory in budgets else []
    return "\n".join(lines)


def check_disk(folder: Path, model: ModelFiles, num_checkpoints: int) -> None:
    """Raise ConfigError if the final model and `num_checkpoints`, with the one that is being
    written, do not fit the disk of `folder`."""
    existing = next(parent for parent in folder.absolute().parents if parent.exists())
    weights, free = FLOAT_BYTES * (model.num_weights or 0), shutil.disk_usage(existing).free
    needed = weights * (1 + COPIES_TO_SAVE * (num_checkpoints + 1 if num_checkpoints else 0))
    if needed > free:
        raise ConfigError(
            f"output.dir (--output): the final model and the checkpoints take {_gib(needed)}, but "
            f"the disk of '{folder}' has {_gib(free)} left; keep fewer (train.keep_checkpoints; 0: "
            "none, and no --resume), or use another disk"
        )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / MIB:,.0f} MiB"
