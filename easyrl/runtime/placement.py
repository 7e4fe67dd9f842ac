"""Choose the engine, and the device, threads and groups in flight of each worker."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from easyrl import devices
from easyrl.channels.ring_buffer import RingLayout
from easyrl.config import ConfigError
from easyrl.config.devices import DeviceSet
from easyrl.config.model import DType
from easyrl.config.rollout import EMBEDDED, MAX_BRANCHES, VLLM, EngineName
from easyrl.config.spec import EngineSpec, ModelSpec, RunSpec
from easyrl.engines.vllm.platforms import unseen_reason, unsupported_reason
from easyrl.model.files import load_model_config
from easyrl.processes import num_cores, split_cores

ROWS_OF_EVALUATION = 128  # sequences in flight per engine in an evaluation
TRAINING_SHARE = 0.25  # of several accelerators, by default
EFFICIENT_GROUPS = 16  # groups in flight with which an engine is efficient
NO_DEVICES = DeviceSet("cpu", ())  # nothing trains
NO_ACCELERATORS = DeviceSet("accelerator", ())


@dataclass(frozen=True, slots=True)
class EngineChoice:
    name: EngineName = EMBEDDED
    reason: str = ""  # why `auto` chose it
    tensor_parallel_size: int = 1  # devices of one engine

    @property
    def is_vllm(self) -> bool:
        return self.name == VLLM


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
        """Device numbers of all workers that are not on the CPU."""
        numbers = set[int]()
        for used in (self.infer, self.train):
            if used.kind == "accelerator":
                numbers.update(used.indices)
        return sorted(numbers)

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
        """Return a worker's device numbers, as in the config; none on the CPU."""
        used = self.train
        size = 1
        if role == "rollout":
            used = self.infer
            size = self.engine.tensor_parallel_size
        if used.kind == "cpu":
            return ()
        return used.indices[number * size : (number + 1) * size]

    def memory_fraction(self, role: str) -> float | None:
        """Return the fraction of its device's memory that a worker may take; None: the device is
        its own."""
        if not self.shares_device:
            return None
        of_rollout = self.infer_memory_fraction
        return of_rollout if role == "rollout" else 1.0 - of_rollout

    def cores_of(self, role: str, number: int) -> tuple[int, ...]:
        """Return the CPU cores of a worker; none: it runs on any core, as one that was added
        later."""
        if number >= self.num_workers(role) or not self.has_own_cores:
            return ()
        cores = split_cores(self.num_rollout_workers + self.train.count)
        if not cores:
            return ()
        first = 0 if role == "rollout" else self.num_rollout_workers
        return cores[first + number]


@dataclass(frozen=True, slots=True)
class Machine:
    """The accelerators to choose from, whether in use or not: of this machine or a Ray cluster."""

    kind: str  # in torch; "cpu" where there are none
    count: int
    node_cpus: tuple[int, ...] = ()  # of each node of a Ray cluster
    cluster: str = ""  # its nodes, as text
    assumed: devices.AssumedDevices | None = None


class DeviceSets(NamedTuple):
    """Devices as in the config. None: the default, or no spare ones."""

    infer: DeviceSet | None
    train: DeviceSet | None
    spare: DeviceSet | None

    @property
    def given(self) -> list[DeviceSet]:
        return [each for each in self if each is not None]


def resolve_placement(
    spec: RunSpec,
    assumed: devices.AssumedDevices | None = None,
    num_train: int | None = None,
) -> Placement:
    """Choose devices, threads, cores and engine. `assumed`: the accelerators to plan for, instead
    of this machine's or a Ray cluster's. `num_train`: how many of several accelerators train where
    the config names no devices; None: the default. Raises ConfigError for missing devices."""
    sets = DeviceSets(*spec.devices.sets)
    of_rewards = _reward_device(spec)
    machine = _find_machine(spec, sets, of_rewards) if assumed is None else _assume(sets, assumed)
    if machine.cluster:
        sets = _on_cluster(sets)
    kept = [each for each in (of_rewards, sets.spare) if each is not None]
    if sets.infer is None and sets.train is None and machine.count > 1:
        infer, train = _default_split(spec, machine.count, kept, num_train)
    else:
        infer = sets.infer or _default("infer", machine.count, sets.train, kept)
        train = sets.train or _default("train", machine.count, infer, kept)
    check_disjoint(infer, train)
    most_train = spec.batches.groups_per_update
    if train.count > most_train:
        raise ConfigError(
            f"devices.train (--train-devices): expected at most {most_train} devices "
            f"(train.prompts_per_iteration / train.updates_per_iteration), got '{train}'"
        )
    placement = _place(spec, infer, train, of_rewards, machine)
    most = spec.devices.max_rollout_workers
    if most is not None and most < placement.num_rollout_workers:
        expected = f"null or at least {placement.num_rollout_workers} (devices.infer='{infer}')"
        raise ConfigError(f"devices.max_rollout_workers: expected {expected}, got {most}")
    placement = _with_spare(placement, sets.spare)
    num_devices = infer.count + len(placement.spare)
    num_that_fit = num_devices // placement.engine.tensor_parallel_size
    return replace(placement, max_rollout_workers=most or num_that_fit)


def _assume(sets: DeviceSets, assumed: devices.AssumedDevices) -> Machine:
    for each in sets.given:
        if each.is_ray or each.kind == "cpu":
            raise ConfigError(f"--assume: expected devices like 0-3 with it, got '{each}'")
    return Machine(assumed.kind, assumed.count, assumed=assumed)


def _with_spare(placement: Placement, spare: DeviceSet | None) -> Placement:
    if spare is None:
        return placement
    if spare.kind == "cpu":
        spare = _behind(spare, placement.infer.count)
    _check_engines("devices.spare (--spare-devices)", spare, placement, placement.infer)
    return replace(placement, spare=spare.indices)


def place_evaluation(spec: RunSpec, num_prompts: int, num_samples: int) -> Placement:
    """Choose the devices of an evaluation: engines only, by default one on each accelerator."""
    sets = DeviceSets(spec.devices.sets[0], None, None)
    of_rewards = _reward_device(spec)
    machine = _find_machine(spec, sets, of_rewards, has_trainers=False)
    infer = sets.infer
    if infer is None:
        kept = [] if of_rewards is None else [of_rewards]
        infer = _default("infer", machine.count, NO_ACCELERATORS, kept)
    placement = _place(spec, infer, NO_DEVICES, of_rewards, machine)
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


def _find_machine(
    spec: RunSpec, sets: DeviceSets, of_rewards: DeviceSet | None, *, has_trainers: bool = True
) -> Machine:
    """Connect to the Ray cluster if devices of one are wanted, else look at this machine, without
    torch if only CPUs are used."""
    wanted = sets.given
    if of_rewards is not None:
        wanted.append(of_rewards)
    if any(each.is_ray for each in wanted):
        return _find_cluster(spec, wanted)
    if spec.devices.ray_address is not None:
        raise ConfigError(
            "devices.ray_address (--ray-address): expected ray: devices with it "
            f"(--infer-devices ray:1), or null, got '{spec.devices.ray_address}'"
        )
    has_default = sets.infer is None or (has_trainers and sets.train is None)
    kinds = {each.kind for each in wanted}
    if kinds == {"cpu"} and not has_default:
        return Machine("cpu", 0)
    kind, count = devices.accelerator(is_asked="accelerator" in kinds)
    return Machine(kind, count)


def _find_cluster(spec: RunSpec, wanted: Sequence[DeviceSet]) -> Machine:
    kind = wanted[0].kind
    if not all(each.is_ray and each.kind == kind for each in wanted):
        raise ConfigError(
            "devices (--infer-devices, --train-devices, --spare-devices): expected all of one "
            f"kind with ray: devices, got {', '.join(map(str, wanted))}"
        )
    from easyrl.runtime.ray.cluster import connect

    num_workers = sum(each.count for each in wanted) + 1
    machine = connect(spec.devices.ray_address, num_workers)
    if kind == "accelerator" and machine.kind == "cpu":
        raise ConfigError("devices: expected ray:cpu:N, as there are no accelerators, got ray:N")
    return machine


def _on_cluster(sets: DeviceSets) -> DeviceSets:
    """Number a cluster's devices so that those of workers differ; a worker each by default."""
    kind = sets.given[0].kind
    one = DeviceSet(kind, (0,), is_ray=True)
    infer = sets.infer or one
    train = sets.train or one
    spare = sets.spare
    if kind == "accelerator":
        infer = _behind(infer, train.count)
        if spare is not None:
            spare = _behind(spare, train.count + infer.count)
    return DeviceSets(infer, train, spare)


def _behind(devices: DeviceSet, first: int) -> DeviceSet:
    return replace(devices, indices=tuple(first + index for index in devices.indices))


def _place(
    spec: RunSpec,
    infer: DeviceSet,
    train: DeviceSet,
    of_rewards: DeviceSet | None,
    machine: Machine,
) -> Placement:
    """Choose engine, threads, cores and groups in flight for these devices."""
    kind = machine.kind
    for key, wanted in (("infer", infer), ("train", train)):
        _check_exist(f"devices.{key} (--{key}-devices)", wanted, kind, machine.count)
    if of_rewards is not None:
        _check_exist("reward.model_device", of_rewards, kind, machine.count)
    is_planned = machine.assumed is not None
    engine = choose_engine(
        spec.engine,
        spec.model.dtype,
        infer,
        accelerator=kind,
        is_planned=is_planned,
        picture_type=_picture_type(spec.model),
        has_episodes=spec.episodes is not None,
    )

    num_engines = infer.count // engine.tensor_parallel_size
    num_workers = num_engines + train.count
    is_on_cpu = infer.kind == train.kind == "cpu"
    if machine.cluster:
        num_threads = _threads_on_cluster(machine, num_workers, is_on_cpu=is_on_cpu)
    else:
        num_threads = max(1, num_cores() // num_workers)
    has_own_cores = spec.devices.threads is None and is_on_cpu and not machine.cluster
    can_lend = has_own_cores and train.count > 0 and not spec.schedule.is_deterministic
    lends_cores = can_lend and num_workers <= num_cores()

    borrows = lends_cores and not engine.is_vllm
    # Generating and training in turn is faster on one device, and vLLM queues what does not fit.
    starts_all = engine.is_vllm and not is_on_cpu and infer == train
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
        reward_index=None if of_rewards is None else of_rewards.indices[0],
    )


def _threads_on_cluster(machine: Machine, num_workers: int, *, is_on_cpu: bool) -> int:
    """Return the most threads with which all workers, or one per accelerator, fit the nodes."""
    num_placed = num_workers if is_on_cpu else max(num_workers, machine.count)
    for num_threads in range(max(machine.node_cpus, default=1), 1, -1):
        num_that_fit = sum(num_cpus // num_threads for num_cpus in machine.node_cpus)
        if num_that_fit >= num_placed:
            return num_threads
    return 1


def _reward_device(spec: RunSpec) -> DeviceSet | None:
    """Return the accelerator of the reward models, if they have one. Raises ConfigError."""
    index = spec.rewards.options.model_device
    if index == "cpu" or not spec.rewards.models:
        return None
    if any(each is not None and each.is_ray for each in spec.devices.sets):
        raise ConfigError(f"reward.model_device: expected cpu with ray: devices, got {index}")
    return DeviceSet("accelerator", (index,))


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
    """Split a device set into the devices of its engines."""
    size = placement.engine.tensor_parallel_size
    return [devices.indices[first : first + size] for first in range(0, devices.count, size)]


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
    key = "--infer-devices"
    before = engines_on(current, placement)
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
    expected = ""
    if (wanted.kind, wanted.is_ray) != (current.kind, current.is_ray):
        expected = f"devices of the same kind as '{current}'"
    elif wanted.count % size:
        expected = f"a multiple of {size} devices (rollout.tensor_parallel_size)"
    elif wanted.kind == "accelerator":
        _check_exist(key, wanted, placement.accelerator, placement.num_accelerators)
        new = set[int]()
        for engine in engines_on(wanted, placement):
            if engine not in kept:
                new.update(engine)
        used = set(current.indices)
        if placement.train.kind == "accelerator":
            used.update(placement.train.indices)
        if new & used:
            expected = f"devices that are free for new engines, unlike {min(new & used)}"
    if expected:
        raise ConfigError(f"{key}: expected {expected}, got '{wanted}'")


def choose_engine(
    spec: EngineSpec,
    dtype: DType,
    infer: DeviceSet,
    *,
    accelerator: str = "",
    is_planned: bool = False,
    picture_type: str | None = None,
    has_episodes: bool = False,
) -> EngineChoice:
    """Choose the engine for devices `infer`, in torch of the kind `accelerator` if not the CPU.
    `is_planned`: vLLM need not be installed; `picture_type`: that of a model whose prompts have
    pictures; `has_episodes`: there are environments, tools or agents. Raises ConfigError for an
    engine that cannot run."""
    wanted = spec.name
    size = spec.tensor_parallel_size
    kind = "cpu" if infer.kind == "cpu" else accelerator
    reason = unsupported_reason(kind, dtype)
    if is_planned and wanted == VLLM:
        reason = None
    if reason is None and picture_type is not None:
        reason = unseen_reason(picture_type, is_planned=is_planned)
        if has_episodes:
            reason = "EasyRL gives vLLM no pictures of environments, tools or agents"
    if spec.is_deterministic and not (kind == "cpu" and size == 1):
        reason = "runtime.deterministic=true needs it, except on CPUs without tensor parallelism"
    if wanted == VLLM and reason is not None:
        raise ConfigError(f"rollout.engine: expected embedded, because {reason}, got vllm")
    if wanted == "auto" and kind == "cpu":
        reason = "the default on the CPU"
    is_vllm = wanted == VLLM or (wanted == "auto" and reason is None)
    if infer.count % size or (size > 1 and not is_vllm):
        expected = f"a divisor of {infer.count} (devices.infer), and 1 with the embedded engine"
        raise ConfigError(f"rollout.tensor_parallel_size: expected {expected}, got {size}")
    why = (reason or "it is installed") if wanted == "auto" else ""
    return EngineChoice(VLLM if is_vllm else EMBEDDED, why, size)


def _picture_type(model: ModelSpec) -> str | None:
    """Return the type of a model whose prompts have pictures; None for other runs."""
    if not model.has_pictures:
        return None
    config = load_model_config(model.path, trust_remote_code=model.trust_remote_code)
    return str(config.model_type)


def ring_layout(spec: RunSpec, placement: Placement) -> RingLayout:
    """Return the ring buffer's limits, which do not change while the run goes on."""
    limits = spec.limits
    nodes_per_completion = 1
    if spec.episodes is not None and spec.episodes.agent is not None:
        nodes_per_completion = 2 * MAX_BRANCHES  # each branch may cut what it continues in two
    has_own_prompt = spec.data.teacher_prompt is not None
    max_picture_bytes = 0
    max_shown = 0
    if spec.model.has_pictures:
        max_picture_bytes = spec.data.options.max_image_bytes
        max_shown = limits.max_prompt_length  # a picture has one token at least
    if spec.model.has_pictures and spec.shows_pictures_in_episodes:
        max_picture_bytes *= 1 + spec.schedule.num_generations
        max_shown += spec.schedule.num_generations * limits.max_completion_length
    return RingLayout(
        num_slots=spec.schedule.ring_slots,
        num_generations=spec.schedule.num_generations,
        max_prompt_length=limits.max_prompt_length,
        max_completion_length=limits.max_completion_length,
        num_owners=placement.max_rollout_workers + placement.train.count,
        num_groups=spec.schedule.prompts_per_iteration,
        max_teacher_prompt_length=limits.max_prompt_length if has_own_prompt else 0,
        nodes_per_completion=nodes_per_completion,
        max_picture_bytes=max_picture_bytes,
        max_shown=max_shown,
    )


def device_names(placement: Placement) -> dict[str, str]:
    """Return device names by worker, rollout workers first, with the numbers of the config: `cpu`,
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
    lines = []
    threads = f", {placement.num_threads} CPU thread(s)"
    if placement.assumed is not None:
        lines.append(f"assumed: {placement.assumed}, and enough memory of the host")
        threads = ""
    elif placement.cluster:
        lines.append(placement.cluster)
    for worker, name in (found or device_names(placement)).items():
        is_unknown = placement.is_ray and not found  # Ray chooses the devices
        device = re.sub("[0-9]+", "?", name) if is_unknown else name
        lines.append(f"{worker}: {device}{threads}")
    lines.append(f"groups in flight per rollout worker: {placement.max_concurrent_groups}")
    why = f" ({placement.engine.reason})" if placement.engine.reason else ""
    lines.append(f"engine of the rollout workers: {placement.engine.name}{why}")
    index = placement.reward_index
    if index is not None:
        lines.append(f"reward models: {device_name(placement.accelerator, [index])}")
    fraction = placement.memory_fraction("rollout")
    if fraction is not None:
        lines.append(f"shared accelerator: {fraction:.0%} of its memory for the rollout worker")
    return "\n".join(lines)


def max_concurrent_groups(
    spec: RunSpec, num_engines: int, *, borrows: bool = False, starts_all: bool = False
) -> int:
    """Return the groups in flight per engine: enough for an efficient engine, few enough that
    groups finish one by one, more if it `borrows` cores; at most its share of the prompts."""
    schedule = spec.schedule
    per_engine = -(-schedule.prompts_per_iteration // num_engines)
    chosen = spec.engine.max_concurrent_groups
    if chosen is not None:
        return min(chosen, per_engine)
    is_sync = schedule.schedule == "sync" and not schedule.is_deterministic
    if is_sync or starts_all:  # no trainer waits for the first group
        return per_engine
    part = per_engine // (2 if borrows else 4)
    return max(min(per_engine, EFFICIENT_GROUPS), part)


class _Split(NamedTuple):
    infer: DeviceSet
    train: DeviceSet


def _default_split(
    spec: RunSpec, count: int, kept: Sequence[DeviceSet], num_train: int | None
) -> _Split:
    """Return the split of several accelerators where no devices are named: the last ones train."""
    free = set(range(count))
    for each in kept:
        free -= set(each.indices)
    if not free:  # devices have to be shared
        free = set(range(count))
    numbers = sorted(free)
    if len(numbers) == 1:
        shared = DeviceSet("accelerator", tuple(numbers))
        return _Split(shared, shared)
    num_infer = len(numbers) - (num_train or _default_trainers(spec, len(numbers)))
    return _Split(
        infer=DeviceSet("accelerator", tuple(numbers[:num_infer])),
        train=DeviceSet("accelerator", tuple(numbers[num_infer:])),
    )


def _default_trainers(spec: RunSpec, count: int) -> int:
    """Return how many of `count` accelerators train: a quarter, at most one for each group of an
    update, and so many that engines can span the others (`rollout.tensor_parallel_size`)."""
    most = spec.batches.groups_per_update
    least = min(max(1, int(TRAINING_SHARE * count)), most)
    for num_train in range(least, min(most, count - 1) + 1):
        if (count - num_train) % spec.engine.tensor_parallel_size == 0:
            return num_train
    return least


def _default(key: str, count: int, other: DeviceSet | None, kept: Sequence[DeviceSet]) -> DeviceSet:
    """Return the default: one of `count` accelerators trains and the others generate, or one CPU
    worker each. `other`: devices of the other side, if they are known. `kept`: devices for
    something else."""
    if count == 0 or (other is not None and other.kind == "cpu"):
        return DeviceSet("cpu", (0,))
    free = set(range(count))
    for each in kept:
        free -= set(each.indices)
    if not free:  # devices have to be shared
        free = set(range(count))
    elif other is not None and not free <= set(other.indices):
        free -= set(other.indices)
    numbers = sorted(free)
    if key == "train":
        return DeviceSet("accelerator", (numbers[-1],))
    if other is None and len(numbers) > 1:
        numbers.pop()  # it trains
    return DeviceSet("accelerator", tuple(numbers))
