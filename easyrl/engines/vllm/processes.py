"""Cleanup of vLLM's processes, and the progress of a weight update in them.

Cleanup. vLLM's processes meet over names in the file system, which stay when one is killed, and a
process that is just starting ties itself to its parent only after it has imported vLLM. So a
cleaner process waits until the rollout worker has ended, kills what is left and removes the names:

    rollout worker ──── a pipe that only it holds ────► cleaner: this file, run as a script

The cleaner has a session of its own, which a terminal does not signal, and loads only the standard
library. A private folder identifies everything that belongs to the engine: its sockets are in it,
and its processes were started with the folder's path in their environment.

Progress. A weight update is one call into vLLM without a timeout. Each tensor-parallel rank writes
what it is doing to an anonymous file, and the rollout worker reads it while it waits:

    rank:             waiting for bucket n ─► loading bucket n ─► … ─► done
    rollout worker:   no change for runtime.timeout_seconds ─► TimeoutError

No torch and no vLLM is imported here.
"""

from __future__ import annotations

import mmap
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from multiprocessing import resource_tracker
from pathlib import Path

# -- cleanup --------------------------------------------------------------------------------------

FOLDER = "VLLM_RPC_BASE_PATH"
"""Variable that tells vLLM where to create its sockets."""
SOCKET_NAME_BYTES = 37
"""Length of vLLM's socket names, with the slash."""
MAX_PATH_BYTES = 107
"""Longest path of a Unix socket."""
POLL_SECONDS = 0.05
KILL_SECONDS = 30.0
"""Give up on a process that has not ended this long after SIGKILL: it hangs in a driver."""


class Cleanup:
    """Remove this process's vLLM after `close`, or when this process ends."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="easyrl-")
        if len(self.folder.encode()) + SOCKET_NAME_BYTES > MAX_PATH_BYTES:
            Path(self.folder).rmdir()
            self.folder = tempfile.mkdtemp(prefix="easyrl-", dir="/tmp")
        self._cleaner = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, self.folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )
        # Otherwise the first spawn starts it with vLLM's environment, but all processes share it.
        resource_tracker.ensure_running()
        self._folder_before = os.environ.get(FOLDER)
        os.environ[FOLDER] = self.folder

    def stop_marking(self) -> None:
        """Restore the environment: processes started from now on do not belong to vLLM."""
        if self._folder_before is None:
            os.environ.pop(FOLDER, None)
        else:
            os.environ[FOLDER] = self._folder_before

    def close(self) -> None:
        assert self._cleaner.stdin is not None
        self._cleaner.stdin.close()
        self._cleaner.wait()


def processes_of(folder: str) -> list[int]:
    """Return the ids of the processes that were started with this folder in their environment."""
    entry = f"{FOLDER}={folder}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = (process / "environ").read_bytes()
        except OSError:  # it has ended, or belongs to another user
            continue
        if entry in environment.split(b"\0"):
            found.append(int(process.name))
    return found


def remove(folder: str) -> None:
    """Kill the folder's processes, then delete it."""
    deadline = time.monotonic() + KILL_SECONDS
    while (left := processes_of(folder)) and time.monotonic() < deadline:  # one may start another
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(POLL_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)


# -- progress of a weight update ------------------------------------------------------------------

WAITING, LOADING, DONE = range(3)
_RECORD = struct.Struct("qqq")  # per rank: number of reports, state, bucket
GRACE_SECONDS = 3.0
"""Added while all ranks wait: the weight channel's own timeout has a better message."""


class RankProgress:
    """Report the progress of one rank."""

    def __init__(self, path: str, rank: int) -> None:
        fd = os.open(path, os.O_RDWR)
        self._memory = mmap.mmap(fd, 0)
        os.close(fd)
        self._rank = rank
        self._num_reports = 0

    def report(self, state: int, bucket: int = 0) -> None:
        self._num_reports += 1
        record = self._num_reports, state, bucket
        _RECORD.pack_into(self._memory, self._rank * _RECORD.size, *record)


class UpdateProgress:
    """Check that the ranks make progress."""

    def __init__(self, num_ranks: int, first_rank: int, timeout_seconds: float) -> None:
        """`first_rank`: the first rank's number in the weight channel."""
        self._first_rank = first_rank
        self._timeout_seconds = timeout_seconds
        self._fd = os.memfd_create("easyrl-progress")
        os.ftruncate(self._fd, num_ranks * _RECORD.size)
        self._memory = mmap.mmap(self._fd, 0)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        """The file that the ranks open."""
        self.begin()

    def begin(self) -> None:
        """Restart the clock for a new update."""
        self._last, self._changed_at = self._memory[:], time.monotonic()

    def check(self) -> None:
        """Raise TimeoutError if no rank has reported for `timeout_seconds`."""
        if (now := self._memory[:]) != self._last:
            self._last, self._changed_at = now, time.monotonic()
        seconds = time.monotonic() - self._changed_at
        records = list(enumerate(_RECORD.iter_unpack(now), start=self._first_rank))
        hanging = [record for record in records if record[1][1] == LOADING]
        if seconds < self._timeout_seconds + (0.0 if hanging else GRACE_SECONDS):
            return
        states = ", ".join(_describe(rank, *record) for rank, record in hanging or records)
        raise TimeoutError(
            f"weight channel: the rollout worker waits for vLLM, in which {states} (no progress "
            f"for {seconds:.1f} s; runtime.timeout_seconds bounds this wait)"
        )

    def close(self) -> None:
        self._memory.close()
        os.close(self._fd)


def _describe(rank: int, num_reports: int, state: int, bucket: int) -> str:
    if not num_reports:
        return f"rollout rank {rank} has not begun"
    if state == DONE:
        return f"rollout rank {rank} has loaded all buckets and does not answer"
    if state == LOADING:
        return f"rollout rank {rank} hangs while it loads bucket {bucket + 1}"
    return f"rollout rank {rank} waits for bucket {bucket + 1} from the trainer"


if __name__ == "__main__":
    sys.stdin.buffer.read()
    remove(sys.argv[1])
