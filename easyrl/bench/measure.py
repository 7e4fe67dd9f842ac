"""Measure time in turns, and the peak memory of some code."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from easyrl import devices


def seconds_of_each(
    actions: Mapping[str, Callable[[], object]], repetitions: int, device: torch.device
) -> dict[str, list[float]]:
    """Seconds of each action, `repetitions` times. Actions take turns, so that noise affects all of
    them alike; compare them by `median_ratio`. A first turn warms up and does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for repetition in range(repetitions + 1):
        for name, action in actions.items():
            devices.synchronize(device)
            started = time.perf_counter()
            action()
            devices.synchronize(device)
            if repetition > 0:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def median_ratio(slow: Sequence[float], fast: Sequence[float]) -> float:
    """Median over the repetitions of how many times as long the first takes."""
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))


def peak_bytes(action: Callable[[], object], device: torch.device) -> int:
    """The most bytes of tensors that `action` holds at once, beyond those held before.

    Accelerators count them; on the CPU torch's profiler does.
    """
    if device.type == "cpu":
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            action()
        num_bytes = peak = 0
        for event in profiled.profiler.kineto_results.events():  # type: ignore[union-attr]
            if event.name() == "[memory]":
                num_bytes += event.nbytes()
                peak = max(peak, num_bytes)
        return peak
    before = torch.accelerator.memory_allocated(device)
    torch.accelerator.reset_peak_memory_stats(device)
    action()
    return int(torch.accelerator.max_memory_allocated(device) - before)


def peak_resident_bytes(action: Callable[[], object]) -> int:
    """How much this process's resident memory grows at most during `action`. Raises OSError where
    the kernel is not Linux."""
    before = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    action()
    return _status_bytes("VmHWM") - before


def _status_bytes(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
