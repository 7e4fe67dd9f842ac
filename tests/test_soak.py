"""Long runs use no more memory, files or threads than in their first minutes."""

import psutil
import pytest

from easyrl.observe.trace import MAX_BYTES
from runs import descendants, start, wait_for_line

SHORT = (
    *("train.prompts_per_iteration=2", "rollout.num_generations=2", "data.num_held_out=0"),
    *("rollout.max_completion_length=8", "data.max_prompt_length=32", "train.save_every=50"),
)
AT_A_TIME = 3
"""Files and threads that come and go: a checkpoint is being written."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "iterations", "growth"),
    [
        # Longer completions may still come, and what a trainer on the CPU has freed it keeps.
        (("train.save_every=5",), [10, 70], 1.05),
        (("train.save_every=5", "--train-devices", "cpu:2"), [10, 70], 1.05),
        (SHORT, [*range(100, 2000, 100), 1990], 1.02),
    ],
    ids=["demo", "two train ranks", "two thousand short iterations"],
)
def test_nothing_piles_up(tmp_path, words, iterations, growth):
    folder = tmp_path / "run"
    process = start("--output", str(folder), "--iterations=100000", *words)
    usage = {}
    try:
        for number in iterations:
            wait_for_line(process, f"iteration {number}/", timeout=900)
            for one in (psutil.Process(process.pid), *descendants(process.pid)):
                with one.oneshot():
                    now = one.memory_info().rss, one.num_fds(), one.num_threads()
                usage.setdefault(one.pid, []).append(now)
            assert (folder / "trace.json").stat().st_size <= MAX_BYTES
    finally:
        process.terminate()
        process.communicate(timeout=60)
    for of_process in usage.values():
        memory, files, threads = zip(*of_process, strict=True)
        assert len(memory) == len(iterations), "it lived all the time"
        assert max(memory) <= memory[0] * growth, memory
        assert max(files) <= files[0] + AT_A_TIME and max(threads) <= threads[0] + AT_A_TIME
