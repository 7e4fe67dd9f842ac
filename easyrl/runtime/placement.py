"""Choose the engine, and the device, threads and groups in flight of each worker."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from easyrl import devices
from easyrl.channels.ring_buffer import RingLayout
from easyrl.config import ConfigError
from easyrl.config.devices import DeviceSet
from easyrl.config.model import DType
from easyrl.config.rollout import MAX_BRANCHES
from easyrl.config.spec import EngineSpec, RunSpec
from easyrl.engines.vllm.platforms import unsupported_reason
from easyrl.processes import num_cores, split_cores

ROWS_OF_EVALUATION = 128  # sequences in flight per engine in an evaluation


@dataclass(frozen=True, slots=True)
class EngineChoice:
    name: Literal["embedded", "vllm"] = "embedded"
    reason: str = ""  # why `auto` chose it
    tensor_parallel_size: int = 1  # devices of one engine


@dataclass(frozen=True, slots=True)
class Placement:
    infer: DeviceSet
    train: DeviceSet
    accelerator: str  # kind of the accelerators in torch; "cpu" where there is none
    num_threads: int  # of each worker
    max_concurrent_groups: int  # of each rollout worker
    engine: EngineChoice = EngineChoice()
    infer_memory_fraction: float = 0.5  # the rollout worker's part of a shared accelerator's memory
    has_own_cores: bool = False  # each worker; else they run on any core
    lends_cores: bool = False
    """Whether workers use the cores of waiting workers of the other role (vLLM only lends its)."""
    spare: tuple[int, ...] = ()  # indices of `devices.spare`; on the CPU they follow `infer`
    max_rollout_workers: int = 1  # that the run may have at a time (`easyrl scale`)
    num_accelerators: int = 0  # of the machine, or of the Ray cluster
    cluster: str = ""  # the Ray cluster, as text
    assumed: devices.AssumedDevices | None = None  # instead of what the machine has
    reward_index: int | None = None  # the reward models' accelerator; None: the CPU, or no models

    @property
    def accelerators(self) -> list[int]:
        sets = (self.infer, self.train)
        return sorted({n for each in sets if each.kind == "accelerator" for n in each.indices})

    @property
    def reward_environment(self) -> dict[str, str]:
        """Variables that show the process of reward models its device alone."""
        if self.reward_index is None:
            return {}
        return devices.visible_environment(self.accelerator, [self.reward_index])

    @property
    def num_rollout_workers(self) -> int:
        return self.infer.count // self.engine.tensor_parallel_size

    @property
    def is_ray(self) -> bool:
        return self.infer.is_ray

    @property
    def shares_device(self) -> bool:
        return self.infer.kind == "accelerator" and self.infer == self.train

    @property
    def weights_cross_on_cpu(self) -> bool:
        """Whether no accelerator backend connects rollout and train workers: NCCL and HCCL refuse
        two ranks on one device, and do not support the CPU."""
        return self.shares_device or self.infer.kind != self.train.kind

    def num_workers(self, role: str) -> int:
        return self.num_rollout_workers if role == "rollout" else self.train.count

    def indices_of(self, role: str, number: int) -> tuple[int, ...]:
        """A worker's device numbers, as in the config; empty on the CPU."""
        is_rollout = role == "rollout"
        size = self.engine.tensor_parallel_size if is_rollout else 1
        used = self.infer if is_rollout else self.train
        return used.indices[number * size : (number + 1) * size] if used.kind != "cpu" else ()

    def memory_fraction(self, role: str) -> float | None:
        """Fraction of its device's memory that a worker may take; None: the device is its own."""
        part = self.infer_memory_fraction if role == "rollout" else 1.0 - self.infer_memory_fraction
        return part if self.shares_device else None

    def cores_of(self, role: str, number: int) -> tuple[int, ...]:
        """The CPU cores of a worker; empty: it runs on any core, as one that was added later."""
        if number >= self.num_workers(role) or not self.has_own_cores:
            return ()
        first = 0 if role == "rollout" else self.num_rollout_workers
        cores = split_cores(self.num_rollout_workers + self.train.count)
        return cores[first + number] if cores else ()


@dataclass(frozen=True, slots=True)
class Machine:
    """The accelerators to choose from, whether in use or not: of this machine or a Ray cluster."""

    kind: str  # in torch; "cpu" where there are none
    count: int
    node_cpus: tuple[int, ...] = ()  # of each node of a Ray cluster
    cluster: str = ""  # its nodes, as text
    assumed: devices.AssumedDevices | None = None


def resolve_placement(spec: RunSpec, assumed: devices.AssumedDevices | None = None) -> Placement:
    """Choose devices, threads, cores and engine. `assumed`: the accelerators to plan for, instead
    of this machine's or a Ray cluster's. Raises ConfigError for missing devices."""
    infer, train, spare = spec.devices.sets
    kept = [*_reward_device(spec), *([] if spare is None else [spare])]
    if assumed is None:
        machine = _find_machine(spec, [infer, train, *kept])
    else:
        machine = Machine(assumed.kind, assumed.count, assumed=assumed)
        wanted = [each for each in (infer, train, spare) if each is not None]
        if others := [each for each in wanted if each.is_ray or each.kind == "cpu"]:
            raise ConfigError(f"--assume: expected devices like 0-3 with it, got '{others[0]}'")
    if machine.cluster:
        infer, train, spare = _on_cluster(infer, train, spare)
    infer = infer or _default("infer", machine.count, train, kept)
    train = train or _default("train", machine.count, infer, kept)
    check_disjoint(infer, train)
    most_train = spec.batches.groups_per_update
    if train.count > most_train:
        raise ConfigError(
            f"devices.train (--train-devices): expected at most {most_train} devices "
            f"(train.prompts_per_iteration / train.updates_per_iteration), got '{train}'"
        )
    placement = _place(spec, infer, train, machine)
    most = spec.devices.max_rollout_workers
    if most is not None and most < placement.num_rollout_workers:
        expected = f"null or at least {placement.num_rollout_workers} (devices.infer='{infer}')"
        raise ConfigError(f"devices.max_rollout_workers: expected {expected}, got {most}")
    if spare is not None:
        if spare.kind == "cpu":
            spare = _behind(spare, infer.count)
        _check_engines("devices.spare (--spare-devices)", spare, placement, infer)
        placement = replace(placement, spare=spare.indices)
    num_devices = infer.count + len(placement.spare)
    most = most or num_devices // placement.engine.tensor_parallel_size
    return replace(placement, max_rollout_workers=most)


def place_evaluation(spec: RunSpec, num_prompts: int, num_samples: int) -> Placement:
    """The placement of an evaluation: engines only, by default one on each accelerator."""
    infer, _, _ = spec.devices.sets
    kept, trained = _reward_device(spec), DeviceSet("accelerator", ())  # nothing is trained
    machine = _find_machine(spec, [infer, *kept])
    infer = infer or _default("infer", machine.count, trained, kept)
    placement = _place(spec, infer, DeviceSet("cpu", ()), machine)
    most = spec.engine.max_concurrent_groups or max(1, ROWS_OF_EVALUATION // num_samples)
    per_engine = -(-num_prompts // placement.num_rollout_workers)
    return replace(placement, max_concurrent_groups=min(most, per_engine))


def check_disjoint(infer: DeviceSet, train: DeviceSet) -> None:
    """Refuse sets that overlap, except one single accelerator given to both (they share it)."""
    are_accelerators = infer.kind == train.kind == "accelerator"
    is_shared = infer == train and infer.count == 1
    if are_accelerators and not is_shared and set(infer.indices) & set(train.indices):
        raise ConfigError(
            "devices.train (--train-devices): expected other devices than devices.infer "
            f"(--infer-devices), or one single accelerator for both, got '{train}' and '{infer}'"
        )


def _find_machine(spec: RunSpec, used: Sequence[DeviceSet | None]) -> Machine:
    """Connect to the Ray cluster if devices of one are wanted, else look at this machine, without
    torch if only CPUs are used."""
    kinds = {None if each is None else each.kind for each in used}
    wanted = [each for each in used if each is not None]
    if not any(each.is_ray for each in wanted):
        if spec.devices.ray_address is not None:
            raise ConfigError(
                "devices.ray_address (--ray-address): expected ray: devices with it "
                f"(--infer-devices ray:1), or null, got '{spec.devices.ray_address}'"
            )
        if kinds == {"cpu"}:
            return Machine("cpu", 0)
        return Machine(*devices.accelerator(is_asked="accelerator" in kinds))
    if not all(each.is_ray and each.kind == wanted[0].kind for each in wanted):
        raise ConfigError(
            "devices (--infer-devices, --train-devices, --spare-devices): expected all of one "
            f"kind with ray: devices, got {', '.join(map(str, wanted))}"
        )
    from easyrl.runtime.ray.cluster import connect

    machine = connect(spec.devices.ray_address, sum(each.count for each in wanted) + 1)
    if wanted[0].kind == "accelerator" and machine.kind == "cpu":
        raise ConfigError("devices: expected ray:cpu:N, as there are no accelerators, got ray:N")
    return machine


def _on_cluster(
    infer: DeviceSet | None, train: DeviceSet | None, spare: DeviceSet | None
) -> tuple[DeviceSet, DeviceSet, DeviceSet | None]:
    """Number a cluster's devices so that those of workers differ; a worker each by default."""
    kind = next(each.kind for each in (infer, train, spare) if each is not None)
    one = DeviceSet(kind, (0,), is_ray=True)
    infer, train = infer or one, train or one
    if kind == "cpu":
        return infer, train, spare
    return _behind(infer, train.count), train, spare and _behind(spare, train.count + infer.count)


def _behind(devices: DeviceSet, first: int) -> DeviceSet:
    return replace(devices, indices=tuple(first + index for index in devices.indices))


def _place(spec: RunSpec, infer: DeviceSet, train: DeviceSet, machine: Machine) -> Placement:
    kind = machine.kind
    for key, wanted in (("infer", infer), ("train", train)):
        _check_exist(f"devices.{key} (--{key}-devices)", wanted, kind, machine.count)
    for wanted in (of_rewards := _reward_device(spec)):
        _check_exist("reward.model_device", wanted, kind, machine.count)
    is_planned = machine.assumed is not None
    engine = choose_engine(
        spec.engine, spec.model.dtype, infer, accelerator=kind, is_planned=is_planned
    )
    num_engines = infer.count // engine.tensor_parallel_size
    num_workers = num_engines + train.count
    is_on_cpu = infer.kind == train.kind == "cpu"
    has_own_cores = spec.devices.threads is None and is_on_cpu and not machine.cluster
    num_threads = max(1, num_cores() // num_workers)
    if machine.cluster:
        # The most with which all workers fit the nodes.
        count, nodes = max(num_workers, 0 if is_on_cpu else machine.count), machine.node_cpus
        most = range(max(nodes, default=1), 0, -1)
        num_threads = next((n for n in most if sum(c // n for c in nodes) >= count), 1)
    can_lend = has_own_cores and train.count > 0 and not spec.schedule.is_deterministic
    lends_cores = can_lend and num_workers <= num_cores()
    borrows = lends_cores and engine.name == "embedded"
    # Generating and training in turn is faster on one device, and vLLM queues what does not fit.
    starts_all = engine.name == "vllm" and not is_on_cpu and infer == train
    most_groups = max_concurrent_groups(spec, num_engines, borrows=borrows, starts_all=starts_all)
    return Placement(
        infer=infer,
        train=train,
        accelerator=kind,
        num_threads=spec.devices.threads or num_threads,
        max_concurrent_groups=most_groups,
        engine=engine,
        infer_memory_fraction=spec.engine.memory_fraction or 0.5,
        has_own_cores=has_own_cores,
        lends_cores=lends_cores,
        max_rollout_workers=num_engines,
        num_accelerators=machine.count,
        cluster=machine.cluster,
        assumed=machine.assumed,
        reward_index=of_rewards[0].indices[0] if of_rewards else None,
    )


def _reward_device(spec: RunSpec) -> list[DeviceSet]:
    index = spec.rewards.options.model_device
    if index == "cpu" or not spec.rewards.models:
        return []
    if any(each is not None and each.is_ray for each in spec.devices.sets):
        raise ConfigError(f"reward.model_device: expected cpu with ray: devices, got {index}")
    return [DeviceSet("accelerator", (index,))]


def _check_exist(key: str, wanted: DeviceSet, kind: str, count: int) -> None:
    if wanted.is_ray:  # the cluster may grow: `RayLauncher` waits for it
        return
    if wanted.kind == "accelerator" and max(wanted.indices) >= count:
        if count:
            expected = f"{kind} devices 0-{count - 1}, or cpu"
            raise ConfigError(f"{key}: expected {expected}, got '{wanted}'")
        reason = devices.unusable_reason() or "easyrl doctor"
        raise ConfigError(
            f"{key}: expected cpu, as this machine has no accelerator that torch can use "
            f"({reason}), got '{wanted}'; to plan for others: easyrl grpo --dry-run --assume "
            "8x80GiB"
        )


def numbered(wanted: DeviceSet, placement: Placement) -> DeviceSet:
    """Number the devices of a live run's engines as at its start (`_on_cluster`)."""
    is_cluster_of_accelerators = wanted.is_ray and wanted.kind == "accelerator"
    return _behind(wanted, placement.train.count) if is_cluster_of_accelerators else wanted


def engines_on(devices: DeviceSet, placement: Placement) -> list[tuple[int, ...]]:
    size = placement.engine.tensor_parallel_size
    return [devices.indices[at : at + size] for at in range(0, devices.count, size)]


def first_engines(number: int, placement: Placement) -> DeviceSet:
    """The devices of this many engines, `devices.infer` before `devices.spare`."""
    num_devices = number * placement.engine.tensor_parallel_size
    indices = (*placement.infer.indices, *placement.spare)[:num_devices]
    return replace(placement.infer, indices=tuple(sorted(indices)))


def check_scale(
    spec: RunSpec,
    placement: Placement,
    current: DeviceSet,
    wanted: DeviceSet,
    changing: Collection[str] = (),
) -> None:
    """Check that the engines of a live run on devices `current` can be changed to `wanted`. Raises
    ConfigError. `changing`: workers that are starting or leaving."""
    if spec.schedule.is_deterministic:
        raise ConfigError(
            "runtime.deterministic: expected false in a run whose engines change, got true"
        )
    if changing:
        names = ", ".join(changing)
        raise ConfigError(f"expected one change at a time, still starting or leaving: {names}")
    key, before = "--infer-devices", engines_on(current, placement)
    _check_engines(key, wanted, placement, current, kept=before)
    num_workers = len({*before, *engines_on(wanted, placement)})
    if num_workers > placement.max_rollout_workers:
        raise ConfigError(
            f"{key}: expected at most {placement.max_rollout_workers} rollout workers "
            f"(devices.max_rollout_workers), those that leave included, got {num_workers}"
        )


def _check_engines(
    key: str,
    wanted: DeviceSet,
    placement: Placement,
    current: DeviceSet,
    kept: Sequence[tuple[int, ...]] = (),
) -> None:
    """Check that engines on `wanted`, except those `kept`, can be added to those on `current`."""
    size = placement.engine.tensor_parallel_size
    new = {i for engine in engines_on(wanted, placement) if engine not in kept for i in engine}
    trained = placement.train.indices if placement.train.kind == "accelerator" else ()
    expected = ""
    if (wanted.kind, wanted.is_ray) != (current.kind, current.is_ray):
        expected = f"devices of the same kind as '{current}'"
    elif wanted.count % size:
        expected = f"a multiple of {size} devices (rollout.tensor_parallel_size)"
    elif wanted.kind == "accelerator":
        _check_exist(key, wanted, placement.accelerator, placement.num_accelerators)
        if in_use := new & {*trained, *current.indices}:
            expected = f"devices that are free for new engines, unlike {min(in_use)}"
    if expected:
        raise ConfigError(f"{key}: expected {expected}, got '{wanted}'")


def choose_engine(
    spec: EngineSpec,
    dtype: DType,
    infer: DeviceSet,
    *,
    accelerator: str = "",
    is_planned: bool = False,
) -> EngineChoice:
    """Choose the engine for devices `infer`, in torch of the kind `accelerator` if not the CPU.
    `is_planned`: vLLM need not be installed. Raises ConfigError for an engine that cannot run."""
    wanted, size = spec.name, spec.tensor_parallel_size
    kind = "cpu" if infer.kind == "cpu" else accelerator
    reason = unsupported_reason(kind, dtype)
    if is_planned and wanted == "vllm":
        reason = None
    if spec.is_deterministic and not (kind == "cpu" and size == 1):
        reason = "runtime.deterministic=true needs it, except on CPUs without tensor parallelism"
    if wanted == "vllm" and reason is not None:
        raise ConfigError(f"rollout.engine: expected embedded, because {reason}, got vllm")
    if wanted == "auto" and kind == "cpu":
        reason = "the default on the CPU"
    is_vllm = wanted == "vllm" or (wanted == "auto" and reason is None)
    if infer.count % size or (size > 1 and not is_vllm):
        expected = f"a divisor of {infer.count} (devices.infer), and 1 with the embedded engine"
        raise ConfigError(f"rollout.tensor_parallel_size: expected {expected}, got {size}")
    why = (reason or "it is installed") if wanted == "auto" else ""
    return EngineChoice("vllm" if is_vllm else "embedded", why, size)


def ring_layout(spec: RunSpec, placement: Placement) -> RingLayout:
    """Return the ring buffer's limits, which do not change while the run goes on."""
    limits = spec.limits
    nodes_per_completion = 1
    if spec.episodes is not None and spec.episodes.agent is not None:
        nodes_per_completion = 2 * MAX_BRANCHES  # each branch may cut what it continues in two
    has_own_prompt = spec.data.teacher_prompt is not None
    return RingLayout(
        num_slots=spec.schedule.ring_slots,
        num_generations=spec.schedule.num_generations,
        max_prompt_length=limits.max_prompt_length,
        max_completion_length=limits.max_completion_length,
        num_owners=placement.max_rollout_workers + placement.train.count,
        num_groups=spec.schedule.prompts_per_iteration,
        max_teacher_prompt_length=limits.max_prompt_length if has_own_prompt else 0,
        nodes_per_completion=nodes_per_completion,
    )


def device_names(placement: Placement) -> dict[str, str]:
    """Device names by worker, rollout workers first, with the numbers of the config: `cpu`,
    `cuda:3`, or `cuda:0,1` for an engine on two devices."""
    names = {}
    for role in ("rollout", "train"):
        for number in range(placement.num_workers(role)):
            indices = placement.indices_of(role, number)
            names[f"{role}-{number}"] = device_name(placement.accelerator, indices)
    return names


def device_name(accelerator: str, indices: Sequence[object]) -> str:
    return f"{accelerator}:{','.join(map(str, indices))}" if indices else "cpu"


def describe(placement: Placement, found: Mapping[str, str] | None = None) -> str:
    """Describe the placement in lines of text. `found`: `Launcher.devices`, once that is known."""
    lines = [placement.cluster] if placement.cluster else []
    threads = f", {placement.num_threads} CPU thread(s)"
    if placement.assumed is not None:
        lines, threads = [f"assumed: {placement.assumed}, and enough memory of the host"], ""
    for worker, name in (found or device_names(placement)).items():
        device = name if found or not placement.is_ray else re.sub("[0-9]+", "?", name)
        lines.append(f"{worker}: {device}{threads}")
    lines.append(f"groups in flight per rollout worker: {placement.max_concurrent_groups}")
    why = f" ({placement.engine.reason})" if placement.engine.reason else ""
    lines.append(f"engine of the rollout workers: {placement.engine.name}{why}")
    if (index := placement.reward_index) is not None:
        lines.append(f"reward models: {device_name(placement.accelerator, [index])}")
    if (fraction := placement.memory_fraction("rollout")) is not None:
        lines.append(f"shared accelerator: {fraction:.0%} of its memory for the rollout worker")
    return "\n".join(lines)


def max_concurrent_groups(
    spec: RunSpec, num_engines: int, *, borrows: bool = False, starts_all: bool = False
) -> int:
    """Return the groups in flight per engine: enough for an efficient engine, few enough that
    groups finish one by one, more if it `borrows` cores; at most its share of the prompts."""
    schedule, most = spec.schedule, spec.engine.max_concurrent_groups
    per_engine = -(-schedule.prompts_per_iteration // num_engines)
    if most is not None:
        return min(most, per_engine)
    is_sync = schedule.schedule == "sync" and not schedule.is_deterministic
    if is_sync or starts_all:  # no trainer waits for the first group
        return per_engine
    return max(min(per_engine, 16), per_engine // (2 if borrows else 4))


def _default(key: str, count: int, other: DeviceSet | None, kept: Sequence[DeviceSet]) -> DeviceSet:
    """The default: one accelerator trains and the others generate, or one CPU worker each. `kept`:
    devices for something else."""
    if count == 0 or (other is not None and other.kind == "cpu"):
        return DeviceSet("cpu", (0,))
    every, own = range(count), {index for each in kept for index in each.indices}
    free = [n for n in every if n not in own and (other is None or n not in other.indices)]
    free = free or [n for n in every if n not in own] or [*every]
    if key == "train":
        return DeviceSet("accelerator", (free[-1],))
    return DeviceSet(
        "accelerator", tuple(free if other is not None or len(free) == 1 else free[:-1])
    )
