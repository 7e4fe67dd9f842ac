"""Estimate the memory of a run before it starts, and choose settings with which it fits.

The estimate is for the largest micro-batch, and prompts and completions of full length. A run whose
CERTAIN parts do not fit is refused; the whole estimate only warns. Tests compare it with measured
peaks: within 15 % on the CPU and 10 % on a pretended accelerator.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, product
from typing import Any, NamedTuple

from easyrl import devices
from easyrl.channels import BUCKET_BYTES, NUM_BUCKETS
from easyrl.config import Config, ConfigError, change_config
from easyrl.config.algorithm import TEACHER_KEY
from easyrl.config.devices import range_words
from easyrl.engines import MAX_PREFILL_TOKENS, SLOT_STEP, padded, row_cells
from easyrl.engines.vllm.platforms import STEP_FRACTION, wanted_cache_bytes
from easyrl.model import CHUNK_BYTES, CPU_CHUNK_BYTES
from easyrl.model.checkpoint_files import FILE_BYTES
from easyrl.model.files import DTYPE_BYTES, FLOAT_BYTES, ModelSize, model_size, read_model_files
from easyrl.processes import available_memory_bytes
from easyrl.rewards.loading import KEY as REWARD_KEY
from easyrl.rewards.loading import reward_models
from easyrl.runtime.placement import Placement, resolve_placement, ring_layout

MIB, GIB = 2**20, 2**30
WORKER_BYTES, CONTROLLER_BYTES, REWARD_BYTES = 375 * MIB, 270 * MIB, 76 * MIB
"""A process on the CPU without weights: Python, torch, the model's class; for a reward Python and
math-verify. Measured on x86 Linux with torch 2.13 for the CPU and transformers 5.23."""
HEAP_FACTOR = 3.9
"""On the CPU a trainer keeps freed memory, and glibc cannot reuse a hole for a block of the same
size: transient tensors take this many times their size. Measured with 13 to 92 million weights."""
CONTEXT_BYTES = GIB // 2  # driver, kernels and libraries of a process on an accelerator
SAMPLE_BYTES = 12  # of a logit while a token is drawn: also its score, and that exponentiated
SCORE_BYTES, TRAINED_SCORE_BYTES = 12, 20
"""Bytes of an attention score without a fused kernel: three float32 tensors, five in backward."""
HEADROOM = 0.95
"""Part of each memory that a choice may fill: gaps between tensors are not estimated."""
MICRO_BATCH_TOKENS = (32_768, 16_384, 8_192)  # instead of 4,096, where they fit
GROUPS, TOKENS = "rollout.max_concurrent_groups", "train.max_tokens_per_micro_batch"
CERTAIN = {
    "weights": "model.path, model.dtype, rollout.memory_fraction, train.offload",
    "weights without adapters": "model.lora.target_modules",
    "KV cache": f"{GROUPS}, rollout.num_generations, rollout.max_completion_length",
    "gradients": "model.lora.rank, train.offload",
    "AdamW's two moments": "model.lora.rank, train.offload",
    "reference policy": "algorithm.beta, train.offload",
    "old policy": "train.updates_per_iteration, train.offload",
    "checkpoint's copy": "train.keep_checkpoints=0",
    "ring buffer": "rollout.ring_slots",
    "reward models": f"{REWARD_KEY}, reward.model_device",
    "vLLM's reserve": "rollout.memory_fraction",
}
MORE_CACHE = "KV cache, the room left"
"""Memory that vLLM gives its cache although the run does not need it: shown, but not required."""
KEYS = CERTAIN | {
    "engine's step": GROUPS,
    "CUDA graphs": GROUPS,
    "activations": f"{TOKENS}, train.activation_checkpointing=true",
    "logits, transients": TOKENS,
    "Python": "reward.num_workers",
}
"""Settings that make a part smaller; CERTAIN: of those without which a run cannot do."""


class Memory(NamedTuple):
    name: str  # cpu: of this machine, for all processes together
    num_bytes: float = math.inf  # that may be taken; infinite: unknown
    held: str = ""  # by other programs


class Part(NamedTuple):
    process: str
    num_processes: int  # each has this part
    memory: Memory
    what: str
    num_bytes: int


def memories_of(placement: Placement) -> dict[str, Memory]:
    """Return the memory in which the workers of each role and the reward models compute, and the
    host's: what this machine and its cgroup have left. A worker may take the memory of its
    accelerators, or its part of a shared one."""
    kind, assumed, reward = placement.accelerator, placement.assumed, placement.reward_index

    def memory_on(name: str, indices: Sequence[int], num_devices: float = 1.0) -> Memory:
        if placement.is_ray:  # what its nodes have is not known here
            return Memory(name)
        if assumed is not None:
            return Memory(name, int(num_devices * assumed.num_bytes))
        held = {index: devices.memory_in_use(kind, index) for index in indices}
        least = min(devices.total_memory_bytes(kind, index) - held[index][0] for index in indices)
        others = [
            f"{in_gib(num_bytes)} of {kind}:{index}: {programs or 'unknown'}"
            for index, (num_bytes, programs) in held.items()
            if num_bytes > CONTEXT_BYTES  # less is the driver's
        ]
        return Memory(name, int(num_devices * least), ", ".join(others))

    # An assumption says nothing about the host's memory.
    is_known = not (assumed or placement.is_ray)
    host = Memory("cpu", available_memory_bytes()) if is_known else Memory("cpu")
    memories = {"host": host, "rewards": host}
    if reward is not None:
        memories["rewards"] = memory_on(f"{kind}:{reward} (rewards)", [reward])
    size = placement.engine.tensor_parallel_size
    for role, used, num in (("rollout", placement.infer, size), ("train", placement.train, 1)):
        memories[role] = host
        if used.kind != "cpu":
            name = f"each of {kind}:{range_words(used.indices)} ({role})"
            part = placement.memory_fraction(role) or 1.0
            memories[role] = memory_on(name, used.indices, part * num)
            if reward in used.indices:
                memories["rewards"] = memories[role]
    return memories


def estimate_memory(config: Config, placement: Placement, model: ModelSize | None) -> list[Part]:
    """Estimate every process, rollout workers first. vLLM's memory on the host is not counted. An
    empty list if the model's sizes are unknown."""
    if model is None:
        return []
    parts, memories = [], memories_of(placement)
    host = memories["host"]
    for role, sizes_of in (("rollout", _rollout_bytes), ("train", _train_bytes)):
        count, memory = placement.num_workers(role), memories[role]
        if count == 0:  # an evaluation has no train workers
            continue
        first = {"Python and torch": WORKER_BYTES}
        if memory != host:
            of_group = devices.COMMUNICATOR_BYTES.get(placement.accelerator, 0)
            size = placement.engine.tensor_parallel_size if role == "rollout" else 1
            first = {"driver, communication": size * (CONTEXT_BYTES + 2 * of_group)}
        own, on_host = sizes_of(config, placement, model)
        process = f"{role}-0 to {count - 1}, each" if count > 1 else f"{role}-0"
        parts += [Part(process, count, memory, *each) for each in (first | own).items()]
        parts += [Part(process, count, host, *each) for each in on_host.items()]
    parts += _reward_model_parts(config, placement, memories["rewards"])
    num_rewards = placement.num_rollout_workers * config.reward.num_workers
    ring_bytes = ring_layout(config, placement).total_bytes if placement.train.count else 0
    others = {"Python": CONTROLLER_BYTES + num_rewards * REWARD_BYTES, "ring buffer": ring_bytes}
    parts += [Part("controller, rewards", 1, host, *each) for each in others.items()]
    return [part for part in parts if part.num_bytes > 0]


def _reward_model_parts(config: Config, placement: Placement, memory: Memory) -> list[Part]:
    """The processes of the reward models: on an accelerator together, since they share it."""
    if not (paths := reward_models(config)):
        return []
    weights, batch = 0, 0
    for path in paths:
        files = read_model_files(path, REWARD_KEY)
        dtype_bytes = FLOAT_BYTES if files.stored_dtype == "float32" else FLOAT_BYTES // 2
        weights += dtype_bytes * (files.num_weights or 0)
        if (size := model_size(files.config, 0)) is not None:
            num_tokens = config.rollout.num_generations * config.max_sequence_length
            batch = max(batch, dtype_bytes * num_tokens * (4 * size.width + 3 * size.mlp_width))
    count, on_cpu = placement.num_rollout_workers, placement.reward_index is None
    base = WORKER_BYTES if on_cpu else CONTEXT_BYTES
    own = {"Python and torch": base, "reward models": weights, "their batch": batch}
    num, factor = (count, 1) if on_cpu else (1, count)
    process = f"reward models{f' of {num} workers, each' if num > 1 else ''}"
    return [Part(process, num, memory, what, factor * each) for what, each in own.items()]


Sizes = tuple[dict[str, int], dict[str, int]]
"""Bytes of a worker's parts in the memory in which it computes, and of others on the host."""


def _rollout_bytes(config: Config, placement: Placement, model: ModelSize) -> Sizes:
    rollout, on_cpu = config.rollout, placement.infer.kind == "cpu"
    is_embedded = placement.engine.name == "embedded"
    is_batched, dtype_bytes = is_embedded and model.is_batched, DTYPE_BYTES[config.model.dtype]
    weights, layers = (dtype_bytes * n for n in (model.num_weights, model.layer_weights))
    prompt = padded(config.data.max_prompt_length)
    row = row_cells(config.data.max_prompt_length, rollout.max_completion_length)
    num_groups = placement.max_concurrent_groups if model.is_batched or not is_embedded else 1
    rows = num_groups * rollout.num_generations
    # Sequences in rows and ready to start. In an evaluation each may have a prompt of its own; in
    # training the last completions of as many groups again may be in flight.
    started = rows + max(1, rows // 4)
    groups = -(-started // (1 if config.train.eval_every else rollout.num_generations))
    if rollout.agent is not None:  # branches are new prompts, of any length
        prompt, groups = padded(config.max_sequence_length), started
    has_graphs = is_batched and not on_cpu and placement.accelerator != devices.ASCEND
    num_prompts = padded(min(started, 2 * groups), SLOT_STEP if has_graphs else 1)
    cached = rows * row + num_prompts * prompt
    if not is_batched:  # vLLM needs room for 1 sequence at least
        cached = (rows if is_embedded else 1) * config.max_sequence_length
    step = started * model.vocabulary_size * SAMPLE_BYTES
    if is_batched and not on_cpu:  # attention to prompts has as many rows for each of them
        scores = rows * max(row, 2 * prompt)
        scores = max(scores, MAX_PREFILL_TOKENS * row * rollout.has_environments)
        step += scores * SCORE_BYTES * model.num_heads
    prefill = min(MAX_PREFILL_TOKENS, groups * prompt)
    activations = prefill * dtype_bytes * (2 * model.width + 3 * model.mlp_width)
    own = {
        "weights": weights,
        "weights without adapters": 0 if model.num_trained is None else layers,
        "KV cache": cached * dtype_bytes * model.kv_elements,
        "engine's step": step + activations,
        "CUDA graphs": step * has_graphs,
        "weights for decoding": layers * (is_batched and on_cpu and dtype_bytes == FLOAT_BYTES),
        # Into the weights themselves on the CPU, where they fit.
        "buckets": 0 if is_embedded and on_cpu else _bucket_bytes(placement, "rollout", weights),
    }
    wanted = wanted_cache_bytes(model, config.model.dtype, rows, config.max_sequence_length)
    if not is_embedded and on_cpu:
        own["KV cache"] = wanted
    elif not is_embedded:  # it keeps memory free for its step and graphs
        budget = 0 if placement.is_ray else memories_of(placement)["rollout"].num_bytes
        fraction = 1.0 if placement.shares_device else rollout.memory_fraction or 0.9
        room = int((1.0 - STEP_FRACTION) * fraction * budget) - weights
        others = placement.engine.tensor_parallel_size * CONTEXT_BYTES + own["buckets"]
        room = min(room, wanted) if placement.shares_device else room - others
        own[MORE_CACHE] = room - own["KV cache"]
        what = "vLLM's reserve" if placement.shares_device else "vLLM's step, reserve"
        own[what] = int((1.0 - (1.0 - STEP_FRACTION) * fraction) * budget)
        del own["engine's step"]
    # Where nothing is converted, the pages of the files are shared, and the system can drop them.
    is_read = on_cpu or model.stored_dtype == config.model.dtype
    return own, {"weights being loaded": 0 if is_read else weights}


def _train_bytes(config: Config, placement: Placement, model: ModelSize) -> Sizes:
    train, ranks, on_cpu = config.train, placement.train.count, placement.train.kind == "cpu"
    dtype_bytes, is_cast = DTYPE_BYTES[config.model.dtype], config.model.dtype != "float32"
    is_lora, num_trained = model.num_trained is not None, model.num_trained or model.num_weights
    trained = FLOAT_BYTES * num_trained // ranks
    # LoRA's frozen base is kept in the type of the computation.
    weights = trained + is_lora * dtype_bytes * model.num_weights // ranks
    own: dict[str, int] = {}
    on_host: dict[str, int] = {}
    for what, num_bytes, group in (
        ("weights", weights, "optimizer"),
        ("gradients", trained, "optimizer"),
        ("AdamW's two moments", 2 * trained, "optimizer"),
        ("reference policy", trained * (config.algorithm.beta > 0.0 and not is_lora), "reference"),
        ("old policy", trained * (train.updates_per_iteration > 1), "old"),
    ):
        (on_host if group in train.offload and not on_cpu else own)[what] = num_bytes
    if (teacher := config.algorithm.teacher_path) is not None:
        num_weights = read_model_files(teacher, TEACHER_KEY).num_weights or 0
        own["teacher"] = dtype_bytes * num_weights // ranks
    saved = 3 * trained * (train.keep_checkpoints > 0)
    on_host["checkpoint's copy"] = saved + min(saved, FILE_BYTES)  # and a file as it is written
    is_sharded = ranks > 1 or is_cast or ("optimizer" in train.offload and not on_cpu)
    if not on_cpu and not is_sharded and model.stored_dtype != "float32":
        on_host["weights being loaded"] = weights
    if is_sharded:
        # Of a sharded model the outer weights, the layer that computes and the next are whole, and
        # the largest gradient, which is summed in float32; or all weights and gradients.
        outer, layer = model.outer_weights, model.layer_weights // model.num_layers
        largest = (dtype_bytes + FLOAT_BYTES) * (0 if is_lora else max(outer, layer))
        own["gathered layers"] = dtype_bytes * (outer + 2 * layer) + largest
        if train.reshard is False:
            own["gathered layers"] = dtype_bytes * model.num_weights + FLOAT_BYTES * num_trained
    if is_cast or not on_cpu:  # else weights are sent from their own memory
        own["buckets"] = _bucket_bytes(placement, "train", dtype_bytes * model.num_weights)
    own["activations"], transient = micro_batch_bytes(config, placement, model)
    own["logits, transients"] = int(transient * (HEAP_FACTOR if on_cpu else 1))
    return own, on_host


def _bucket_bytes(placement: Placement, role: str, weights: int) -> int:
    """Return what the weight channel holds in the memory in which a role's workers compute."""
    if placement.shares_device:  # one bucket, which the trainer allocates
        return BUCKET_BYTES * (role == "train")
    if (placement.infer if role == "rollout" else placement.train).kind == "cpu":
        return min(NUM_BUCKETS * BUCKET_BYTES, weights)  # other pages are never written
    return NUM_BUCKETS * BUCKET_BYTES * (not placement.weights_cross_on_cpu)


def micro_batch_bytes(config: Config, placement: Placement, model: ModelSize) -> tuple[int, int]:
    """Return the bytes that all layers keep of the largest micro-batch when backward begins, and
    those of the largest transient tensors.

    A decoder layer keeps per token, with H the model's width, I the MLP's, and Hq query and Hkv key
    heads of size D: the stream before attention and MLP, plain and normed (4 H); queries and keys
    before and after their norm, values and output (3 (Hq + Hkv) D); and of a gated MLP 4 I. A norm
    whose weight is trained keeps its normed input, a norm in a narrow type its input in float32.
    """
    train, dtype_bytes = config.train, DTYPE_BYTES[config.model.dtype]
    on_cpu, is_lora = placement.train.kind == "cpu", model.num_trained is not None
    prompt, completion = config.data.max_prompt_length, config.rollout.max_completion_length
    repeats, num_generations = config.model.attention == "repeated", config.rollout.num_generations
    group = (num_generations if repeats else 1) * prompt + num_generations * completion
    num_groups = train.prompts_per_iteration / train.updates_per_iteration / placement.train.count
    num_tokens = int(max(num_groups * group, prompt + completion))
    num_tokens = min(config.max_tokens_per_micro_batch, num_tokens)
    num_targets = -(-num_tokens * num_generations * completion // group)

    heads = (model.num_heads + model.num_key_value_heads) * model.head_size
    normed = 2 * model.width + heads
    layer = dtype_bytes * (4 * model.width + 3 * heads + 4 * model.mlp_width)
    layer += normed * ((0 if is_lora else dtype_bytes) + (4 if dtype_bytes < 4 else 0))
    per_layer = dtype_bytes * model.width if train.activation_checkpointing else layer
    ends = 2 * dtype_bytes * model.width  # the last norm's input, and the head's
    kept = num_tokens * (model.num_layers * per_layer + ends)

    row_bytes = FLOAT_BYTES * model.vocabulary_size
    num_chunks = -(-num_targets * row_bytes // (CPU_CHUNK_BYTES if on_cpu else CHUNK_BYTES))
    chunk = -(-num_targets // num_chunks) * row_bytes
    head = 0 if is_lora else model.vocabulary_size * model.width  # elements of its gradient
    stream = dtype_bytes * (model.width + 2 * model.mlp_width) + layer * (per_layer < layer)
    is_fused = on_cpu or (dtype_bytes == 2 and placement.accelerator != devices.ASCEND)
    num_keys = min(num_tokens, prompt + completion if repeats else max(prompt, completion))
    return kept, max(  # these never coincide:
        3 * chunk,  # the logits of a chunk (`logprobs`), forward
        # Backward: with one chunk's gradient, and the sum of several.
        2 * chunk + (dtype_bytes + FLOAT_BYTES * (num_chunks > 1)) * head,
        # The last MLP in backward; a tied head's gradient waits for the embedding's.
        num_tokens * stream + dtype_bytes * head * model.is_tied,
        # An attention in backward.
        TRAINED_SCORE_BYTES * model.num_heads * num_tokens * num_keys * (not is_fused),
    )


def bytes_by_memory(parts: Iterable[Part]) -> Counter[Memory]:
    """Sum the parts: of all processes on the host, of one worker on each accelerator."""
    totals = Counter[Memory]()
    for part in parts:
        num_processes = part.num_processes if part.memory.name == "cpu" else 1
        totals[part.memory] += part.num_bytes * num_processes * (part.what != MORE_CACHE)
    return totals


def check_memory(parts: Sequence[Part]) -> list[str]:
    """Return a warning for each memory that may not suffice. Raises ConfigError if it cannot."""
    certain, warnings = [part for part in parts if part.what in CERTAIN], []
    for counted, least in ((certain, ", even without buffers, at least"), (parts, "")):
        for memory, needed in bytes_by_memory(counted).items():
            if needed <= memory.num_bytes:
                continue
            totals = Counter[str]()  # of all processes
            for _, num_processes, where, what, num_bytes in counted:
                if where == memory and what in KEYS:
                    totals[f"{what} ({KEYS[what]})"] += num_bytes * num_processes
            largest = "; ".join(f"{in_gib(n)} {what}" for what, n in totals.most_common(5))
            held = memory.held and f"; other programs hold {memory.held}"
            message = (
                f"this run needs{least} {in_gib(needed)} of memory on {memory.name}, but only "
                f"{in_gib(memory.num_bytes)} are available{held}; the largest parts, and keys that "
                f"make them smaller: {largest}"
            )
            if least:
                raise ConfigError(message)
            warnings.append(f"warning: by estimate, at its peak {message}")
    return warnings


def memory_table(parts: Sequence[Part]) -> str:
    """List the parts of one worker of each role, then the sum in each memory."""
    totals, rows = bytes_by_memory(parts), []
    totals.update({part.memory: part.num_bytes for part in parts if part.what == MORE_CACHE})
    size, form = (GIB, "{:,.1f} GiB") if max(totals.values()) > 16 * GIB else (MIB, "{:,.0f} MiB")
    for process, grouped in groupby(parts, key=lambda part: part.process):
        own = list(grouped)
        rows.append((process, sum(part.num_bytes for part in own)))
        for part in own:
            where = "" if part.memory == own[0].memory else ", cpu"
            rows.append((f"  {part.what}{where}", part.num_bytes))
    for memory in sorted(totals, key=lambda memory: memory.name == "cpu"):
        rows.append((memory.name if memory.name != "cpu" else "all on cpu", totals[memory]))
        rows += [("  available", int(memory.num_bytes))] if memory.num_bytes < math.inf else []
    lines = [f"{label:<27}{form.format(num_bytes / size):>11}" for label, num_bytes in rows]
    return "\n".join(["memory at the most, by estimate:", *lines])


def in_gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / MIB:,.0f} MiB"


# -- settings that fit -----------------------------------------------------------------------------


def fits(config: Config, placement: Placement, size: ModelSize) -> bool:
    needs = bytes_by_memory(estimate_memory(config, placement, size))
    return all(need <= HEADROOM * memory.num_bytes for memory, need in needs.items())


def use_memory(config: Config, placement: Placement, size: ModelSize | None) -> Config:
    """Choose what `train.reshard` and `train.max_tokens_per_micro_batch` leave open: on this node's
    accelerators what fits into what is free now. The sums of a deterministic run do not depend on
    memory."""
    devices.memory_in_use.cache_clear()
    train, least = config.train, config.max_tokens_per_micro_batch
    has_choice = placement.train.kind != "cpu" and not placement.is_ray
    if size is None or not has_choice or config.runtime.deterministic:
        return config
    more = [] if train.max_tokens_per_micro_batch else [n for n in MICRO_BATCH_TOKENS if n > least]
    reshard = (False, True) if train.reshard == "auto" else (train.reshard,)
    for drops, tokens in product(reshard, (*more, least)):
        changed = change_config(config, {"train.reshard": drops, TOKENS: tokens})
        if fits(changed, placement, size):
            return changed
    return config


def propose_changes(config: Config, placement: Placement, size: ModelSize) -> dict[str, Any] | None:
    """Return changes of settings with which the run fits; None if there are none. What is trained
    stays the same, except for rounding: lengths, batches and LoRA are the user's choice."""
    tokens, groups = config.max_tokens_per_micro_batch, placement.max_concurrent_groups
    has_reference = config.algorithm.beta > 0.0 and config.model.lora.rank is None
    policies = ["reference"] * has_reference + ["old"] * (config.train.updates_per_iteration > 1)
    savings: dict[str, list[Any]] = {  # the most welcome first, of each the smallest first
        TOKENS: [max(tokens >> n, config.max_sequence_length) for n in (1, 2, 3)],
        GROUPS: [max(groups >> n, 1) for n in (1, 2, 3, 4)],
        "model.dtype": ["bfloat16"],
        "train.activation_checkpointing": [True],
        "train.offload": [policies, [*policies, "optimizer"]],
    }
    every = {key: values[-1] for key, values in savings.items()}
    without_offload = {key: value for key, value in every.items() if key != "train.offload"}

    def is_enough(changes: Mapping[str, Any]) -> bool:
        try:
            changed = change_config(config, changes)
            return fits(changed, resolve_placement(changed, placement.assumed), size)
        except ValueError:  # these do not go together
            return False

    choices = product(
        _engines(config, placement, size), ({}, without_offload, every), _splits(placement)
    )
    tried = (engine | saved | split for engine, saved, split in choices)
    changes = next(filter(is_enough, tried), None)
    if changes is None:
        return None
    for key, values in reversed(savings.items()):  # take back what is not needed
        rest = {name: value for name, value in changes.items() if name != key}
        changes = next(filter(is_enough, [rest, *(rest | {key: value} for value in values)]))
    return changes


def _engines(config: Config, placement: Placement, size: ModelSize) -> list[dict[str, Any]]:
    # Where vLLM is assumed, it is not installed here.
    is_auto = placement.assumed is not None and config.rollout.engine == "auto"
    is_vllm = placement.engine.name == "vllm" or (is_auto and size.is_in_vllm)
    sizes = (1, 2, 4, 8) if is_vllm else ()
    key = "rollout.tensor_parallel_size"
    return [{}, *({"rollout.engine": "vllm", key: size} for size in sizes)]


def _splits(placement: Placement) -> list[dict[str, Any]]:
    count, shares = placement.num_accelerators, placement.shares_device
    parts = (0.5, 0.4, 0.6, 0.3, 0.7, 0.2) if shares else ()
    splits: list[dict[str, Any]] = [{}, *({"rollout.memory_fraction": part} for part in parts)]
    for num_train in sorted({count // 2, count * 3 // 4, count - 1}):
        if num_train > (0 if shares else placement.train.count):
            infer, train = range(count - num_train), range(count - num_train, count)
            split = {"devices.infer": range_words(infer), "devices.train": range_words(train)}
            splits.append(split)
    return splits
