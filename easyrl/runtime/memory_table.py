"""The estimate of a run's memory as a table, and as a warning where it does not fit.

Narrow on purpose: a line of the table fits a terminal of 40 columns behind a comment sign.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from easyrl import devices
from easyrl.channels.ring_resources import available_memory_bytes
from easyrl.runtime.memory import as_size
from easyrl.runtime.memory_estimate import Part, ProcessMemory, bytes_by_device
from easyrl.runtime.placement import Placement

LABEL_WIDTH, SIZE_WIDTH = 25, 12
NUM_NAMED = 3
"""Parts that a warning names."""


def memory_of_devices(placement: Placement) -> dict[str, int]:
    """Bytes that each of the run's devices has: of the CPU's memory what is left, for this machine
    and its cgroup; of an accelerator all of it. The devices of one engine are one."""
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
    """Every process with its parts, those that are alike once; then every device."""
    lines = ["memory at the most, by estimate:"]
    for _, alike in groupby(processes, key=_looks):
        same = list(alike)
        first, last = same[0], same[-1].name.rpartition("-")[2]
        name = first.name if len(same) == 1 else f"{first.name} to {last}, each"
        lines.append(_line(name, first.num_bytes))
        for part in first.parts:
            where = "" if part.device == first.device else f", {part.device}"
            lines.append(_line(f"  {part.what}{where}", part.num_bytes))
    for device, num_bytes in bytes_by_device(processes).items():
        lines.append(_line(f"together on {device}", num_bytes))
        there = "of what is left" if device == "cpu" else "of its memory"
        lines.append(_line(f"  {there}", sizes[device]))
    return "\n".join(lines)


def memory_warnings(
    processes: Sequence[ProcessMemory], sizes: Mapping[str, int], placement: Placement
) -> list[str]:
    """A line for each device, or part of a shared one, that the run may not fit, with the keys that
    mend it."""
    warnings: list[str] = []
    for device, size in sizes.items():
        has = (
            "this machine and its cgroup have {} left" if device == "cpu" else f"{device} has {{}}"
        )
        if device == "cpu" or not placement.shares_device:
            warnings += _warning(processes, device, size, has)
            continue
        for worker in processes[:2]:  # one of each group
            fraction = placement.memory_fraction(worker.name.partition("-")[0])
            assert fraction is not None
            has = f"{worker.name} has {{}} of {device} (devices.infer_memory_fraction)"
            warnings += _warning([worker], device, int(fraction * size), has)
    return warnings


def _warning(processes: Sequence[ProcessMemory], device: str, size: int, has: str) -> Sequence[str]:
    """One line, or none where it fits."""
    parts = [part for each in processes for part in each.parts if part.device == device]
    needed = sum(part.num_bytes for part in parts)
    if needed <= size:
        return ()
    return (
        f"warning: by estimate this run takes up to {as_size(needed)} of {device} memory, but "
        f"{has.format(as_size(size))}: it may be ended on its way; the largest parts: "
        f"{'; '.join(_largest(parts))}",
    )


def _largest(parts: Sequence[Part]) -> list[str]:
    """By the keys that make them smaller, of all processes together."""
    by_keys: dict[str, list[Part]] = {}
    for part in parts:
        if part.remedy:
            by_keys.setdefault(part.remedy, []).append(part)
    sizes = {keys: sum(part.num_bytes for part in those) for keys, those in by_keys.items()}
    first = sorted(by_keys, key=lambda keys: -sizes[keys])[:NUM_NAMED]
    return [f"{by_keys[keys][0].what} {as_size(sizes[keys])} (see {keys})" for keys in first]


def _looks(process: ProcessMemory) -> tuple[object, ...]:
    kind = process.name.rpartition("-")[0] or process.name
    return kind, *((part.what, part.num_bytes, part.device == "cpu") for part in process.parts)


def _line(label: str, num_bytes: int) -> str:
    return f"{label:<{LABEL_WIDTH}}{f'{num_bytes / 2**20:,.0f} MiB':>{SIZE_WIDTH}}"
