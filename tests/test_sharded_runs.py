"""Whole runs over two train ranks, as a user starts them."""

import hashlib
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file
from test_clean_ends import started

from runs import HARDER, SMALL, lines_of, succeed, summary_of, wait_until_gone, workers

RUN = (*SMALL, "train.prompts_per_iteration=6", "runtime.deterministic=true")
TWO = ("--train-devices", "cpu:2")


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        (),
        HARDER,
        (*HARDER, "model.lora.rank=4", "train.offload=[optimizer]"),
        ("algorithm.dynamic_sampling=true",),
    ],
    ids=["plain", "harder", "LoRA", "dynamic sampling"],
)
def test_two_train_ranks_end_in_the_weights_of_one(tmp_path, words):
    ends = []
    for devices in (("--train-devices", "cpu"), TWO):
        folder = tmp_path / devices[1].replace(":", "-")
        out = succeed("--output", str(folder), "--iterations", "5", *devices, *RUN, *words)
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
    assert summary["groups_trained"] == 30
    assert summary["sampling_logp_difference_max"] <= 1e-4
    assert all(line["num_updates_not_finite"] == 0 for line in lines_of(folder / "metrics.jsonl"))


def train_workers(pid):
    """Return the train workers by rank."""
    return [each for name, each in sorted(workers(pid).items()) if name.startswith("train")]


@pytest.mark.alone
@pytest.mark.parametrize(
    ("signum", "victim"),
    [(signal.SIGKILL, 1), pytest.param(signal.SIGSTOP, 0, marks=pytest.mark.long)],
)
def test_a_rank_that_dies_or_stops_ends_the_run_and_is_named(tmp_path, victim, signum):
    process, processes = started(tmp_path, *TWO, "runtime.timeout_seconds=4")
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
