"""`runtime.restart=on_failure`: a run that fails or is killed starts again by itself."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from runs import SMALL, descendants, lines_of, start, wait_for_line, wait_until_gone

SCRIPT = Path(__file__).with_name("restarting_run.py")


def begin(*words):
    command, pipe = [sys.executable, *words], subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)


def end(folder, *words):
    """Exit code, the starts (runtime.resume, --resume), and what was printed."""
    process = begin(str(SCRIPT), str(folder), *words)
    _, err = process.communicate(timeout=30)
    starts = [line.split() for line in (folder / "starts").read_text().splitlines()]
    assert len({pid for pid, *_ in starts}) == len(starts)
    return process.returncode, [words for _, *words in starts], err


def test_failures_start_again_where_they_were_and_other_ends_do_not(tmp_path):
    for how, code in (("0", 0), ("2", 2), ("130", 130), ("-1", 1)):
        returned, starts, err = end(tmp_path / how, how)
        assert (returned, len(starts), err) == (code, 1, "")
    folder = tmp_path / "run"
    code, starts, err = end(folder, "1", "SIGKILL", "SIGSEGV", "0")
    assert code == 0 and err.count("starts again") == 3
    assert starts == [["never", str(folder)], *[["auto", "None"]] * 3]


def test_failures_count_in_the_window_or_while_there_is_no_newer_checkpoint(tmp_path):
    short = ("runtime.max_restarts=1", "runtime.restart_window_seconds=0.001")
    code, starts, err = end(tmp_path / "1", "1", "SIGKILL", *short)
    assert (code, len(starts)) == (1, 2) and "SIGKILL" in err and "runtime.max_restarts" in err
    code, starts, _ = end(tmp_path / "2", "+1", "+SIGKILL", "+1", "0", *short)
    assert (code, len(starts)) == (0, 4)
    code, starts, _ = end(tmp_path / "3", "+1", "runtime.max_restarts=1")
    assert (code, len(starts)) == (1, 2)


def test_a_signal_reaches_the_run_once_whoever_else_gets_it(tmp_path):
    """Ctrl-C of a terminal and some schedulers signal all processes, `kill` only the first."""
    for signals_all in (False, True):
        process = begin(str(SCRIPT), str(tmp_path / f"{signals_all}"), "hang")
        wait_for_line(process, "hangs")
        if signals_all:
            descendants(process.pid)[0].terminate()
            time.sleep(0.1)
        process.terminate()
        _, err = process.communicate(timeout=30)
        assert (process.returncode, err) == (143, "")


def test_a_killed_parent_takes_the_run_with_it(tmp_path):
    process = begin(str(SCRIPT), str(tmp_path / "run"), "hang")
    wait_for_line(process, "hangs")
    (run,) = descendants(process.pid)
    process.kill()
    process.communicate()
    assert wait_until_gone([run], 5.0) == []


@pytest.mark.long
def test_a_run_that_loses_trainer_and_controller_finishes_and_is_watched(tmp_path):
    folder, five = tmp_path / "run", ("--iterations", "5", *SMALL, "train.save_every=1")
    process = start("--output", str(folder), *five, "runtime.restart=on_failure")
    wait_for_line(process, "iteration 2/")
    watch = begin("-m", "easyrl", "watch", str(folder))
    (controller,) = psutil.Process(process.pid).children()
    logs = {p: Path(f"/proc/{p.pid}/fd/1").readlink().name for p in descendants(controller.pid)}
    next(p for p, log in logs.items() if log == "train-0.log").kill()
    wait_for_line(process, "iteration 4/")
    processes = descendants(process.pid)
    (controller,) = psutil.Process(process.pid).children()
    controller.kill()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert err.count("starts again") == 2 and "train-0 was killed by SIGKILL" in err
    assert wait_until_gone(processes, 0.0) == []
    assert [line["iteration"] for line in lines_of(folder / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    out, _ = watch.communicate(timeout=10)
    assert watch.returncode == 0 and "iteration 5/5" in out
