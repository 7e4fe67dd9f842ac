"""Execute a program with each of its tests, inside the sandbox (as `python -c SOURCE`).

Reads a job as JSON from stdin and writes each test's output as a line of JSON to stdout, null where
the program failed, up to the first failure. Imports nothing but the standard library, since the
sandbox has no EasyRL.

Each test runs in a child process, which has no expected outputs and cannot open or trace this
process. Asserts that compare with no literal are decided in the program's own interpreter: they end
with the job's random token, which a program that exits early does not print.

Exit codes: 0, or PROGRAM_FAULT after an error of the program; any other means that the sandbox does
not work.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import stat
import struct
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
PROGRAM_FAULT = 99

# Rights of Landlock.
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | 1 << 14 | 1 << 15  # truncate, ioctl
NUM_RIGHTS = (13, 14, 15, 15, 16)
"""Rights to files in the versions 1 to 5 of the interface."""
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38

libc = ctypes.CDLL(None, use_errno=True)
# The processor, clone; then system calls that fail: socket, setpgid, setsid (these in `limits`);
# shmget, semget, msgget, mq_open, add_key, memfd_create (memory that no limit counts or that
# outlives the program); unshare, setns; io_uring_setup; clone3 (its flags cannot be filtered).
SYSTEM_CALLS = {
    "x86_64": (0xC000003E, 56, 41, 109, 112, 29, 64, 68, 240, 248, 319, 272, 308, 425, 435),
    "aarch64": (0xC00000B7, 220, 198, 154, 157, 194, 190, 186, 180, 217, 279, 97, 268, 425, 435),
}


def main() -> None:
    job = json.load(sys.stdin)
    set_up(job)
    sys.excepthook = lambda *_: os._exit(PROGRAM_FAULT)
    for test in job["tests"]:
        with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as output:
            child = os.fork()
            if child == 0:
                run_program(job, test, stdin, output)
                return
            _, status = os.waitpid(child, 0)
            output.seek(0)
            text = output.read().decode("utf-8", "replace") if status == 0 else None
        os.write(1, json.dumps(text).encode() + b"\n")
        if text is None:
            break


def set_up(job: dict[str, Any]) -> None:
    """Give up rights and set limits."""
    if job["user"] is not None:
        os.setgroups([])
        os.setresgid(*[job["user"]] * 3)
        os.setresuid(*[job["user"]] * 3)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # the program cannot trace it or open /proc/PID/fd
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    sys.dont_write_bytecode = True
    for kind, value in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CPU, job["cpu_seconds"]),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_NOFILE, NUM_OPEN_FILES),
        (resource.RLIMIT_NPROC, NUM_PROCESSES + job.get("num_other_processes", 0)),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (value, value))
    if "landlock" in job:
        restrict_files(**job["landlock"])
    deny_system_calls(is_alone="landlock" not in job)


def run_program(job: dict[str, Any], test: Any, stdin: IO[bytes], output: IO[bytes]) -> None:
    """Write what the program prints (kind `stdin`), what it returns, as JSON (`function`), or the
    token with the values recorded by the test (`asserts`) to `output`. The process then ends as
    Python does, with its exit functions."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # too much output ends the program
    libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # else it could not open /dev/stdin
    is_script = job["kind"] == "stdin"
    result = os.dup(output.fileno())
    null = os.open(os.devnull, os.O_RDWR)
    if is_script:
        stdin.write(test.encode("utf-8", "surrogatepass"))
        stdin.seek(0)
    os.dup2(stdin.fileno(), 0)
    os.dup2(output.fileno() if is_script else null, 1)
    os.dup2(null, 2)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    name = "__main__" if is_script else "solution"  # tests can import it by this name
    sys.modules[name] = module = ModuleType(name)
    sys.argv = [f"{name}.py"]
    names = module.__dict__
    exec(compile(job["program"], f"<{name}>", "exec"), names)
    if job["kind"] == "function":
        os.write(result, call(names, job["function"], test).encode())
    elif job["kind"] == "asserts":
        values = run_asserts(test, job["function"], names)
        os.write(result, f"{job['token']!r}, [{''.join(values)}]".encode())


def call(names: dict[str, Any], name: str, arguments: list[Any]) -> str:
    """Call a function, or a method of the class Solution; return its value as JSON."""
    function = names[name] if name in names else getattr(names["Solution"](), name)
    # `tolist` is that of NumPy, `list` is for sets.
    return json.dumps(
        function(*arguments), default=lambda x: x.tolist() if hasattr(x, "tolist") else list(x)
    )


def run_asserts(source: str, entry_point: str | None, program: dict[str, Any]) -> list[str]:
    """Run the test with the program's names, and what it defines: `check`, functions test_*,
    classes of unittest. Returns what it recorded, each as "(index, literal), "."""
    values: list[str] = []
    names = {**program, "__name__": "tests"}
    names["_record"] = lambda index, value: values.append(f"({index}, {literal(value)}), ")
    exec(compile(source, "<tests>", "exec"), names)
    new = {name: value for name, value in names.items() if program.get(name) is not value}
    if "check" in new and entry_point:
        new["check"](eval(entry_point, names))
    unittest = sys.modules.get("unittest")
    for name, value in new.items():
        if isinstance(value, FunctionType) and name.startswith("test"):
            value()
        elif unittest and isinstance(value, type) and issubclass(value, unittest.TestCase):
            result = unittest.TestResult()
            unittest.defaultTestLoader.loadTestsFromTestCase(value).run(result)
            assert result.wasSuccessful()
    return values


def literal(value: Any) -> str:
    """Return the literal that equals a value. Raises TypeError where there is none."""
    if value is None:
        return "None"
    for plain in (bool, int, float, complex, str, bytes):
        if isinstance(value, plain):
            return plain.__repr__(value)  # not that of a subclass, such as an enumeration
    if isinstance(value, dict):
        return f"{{{', '.join(f'{literal(key)}: {literal(each)}' for key, each in value.items())}}}"
    if isinstance(value, (list, tuple, set, frozenset)):
        text = "".join(f"{literal(each)}, " for each in value)
        if isinstance(value, (list, tuple)):
            return f"[{text}]" if isinstance(value, list) else f"({text})"
        return f"{{{text}}}" if text else "set()"
    return literal(value.item() if hasattr(value, "item") else float(value))  # NumPy; Fraction


def restrict_files(read_only: list[str], writable: list[str]) -> None:
    """Deny all files but these, and signals to processes outside (version 6). Does nothing where
    the kernel has no Landlock.

    The system calls 444 to 446 have the same numbers on all processors (Linux 5.13; `landlock.h`).
    """

    def landlock(number: int, *arguments: Any) -> int:
        if (result := int(libc.syscall(number, *arguments))) < 0:
            raise OSError(ctypes.get_errno(), f"Landlock: system call {number}")
        return result

    version = int(libc.syscall(444, None, 0, 1))
    if version <= 0:
        return
    rights = (1 << NUM_RIGHTS[min(version, 5) - 1]) - 1
    size = 24 if version >= 6 else 8
    rules = landlock(444, struct.pack("=QQQ", rights, 0, 0b10)[:size], size, 0)
    read = EXECUTE | READ_FILE | READ_DIR
    for path in (*read_only, *writable):
        try:
            fd = os.open(path, os.O_PATH)
        except FileNotFoundError:
            continue
        allowed = rights if path in writable else rights & read
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            allowed &= FILE_RIGHTS
        landlock(445, rules, 1, struct.pack("=Qi", allowed, fd), 0)
        os.close(fd)
    landlock(446, rules, 0)
    os.close(rules)


def deny_system_calls(is_alone: bool) -> None:
    """Let SYSTEM_CALLS and clone with CLONE_NEWUSER fail with ENOSYS (`seccomp.h`). Raises KeyError
    on other processors and OSError where the kernel has no seccomp."""
    processor, clone, *calls = SYSTEM_CALLS[os.uname().machine]
    load, equal, any_bit, end = 0x20, 0x15, 0x45, 0x06
    tests = [(any_bit, 1 << 30), *((equal, call) for call in calls[3 * is_alone :])]  # ABI x32
    size = len(tests)
    code = [(load, 0, 0, 4), (equal, 0, size + 5, processor), (load, 0, 0, 0)]
    code += [(kind, size + 3 - n, 0, value) for n, (kind, value) in enumerate(tests)]  # to the end
    code += [(equal, 0, 2, clone), (load, 0, 0, 16), (any_bit, 1, 0, 1 << 28)]
    code += [(end, 0, 0, 0x7FFF0000), (end, 0, 0, 0x50000 | 38)]  # allow; ENOSYS
    memory = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in code))
    if libc.prctl(PR_SET_SECCOMP, 2, struct.pack("@HP", len(code), ctypes.addressof(memory)), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")


if __name__ == "__main__":
    main()
