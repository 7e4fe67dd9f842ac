"""Whole runs over two train ranks, as a user starts them."""

from __future__ import annotations

import hashlib
import signal
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file
from test_clean_ends import is_worker

from runs import (
    SMALL,
    descendants,
    finish,
    lines_of,
    start,
    summary_of,
    wait_for_line,
    wait_until_gone,
    without_timing,
)

RUN = (
    "train.prompts_per_iteration=6",
    "rollout.num_generations=4",
    "rollout.max_completion_length=24",
    "data.max_prompt_length=32",
    "data.num_held_out=8",
    "runtime.deterministic=true",
)
HARDER = ("algorithm.beta=0.05", "train.updates_per_iteration=2", "algorithm.loss_type=dapo")
TWO = ("--train-devices", "cpu:2")


@pytest.mark.parametrize(
    "words",
    [
        pytest.param((), id="plain", marks=pytest.mark.long),
        pytest.param(HARDER, id="harder", marks=pytest.mark.long),
        pytest.param(
            (*HARDER, "model.lora.rank=4", "train.offload=[optimizer]"),
            id="LoRA",
            marks=pytest.mark.long,
        ),
    ],
)
def test_two_train_ranks_end_in_the_weights_of_one(tmp_path: Path, words: tuple[str, ...]) -> None:
    ends = []
    for devices in (("--train-devices", "cpu"), TWO):
        folder = tmp_path / devices[1].replace(":", "-")
        code, out, err = finish(
            "--output", str(folder), "--iterations", "5", *devices, *RUN, *words
        )
        assert (code, err) == (0, "")
        assert ("train-1: cpu" in out) == (devices == TWO)
        ends.append((load_file(folder / "model/model.safetensors"), summary_of(folder), folder))
    (one, _, _), (two, summary, folder) = ends
    before = load_file(
        Path(__file__).parent.parent / "easyrl/model/built_in/tiny/model.safetensors"
    )
    digest = hashlib.sha256()
    for name, weight in sorted(one.items()):
        gap = float((two[name] - weight).norm() / weight.norm())
        moved = float((before[name] - weight).norm() / weight.norm())
        is_frozen = "model.lora.rank=4" in words and not name.endswith("_proj.weight")
        assert gap <= 1e-5 and (gap < moved / 100 or (is_frozen and moved == gap == 0.0)), name
        digest.update(name.encode() + two[name].numpy().tobytes())
    assert digest.hexdigest() == summary["weights_sha256"]
    assert summary["groups_trained"] == 30 and summary["groups_off_policy"] == 0
    assert summary["sampling_logp_difference_max"] <= 1e-4
    assert all(line["num_updates_not_finite"] == 0 for line in lines_of(folder / "metrics.jsonl"))


@pytest.mark.long
def test_sync_and_periodic_end_in_the_same_bits_over_two_ranks(tmp_path: Path) -> None:
    ends = {}
    for schedule in ("sync", "periodic"):
        folder = tmp_path / schedule
        code, _, err = finish(
            *("--output", str(folder), "--iterations", "4", "--schedule", schedule, *TWO, *RUN),
            *(*HARDER, "train.max_tokens_per_micro_batch=100", "rollout.max_concurrent_groups=2"),
            EASYRL_RANDOM_DELAYS="0.01",
        )
        assert (code, err) == (0, "")
        metrics = [without_timing(line) for line in lines_of(folder / "metrics.jsonl")]
        assert all(line["kl"] > 0 for line in metrics[1:])
        ends[schedule] = summary_of(folder)["weights_sha256"], metrics
    assert ends["sync"] == ends["periodic"]


def train_workers(pid: int) -> list[psutil.Process]:
    """By rank: the workers are spawned one after another, the rollout worker first."""
    workers = [p for p in psutil.Process(pid).children() if is_worker(p)]
    return sorted(workers, key=lambda p: p.create_time())[1:]


@pytest.mark.alone
@pytest.mark.parametrize(
    ("signum", "victim"),
    [
        (signal.SIGKILL, 0),
        pytest.param(signal.SIGSTOP, 1, marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, 1, marks=pytest.mark.long),
        pytest.param(signal.SIGSTOP, 0, marks=pytest.mark.long),
    ],
)
def test_a_rank_that_dies_or_stops_ends_the_run_and_is_named(
    tmp_path: Path, victim: int, signum: int
) -> None:
    process = start(
        *("--output", str(tmp_path / "run"), "--iterations", "100000", *TWO, *SMALL),
        "runtime.timeout_seconds=4",
    )
    wait_for_line(process, "iteration 2/")
    processes = descendants(process.pid)
    workers = train_workers(process.pid)
    assert len(workers) == 2
    workers[victim].send_signal(signum)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    if signum == signal.SIGKILL:
        assert err.count(f"train-{victim} was killed by SIGKILL") == 1
    else:
        assert "runtime.timeout_seconds" in err and "failed" in err
    assert wait_until_gone(processes, 5.0) == []


@pytest.mark.long
def test_a_rank_that_dies_while_the_last_boundary_is_awaited_ends_the_wait(tmp_path: Path) -> None:
    process = start("--output", str(tmp_path / "run"), "--iterations", "100000", *TWO, *SMALL)
    wait_for_line(process, "iteration 2/")
    processes = descendants(process.pid)
    follower = train_workers(process.pid)[1]
    follower.suspend()  # so that rank 0 cannot come to an end
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    while "(again: stop without it)" not in process.stdout.readline():
        assert process.poll() is None
    follower.kill()
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1 and "train-1 was killed by SIGKILL" in err
    assert wait_until_gone(processes, 5.0) == []


@pytest.mark.long
def test_ctrl_c_ends_a_run_over_two_ranks(tmp_path: Path) -> None:
    process = start("--output", str(tmp_path / "run"), "--iterations", "100000", *TWO, *SMALL)
    wait_for_line(process, "iteration 2/")
    processes = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=5)
    assert process.returncode == 130 and "Traceback" not in err
    assert wait_until_gone(processes, 5.0) == []
