"""Time and memory of actions."""

import time
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from easyrl import devices


def timed(action: Callable[[], object], device: torch.device) -> Callable[[], float]:
    """Return a function that calls `action` and returns the seconds that it took."""

    def seconds() -> float:
        devices.synchronize(device)
        start = time.perf_counter()
        action()
        devices.synchronize(device)
        return time.perf_counter() - start

    return seconds


def peak_bytes(action: Callable[[], object], device: torch.device) -> int:
    """Return the most bytes of tensors that `action` holds at once, beyond those held before.

    Accelerators count them; on the CPU torch's profiler does.
    """
    if device.type == "cpu":
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            action()
        num_bytes = 0  # held now
        peak = 0
        for event in profiled.profiler.kineto_results.events():  # type: ignore[union-attr]
            if event.name() == "[memory]":
                num_bytes += event.nbytes()  # negative where a tensor is freed
                peak = max(peak, num_bytes)
        return int(peak)
    before = torch.accelerator.memory_allocated(device)
    torch.accelerator.reset_peak_memory_stats(device)
    action()
    return int(torch.accelerator.max_memory_allocated(device) - before)
