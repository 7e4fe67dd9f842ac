"""`trace.json`: the events of a run in Chrome's format (docs/watching.md, "Trace").

    a run's events ──TraceWriter──► trace.json ──RunFiles──► events ──► the same views as in the run

A line of the file is `{"ph": …, "name": …, "ts": …, "pid": …, "tid": …, "args": …}`: its kind, what
it is about, when it happened (in Unix microseconds), and in which process and thread. Process 0 is
the controller, and every worker is a process with three threads. Only `args` is read back: it has
the event, with times of its own clock. Names and spans are for the picture.
"""

import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from easyrl import events
from easyrl.events import Event, FromWorker, Message
from easyrl.observe.text import safe
from easyrl.runtime.run_folder import replace_file, write_whole

FILE_NAME = "trace.json"
MAX_BYTES = 16 * 2**20
MAX_TEXT = 2000  # characters of a prompt, a completion or an error
CONTROLLER = 0
THREADS = ("work", "rewards", "events")
"""Threads of a worker, by their numbers."""
WORK = 0
REWARDS = 1
EVENTS = 2
MICROSECONDS = 1e6  # in a second
# Kinds of lines (`ph`).
NAME = "M"
BEGIN = "B"
END = "E"
SPAN = "X"
INSTANT = "i"
Line = dict[str, Any]
SPANS: Mapping[type[Message], tuple[str, str]] = {
    events.IterationStarted: ("iteration", BEGIN),
    events.IterationFinished: ("iteration", END),
    events.EvaluationStarted: ("evaluation", BEGIN),
    events.Evaluated: ("evaluation", END),
    events.SavingModel: ("saving", BEGIN),
    events.RunFinished: ("saving", END),
}
"""Event -> name and kind of its line. Other events are instants."""
LARGE = {
    "folder",
    "spec",
    "settings",
    "earlier",
    "rewards_by_function",
    "columns",
    "samples",
    "pictures",
    "raw",
}
"""Fields that are null in the file: they are large, or in other files."""
FIRST = "first_iteration"
"""In RunStarted: the number of a run's first iteration. Version 0.2 counted from 0 and lacks it."""
NAMES = ('"ph": "M"', '"type": "RunStarted"', '"type": "Worker')
"""Parts of the lines without which later ones cannot be read."""
RESULTS = ('"type": "IterationFinished"', '"type": "Evaluated"', '"type": "Note"')
"""Parts of the lines that are kept longer than others."""


def encode(value: Any) -> Any:
    """Return a message as JSON: its type, and fields that differ from the default, with long texts
    shortened."""
    match value:
        case Message():
            kind = type(value)
            fields: dict[str, Any] = {"type": kind.__name__}
            for name, field in vars(value).items():
                if field != getattr(kind, name, ...):  # a class has the defaults as attributes
                    fields[name] = None if name in LARGE else encode(field)
            if isinstance(value, events.RunStarted):
                fields[FIRST] = 1
            return fields
        case Mapping():
            return {key: encode(item) for key, item in value.items()}
        case list() | tuple():
            return [encode(item) for item in value]
        case str():
            return safe(value, MAX_TEXT)
        case float() if not math.isfinite(value):
            return None
    return value


def decode(fields: dict[str, Any]) -> Any:
    """Turn an encoded message back into a message; return other mappings as they are. Raises
    TypeError for a message of another version."""
    kind = getattr(events, str(fields.get("type")), None)
    if kind is None:
        return fields
    values = {name: value for name, value in fields.items() if name not in ("type", FIRST)}
    if kind is events.RunStarted and "config" in values:  # written before runs had a spec
        del values["config"]
        values |= {"spec": None, "settings": None}
    return kind(**values)


class TraceWriter:
    """An observer that writes the trace of a run."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._clock = 0.0  # Unix seconds at the zero of the events' clock
        self._processes: dict[str, int] = {}  # by worker: number of its process

    def __call__(self, event: Event) -> None:
        if isinstance(event, events.RunStarted):
            self._path = event.folder / FILE_NAME
            self._path.touch()
            _shorten(self._path, MAX_BYTES)  # begins it, or cuts off an incomplete last line
            self._clock = time.time() - time.monotonic()
            self._processes = {}
        if self._path is None:
            return
        lines = map(json.dumps, self._lines(event))
        text = "".join(f"{line},\n" for line in lines).encode()
        if self._path.stat().st_size + len(text) > MAX_BYTES:
            _shorten(self._path, MAX_BYTES // 2)
        with self._path.open("ab", buffering=0) as file:
            write_whole(file, text)

    def _lines(self, event: Event) -> Iterator[Line]:
        match event:
            case events.RunStarted(devices=devices):
                yield self._line(NAME, "process_name", event.started, {"name": "controller"})
                for worker, device in devices.items():
                    yield from self._names(worker, device)
            case events.WorkerSpawned(worker=worker, device=device):
                yield from self._names(worker, device)
            case FromWorker(worker=worker):
                yield from self._worker_lines(event, self._processes.get(worker, CONTROLLER))
                return
        class_name = type(event).__name__
        name, kind = SPANS.get(type(event), (class_name, INSTANT))
        yield self._line(kind, name, _time_of(event), encode(event))

    def _names(self, worker: str, device: str) -> Iterator[Line]:
        """Yield the lines that name a worker's process and its threads."""
        new = len(self._processes) + 1
        process = self._processes.setdefault(worker, new)
        now = time.monotonic()
        name = {"name": f"{worker} ({device})"}
        yield self._line(NAME, "process_name", now, name, pid=process)
        for thread, what in enumerate(THREADS):
            name = {"name": what}
            yield self._line(NAME, "thread_name", now, name, pid=process, tid=thread)

    def _worker_lines(self, event: FromWorker, process: int) -> Iterator[Line]:
        if isinstance(event.event, events.Activity):
            for span in event.event.spans:
                thread = REWARDS if span.kind == "score" else WORK
                line = self._line(SPAN, span.kind, span.started, {}, pid=process, tid=thread)
                seconds = span.ended - span.started
                line["dur"] = round(seconds * MICROSECONDS)
                yield line
        name = type(event.event).__name__
        args = encode(event)
        yield self._line(INSTANT, name, event.time, args, pid=process, tid=EVENTS)

    def _line(
        self,
        kind: str,
        name: str,
        when: float,
        args: Line,
        *,
        pid: int = CONTROLLER,
        tid: int = WORK,
    ) -> Line:
        """Return a line. `when`: in seconds of the events' clock."""
        return {
            "ph": kind,
            "name": name,
            "ts": round((when + self._clock) * MICROSECONDS),
            "pid": pid,
            "tid": tid,
            "args": args,
        }


def _time_of(event: Event) -> float:
    """Return when an event happened; of one that does not say it, now."""
    for name in ("time", "started"):
        if hasattr(event, name):
            return float(getattr(event, name))
    return time.monotonic()


def _shorten(path: Path, max_bytes: int) -> None:
    """Shorten the trace to names, RunStarted and the newest lines, `max_bytes` in all. Older
    iterations, evaluations and notes may take half as much again. Published by one rename."""
    kept: list[str] = []
    num_bytes = 0
    lines = path.read_text(errors="replace").splitlines(keepends=True)
    for line in reversed(lines):
        limit: float = max_bytes
        if any(text in line for text in NAMES):
            limit = math.inf
        elif any(text in line for text in RESULTS):
            limit = 1.5 * max_bytes
        if line.endswith("},\n") and num_bytes + len(line) <= limit:
            kept.append(line)
            num_bytes += len(line)
    replace_file(path, "[\n" + "".join(reversed(kept)))
