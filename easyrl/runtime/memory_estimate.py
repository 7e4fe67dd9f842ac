"""Estimate the memory of a run before it starts: every package states its parts, added up here.

    engines.sizes, engines.vllm.sizes   a rollout worker    ─┐
    workers.sizes, model.sizes          a train worker       │
    channels, channels.ring_buffer      buckets, the ring    ├─► parts ─► what does not fit, a table
    model.reward_model, rewards.pool    rewards              │
    devices                             Python, torch, …    ─┘

The estimate is for the largest micro-batch, and for prompts and completions of full length. A run
whose certain parts do not fit is refused; the whole estimate only warns. Tests compare it with
measured peaks: within 15 % on the CPU and 10 % on a pretended accelerator. No torch here.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

from easyrl import devices
from easyrl.channels import buckets_on_accelerator, buckets_on_cpu
from easyrl.config import ConfigError
from easyrl.config.algorithm import TEACHER_KEY
from easyrl.config.devices import range_words
from easyrl.config.spec import RunSpec
from easyrl.devices import CONTEXT_BYTES, process_need
from easyrl.engines.sizes import EngineLoad, embedded_needs, weights_needs
from easyrl.engines.vllm.sizes import DeviceShare, vllm_needs
from easyrl.model.files import DTYPE_BYTES, ModelSize, read_loaded_files
from easyrl.model.reward_model import reward_model_needs
from easyrl.processes import MemoryNeed, available_memory_bytes
from easyrl.rewards.pool import PROCESS_BYTES
from easyrl.runtime.placement import Placement, ring_layout
from easyrl.workers.sizes import train_needs

MIB = 2**20
GIB = 2**30
CONTROLLER_BYTES = 270 * MIB  # measured on x86 Linux, with transformers 5.23
MAX_LISTED = 5  # parts that a message names, the largest first

Role = Literal["rollout", "train"]


class Memory(NamedTuple):
    """A memory that processes take parts of."""

    name: str  # cpu: of this machine, for all processes together
    num_bytes: float = math.inf  # that may be taken; infinite: unknown
    held: str = ""  # by other programs


class Part(NamedTuple):
    """A part of the memory of a process, or of several that are alike."""

    process: str  # "rollout-0 to 3, each"
    num_processes: int  # each has this part
    memory: Memory
    need: MemoryNeed


class Memories(NamedTuple):
    """The memories in which a run computes; several may be the same one."""

    rollout: Memory  # of each rollout worker
    train: Memory  # of each train worker
    rewards: Memory  # of the reward models
    host: Memory


def memories_of(placement: Placement) -> Memories:
    """Return the memories of the workers, and what is free in them now. A worker may take the
    memory of its accelerators, or its part of a shared one."""
    # An assumption says nothing about the host's memory.
    is_known = not (placement.assumed or placement.is_ray)
    host = Memory("cpu", available_memory_bytes()) if is_known else Memory("cpu")
    rollout = _worker_memory(placement, "rollout", host)
    train = _worker_memory(placement, "train", host)
    rewards = host
    index = placement.reward_index
    if index is not None:
        rewards = _free_memory(placement, f"{placement.accelerator}:{index} (rewards)", [index])
        # Reward models may share a worker's accelerator.
        for role_memory, used in ((rollout, placement.infer), (train, placement.train)):
            if used.kind != "cpu" and index in used.indices:
                rewards = role_memory
    return Memories(rollout, train, rewards, host)


def _worker_memory(placement: Placement, role: Role, host: Memory) -> Memory:
    used = placement.train
    num_devices = 1
    if role == "rollout":
        used = placement.infer
        num_devices = placement.engine.tensor_parallel_size
    if used.kind == "cpu":
        return host
    name = f"each of {placement.accelerator}:{range_words(used.indices)} ({role})"
    fraction = placement.memory_fraction(role) or 1.0
    return _free_memory(placement, name, used.indices, fraction * num_devices)


def _free_memory(
    placement: Placement, name: str, indices: Sequence[int], num_devices: float = 1.0
) -> Memory:
    """Return what is free on `num_devices` of these accelerators, by the one with the least."""
    kind = placement.accelerator
    if placement.is_ray:  # what its nodes have is not known here
        return Memory(name)
    if placement.assumed is not None:
        return Memory(name, int(num_devices * placement.assumed.num_bytes))
    least = math.inf
    others = []
    for index in indices:
        num_held, programs = devices.memory_in_use(kind, index)
        least = min(least, devices.total_memory_bytes(kind, index) - num_held)
        if num_held > CONTEXT_BYTES:  # less is the driver's
            others.append(f"{in_gib(num_held)} of {kind}:{index}: {programs or 'unknown'}")
    return Memory(name, int(num_devices * least), ", ".join(others))


def estimate_memory(spec: RunSpec, placement: Placement, model: ModelSize | None) -> list[Part]:
    """Estimate every process, rollout workers first. vLLM's memory on the host is not counted.
    Empty if the model's sizes are unknown."""
    if model is None:
        return []
    memories = memories_of(placement)
    of_rollout = _rollout_needs(spec, placement, model, memories.rollout)
    parts = _parts_of_workers("rollout", placement, memories, of_rollout)
    if placement.train.count > 0:  # an evaluation has no train workers
        of_train = _train_needs(spec, placement, model)
        parts += _parts_of_workers("train", placement, memories, of_train)
    parts += _parts_of_reward_models(spec, placement, memories.rewards)

    num_reward_processes = placement.num_rollout_workers * spec.rewards.options.num_workers
    python_bytes = CONTROLLER_BYTES + num_reward_processes * PROCESS_BYTES
    others = [MemoryNeed("Python", python_bytes, "reward.num_workers")]
    if placement.train.count > 0:
        ring_bytes = ring_layout(spec, placement).total_bytes
        others.append(MemoryNeed("ring buffer", ring_bytes, "rollout.ring_slots", is_certain=True))
        if "cpu" in (placement.infer.kind, placement.train.kind):
            weights_bytes = DTYPE_BYTES[spec.model.dtype] * model.num_weights
            others.append(MemoryNeed("buckets", buckets_on_cpu(weights_bytes)))
    parts += [Part("controller, rewards", 1, memories.host, need) for need in others]
    return [part for part in parts if part.need.num_bytes > 0]


def _parts_of_workers(
    role: Role, placement: Placement, memories: Memories, needs: Sequence[MemoryNeed]
) -> list[Part]:
    """Return the parts of the workers of a role, those on the host last."""
    own_memory = memories.rollout if role == "rollout" else memories.train
    count = placement.num_workers(role)
    process = f"{role}-0 to {count - 1}, each" if count > 1 else f"{role}-0"
    own = []
    on_host = []
    for need in needs:
        if need.is_on_host:
            on_host.append(Part(process, count, memories.host, need))
        else:
            own.append(Part(process, count, own_memory, need))
    return own + on_host


def _rollout_needs(
    spec: RunSpec, placement: Placement, model: ModelSize, memory: Memory
) -> list[MemoryNeed]:
    """Return the needs of one rollout worker, which computes in this memory: its process, its
    engine and its buckets."""
    is_on_cpu = placement.infer.kind == "cpu"
    num_devices = placement.engine.tensor_parallel_size
    kind = "cpu" if is_on_cpu else placement.accelerator
    load = _engine_load(spec, placement)
    needs = [process_need(kind, num_devices), *weights_needs(model, load)]
    bucket_bytes = _bucket_bytes(placement, "rollout")
    if not placement.engine.is_vllm:
        needs += embedded_needs(model, load)
    else:
        share = None if is_on_cpu else _vllm_share(spec, placement, memory, bucket_bytes)
        needs += vllm_needs(model, load, share)
    return [*needs, MemoryNeed("buckets", bucket_bytes)]


def _engine_load(spec: RunSpec, placement: Placement) -> EngineLoad:
    is_on_cpu = placement.infer.kind == "cpu"
    episodes = spec.episodes
    return EngineLoad(
        num_groups=placement.max_concurrent_groups,
        num_generations=spec.schedule.num_generations,
        max_prompt_length=spec.limits.max_prompt_length,
        max_completion_length=spec.limits.max_completion_length,
        dtype=spec.model.dtype,
        is_on_cpu=is_on_cpu,
        has_graphs=not is_on_cpu and placement.accelerator != devices.ASCEND,
        is_evaluating=spec.schedule.eval_every > 0,
        has_episodes=episodes is not None,
        has_branches=episodes is not None and episodes.agent is not None,
    )


def _vllm_share(
    spec: RunSpec, placement: Placement, memory: Memory, bucket_bytes: int
) -> DeviceShare:
    """Return what one vLLM engine may take of its accelerators."""
    is_with_trainer = placement.shares_device
    fraction = 1.0 if is_with_trainer else spec.engine.memory_fraction or 0.9
    num_bytes = 0.0 if placement.is_ray else memory.num_bytes
    num_devices = placement.engine.tensor_parallel_size
    return DeviceShare(num_bytes, fraction, num_devices, is_with_trainer, bucket_bytes)


def _train_needs(spec: RunSpec, placement: Placement, model: ModelSize) -> list[MemoryNeed]:
    """Return the needs of one train worker: its process, its policies and its buckets."""
    dtype = spec.model.dtype
    is_on_cpu = placement.train.kind == "cpu"
    is_ascend = placement.accelerator == devices.ASCEND
    teacher_weights = 0
    if spec.teacher is not None and spec.teacher.path is not None:
        trusts = spec.model.trust_remote_code
        teacher = read_loaded_files(spec.teacher.path, TEACHER_KEY, trust_remote_code=trusts)
        teacher_weights = teacher.num_weights or 0
    needs = train_needs(
        model,
        spec.for_training,
        spec.limits,
        num_ranks=placement.train.count,
        is_on_cpu=is_on_cpu,
        is_fused=is_on_cpu or (dtype != "float32" and not is_ascend),
        teacher_weights=teacher_weights,
    )
    bucket_bytes = _bucket_bytes(placement, "train")
    process = process_need("cpu" if is_on_cpu else placement.accelerator)
    return [process, *needs, MemoryNeed("buckets", bucket_bytes)]


def _bucket_bytes(placement: Placement, role: Role) -> int:
    """Return the bytes of a worker's own buckets. On the CPU all workers map the same ones."""
    used = placement.infer if role == "rollout" else placement.train
    if used.kind == "cpu":
        return 0
    return buckets_on_accelerator(
        shares_device=placement.shares_device,
        is_trainer=role == "train",
        cross_on_cpu=placement.weights_cross_on_cpu,
    )


def _parts_of_reward_models(spec: RunSpec, placement: Placement, memory: Memory) -> list[Part]:
    """Return the parts of the reward models' processes, one of each rollout worker. On an
    accelerator they are counted together, since they share it."""
    if not spec.rewards.models:
        return []
    count = placement.num_rollout_workers
    is_on_cpu = placement.reward_index is None
    num_tokens = spec.schedule.num_generations * spec.limits.max_sequence_length
    needs = reward_model_needs(spec.rewards.models, num_tokens=num_tokens, is_on_cpu=is_on_cpu)
    process = "reward models"
    if is_on_cpu and count > 1:
        process = f"reward models of {count} workers, each"
    parts = []
    for need in needs:
        if is_on_cpu:
            parts.append(Part(process, count, memory, need))
        else:
            together = need._replace(num_bytes=count * need.num_bytes)
            parts.append(Part(process, 1, memory, together))
    return parts


# -- what does not fit -----------------------------------------------------------------------------


class Shortage(NamedTuple):
    """A memory that has less than a run needs."""

    memory: Memory
    needed_bytes: int
    parts: Sequence[Part]  # those that were counted
    is_certain: bool  # the run cannot do without them

    def describe(self) -> str:
        """Name the memory, the largest parts in it, and the settings that make these smaller."""
        totals = Counter[str]()  # of all processes
        for part in self.parts:
            need = part.need
            if part.memory == self.memory and need.settings:
                label = f"{need.what} ({need.settings})"
                totals[label] += need.num_bytes * part.num_processes
        most = totals.most_common(MAX_LISTED)
        largest = "; ".join(f"{in_gib(num_bytes)} {label}" for label, num_bytes in most)
        least = ", even without buffers, at least" if self.is_certain else ""
        held = f"; other programs hold {self.memory.held}" if self.memory.held else ""
        return (
            f"this run needs{least} {in_gib(self.needed_bytes)} of memory on {self.memory.name}, "
            f"but only {in_gib(self.memory.num_bytes)} are available{held}; the largest parts, and "
            f"keys that make them smaller: {largest}"
        )


def bytes_by_memory(parts: Iterable[Part]) -> Counter[Memory]:
    """Sum the parts that are required: of all processes on the host, of one worker on each
    accelerator."""
    totals = Counter[Memory]()
    for part in parts:
        if part.need.is_required:
            num_processes = part.num_processes if part.memory.name == "cpu" else 1
            totals[part.memory] += part.need.num_bytes * num_processes
    return totals


def find_shortages(parts: Sequence[Part]) -> list[Shortage]:
    """Find the memories that do not suffice, those that certainly do not first."""
    certain = [part for part in parts if part.need.is_certain]
    of_certain = _find_shortages(certain, is_certain=True)
    return of_certain + _find_shortages(parts, is_certain=False)


def _find_shortages(parts: Sequence[Part], *, is_certain: bool) -> list[Shortage]:
    shortages = []
    for memory, needed_bytes in bytes_by_memory(parts).items():
        if needed_bytes > memory.num_bytes:
            shortages.append(Shortage(memory, needed_bytes, parts, is_certain))
    return shortages


def check_memory(parts: Sequence[Part]) -> list[str]:
    """Return a warning for each memory that may not suffice. Raises ConfigError if it cannot."""
    warnings = []
    for shortage in find_shortages(parts):
        if shortage.is_certain:
            raise ConfigError(shortage.describe())
        warnings.append(f"warning: by estimate, at its peak {shortage.describe()}")
    return warnings


# -- the table -------------------------------------------------------------------------------------


def memory_table(parts: Sequence[Part]) -> str:
    """List the parts of one worker of each role, then the sum in each memory."""
    totals = _all_bytes(parts)
    rows = [*_rows_of_processes(parts), *_rows_of_memories(totals)]
    is_large = max(totals.values()) > 16 * GIB
    lines = ["memory at the most, by estimate:"]
    for row in rows:
        text = f"{row.num_bytes / MIB:,.0f} MiB"
        if is_large:
            text = f"{row.num_bytes / GIB:,.1f} GiB"
        lines.append(f"{row.label:<27}{text:>11}")
    return "\n".join(lines)


class _Row(NamedTuple):
    label: str
    num_bytes: int


def _all_bytes(parts: Sequence[Part]) -> Counter[Memory]:
    """Sum the parts in each memory, also those that are not required."""
    totals = bytes_by_memory(parts)
    for part in parts:
        if not part.need.is_required:
            totals[part.memory] += part.need.num_bytes
    return totals


def _rows_of_processes(parts: Sequence[Part]) -> Iterator[_Row]:
    for process, grouped in groupby(parts, key=lambda part: part.process):
        own = list(grouped)
        total = sum(part.need.num_bytes for part in own)
        yield _Row(process, total)
        first_memory = own[0].memory
        for part in own:
            where = "" if part.memory == first_memory else ", cpu"
            yield _Row(f"  {part.need.what}{where}", part.need.num_bytes)


def _rows_of_memories(totals: Mapping[Memory, int]) -> Iterator[_Row]:
    """Yield the sum and what is available, of accelerators first."""
    cpu_last = sorted(totals, key=lambda memory: memory.name == "cpu")
    for memory in cpu_last:
        name = "all on cpu" if memory.name == "cpu" else memory.name
        yield _Row(name, totals[memory])
        if memory.num_bytes < math.inf:
            yield _Row("  available", int(memory.num_bytes))


def in_gib(num_bytes: float) -> str:
    """Write bytes in GiB, or in MiB where that is less than 0.1."""
    if num_bytes >= GIB / 10:
        return f"{num_bytes / GIB:,.2f} GiB"
    return f"{num_bytes / MIB:,.0f} MiB"
