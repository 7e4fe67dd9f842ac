"""Who watches a run of `easyrl grpo`."""

from __future__ import annotations

from easyrl.config import Config
from easyrl.observe.plain_lines import PlainLines
from easyrl.observe.trace import TraceWriter
from easyrl.observe.trackers import start_trackers
from easyrl.records import Observer


def make_observers(config: Config) -> list[Observer]:
    """Raises ValueError where one that the config asks for cannot be had."""
    # Trackers first: one that cannot start is told of before anything else is shown.
    return [*start_trackers(config), TraceWriter(), PlainLines()]
