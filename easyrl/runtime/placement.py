"""Which worker runs on which device, with how many threads and groups in flight."""

from __future__ import annotations

from dataclasses import dataclass

from easyrl import devices
from easyrl.channels.ring_buffer import RingLayout
from easyrl.config import Config, ConfigError, DeviceSet, check_disjoint, parse_device_set
from easyrl.processes import num_cores, split_cores
from easyrl.runtime.engine_choice import EMBEDDED, EngineChoice, choose_engine

ROWS_OF_EVALUATION = 128
"""Sequences in flight per engine in an evaluation."""


@dataclass(frozen=True, slots=True)
class Placement:
    infer: DeviceSet
    train: DeviceSet
    accelerator: str
    """Kind of the accelerators in torch; "cpu" where there is none."""
    infer_threads: int
    train_threads: int
    max_concurrent_groups: int
    """Per rollout worker."""
    engine: EngineChoice = EMBEDDED
    infer_memory_fraction: float = 0.5
    """The rollout worker's fraction of the memory of a shared accelerator."""
    cores: tuple[tuple[int, ...], ...] = ()
    """The CPU cores of each worker, rollout workers first; empty where workers run on any core."""
    lends_cores: bool = False
    """Whether the other group uses a worker's cores while it waits. vLLM borrows none: it computes
    in a process of its own with a fixed number of threads."""

    @property
    def num_rollout_workers(self) -> int:
        """One for each engine."""
        return self.infer.count // self.engine.tensor_parallel_size

    @property
    def shares_device(self) -> bool:
        return self.infer.kind == "accelerator" and self.infer == self.train

    @property
    def weights_cross_on_cpu(self) -> bool:
        """Whether no accelerator backend connects the two groups: NCCL and HCCL refuse two ranks on
        one device, and do not support the CPU."""
        return self.shares_device or self.infer.kind != self.train.kind

    def num_workers(self, role: str) -> int:
        return self.num_rollout_workers if role == "rollout" else self.train.count

    def indices_of(self, role: str, number: int) -> tuple[int, ...]:
        """A worker's device numbers, as in the config."""
        if role == "train":
            return self.train.indices[number : number + 1]
        size = self.engine.tensor_parallel_size
        return self.infer.indices[number * size : (number + 1) * size]

    def device_name(self, role: str, number: int) -> str:
        """A worker's device or devices, with the numbers of the config."""
        if (self.infer if role == "rollout" else self.train).kind == "cpu":
            return "cpu"
        return f"{self.accelerator}:{','.join(map(str, self.indices_of(role, number)))}"

    def memory_fraction(self, role: str) -> float | None:
        """Fraction of its device's memory that a worker may take; None: the device is its own."""
        if not self.shares_device:
            return None
        part = self.infer_memory_fraction
        return part if role == "rollout" else 1.0 - part

    def cores_of(self, role: str, number: int) -> tuple[int, ...]:
        """The CPU cores of a worker; empty: it runs on any core."""
        if not self.cores:
            return ()
        return self.cores[number if role == "rollout" else self.num_rollout_workers + number]


def resolve_placement(config: Config) -> Placement:
    """Choose devices, threads, cores and engine. Raises ConfigError for missing devices."""
    wanted = {
        key: None if text is None else parse_device_set(text)
        for key, text in (("infer", config.devices.infer), ("train", config.devices.train))
    }
    if wanted["train"] is not None:
        _check_has_groups(wanted["train"], config)  # before torch is loaded
    kind, count = "cpu", 0
    if any(devices_ is None or devices_.kind == "accelerator" for devices_ in wanted.values()):
        is_asked = any(devices_ and devices_.kind == "accelerator" for devices_ in wanted.values())
        kind, count = devices.accelerator(is_asked=is_asked)
    infer = wanted["infer"] or _default("infer", count, wanted["train"])
    train = wanted["train"] or _default("train", count, infer)
    for key, devices_ in (("infer", infer), ("train", train)):
        _check_present(key, devices_, kind, count)
    check_disjoint(infer, train)
    engine = choose_engine(config, infer, accelerator=kind)
    num_engines = infer.count // engine.tensor_parallel_size
    num_workers = num_engines + train.count
    share = max(1, num_cores() // num_workers)
    has_own_cores = config.devices.threads is None and infer.kind == train.kind == "cpu"
    lends_cores = has_own_cores and not config.runtime.deterministic and num_workers <= num_cores()
    return Placement(
        infer=infer,
        train=train,
        accelerator=kind,
        infer_threads=config.devices.threads or share,
        train_threads=config.devices.threads or share,
        max_concurrent_groups=_max_concurrent_groups(
            config, num_engines, lends_cores=lends_cores and engine.name == "embedded"
        ),
        engine=engine,
        infer_memory_fraction=config.rollout.memory_fraction or 0.5,
        cores=split_cores(num_workers) if has_own_cores else (),
        lends_cores=lends_cores,
    )


def place_evaluation(config: Config, num_prompts: int, num_samples: int) -> Placement:
    """The placement of an evaluation: engines only, by default one on each accelerator."""
    text = config.devices.infer
    wanted = None if text is None else parse_device_set(text)
    kind, count = "cpu", 0
    if wanted is None or wanted.kind == "accelerator":
        kind, count = devices.accelerator(is_asked=wanted is not None)
    everything = DeviceSet("accelerator", tuple(range(count))) if count else DeviceSet("cpu", (0,))
    infer = wanted or everything
    _check_present("infer", infer, kind, count)
    engine = choose_engine(config, infer, accelerator=kind)
    num_engines = infer.count // engine.tensor_parallel_size
    share = config.devices.threads or max(1, num_cores() // num_engines)
    has_own_cores = config.devices.threads is None and infer.kind == "cpu"
    most = config.rollout.max_concurrent_groups or max(1, ROWS_OF_EVALUATION // num_samples)
    return Placement(
        infer=infer,
        train=DeviceSet("cpu", ()),
        accelerator=kind,
        infer_threads=share,
        train_threads=1,
        max_concurrent_groups=min(most, -(-num_prompts // num_engines)),
        engine=engine,
        cores=split_cores(num_engines) if has_own_cores else (),
    )


def ring_layout(config: Config, placement: Placement) -> RingLayout:
    """Layout of the run's ring buffer. Raises ValueError if it does not fit the memory."""
    layout = RingLayout(
        num_slots=config.ring_slots,
        num_generations=config.rollout.num_generations,
        max_prompt_length=config.data.max_prompt_length,
        max_completion_length=config.rollout.max_completion_length,
        num_owners=placement.num_rollout_workers + placement.train.count,
    )
    layout.check_memory()
    return layout


def device_names(placement: Placement) -> dict[str, str]:
    """Device names by worker, rollout workers first."""
    return {
        f"{role}-{number}": placement.device_name(role, number)
        for role in ("rollout", "train")
        for number in range(placement.num_workers(role))
    }


def describe(placement: Placement) -> str:
    """Describe the placement in lines of text."""
    lines = []
    for role, threads in (
        ("rollout", placement.infer_threads),
        ("train", placement.train_threads),
    ):
        for number in range(placement.num_workers(role)):
            device = placement.device_name(role, number)
            cores = ",".join(map(str, placement.cores_of(role, number)))
            on_cores = f" on the cores {cores}" if cores else ""
            lines.append(f"{role}-{number}: {device}, {threads} CPU thread(s){on_cores}")
    if placement.lends_cores:
        who, whom = (
            ("worker", "other group")
            if placement.engine.name == "embedded"
            else ("engine", "trainer")
        )
        lines.append(f"the {whom} uses the cores of a waiting {who}")
    lines.append(f"groups in flight per rollout worker: {placement.max_concurrent_groups}")
    why = f" ({placement.engine.reason})" if placement.engine.reason else ""
    lines.append(f"engine of the rollout workers: {placement.engine.name}{why}")
    if placement.shares_device:
        parts = [f"{placement.memory_fraction(role):.0%}" for role in ("rollout", "train")]
        lines.append(
            f"both groups share one accelerator: {parts[0]} of its memory for the rollout worker, "
            f"{parts[1]} for the train worker (rollout.memory_fraction)"
        )
    return "\n".join(lines)


def _max_concurrent_groups(config: Config, num_workers: int, *, lends_cores: bool) -> int:
    """Enough rows to keep the engine efficient, few enough that groups finish one by one, and at
    most an engine's share of the prompts. More where the waiting trainer's cores are used."""
    per_worker = -(-config.train.prompts_per_iteration // num_workers)
    if config.rollout.max_concurrent_groups is not None:
        return min(config.rollout.max_concurrent_groups, per_worker)
    if config.runtime.schedule == "sync" and not config.runtime.deterministic:
        return per_worker  # no trainer waits for the first group
    return max(min(per_worker, 16), per_worker // (2 if lends_cores else 4))


def _default(key: str, count: int, other: DeviceSet | None) -> DeviceSet:
    """The default: one accelerator trains and the others generate, or one CPU worker each."""
    if count == 0 or (other is not None and other.kind == "cpu"):
        return DeviceSet("cpu", (0,))
    if count == 1:
        return DeviceSet("accelerator", (0,))
    taken = other.indices if other is not None else ()
    free = [index for index in range(count) if index not in taken]
    if not free:
        raise ConfigError(
            f"devices.{key} (--{key}-devices): expected a device set, because the other group has "
            f"all {count} devices, got null"
        )
    if key == "train":
        return DeviceSet("accelerator", (free[-1],))
    return DeviceSet("accelerator", tuple(free if other is not None else free[:-1]))


def _check_has_groups(train: DeviceSet, config: Config) -> None:
    prompts, updates = config.train.prompts_per_iteration, config.train.updates_per_iteration
    if train.count > prompts // updates:
        raise ConfigError(
            f"devices.train (--train-devices): expected at most {prompts // updates} devices, one "
            f"for each group of an update (train.prompts_per_iteration={prompts}, "
            f"train.updates_per_iteration={updates}), got '{train}'"
        )


def _check_present(key: str, wanted: DeviceSet, kind: str, count: int) -> None:
    if wanted.kind == "cpu":
        return
    missing = [index for index in wanted.indices if index >= count]
    if missing:
        expected = (
            f"{kind} devices 0-{count - 1}, or cpu" if count else "cpu (no accelerator found)"
        )
        raise ConfigError(f"devices.{key} (--{key}-devices): expected {expected}, got '{wanted}'")
