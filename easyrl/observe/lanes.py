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
SLICE_SECONDS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
MIN_SECONDS = 2.5
ITERATIONS_SHOWN = 4


def slice_seconds(num_slices: int, iteration_seconds: float | None) -> float:
    """How much time a character stands for, so that a lane shows some iterations."""
    wanted = max(MIN_SECONDS, ITERATIONS_SHOWN * (iteration_seconds or 0.0))
    return next((s for s in SLICE_SECONDS if s * num_slices >= wanted), SLICE_SECONDS[-1])


def lane(
    worker: WorkerState, until: float, num_slices: int, seconds: float, *, is_over: bool
) -> list[Segment]:
    """The worker's own work; where it waits for rewards, that they are being scored. `is_over`:
    it has nothing to do any more."""
    spans = list(worker.work)
    if worker.under_way is not None and not is_over:
        kind = "wait" if worker.under_way.kind == "score" else worker.under_way.kind
        spans.append(Span(kind, worker.under_way.started, until))
    work = _kinds(spans, until, num_slices, seconds)
    scoring = _kinds(_scoring(worker, until), until, num_slices, seconds)
    known = (spans[0].started, spans[-1].ended) if spans else (0.0, 0.0)
    if is_over:
        known = known[0], until
    since = (int(until // seconds) - num_slices) * seconds
    kinds = []
    for number in range(num_slices):
        start = since + number * seconds
        told = min(start + seconds, known[1]) - max(start, known[0])
        kinds.append(_kind_shown(work[number], scoring[number], told))
    return _segments(kinds)


def rewards_lane(
    worker: WorkerState, until: float, num_slices: int, seconds: float
) -> list[Segment]:
    """When rewards were being scored for this worker."""
    scoring = _kinds(_scoring(worker, until), until, num_slices, seconds)
    return _segments("score" if there else None for there in scoring)


def _scoring(worker: WorkerState, until: float) -> list[Span]:
    """When rewards were being scored, and are."""
    under_way = worker.under_way
    if under_way is None or under_way.kind != "score":
        return list(worker.rewards)
    return [*worker.rewards, Span("score", under_way.started, until)]


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
        if span.started >= until:
            continue  # begun in the lag of what is shown
        first = max(0, int((span.started - since) // seconds))
        last = min(num_slices - 1, int((span.ended - since) // seconds))
        if span.kind == "weights" and span.ended - span.started < seconds:
            first = last  # shown however quick, but once
            slices[last]["weights"] = seconds
            continue
        for number in range(first, last + 1):
            begin = since + number * seconds
            inside = min(span.ended, begin + seconds) - max(span.started, begin)
            if inside > 1e-6:
                slices[number][span.kind] = slices[number].get(span.kind, 0.0) + inside
    return slices


def _kind_shown(work: Seconds, scoring: Seconds, told: float) -> SpanKind | None:
    """What took most of a slice, of which so many seconds are told of; any weights before it, for
    they part iterations."""
    if "weights" in work:
        return "weights"
    idle = told - sum(work.values())
    if idle > 0.0:
        work["wait"] = work.get("wait", 0.0) + idle
    if not work:
        return None
    kind = max(work.items(), key=lambda item: item[1])[0]
    return "score" if kind == "wait" and scoring else kind


def _segments(kinds: Iterable[SpanKind | None]) -> list[Segment]:
    segments = []
    for kind, run in groupby(kinds):
        character, style = UNKNOWN if kind is None else LOOKS[kind]
        segments.append(Segment(character * len(list(run)), style))
    return segments
