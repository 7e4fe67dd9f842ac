"""Runs that are cut off and go on with `easyrl grpo --resume`, as a user starts them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from easyrl.model.checkpoint_files import checkpoints_in, read_checkpoint
from runs import (
    SMALL,
    command,
    descendants,
    finish,
    lines_of,
    start,
    summary_of,
    wait_for_line,
    wait_until_gone,
    without_timing,
)

SAME = ("runtime.deterministic=true", "rollout.max_completion_length=100", "train.save_every=1")
SMALL_AND_SAME = (*(word for word in SMALL if "completion" not in word), *SAME)


def told_of(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """What two equal runs tell alike: metrics, samples, summary."""
    metrics = [without_timing(line) for line in lines_of(folder / "metrics.jsonl")]
    summary = {
        name: value
        for name, value in summary_of(folder).items()
        if "seconds" not in name and name not in ("overlap", "tokens_per_second_per_device")
    }
    return metrics, lines_of(folder / "samples.jsonl"), summary


def kill(process: subprocess.Popen[str]) -> None:
    processes = descendants(process.pid)
    process.kill()
    process.communicate()
    assert wait_until_gone(processes, 5.0) == []


def resume(folder: Path, *words: str, **environment: str) -> str:
    code, out, err = finish("--resume", str(folder), *words, **environment)
    assert (code, err) == (0, ""), err
    assert "stopped" not in out
    return out


WAYS = {
    "two rollout workers": ("--infer-devices", "cpu:2", "rollout.max_concurrent_groups=1"),
    "a reference and two updates": ("algorithm.beta=0.05", "train.updates_per_iteration=2"),
    "dynamic sampling": ("algorithm.dynamic_sampling=true", "algorithm.beta=0.05"),
    "LoRA": ("model.lora.rank=4", "algorithm.beta=0.05"),
    "bfloat16": ("model.dtype=bfloat16", "algorithm.beta=0.05"),
    "two train ranks, all offloaded": (
        *("--train-devices", "cpu:2", "algorithm.beta=0.05", "model.dtype=bfloat16"),
        "train.offload=[optimizer, reference]",
    ),
}


@pytest.mark.parametrize(
    "way",
    [
        way if way == "a reference and two updates" else pytest.param(way, marks=pytest.mark.long)
        for way in WAYS
    ],
)
def test_ten_iterations_in_one_go_or_in_two_end_in_the_same_bits(tmp_path: Path, way: str) -> None:
    words = (*SMALL_AND_SAME, "train.learning_rate=1e-3", *WAYS[way])
    once, twice = tmp_path / "once", tmp_path / "twice"
    code, _, err = finish("--output", str(once), "--iterations", "10", *words)
    assert (code, err) == (0, "")
    process = start("--output", str(twice), "--iterations", "10", *words)
    wait_for_line(process, "checkpoint of iteration 5:")
    kill(process)
    assert not (twice / "summary.json").exists()
    done = int(checkpoints_in(twice / "checkpoints")[-1].name) // (2 if "two updates" in way else 1)
    out = resume(twice, EASYRL_RANDOM_DELAYS="0.01")
    assert f"{done} of 10 iterations done" in out and f"iteration {done + 1}/10" in out
    assert f"iteration {done}/10" not in out and "iteration 10/10" in out
    assert told_of(twice) == told_of(once)
    assert summary_of(twice)["wall_seconds"] > 0


@pytest.mark.long
def test_the_total_of_iterations_may_grow_and_what_is_finished_is_left(tmp_path: Path) -> None:
    once, twice = tmp_path / "once", tmp_path / "twice"
    words = (*SMALL_AND_SAME, "train.lr_scheduler_type=constant")
    assert finish("--output", str(once), "--iterations", "4", *words)[0] == 0
    code, out, _ = finish("--output", str(twice), "--iterations", "2", *words)
    assert code == 0 and f"easyrl grpo --resume {twice}" in out
    before = (twice / "metrics.jsonl").read_bytes()
    assert "has finished its 2 iterations; nothing is left to do" in resume(twice)
    assert (twice / "metrics.jsonl").read_bytes() == before
    # The newest is cut off: the one before is taken, and what came after it is done again.
    (tensors,) = (twice / "checkpoints" / "2").glob("*.safetensors")
    os.truncate(tensors, tensors.stat().st_size // 2)
    out = resume(twice, "--iterations", "4")
    assert f"resumed from {twice}/checkpoints/1: 1 of 4 iterations done" in out
    assert f"skipped {twice}/checkpoints/2: {tensors.name} has" in out
    assert told_of(twice) == told_of(once)
    assert summary_of(twice)["iterations"] == 4


@pytest.mark.long
def test_trace_and_curve_go_on_where_they_were(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start("--output", str(folder), "--iterations", "4", *SMALL_AND_SAME)
    wait_for_line(process, "checkpoint of iteration 2:")
    kill(process)
    resume(folder, "output.log_to=[tensorboard]")
    events = json.loads((folder / "trace.json").read_text())
    begun = [
        e["args"]["iteration"] for e in events if e.get("cat") == "iteration" if e["ph"] == "B"
    ]
    assert begun == [0, 1, 2, 3]
    times = [e["ts"] for e in events if e.get("cat") == "iteration"]
    assert times == sorted(times)
    watch = [sys.executable, "-m", "easyrl", "watch", str(folder)]
    done = subprocess.run(watch, capture_output=True, text=True, check=True)
    lines = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("iteration ")]
    assert lines == ["1/4", "2/4", "3/4", "4/4"]


# -- signals -------------------------------------------------------------------------------------


@pytest.mark.alone
@pytest.mark.parametrize(
    ("signum", "num_updates", "devices"),
    [
        (signal.SIGTERM, 1, "cpu"),
        pytest.param(signal.SIGINT, 2, "cpu", marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, 2, "cpu:2", marks=pytest.mark.long),
    ],
)
def test_a_signal_saves_the_last_boundary_and_drops_what_is_begun(
    tmp_path: Path, signum: int, num_updates: int, devices: str
) -> None:
    folder, once = tmp_path / "run", tmp_path / "once"
    words = (*SMALL_AND_SAME, f"train.updates_per_iteration={num_updates}", "--iterations", "6")
    words = (*words, "train.save_every=null", "--train-devices", devices)
    assert finish("--output", str(once), *words)[0] == 0
    process = start("--output", str(folder), *words, EASYRL_RANDOM_DELAYS="0.05")
    wait_for_line(process, "iteration 2/")
    time.sleep(random.Random(num_updates * signum).random())
    process.send_signal(signum)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signum and err == ""
    assert out.count("stopped by") == 1 and f"to go on: easyrl grpo --resume {folder}" in out
    (saved,) = checkpoints_in(folder / "checkpoints")
    done = len(lines_of(folder / "metrics.jsonl"))
    assert read_checkpoint(saved).state["num_iterations"] == done >= 2  # nothing whole is lost
    resume(folder)
    assert told_of(folder) == told_of(once)


@pytest.mark.alone
def test_a_second_signal_ends_the_run_at_once(tmp_path: Path) -> None:
    """The trainer is stopped, so that it never ends its micro-batch."""
    folder = tmp_path / "run"
    process = start("--output", str(folder), "--iterations", "100000", *SMALL)
    try:
        wait_for_line(process, "iteration 2/")
        workers = [
            p for p in descendants(process.pid) if "resource_tracker" not in str(p.cmdline())
        ]
        children = [p for p in workers if p.ppid() == process.pid]
        max(children, key=lambda p: p.create_time()).suspend()
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        while "(again: stop without it)" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
        assert process.returncode == 130 and out.count("stopped by SIGINT") == 1
        assert wait_until_gone(workers, 5.0) == []
    finally:
        process.kill()


def test_a_checkpoint_that_finds_no_room_is_told_and_the_run_goes_on(tmp_path: Path) -> None:
    """No file may have more than 4 MiB: the model can be written, a checkpoint cannot."""
    folder = tmp_path / "run"
    limit = (resource.RLIMIT_FSIZE, (2**22, 2**22))
    done = subprocess.run(
        command("--output", str(folder), "--iterations", "2", "train.save_every=1", *SMALL),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        preexec_fn=lambda: resource.setrlimit(*limit),
    )
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if "could not be written" in line]
    assert len(told) == 2 and "File too large; the run goes on" in told[0]
    assert list((folder / "checkpoints").iterdir()) == []
    assert (folder / "model" / "model.safetensors").is_file()


# -- kills ---------------------------------------------------------------------------------------


def kill_somewhere(process: subprocess.Popen[str], chance: random.Random) -> str:
    """SIGKILL to the controller, to one worker, or to all at once."""
    workers = [p for p in descendants(process.pid) if "resource_tracker" not in str(p.cmdline())]
    victims = [psutil.Process(process.pid), *workers]
    kind = chance.choice(["controller", "one", "all"])
    chosen = {"controller": victims[:1], "one": [chance.choice(victims)], "all": victims}[kind]
    for victim in chosen:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
    process.communicate(timeout=60)
    assert wait_until_gone(victims, 10.0) == []
    return kind


def killed_again_and_again(tmp_path: Path, *, num_kills: int, iterations: int, seed: int) -> None:
    """Kills at random moments until the run has ended; then it must be the run of one go."""
    chance = random.Random(seed)
    once, folder = tmp_path / "once", tmp_path / "run"
    words = (*SMALL_AND_SAME, "--iterations", str(iterations), "train.keep_checkpoints=3")
    words = (*words, "runtime.resume=auto")
    assert finish("--output", str(once), *words)[0] == 0
    num_done = 0
    for _ in range(num_kills):
        process = start("--output", str(folder), *words)
        # Most of the time within the iterations: once so many more are done than before.
        target = min(iterations - 1, num_done + chance.randrange(0, 3))
        deadline = time.monotonic() + 120
        metrics = folder / "metrics.jsonl"
        while process.poll() is None and time.monotonic() < deadline:
            if metrics.exists() and metrics.read_bytes().count(b"\n") > target:
                break
            time.sleep(0.002)
        time.sleep(chance.random() * 0.15)
        if process.poll() is not None:
            process.communicate()
            break
        kill_somewhere(process, chance)
        for path in checkpoints_in(folder / "checkpoints"):
            num_done = int(read_checkpoint(path).state["num_iterations"])  # whole, every one
    code, _, err = finish("--output", str(folder), *words)
    assert (code, err) == (0, "")
    assert told_of(folder) == told_of(once)
    names = {path.name for path in (folder / "checkpoints").iterdir()}
    assert all(name.isdecimal() for name in names) and len(names) == 3  # and nothing left over


@pytest.mark.long
def test_a_run_killed_three_times_repeats_and_skips_no_group(tmp_path: Path) -> None:
    killed_again_and_again(tmp_path, num_kills=3, iterations=6, seed=1)


@pytest.mark.long
def test_twenty_kills_at_random_moments_repeat_and_skip_no_group(tmp_path: Path) -> None:
    for seed in range(2):
        (tmp_path / str(seed)).mkdir()
        killed_again_and_again(tmp_path / str(seed), num_kills=10, iterations=30, seed=seed)
