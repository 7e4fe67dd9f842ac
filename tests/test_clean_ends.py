"""However a run ends, nothing is left behind, and the cause is said once."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from easyrl.events import SaveModel
from easyrl.runtime.supervisor import Supervisor
from mistakes import change_json
from runs import SMALL, descendants, finish, start, wait_for_line, wait_until_gone

pytestmark = pytest.mark.alone

ENDLESS = ("--iterations", "100000", *SMALL)
SECONDS = 5.0  # the bound of a clean end


def is_worker(process: psutil.Process) -> bool:
    return "resource_tracker" not in " ".join(process.cmdline())


def started(tmp_path: Path, *arguments: str) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A run in its iterations, and all its processes."""
    process = start("--output", str(tmp_path / "run"), *ENDLESS, *arguments)
    wait_for_line(process, "iteration 2/")
    processes = descendants(process.pid)
    assert len([p for p in processes if is_worker(p)]) >= 3  # rollout, train, scorer
    return process, processes


def shared_memory() -> set[Path]:
    folder = Path("/dev/shm")
    return set(folder.iterdir()) if folder.is_dir() else set()


def end(process: subprocess.Popen[str], processes: list[psutil.Process]) -> tuple[int, str, str]:
    """Wait for the run's end; all of its processes must be gone in time."""
    began = time.monotonic()
    out, err = process.communicate(timeout=SECONDS)
    left = wait_until_gone(processes, SECONDS - (time.monotonic() - began))
    assert left == [], f"left behind: {left}"
    return process.returncode, out, err


@pytest.mark.parametrize(
    ("signum", "code"),
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.long),  # a terminal's, below
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.long),  # a terminal's, below
    ],
)
def test_a_signal_ends_everything(tmp_path: Path, signum: int, code: int) -> None:
    before = shared_memory()
    process, processes = started(tmp_path)
    process.send_signal(signum)
    returned, out, err = end(process, processes)
    assert returned == code
    assert "Traceback" not in err
    assert out.count("stopped by") == 1
    deadline = time.monotonic() + SECONDS
    while not shared_memory() <= before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert shared_memory() <= before


def test_a_terminal_that_is_closed_leaves_nothing_in_shared_memory(tmp_path: Path) -> None:
    before = shared_memory()
    run = start("--output", str(tmp_path / "run"), *ENDLESS)
    wait_for_line(run, "iteration 2/")
    processes = descendants(run.pid)
    for p in [psutil.Process(run.pid), *processes]:  # multiprocessing's resource tracker as well
        p.send_signal(signal.SIGHUP)
    returned, out, _ = end(run, processes)
    assert returned == 129 and "stopped by SIGHUP" in out
    assert shared_memory() <= before


def test_ctrl_c_in_a_terminal_reaches_all_processes_and_is_no_error(tmp_path: Path) -> None:
    run = start("--output", str(tmp_path / "run"), *ENDLESS)
    wait_for_line(run, "iteration 2/")
    processes = descendants(run.pid)
    for p in [psutil.Process(run.pid), *processes]:  # what a terminal does to the foreground group
        p.send_signal(signal.SIGINT)
    returned, out, err = end(run, processes)
    assert returned == 130 and out.count("stopped by") == 1
    assert "Traceback" not in err and "KeyboardInterrupt" not in err


def test_ctrl_c_while_the_workers_start(tmp_path: Path) -> None:
    process = start("--output", str(tmp_path / "run"), *ENDLESS)
    wait_for_line(process, "groups in flight")
    deadline = time.monotonic() + 30
    while len(descendants(process.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    processes = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    returned, _, err = end(process, processes)
    assert returned == 130 and "Traceback" not in err


@pytest.mark.parametrize("victim", ["rollout-0", "train-0"])
def test_a_killed_worker_ends_the_run_and_is_named(tmp_path: Path, victim: str) -> None:
    process, processes = started(tmp_path)
    position = 0 if victim == "rollout-0" else 1
    workers = sorted(
        (p for p in psutil.Process(process.pid).children() if is_worker(p)),
        key=lambda p: p.create_time(),
    )
    workers[position].kill()
    returned, _, err = end(process, processes)
    assert returned == 1
    assert err.count(f"{victim} was killed by SIGKILL") == 1


def test_a_killed_reward_process_ends_the_run_and_is_said(tmp_path: Path) -> None:
    process, processes = started(tmp_path)
    workers = [p for p in psutil.Process(process.pid).children() if is_worker(p)]
    templates = [c for w in workers for c in w.children() if is_worker(c)]
    assert len(templates) == 1
    (scorer,) = templates[0].children()
    scorer.kill()
    returned, _, err = end(process, processes)
    assert returned == 1
    assert "reward" in err


def test_a_killed_controller_takes_its_workers_with_it(tmp_path: Path) -> None:
    process, processes = started(tmp_path)
    process.kill()
    process.wait()
    assert wait_until_gone(processes, SECONDS) == []


def test_a_reward_that_raises_ends_the_run_with_its_own_traceback_once(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(
        "def score(prompts, completions, **columns):\n    raise KeyError('no such thing')\n"
    )
    process = start(
        *("--output", str(tmp_path / "run"), "--reward", f"{tmp_path}/bad.py:score"),
        *ENDLESS,
    )
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert err.count("KeyError: 'no such thing'") == 1
    assert "bad.py" in err and "for the prompt" in err


def test_a_reward_that_never_returns_does_not_hold_up_the_end(tmp_path: Path) -> None:
    under_way = tmp_path / "under_way"
    (tmp_path / "slow.py").write_text(
        "import time\nfrom pathlib import Path\n"
        "def score(prompts, completions, **columns):\n"
        f"    Path({str(under_way)!r}).touch()\n    time.sleep(1000)\n"
    )
    process = start(
        *("--output", str(tmp_path / "run"), "--reward", f"{tmp_path}/slow.py:score"),
        *ENDLESS,
    )
    deadline = time.monotonic() + 60
    while not under_way.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    processes = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    assert end(process, processes)[0] == 130 and under_way.exists()


def test_a_stopped_worker_with_a_full_pipe_holds_up_nobody() -> None:
    began = time.monotonic()
    with Supervisor() as supervisor:
        worker = supervisor.spawn("deaf", sleep_for_ever)
        for _ in range(3):
            worker.send(SaveModel("x" * 2**20))
        assert time.monotonic() - began < SECONDS
        supervisor.wait(timeout_seconds=0.5)
    assert time.monotonic() - began < SECONDS + 2
    assert not worker.process.is_alive()


def sleep_for_ever(control: object) -> None:
    time.sleep(1000)


def test_an_exception_in_a_worker_is_told_once_with_its_traceback(tmp_path: Path) -> None:
    """A model that its own class refuses: not foreseen, so the worker's own words."""
    folder = tmp_path / "model"
    shutil.copytree(Path(__file__).parent.parent / "easyrl" / "tasks" / "tiny", folder)
    change_json("config.json", hidden_act="frobnicate")(folder)
    code, _, err = finish("--model", str(folder), "--output", str(tmp_path / "run"), *ENDLESS)
    assert code == 1
    assert err.count("Traceback (most recent call last)") >= 1
    assert err.count("easyrl: ") == 1
    last = err.strip().splitlines()[-1]
    assert "Error" in last and err.count(last) == 1
    assert "resource_tracker" not in err
