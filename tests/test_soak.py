"""Long runs use no more memory, files or threads than in their first minutes."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from runs import descendants, start, wait_for_line

FIRST, LAST = 10, 70
"""Iterations, between which nothing may pile up."""
LARGEST_GROWTH = 1.05
"""Of a process's memory: longer completions may still come, and their activations are kept. (What a
trainer on the CPU has freed it keeps, `easyrl.processes`: a leak
shows once it is larger than that.)"""
AT_A_TIME = 3
"""Files and threads that come and go: a checkpoint is being written."""


def usage_of(process: psutil.Process) -> tuple[int, int, int]:
    """Bytes of memory, open files, threads."""
    with process.oneshot():
        return process.memory_info().rss, process.num_fds(), process.num_threads()


@pytest.mark.long
@pytest.mark.parametrize("devices", ["cpu", "cpu:2"])
def test_nothing_piles_up_over_sixty_iterations(tmp_path: Path, devices: str) -> None:
    process = start(
        *("--output", str(tmp_path / "run"), "--iterations", "100000", "train.save_every=5"),
        *("--train-devices", devices),
    )
    try:
        wait_for_line(process, f"iteration {FIRST}/")
        processes = [psutil.Process(process.pid), *descendants(process.pid)]
        before = [usage_of(one) for one in processes]
        wait_for_line(process, f"iteration {LAST}/", timeout=600)
        after = [usage_of(one) for one in processes]
        assert len(descendants(process.pid)) == len(processes) - 1
    finally:
        process.terminate()
        process.communicate(timeout=60)
    for one, then in zip(before, after, strict=True):
        assert then[0] <= one[0] * LARGEST_GROWTH, (before, after)
        assert then[1] <= one[1] + AT_A_TIME and then[2] <= one[2] + AT_A_TIME, (before, after)
