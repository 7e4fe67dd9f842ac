"""Runs on a Ray cluster of three nodes on this machine, each with a CPU for one worker."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import psutil
import pytest

import runs
from easyrl.runtime.control import request
from own_processes import WAIT_SECONDS
from ray_clusters import cluster_of
from runs import SMALL, bits_of, lines_of, start, succeed, summary_of, wait_for_line, wait_until

pytestmark = pytest.mark.long  # `make test-vllm` runs a first one

ONE_THREAD = "devices.threads=1"
SAME = (*SMALL, "runtime.deterministic=true", ONE_THREAD, "algorithm.beta=0.04")
"""A deterministic run that trains in every iteration."""
FEATURES = {
    "plain": (),
    "all": (
        *("algorithm.dynamic_sampling=true", "rollout.max_completion_length=100"),
        *("train.updates_per_iteration=2", "algorithm.epsilon_high=0.28"),
        *("model.lora.rank=4", "train.eval_every=1"),
    ),
    "environment": (
        *("model.path=tiny-guess", "data.dataset=guess", "rollout.environment=guess"),
        *("data.max_prompt_length=16", "rollout.max_completion_length=60"),
    ),
    "agent": (*runs.GUESS, "--agent", f"{runs.AGENTS}:solve"),
    "hybrid": ("model.path=tiny-hybrid",),
    "pictures": ("model.path=tiny-vision", "data.dataset=picture-sums"),
    "trained tower": (
        *("model.path=tiny-vision", "data.dataset=picture-sums", "model.vision=trained"),
        *("train.updates_per_iteration=2", "data.max_image_bytes=20000"),
    ),
}
SIZES = {"engines": (2, 1), "train-ranks": (1, 2)}  # engines, train ranks


@pytest.fixture(scope="module")
def cluster():
    with cluster_of(*[{"num_cpus": 1}] * 3) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def no_ray(tmp_path_factory):
    folder = tmp_path_factory.mktemp("no_ray")
    (folder / "ray.py").write_text("raise AssertionError('ray is imported')")
    return {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}


def on(cluster, infer, train="ray:cpu:1"):
    devices = ("--infer-devices", infer, "--train-devices", train)
    return ("--ray-address", cluster.address, *devices)


def nodes_of_newest_run(cluster):
    actors = list(cluster.global_state.actor_table(None, None, None).values())
    newest = max(each["JobID"] for each in actors)
    return [each["Address"]["NodeID"] for each in actors if each["JobID"] == newest]


def assert_same_bits(cluster, tmp_path, infer, train, *words, **environment):
    here, there = tmp_path / "here", tmp_path / "there"
    on_here = ("--infer-devices", f"cpu:{infer}", "--train-devices", f"cpu:{train}")
    on_there = on(cluster, f"ray:cpu:{infer}", f"ray:cpu:{train}")
    every = ("--iterations", "2", *SAME, *words)
    succeed("--output", str(here), *on_here, *every, **environment)
    succeed("--output", str(there), *on_there, *every)
    assert len({*nodes_of_newest_run(cluster)}) == infer + train
    assert bits_of(here) == bits_of(there)
    assert summary_of(there)["groups_off_policy"] == summary_of(there)["worker_restarts"] == 0
    return there


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("features", FEATURES)
def test_runs_end_in_the_same_bits_with_and_without_ray(cluster, no_ray, tmp_path, features, size):
    assert_same_bits(cluster, tmp_path, *SIZES[size], *FEATURES[features], **no_ray)


@contextmanager
def live(folder, *words):
    """An endless run; ends with a signal and leaves no process behind."""
    process = start("--output", str(folder), "--iterations", "100000", *words)
    try:
        wait_for_line(process, "iteration 2/")
        pids = [each["pid"] for each in workers_of(folder)]
        yield process
        pids += [each["pid"] for each in workers_of(folder)]
    finally:
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=WAIT_SECONDS)
    assert err == "" and process.returncode == 128 + signal.SIGTERM
    left = [psutil.Process(pid) for pid in {*pids} if psutil.pid_exists(pid)]
    assert not runs.wait_until_gone(left)
    lines = lines_of(folder / "metrics.jsonl")
    assert [line["iteration"] for line in lines] == list(range(1, len(lines) + 1))


def workers_of(folder):
    return request(folder, {"command": "status"})["workers"]


def refused(*words, timeout_seconds):
    started = time.monotonic()
    code, out, err = runs.finish(*words, *SMALL, f"runtime.timeout_seconds={timeout_seconds}")
    assert code == 2 and err.startswith("easyrl: ") and "Traceback" not in err
    assert "importing torch" not in out
    assert time.monotonic() - started < timeout_seconds + 20
    return err


def test_more_workers_than_the_cluster_has_room_for(cluster, tmp_path):
    folder = tmp_path / "run"
    words = ("--output", str(folder), *on(cluster, "ray:cpu:3"))
    err = refused(*words, timeout_seconds=10)
    assert "devices.infer" in err and "runtime.timeout_seconds" in err
    process = start(*words)
    wait_for_line(process, "waiting for places")
    time.sleep(1.0)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=WAIT_SECONDS)
    assert (process.returncode, err) == (128 + signal.SIGTERM, "")
    assert not folder.exists()


def test_a_node_that_cannot_run_easyrl(cluster, tmp_path):
    environment = runs.customized(tmp_path, "import sys; sys.modules['easyrl'] = None")
    node = cluster.add_node(num_cpus=1, env_vars=environment)
    try:
        words = ("--output", str(tmp_path / "run"), *on(cluster, "ray:cpu:3"))
        err = refused(*words, timeout_seconds=30)
    finally:
        cluster.remove_node(node)
    assert "No module named 'easyrl" in err and "node" in err
    assert cluster.address.rpartition(":")[0] in err


@pytest.mark.parametrize(("infer", "train"), SIZES.values(), ids=SIZES)
def test_a_killed_and_resumed_run_ends_in_the_same_bits(cluster, tmp_path, infer, train):
    whole = assert_same_bits(cluster, tmp_path, infer, train, "--iterations=6")
    folder, devices = tmp_path / "run", on(cluster, f"ray:cpu:{infer}", f"ray:cpu:{train}")
    words = (*SAME, "train.save_every=2", *devices)
    words = ("--output", str(folder), "--iterations=6", *words)
    runs.finish_after("checkpoint of iteration 2", subprocess.Popen.kill, *words)
    succeed("--resume", str(folder))
    assert bits_of(folder) == bits_of(whole)


@pytest.mark.parametrize("signum", [signal.SIGSTOP, signal.SIGKILL])
def test_a_head_that_does_not_answer_ends_the_run_resumable(signum, tmp_path):
    folder = tmp_path / "run"
    with cluster_of({"num_cpus": 2}) as cluster:
        words = (*SMALL, "--iterations=10000", "train.save_every=1")
        process = start("--output", str(folder), *on(cluster, "ray:cpu:1"), *words)
        wait_for_line(process, "iteration 2/")
        head = cluster.head_node.all_processes["gcs_server"][0].process
        head.send_signal(signum)
        try:
            _, err = process.communicate(timeout=WAIT_SECONDS)
        finally:
            head.send_signal(signal.SIGCONT)
    assert process.returncode == 1 and "head" in err and f"--resume {folder}" in err


def test_a_live_run_is_scaled_while_requested_nodes_start(cluster, tmp_path):
    folder = tmp_path / "run"

    def scale(wanted):
        request(folder, {"command": "scale", "infer_devices": wanted})

    def working():
        names = [each["name"] for each in workers_of(folder) if each["state"] == "working"]
        return {name for name in names if name.startswith("rollout")}

    def wait_for_iterations():
        num_done = len(lines_of(folder / "metrics.jsonl"))
        wait_for_line(process, f"iteration {num_done + 2}/")

    words = (*on(cluster, "ray:cpu:1"), *SMALL, "devices.max_rollout_workers=3", ONE_THREAD)
    with live(folder, *words) as process:
        for wanted in ("cpu:2", "0-1"):
            with pytest.raises(ValueError, match=r"--infer-devices: expected .*ray:cpu"):
                scale(wanted)
        scale("ray:cpu:3")  # there is a place for one of the two new engines
        wait_until(lambda: len(working()) == 2, process)
        devices = {each["device"] for each in workers_of(folder) if each["state"] == "starting"}
        assert devices == {"pending"}
        wait_for_iterations()
        scale("ray:cpu:2")  # the one without a place leaves
        wait_until(lambda: len(workers_of(folder)) == 4, process)
        scale("ray:cpu:3")
        node = cluster.add_node(num_cpus=1)
        try:
            wait_until(lambda: len(working()) == 3, process)
            scale("ray:cpu:1")
            wait_until(lambda: working() == {"rollout-0"}, process)
            wait_for_iterations()
        finally:
            cluster.remove_node(node)


def test_a_lost_node_changes_no_bit(tmp_path):
    here, folder = tmp_path / "here", tmp_path / "run"
    every = ("--iterations", "20", *SAME)
    succeed("--output", str(here), "--infer-devices", "cpu:2", *every)
    with cluster_of({"num_cpus": 0}, *[{"num_cpus": 1}] * 4) as cluster:
        process = start("--output", str(folder), *on(cluster, "ray:cpu:2"), *every)
        wait_for_line(process, "iteration 2/")
        (pid,) = (each["pid"] for each in workers_of(folder) if each["name"] == "rollout-1")
        host = psutil.Process(pid).parent()
        nodes = [node.all_processes["raylet"][0].process for node in cluster.list_all_nodes()]
        (raylet,) = (each for each in nodes if host is not None and each.pid == host.ppid())
        raylet.kill()
        raylet.wait()  # a process that is not waited for seems to be alive
        out, err = process.communicate(timeout=WAIT_SECONDS)
        assert (process.returncode, err) == (0, "") and "(raylet)" not in out
    assert summary_of(folder)["worker_restarts"] == 1
    assert bits_of(folder) == bits_of(here)


def test_an_evaluation_on_a_cluster_has_the_results_of_one_node(cluster, tmp_path):
    results = []
    for devices in ("cpu:2", "ray:cpu:2"):
        words = ["--model", "tiny", "--dataset", "arithmetic", "--infer-devices", devices, *SAME]
        words += ["--ray-address", cluster.address] if devices.startswith("ray") else []
        words += ["--num-samples", "2", "--output", folder := tmp_path / devices]
        subprocess.run(
            [sys.executable, "-m", "easyrl", "eval", *words], check=True, timeout=WAIT_SECONDS
        )
        lines = lines_of(folder / "samples.jsonl")
        results.append(sorted(lines, key=lambda line: line["prompt_index"]))
    assert results[0] == results[1] and len(results[0]) == 16
    assert len({*nodes_of_newest_run(cluster)}) == 2
