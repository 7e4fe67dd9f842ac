"""What a picture is made of: lines as lists of Rich's segments, and text that is safe in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import cell_len, chop_cells
from rich.segment import Segment
from rich.style import Style

Line = list[Segment]
DIM, BOLD, BLUE = Style(dim=True), Style(bold=True), Style(color="blue")
MAX_SAMPLE = 20_000
"""Characters of a completion that are looked at."""


def bar(done: float, total: float, width: int) -> Line:
    full = round(max(0, width) * min(1.0, max(0.0, done / max(total, 1))))
    return [Segment("━" * full, BLUE), Segment("─" * (width - full), DIM)]


def beside(left: list[Line], right: list[Line], left_width: int) -> list[Line]:
    height = max(len(left), len(right))
    left = left + [[] for _ in range(height - len(left))]
    right = right + [[] for _ in range(height - len(right))]
    return [
        [*Segment.adjust_line_length(a, left_width), Segment("  "), *b]
        for a, b in zip(left, right, strict=True)
    ]


def folded(text: str, width: int) -> list[str]:
    if len(text) > MAX_SAMPLE:
        text = text[: MAX_SAMPLE // 2] + "\n⋯\n" + text[-MAX_SAMPLE // 2 :]
    lines = [printable(line.expandtabs(4)) for line in text.splitlines()]
    return [part for line in lines for part in chop_cells(line, max(1, width)) or [""]]


def shortened(lines: Sequence[str], height: int) -> list[str]:
    if len(lines) <= height:
        return list(lines)
    if height < 3:
        return list(lines[:height])
    num_last = (height - 1) // 2
    return [*lines[: height - 1 - num_last], "⋯", *lines[-num_last:]]


def printable(text: str) -> str:
    """Without what could move the cursor, change colours, or turn the direction of writing."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def clock(seconds: float) -> str:
    minutes, seconds = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def rule(title: str, width: int) -> Line:
    return [
        Segment("── ", DIM),
        Segment(title, BOLD),
        Segment(" " + "─" * max(0, width - cell_len(title) - 4), DIM),
    ]


def flow(items: Iterable[Line], width: int, gap: int = 3) -> list[Line]:
    """The items one after another, on as many lines as they take."""
    lines: list[Line] = []
    for item in items:
        length = Segment.get_line_length(item)
        if lines and Segment.get_line_length(lines[-1]) + gap + length <= width:
            lines[-1] += [Segment(" " * gap), *item]
        else:
            lines.append(list(item))
    return lines
