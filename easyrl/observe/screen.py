"""The whole terminal for a picture, and the terminal as it was afterwards.

    standard output, standard error ──► a log file       (while the screen is up)
    frames ──────────────────────────► the terminal

The alternate screen is drawn over line by line and never erased, so that nothing flickers, and is
right again after a resize with the next frame; in synchronized updates, where the terminal knows
them, so that nothing tears. Whatever else this process or its libraries print, in C as well, goes
to the log. Ctrl-Z gives the terminal back for as long as the process is stopped or runs in the
background.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from pathlib import Path

from rich.console import Console, RenderableType
from rich.segment import Segment

SYNCHRONIZED_BEGIN, SYNCHRONIZED_END = "\x1b[?2026h", "\x1b[?2026l"
NO_WRAP, WRAP = "\x1b[?7l", "\x1b[?7h"
"""A character wider than Rich believes must not push a line into the next."""


def is_fit_for_pictures() -> bool:
    """Whether standard output is a terminal that a picture can be drawn on."""
    with contextlib.suppress(ValueError, OSError, AttributeError):
        return (
            sys.stdout.isatty()
            and os.isatty(sys.stdout.fileno())
            and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
            and (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
            and _is_in_foreground(sys.stdout.fileno())
        )
    return False


class Screen:
    """Up from its making to `close`, which may be called again and comes about at exit at last."""

    def __init__(self, log_file: Path) -> None:
        self._is_closed = self._is_up = False
        self._terminal = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
        self._saved = _redirect_to(log_file)
        self._console = Console(file=self._terminal, force_terminal=True, highlight=False)
        self._go_up()
        atexit.register(self.close)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines, as they are now."""
        with contextlib.suppress(OSError):
            width, height = os.get_terminal_size(self._terminal.fileno())
            if width and height:
                return width, height
        return 80, 24

    def draw(self, picture: RenderableType, size: tuple[int, int]) -> None:
        """To nobody while in the background. Raises OSError where the terminal is gone."""
        if not _is_in_foreground(self._terminal.fileno()):
            self._go_down()
            return
        self._go_up()
        width, height = size
        console = self._console
        options = console.options.update(width=width, height=height)
        lines = Segment.set_shape(console.render_lines(picture, options), width, height)
        with console.capture() as frame:
            console.update_screen_lines(lines)
        # The cursor waits at the top, where a key that is pressed does not scroll the screen.
        self._write(SYNCHRONIZED_BEGIN + frame.get() + "\x1b[H" + SYNCHRONIZED_END)

    def suspend(self) -> None:
        """Give the terminal back and stop, as SIGTSTP does that is not handled, until SIGCONT."""
        self._go_down()
        signal.pthread_kill(threading.get_ident(), signal.SIGTSTP)  # at once, not in another thread

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        try:
            with contextlib.suppress(OSError):  # the terminal may be gone
                self._go_down()
        finally:
            _restore(self._saved)
            with contextlib.suppress(OSError):
                self._terminal.close()

    def _go_up(self) -> None:
        if not self._is_up:
            self._is_up = True
            self._console.set_alt_screen(True)
            self._console.show_cursor(False)
            self._write(NO_WRAP)

    def _go_down(self) -> None:
        if self._is_up:
            self._is_up = False
            self._write(WRAP)
            self._console.show_cursor(True)
            self._console.set_alt_screen(False)

    def _write(self, text: str) -> None:
        self._terminal.write(text)
        self._terminal.flush()


def _is_in_foreground(terminal: int) -> bool:
    """Whether the terminal is ours to draw on. One that controls no session has no background."""
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return True


def _redirect_to(log_file: Path) -> dict[int, int]:
    """Send what would go to the terminal to a file; returns duplicates of what stood there."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = {stream: os.dup(stream) for stream in (1, 2) if os.isatty(stream)}
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in saved:
        os.dup2(log, stream)
    os.close(log)
    return saved


def _restore(saved: dict[int, int]) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    for stream, duplicate in saved.items():
        os.dup2(duplicate, stream)
        os.close(duplicate)
