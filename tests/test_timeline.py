"""Reports of what workers do."""

from itertools import pairwise

import pytest

from easyrl.events import UnderWay
from easyrl.workers import timeline
from easyrl.workers.timeline import Timeline


class Line:
    """A timeline, its reports, and the time."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(timeline.time, "monotonic", lambda: self.now)
        self.reports = []
        self.timeline = Timeline(self.reports.append)

    def work(self, kind, seconds, **counts):
        started, self.now = self.now, self.now + seconds
        assert self.timeline.add(kind, started, **counts) == pytest.approx(seconds)


@pytest.fixture
def line(monkeypatch):
    return Line(monkeypatch)


def test_adjacent_spans_of_one_kind_are_merged(line):
    """Concurrent scoring does not split generation."""
    for seconds in (0.01, 0.02, 0.03):
        line.work("generate", seconds)
        line.timeline.add("score", 100.0)
    line.now += 0.05  # a gap
    line.work("generate", 0.01, num_groups=2)
    line.timeline.report()
    (activity,) = line.reports
    assert [(s.kind, s.started, s.ended) for s in activity.spans] == [
        ("generate", 100.0, pytest.approx(100.06)),
        ("score", 100.0, pytest.approx(100.06)),
        ("generate", pytest.approx(100.11), pytest.approx(100.12)),
    ]
    assert activity.num_groups == 2


def test_reports_a_few_times_a_second(line):
    for _ in range(1000):  # 5 seconds
        line.work("train", 0.005)
    assert 15 <= len(line.reports) <= 20
    line.timeline.report()
    line.timeline.report()  # nothing new, no report
    assert len(line.reports) <= 21


def test_spans_of_one_kind_never_overlap(line):
    """Concurrent calls, answered in any order: Chrome's format allows no overlap in a row."""
    sent = [100.0, 100.1, 100.2, 100.9, 100.3]
    for answered, began in zip((100.5, 101.0, 101.0005, 101.6, 102.4), sent, strict=True):
        line.now = answered
        assert line.timeline.add("score", began) == pytest.approx(answered - began)
    line.timeline.report()
    spans = [span for activity in line.reports for span in activity.spans]
    for before, after in pairwise(spans):
        assert before.started < before.ended <= after.started < after.ended
    assert (spans[0].started, spans[-1].ended) == (100.0, 102.4)


def test_long_work_is_reported_when_it_begins_and_quick_work_is_not(line):
    def begun(seconds):
        line.reports.clear()
        line.timeline.begin("train")
        shown = line.reports[-1].under_way if line.reports else None
        line.work("train", seconds)
        return shown

    assert begun(0.01) == UnderWay("train", 100.0)  # the first
    assert begun(0.01) is None
    assert begun(5.0) is None  # not known to be long
    assert begun(5.0) == UnderWay("train", line.now - 5.0)
    assert begun(0.01) is not None
    assert begun(0.01) is None
    with line.timeline.measure("wait", shown_as="score"):
        assert line.reports[-1].under_way == UnderWay("score", line.now)
        assert [span.kind for span in line.reports[-1].spans] == ["train"]
        line.now += 1.0
    (ended,) = line.reports[-1].spans
    assert (ended.kind, line.reports[-1].under_way) == ("wait", None)
    # The newest report never shows a wait that has ended: a worker that hangs in quick work would
    # look like one that waits.
    with line.timeline.measure("wait"):
        line.now += 0.01
    line.timeline.begin("train")
    assert line.reports[-1].under_way == UnderWay("train", line.now)
