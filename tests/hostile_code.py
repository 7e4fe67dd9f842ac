"""Hostile programs: what each tries, and whether it succeeded.

An attack that comes to its end got what it wanted, except those of MAY_END. `{outside}` is a folder
outside the sandbox, `{secret}` is in the environment and in a file there, `{parent}` is the process
that scores, `{port}` a port of TCP and UDP that something listens on.

As a script (it needs no packages): `hostile_code.py KIND FOLDER PORT`, prints what succeeded.
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from easyrl.rewards import sandbox

NEW_USER_NAMESPACE = 0x10000011  # and SIGCHLD
PRELUDE = """
import ctypes, json, os, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None)
"""
NUMBERS = {  # of system calls that the C library has no function for, or another one
    "x86_64": {"clone": 56, "io_uring": 425, "clone3": 435, "unshare": 272, "add_key": 248},
    "aarch64": {"clone": 220, "io_uring": 425, "clone3": 435, "unshare": 97, "add_key": 217},
}[os.uname().machine]
SECRET = "hostile-secret-4f1c"
ATTACKS = {
    # Resources.
    "endless loop": "while True: pass",
    "ignores every signal": """
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: pass""",
    "fork bomb": """
while True:
    try: os.fork()
    except OSError: pass""",
    "500 processes": """
for _ in range(500):
    if os.fork() == 0: time.sleep(1e6)""",
    "500 threads": """
for _ in range(500): threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()""",
    "4 GiB of memory": "bytearray(4 << 30)",
    "large file": """
with open("large", "wb") as file:
    for _ in range(200): file.write(bytes(1 << 20))""",
    "fills /tmp": """
for number in range(8):
    with open(str(number), "wb") as file: file.write(bytes(60 << 20))""",
    "fills /dev/shm": """
for number in range(8):
    with open(f"/dev/shm/easyrl-hostile-{number}", "wb") as file: file.write(bytes(60 << 20))""",
    "memory of files without names": """
fds = [libc.memfd_create(b"x", 0) for _ in range(8)]
for fd in fds: os.write(fd, bytes(60 << 20))""",
    "unattached shared memory": "for _ in range(4): assert libc.shmget(0, 1 << 30, 0o600) >= 0",
    "3,000 nested folders": """
for _ in range(3000):
    os.mkdir("d")
    os.chdir("d")
os.chmod("..", 0)""",
    "closed folders": """
os.makedirs("a/b/c")
open("a/b/c/file", "w").close()
for name in ("a/b/c", "a/b", "a", "."): os.chmod(name, 0)""",
    "endless output": "while True: print('x' * 100000)",
    "deep recursion": """
sys.setrecursionlimit(10**9)
def attack(): return attack()
attack()""",
    # Files, processes and network outside.
    "writes outside": "with open('{outside}/new', 'w') as file: file.write('x')",
    "reads outside": "open('{outside}/secret').read()",
    "symbolic link to outside": """
os.symlink("{outside}/through", "link")
with open("link", "w") as file: file.write("x")""",
    "writes to Python's library": "open(json.__file__, 'a').close()",
    "reads its environment": "assert '{secret}' in str(os.environ)",
    "reads other processes' environments": """
found = []
for name in [*os.listdir("/proc"), "{parent}", str(os.getppid())]:
    try: found.append("{secret}" in open(f"/proc/{name}/environ").read())
    except OSError: pass
assert any(found)""",
    "kills the process that scores": "os.kill({parent}, 0)",
    "TCP connection": """
socket.create_connection(("127.0.0.1", {port}), timeout=1).sendall(b"x")""",
    "Unix socket outside": "socket.socket(socket.AF_UNIX).connect('{outside}/socket')",
    "shared memory that outlives it": """
memory = libc.shmget(0x4f1c, 0, 0)
if memory < 0: libc.shmget(0x4f1c, 1 << 20, 0o1666)
assert memory >= 0 and libc.shmctl(memory, 0, None) == 0""",
    "UDP": """
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sender.sendto(b"x", ("127.0.0.1", {port}))""",
    "sockets by io_uring": f"""
assert libc.syscall({NUMBERS["io_uring"]}, 1, ctypes.create_string_buffer(120)) >= 0""",
    "message queue that outlives it": """
found = libc.msgget(0x4f1c, 0)
libc.msgget(0x4f1c, 0o1666)
assert found >= 0""",
    "semaphores that outlive it": """
found = libc.semget(0x4f1c, 0, 0)
libc.semget(0x4f1c, 1, 0o1666)
assert found >= 0""",
    "POSIX message queue that outlives it": """
assert libc.mq_open(b"/easyrl-hostile", os.O_RDWR | os.O_CREAT, 0o666, None) >= 0""",
    "key that outlives it": f"""
assert libc.syscall({NUMBERS["add_key"]}, b"user", b"hostile", b"x", 1, -4) >= 0""",
    "user namespace": "assert libc.unshare(0x10000000) == 0",
    "user namespace by clone": f"""
child = libc.syscall({NUMBERS["clone"]}, {NEW_USER_NAMESPACE}, 0, 0, 0, 0)
if child == 0: os._exit(0)
assert child > 0""",
    "user namespace by clone3": f"""
arguments = struct.pack("8Q", 0x10000000, 0, 0, 0, 17, 0, 0, 0)
child = libc.syscall({NUMBERS["clone3"]}, arguments, len(arguments))
if child == 0: os._exit(0)
assert child > 0""",
    "user namespace by the ABI x32": f"""
assert libc.syscall({NUMBERS["unshare"]} | 1 << 30, 0x10000000) == 0""",
    "becomes root": """
os.setuid(0)
assert open("/proc/self/status").read().split("CapEff:")[1].split()[0].strip("0")""",
    # Outliving; forging.
    "daemon": """
def leave():
    for function in (os.setsid, lambda: os.setpgid(0, 0)):
        try: function()
        except OSError: pass
if os.fork() == 0:
    leave()
    if os.fork() == 0:
        leave()
        libc.prctl(15, b"easyrl-hostile-daemon", 0, 0, 0)
        time.sleep(1e6)
    os._exit(0)""",
    "opens the runner's files": """
opened = []
for name in os.listdir("/proc"):
    if name.isdigit() and int(name) != os.getpid():
        folder = f"/proc/{name}/fd/"
        try: opened += [open(folder + fd, "ab") for fd in os.listdir(folder)]
        except OSError: pass
assert opened""",
    "reads the runner's memory": "open(f'/proc/{os.getppid()}/mem', 'rb')",
    "traces the runner": """
libc.ptrace.argtypes = [ctypes.c_long] * 4
assert libc.ptrace(16, os.getppid(), 0, 0) == 0""",
    "stops the runner": "os.kill(os.getppid(), signal.SIGSTOP)",
    "kills all others": """
os.kill(-1, signal.SIGTERM)
os.kill(-1, signal.SIGKILL)""",
    "ends early": "print('done')\nos._exit(0)",
    "writes forged results": """
for name in os.listdir("/proc"):
    for fd in range(16):
        try:
            with open(f"/proc/{name}/fd/{fd}", "w") as file:
                file.write('"passed"\\n' * 9)
        except OSError: pass
for fd in range(64):
    try: os.write(fd, b'"passed"\\n')
    except OSError: pass
os._exit(0)""",
}
NEED_TIME = {
    *("endless loop", "ignores every signal", "fork bomb", "deep recursion", "stops the runner"),
}
MAY_END = {
    *("3,000 nested folders", "closed folders", "UDP"),
    *("daemon", "stops the runner", "kills all others"),
}
"""Whether they succeeded shows afterwards (`test_code_sandbox.Surroundings`)."""
IN_ASSERTS = {"ends early", "writes forged results"}
"""Scored by asserts: they succeed if the tests count as passed."""


def succeeded(kind: str, outside: str, port: int) -> list[str]:
    words = {"outside": outside, "secret": SECRET, "parent": str(os.getpid()), "port": str(port)}

    def attempt(name: str) -> str | None:
        program = PRELUDE + ATTACKS[name] + "\nprint('done')" * (name not in MAY_END)
        for word, value in words.items():
            program = program.replace(f"{{{word}}}", value)
        job: dict[str, Any] = {"kind": "stdin", "program": program, "tests": [""]}
        if name in IN_ASSERTS:
            job |= {"kind": "asserts", "tests": ["assert add(1, 2) == 3"], "function": None}
        seconds = 1.0 if name in NEED_TIME else 20.0
        outputs: list[str | None] = []
        for _ in range(2 if "outlive" in name else 1):
            outputs += sandbox.run(job, kind, seconds)
        right = "passed" if name in IN_ASSERTS else "done"
        return name if any(right in (output or "") for output in outputs) else None

    kind = "bwrap" if kind == "bwrap" else "limits"
    sandbox.find_variant(kind)
    control = {"kind": "stdin", "program": PRELUDE + "print('done')", "tests": [""]}
    assert sandbox.run(control, kind, 20.0) == ["done\n"]  # the prelude itself works
    if kind == "limits":  # one program at a time, as in a reward process
        return [found for name in ATTACKS if (found := attempt(name))]
    with ThreadPoolExecutor(4) as threads:
        return [found for found in threads.map(attempt, ATTACKS) if found]


if __name__ == "__main__":
    print(json.dumps(succeeded(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
