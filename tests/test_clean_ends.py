"""However a run ends, nothing is left behind, and the cause is reported once: interrupted, on a
full disk, with closed outputs, after the loss of a process, or after thousands of iterations."""

import contextlib
import hashlib
import os
import shlex
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

import chaos
from easyrl.events import SaveModel
from easyrl.model.checkpoint_files import checkpoints_in, read_checkpoint
from easyrl.observe.trace import MAX_BYTES
from easyrl.runtime.control import request
from easyrl.runtime.run_folder import is_locked, read_lines
from easyrl.runtime.supervisor import Interrupted, Supervisor, signals_as_interrupts
from mistakes import TINY
from own_processes import WAIT_SECONDS
from runs import (
    HARDER,
    SMALL,
    command,
    descendants,
    easyrl,
    finish,
    finish_after,
    lines_of,
    shared_memory,
    start,
    succeed,
    summary_of,
    wait_for_line,
    wait_until,
    wait_until_gone,
    workers,
)

pytestmark = pytest.mark.alone

ENDLESS = ("--iterations", "100000", *SMALL)
SECONDS = 5.0  # the bound of a clean end


def started(tmp_path, *arguments):
    process = start("--output", str(tmp_path / "run"), *ENDLESS, *arguments)
    wait_for_line(process, "iteration 2/")
    processes = descendants(process.pid)
    assert {"rollout-0", "train-0"} <= workers(process.pid).keys() and len(processes) > 3
    return process, processes


def end(process, processes):
    """Wait for the run's end; all of its processes must be gone in time."""
    began = time.monotonic()
    out, err = process.communicate(timeout=SECONDS)
    left = wait_until_gone(processes, SECONDS - (time.monotonic() - began))
    assert left == [], f"left behind: {left}"
    return process.returncode, out, err


TWO = ("--train-devices", "cpu:2")
OTHER_FEATURES = (
    *(*TWO, "model.lora.rank=4", "algorithm.beta=0.04"),
    *("algorithm.dynamic_sampling=true", "train.updates_per_iteration=2"),
)


def test_a_signal_keeps_its_number_where_a_library_raises_an_interrupt_of_its_own():
    def library(signum):
        try:
            os.kill(os.getpid(), signum)
            time.sleep(30)
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None

    for signum in (signal.SIGTERM, signal.SIGINT):
        with pytest.raises(Interrupted) as caught, signals_as_interrupts():
            library(signum)
        assert caught.value.signum == signum
    with pytest.raises(Interrupted) as caught, signals_as_interrupts():
        raise Interrupted(signal.SIGHUP)
    assert caught.value.signum == signal.SIGHUP


@pytest.mark.parametrize(
    "words",
    [TWO, pytest.param(OTHER_FEATURES, marks=pytest.mark.long)],
    ids=["plain", "other features"],
)
def test_a_live_run_gets_and_loses_an_engine_and_leaves_nothing_when_interrupted(tmp_path, words):
    run = tmp_path / "run"
    words = ("--infer-devices", "cpu", "devices.max_rollout_workers=2", *words)
    process, processes = started(tmp_path, *words)
    check_sockets(run, [psutil.Process(process.pid), *processes])
    check_scaling(run, process)
    interrupt(process, processes, signal.SIGINT)
    assert not (run / "control.sock").exists() and not is_locked(run)
    with pytest.raises(ValueError, match="easyrl watch"):
        request(run, {"command": "status"})
    lines = lines_of(run / "metrics.jsonl")
    assert [line["iteration"] for line in lines] == list(range(1, len(lines) + 1))
    if "model.lora.rank=4" in words:
        num_iterations = len(lines) + 2
        out = succeed("--resume", str(run), "--iterations", str(num_iterations))
        assert "rollout-0: cpu" in out and "rollout-1" not in out  # those of devices.infer
        assert summary_of(run)["groups_trained"] == 4 * num_iterations


def check_sockets(run, processes):
    listening = [c.laddr.ip for p in processes for c in p.net_connections() if c.status == "LISTEN"]
    assert listening and set(listening) <= {"127.0.0.1", "::1"}
    named = {c.laddr for p in processes for c in p.net_connections("unix") if c.laddr}
    assert [Path(str(name)).name for name in named] == ["control.sock"]
    assert (run / "control.sock").stat().st_mode & 0o777 == 0o600
    status = request(run, {"command": "status"})
    assert 1 <= status["iteration"] < status["num_iterations"] == 100_000
    kinds = Counter(worker["kind"] for worker in status["workers"])
    assert kinds == {"controller": 1, "rollout": 1, "train": 2}
    assert {worker["pid"] for worker in status["workers"]} <= {p.pid for p in processes}


def check_scaling(run, process):
    def status():
        reply = request(run, {"command": "status"})
        rollout = (each for each in reply["workers"] if each["kind"] == "rollout")
        return {each["name"]: each["state"] for each in rollout}, reply["iteration"]

    def wait_for(is_so):
        wait_until(lambda: is_so(*status()), process)
        return status()[1]

    def scale_to(wanted):
        request(run, {"command": "scale", "infer_devices": wanted})

    with pytest.raises(ValueError, match="max_rollout_workers"):
        scale_to("cpu:3")
    scale_to("cpu:2")
    with pytest.raises(ValueError, match=r"starting or leaving.*rollout-1"):
        scale_to("cpu")
    wait_for(lambda states, _: states.get("rollout-1") == "working")
    scale_to("cpu")
    num_done = wait_for(lambda states, _: states.keys() == {"rollout-0"})
    wait_for(lambda _, iteration: iteration > num_done + 1)


def interrupt(process, processes, signum):
    semaphores = shared_memory(processes)
    assert semaphores
    process.send_signal(signum)
    if signum != signal.SIGTERM:  # a terminal sends it to all, multiprocessing's tracker as well
        for each in processes:
            each.send_signal(signum)
    returned, out, err = end(process, processes)
    assert returned == 128 + signum and out.count(f"stopped by {signum.name}") == 1
    assert "Traceback" not in err and "KeyboardInterrupt" not in err
    wait_until(lambda: not any(path.exists() for path in semaphores), seconds=SECONDS)


@pytest.mark.long
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_end_everything_without_an_error(tmp_path, signum):
    interrupt(*started(tmp_path), signum)


@pytest.mark.long
def test_easyrl_stop_waits_for_the_end_and_says_how_to_resume(tmp_path):
    process, _ = started(tmp_path, "train.save_every=null")
    run = tmp_path / "run"
    assert request(run, {"command": "stop"})["message"]  # a second one does not hurry it
    result = easyrl("stop", run)
    assert not is_locked(run) and result.exit_code == 0
    assert result.stdout.endswith(f"to resume: easyrl grpo --resume {run}\n")
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 143 and err == "" and "Ctrl-C" not in out
    assert "stopped by easyrl stop; " in out
    [checkpoint] = checkpoints_in(run / "checkpoints")
    assert checkpoint.name == str(len(lines_of(run / "metrics.jsonl")))


@pytest.mark.long
def test_a_second_signal_ends_a_run_whose_trainer_hangs(tmp_path):
    process, processes = started(tmp_path)
    workers(process.pid)["train-0"].suspend()  # so that it never ends its micro-batch
    half = tmp_path / "run" / "checkpoints" / "9.unfinished"
    half.mkdir(parents=True)
    process.send_signal(signal.SIGINT)
    wait_for_line(process, "(Ctrl-C again:")
    process.send_signal(signal.SIGINT)
    returned, out, _ = end(process, processes)
    assert returned == 130 and out.count("stopped by SIGINT") == 1
    assert not half.exists()


@pytest.mark.long
def test_an_exception_in_a_reward_is_reported_once_with_its_traceback(tmp_path):
    (tmp_path / "r.py").write_text(REWARDS)
    words = ("--output", str(tmp_path / "run"), *ENDLESS)
    code, _, err = finish(*words, "--reward", f"{tmp_path}/r.py:fails")
    assert err.count("KeyError: 'no such thing'") == 1 and "\nprompt: " in err
    assert code == 1 and err.count("easyrl: ") == 1


@pytest.mark.long
def test_ctrl_c_while_the_workers_start(tmp_path):
    process = start("--output", str(tmp_path / "run"), *ENDLESS)
    wait_for_line(process, "groups in flight")
    wait_until(lambda: len(descendants(process.pid)) >= 4)  # with a reward process
    processes = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    returned, _, err = end(process, processes)
    assert returned == 130 and err == ""


def hangs_before_its_first_event(control):
    time.sleep(1000)


def test_a_stopped_worker_with_a_full_pipe_holds_up_nobody():
    began = time.monotonic()
    with Supervisor() as supervisor:
        worker = supervisor.spawn("deaf", hangs_before_its_first_event)
        for _ in range(3):
            worker.send(SaveModel("x" * 2**20))
        assert time.monotonic() - began < SECONDS
        supervisor.wait(timeout_seconds=0.5)
    assert not worker.process.is_alive() and time.monotonic() - began < SECONDS + 2


def ends_at_once(control):
    os._exit(1)


def test_a_signal_to_all_processes_is_raised_as_often_as_the_run_waits(monkeypatch):
    """The controller tells by identity whether an interruption is the one that it handles."""
    with Supervisor() as supervisor:
        supervisor.spawn("train-0", ends_at_once)
        first_cause = supervisor._first_cause

        def first_cause_with_signal(failures):
            os.kill(os.getpid(), signal.SIGTERM)
            return first_cause(failures)

        monkeypatch.setattr(supervisor, "_first_cause", first_cause_with_signal)
        raised = []
        for _ in range(2):
            with pytest.raises(Interrupted, match="SIGTERM") as caught:
                supervisor.wait(SECONDS)
            raised.append(caught.value)
    assert raised[0] is not raised[1]


def test_easyrl_stop_does_not_hurry_a_run_that_stops_already():
    for signum in (signal.SIGINT, signal.SIGTERM):
        with Supervisor() as supervisor:
            os.kill(os.getpid(), signum)
            supervisor.interrupt()
            with pytest.raises(Interrupted) as caught:
                supervisor.wait(SECONDS)
            assert caught.value.signum == signum
            assert supervisor.wait(timeout_seconds=0.1) == []
    with Supervisor() as supervisor:  # by `train.stop_when`, or a callback
        supervisor.begin_to_stop()
        supervisor.interrupt()
        assert supervisor.wait(timeout_seconds=0.1) == []
    with Supervisor() as supervisor:
        supervisor.interrupt()
        with pytest.raises(Interrupted, match="easyrl stop"):
            supervisor.wait(SECONDS)


@pytest.mark.long
def test_runs_survive_the_loss_of_any_process_at_any_moment(tmp_path):
    words = ("--trials", "100", "--seed", "1", "--jobs", "2", "--folder", str(tmp_path))
    assert chaos.main(words) == 0


REWARDS = """
import time
from pathlib import Path

def fails(prompts, completions, **columns):
    raise KeyError("no such thing")

def hangs(prompts, completions, **columns):
    Path(__file__).with_name("under_way").touch()
    time.sleep(1000)
"""


@pytest.mark.long
def test_a_reward_that_never_returns_does_not_hold_up_the_end(tmp_path):
    (tmp_path / "r.py").write_text(REWARDS)
    run, reward = ("--output", str(tmp_path / "run")), ("--reward", f"{tmp_path}/r.py:hangs")
    process = start(*run, *reward, *ENDLESS)
    wait_until((tmp_path / "under_way").exists)
    processes = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    assert end(process, processes)[0] == 130


EXACT = (*SMALL, "train.prompts_per_iteration=6", "runtime.deterministic=true")


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
        out = succeed("--output", str(folder), "--iterations", "5", *devices, *EXACT, *words)
        assert ("train-1: cpu" in out) == (devices == TWO)
        ends.append((load_file(folder / "model/model.safetensors"), summary_of(folder), folder))
    (one, _, _), (two, summary, folder) = ends
    before = load_file(TINY / "model.safetensors")
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


@pytest.mark.long
@pytest.mark.parametrize(("signum", "victim"), [(signal.SIGKILL, 1), (signal.SIGSTOP, 0)])
def test_a_rank_that_dies_or_stops_ends_the_run_and_is_named(tmp_path, victim, signum):
    process, processes = started(tmp_path, *TWO, "runtime.timeout_seconds=4")
    workers(process.pid)[f"train-{victim}"].send_signal(signum)
    _, err = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 1
    if signum == signal.SIGKILL:
        assert err.count(f"train-{victim} was killed by SIGKILL") == 1
    else:
        assert "runtime.timeout_seconds" in err and "failed" in err
    assert wait_until_gone(processes) == []


@pytest.mark.long
@pytest.mark.parametrize(
    "line",
    [
        "COMMAND | head -n 1; exit ${PIPESTATUS[0]}",
        "COMMAND 2>&1 | true; exit ${PIPESTATUS[0]}",
        "COMMAND >&- 2>&- <&-",
    ],
)
def test_run_with_closed_output_ends_as_any_other(tmp_path, line):
    folder = tmp_path / "run"
    run = shlex.join(command("--output", str(folder), "--iterations", "2", *SMALL))
    words = ["bash", "-c", line.replace("COMMAND", run)]
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    done = subprocess.run(words, check=False, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (f"run folder {folder}\n" if "head" in line else "")
    assert len(read_lines(folder / "metrics.jsonl")) == 2
    assert (folder / "summary.json").is_file()


@pytest.fixture
def disk(tmp_path):
    """A disk of 40 MiB: a checkpoint of the built-in model takes 9."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.long
def test_run_on_a_full_disk_ends_with_the_cause_and_a_whole_checkpoint(disk):
    folder = disk / "run"

    def fill(_):
        with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass

    words = ("--output", str(folder), "train.save_every=2", "train.keep_checkpoints=1")
    words = (*words, "output.samples=all", *ENDLESS)
    code, out, err = finish_after("checkpoint of iteration 2:", fill, *words)
    assert code == 1
    assert "No space left" in err and f"--resume {folder}" in err
    assert "Traceback" not in out + err
    for file in (folder / "metrics.jsonl", folder / "samples.jsonl"):
        done = sorted({line["iteration"] for line in read_lines(file)})
        assert file.read_bytes().endswith(b"\n") and done == list(range(1, len(done) + 1))
    (saved,) = checkpoints_in(folder / "checkpoints")
    assert read_checkpoint(saved).state["num_iterations"] >= 2


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
