"""Measure time in turns, and the peak memory of an action."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from easyrl import devices

T = TypeVar("T")
Row = dict[str, Any]
"""Figures by name."""


def take_turns(
    actions: Mapping[str, Callable[[], T]], repetitions: int, num_warm_up: int = 1
) -> dict[str, list[T]]:
    """Return the results of each action, called `repetitions` times after the warm-up.

    Actions take turns, so that noise affects all of them alike; compare them by `median_ratio`."""
    turns = [
        {name: action() for name, action in actions.items()}
        for _ in range(num_warm_up + repetitions)
    ]
    return {name: [turn[name] for turn in turns[num_warm_up:]] for name in actions}


def timed(action: Callable[[], object], device: torch.device) -> Callable[[], float]:
    """Return a function that calls `action` and returns the seconds that it took."""

    def seconds() -> float:
        devices.synchronize(device)
        start = time.perf_counter()
        action()
        devices.synchronize(device)
        return time.perf_counter() - start

    return seconds


def median_ratio(slow: Sequence[float], fast: Sequence[float]) -> float:
    """Median over the repetitions of how many times as long the first takes."""
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))


def peak_bytes(action: Callable[[], object], device: torch.device) -> int:
    """Most bytes of tensors that `action` holds at once, beyond those held before.

    Accelerators count them; on the CPU torch's profiler does.
    """
    if device.type == "cpu":
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            action()
        recorded = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
        changes = (event.nbytes() for event in recorded if event.name() == "[memory]")
        return int(max(accumulate(changes, initial=0)))
    before = torch.accelerator.memory_allocated(device)
    torch.accelerator.reset_peak_memory_stats(device)
    action()
    return int(torch.accelerator.max_memory_allocated(device) - before)


def peak_resident_bytes(action: Callable[[], object]) -> int:
    """Largest growth of this process's resident memory during `action`. Linux only."""

    def high_water_bytes() -> int:
        lines = Path("/proc/self/status").read_text()
        return 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", lines)[0])

    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = high_water_bytes()
    action()
    return high_water_bytes() - before
