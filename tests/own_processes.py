"""Programs that a test starts and that end with it, and the bound of a test's waits."""

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

import psutil

WAIT_SECONDS = 600.0
"""Bound of a wait for something that happens where the code is right. It costs nothing then, so it
is far longer than any such wait on a machine whose cores are busy. It is shorter than the limit of
a test (`timeout` in pyproject.toml), whose message says less."""

_started: list[subprocess.Popen[Any]] = []


def popen(words: Sequence[object], **options: Any) -> subprocess.Popen[Any]:
    """Start a program in a session of its own. It ends with the `processes_end` that it is started
    in: each test is one (conftest.py), so that a test need not end the program if it fails."""
    process = subprocess.Popen(list(map(str, words)), start_new_session=True, **options)
    _started.append(process)
    return process


@contextlib.contextmanager
def processes_end() -> Iterator[None]:
    """End what `popen` starts meanwhile, and what these programs have started."""
    num_before = len(_started)
    try:
        yield
    finally:
        while len(_started) > num_before:
            end(_started.pop())


def end(process: subprocess.Popen[Any]) -> None:
    """Kill a program, its descendants and its session. Its pipes are closed."""
    left = _session_of(process)
    with contextlib.suppress(psutil.NoSuchProcess):
        if process.poll() is None:  # its descendants may have sessions of their own
            left += psutil.Process(process.pid).children(recursive=True)
            process.kill()
    for each in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what is buffered has no reader any more
                pipe.close()
    process.wait()


def _session_of(process: subprocess.Popen[Any]) -> list[psutil.Process]:
    """The other processes of a program's session. While there is one, the kernel gives the
    program's number to no other process."""
    if process.poll() is not None and psutil.pid_exists(process.pid):
        return []  # the number is another's, so the session has ended
    found = []
    for each in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if os.getsid(each.pid) == process.pid != each.pid:
                found.append(each)
    return found
