"""What reward processes print, on its way to the log of the worker that they belong to.

    print ──► sys.stdout, sys.stderr ──► pipe ──► a thread here ──► stderr of this process
              of a reward process           └─ after KEPT_BYTES: dropped, and counted
              └─ after its share: the same, at a third of the processor time

A pipe, so that neither a reward that prints without end fills the disk, nor what one printed just
before it crashed is lost with it. What Python's streams do not see, a child's or a C library's
output, is bounded by the thread alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

KEPT_BYTES = 16 * 2**20
PIPE_BYTES = 2**20
TOLD_BYTES = 2**16
PAUSE_SECONDS = 1e-3
"""Between two reads of what is dropped anyway: the thread shares Python's lock with the engine."""
NOTICE = b"\n[more output of reward functions is left out]\n"


class RewardOutput:
    def __init__(self) -> None:
        self._reader, writer = os.pipe()
        self.writer = Connection(writer, readable=False)
        """For the processes, which take it for their stdout and stderr."""
        with contextlib.suppress(AttributeError, OSError):  # as large as the system allows
            fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._num_bytes = 0
        self._num_told = 0
        self._thread = threading.Thread(target=self._pass_on, name="reward-output", daemon=True)
        self._thread.start()

    def take_dropped(self) -> int:
        """Bytes dropped here since last asked."""
        dropped = max(0, self._num_bytes - KEPT_BYTES)
        new, self._num_told = dropped - self._num_told, dropped
        return new

    def close(self) -> None:
        """The processes have ended. What a process of theirs still prints is read on."""
        self.writer.close()
        self._thread.join(timeout=1.0)
        if not self._thread.is_alive():
            os.close(self._reader)

    def _pass_on(self) -> None:
        buffer = bytearray(PIPE_BYTES)
        while num_read := os.readv(self._reader, [buffer]):
            room = KEPT_BYTES - self._num_bytes
            self._num_bytes += num_read
            if room > 0:
                _write(2, memoryview(buffer)[: min(room, num_read)])
                if room < num_read:
                    _write(2, memoryview(NOTICE))
            else:
                time.sleep(PAUSE_SECONDS)


class Printed:
    """In a reward process: what its Python code prints, up to `room` bytes in its whole life."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._num_dropped = 0
        self._is_full = False
        is_unbuffered = getattr(sys.stdout, "write_through", False)  # PYTHONUNBUFFERED
        out, err = _Stream("<stdout>", 1, self), _Stream("<stderr>", 2, self)
        stdout = _text(out if is_unbuffered else io.BufferedWriter(out), is_unbuffered)
        stderr = _text(err, is_unbuffered, line_buffering=True)
        self._prompt = [stderr, stdout] if is_unbuffered else [stderr]
        """Those that write each piece or line at once: they have no buffer that would be locked."""
        self._own = stdout, stderr  # kept: a function may replace one, and go on with its buffer
        sys.stdout, sys.stderr = self._own

    def take_dropped(self) -> int:
        """Bytes dropped since last told, once all is flushed; little is told with what follows."""
        for stream in (sys.stdout, sys.stderr, *self._own):
            with contextlib.suppress(Exception):  # a function may have closed it
                stream.flush()
        if self._num_dropped < TOLD_BYTES:
            return 0
        dropped, self._num_dropped = self._num_dropped, 0
        return dropped

    def write(self, descriptor: int, data: memoryview) -> None:
        kept = data[: max(0, self._room)]
        self._room -= len(kept)  # before another thread may go on, and take the same room
        _write(descriptor, kept)
        if len(kept) < len(data):
            self._num_dropped += len(data) - len(kept)
            if not self._is_full:
                self._is_full = True
                _write(descriptor, memoryview(NOTICE))
                self._take_large_pieces()

    def _take_large_pieces(self) -> None:
        """All that follows is dropped: four times as fast where it does not come line by line."""
        for stream in self._prompt:
            with contextlib.suppress(ValueError):  # a function has closed it
                stream.reconfigure(line_buffering=False, write_through=False)


class _Stream(io.RawIOBase):
    def __init__(self, name: str, descriptor: int, printed: Printed) -> None:
        self.name = name
        self._descriptor = descriptor
        self._printed = printed

    def fileno(self) -> int:
        return self._descriptor

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        self._printed.write(self._descriptor, view)
        return len(view)


def _text(writer: Any, is_unbuffered: bool, *, line_buffering: bool = False) -> io.TextIOWrapper:
    stream = io.TextIOWrapper(
        writer,
        encoding="utf-8",
        errors="backslashreplace",
        line_buffering=line_buffering,
        write_through=is_unbuffered,
    )
    stream.mode = "w"  # type: ignore[misc]  # as Python's own have
    return stream


def _write(descriptor: int, data: memoryview) -> None:
    with contextlib.suppress(OSError):  # a full disk, a terminal that is gone
        while data:
            data = data[os.write(descriptor, data) :]
