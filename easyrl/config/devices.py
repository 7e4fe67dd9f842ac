"""Section `devices` of the config, and the device sets that it names."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator

from easyrl.config.section import MayChange, PositiveInt, Section


@dataclass(frozen=True, slots=True)
class DeviceSet:
    """Devices of one group of workers, one worker each."""

    kind: Literal["cpu", "accelerator"]
    indices: tuple[int, ...]
    """Device numbers; for the CPU the workers' numbers, 0 to count - 1. On a Ray cluster, which
    chooses the devices, they only tell devices apart."""
    is_ray: bool = False

    @property
    def count(self) -> int:
        return len(self.indices)

    def __str__(self) -> str:
        if self.is_ray:
            return f"ray:{'cpu:' if self.kind == 'cpu' else ''}{self.count}"
        if self.kind == "cpu":
            return "cpu" if self.count == 1 else f"cpu:{self.count}"
        return range_words(self.indices)


def parse_device_set(text: str) -> DeviceSet:
    """Parse `0-3`, `0,2,5`, `0-1,4`, `cpu`, `cpu:3`, `ray:4` or `ray:cpu:4`. Raises ValueError."""
    if match := re.fullmatch(r"ray:(cpu:)?([1-9][0-9]{0,3})", text.strip()):
        kind: Literal["cpu", "accelerator"] = "cpu" if match[1] else "accelerator"
        count = int(match[2])
        return DeviceSet(kind, tuple(range(count)), is_ray=True)
    if match := re.fullmatch(r"cpu(?::([1-9][0-9]{0,3}))?", text.strip()):
        count = int(match[1] or 1)
        return DeviceSet("cpu", tuple(range(count)))
    indices: list[int] = []
    for part in text.split(","):
        part_indices = _indices_of(part)
        if not part_indices or set(indices) & set(part_indices):
            raise ValueError(
                "expected 0-3 (a range), 0,2,5 (each once), cpu or cpu:3 (3 workers), or on a Ray "
                "cluster ray:4 or ray:cpu:4"
            )
        indices += part_indices
    return DeviceSet("accelerator", tuple(sorted(indices)))


def _indices_of(part: str) -> range:
    """Parse `5` or `0-3`. Anything else is an empty range."""
    match = re.fullmatch(r"\s*([0-9]{1,4})(?:-([0-9]{1,4}))?\s*", part)
    if match is None:
        return range(0)
    first = int(match[1])
    last = int(match[2] or first)
    return range(first, last + 1)


def range_words(indices: Sequence[int]) -> str:
    """Write ascending indices as `0-3,6`, which `parse_device_set` reads."""
    ranges: list[list[int]] = []
    for index in indices:
        if ranges and index == ranges[-1][-1] + 1:
            ranges[-1].append(index)
        else:
            ranges.append([index])
    words = []
    for each in ranges:
        first, last = each[0], each[-1]
        words.append(str(first) if first == last else f"{first}-{last}")
    return ",".join(words)


def _check(text: str) -> str:
    parse_device_set(text)
    return text


DeviceWords = Annotated[str, AfterValidator(_check)]
"""A device set as `parse_device_set` reads it."""


class DevicesConfig(Section):
    """Devices that generate and devices that train: `0-3`, `0,2,5`, `cpu` (one worker) or `cpu:3`
    (three workers); on a Ray cluster `ray:4` (four accelerators) or `ray:cpu:4` (four workers)."""

    infer: MayChange[DeviceWords | None] = None
    """Devices that generate; null: chosen from what the machine has."""
    train: MayChange[DeviceWords | None] = None
    """Devices that train; null: chosen from what the machine has."""
    spare: MayChange[DeviceWords | None] = None
    """More devices that may generate, used by `runtime.autoscale`."""
    max_rollout_workers: MayChange[PositiveInt | None] = None
    """Most rollout workers of the run (`easyrl scale`); null: those of `infer` and `spare`."""
    ray_address: MayChange[str | None] = None
    """Address of the Ray cluster (`HOST:PORT`) for `ray:` devices; `local`: start one for this run.
    Null: the one in RAY_ADDRESS, or that runs on this machine, or `local` if there is none."""
    threads: MayChange[PositiveInt | None] = None
    """CPU threads of each worker. Null: its share of the cores, and on a CPU each worker has cores
    of its own. While a rollout worker waits, the train worker uses its cores, and the reverse (not
    in deterministic runs: how sums are split between threads changes their bits)."""

    @property
    def sets(self) -> list[DeviceSet | None]:
        texts = (self.infer, self.train, self.spare)
        return [None if text is None else parse_device_set(text) for text in texts]


def count_devices(names: Collection[str]) -> int:
    """Count the workers' devices. The CPU counts once per worker, an accelerator once, also if two
    workers share it. An engine on `cuda:0,1` has two."""
    num_cpus = 0
    accelerators = set()
    for name in names:
        if name.endswith("cpu"):  # on a cluster, `10.0.0.2/cpu`
            num_cpus += 1
            continue
        kind, _, numbers = name.rpartition(":")
        accelerators |= {(kind, number) for number in numbers.split(",")}
    return num_cpus + len(accelerators)
