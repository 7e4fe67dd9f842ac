"""Hostile answers end as failed answers with nothing left behind, honest ones pass."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from easyrl.rewards import sandbox
from easyrl.rewards.sandbox import Level, Limits, SandboxError, Walls, find_walls, run
from hostile_code import ATTACKS, FORGERIES, PROGRAMS, SECRET, succeeded

pytestmark = pytest.mark.alone

NOBODY = 65534
TESTS = Path(__file__).parent
FILLS_DISKS = {"thousands of files", "a folder without end"}
"""What `plain` does not keep from; see README."""


class Neighbourhood:
    """What an answer might reach: a folder, a listener, this process and its environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "secret").write_text(SECRET)
        for path, mode in ((folder, 0o777), (folder / "secret", 0o666)):
            path.chmod(mode)
        self.internet = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.internet.getsockname()[1])
        self.listeners = [self.internet]
        for address in (str(folder / "socket"), f"\0{SECRET}"):
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(address)
            listener.listen()
            self.listeners.append(listener)
        self.before = self._state()

    def _state(self) -> dict[str, Any]:
        return {
            "files": {
                (str(path), path.stat().st_mode, path.stat().st_size, path.stat().st_mtime_ns)
                for path in self.folder.rglob("*")  # plain's temporary folders among them
            },
            "hostile names": [*Path("/dev/shm").glob("*hostile*")],
        }

    def check(self) -> None:
        assert self._state() == self.before
        deadline = time.monotonic() + 5
        while left := _sandboxed():
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
        for listener in self.listeners:
            listener.setblocking(False)
            with pytest.raises(BlockingIOError):
                listener.accept()

    def close(self) -> None:
        for listener in self.listeners:
            listener.close()


def _sandboxed() -> list[psutil.Process]:
    """Every process of a sandbox of these tests, whoever it belongs to by now."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        try:
            words = " ".join(process.info["cmdline"] or [])
            if "inside.launch" in words and str(TESTS.parent) in words:
                found.append(process)
        except psutil.Error:
            continue
    return [one for one in found if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def neighbourhood(monkeypatch: pytest.MonkeyPatch) -> Iterator[Neighbourhood]:
    monkeypatch.setenv("HOSTILE", SECRET)
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to other users
        there = Neighbourhood(Path(folder))
        yield there
        there.close()


LEVEL = find_walls().level
needs_namespaces = pytest.mark.skipif(LEVEL != "namespaces", reason="none are allowed here")


@needs_namespaces
@pytest.mark.parametrize(
    "names", [ATTACKS, FORGERIES, PROGRAMS], ids=["attacks", "forgeries", "programs"]
)
def test_hostile_answers_fail_and_leave_nothing(
    names: dict[str, str], neighbourhood: Neighbourhood
) -> None:
    assert not succeeded(list(names), "namespaces", str(neighbourhood.folder), neighbourhood.port)
    neighbourhood.check()


def as_nobody(*command: str, temporary: Path = Path("/tmp")) -> subprocess.CompletedProcess[str]:
    environment = {
        "PYTHONPATH": f"{TESTS.parent}:{TESTS}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOSTILE": SECRET,
        "TMPDIR": str(temporary),
    }
    return subprocess.run(
        command,
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        env=environment,
        cwd="/",
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )


def python_of_nobody() -> str | None:
    """A Python that another user can start and that can read this code, if there is one."""
    if os.geteuid() != 0:
        return None
    check = "import sys, hostile_code; assert sys.version_info >= (3, 11)"
    for python in (sys.executable, "/usr/bin/python3"):
        with contextlib.suppress(OSError):
            if as_nobody(python, "-c", check).returncode == 0:
                return python
    return None


@pytest.mark.long
@pytest.mark.parametrize("level", ["namespaces", "plain"])
def test_hostile_answers_fail_where_the_user_is_not_root(
    level: Level, neighbourhood: Neighbourhood
) -> None:
    """In `plain` a program may fill the disk, and its memory is counted process by process."""
    python = python_of_nobody()
    if python is None:
        pytest.skip("there is no other user whose Python could be used")
    names = [*ATTACKS, *FORGERIES, *PROGRAMS]
    if level == "plain":
        names = [name for name in names if name not in FILLS_DISKS]
    arguments = [level, str(neighbourhood.folder), str(neighbourhood.port), json.dumps(names)]
    script = str(TESTS / "hostile_code.py")
    done = as_nobody(python, script, *arguments, temporary=neighbourhood.folder)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
    neighbourhood.check()


@needs_namespaces
def test_a_killed_reward_process_takes_the_answer_with_it(neighbourhood: Neighbourhood) -> None:
    script = (
        "from easyrl.rewards.sandbox import Limits, run\n"
        "job = {'kind': 'asserts', 'code': 'import time', 'tests': [['time.sleep(99)'], None]}\n"
        "print('started', flush=True)\n"
        "list(run(job, Limits(99, 1 << 30), 'namespaces'))"
    )
    command = [sys.executable, "-c", script]
    scoring = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=TESTS.parent)
    assert scoring.stdout is not None and scoring.stdout.readline()
    deadline = time.monotonic() + 20
    while len(_sandboxed()) < 4:  # launcher, init, answer, tester
        assert time.monotonic() < deadline
        time.sleep(0.05)
    scoring.kill()
    scoring.wait()
    scoring.stdout.close()
    neighbourhood.check()


def test_where_there_are_no_namespaces_the_other_walls_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = sandbox._lines

    def refuse(job: dict[str, Any], *arguments: Any) -> Any:
        if job["level"] == "namespaces":
            raise SandboxError("unshare: Operation not permitted")
        return lines({**job, "level": LEVEL}, *arguments)  # as it looks to a user like this one

    monkeypatch.setattr(sandbox, "_lines", refuse)
    find_walls.cache_clear()
    try:
        walls = find_walls()
    finally:
        find_walls.cache_clear()
    assert walls.level == "plain"
    assert "fill the disk" in walls.missing()[-1]


def test_walls_tell_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Walls("namespaces", 0, False, True).is_strict
    assert not Walls("namespaces", 7, True, True).missing()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert Walls("plain", 1, True, False).is_strict
    assert not Walls("plain", 0, True, True).is_strict
    assert not Walls("plain", 7, False, True).is_strict
    assert "reach the network" in Walls("plain", 7, False, True).missing()
    assert "end other processes of its user" in Walls("plain", 5, True, False).missing()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert Walls("plain", 1, True, True).is_strict
    assert not Walls("plain", 7, True, False).is_strict
    assert "start processes without end" in Walls("plain", 7, True, False).missing()


def test_a_sandbox_that_does_not_work_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    job: dict[str, Any] = {"kind": "program", "code": "print(1)", "cases": [""]}
    with pytest.raises(SandboxError, match="output_bytes"):
        list(run(job, Limits(5, 1 << 30), LEVEL))
    with monkeypatch.context() as patch:  # where there is no room for its folder
        patch.setattr(tempfile, "tempdir", "/nowhere")
        with pytest.raises(SandboxError, match="No such file or directory: '/nowhere/"):
            list(run({**job, "output_bytes": 9}, Limits(5, 1 << 30), "plain"))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(SandboxError, match="ended with code 1"):
        list(run(job, Limits(5, 1 << 30), LEVEL))
