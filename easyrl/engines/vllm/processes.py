"""Remove vLLM's processes and files when the rollout worker ends, however it ends.

vLLM's sockets remain in the file system if one of its processes is killed, and a process that is
starting ends with its parent only once it has imported vLLM. So a cleaner process waits until the
rollout worker has ended, kills the remaining processes and removes the files:

    rollout worker ──── a pipe that only it holds ────► cleaner: this file, run as a script

A private folder identifies everything that belongs to the engine: its sockets are in it, and its
processes were started with the folder's path in their environment. The folder's time shows the
progress of a weight update (`worker.whole_weights`); a file in it cancels one.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FOLDER = "VLLM_RPC_BASE_PATH"  # variable that names the folder of vLLM's sockets
MAX_FOLDER_BYTES = 107 - 37  # longest path of a Unix socket, without vLLM's socket name and slash
POLL_SECONDS = 0.05
KILL_SECONDS = 30.0  # then give up on a process that SIGKILL has not ended: it hangs in a driver


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
        """Do not mark the processes that are started from now on as vLLM's."""
        del os.environ[FOLDER]

    def close(self) -> None:
        assert self._cleaner.stdin is not None
        self._cleaner.stdin.close()
        self._cleaner.wait()


def cancel_file(folder: str, generation: int) -> Path:
    """Return the file that ends the waits in the weight channel of this generation."""
    return Path(folder, f"cancelled-{generation}")


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
    """Kill the engine's processes, then remove its folder."""
    deadline = time.monotonic() + KILL_SECONDS
    while time.monotonic() < deadline:
        left = processes_of(folder)
        if not left:
            break
        for pid in left:  # one may start another meanwhile
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    remove(sys.argv[1])
