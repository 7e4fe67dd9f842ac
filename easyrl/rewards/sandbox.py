"""Run a program with its tests in a sandbox: bubblewrap, or resource limits alone.

    run(job) ── job ──► [bwrap ──►] python -c code_runner ── fork per test ──► the program
       ▲                                   │
       └──────────── outputs ──────────────┘

`bwrap`: namespaces of its own (files, processes, network, IPC), a read-only view of the system and
of this Python environment, /tmp in memory, an empty environment, no capabilities, resource limits.
`limits`: resource limits, an empty environment, a temporary folder and Landlock; the container
around it is the sandbox.

As root, the program runs as another user, since Linux does not apply process limits to root. Each
reward process has a user number of its own and runs one program at a time. Uses nothing but the
standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Literal

from easyrl.rewards import code_runner

Kind = Literal["bwrap", "limits"]
SYSTEM_FILES = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store"),
    *("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives"),
)
TMP_BYTES = 128 << 20
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "HOME": "/tmp",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
FIRST_USER, NUM_USERS = 61184, 4336
"""User numbers for programs when EasyRL runs as root: systemd's range for dynamic users."""
PROBE_SECONDS = 20.0
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
PR_SET_CHILD_SUBREAPER = 36
CONTAINER_FLAGS = (
    "docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
    "--security-opt systempaths=unconfined"
)


class SandboxError(RuntimeError):
    """The sandbox itself does not work: nothing is known about the program."""


def run(job: dict[str, Any], kind: Kind, timeout_seconds: float) -> list[str | None]:
    """The output of each test up to the first that failed (None) or was not reached.

    `job` has the keys kind, program, tests, function and token (see `code_runner`). Raises
    SandboxError.
    """
    return _run(job, "limits" if kind == "limits" else find_bwrap(), timeout_seconds)


def check(kind: Kind) -> None:
    """Raise SandboxError unless the sandbox works on this machine."""
    if kind == "bwrap":
        find_bwrap()
    else:
        _probe("limits")


@functools.cache
def find_bwrap() -> str:
    """The first way to start bwrap that works here. As root: change the user, then start bwrap;
    where that user cannot read this Python environment (in /root), start bwrap as root and change
    the user inside. Raises SandboxError."""
    reason = "bwrap is not installed (apt-get install bubblewrap)"
    if shutil.which("bwrap"):
        for variant in ("bwrap", "bwrap as root") if os.geteuid() == 0 else ("bwrap",):
            try:
                _probe(variant)
            except SandboxError as error:
                reason = str(error)
            else:
                return variant
    raise SandboxError(
        f"bubblewrap cannot isolate programs here: {reason}. Either allow it (in a container: "
        f"{CONTAINER_FLAGS}; elsewhere unprivileged user namespaces), or set "
        "reward.code_sandbox=limits where the container itself is the sandbox (docs/rewards.md)"
    )


def _probe(variant: str) -> None:
    job = {"kind": "stdin", "program": "print(1)", "tests": [""]}
    if _run(job, variant, PROBE_SECONDS) != ["1\n"]:
        raise SandboxError("a program that prints 1 printed something else")


def _run(job: dict[str, Any], variant: str, timeout_seconds: float) -> list[str | None]:
    user = FIRST_USER + os.getpid() % NUM_USERS if os.geteuid() == 0 else None
    command = [sys.executable, "-s", "-P", "-S", "-c", _runner_source()]
    job = {
        "function": None,
        "token": "",
        **job,
        "packages": _package_folders(),
        "cpu_seconds": math.ceil(timeout_seconds) + 1,
        "user": user if variant == "bwrap as root" else None,
        "landlock": None,
        "num_other_processes": 0,
    }
    environment = ENVIRONMENT
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(tempfile.TemporaryFile())
        errors = stack.enter_context(tempfile.TemporaryFile())
        reader, writer = os.pipe()  # says that the runner has started, before the program has
        stack.callback(os.close, reader)
        if variant == "limits":
            work = stack.enter_context(_work_folder(user))
            environment = ENVIRONMENT | {"HOME": work, "TMPDIR": work}
            job["landlock"] = {"read_only": _read_only_paths(), "writable": [work, *DEVICES]}
            job["num_other_processes"] = 0 if user else _count_own_threads()
            stack.enter_context(_killing_remaining())
        else:
            command = [*_bwrap_command(variant), *command]
        job["ready"] = writer
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=errors,
                env=environment,
                cwd=environment["HOME"],
                start_new_session=True,
                pass_fds=[writer],
                user=None if variant == "bwrap as root" else user,
                group=None if variant == "bwrap as root" else user,
                extra_groups=None if user is None or variant == "bwrap as root" else [],
            )
        except OSError as error:
            raise SandboxError(f"{error} (as user {user})" if user else str(error)) from None
        finally:
            os.close(writer)
        try:
            process.communicate(json.dumps(job).encode(), timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            process.kill()
            process.wait()
        os.set_blocking(reader, False)
        with contextlib.suppress(BlockingIOError):
            if not os.read(reader, 1) and process.returncode != -signal.SIGKILL:
                errors.seek(0)
                text = errors.read(4000).decode("utf-8", "replace").strip()
                raise SandboxError(f"exit code {process.returncode}: {text}")
        output.seek(0)
        outputs: list[str | None] = []
        with contextlib.suppress(ValueError, TypeError, KeyError):  # cut off, or not the runner's
            for line in output:
                outputs.append(json.loads(line)["output"])
        return outputs


def _bwrap_command(variant: str) -> list[str]:
    if variant == "bwrap":
        isolation = ["--unshare-all", "--cap-drop", "ALL"]
    else:  # the runner gives up these two with the user
        namespaces = ("ipc", "pid", "net", "uts", "cgroup-try")
        isolation = [f"--unshare-{each}" for each in namespaces]
        isolation += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    command = ["bwrap", *isolation, "--die-with-parent", "--new-session", "--clearenv"]
    for name, value in ENVIRONMENT.items():
        command += ["--setenv", name, value]
    size = ["--perms", "1777", "--size", str(TMP_BYTES), "--tmpfs"]
    command += ["--proc", "/proc", "--dev", "/dev", *size, "/dev/shm", *size, "/tmp"]
    for path in map(Path, _read_only_paths()):  # after /tmp, where an environment may lie
        for parent in [*reversed(path.parents)][1:]:  # else closed to others, as /root is outside
            command += ["--perms", "0755", "--dir", str(parent)]
        command += ["--ro-bind-try", str(path), str(path)]
    return [*command, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--"]


@functools.cache
def _read_only_paths() -> list[str]:
    """The system's files and this Python environment."""
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    prefixes |= {os.path.realpath(path) for path in prefixes}
    return [*SYSTEM_FILES, *sorted(path for path in prefixes if not path.startswith("/usr"))]


@functools.cache
def _package_folders() -> list[str]:
    """The folders of sys.path that belong to this Python environment."""
    prefixes = tuple(f"{path}/" for path in (*_read_only_paths(), "/usr"))
    return [path for path in sys.path if path.startswith(prefixes) and Path(path).is_dir()]


@contextlib.contextmanager
def _work_folder(user: int | None) -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="easyrl-code-")
    try:
        if user is not None:
            os.chown(folder, user, user)
        yield folder
    finally:
        for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):  # however deep it is
            subprocess.run([*command, "--", folder], check=False, stderr=subprocess.DEVNULL)


@contextlib.contextmanager
def _killing_remaining() -> Iterator[None]:
    """At the end kill what the program left running: all that became children of this process
    meanwhile, since Linux hands orphans to a subreaper."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before = _descendants(os.getpid())
    try:
        yield
    finally:
        while remaining := _descendants(os.getpid(), before):
            for signum in (signal.SIGSTOP, signal.SIGKILL):  # a stopped process cannot fork
                for pid in remaining:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signum)
            for pid in remaining:
                with contextlib.suppress(ChildProcessError):  # not ours yet: the next pass
                    os.waitpid(pid, 0)


def _descendants(pid: int, without: Collection[int] = ()) -> set[int]:
    found = set()
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in {*map(int, file.read_text().split())}.difference(without):
                found |= {child, *_descendants(child)}
    return found


def _count_own_threads() -> int:
    """RLIMIT_NPROC counts all threads of a user."""
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if process.stat().st_uid == os.geteuid():
                count += len(list((process / "task").iterdir()))
    return count


@functools.cache
def _runner_source() -> str:
    return Path(code_runner.__file__).read_text(encoding="utf-8")
