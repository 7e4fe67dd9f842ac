"""Reports of what workers do."""

from __future__ import annotations

from itertools import pairwise

import pytest

from easyrl.events import Activity, UnderWay
from easyrl.workers import timeline
from easyrl.workers.timeline import Timeline


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(timeline.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_adjacent_spans_of_one_kind_are_merged(clock: Clock) -> None:
    """Concurrent scoring does not split generation."""
    reports: list[Activity] = []
    line = Timeline(reports.append)
    for seconds in (0.01, 0.02, 0.03):
        started = clock.now
        clock.now += seconds
        assert line.add("generate", started) == pytest.approx(seconds)
        line.add("score", 100.0)
    clock.now += 0.05  # a gap
    started = clock.now
    clock.now += 0.01
    line.add("generate", started, num_groups=2)
    line.report()
    (activity,) = reports
    assert [(s.kind, s.started, s.ended) for s in activity.spans] == [
        ("generate", 100.0, pytest.approx(100.06)),
        ("score", 100.0, pytest.approx(100.06)),
        ("generate", pytest.approx(100.11), pytest.approx(100.12)),
    ]
    assert activity.num_groups == 2


def test_reports_a_few_times_a_second(clock: Clock) -> None:
    reports: list[Activity] = []
    line = Timeline(reports.append)
    for _ in range(1000):  # 5 seconds
        started = clock.now
        clock.now += 0.005
        line.add("train", started)
    assert 15 <= len(reports) <= 20
    line.report()
    line.report()  # nothing new, no report
    assert len(reports) <= 21


def test_spans_of_one_kind_never_overlap(clock: Clock) -> None:
    """Concurrent calls, answered in any order: Chrome's format allows no overlap in a row."""
    reports: list[Activity] = []
    line = Timeline(reports.append)
    sent = [100.0, 100.1, 100.2, 100.9, 100.3]
    for answered, began in zip((100.5, 101.0, 101.0005, 101.6, 102.4), sent, strict=True):
        clock.now = answered
        assert line.add("score", began) == pytest.approx(answered - began)
    line.report()
    spans = [span for activity in reports for span in activity.spans]
    for before, after in pairwise(spans):
        assert before.started < before.ended <= after.started < after.ended
    assert (spans[0].started, spans[-1].ended) == (100.0, 102.4)


def test_long_work_is_reported_when_it_begins_and_quick_work_is_not(clock: Clock) -> None:
    reports: list[Activity] = []
    line = Timeline(reports.append)

    def work(seconds: float) -> UnderWay | None:
        reports.clear()
        started = line.begin("train")
        begun = reports[-1].under_way if reports else None
        clock.now += seconds
        line.add("train", started)
        return begun

    assert work(0.01) == UnderWay("train", 100.0)  # the first
    assert work(0.01) is None
    assert work(5.0) is None  # not known to be long
    assert work(5.0) == UnderWay("train", clock.now - 5.0)
    assert work(0.01) is not None
    assert work(0.01) is None
    with line.measure("wait", shown_as="score"):
        assert reports[-1].under_way == UnderWay("score", clock.now)
        assert [span.kind for span in reports[-1].spans] == ["train"]
        clock.now += 1.0
    (ended,) = reports[-1].spans
    assert (ended.kind, reports[-1].under_way) == ("wait", None)


def test_the_newest_report_never_shows_a_wait_that_has_ended(clock: Clock) -> None:
    """Otherwise a worker that hangs in quick work looks like one that waits."""
    reports: list[Activity] = []
    line = Timeline(reports.append)
    line.add("train", clock.now)
    with line.measure("wait"):
        clock.now += 0.01
    assert reports[-1].under_way == UnderWay("wait", 100.0)
    line.begin("train")
    assert reports[-1].under_way == UnderWay("train", clock.now)
