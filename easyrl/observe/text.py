"""Text for the terminal: formatting, and printing that never fails."""

import contextlib
import math
import os
import sys
from pathlib import Path
from typing import TextIO

from rich.console import Console, RenderableType
from rich.segment import Segment, Segments

from easyrl.formatting import printable, shorten

MAX_MESSAGE = 8000  # characters of one message on the terminal


def clock(seconds: float) -> str:
    """Return `1:05` or `2:00:00`."""
    minutes, seconds = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{seconds:02}"
    return f"{minutes}:{seconds:02}"


def shown(value: float | None, spec: str) -> str:
    """Format a number; `none` for None and NaN."""
    if value is None or math.isnan(value):
        return "none"
    return format(value, spec)


def safe(text: str, max_length: int = MAX_MESSAGE) -> str:
    """Make text of any origin safe to print: printable lines, with the middle cut out if long."""
    text = shorten(text, max_length, "\n… (shortened, the logs have all of it)\n")
    return printable(text.expandtabs(4), keep="\n")


def say(text: str, stream: TextIO | None = None, keep: str = "\n\t") -> None:
    """Print text of any origin (`printable`) to standard output or `stream`; if that is closed,
    print nothing from now on."""
    stream = stream or sys.stdout
    try:
        print(printable(text, keep), file=stream, flush=True)
    except OSError:  # the reader of a pipe is gone, or a disk is full: the run continues
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())


def is_discarded() -> bool:
    """Return whether what is printed goes nowhere, as once the reader of a pipe is gone."""
    if sys.stdout is None:  # closed by the shell: `>&-`
        return True
    try:
        return os.path.samestat(os.fstat(sys.stdout.fileno()), Path(os.devnull).stat())
    except (OSError, ValueError):  # no file
        return False


def say_once(already: set[str], key: str, text: str) -> None:
    """Print text of any origin unless the key is in `already`, where it is from now on."""
    if key not in already:
        already.add(key)
        say(safe(text))


def say_rich(renderable: RenderableType, height: int | None = None) -> None:
    """Print something of Rich's with text of any origin, in at most `height` lines."""
    console = Console(highlight=False, force_jupyter=False, markup=False, emoji=False)
    segments = console.render(renderable, console.options.update(height=height))
    clean = []
    for text, style, _ in segments:
        clean.append(Segment(printable(text, keep="\n"), style))
    with console.capture() as capture:  # Rich itself would end the process on a broken pipe
        console.print(Segments(clean), crop=False)
    printed = capture.get().removesuffix("\n")
    lines = [line.rstrip() for line in printed.split("\n")]
    text = "\n".join(lines)
    if height is not None:
        text = text.rstrip()
    say(text, keep="\n\x1b")


def is_live_terminal() -> bool:
    """Return whether standard output is a terminal on which a live view can be drawn."""
    if os.environ.get("TERM", "") in ("", "dumb", "unknown"):
        return False
    with contextlib.suppress(ValueError, OSError, AttributeError):  # closed, or replaced
        terminal = sys.stdout.fileno()
        is_unicode = sys.stdout.encoding.lower().replace("-", "") == "utf8"
        return os.isatty(terminal) and is_unicode and is_in_foreground(terminal)
    return False


def is_in_foreground(terminal: int) -> bool:
    """Return whether this process may draw on the terminal; True if it does not control one."""
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return True
