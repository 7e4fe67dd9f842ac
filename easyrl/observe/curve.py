"""A curve over iterations as lines of block characters, an eighth of a line per step of height.

Rich has no chart, and it has to be lines of Rich's segments like the rest of the picture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby, pairwise

from rich.segment import Segment
from rich.style import Style

BLOCKS = " ▁▂▃▄▅▆▇█"
MARK = "◆"
BAR_STYLE, MARK_STYLE, AXIS_STYLE = Style(color="blue"), Style(color="yellow"), Style(dim=True)


def curve(
    values: Sequence[float],
    marks: Sequence[tuple[int, float]],
    *,
    num_planned: int,
    width: int,
    height: int,
) -> list[list[Segment]]:
    """`values` as bars, and `marks` on them: (place among the values, value). `num_planned` values
    would fill the width."""
    finite = [value for value in [*values, *(mark for _, mark in marks)] if math.isfinite(value)]
    if not finite:
        return [[] for _ in range(height)]
    low, high = min(finite), max(finite)
    labels = [f"{high:.3g}", *[""] * (height - 2), f"{low:.3g}"][:height]
    axis_width = max(map(len, labels)) + 1
    columns = _columns(values, max(1, width - axis_width), num_planned)
    scale = height / ((high - low) or 1.0)
    # A value that is there has a height, the lowest as well.
    heights = [max(0.125, (v - low) * scale) if math.isfinite(v) else 0.0 for v in columns]
    characters = [  # [line from the top][column]
        [BLOCKS[round(8 * min(1.0, max(0.0, top - line)))] for top in heights]
        for line in reversed(range(height))
    ]
    for place, value in marks:
        if math.isfinite(value):
            line = characters[height - 1 - min(height - 1, int((value - low) * scale))]
            column = round(place * max(0, len(columns) - 1) / max(1, len(values)))
            line += " " * (column + 1 - len(line))
            line[column] = MARK
    return [
        [Segment(f"{label:>{axis_width - 1}} ", AXIS_STYLE), *_segments(line)]
        for label, line in zip(labels, characters, strict=True)
    ]


def _columns(values: Sequence[float], num_columns: int, num_planned: int) -> Sequence[float]:
    """The values, so wide that all that are planned fill the width; where there are more than
    columns, means over neighbours."""
    if num_planned <= num_columns:
        places = (column * num_planned // num_columns for column in range(num_columns))
        return [values[place] for place in places if place < len(values)]
    if len(values) <= num_columns:
        return values
    edges = [len(values) * column // num_columns for column in range(num_columns + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def _segments(line: list[str]) -> list[Segment]:
    return [
        Segment("".join(run), MARK_STYLE if is_mark else BAR_STYLE)
        for is_mark, run in groupby(line, key=lambda character: character == MARK)
    ]
