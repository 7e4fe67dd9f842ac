"""Timeline of a worker's activities, reported to the controller a few times a second.

Adjacent spans of one kind are merged, so that thousands of engine steps become a few messages. A
span is reported at its end; if it may last long, also at its begin, so that observers know what a
quiet worker does. The controller ends or replaces workers that report no work for
`runtime.stall_seconds`.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from easyrl.events import Activity, Span, SpanKind, UnderWay

REPORT_SECONDS = 0.25
MERGE_SECONDS = 0.002  # spans of one kind with a smaller gap are merged


class Timeline:
    def __init__(self, send: Callable[[Activity], None], clock_offset_seconds: float = 0.0) -> None:
        """`clock_offset_seconds`: added to the times of this machine in reports."""
        self._send, self._offset = send, clock_offset_seconds
        self._spans: list[Span] = []
        self._newest: dict[SpanKind, int] = {}  # of each kind, its index in _spans
        self._seconds: dict[SpanKind, float] = {}  # of each kind, the length of the last span
        self._ended: dict[SpanKind, float] = {}  # of each kind, the end of the last span
        self._num_tokens = 0  # for the next report
        self._shown: SpanKind | None = None  # the newest report says that this is under way
        self._reported = time.monotonic()

    def begin(self, kind: SpanKind) -> float:
        """Begin a span; return its start, for `add`. The first span of a kind may be long."""
        started = time.monotonic()
        is_long = self._seconds.get(kind, REPORT_SECONDS) >= REPORT_SECONDS
        if is_long or self._shown not in (None, kind):  # otherwise a hang would look like a wait
            self.report(UnderWay(kind, started + self._offset))
        return started

    def add(self, kind: SpanKind, started: float, num_tokens: int = 0) -> float:
        """End a span; return its length in seconds. Reported spans of one kind never overlap: time
        of concurrent calls counts once."""
        ended = time.monotonic()
        last = self._ended.get(kind, started)
        begun, index = max(started, last), self._newest.get(kind)
        if index is not None and begun - last < MERGE_SECONDS:
            self._spans[index] = Span(kind, self._spans[index].started, ended + self._offset)
        else:
            self._newest[kind] = len(self._spans)
            self._spans.append(Span(kind, begun + self._offset, ended + self._offset))
        self._seconds[kind], self._ended[kind] = ended - started, ended
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
            self._shown = under_way.kind if under_way is not None else None
        self._spans, self._newest, self._num_tokens = [], {}, 0
        self._reported = time.monotonic()
