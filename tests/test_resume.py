"""Runs that are killed or stopped and continue with `easyrl grpo --resume`.

Each is compared with a run of the same settings that nothing interrupted (`uninterrupted`).
"""

import contextlib
import os
import random
import signal
import time

import psutil
import pytest
from safetensors.torch import load_file

from easyrl.model.checkpoint_files import UNFINISHED, checkpoints_in, read_checkpoint
from mistakes import TINY
from runs import (
    SMALL,
    bits_of,
    descendants,
    lines_of,
    start,
    succeed,
    summary_of,
    wait_for_line,
    wait_until_gone,
)

SAME = ("runtime.deterministic=true", "rollout.max_completion_length=100", "train.save_every=1")
SMALL_AND_SAME = (*SMALL, *SAME)
FAST = ("--iterations", "6", "train.learning_rate=1e-3")
ONE_UPDATE = ("--iterations", "6", "--train-devices")


def outcome_of(folder):
    named = summary_of(folder).items()
    summary = {name: value for name, value in named if "second" not in name and name != "overlap"}
    return bits_of(folder), lines_of(folder / "samples.jsonl"), summary


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Folder of a whole run with these words; made once for all tests of this file."""
    folders = {}

    def run(*words):
        if words not in folders:
            folders[words] = tmp_path_factory.mktemp("whole") / "run"
            # Under the other schedule, which ends in the same bits, too.
            sync = ("--output", str(folders[words]), "--schedule", "sync")
            succeed(*sync, *SMALL_AND_SAME, *words)
        return folders[words]

    return run


def run_until(line, folder, *words):
    """Kill a run after it has printed a line that begins so."""
    process = start("--output", str(folder), *SMALL_AND_SAME, *words)
    wait_for_line(process, line)
    processes = descendants(process.pid)
    process.kill()
    process.communicate()
    assert wait_until_gone(processes, 5.0) == []


WAYS = {
    "two rollout workers": ("--infer-devices", "cpu:2", "rollout.max_concurrent_groups=1"),
    "a reference and two updates": ("algorithm.beta=0.05", "train.updates_per_iteration=2"),
    "dynamic sampling": ("algorithm.dynamic_sampling=true", "algorithm.beta=0.05"),
    "LoRA": ("model.lora.rank=4", "algorithm.beta=0.05"),
    "two train ranks, all offloaded": (
        *("--train-devices", "cpu:2", "algorithm.beta=0.05", "model.dtype=bfloat16"),
        "train.offload=[optimizer, reference]",
    ),
}
TWO_UPDATES = (*WAYS["a reference and two updates"], *FAST)


@pytest.mark.parametrize(
    "way",
    [
        way if way == "a reference and two updates" else pytest.param(way, marks=pytest.mark.long)
        for way in WAYS
    ],
)
def test_a_killed_and_resumed_run_ends_in_the_same_bits(tmp_path, uninterrupted, way):
    words, folder = (*WAYS[way], *FAST), tmp_path / "run"
    once = uninterrupted(*words)
    run_until("checkpoint of iteration 3:", folder, *words)
    assert not (folder / "summary.json").exists()
    done = int(checkpoints_in(folder / "checkpoints")[-1].name)
    done //= 2 if "two updates" in way else 1
    out = succeed("--resume", str(folder), EASYRL_RANDOM_DELAYS="0.01")
    assert f"{done} of 6 iterations done" in out and f"iteration {done + 1}/6" in out
    assert f"iteration {done}/6" not in out and "iteration 6/6" in out
    assert outcome_of(folder) == outcome_of(once)
    assert summary_of(folder)["wall_seconds"] > 0


@pytest.mark.long
def test_more_iterations_continue_a_finished_run(tmp_path, uninterrupted):
    once = uninterrupted("train.lr_scheduler_type=constant", "--iterations", "4")
    twice, words = tmp_path / "twice", (*SMALL_AND_SAME, "train.lr_scheduler_type=constant")
    out = succeed("--output", str(twice), "--iterations", "2", *words)
    assert f"easyrl grpo --resume {twice}" in out
    before = (twice / "metrics.jsonl").read_bytes()
    assert "has finished its 2 iterations" in succeed("--resume", str(twice))
    assert (twice / "metrics.jsonl").read_bytes() == before
    # The newest is cut off: the run resumes from the one before it.
    (tensors,) = (twice / "checkpoints" / "2").glob("*.safetensors")
    os.truncate(tensors, tensors.stat().st_size // 2)
    out = succeed("--resume", str(twice), "--iterations", "4")
    assert f"resumed from {twice}/checkpoints/1: 1 of 4 iterations done" in out
    assert f"'{twice}/checkpoints/2' cannot be read" in out
    assert outcome_of(twice) == outcome_of(once)
    assert summary_of(twice)["iterations"] == 4


@pytest.mark.long
@pytest.mark.parametrize(
    ("signum", "words", "every"),
    [
        (signal.SIGTERM, TWO_UPDATES, "null"),
        (signal.SIGINT, (*ONE_UPDATE, "cpu:2"), "null"),
        (signal.SIGTERM, (*ONE_UPDATE, "cpu:2"), "1"),
    ],
)
def test_a_signal_saves_the_last_whole_iteration(tmp_path, uninterrupted, signum, words, every):
    """Also while a checkpoint is being written."""
    once, folder = uninterrupted(*words), tmp_path / "run"
    saving = (*SMALL_AND_SAME, *words, f"train.save_every={every}")
    process = start("--output", str(folder), *saving, EASYRL_RANDOM_DELAYS="0.05")
    if every == "1":
        wait_for_saving(process, folder, 1)
    else:
        wait_for_line(process, "iteration 2/")
        time.sleep(random.Random(len(words) * signum).random())
    assert process.poll() is None
    process.send_signal(signum)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signum and err == ""
    assert out.count("stopped by") == 1 and f"to resume: easyrl grpo --resume {folder}" in out
    assert not list((folder / "checkpoints").glob(f"*{UNFINISHED}"))
    *_, saved = checkpoints_in(folder / "checkpoints")
    done = len(lines_of(folder / "metrics.jsonl"))
    assert read_checkpoint(saved).state["num_iterations"] == done >= 2  # no whole one is lost
    succeed("--resume", str(folder))
    assert outcome_of(folder) == outcome_of(once)


def wait_for_saving(process, folder, beyond):
    """Wait until a checkpoint later than the iteration `beyond` is being written."""
    deadline = time.monotonic() + 120
    while process.poll() is None and not any(
        int(path.name.removesuffix(UNFINISHED)) > beyond
        for path in (folder / "checkpoints").glob(f"*{UNFINISHED}")
    ):
        assert time.monotonic() < deadline
        time.sleep(0.0005)


@pytest.mark.long
@pytest.mark.parametrize(
    ("num_kills", "iterations", "devices"), [(10, 30, "cpu"), (11, 30, "cpu"), (4, 9, "cpu:2")]
)
def test_kills_at_random_moments_repeat_and_skip_no_group(
    tmp_path, uninterrupted, num_kills, iterations, devices
):
    chance, folder = random.Random(num_kills), tmp_path / "run"
    settings = ("--iterations", str(iterations), "--train-devices", devices)
    once = uninterrupted(*settings)
    words = (*SMALL_AND_SAME, *settings, "train.keep_checkpoints=3", "runtime.resume=auto")
    num_done = 0
    for number in range(num_kills):
        process = start("--output", str(folder), *words)
        if number % 2:
            wait_for_saving(process, folder, num_done + 1)
        else:
            # Most of the time within the iterations: once so many more are done than before.
            target = min(iterations - 1, num_done + chance.randrange(0, 3))
            wait_for_line(process, f"iteration {target + 1}/")
            time.sleep(chance.random() * 0.15)
        if process.poll() is not None:
            process.communicate()
            break
        every = [psutil.Process(process.pid), *descendants(process.pid)]
        victims = [each for each in every if "resource_tracker" not in str(each.cmdline())]
        for victim in chance.choice([victims[:1], [chance.choice(victims)], victims]):
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
        process.communicate(timeout=60)
        assert wait_until_gone(victims, 10.0) == []
        for path in checkpoints_in(folder / "checkpoints"):
            num_done = int(read_checkpoint(path).state["num_iterations"])  # whole, every one
    succeed("--output", str(folder), *words)
    assert outcome_of(folder) == outcome_of(once)
    names = {path.name for path in (folder / "checkpoints").iterdir()}
    assert all(name.isdecimal() for name in names) and len(names) == 3  # and nothing left over


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), [("cpu:2", "cpu"), ("cpu", "cpu:2")])
def test_another_number_of_ranks_continues_to_the_same_weights(
    tmp_path, uninterrupted, before, after
):
    words, twice = ("algorithm.beta=0.05", *ONE_UPDATE, before), tmp_path / "twice"
    once = uninterrupted(*words)
    run_until("checkpoint of iteration 3:", twice, *words)
    newest = checkpoints_in(twice / "checkpoints")[-1]
    assert len(list(newest.glob("*.safetensors"))) == (2 if before == "cpu:2" else 1)
    out = succeed("--resume", str(twice), "--train-devices", after)
    assert ("train-1: cpu" in out) == (after == "cpu:2")
    assert f"{newest.name} of 6 iterations done" in out
    got, expected = (load_file(folder / "model/model.safetensors") for folder in (twice, once))
    start_weights = load_file(TINY / "model.safetensors")
    for name, weight in expected.items():
        gap = float((got[name] - weight).norm() / weight.norm())
        moved = float((start_weights[name] - weight).norm() / weight.norm())
        assert gap <= 1e-5 and gap < moved / 100, name
    assert summary_of(twice)["groups_trained"] == summary_of(once)["groups_trained"] == 24
