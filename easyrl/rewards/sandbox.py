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
import inspect
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Literal

from easyrl.rewards import code_runner

Kind = Literal["bwrap", "limits"]
SYSTEM_FILES = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/nix/store",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/alternatives",
)
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
TMP_BYTES = 128 << 20
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "HOME": "/tmp",
    "PYTHONHASHSEED": "0",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}
FIRST_USER, NUM_USERS = 61184, 4336
"""User numbers for programs when EasyRL runs as root: systemd's range for dynamic users."""
PROBE = {"kind": "stdin", "program": "print(1)", "tests": [""]}
PR_SET_CHILD_SUBREAPER = 36
REMEDY = (
    "install bubblewrap (apt-get install bubblewrap) and allow namespaces (docker run "
    "--security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt "
    "systempaths=unconfined), or set reward.code_sandbox=limits where the container itself is the "
    "sandbox (docs/rewards.md)"
)


class SandboxError(RuntimeError):
    """The sandbox itself does not work: nothing is known about the program."""


def run(job: dict[str, Any], kind: Kind, timeout_seconds: float) -> list[str | None]:
    """Return the output of each test up to the first that failed (None) or was not reached. `job`:
    see `code.Suite`. Raises SandboxError."""
    return _run(job, find_variant(kind), timeout_seconds)


@functools.cache
def find_variant(kind: Kind) -> str:
    """Return the first way to start programs that works here. Raises SandboxError if there is none.

    As root, bwrap is started as another user; where that user cannot read this Python environment
    (in /root), it is started as root and changes the user inside.
    """
    variants: list[str] = [kind]
    if kind == "bwrap" and os.geteuid() == 0:
        variants.append("bwrap as root")
    for variant in variants:
        try:
            if _run(PROBE, variant, 20.0) == ["1\n"]:
                return variant
            reason = "a program that prints 1 printed something else"
        except SandboxError as error:
            reason = str(error)
    raise SandboxError(f"{reason}\n{REMEDY}" if kind == "bwrap" else reason)


def _run(job: dict[str, Any], variant: str, timeout_seconds: float) -> list[str | None]:
    user = FIRST_USER + os.getpid() % NUM_USERS if os.geteuid() == 0 else None
    inner_user, outer_user = (user, None) if variant == "bwrap as root" else (None, user)
    job = job | {"cpu_seconds": math.ceil(timeout_seconds) + 1, "user": inner_user}
    command = [sys.executable, "-I", "-c", inspect.getsource(code_runner)]
    environment = ENVIRONMENT
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(tempfile.TemporaryFile())
        errors = stack.enter_context(tempfile.TemporaryFile())
        if variant == "limits":
            folder = tempfile.TemporaryDirectory(prefix="easyrl-code-", ignore_cleanup_errors=True)
            work = stack.enter_context(folder)
            if user is not None:
                os.chown(work, user, user)
            environment = ENVIRONMENT | {"HOME": work, "TMPDIR": work}
            job["landlock"] = {"read_only": _read_only_paths(), "writable": [work, *DEVICES]}
            job["num_other_processes"] = 0 if user else _count_own_threads()
            stack.enter_context(_killing_remaining())
        else:
            command = [*_bwrap_command(variant), *command]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=errors,
                env=environment,
                cwd=environment["HOME"],
                start_new_session=True,
                user=outer_user,
                group=outer_user,
                extra_groups=None if outer_user is None else [],
            )
        except OSError as error:
            raise SandboxError(f"{error} (as user {user})") from None
        timer = threading.Timer(timeout_seconds, process.kill)
        timer.start()
        try:
            process.communicate(json.dumps(job).encode())  # with a timeout it polls, 50 ms late
        finally:
            timer.cancel()
            process.kill()
            process.wait()
        if 0 < process.returncode < 128 and process.returncode != code_runner.PROGRAM_FAULT:
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
        namespaces, rights = ["all"], []
    else:  # the runner gives up these two with the user
        namespaces = ["ipc", "pid", "net", "uts", "cgroup-try"]
        rights = ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    command = ["bwrap", *(f"--unshare-{each}" for each in namespaces), "--cap-drop", "ALL", *rights]
    command += ["--die-with-parent", "--new-session"]
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


@contextlib.contextmanager
def _killing_remaining() -> Iterator[None]:
    """Kill what the program left running, at the end of the block: all processes that became
    children of this one meanwhile, since Linux hands orphans to a subreaper."""
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
    """Count the threads of this process's user, all of which count for RLIMIT_NPROC."""
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if process.stat().st_uid == os.geteuid():
                count += len(list((process / "task").iterdir()))
    return count
