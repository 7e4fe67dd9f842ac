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
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# -- cleanup --------------------------------------------------------------------------------------

FOLDER = "VLLM_RPC_BASE_PATH"
"""Variable that tells vLLM where to create its sockets."""
MAX_FOLDER_BYTES = 107 - 37
"""Longest path of a Unix socket, without vLLM's socket name and the slash."""
POLL_SECONDS = 0.05
KILL_SECONDS = 30.0
"""Give up on a process that has not ended this long after SIGKILL: it hangs in a driver."""


class Cleanup:
    """Remove this process's vLLM after `close`, or when this process ends."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="easyrl-")
        if len(self.folder.encode()) > MAX_FOLDER_BYTES:
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
        os.environ[FOLDER] = self.folder

    def stop_marking(self) -> None:
        """Processes started from now on do not belong to vLLM."""
        del os.environ[FOLDER]

    def close(self) -> None:
        assert self._cleaner.stdin is not None
        self._cleaner.stdin.close()
        self._cleaner.wait()


def processes_of(folder: str) -> list[int]:
    """Return the ids of the processes that were started with this folder in their environment."""
    entry = f"{FOLDER}={folder}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if entry in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return found


def remove(folder: str) -> None:
    """Kill the folder's processes, then delete it."""
    deadline = time.monotonic() + KILL_SECONDS
    while (left := processes_of(folder)) and time.monotonic() < deadline:  # one may start another
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)


# -- progress of a weight update ------------------------------------------------------------------

WAITING, LOADING, DONE = range(3)
_STATES = (
    "waits for bucket {} from the trainer",
    "hangs while it loads bucket {}",
    "has loaded all buckets and does not answer",
)
_RECORD = struct.Struct("qqq")  # per rank: number of reports, state, bucket
GRACE_SECONDS = 3.0
"""Added while all ranks wait: the weight channel's own timeout has a better message."""


class RankProgress:
    """Report the progress of one rank."""

    def __init__(self, path: str, rank: int) -> None:
        with Path(path).open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._start = rank * _RECORD.size
        self._num_reports = 0

    def report(self, state: int, bucket: int = 0) -> None:
        self._num_reports += 1
        _RECORD.pack_into(self._memory, self._start, self._num_reports, state, bucket)


class UpdateProgress:
    """Check that the ranks make progress."""

    def __init__(self, num_ranks: int, first_rank: int, timeout_seconds: float) -> None:
        """`first_rank`: the first rank's number in the weight channel."""
        self._first_rank = first_rank
        self._timeout_seconds = timeout_seconds
        fd = os.memfd_create("easyrl-progress")  # until this process ends
        os.ftruncate(fd, num_ranks * _RECORD.size)
        self._memory = mmap.mmap(fd, 0)
        self.path = f"/proc/{os.getpid()}/fd/{fd}"
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
        states = ", ".join(
            f"rank {rank} {_STATES[state].format(bucket + 1)}"
            for rank, (_, state, bucket) in hanging or records
        )
        raise TimeoutError(
            f"weight channel: the rollout worker waits for vLLM, in which {states} (no progress "
            f"for {seconds:.1f} s; runtime.timeout_seconds bounds this wait)"
        )


if __name__ == "__main__":
    sys.stdin.buffer.read()
    remove(sys.argv[1])
