"""Run a program with its tests in a sandbox (docs/rewards.md, "The sandbox").

    run(job) ── job ──► [bwrap ──►] python -c code_runner ── fork per test ──► the program
       ▲                                   │
       └──────────── outputs ──────────────┘

As root, the program runs as another user, since Linux does not apply process limits to root. Each
reward process has a user number of its own and runs one program at a time.
"""

import contextlib
import functools
import inspect
import io
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Literal

from easyrl.processes import MAX_INT_DIGITS, REWARD_PROCESS, name_of
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
TOTAL_BYTES = 4 << 30
"""Memory of a program's processes and of its files in memory, where a cgroup can bound it."""
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "HOME": "/tmp",
    "PYTHONHASHSEED": "0",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}
FIRST_USER = 61184
NUM_USERS = 4336
"""User numbers for programs when EasyRL runs as root: systemd's range for dynamic users."""
PROCESSES_OF_PROGRAM = 8
"""Processes of a usual program: the runner, a test, the program, and a few that it starts."""
PROBE = {"kind": "stdin", "program": "print(1)", "tests": [""]}
"""A job (see `code.Suite`); `names`, `slow_imports` and `has_integer_keys` can be left out."""
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
    """Return the first way to start programs that works here. As root, bwrap is started as another
    user, or, where that cannot read this Python environment (in /root), changes the user inside.
    Raises SandboxError if there is none."""
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
    folders = {*Path(sys.prefix).resolve().parents, *Path(sys.base_prefix).resolve().parents}
    closed = " ".join(str(path) for path in sorted(folders) if not path.stat().st_mode & 0o001)
    if os.geteuid() == 0 and closed:
        reason += f"\nprograms run as another user, who needs this Python: chmod a+x {closed}"
    raise SandboxError(f"{reason}\n{REMEDY}" if kind == "bwrap" else reason)


def _run(job: dict[str, Any], variant: str, timeout_seconds: float) -> list[str | None]:
    user = FIRST_USER + os.getpid() % NUM_USERS if os.geteuid() == 0 else None
    changes_user_inside = variant == "bwrap as root"
    outer_user = None if changes_user_inside else user
    job = {
        "names": {},
        "slow_imports": [],
        "has_integer_keys": False,
        **job,
        "user": user if changes_user_inside else None,
        "max_int_digits": MAX_INT_DIGITS,
        "cpu_seconds": math.ceil(timeout_seconds) + 1,
    }
    # Without `..`, but with links to the executable, by which Python finds its environment.
    python = Path(sys.executable).parent.resolve() / Path(sys.executable).name
    command = [str(python), "-I", "-c", inspect.getsource(code_runner)]
    environment = ENVIRONMENT
    with contextlib.ExitStack() as stack:
        join_group = _make_memory_group(stack)
        stdin = stack.enter_context(tempfile.TemporaryFile())
        output = stack.enter_context(tempfile.TemporaryFile())
        errors = stack.enter_context(tempfile.TemporaryFile())
        if variant == "limits":
            work = tempfile.mkdtemp(prefix="easyrl-code-")
            remove = ["sh", "-c", 'chmod -R u+rwX "$0"; rm -rf "$0"', work]  # any depth of folders
            stack.callback(subprocess.run, remove, stderr=subprocess.DEVNULL, check=False)
            if user is not None:
                os.chown(work, user, user)
            environment = ENVIRONMENT | {"HOME": work, "TMPDIR": work}
            job["landlock"] = {"read_only": _read_only_paths(), "writable": [work, *DEVICES]}
            job["num_other_processes"] = 0 if user else _count_other_processes()
            code_runner.libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        else:
            command = [*_bwrap_command(variant), *command]
        _write_job(job, stdin)
        try:
            process = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=output,
                stderr=errors,
                env=environment,
                cwd=environment["HOME"],
                preexec_fn=join_group,  # noqa: PLW1509 (one write, which takes no lock)
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
            process.wait()  # with a timeout it polls, 50 ms late
        finally:
            timer.cancel()
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.killpg(process.pid, signal.SIGKILL)  # in `limits` no process can leave the group
                while os.waitpid(-process.pid, 0):  # orphans, too: this process is their subreaper
                    pass
        if 0 < process.returncode < 128 and process.returncode != code_runner.PROGRAM_FAULT:
            errors.seek(0)
            text = errors.read(4000).decode("utf-8", "replace").strip()
            raise SandboxError(f"exit code {process.returncode}: {text}")
        output.seek(0)
        outputs: list[str | None] = []
        with contextlib.suppress(ValueError, RecursionError):  # cut off, or not the runner's
            for line in output:
                text = json.loads(line)
                outputs.append(text if isinstance(text, str) else None)
        return outputs


def _write_job(job: dict[str, Any], stdin: IO[bytes]) -> None:
    """Write the job with the number of its tests, then each test, as JSON behind its length. So the
    runner can read each test after the program of the one before has ended."""
    tests = job["tests"]
    without_tests = {**job, "tests": len(tests)}
    for part in (without_tests, *tests):
        data = json.dumps(part).encode()
        length = len(data).to_bytes(8, "little")
        stdin.write(length + data)
    stdin.seek(0)


def _make_memory_group(stack: contextlib.ExitStack) -> Callable[[], object] | None:
    """Make a memory cgroup for one program, where this process may: as root outside of containers.
    Return a function by which a new process joins it, else None. `stack` removes the cgroup."""
    own = Path("/proc/self/cgroup")
    lines = own.read_text().splitlines() if own.exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        # In version 1 the new group is made below that of this process; in version 2, where a group
        # with processes can have none below it, beside it.
        if controllers == "memory":  # version 1
            parent = Path("/sys/fs/cgroup/memory" + path)
            limit = "memory.limit_in_bytes"
        elif not controllers:  # version 2
            parent = Path("/sys/fs/cgroup" + path).parent
            limit = "memory.max"
        else:
            continue
        with contextlib.suppress(OSError):
            group = Path(tempfile.mkdtemp(prefix="easyrl-code-", dir=parent))
            stack.callback(_remove_group, group)
            with (group / limit).open("r+") as file:
                file.write(str(TOTAL_BYTES))
            processes = stack.enter_context((group / "cgroup.procs").open("wb", buffering=0))
            return functools.partial(_join, processes)
    return None


def _join(processes: io.FileIO) -> None:
    with contextlib.suppress(OSError):  # older kernels check the program's user
        processes.write(b"0")


def _remove_group(group: Path) -> None:
    for _ in range(1000):  # until the kernel has ended the last of its processes
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.01)


def _bwrap_command(variant: str) -> list[str]:
    namespaces = ["all"]
    rights = ["--as-pid-1"]  # else /proc/1/fd is open to the program
    if variant == "bwrap as root":
        namespaces = ["ipc", "pid", "net", "uts", "cgroup-try"]
        # The runner gives up these two with the user.
        rights = ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    command = ["bwrap"]
    command += [f"--unshare-{each}" for each in namespaces]
    command += ["--cap-drop", "ALL", *rights]
    command += ["--die-with-parent", "--new-session"]
    size = ["--perms", "1777", "--size", str(TMP_BYTES), "--tmpfs"]
    command += ["--proc", "/proc", "--dev", "/dev", *size, "/dev/shm", *size, "/tmp"]
    for path in map(Path, _read_only_paths()):  # after /tmp, where an environment may lie
        parents_below_root = [*reversed(path.parents)][1:]
        for parent in parents_below_root:  # else closed to others, as /root is outside
            command += ["--perms", "0755", "--dir", str(parent)]
        command += ["--ro-bind-try", str(path), str(path)]
    return [*command, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--"]


@functools.cache
def _read_only_paths() -> list[str]:
    """Return the paths of the system's files and of this Python environment, the latter with and
    without links."""
    paths = set()
    for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix):
        with_links = os.path.abspath(prefix)  # noqa: PTH100 (`resolve` would follow the links)
        without_links = os.path.realpath(prefix)
        paths |= {with_links, without_links}
    outside_of_usr = [path for path in paths if not f"{path}/".startswith("/usr/")]
    return [*SYSTEM_FILES, *sorted(outside_of_usr)]


def _count_other_processes() -> int:
    """Count the threads of this process's user, all of which RLIMIT_NPROC counts, with those that
    the programs of other reward processes may start meanwhile."""
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if process.stat().st_uid != os.geteuid():
                continue
            count += len([*(process / "task").iterdir()])
            if name_of(int(process.name)) == REWARD_PROCESS:
                count += PROCESSES_OF_PROGRAM
    return count
