"""Runs inside the sandbox, as `python -c SOURCE`: execute a program with each of its tests.

Reads a job as JSON from stdin and writes a line `{"output": ...}` per test to stdout, null where
the program failed, up to the first failure. Imports nothing but the standard library, since the
sandbox has no EasyRL.

Each test runs in a child process. The job has inputs but no expected outputs, so nothing here needs
protection from the program. Only tests made of asserts run in the program's own interpreter: they
end with the job's random token, which a program that exits early does not print.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import stat
import sys
import tempfile
from types import FunctionType, ModuleType

TYPE_CHECKING = False  # importing `typing` takes as long as starting Python
if TYPE_CHECKING:
    from typing import IO, Any

MEMORY_BYTES = 2 << 30
FILE_BYTES = 64 << 20
NUM_OPEN_FILES = 128
NUM_PROCESSES = 64
"""Threads included, and those of other processes of the same user where it has any."""
MODULE = "solution"
"""The name under which tests can import the program."""

# Rights of Landlock.
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | 1 << 14 | 1 << 15  # truncate, ioctl
ALL_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""All rights to files, by the first version of the interface that knows them."""
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38


def main() -> None:
    job = json.load(sys.stdin)
    if job["user"] is not None:
        os.setgroups([])
        os.setresgid(*[job["user"]] * 3)
        os.setresuid(*[job["user"]] * 3)
    sys.path[:] += job["packages"]
    sys.dont_write_bytecode = True
    for kind, value in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CPU, job["cpu_seconds"]),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_NOFILE, NUM_OPEN_FILES),
        (resource.RLIMIT_NPROC, NUM_PROCESSES + job["num_other_processes"]),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (value, value))
    if job["landlock"] is not None:
        restrict_files(**job["landlock"])
    os.write(job["ready"], b"1")
    os.close(job["ready"])
    for test in job["tests"]:
        output = run_test(job, test)
        os.write(1, json.dumps({"output": output}).encode() + b"\n")
        if output is None:
            break


def run_test(job: dict[str, Any], test: Any) -> str | None:
    """What the program printed (kind `stdin`), returned as JSON (`function`), or the token
    (`asserts`); None where it failed."""
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as output:
        if job["kind"] == "stdin":
            stdin.write(test.encode("utf-8", "surrogatepass"))
            stdin.seek(0)
        child = os.fork()
        if child == 0:
            run_child(job, test, stdin, output)
        _, status = os.waitpid(child, 0)
        if status != 0:
            return None
        output.seek(0)
        return output.read().decode("utf-8", "replace")


def run_child(job: dict[str, Any], test: Any, stdin: IO[bytes], output: IO[bytes]) -> None:
    code = 1
    try:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # too much output ends the program
        result = os.dup(output.fileno())
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(stdin.fileno(), 0)
        os.dup2(output.fileno() if job["kind"] == "stdin" else null, 1)
        os.dup2(null, 2)
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        names = execute(job["program"], "__main__" if job["kind"] == "stdin" else MODULE)
        if job["kind"] == "function":
            os.write(result, call(names, job["function"], test).encode())
        elif job["kind"] == "asserts":
            run_asserts(test, job["function"], names)
            os.write(result, job["token"].encode())
        code = 0
    except SystemExit as error:
        code = int(job["kind"] != "stdin" or error.code not in (None, 0))
    except BaseException:
        code = 1
    try:
        finish_threads()
        sys.stdout.flush()
    except BaseException:
        code = 1
    os._exit(code)


def finish_threads() -> None:
    """What the interpreter does at its end: wait for threads, call exit functions."""
    import atexit
    import threading

    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def execute(program: str, name: str) -> dict[str, Any]:
    module = ModuleType(name)
    sys.modules[name] = module
    sys.argv = [f"{name}.py"]
    exec(compile(program, f"<{name}>", "exec"), module.__dict__)
    return module.__dict__


def call(names: dict[str, Any], name: str, arguments: list[Any]) -> str:
    """The value of a function, or of a method of the class Solution, as JSON."""
    if name not in names and "Solution" in names:
        function = getattr(names["Solution"](), name)
    else:
        function = names[name]

    def plain(value: Any) -> Any:
        return value.tolist() if hasattr(value, "tolist") else list(value)  # NumPy, tuples, sets

    return json.dumps(function(*arguments), default=plain)


def run_asserts(source: str, entry_point: str | None, program: dict[str, Any]) -> None:
    """Run the test with the program's names, and what it defines: `check`, functions test_*,
    classes of unittest."""
    names = {**program, "__name__": "tests"}
    before = dict(names)
    exec(compile(source, "<tests>", "exec"), names)
    new = {name: value for name, value in names.items() if before.get(name) is not value}
    if "check" in new and entry_point:
        new["check"](eval(entry_point, names))
    unittest = sys.modules.get("unittest")
    for name, value in new.items():
        if isinstance(value, FunctionType) and name.startswith("test"):
            if value.__code__.co_argcount == len(value.__defaults__ or ()):
                value()
        elif unittest and isinstance(value, type) and issubclass(value, unittest.TestCase):
            result = unittest.TestResult()
            unittest.defaultTestLoader.loadTestsFromTestCase(value).run(result)
            if not result.wasSuccessful():
                raise AssertionError("a test of unittest failed")


def restrict_files(read_only: list[str], writable: list[str]) -> int:
    """Deny all files but these, TCP (version 4), and signals and abstract sockets to processes
    outside (version 6). Returns the version of the interface; 0: the kernel has no Landlock.

    The system calls 444 to 446 have the same numbers on all processors (Linux 5.13; `landlock.h`).
    """
    import ctypes
    import struct

    libc = ctypes.CDLL(None, use_errno=True)
    version = int(libc.syscall(444, None, 0, 1))
    if version <= 0:
        return 0
    rights = max(mask for first, mask in ALL_RIGHTS.items() if first <= version)
    tcp = 0b11 if version >= 4 else 0
    scopes = 0b11 if version >= 6 else 0
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    attributes = struct.pack("=QQQ", rights, tcp, scopes)[:size]
    rules = libc.syscall(444, attributes, size, 0)
    if rules < 0:
        raise OSError(ctypes.get_errno(), "landlock_create_ruleset")
    read = EXECUTE | READ_FILE | READ_DIR
    paths = [(path, read) for path in read_only] + [(path, rights) for path in writable]
    for path, wanted in paths:
        try:
            fd = os.open(path, os.O_PATH)
        except OSError:
            continue  # it does not exist here
        is_folder = stat.S_ISDIR(os.fstat(fd).st_mode)
        rule = struct.pack("=Qi", wanted & rights & (rights if is_folder else FILE_RIGHTS), fd)
        if libc.syscall(445, rules, 1, rule, 0) < 0:
            raise OSError(ctypes.get_errno(), f"landlock_add_rule {path}")
        os.close(fd)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.syscall(446, rules, 0) < 0:
        raise OSError(ctypes.get_errno(), "landlock_restrict_self")
    os.close(rules)
    return version


if __name__ == "__main__":
    main()
