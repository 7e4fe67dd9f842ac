"""Long runs use no more memory, files or threads than in their first minutes."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import psutil
import pytest

from easyrl.observe.trace import MAX_BYTES
from runs import descendants, lines_of, start, wait_for_line

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


ITERATIONS, SETTLED = 2000, 100
"""Short iterations; after the first hundred nothing grows."""
STEADY = 1.02


@pytest.mark.long
def test_two_thousand_short_iterations_stay_flat(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ("train.prompts_per_iteration=2", "rollout.num_generations=2", "data.num_held_out=0")
    words += ("rollout.max_completion_length=8", "data.max_prompt_length=32", "train.save_every=50")
    process = start("--output", str(folder), "--iterations", str(ITERATIONS), *words)
    usage: dict[int, list[tuple[int, int, int]]] = {}
    trace_bytes = []
    try:
        for at in (*range(SETTLED, ITERATIONS, 100), ITERATIONS - 10):
            wait_for_line(process, f"iteration {at}/", timeout=900)
            for one in (psutil.Process(process.pid), *descendants(process.pid)):
                usage.setdefault(one.pid, []).append(usage_of(one))
            trace_bytes.append((folder / "trace.json").stat().st_size)
        process.communicate(timeout=120)
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()
    for of_process in usage.values():
        memory, files, threads = zip(*of_process, strict=True)
        assert len(memory) == ITERATIONS // 100  # it lived all the time
        assert max(memory) <= memory[0] * STEADY, memory
        assert max(files) <= files[0] + AT_A_TIME and max(threads) <= threads[0] + AT_A_TIME
    assert max(trace_bytes) <= MAX_BYTES
    lines = lines_of(folder / "metrics.jsonl")
    seconds = [line["perf/iteration_seconds"] for line in lines[SETTLED:]]
    quarter = len(seconds) // 4
    assert median(seconds[-quarter:]) <= 1.1 * median(seconds[:quarter])
