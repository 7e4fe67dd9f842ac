"""What processes may use and how they end: CPU cores, memory, the end of their parent. No torch."""

import contextlib
import ctypes
import math
import multiprocessing
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Processor time that a container may use: `QUOTA PERIOD` in microseconds, or `max PERIOD`."""
TOPOLOGY = Path("/sys/devices/system/cpu")


def num_cores() -> int:
    """Return how many CPU cores this process may use: those of its affinity, but at most a
    container's quota, rounded up."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # no quota
        quota, period = map(int, CPU_QUOTA.read_text().split())
        cores = min(cores, math.ceil(quota / period))
    return cores


def split_cores(num_workers: int) -> tuple[tuple[int, ...], ...]:
    """Divide the cores into disjoint sets of equal size, one per worker. Hyperthreads of a core
    stay together. Empty if there are not more cores than workers, or under a quota: other
    containers use these cores too."""
    allowed = sorted(os.sched_getaffinity(0), key=_position)
    if num_workers >= len(allowed) or num_cores() < len(allowed):
        return ()
    share = len(allowed) // num_workers
    parts = []
    for worker in range(num_workers):
        first = share * worker
        part = allowed[first : first + share]
        parts.append(tuple(sorted(part)))
    return tuple(parts)


def pin(cores: Collection[int]) -> None:
    """Restrict the calling thread, and those it starts later, to `cores` (empty: do nothing)."""
    if cores:
        with contextlib.suppress(OSError):  # none of them exists any more
            os.sched_setaffinity(0, cores)


def spin_environment() -> dict[str, str]:
    """Return environment variables that bound how long a waiting OpenMP thread spins; none if the
    user sets one of them. With GNU OpenMP's 300,000 turns, an iteration on contended cores takes
    minutes instead of seconds. Without spinning, two threads are slower than one."""
    is_set = "GOMP_SPINCOUNT" in os.environ or "OMP_WAIT_POLICY" in os.environ
    return {} if is_set else {"GOMP_SPINCOUNT": "10000"}


def _position(core: int) -> tuple[int, int, int]:
    """Return package, physical core and number of a core: neighbours in this order share caches."""
    folder = TOPOLOGY / f"cpu{core}" / "topology"
    try:
        package = int((folder / "physical_package_id").read_text())
        return package, int((folder / "core_id").read_text()), core
    except (OSError, ValueError):
        return 0, core, core


class MemoryNeed(NamedTuple):
    """A part of the memory that a process takes at its peak. The package that allocates it computes
    it; `runtime.memory_estimate` adds the parts up."""

    what: str  # "KV cache"
    num_bytes: int
    settings: str = ""  # that make it smaller: "rollout.num_generations, train.keep_checkpoints=0"
    is_certain: bool = False  # a run cannot do without it: one for which it is too much is refused
    is_on_host: bool = False  # in the host's memory, even if the process computes on an accelerator
    is_required: bool = True  # False: memory that is used only because it is there


class Cgroup(NamedTuple):
    limit_bytes: float  # infinite without a limit
    available_bytes: float
    oom_kills: int  # processes that have been killed for lack of memory


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Return the available memory, page cache included: the minimum of the machine's and that of
    every cgroup above. `root`: the folder that contains /proc and /sys."""
    available_bytes = _machine_bytes(root, "MemAvailable")
    for cgroup in _memory_cgroups(root):
        available_bytes = min(available_bytes, cgroup.available_bytes)
    return int(max(0, available_bytes))


def oom_kills(root: Path = Path("/")) -> int:
    """Return how many processes of this process's cgroup have been killed for lack of memory."""
    for own_cgroup in _memory_cgroups(root):
        return own_cgroup.oom_kills
    return 0


def kill_reason(kills_before: int, root: Path = Path("/")) -> str:
    """Return what to add to "… was killed by SIGKILL", with `oom_kills` from before: the memory
    limit that was reached and what to lower; empty if nothing was killed for lack of memory."""
    if oom_kills(root) <= kills_before:
        return ""
    limit_bytes = _machine_bytes(root, "MemTotal")
    for cgroup in _memory_cgroups(root):
        limit_bytes = min(limit_bytes, cgroup.limit_bytes)
    return (
        f" because the memory limit of the machine or its cgroup ({limit_bytes / 2**20:,.0f} MiB) "
        "was reached; use fewer workers (devices.infer, devices.train), or lower "
        "rollout.max_concurrent_groups or train.max_tokens_per_micro_batch; --dry-run estimates "
        "the memory of a run"
    )


def _machine_bytes(root: Path, name: str) -> float:
    """Return a number of /proc/meminfo, whose lines look like "MemTotal:  32768 kB"."""
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise ValueError(f"/proc/meminfo: expected {name}")


def _memory_cgroups(root: Path) -> Iterator[Cgroup]:
    """Yield each cgroup (version 2) of this process, its own first, up to the topmost visible."""
    membership = root / "proc/self/cgroup"
    lines = membership.read_text().splitlines() if membership.exists() else []
    mount = root / "sys/fs/cgroup"
    for line in lines:
        if not line.startswith("0::"):  # of version 1
            continue
        own_folder = mount / line.removeprefix("0::/")
        for folder in (own_folder, *own_folder.parents):
            try:
                limit = (folder / "memory.max").read_text()  # a number, or "max"
                usage = (folder / "memory.current").read_text()
                events = _read_table(folder / "memory.events")
                statistics = _read_table(folder / "memory.stat")
            except OSError:  # not visible, or the root, which has no limit
                continue
            page_cache = statistics.get("active_file", 0) + statistics.get("inactive_file", 0)
            limit_bytes = float(limit.replace("max", "inf"))
            available_bytes = limit_bytes - int(usage) + page_cache
            yield Cgroup(limit_bytes, available_bytes, events.get("oom_kill", 0))


def _read_table(file: Path) -> dict[str, int]:
    """Read lines like "oom_kill 3"."""
    table = {}
    for line in file.read_text().splitlines():
        name, value = line.split()
        table[name] = int(value)
    return table


UNGUARDED = 87
"""Exit code of a worker that would start a run while it imports the user's program."""
UNGUARDED_MESSAGE = (
    "worker processes import this program, but cannot, or would start the run again: put the "
    'calls of easyrl under `if __name__ == "__main__":`, in a file (no program from standard input)'
)


PR_SET_PDEATHSIG = 1  # of Linux's prctl.h
PR_SET_NAME = 15


def die_with_parent(parent: int | None = None) -> None:
    """Let the kernel kill this process when its parent dies, even while it holds the GIL.
    `parent`: its pid, unless multiprocessing has started this process."""
    process = multiprocessing.parent_process()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is None:
        assert process is not None
        is_dead = not process.is_alive()
    else:
        is_dead = os.getppid() != parent
    if is_dead:  # it died before the lines above
        os._exit(1)


@contextlib.contextmanager
def environment_of_children(variables: Mapping[str, str]) -> Iterator[None]:
    """Give these environment variables to the processes that this thread starts in the context."""
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(before)


MAX_OPEN_FILES = 65536


def raise_open_files() -> None:
    """Let this process open many files: connections of agents, pipes of workers."""
    limit, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    raised = max(limit, min(highest, MAX_OPEN_FILES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised, highest))


MAX_INT_DIGITS = 50_000
"""Digits of the longest integer that is read from text or written, as in LiveCodeBench's grader.
The time grows with the square of the digits: 0.03 s for so many, 0.7 s for a MiB of such text."""


def allow_long_integers() -> None:
    """Let this process read and write integers of MAX_INT_DIGITS digits, which rows, tests and
    outputs can have. Python's own limit is 4,300; a higher one stays as it is."""
    limit = sys.get_int_max_str_digits()
    if 0 < limit < MAX_INT_DIGITS:  # 0: none
        sys.set_int_max_str_digits(MAX_INT_DIGITS)


def children_of(process: int) -> set[int]:
    """Return the processes that a process has started or adopted."""
    found: set[int] = set()
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread has ended meanwhile
            found.update(map(int, file.read_text().split()))
    return found


def name_of(process: int) -> str:
    """Return what `set_name` has named a process; "" if there is none."""
    try:
        return Path(f"/proc/{process}/comm").read_text().strip()
    except OSError:  # it has ended
        return ""


def kill_with_descendants(processes: Collection[int]) -> None:
    """Kill processes and all that they have started, also in sessions of their own."""
    waiting = list(processes)
    while waiting:
        process = waiting.pop()
        waiting += children_of(process)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)


def send_all(queue: SimpleQueue[Any], connection: Connection) -> None:
    """Send what comes through `queue`, until None. Runs in a thread of its own: the full pipe of a
    process that does not read must not block others."""
    with contextlib.suppress(OSError):  # the process has ended
        while (item := queue.get()) is not None:
            connection.send(item)


REWARD_PROCESS = "easyrl-reward"
"""Name of the processes that call reward functions."""


def set_name(name: str) -> None:
    """Name this process (at most 15 bytes) for `ps`, from its main thread."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())


M_TRIM_THRESHOLD = -1  # of glibc's malloc.h
M_MMAP_THRESHOLD = -3
LARGEST_THRESHOLD = 2**31 - 1


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for reuse: by default a trainer on the CPU spends about a tenth
    of its time on page faults. The cost is fragmentation: the peak grew from 1014 to 1291 MiB with
    13 million parameters."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, LARGEST_THRESHOLD)
    libc.mallopt(M_TRIM_THRESHOLD, LARGEST_THRESHOLD)


MAX_DELAY_SECONDS = float(os.environ.get("EASYRL_RANDOM_DELAYS", "0") or 0)
"""Tests set it to prove that timing does not change a deterministic run (docs/design.md)."""
_RANDOM = random.Random()
os.register_at_fork(after_in_child=_RANDOM.seed)


def maybe_sleep() -> None:
    """Sleep for up to MAX_DELAY_SECONDS now and then: in engine, rewards, ring and trainer."""
    if MAX_DELAY_SECONDS > 0.0 and _RANDOM.random() < 0.25:
        time.sleep(_RANDOM.random() * MAX_DELAY_SECONDS)


if __name__ == "__mp_main__":  # in a process that user code has started (`rewards.worker.start`)
    die_with_parent(os.getppid())
    if os.getsid(os.getppid()) != os.getsid(0):  # another process has adopted it already
        os._exit(1)
