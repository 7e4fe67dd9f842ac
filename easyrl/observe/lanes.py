"""Lanes: what a worker did over the last seconds, a character per slice of time.

Every kind of work has a character of its own as well as a colour, so that a lane can be read
without colours.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from rich.segment import Segment
from rich.style import Style

from easyrl.events import Span, SpanKind
from easyrl.observe.run_state import WorkerState

LOOKS: dict[SpanKind, tuple[str, Style]] = {
    "generate": ("█", Style(color="green")),
    "prefill": ("▒", Style(color="cyan")),
    "score": ("▪", Style(color="yellow")),
    "train": ("▓", Style(color="magenta")),
    "weights": ("W", Style(color="bright_white", bold=True)),
    "wait": ("·", Style(dim=True)),
}
UNKNOWN = (" ", Style())
"""Not told yet: a worker tells of what it does when that ends."""
SLICE_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
MIN_SECONDS = 6.0
ITERATIONS_SHOWN = 3


def slice_seconds(num_slices: int, iteration_seconds: float | None) -> float:
    """How much time a character stands for, so that a lane shows some iterations."""
    wanted = max(MIN_SECONDS, ITERATIONS_SHOWN * (iteration_seconds or 0.0))
    return next((s for s in SLICE_SECONDS if s * num_slices >= wanted), SLICE_SECONDS[-1])


def lane(worker: WorkerState, until: float, num_slices: int, seconds: float) -> list[Segment]:
    """The worker's own work; where it waits for rewards, that they are being scored."""
    work = _kinds(worker.work, until, num_slices, seconds)
    scoring = _kinds(worker.rewards, until, num_slices, seconds)
    known_until = worker.work[-1].ended if worker.work else -1.0
    newest = int(until // seconds)
    kinds = [
        _kind_shown(work[n], scoring[n], (newest - num_slices + n) * seconds < known_until)
        for n in range(num_slices)
    ]
    return _segments(kinds)


def rewards_lane(
    worker: WorkerState, until: float, num_slices: int, seconds: float
) -> list[Segment]:
    """When rewards were being scored for this worker."""
    scoring = _kinds(worker.rewards, until, num_slices, seconds)
    return _segments("score" if there else None for there in scoring)


def legend(kinds: Iterable[SpanKind]) -> list[list[Segment]]:
    """One item per kind."""
    names = {"wait": "idle"}
    return [[Segment(*LOOKS[kind]), Segment(f" {names.get(kind, kind)}")] for kind in kinds]


Seconds = dict[SpanKind, float]


def _kinds(spans: Iterable[Span], until: float, num_slices: int, seconds: float) -> list[Seconds]:
    """Of each slice the seconds per kind. Slices stand at multiples of their length, so that a
    lane moves by whole characters."""
    since = (int(until // seconds) - num_slices) * seconds
    slices: list[Seconds] = [{} for _ in range(num_slices)]
    for span in reversed(list(spans)):
        if span.ended <= since:
            break
        first = max(0, int((span.started - since) // seconds))
        last = min(num_slices - 1, int((span.ended - since) // seconds))
        for number in range(first, last + 1):
            begin = since + number * seconds
            inside = min(span.ended, begin + seconds) - max(span.started, begin)
            slices[number][span.kind] = slices[number].get(span.kind, 0.0) + inside
    return slices


def _kind_shown(work: Seconds, scoring: Seconds, is_known: bool) -> SpanKind | None:
    """What took most of a slice; weights are shown however quick, for they part iterations."""
    if "weights" in work:
        return "weights"
    kind: SpanKind | None = max(work, key=work.__getitem__) if work else None
    if kind is None and not is_known:
        return None
    if kind is None or kind == "wait":
        return "score" if scoring else "wait"
    return kind


def _segments(kinds: Iterable[SpanKind | None]) -> list[Segment]:
    segments = []
    for kind, run in groupby(kinds):
        character, style = UNKNOWN if kind is None else LOOKS[kind]
        segments.append(Segment(character * len(list(run)), style))
    return segments
