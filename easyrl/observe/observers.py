"""Who watches a run of `easyrl grpo`."""

from __future__ import annotations

from easyrl.config import Config
from easyrl.observe.guard import Guard
from easyrl.observe.live_view import LiveView
from easyrl.observe.plain_lines import PlainLines
from easyrl.observe.screen import is_fit_for_pictures
from easyrl.observe.trace import TraceWriter
from easyrl.observe.trackers import Trackers
from easyrl.records import Observer


def make_observers(config: Config, *, live: bool = True) -> list[Observer]:
    """The live view where it is wanted and standard output is a terminal, else plain lines.

    Raises ValueError where an observer that the config asks for cannot be had.
    """
    trackers: list[Observer] = [Trackers(config)] if config.output.log_to else []
    # What is shown comes last: where another one cannot begin, the terminal is still untouched.
    is_live = live and is_fit_for_pictures()
    shown = Guard(LiveView(), instead=PlainLines()) if is_live else Guard(PlainLines())
    return [*trackers, Guard(TraceWriter()), shown]
