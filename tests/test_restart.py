"""`runtime.restart=on_failure`: a run that fails or is killed starts again by itself."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from easyrl.model.checkpoint_files import checkpoints_in
from runs import (
    SMALL,
    Finished,
    descendants,
    finish,
    lines_of,
    start,
    summary_of,
    wait_for_line,
    wait_until_gone,
)

ON_FAILURE = "runtime.restart=on_failure"
SCRIPT = Path(__file__).with_name("restarting_run.py")


def begin(folder: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCRIPT), str(folder), *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def end(folder: Path, *words: str) -> tuple[int, list[list[str]], str]:
    """Exit code, the starts (pid, runtime.resume, --resume), and what was printed."""
    process = begin(folder, *words)
    _, err = process.communicate(timeout=30)
    starts = [line.split() for line in (folder / "starts").read_text().splitlines()]
    assert len({pid for pid, *_ in starts}) == len(starts)
    return process.returncode, starts, err


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("0", 0),
        ("2", 2),
        ("130", 130),
        ("SIGTERM", 143),
        ("SIGHUP", 129),
        ("-1", 1),
        ("-SIGKILL", 137),
    ],
)
def test_ends_that_are_no_failures_of_a_run(tmp_path: Path, how: str, code: int) -> None:
    returned, starts, err = end(tmp_path / "run", how)
    assert (returned, len(starts), err) == (code, 1, "")


def test_a_failed_and_a_killed_run_start_again_where_they_were(tmp_path: Path) -> None:
    code, starts, err = end(tmp_path / "run", "1", "SIGKILL", "SIGSEGV", "0")
    assert code == 0 and err.count("starts again") == 3
    assert [words for _, *words in starts] == [["never", "None"], *[["auto", "None"]] * 3]


def test_a_run_that_always_fails_ends_with_the_history(tmp_path: Path) -> None:
    code, starts, err = end(tmp_path / "run", "1", "SIGKILL", "1", "runtime.max_restarts=2")
    assert code == 1 and len(starts) == 3
    *_, first, second, third = err.splitlines()
    assert "exit code 1" in first and "SIGKILL" in second and "exit code 1" in third


def test_failures_count_in_the_window_or_while_there_is_no_newer_checkpoint(tmp_path: Path) -> None:
    short = ("runtime.max_restarts=1", "runtime.restart_window_seconds=0.001")
    assert end(tmp_path / "1", "1", *short)[0] == 1
    assert len(lines(tmp_path / "1" / "starts")) == 2
    code, starts, _ = end(tmp_path / "2", "+1", "+1", "+SIGKILL", "+1", "0", *short)
    assert (code, len(starts)) == (0, 5)
    assert end(tmp_path / "3", "+1", "runtime.max_restarts=1")[0] == 1
    assert len(lines(tmp_path / "3" / "starts")) == 2


def lines(file: Path) -> list[str]:
    return file.read_text().splitlines()


def test_a_signal_reaches_the_run_once_whoever_else_gets_it(tmp_path: Path) -> None:
    """Ctrl-C of a terminal and some schedulers signal all processes, `kill` only this one."""
    for name, signals_all in (("one", False), ("all", True)):
        process = begin(tmp_path / name, "hang")
        wait_for_line(process, "hangs")
        processes = [psutil.Process(process.pid), *descendants(process.pid)]
        for each in [p for p in processes if "sleep" not in p.name()][: None if signals_all else 1]:
            each.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
        assert process.returncode == 143
        assert lines(tmp_path / name / "signals") == [str(int(signal.SIGTERM))]
        assert len(lines(tmp_path / name / "starts")) == 1


def test_a_killed_parent_takes_the_run_with_it(tmp_path: Path) -> None:
    process = begin(tmp_path / "run", "hang")
    wait_for_line(process, "hangs")
    processes = descendants(process.pid)
    process.kill()
    process.communicate()
    assert len(processes) == 2 and wait_until_gone(processes, 5.0) == []


# -- real runs ------------------------------------------------------------------------------------

SAME = ("--iterations", "5", *SMALL, "train.save_every=1", "runtime.deterministic=true")


def controller_of(process: subprocess.Popen[str]) -> psutil.Process:
    (controller,) = psutil.Process(process.pid).children()
    return controller


def trainer_of(process: subprocess.Popen[str]) -> psutil.Process:
    logs = {p: Path(f"/proc/{p.pid}/fd/1").readlink().name for p in descendants(process.pid)}
    return next(p for p, log in logs.items() if log == "train-0.log")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    code, out, err = finish("--output", str(folder), *SAME, ON_FAILURE)
    assert (code, err) == (0, "")
    return Finished(folder, out)


def test_a_run_that_loses_trainer_and_controller_ends_in_the_same_bits(
    tmp_path: Path, undisturbed: Finished
) -> None:
    process = start("--output", str(tmp_path / "run"), *SAME, ON_FAILURE)
    wait_for_line(process, "iteration 2/")
    trainer_of(process).kill()
    wait_for_line(process, "iteration 4/")
    processes = descendants(process.pid)
    controller_of(process).kill()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert err.count("starts again") == 2 and "train-0 was killed by SIGKILL" in err
    assert wait_until_gone(processes, 0.0) == []
    iterations = [line["iteration"] for line in lines_of(tmp_path / "run" / "metrics.jsonl")]
    assert iterations == [*range(5)]
    sha256 = "weights_sha256"
    assert summary_of(tmp_path / "run")[sha256] == summary_of(undisturbed.folder)[sha256]


@pytest.mark.long
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_stops_the_run_with_a_checkpoint(tmp_path: Path, signum: signal.Signals) -> None:
    endless = ("--iterations", "100000", *SMALL, ON_FAILURE)
    process = start("--output", str(tmp_path / "run"), *endless)
    wait_for_line(process, "iteration 2/")
    processes = descendants(process.pid)
    for each in [psutil.Process(process.pid), *processes]:
        each.send_signal(signum)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signum and out.count("stopped by") == 1 and err == ""
    assert wait_until_gone(processes, 2.0) == []
    assert len(checkpoints_in(tmp_path / "run" / "checkpoints")) == 1


@pytest.mark.long
def test_a_resumed_run_and_one_without_checkpoints_start_again(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    code, _, err = finish("--output", str(first), *SAME, "--iterations", "2")
    assert code == 0, err
    more = ("--resume", str(first), "--iterations", "6", ON_FAILURE)
    never = ("--output", str(second), *SAME, "train.keep_checkpoints=0", ON_FAILURE)
    for words in (more, never):
        process = start(*words)
        wait_for_line(process, "iteration 4/")
        controller_of(process).kill()
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0 and err.count("starts again") == 1, err
    assert [line["iteration"] for line in lines_of(first / "metrics.jsonl")] == [*range(6)]
    assert [line["iteration"] for line in lines_of(second / "metrics.jsonl")] == [*range(5)]


@pytest.mark.long
def test_a_reward_that_always_raises_ends_the_run_after_its_restarts(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("def fails(**columns):\n    raise KeyError('no such thing')\n")
    words = ("--reward", f"{tmp_path}/r.py:fails", ON_FAILURE, "runtime.max_restarts=1")
    code, _, err = finish("--output", str(tmp_path / "run"), *SAME, *words)
    assert code == 1 and err.count("no such thing") >= 2
    assert err.count("exit code 1") == 3  # one restart, two lines of history
