"""Hostile programs fail and leave nothing behind, as root and as another user."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import psutil
import pytest
from reward_pools import needs_bwrap, problem

from easyrl.rewards import code_runner, sandbox
from easyrl.rewards.sandbox import SandboxError
from hostile_code import ATTACKS, SECRET
from own_processes import WAIT_SECONDS, popen
from runs import wait_until

pytestmark = pytest.mark.alone
TESTS = Path(__file__).parent
RUNNER = str(code_runner.__doc__).splitlines()[0]
SYSTEM_PYTHON = "/usr/bin/python3"  # any user can start it, where the tests' own is in /root
NOT_STOPPED_BY_LIMITS = {"fills /tmp"}  # several files; a folder on disk, removed at the end


class Surroundings:
    def __init__(self, folder):
        self.folder = folder
        (folder / "secret").write_text(SECRET)
        self.internet = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.internet.getsockname()[1])
        self.datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.datagrams.bind(("127.0.0.1", self.port))
        self.unix = socket.socket(socket.AF_UNIX)
        self.unix.bind(str(folder / "socket"))
        self.unix.listen()
        for path in (folder, *folder.iterdir()):
            path.chmod(0o777)
        self.before = self.state()

    def state(self):
        files = {(str(p), p.stat().st_mode, p.stat().st_size) for p in self.folder.rglob("*")}
        return files | {*Path("/dev/shm").glob("easyrl-hostile*")}

    def check(self):
        assert self.state() == self.before
        wait_until(lambda: not sandboxed_processes())
        for read in (self.internet.accept, lambda: self.datagrams.recv(1)):
            with pytest.raises(BlockingIOError):
                read()


def sandboxed_processes():
    found = []
    for process in psutil.process_iter(["cmdline", "name", "status"]):
        words = " ".join(process.info["cmdline"] or [])
        is_ours = RUNNER in words or "easyrl-hostile" in process.info["name"]
        if is_ours and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


@pytest.fixture
def surroundings(monkeypatch):
    monkeypatch.setenv("HOSTILE", SECRET)
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to other users
        there = Surroundings(Path(folder))
        for each in (there.internet, there.datagrams):
            each.setblocking(False)
        yield there
        for each in (there.internet, there.datagrams, there.unix):
            each.close()


def run_as(user, *words, **environment):
    """Run a command with little of an environment, in a folder that other users can enter."""
    as_user = {} if user is None else {"user": user, "group": user, "extra_groups": []}
    paths = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{TESTS.parent}:{TESTS}"}
    return subprocess.run(
        [str(word) for word in words],
        env={**paths, "PYTHONDONTWRITEBYTECODE": "1", **environment},
        cwd=environment.get("PWD", "/"),
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
        **as_user,
    )


def hostile(kind, surroundings, python, user):
    folder = str(surroundings.folder)
    words = TESTS / "hostile_code.py", kind, folder, surroundings.port
    done = run_as(user, python, *words, HOSTILE=SECRET, TMPDIR=folder)
    assert done.returncode == 0, done.stderr
    surroundings.check()
    return set(json.loads(done.stdout))


def can_start(python, user):
    try:
        return (
            os.geteuid() == 0 and not run_as(user, python, "-c", "import hostile_code").returncode
        )
    except OSError:
        return False


OTHER_USER = 12345
needs_users = pytest.mark.skipif(
    not can_start(SYSTEM_PYTHON, OTHER_USER),
    reason="needs root, and a Python and a checkout that other users can read",
)


@needs_bwrap
@pytest.mark.parametrize(
    ("python", "user"),
    [
        pytest.param(sys.executable, None, id="this user and Python"),
        pytest.param(SYSTEM_PYTHON, OTHER_USER, marks=[needs_users, pytest.mark.long], id="user"),
    ],
)
def test_hostile_programs_fail_in_bwrap(surroundings, python, user):
    assert len(ATTACKS) == 44
    assert hostile("bwrap", surroundings, python, user) == set()


@needs_users
@pytest.mark.parametrize(
    "user",
    [pytest.param(None, id="root"), pytest.param(OTHER_USER, marks=pytest.mark.long, id="user")],
)
def test_limits_stop_what_the_docs_say(surroundings, user):
    found = hostile("limits", surroundings, SYSTEM_PYTHON, user)
    assert found == NOT_STOPPED_BY_LIMITS


@needs_bwrap
def test_killed_reward_process_takes_the_program_with_it(surroundings):
    script = (
        "from easyrl.rewards import sandbox\n"
        "sandbox.find_variant('bwrap')\n"
        "print('started', flush=True)\n"
        "job = {'kind': 'stdin', 'program': 'import time; time.sleep(99)', 'tests': ['']}\n"
        "sandbox.run(job, 'bwrap', 99)"
    )
    command = [sys.executable, "-c", script]
    scoring = popen(command, stdout=subprocess.PIPE, cwd=TESTS.parent)
    assert scoring.stdout.readline()
    wait_until(lambda: len(sandboxed_processes()) >= 2)
    scoring.kill()
    scoring.wait()
    surroundings.check()


@needs_bwrap
def test_sandbox_that_does_not_start_is_no_verdict(monkeypatch):
    monkeypatch.setattr(sandbox.inspect, "getsource", lambda _: "raise SystemExit('broken')")
    with pytest.raises(SandboxError, match="broken"):
        sandbox.run({"kind": "stdin", "program": "print(1)", "tests": [""]}, "bwrap", 5)


@needs_bwrap
@pytest.mark.parametrize(
    "line", ["'5'", "{'output': '1'}", "'[' * 200000", "'NaN'", "'\\udcff'", "'\"1\"\\n[1]'"]
)
def test_lines_that_are_no_text_are_failed_tests(monkeypatch, line):
    sandbox.find_variant("bwrap")
    monkeypatch.setattr(sandbox.inspect, "getsource", lambda _: f"print({line})")
    found = sandbox.run({"kind": "stdin", "program": "", "tests": ["", ""]}, "bwrap", 5)
    assert [each for each in found if each is not None] in ([], ["1"]) and len(found) < 3


@needs_bwrap
def test_environment_reached_by_dots(tmp_path):
    """As `../venv/bin/python` starts it."""
    venv.create(tmp_path / "venv", symlinks=True)
    (tmp_path / "usr" / "here").mkdir(parents=True)
    done = run_probe("../../venv/bin/python", "bwrap", tmp_path / "usr" / "here")
    assert done.stdout == "['1\\n']\n", done.stderr


@needs_users
def test_limits_name_the_folder_that_other_users_cannot_enter():
    with tempfile.TemporaryDirectory() as closed:
        command = [SYSTEM_PYTHON, "-m", "venv", "--without-pip", f"{closed}/venv"]
        subprocess.run(command, check=True)
        python = f"{closed}/venv/bin/python"
        failed = run_probe(python, "limits", Path("/"))
        assert f"chmod a+x {closed}\n" in failed.stderr
        if not problem:
            assert run_probe(python, "bwrap", Path("/")).stdout == "['1\\n']\n"
        Path(closed).chmod(0o711)
        assert run_probe(python, "limits", Path("/")).stdout == "['1\\n']\n"


def run_probe(python, kind, folder):
    script = f"from easyrl.rewards import sandbox as s; print(s.run(s.PROBE, {kind!r}, 20))"
    return run_as(None, python, "-c", script, PWD=str(folder))


HOLDS_512_MIB = """
import os, signal
signal.signal(signal.SIGCHLD, lambda *_: (print("killed", flush=True), os._exit(0)))
reader, writer = os.pipe()
for _ in range(8):
    if os.fork() == 0:
        held = b"x" * (64 << 20)
        os.write(writer, b"x")
        signal.pause()
print("done" if all(os.read(reader, 1) for _ in range(8)) else "")
"""


@needs_bwrap
def test_a_memory_cgroup_bounds_all_processes_together(monkeypatch):
    with contextlib.ExitStack() as stack:
        if sandbox._make_memory_group(stack) is None:
            pytest.skip("this user cannot make a memory cgroup here")
    before = {*Path("/sys/fs/cgroup").rglob("easyrl-code-*")}
    job = {"kind": "stdin", "program": HOLDS_512_MIB, "tests": [""]}
    assert sandbox.run(job, "bwrap", 20.0) == ["done\n"]
    monkeypatch.setattr(sandbox, "TOTAL_BYTES", 256 << 20)
    assert sandbox.run(job, "bwrap", 20.0) == ["killed\n"]
    assert not {*Path("/sys/fs/cgroup").rglob("easyrl-code-*")} - before
