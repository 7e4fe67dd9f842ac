"""The words of `--infer-devices` and `--train-devices`, read and compared.

Floor 0, and only words: what the machine has is found out by `devices.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from easyrl.config_text import ConfigError

FORMS = "accepted: 0-3 (a range), 0,2,5 (a list), cpu (one worker) or cpu:3 (three workers)"


@dataclass(frozen=True, slots=True)
class DeviceSet:
    """The devices that one side of a run may use: one worker each."""

    kind: Literal["cpu", "accelerator"]
    indices: tuple[int, ...]
    """Device numbers; for the CPU just the workers' numbers, 0 to count - 1."""

    @property
    def count(self) -> int:
        return len(self.indices)

    def __str__(self) -> str:
        if self.kind == "cpu":
            return "cpu" if self.count == 1 else f"cpu:{self.count}"
        return ",".join(map(str, self.indices))


def parse_device_set(text: str, key: str = "devices.infer") -> DeviceSet:
    """`0-3`, `0,2,5`, `0-1,4`, `cpu` or `cpu:3`; `key` is the config key an error names."""
    flag = f"--{key.removeprefix('devices.')}-devices"

    def refuse(why: str) -> ConfigError:
        return ConfigError(f"{key} ({flag}): '{text}' is not a device set: {why}; {FORMS}")

    text = text.strip()
    if match := re.fullmatch(r"cpu(?::([0-9]{1,4}))?", text):
        count = int(match[1] or 1)
        if count == 0:
            raise refuse("at least one worker is needed")
        return DeviceSet("cpu", tuple(range(count)))
    indices: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,4})(?:-([0-9]{1,4}))?\s*", part)
        if match is None:
            raise refuse(f"'{part}' is not a device number" if part else "a number is missing")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise refuse(f"the range {part} runs backwards")
        indices.extend(range(first, last + 1))
    if len(set(indices)) < len(indices):
        raise refuse("a device is named twice")
    return DeviceSet("accelerator", tuple(sorted(indices)))


def count_devices(names: Iterable[str]) -> int:
    """Devices of a run, by each worker's: the CPU counts once per worker, a shared device once."""
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
        f"devices.infer (--infer-devices) '{infer}' and devices.train (--train-devices) '{train}' "
        f"overlap in {', '.join(map(str, shared))}; accepted: disjoint sets, "
        "or one and the same single accelerator for both"
    )
