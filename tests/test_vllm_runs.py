"""Whole runs on vLLM's CPU build: on-policy, same run, clean ends, stuck updates."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

import runs
from easyrl.engines.vllm.processes import processes_of
from easyrl.runtime.control import request
from own_processes import WAIT_SECONDS, end
from ray_clusters import cluster_of
from runs import SMALL, assert_on_policy, lines_of, start, succeed, wait_for_line, wait_until
from tiny_models import untied_model

pytest.importorskip("vllm", reason="needs vLLM: `make test-vllm` installs it and runs these")
pytestmark = pytest.mark.vllm

START_SECONDS = WAIT_SECONDS
SECONDS = 5.0  # the bound of a clean end
VLLM = ("rollout.engine=vllm", "algorithm.beta=0.04")
"""With a reference, groups of equal rewards are computed too."""


def train(folder, *words, timeout=START_SECONDS, **environment):
    words = ("--output", str(folder), *words, "rollout.engine=vllm")
    out = succeed(*words, timeout=timeout, **environment)
    assert "engine of the rollout workers: vllm" in out
    assert_on_policy(folder)


def test_run_is_on_policy_and_leaves_no_process(tmp_path):
    before = set(psutil.pids())
    train(tmp_path / "run", "--iterations", "3", "--infer-devices", "cpu", *SMALL, *VLLM)
    assert runs.summary_of(tmp_path / "run")["policy_version"] == 3
    new = [p for p in psutil.process_iter(["name"]) if p.pid not in before]
    assert not runs.wait_until_gone([p for p in new if "VLLM" in p.info["name"]], 3.0)


@pytest.mark.long
def test_an_engine_over_two_devices_and_a_model_with_an_untied_head(tmp_path):
    words = ("--model", untied_model(tmp_path / "m"), "--iterations", "3", *SMALL, *VLLM)
    train(tmp_path / "run", *words, "--infer-devices", "cpu:2", "rollout.tensor_parallel_size=2")
    assert not list(Path("/dev/shm").glob("vllm_dist_*"))


@pytest.mark.long
def test_evaluation_uses_the_models_own_weights(tmp_path):
    """No weights are sent: greedy answers are those of the embedded engine."""
    answers = {}
    for engine in ("vllm", "embedded"):
        words = ["eval", "--no-live", "--infer-devices", "cpu", "--engine", engine, "--output"]
        words += [tmp_path / engine, "data.num_held_out=8", "eval.max_completion_length=128"]
        subprocess.run([sys.executable, "-m", "easyrl", *words], check=True, timeout=WAIT_SECONDS)
        lines = lines_of(tmp_path / engine / "samples.jsonl")
        answers[engine] = {line["problem"]: line["completion"] for line in lines}
    assert len(answers["vllm"]) == 8
    assert sum(answers["embedded"][k] == text for k, text in answers["vllm"].items()) >= 7


MANY = (*SMALL[1:], "train.prompts_per_iteration=16", "rollout.max_concurrent_groups=3")
"""Sequences wait for a free row."""
SCHEDULED = {
    "one engine": ("--infer-devices", "cpu", "--iterations", "6", *MANY),
    "two engines": ("--infer-devices", "cpu:2", "--iterations", "6", *MANY),
    "a game": (
        *("--model", "tiny-guess", "--dataset", "guess", "--environment", "guess"),
        *("--iterations", "3", *SMALL, "data.num_held_out=0"),
    ),
    "an agent": (*runs.GUESS, "--agent", f"{runs.AGENTS}:solve", "--iterations", "2"),
}


@pytest.mark.long
@pytest.mark.parametrize("case", SCHEDULED)
def test_both_schedules_end_in_the_same_bits_under_random_delays(tmp_path, case):
    words = (*SCHEDULED[case], "rollout.engine=vllm")
    run = runs.both_schedules(tmp_path, *words, delays="0.05", timeout=1200)
    assert_on_policy(run)
    metrics = lines_of(run / "metrics.jsonl")
    assert max(line.get("episodes/turns", 2) for line in metrics) > 1


@pytest.mark.long
def test_two_engines_on_two_nodes_end_in_the_same_bits_as_without_ray(tmp_path):
    words = ("--iterations", "3", "devices.threads=1", "runtime.deterministic=true", *SMALL, *VLLM)
    train(tmp_path / "here", "--infer-devices", "cpu:2", "--train-devices", "cpu", *words)
    with cluster_of(*[{"num_cpus": 1}] * 3) as cluster:
        there = ("--infer-devices", "ray:cpu:2", "--train-devices", "ray:cpu:1")
        train(tmp_path / "there", *there, "--ray-address", cluster.address, *words)
    assert runs.bits_of(tmp_path / "there") == runs.bits_of(tmp_path / "here")


@pytest.mark.long
def test_run_that_lost_a_worker_ends_in_the_same_bits(tmp_path):
    words = ("--infer-devices", "cpu:2", "--iterations", "5", *SMALL, *VLLM)
    words = (*words, "runtime.deterministic=true", "rollout.max_concurrent_groups=2")
    train(tmp_path / "whole", *words, timeout=900)
    lost = tmp_path / "lost"
    how = {"timeout": 900, "EASYRL_RANDOM_DELAYS": "0.1"}
    words = ("--output", str(lost), *words)
    code, _, err = runs.finish_after("iteration 1/", runs.kill_worker, *words, **how)
    assert (code, err) == (0, "")
    assert runs.summary_of(lost)["worker_restarts"] == 1
    assert runs.bits_of(lost) == runs.bits_of(tmp_path / "whole")


@pytest.mark.long
def test_other_features_go_with_vllm(tmp_path):
    """Two train ranks, LoRA, several updates, replaced groups, an added engine, and a resume."""
    pytest.importorskip("peft")
    folder = tmp_path / "run"
    process = start(
        *("--output", str(folder), "--iterations", "100000", "--infer-devices", "cpu"),
        *("--train-devices", "cpu:2", "devices.max_rollout_workers=2", "model.lora.rank=4"),
        *("algorithm.dynamic_sampling=true", "train.updates_per_iteration=2", *SMALL, *VLLM),
    )
    try:
        wait_for_line(process, "iteration 1/", timeout=START_SECONDS)
        request(folder, {"command": "scale", "infer_devices": "cpu:2"})
        status = partial(request, folder, {"command": "status"})
        wait_until(lambda: status()["workers"][1]["state"] == "working", process, START_SECONDS)
        num_done = len(lines_of(folder / "metrics.jsonl"))
        wait_for_line(process, f"iteration {num_done + 2}/", timeout=START_SECONDS)
    finally:
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=WAIT_SECONDS)
    assert (process.returncode, err) == (128 + signal.SIGTERM, "")
    num_iterations = len(lines_of(folder / "metrics.jsonl")) + 2
    words = ("--resume", str(folder), "--iterations", str(num_iterations))
    succeed(*words, timeout=START_SECONDS)
    summary = assert_on_policy(folder)
    assert summary["groups_trained"] == 4 * num_iterations
    assert summary["policy_version"] == 2 * num_iterations


@pytest.fixture
def started(tmp_path):
    temporary = Path(tempfile.mkdtemp(dir="/tmp"))  # its path is short enough for sockets
    run = start(
        *("--output", str(tmp_path / "run"), "--infer-devices", "cpu", "--no-live", *SMALL),
        "rollout.engine=vllm",
        TMPDIR=str(temporary),
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "kept"),
    )
    yield run, temporary
    end(run)
    shutil.rmtree(temporary)


@pytest.mark.long
@pytest.mark.parametrize("victim", ["controller", "rollout worker", "vLLM", "Ctrl-C"])
@pytest.mark.parametrize(
    "moment", ["*-*-*", "vllm_dist_*", None], ids=["sockets", "model", "running"]
)
def test_killed_run_leaves_nothing(started, victim, moment):
    run, temporary = started
    if moment is None:
        wait_for_line(run, "iteration 1/", timeout=START_SECONDS)

    def engines():
        """vLLM's processes, once such names exist in their private folders."""
        folders = {str(file.parent) for file in temporary.glob(f"easyrl-*/{moment or '*-*-*'}")}
        return [pid for folder in folders for pid in processes_of(folder)]

    engine = psutil.Process(wait_until(engines, run, START_SECONDS)[0])
    processes = runs.descendants(run.pid)
    assert engine in processes
    names = runs.shared_memory([psutil.Process(run.pid), *processes])
    assert names or moment is not None, "a run in its iterations has semaphores"
    if victim == "Ctrl-C":  # a terminal sends it to all
        for process in [psutil.Process(run.pid), *processes]:
            process.send_signal(signal.SIGINT)
    else:
        pids = {"controller": run.pid, "rollout worker": engine.ppid(), "vLLM": engine.pid}
        os.kill(pids[victim], signal.SIGKILL)
    _, err = run.communicate(timeout=WAIT_SECONDS)
    assert not runs.wait_until_gone(processes, SECONDS)
    if moment is not None:
        assert run.returncode == {"controller": -signal.SIGKILL, "Ctrl-C": 130}.get(victim, 1)
    if victim == "vLLM":
        assert ("vLLM has ended" if moment is None else "vLLM did not start") in err
    left = partial(map, Path.exists, names)
    wait_until(lambda: not any(temporary.iterdir()) and not any(left()), seconds=SECONDS)


@pytest.mark.long
@pytest.mark.parametrize(
    ("hanging", "expected"),
    [
        ("trainer", r"rollout-0 \(rank 1 of 2\), bucket [34] of \d+"),
        ("loading", r"train-0 \(rank 0 of 2\), bucket \d+ of \d+: waited"),
        ("loaded", "vLLM, which has made no progress"),
    ],
)
def test_stuck_update_is_reported_and_ends_the_run(tmp_path, hanging, expected):
    words = ["--output", str(tmp_path / "run"), "--infer-devices", "cpu", "--no-live", *SMALL]
    words += ["rollout.engine=vllm", "runtime.timeout_seconds=8"]
    run = start(*words, altered=True, HANG=hanging)
    wait_for_line(run, "iteration 1/", timeout=START_SECONDS)
    began = time.monotonic()
    _, err = run.communicate(timeout=WAIT_SECONDS)
    assert run.returncode == 1 and time.monotonic() - began <= 8.0 + 20.0  # of a busy machine
    assert re.search(rf"{expected}.*runtime\.timeout_seconds", err), err
