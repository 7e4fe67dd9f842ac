"""The live view: an observer that keeps a picture of the run on the terminal.

    controller's thread ──record──► RunState ◄──lock──► refreshing thread ──► Screen

The picture comes down when the run has ended, whatever the end; the last one, with the end table
or the reason why, stays below what stood in the terminal before.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

from rich.console import Console

from easyrl import records
from easyrl.observe.picture import render
from easyrl.observe.plain_lines import print_end, print_end_table, safe, say
from easyrl.observe.run_state import RunState
from easyrl.observe.screen import Screen
from easyrl.records import Record

__all__ = ["LastPicture", "LiveView", "render"]

REFRESH_SECONDS = 0.3
MAX_SHARE = 0.008
"""Of a core: where a frame costs more (a huge terminal, a slow machine) there are fewer."""
LAST_PICTURE_LINES = 22
CONTINUE_SECONDS = 2.0
"""Longest wait, after `fg`, for the controller's thread to hear of it."""


class _Request(Enum):
    STOP, SUSPEND = range(2)


class LiveView:
    def __init__(
        self, clock: Callable[[], float] = time.monotonic, log_file: Path | None = None
    ) -> None:
        """`clock` tells the time of the records; what is printed meanwhile goes to `log_file`
        (None: among the run's logs)."""
        self._clock = clock
        self._log_file = log_file
        self._state = RunState()
        self._lock = threading.Lock()
        self._screen: Screen | None = None
        self._thread: threading.Thread | None = None
        self._requests: SimpleQueue[_Request] = SimpleQueue()  # a signal handler may put
        self._continued: SimpleQueue[None] = SimpleQueue()
        self._old_handlers: dict[int, Any] = {}
        self._failure: Exception | None = None  # of the refreshing thread

    def __call__(self, record: Record) -> None:
        if self._failure is not None:
            raise self._failure
        with self._lock:
            self._state.apply(record)
        if isinstance(record, records.CheckStarted):
            print(record.what, flush=True)
        elif isinstance(record, records.RunStarted):
            self._start(self._log_file or record.folder / "logs" / "controller.log")
        elif isinstance(record, records.RunEnded):
            self.close()
            print_last_picture(self._state)
        elif isinstance(record, records.Note) and self._state.ended is not None:
            say(safe(record.text))

    def close(self) -> None:
        """The terminal as it was."""
        self._requests.put(_Request.STOP)
        if self._thread is not None:
            self._thread.join()
        for signum, handler in self._old_handlers.items():
            signal.signal(signum, handler)
        self._old_handlers.clear()
        if self._screen is not None:
            self._screen.close()

    def _start(self, log_file: Path) -> None:
        self._screen = Screen(log_file)
        self._thread = threading.Thread(target=self._refresh, args=(self._screen,), daemon=True)
        self._thread.start()
        if signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
            for signum, handler in ((signal.SIGTSTP, self._suspend), (signal.SIGCONT, self._go_on)):
                self._old_handlers[signum] = signal.signal(signum, handler)

    def _suspend(self, signum: int, frame: FrameType | None) -> None:
        """Ctrl-Z: first the terminal is given back, then the signal does what it always does."""
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        self._requests.put(_Request.SUSPEND)

    def _go_on(self, signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTSTP, self._suspend)
        self._continued.put(None)

    def _stop_until_continued(self, screen: Screen) -> None:
        """Back when the next Ctrl-Z is heard again: before, it would stop a run that draws."""
        while not self._continued.empty():
            self._continued.get()
        screen.suspend()
        with contextlib.suppress(Empty):
            self._continued.get(timeout=CONTINUE_SECONDS)

    def _refresh(self, screen: Screen) -> None:
        pause = 0.0
        while (request := self._next_request(pause)) is not _Request.STOP:
            began = time.thread_time()
            try:
                if request is _Request.SUSPEND:
                    self._stop_until_continued(screen)
                size = screen.size
                with self._lock:
                    picture = render(self._state, self._clock(), *size)
                screen.draw(picture, size)
            except OSError:
                return  # the terminal is gone; the run goes on
            except Exception as error:
                self._failure = error  # told with the next record
                return
            pause = max(REFRESH_SECONDS, (time.thread_time() - began) / MAX_SHARE)

    def _next_request(self, timeout_seconds: float) -> _Request | None:
        try:
            return self._requests.get(timeout=timeout_seconds)
        except Empty:
            return None


class LastPicture:
    """Shows how a run stood at its end, and nothing before."""

    def __init__(self) -> None:
        self._state = RunState()

    def __call__(self, record: Record) -> None:
        self._state.apply(record)
        if isinstance(record, records.RunEnded):
            print_last_picture(self._state)


def print_last_picture(state: RunState) -> None:
    """With the end table, or the reason why the run ended."""
    run, ended = state.run, state.ended
    assert ended is not None
    try:
        with contextlib.suppress(OSError):
            console = Console(highlight=False)
            picture = render(state, state.newest, console.width, LAST_PICTURE_LINES)
            console.print(picture)  # and a line between
    finally:
        if run is not None and state.summary is not None and ended.exit_code == 0:
            print_end_table(state.summary, run.folder, run.config)
        else:
            print_end(ended.exit_code, ended.message)
