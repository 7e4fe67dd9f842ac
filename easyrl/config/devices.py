"""Section `devices` of the config, and the device sets that it names.

`easyrl.devices` finds out what the machine has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from easyrl.config.text import ConfigError, Section

FORMS = "0-3 (a range), 0,2,5 (a list), cpu (one worker) or cpu:3 (three workers)"


class DevicesConfig(Section):
    """Which devices generate and which train: `0-3`, `0,2,5`, `cpu` (one worker) or `cpu:3` (three
    workers)."""

    infer: str | None = None
    """Devices that generate; null: chosen from what the machine has."""
    train: str | None = None
    """Devices that train; null: chosen from what the machine has."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of each worker. Null: its share of the cores, and on a CPU each worker has cores
    of its own, which the other group uses while it waits (not in deterministic runs: how sums are
    split between threads changes their bits)."""

    @field_validator("infer", "train")
    @classmethod
    def _is_device_set(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None:
            parse_device_set(value, f"devices.{info.field_name}")
        return value


@dataclass(frozen=True, slots=True)
class DeviceSet:
    """Devices of one group of workers, one worker each."""

    kind: Literal["cpu", "accelerator"]
    indices: tuple[int, ...]
    """Device numbers; for the CPU the workers' numbers, 0 to count - 1."""

    @property
    def count(self) -> int:
        return len(self.indices)

    def __str__(self) -> str:
        if self.kind == "cpu":
            return "cpu" if self.count == 1 else f"cpu:{self.count}"
        return ",".join(map(str, self.indices))


def parse_device_set(text: str, key: str = "devices.infer") -> DeviceSet:
    """Parse `0-3`, `0,2,5`, `0-1,4`, `cpu` or `cpu:3`. `key` is the config key for errors."""

    def error(why: str) -> ConfigError:
        flag = f"--{key.removeprefix('devices.')}-devices"
        return ConfigError(f"{key} ({flag}): expected {FORMS}, got '{text}': {why}")

    text = text.strip()
    if match := re.fullmatch(r"cpu(?::([0-9]{1,4}))?", text):
        count = int(match[1] or 1)
        if count == 0:
            raise error("at least one worker is needed")
        return DeviceSet("cpu", tuple(range(count)))
    indices: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,4})(?:-([0-9]{1,4}))?\s*", part)
        if match is None:
            raise error(f"'{part}' is not a device number" if part else "a number is missing")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise error(f"the range {part} runs backwards")
        indices.extend(range(first, last + 1))
    if len(set(indices)) < len(indices):
        raise error("a device is named twice")
    return DeviceSet("accelerator", tuple(sorted(indices)))


def count_devices(names: Iterable[str]) -> int:
    """Count the devices of a run from each worker's device name: the CPU counts once per worker, a
    shared accelerator once."""
    every = list(names)
    return every.count("cpu") + len(set(every) - {"cpu"})


def check_disjoint(infer: DeviceSet, train: DeviceSet) -> None:
    """Refuse sets that overlap, except one single accelerator given to both (they share it)."""
    if infer.kind == "cpu" or train.kind == "cpu":
        return
    shared = sorted(set(infer.indices) & set(train.indices))
    if not shared or (infer == train and infer.count == 1):
        return
    raise ConfigError(
        "devices.infer (--infer-devices), devices.train (--train-devices): expected disjoint sets, "
        f"or one single accelerator for both, got '{infer}' and '{train}', which overlap in "
        f"{', '.join(map(str, shared))}"
    )
