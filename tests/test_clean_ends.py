"""However a run ends, nothing is left behind, and the cause is reported once."""

import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from easyrl.cli import app
from easyrl.events import SaveModel
from easyrl.model.checkpoint_files import checkpoints_in
from easyrl.runtime.control import request
from easyrl.runtime.run_folder import is_locked
from easyrl.runtime.supervisor import Supervisor
from runs import (
    SMALL,
    descendants,
    finish,
    lines_of,
    shared_memory,
    start,
    wait_for_line,
    wait_until,
    wait_until_gone,
    workers,
)

pytestmark = pytest.mark.alone

ENDLESS = ("--iterations", "100000", *SMALL)
SECONDS = 5.0  # the bound of a clean end


def started(tmp_path, *arguments):
    """A run in its iterations, and all its processes."""
    process = start("--output", str(tmp_path / "run"), *ENDLESS, *arguments)
    try:
        wait_for_line(process, "iteration 2/", timeout=600)
    except BaseException:
        process.kill()
        raise
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


def test_an_interrupted_run_leaves_nothing_behind(tmp_path):
    """Until then it is shown and reached from this machine and by its user only."""
    process, processes = started(tmp_path, "--train-devices", "cpu:2")
    run, every = tmp_path / "run", [psutil.Process(process.pid), *processes]
    listening = [c.laddr.ip for p in every for c in p.net_connections() if c.status == "LISTEN"]
    assert listening and set(listening) <= {"127.0.0.1", "::1"}
    named = {c.laddr for p in every for c in p.net_connections("unix") if c.laddr}
    assert [Path(str(name)).name for name in named] == ["control.sock"]
    assert (run / "control.sock").stat().st_mode & 0o777 == 0o600
    status = request(run, {"command": "status"})
    assert 1 <= status["iteration"] < status["num_iterations"] == 100_000
    kinds = Counter(worker["kind"] for worker in status["workers"])
    assert kinds == {"controller": 1, "rollout": 1, "train": 2}
    assert {worker["pid"] for worker in status["workers"]} <= {p.pid for p in every}
    interrupt(process, processes, signal.SIGINT)
    assert not (run / "control.sock").exists() and not is_locked(run)
    with pytest.raises(ValueError, match="easyrl watch"):
        request(run, {"command": "status"})


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
    result = CliRunner().invoke(app, ["stop", str(run)])
    assert not is_locked(run) and result.exit_code == 0
    assert result.stdout.endswith(f"to resume: easyrl grpo --resume {run}\n")
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 143 and err == "" and "Ctrl-C" not in out
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
    assert err.count("KeyError: 'no such thing'") == 1 and "for the prompt" in err
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


@pytest.mark.long
def test_runs_survive_the_loss_of_any_process_at_any_moment(tmp_path):
    words = ("--trials", "100", "--seed", "1", "--jobs", "2", "--folder", str(tmp_path))
    command = [sys.executable, "-m", "tests.chaos", *words]
    subprocess.run(command, cwd=Path(__file__).parent.parent, check=True)


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
