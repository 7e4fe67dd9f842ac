"""What a worker did when, told to the controller a few times a second.

Spans of one kind that follow each other become one, so that thousands of engine steps are a few
messages. A span is told at its end; that it has begun is told as well where it may last, so that
nobody has to guess what a silent worker does: of every wait and exchange of weights, and of work
whose last piece was long. What is told goes to the live view's lanes and to `trace.json`; nothing
that is trained depends on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from easyrl.events import Activity, Span, SpanKind, UnderWay

REPORT_SECONDS = 0.25
MERGE_SECONDS = 0.002
"""Spans of one kind with a smaller gap between them are one."""


class Timeline:
    def __init__(self, send: Callable[[Activity], None]) -> None:
        self._send = send
        self._spans: list[Span] = []
        self._newest: dict[SpanKind, int] = {}  # of each kind, its place in _spans
        self._seconds: dict[SpanKind, float] = {}  # of each kind, how long the last piece took
        self._past: dict[SpanKind, float] = {}  # of each kind, where the span before that ended
        self._num_tokens = 0
        self._num_groups = 0
        self._reported = time.monotonic()

    def begin(self, kind: SpanKind) -> float:
        """A piece of work begins; returns when, for `add`. The first of its kind may be long."""
        started = time.monotonic()
        if self._seconds.get(kind, REPORT_SECONDS) >= REPORT_SECONDS:
            self.report(UnderWay(kind, started))
        return started

    def add(
        self,
        kind: SpanKind,
        started: float,
        *,
        num_tokens: int = 0,
        num_groups: int = 0,
    ) -> float:
        """Note what ended just now; returns how many seconds it took.

        `started` as `time.monotonic` tells it, which all processes of a machine share;
        `num_tokens` that were generated or trained, `num_groups` that left the ring.
        """
        ended = time.monotonic()
        self._note(kind, started, ended)
        self._seconds[kind] = ended - started
        self._num_tokens += num_tokens
        self._num_groups += num_groups
        if ended - self._reported >= REPORT_SECONDS:
            self.report()
        return ended - started

    def _note(self, kind: SpanKind, started: float, ended: float) -> None:
        """Spans of one kind never overlap: of calls under way at once, the time is told once."""
        started = max(started, self._past.get(kind, started))
        place = self._newest.get(kind)
        if place is not None:
            newest = self._spans[place]
            if started - newest.ended < MERGE_SECONDS:
                self._spans[place] = Span(kind, min(started, newest.started), ended)
                return
            self._past[kind] = newest.ended
        self._newest[kind] = len(self._spans)
        self._spans.append(Span(kind, started, ended))

    @contextmanager
    def measure(self, kind: SpanKind, *, shown_as: SpanKind | None = None) -> Iterator[None]:
        """What is done inside is a span, and under way (as `shown_as`) until it ends."""
        started = time.monotonic()
        self.report(UnderWay(shown_as or kind, started))
        try:
            yield
        finally:
            self.add(kind, started)

    def report(self, under_way: UnderWay | None = None) -> None:
        """Tell what is not told yet, and what begins now."""
        if self._spans or self._num_groups or under_way is not None:
            for kind, place in self._newest.items():
                self._past[kind] = self._spans[place].ended
            self._send(Activity(tuple(self._spans), self._num_tokens, self._num_groups, under_way))
        self._spans, self._newest, self._num_tokens, self._num_groups = [], {}, 0, 0
        self._reported = time.monotonic()
