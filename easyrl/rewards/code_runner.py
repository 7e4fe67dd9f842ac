"""Execute a program with each of its tests, inside the sandbox (as `python -c SOURCE`).

Reads a job and its tests as JSON from stdin, a file, and writes each test's output as a line of
JSON to stdout, null where the program failed, up to the first failure. Imports nothing but the
standard library, since the sandbox has no EasyRL.

Each test runs in a child process. With the kinds `stdin` and `function` this is the program, which
has no expected outputs. With `asserts` it is the test, for which another process runs the program:

    this process ── fork ──► test: writes "passed" ── fork ──► program
                             Peer ◄───── calls, plain data ──► Peer

The program can open or trace neither of the others, and has nothing of the test in its memory.

Exit codes: 0, or PROGRAM_FAULT after an error of the program; any other means that the sandbox does
not work.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import importlib
import json
import operator
import os
import resource
import signal
import stat
import struct
import sys
import tempfile
import threading
import time
from collections import deque
from types import FunctionType, ModuleType

TYPE_CHECKING = False  # importing `typing` takes as long as starting Python
if TYPE_CHECKING:
    from typing import IO, Any

MEMORY_BYTES = 2 << 30
FILE_BYTES = 64 << 20
NUM_OPEN_FILES = 128
NUM_PROCESSES = 64
"""Processes and threads of a program, to which other processes of the same user are added."""
PROGRAM_FAULT = 99
RECURSION_LIMIT = 50_000
"""Limit for contest problems, as in LiveCodeBench's grader. Python's own limit is 1,000."""

# Rights to files under Landlock (`landlock.h`): bits of a mask.
EXECUTE = 1 << 0
WRITE_FILE = 1 << 1
READ_FILE = 1 << 2
READ_DIR = 1 << 3
TRUNCATE = 1 << 14
IOCTL_DEV = 1 << 15
FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV  # others need a folder
NUM_RIGHTS_BY_VERSION = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # later versions have no more for files
SCOPE_SIGNAL = 1 << 1  # from version 6 on: no signals to processes outside
# Landlock's system calls have the same numbers on all processors.
LANDLOCK_CREATE_RULESET = 444
LANDLOCK_ADD_RULE = 445
LANDLOCK_RESTRICT_SELF = 446
LANDLOCK_CREATE_RULESET_VERSION = 1  # flag: return the version of the interface
LANDLOCK_RULE_PATH_BENEATH = 1

# Commands of prctl (`prctl.h`).
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38

# seccomp (`seccomp.h`, `audit.h`).
SECCOMP_MODE_FILTER = 2
SECCOMP_RET_ALLOW = 0x7FFF0000
SECCOMP_RET_ERRNO = 0x00050000  # and the error's number in the lower bits
NUMBER_OFFSET = 0  # bytes in `struct seccomp_data`, which a filter reads
PROCESSOR_OFFSET = 4
FIRST_ARGUMENT_OFFSET = 16
X32_BIT = 1 << 30  # of numbers in the ABI x32, whose system calls are others
CLONE_NEWUSER = 1 << 28

DENIED_CALLS = (
    # What these make outlives the program:
    "shmget",
    "semget",
    "msgget",
    "mq_open",
    "add_key",
    # Its memory is counted by no limit:
    "memfd_create",
    # Namespaces of its own would give the program rights:
    "unshare",
    "setns",
    # The filter does not see its operations:
    "io_uring_setup",
    # The filter cannot read its flags:
    "clone3",
)
DENIED_CALLS_WITHOUT_BWRAP = ("socket", "setpgid", "setsid")
"""In `bwrap` the program has namespaces of its own for the network and for processes."""
SYSTEM_CALLS = {
    "x86_64": {
        "processor": 0xC000003E,
        "clone": 56,
        "socket": 41,
        "setpgid": 109,
        "setsid": 112,
        "shmget": 29,
        "semget": 64,
        "msgget": 68,
        "mq_open": 240,
        "add_key": 248,
        "memfd_create": 319,
        "unshare": 272,
        "setns": 308,
        "io_uring_setup": 425,
        "clone3": 435,
    },
    "aarch64": {
        "processor": 0xC00000B7,
        "clone": 220,
        "socket": 198,
        "setpgid": 154,
        "setsid": 157,
        "shmget": 194,
        "semget": 190,
        "msgget": 186,
        "mq_open": 180,
        "add_key": 217,
        "memfd_create": 279,
        "unshare": 97,
        "setns": 268,
        "io_uring_setup": 425,
        "clone3": 435,
    },
}
"""Numbers of system calls by processor. "processor" is the processor's own number
(`AUDIT_ARCH_*`)."""

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    job = read_json()
    set_up(job)
    sys.excepthook = lambda *_: os._exit(PROGRAM_FAULT)
    for module in job["slow_imports"]:
        import_once(module)
    run = run_asserts if job["kind"] == "asserts" else run_program
    for _ in range(job["tests"]):
        text = None
        with tempfile.TemporaryFile() as output:
            child = fork()
            if child == 0:
                run(job, output)
                return
            _, status = os.waitpid(child, 0)
            if status == 0:
                output.seek(0)
                text = output.read().decode("utf-8", "replace")
        os.write(1, json.dumps(text).encode() + b"\n")
        if text is None:
            break


def read_json() -> Any:
    """Read the next part of stdin, and nothing of the parts behind it."""
    num_bytes = int.from_bytes(os.read(0, 8), "little")
    return json.loads(os.read(0, num_bytes))


def set_up(job: dict[str, Any]) -> None:
    """Give up all rights and set all limits. Child processes inherit both."""
    user = job["user"]
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # the program cannot trace it or open /proc/PID/fd
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    sys.dont_write_bytecode = True
    sys.set_int_max_str_digits(job["max_int_digits"])
    limits = {
        resource.RLIMIT_AS: MEMORY_BYTES,
        resource.RLIMIT_CPU: job["cpu_seconds"],
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_NOFILE: NUM_OPEN_FILES,
        resource.RLIMIT_NPROC: NUM_PROCESSES + job.get("num_other_processes", 0),
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in limits.items():
        resource.setrlimit(kind, (value, value))
    is_in_bwrap = "landlock" not in job
    if not is_in_bwrap:
        restrict_files(**job["landlock"])
    deny_system_calls(is_in_bwrap)


def import_once(module: str) -> None:
    """Import a library before the children that would each import it. Those see what fails."""
    try:
        importlib.import_module(module)
    except Exception:
        return


def fork() -> int:
    """Fork, once the user has room for another process: programs of others may end soon. (A time
    limit ends this one.)"""
    while True:
        try:
            return os.fork()
        except BlockingIOError:
            time.sleep(0.05)


def run_program(job: dict[str, Any], output: IO[bytes]) -> None:
    """Write what the program prints (kind `stdin`) or what it returns, as JSON (`function`), to
    `output`. The process then ends as Python does, with its exit functions."""
    test = read_json()
    sys.setrecursionlimit(RECURSION_LIMIT)
    if job["kind"] == "stdin":
        with tempfile.TemporaryFile() as stdin:
            stdin.write(test.encode("utf-8", "surrogatepass"))
            stdin.seek(0)
            redirect(stdin.fileno(), output.fileno())
        execute(job, "__main__")
    else:
        result = os.dup(output.fileno())
        redirect()
        if job["has_integer_keys"] and test and isinstance(test[0], dict):
            test[0] = with_integer_keys(test[0])
        names = execute(job, "solution").__dict__
        os.write(result, call(names, job["function"], test).encode())


def redirect(stdin: int | None = None, stdout: int | None = None) -> None:
    """Connect standard input, output and error with these files, by default with /dev/null."""
    null = os.open(os.devnull, os.O_RDWR)
    if stdin is None:
        stdin = null
    if stdout is None:
        stdout = null
    os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    os.dup2(null, 2)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115


def execute(job: dict[str, Any], name: str) -> ModuleType:
    """Run the program as a module with this name. The names that it may use without importing them
    (`job["names"]`) become built-in ones, so that the module has only the program's own names."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # too much output ends the program
    libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # else it could not open /dev/stdin
    sys.modules[name] = module = ModuleType(name)
    sys.argv = [f"{name}.py"]
    add_built_in_names(job["names"])
    # Without `dont_inherit` the program would have the future imports of this file.
    code = compile(job["program"], f"<{name}>", "exec", dont_inherit=True)
    exec(code, module.__dict__)
    return module


def add_built_in_names(names: dict[str, tuple[str, str]]) -> None:
    """Add names of libraries to the built-in ones. `names`: the module of each and its attribute,
    or "" for the module itself."""
    for name, (module_name, attribute) in names.items():
        value = importlib.import_module(module_name)
        if attribute:
            value = getattr(value, attribute)
        setattr(builtins, name, value)


def call(names: dict[str, Any], name: str, arguments: list[Any]) -> str:
    """Call a method of the class Solution, or else a function; return its value as JSON."""
    solution_class = names.get("Solution")
    if name in names and not hasattr(solution_class, name):
        function = names[name]
    else:
        solution = names["Solution"]()
        function = getattr(solution, name)
    value = function(*arguments)
    return json.dumps(value, default=as_plain)


def with_integer_keys(value: dict[str, Any]) -> dict[Any, Any]:
    """Convert the keys if all are integers."""
    try:
        return {int(key): item for key, item in value.items()}
    except ValueError:
        return value


def as_plain(value: Any) -> Any:
    """Return a value that JSON can write and that equals this one; for a set, a list."""
    if hasattr(value, "tolist"):  # NumPy's arrays and numbers
        return value.tolist()
    if hasattr(value, "as_integer_ratio"):  # decimal numbers and fractions
        return int(value) if value == int(value) else float(value)
    return list(value)


def run_asserts(job: dict[str, Any], output: IO[bytes]) -> None:
    """Run a test of Python code in this process, and the program in a new one. Write "passed" to
    `output` if the test raises nothing."""
    global peer  # noqa: PLW0603
    calls_reader, calls_writer = os.pipe()
    replies_reader, replies_writer = os.pipe()
    child = fork()  # before the test is in memory
    if child == 0:
        output.close()
        redirect()
        peer = Peer("program", calls_reader, replies_writer, PROGRAM_OPERATIONS)
        module = execute(job, "solution")
        peer.encode(module)  # its first object
        peer.wait()
    os.close(replies_writer)  # to see the program's end
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the program must raise no exception here
    source = read_json()
    redirect()
    peer = Peer("test", replies_reader, calls_writer, TEST_OPERATIONS)
    program = peer.decode(["program", 0])
    assert program  # asks for its truth, and so waits for its execution
    run_test(source, program, job["function"])
    os.write(output.fileno(), b"passed")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os._exit(0)


def run_test(source: str, program: Any, entry_point: str | None) -> None:
    """Execute the source of a test, then call what it defines: `check` with the entry point, the
    functions test_*, and the tests of classes as pytest does. Raises what these raise."""
    sys.modules["solution"] = solution = ModuleType("solution")
    solution.__getattr__ = program.__getattr__  # type: ignore[method-assign]
    code = compile(source, "<tests>", "exec", dont_inherit=True)
    reads_only_builtins = {*code.co_names} <= vars(builtins).keys()
    names = Names(program, is_shadowing=reads_only_builtins)
    exec(code, names)
    if entry_point and "check" in names:
        expression = compile(entry_point, "<entry_point>", "eval", dont_inherit=True)
        candidate = eval(expression, Names(program, is_shadowing=True))
        names["check"](candidate)
    unittest = sys.modules.get("unittest")
    for name, value in [*names.items()]:
        if isinstance(value, FunctionType) and name.startswith("test"):
            call_with_parameters(value, value)
        elif not isinstance(value, type):
            continue
        elif unittest and issubclass(value, unittest.TestCase):
            suite = unittest.defaultTestLoader.loadTestsFromTestCase(value)
            result = unittest.TestResult()
            suite.run(result)
            assert result.wasSuccessful()
        elif name.startswith("Test"):
            run_test_class(value)


def run_test_class(test_class: type) -> None:
    """Call the methods test_* of a class of pytest, each of a new instance."""
    for name in dir(test_class):
        if not name.startswith("test"):
            continue
        instance = test_class()
        for fixture in ("setup_class", "setup_method"):
            set_up_test = getattr(instance, fixture, None)
            if set_up_test is not None:
                takes_method = fixture == "setup_method" and set_up_test.__code__.co_argcount > 1
                if takes_method:
                    set_up_test(getattr(instance, name))
                else:
                    set_up_test()
        call_with_parameters(getattr(instance, name), getattr(test_class, name))


def call_with_parameters(test: Any, function: Any) -> None:
    """Call a test once, or with all combinations of the parameters that marks of pytest give its
    function (`pytest.mark.parametrize`)."""
    calls: list[dict[str, Any]] = [{}]
    for mark in getattr(function, "pytestmark", []):
        if mark.name == "parametrize":
            choices = parameters_of(*mark.args, **mark.kwargs)
            calls = [{**call, **choice} for call in calls for choice in choices]
    for arguments in calls:
        test(**arguments)


def parameters_of(argnames: Any, argvalues: Any, **_: Any) -> list[dict[str, Any]]:
    """Return the arguments of each call for a mark `parametrize`, whose parameters these are."""
    names = argnames
    is_single = False
    if isinstance(argnames, str):
        names = [name.strip() for name in argnames.split(",")]
        is_single = len(names) == 1
    choices = []
    for value in argvalues:
        values = [value] if is_single else value
        if type(value).__name__ == "ParameterSet":  # of `pytest.param`
            values = value.values
        choices.append(dict(zip(names, values, strict=True)))
    return choices


class Names(dict):  # type: ignore[type-arg]  # its values are Any
    """Global names of a test: its own, and those that the program defines.

    A name of the program replaces a built-in one only if the names are shadowing. Otherwise a
    program with an `abs` of its own could decide `abs(f(1) - 2) < 1e-6`. A test that reads no other
    names than built-in ones, such as `assert sum(2, 3) == 5`, must mean the program's.
    """

    def __init__(self, program: Any, is_shadowing: bool) -> None:
        super().__init__(__name__="tests")
        self.program = program
        self.is_shadowing = is_shadowing

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name) and not self.is_shadowing:
            raise KeyError(name)
        try:
            return getattr(self.program, name)
        except AttributeError:
            raise KeyError(name) from None


class Peer:
    """One end of the pipes between test and program: calls the other process, and serves its calls
    while it waits for an answer.

    A message is a line of JSON, `[KIND, RESULT, TARGET, ARGUMENTS, NAMED]`:

        ["call", "getitem", ["program", 3], ["list", 0], ["dict"]]     RESULT: the operation
        ["return", 7, null, null, null]           with the arguments if the call has changed them
        ["raise", ["error", ...], null, null, null]

    Values are copied; of other objects the other process gets a Proxy. A function can change the
    lists, sets and dictionaries that it gets. The end of the other process, and a line that is no
    such message, end this process: an exception could be what a test expects.
    """

    def __init__(self, side: str, reader: int, writer: int, operations: dict[str, Any]) -> None:
        self.side = side
        self.operations = operations
        self.reader = open(reader, "rb")  # noqa: SIM115
        self.writer = open(writer, "wb")  # noqa: SIM115
        self.objects: list[Any] = []
        """Own objects of which the other process has proxies."""
        self.proxies: dict[int, Any] = {}
        """Proxies of the other process's objects, by their index there."""
        self.references: dict[int, Any] = {}
        """How own objects and proxies are encoded, by their id()."""
        self.lock = threading.RLock()

    def call(self, operation: str, target: Any, *arguments: Any, **named: Any) -> Any:
        """Apply an operation of the other process to one of its objects."""
        with self.lock:
            self.send("call", operation, target, [*arguments], named)
            return self.wait(*arguments, named)

    def wait(self, *arguments: Any) -> Any:
        """Serve the other process until it answers a call; update the arguments of that."""
        while True:
            try:
                kind, *encoded = json.loads(self.reader.readline(FILE_BYTES))
                result, target, changed, named = map(self.decode, encoded)
                if kind == "call":
                    target_side = encoded[1][0]
                    assert target_side == self.side
                else:
                    assert kind == "return" or isinstance(result, Exception)
                    if changed is not None:
                        update([*arguments], [*changed, named])
            except BaseException:
                os._exit(PROGRAM_FAULT)
            if kind == "return":
                return result
            if kind != "call":
                raise result
            self.serve(result, target, changed, named, encoded[2:])

    def serve(
        self, operation: str, target: Any, arguments: Any, named: Any, encoded_before: list[Any]
    ) -> None:
        """Send the result of a call, and its arguments if they differ from what they were."""
        kind = "return"
        try:
            result = self.operations[operation](target, *arguments, **named)
        except Exception as error:
            kind = "raise"
            result = error
        encoded = [self.encode(arguments), self.encode(named)]
        if encoded == encoded_before:
            self.send(kind, result, None, None, None)
        else:
            self.send(kind, result, None, arguments, named)

    def send(self, kind: str, *values: Any) -> None:
        encoded = [self.encode(value) for value in values]
        message = json.dumps([kind, *encoded]).encode() + b"\n"
        try:
            self.writer.write(message)
            self.writer.flush()
        except OSError:
            os._exit(PROGRAM_FAULT)

    def encode(self, value: Any) -> Any:
        """Return a number, a text or [tag, ...] for JSON. The tag of an object is its side."""
        kind = type(value)
        if value is None or kind in (bool, float, str):
            return value
        if kind is int and abs(value) < 1 << 63:
            return value
        if id(value) in self.references:
            return self.references[id(value)]
        copied = take_apart(value)
        if copied is not None:
            tag, parts = copied
            return [tag, *map(self.encode, parts)]
        reference = [self.side, len(self.objects)]
        self.references[id(value)] = reference
        self.objects.append(value)
        if isinstance(value, type) and issubclass(value, BaseException):
            reference += [value.__name__, *map(self.encode, value.__bases__)]
        return reference

    def decode(self, data: Any) -> Any:
        """Return the value that the other process has encoded. May raise any exception."""
        if not isinstance(data, list):
            return data
        tag, *parts = data
        if tag == self.side:
            return self.objects[parts[0]]
        parts = [*map(self.decode, parts)]
        if tag in MAKERS:
            return MAKERS[tag](parts)
        number, *exception = parts
        if number not in self.proxies:
            value: Any = Proxy()
            if exception:
                # A local class, since `except` takes nothing else.
                name, *bases = exception
                value = type(name, tuple(bases), {})
            self.proxies[number] = value
            self.references[id(value)] = data
        return self.proxies[number]


peer: Peer
"""This process's end of the pipes."""


class Proxy:  # noqa: PLW1641 (it gets __hash__ below)
    """Stand for an object of the other process, which does all that is done to the proxy.

    Two proxies are compared in the other process. A comparison with any other value is done in this
    one, with a plain copy of the object: the value may be what a test expects, and must not get to
    the program.
    """

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        # By __array* NumPy would read memory; with __all__ `import *` would replace `abs`.
        if name.startswith(("__array", "__all__")):
            raise AttributeError(name)
        return peer.call("getattr", self, name)

    def __eq__(self, other: object) -> Any:
        if isinstance(other, Proxy):
            return peer.call("eq", self, other)
        copy = peer.call("plain_copy", self)
        return NotImplemented if copy is None else copy == other

    def __instancecheck__(self, value: object) -> Any:
        return isinstance(value, Proxy) and peer.call("isinstance", value, self)

    def __enter__(self) -> Any:
        return self.__getattr__("__enter__")()

    def __exit__(self, *error: object) -> None:  # the program cannot suppress it
        self.__getattr__("__exit__")(*error)


def forward(name: str) -> Any:
    """Return a method of Proxy that applies an operation in the other process."""

    def method(self: Proxy, *arguments: Any, **named: Any) -> Any:
        if name in COMPARISONS and not isinstance(arguments[0], Proxy):
            return NotImplemented
        return peer.call(name, self, *arguments, **named)

    return method


def take_apart(value: Any) -> tuple[str, Any] | None:
    """Return the tag and the parts of a value that is copied, None for other objects."""
    kind = type(value)
    if kind in CODECS:
        parts_of, _ = CODECS[kind]
        return kind.__name__, parts_of(value)
    if isinstance(value, BaseException):
        return "error", (kind, value.args, vars(value))
    if isinstance(value, (type, ModuleType)):
        return take_library_apart(value)
    is_of_library = kind.__module__ in COPIED
    if is_of_library and from_library(kind.__module__, kind.__name__) is kind:
        return take_instance_apart(value)
    numpy = sys.modules.get("numpy")
    if numpy and isinstance(value, (numpy.ndarray, numpy.generic)):
        return "array", (value.tolist(), str(value.dtype))
    return None


def take_library_apart(value: type | ModuleType) -> tuple[str, Any] | None:
    """Return the tag and the path of a module or a class that both processes import."""
    path = [value.__name__]
    if type(value) is not ModuleType:
        path = [value.__module__, value.__name__]
    return ("library", path) if from_library(*path) is value else None


def take_instance_apart(value: Any) -> tuple[str, Any] | None:
    """Return the tag, the class, its arguments, and the content of a `deque` or a dictionary, for
    an instance that these alone make."""
    kind = type(value)
    make, arguments, *further = value.__reduce_ex__(2)
    state, items, pairs = None, None, None
    if further:
        state, items, pairs = (*further, None, None)[:3]
    if make is not kind or state:
        return None
    return "copy", (kind, arguments, list(items or ()), list(pairs or ()))


def from_library(module: str, name: str = "") -> Any:
    """Import a standard module or a public class of LIBRARIES; return None for all else."""
    allowed = LIBRARIES if name else sys.stdlib_module_names
    if module not in allowed or name.startswith("_"):
        return None
    __import__(module)
    value: Any = sys.modules[module]
    if name:
        value = getattr(value, name, None)
    return value if isinstance(value, (type, ModuleType)) else None


def make_copy(parts: list[Any]) -> Any:
    kind, arguments, items, pairs = parts
    assert isinstance(kind, type) and kind.__module__ in COPIED
    value = kind(*arguments)
    if items:
        value.extend(items)
    for key, item in pairs:
        value[key] = item
    return value


def make_error(parts: list[Any]) -> Any:
    kind, arguments, names = parts
    assert issubclass(kind, BaseException)
    error = kind.__new__(kind, *arguments)
    error.__dict__.update(names)
    return error


def update(old: Any, new: Any) -> Any:
    """Change a list, deque, set, dictionary or bytearray, and those that it contains, to the
    content of another one. Return `old`, or `new` where `old` cannot be changed to it."""
    if type(old) is not type(new):
        return new
    if isinstance(old, (list, deque)):
        num_common = min(len(old), len(new))
        items = [update(old[index], new[index]) for index in range(num_common)]
        items += [*new][num_common:]
        old.clear()
        old.extend(items)
    elif isinstance(old, bytearray):
        old[:] = new
    elif isinstance(old, set):
        old.clear()
        old.update(new)
    elif isinstance(old, dict):
        items_by_key = {key: update(old.get(key), value) for key, value in new.items()}
        old.clear()
        old.update(items_by_key)
    else:
        return new
    return old


def plain_copy(value: Any) -> Any:
    """Return a copy whose class is a plain one (`list` for a class derived from `list`); None where
    the value's class is derived from no plain one."""
    for kind, (parts_of, make) in CODECS.items():
        if isinstance(value, kind):
            parts = [*parts_of(value)]
            return make(parts)
    if isinstance(value, (float, str)):
        return json.loads(json.dumps(value))
    return None


def access_test(value: Any, name: str, *new: Any) -> Any:
    """Read or set an attribute of an instance of a class that the test defines. Attributes of other
    objects are denied: by them a program could reach all names of the test."""
    if name != "__name__" and (type(value).__module__ != "tests" or name.startswith("_")):
        raise AttributeError(name)
    return setattr(value, name, *new) if new else getattr(value, name)


COPIED = ("collections", "datetime", "decimal", "fractions")
LIBRARIES = (*COPIED, "builtins", "json.decoder")
"""Modules whose classes both processes import. Instances of the classes of COPIED are copied."""
CODECS: dict[type, tuple[Any, Any]] = {  # by class: take a value apart, make it of its parts
    int: (lambda value: [hex(value)], lambda parts: int(parts[0], 16)),
    bytes: (lambda value: [value.decode("latin-1")], lambda parts: parts[0].encode("latin-1")),
    bytearray: (
        lambda value: [value.decode("latin-1")],
        lambda parts: bytearray(parts[0], "latin-1"),
    ),
    complex: (lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    range: (lambda value: value.__reduce__()[1], lambda parts: range(*parts)),
    slice: (lambda value: value.__reduce__()[1], lambda parts: slice(*parts)),
    dict: (dict.items, dict),
    **{kind: (list, kind) for kind in (list, tuple, set, frozenset)},
}
MAKERS = {
    **{kind.__name__: make for kind, (_, make) in CODECS.items()},
    "library": lambda parts: from_library(*parts),
    "copy": make_copy,
    "error": make_error,
    "array": lambda parts: __import__("numpy").array(*parts)[()],
}
OPERATIONS = (
    "call len iter next bool str repr hash abs neg getitem setitem delitem setattr "
    "add mul truediv floordiv mod pow matmul"
)
COMPARISONS = ("lt", "le", "gt", "ge", "sub")
"""Operations that tell how close a result is to the expected one."""
for each in (*OPERATIONS.split(), *COMPARISONS):
    setattr(Proxy, f"__{each}__", forward(each))
PROGRAM_OPERATIONS = {**vars(builtins), **vars(operator), "plain_copy": plain_copy}
TEST_OPERATIONS = {"getattr": access_test, "setattr": access_test, "plain_copy": lambda value: None}
for each in ("call", "iter", "next", "len", "bool", "hash", "eq", "isinstance"):
    TEST_OPERATIONS[each] = PROGRAM_OPERATIONS[each]


def restrict_files(read_only: list[str], writable: list[str]) -> None:
    """Deny all files but these, and signals to processes outside (version 6). Does nothing where
    the kernel has no Landlock (Linux 5.13)."""
    flag = LANDLOCK_CREATE_RULESET_VERSION
    version = int(libc.syscall(LANDLOCK_CREATE_RULESET, None, 0, flag))
    if version <= 0:
        return
    newest_known = max(NUM_RIGHTS_BY_VERSION)
    num_rights = NUM_RIGHTS_BY_VERSION[min(version, newest_known)]
    all_rights = (1 << num_rights) - 1
    denied_network_rights = 0
    ruleset = struct.pack("=QQQ", all_rights, denied_network_rights, SCOPE_SIGNAL)
    if version < 6:
        ruleset = struct.pack("=Q", all_rights)
    rules = landlock(LANDLOCK_CREATE_RULESET, ruleset, len(ruleset), 0)
    for path in (*read_only, *writable):
        rights = all_rights
        if path not in writable:
            rights &= EXECUTE | READ_FILE | READ_DIR
        allow_path(rules, path, rights)
    landlock(LANDLOCK_RESTRICT_SELF, rules, 0)
    os.close(rules)


def allow_path(rules: int, path: str, rights: int) -> None:
    """Allow what the rights say with a file or folder, and all in it, if it exists."""
    try:
        fd = os.open(path, os.O_PATH)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(os.fstat(fd).st_mode):
        rights &= FILE_RIGHTS
    rule = struct.pack("=Qi", rights, fd)
    landlock(LANDLOCK_ADD_RULE, rules, LANDLOCK_RULE_PATH_BENEATH, rule, 0)
    os.close(fd)


def landlock(number: int, *arguments: Any) -> int:
    """Make a system call. Raises OSError where it fails."""
    result = int(libc.syscall(number, *arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), f"Landlock: system call {number}")
    return result


class Filter:
    """A filter of system calls: a program in the machine language BPF, with labels for its jumps.

    It reads 32-bit words of a call's `struct seccomp_data` (`bpf_common.h`, `seccomp.h`).
    """

    LOAD = 0x20
    JUMP_IF_EQUAL = 0x15
    JUMP_IF_ANY_BIT = 0x45
    RETURN = 0x06

    def __init__(self) -> None:
        # Operation, operand, and the labels to jump to if a test is true and if it is false.
        self.instructions: list[tuple[int, int, str, str]] = []
        self.labels: dict[str, int] = {}  # index of the instruction behind each

    def load(self, offset: int) -> None:
        """Load the word at this offset, which the next tests look at."""
        self.add(self.LOAD, offset)

    def jump_if_equal(self, value: int, label: str) -> None:
        self.add(self.JUMP_IF_EQUAL, value, if_true=label)

    def jump_if_other(self, value: int, label: str) -> None:
        self.add(self.JUMP_IF_EQUAL, value, if_false=label)

    def jump_if_any_bit(self, bits: int, label: str) -> None:
        self.add(self.JUMP_IF_ANY_BIT, bits, if_true=label)

    def label(self, name: str) -> None:
        self.labels[name] = len(self.instructions)

    def end_with(self, verdict: int) -> None:
        self.add(self.RETURN, verdict)

    def add(self, operation: int, operand: int, if_true: str = "", if_false: str = "") -> None:
        self.instructions.append((operation, operand, if_true, if_false))

    def assemble(self) -> bytes:
        """Return the program as an array of `struct sock_filter`. All jumps go forward."""
        program = b""
        for index, (operation, operand, if_true, if_false) in enumerate(self.instructions):
            num_skipped_if_true = self.labels[if_true] - index - 1 if if_true else 0
            num_skipped_if_false = self.labels[if_false] - index - 1 if if_false else 0
            program += struct.pack(
                "=HBBI", operation, num_skipped_if_true, num_skipped_if_false, operand
            )
        return program


def make_filter(numbers: dict[str, int], is_in_bwrap: bool) -> Filter:
    """Make the filter of DENIED_CALLS, of clone with a user namespace, and of calls by the numbers
    of another processor or ABI. `numbers`: an entry of SYSTEM_CALLS."""
    denied = DENIED_CALLS if is_in_bwrap else DENIED_CALLS_WITHOUT_BWRAP + DENIED_CALLS
    program = Filter()
    program.load(PROCESSOR_OFFSET)
    program.jump_if_other(numbers["processor"], "deny")
    program.load(NUMBER_OFFSET)
    program.jump_if_any_bit(X32_BIT, "deny")
    for name in denied:
        program.jump_if_equal(numbers[name], "deny")
    program.jump_if_other(numbers["clone"], "allow")
    program.load(FIRST_ARGUMENT_OFFSET)  # its flags
    program.jump_if_any_bit(CLONE_NEWUSER, "deny")
    program.label("allow")
    program.end_with(SECCOMP_RET_ALLOW)
    program.label("deny")
    program.end_with(SECCOMP_RET_ERRNO | errno.ENOSYS)
    return program


def deny_system_calls(is_in_bwrap: bool) -> None:
    """Let the calls of `make_filter` fail with ENOSYS. Raises KeyError on other processors than
    those of SYSTEM_CALLS, and OSError where the kernel has no seccomp."""
    numbers = SYSTEM_CALLS[os.uname().machine]
    program = make_filter(numbers, is_in_bwrap)
    memory = ctypes.create_string_buffer(program.assemble())
    address = ctypes.addressof(memory)
    sock_fprog = struct.pack("@HP", len(program.instructions), address)
    error = libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, sock_fprog, 0, 0)
    if error:
        raise OSError(ctypes.get_errno(), "seccomp")


if __name__ == "__main__":
    main()
