"""Time and memory of actions."""

import time
from collections.abc import Callable
from itertools import accumulate

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
