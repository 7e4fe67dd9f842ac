"""Timeline of a worker's activities, reported to the controller a few times a second.

Adjacent spans of one kind are merged, so that thousands of engine steps become a few messages. A
span is reported at its end; if it may last long, also at its begin, so that observers know what a
quiet worker does. The controller ends or replaces workers that report no work for
`runtime.stall_seconds`.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from easyrl.events import Activity, Span, SpanKind, UnderWay

REPORT_SECONDS = 0.25
MERGE_SECONDS = 0.002  # spans of one kind with a smaller gap are merged


@dataclass(slots=True)
class _LastSpan:
    """The newest span of a kind."""

    seconds: float
    ended: float


class Timeline:
    def __init__(self, send: Callable[[Activity], None], clock_offset_seconds: float = 0.0) -> None:
        """`clock_offset_seconds`: added to the times of this machine in reports."""
        self._send = send
        self._offset = clock_offset_seconds
        self._spans: list[Span] = []  # for the next report
        self._newest: dict[SpanKind, int] = {}  # index in `_spans` of the newest span of a kind
        self._last: dict[SpanKind, _LastSpan] = {}
        self._num_tokens = 0  # for the next report
        self._shown: SpanKind | None = None  # the newest report says that this is under way
        self._reported = time.monotonic()

    def begin(self, kind: SpanKind) -> float:
        """Begin a span; return its start, for `add`. The first span of a kind may be long."""
        started = time.monotonic()
        last = self._last.get(kind)
        is_long = last is None or last.seconds >= REPORT_SECONDS
        # Otherwise a hang would look like what is shown, as a wait.
        shows_another_kind = self._shown is not None and self._shown != kind
        if is_long or shows_another_kind:
            self.report(UnderWay(kind, started + self._offset))
        return started

    def add(self, kind: SpanKind, started: float, num_tokens: int = 0) -> float:
        """End a span; return its length in seconds. Reported spans of one kind never overlap: time
        of concurrent calls counts once."""
        ended = time.monotonic()
        last = self._last.get(kind)
        last_ended = started if last is None else last.ended
        begun = max(started, last_ended)
        index = self._newest.get(kind)
        if index is not None and begun - last_ended < MERGE_SECONDS:
            self._spans[index] = Span(kind, self._spans[index].started, ended + self._offset)
        else:
            self._newest[kind] = len(self._spans)
            self._spans.append(Span(kind, begun + self._offset, ended + self._offset))
        self._last[kind] = _LastSpan(ended - started, ended)
        self._num_tokens += num_tokens
        if ended - self._reported >= REPORT_SECONDS:
            self.report()
        return ended - started

    @contextmanager
    def measure(
        self, kind: SpanKind, *, shown_as: SpanKind | None = None, is_short: bool = False
    ) -> Iterator[None]:
        """Make the block a span; until it ends it is shown as `shown_as`, unless `is_short`."""
        started = time.monotonic()
        if not is_short:
            self.report(UnderWay(shown_as or kind, started + self._offset))
        try:
            yield
        finally:
            self.add(kind, started)

    def report(self, under_way: UnderWay | None = None) -> None:
        """Report finished spans, and what begins now."""
        if self._spans or under_way is not None:
            self._send(Activity(tuple(self._spans), under_way, self._num_tokens))
            self._shown = None if under_way is None else under_way.kind
        self._spans = []
        self._newest = {}
        self._num_tokens = 0
        self._reported = time.monotonic()
