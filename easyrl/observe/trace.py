"""`trace.json`: the events of a run in Chrome's format (docs/watching.md, "Trace").

    a run's events ──TraceWriter──► trace.json ──RunFiles──► events ──► the same views as in the run

Process 0 is the controller. Names and spans are for the picture only. Times are Unix microseconds;
those inside of an event (`args`) are its own.
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
WORK, REWARDS, EVENTS = range(3)  # threads of a worker
Line = dict[str, Any]
SPANS: Mapping[type[Message], tuple[str, str]] = {
    events.IterationStarted: ("iteration", "B"),
    events.IterationFinished: ("iteration", "E"),
    events.EvaluationStarted: ("evaluation", "B"),
    events.Evaluated: ("evaluation", "E"),
    events.SavingModel: ("saving", "B"),
    events.RunFinished: ("saving", "E"),
}
"""Begin and end of the controller's spans. Other events are instants."""
LARGE = [
    *("folder", "spec", "settings", "earlier"),
    *("rewards_by_function", "columns", "samples", "raw"),
]
"""Fields that are null in the file: they are large, or in other files."""
FIRST = "first_iteration"
"""In RunStarted: the number of a run's first iteration. Version 0.2 counted from 0 and lacks it."""
NAMES = ('"ph": "M"', '"type": "RunStarted"', '"type": "Worker')
"""Parts of the lines without which later ones cannot be read."""
RESULTS = ('"type": "IterationFinished"', '"type": "Evaluated"', '"type": "Note"')
"""Parts of the lines that are kept longer than others."""


def encode(value: Any) -> Any:
    """Return a message as JSON: type, and fields that differ from the default; texts shortened."""
    match value:
        case Message():
            kind = type(value)
            fields = {k: v for k, v in vars(value).items() if v != getattr(kind, k, ...)}
            fields |= {key: None for key in LARGE if key in fields}
            fields |= {FIRST: 1} if isinstance(value, events.RunStarted) else {}
            return {"type": kind.__name__, **encode(fields)}
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
    """Turn an encoded message back into a message. Raises TypeError for one of another version."""
    kind = getattr(events, str(fields.get("type")), None)
    if kind is None:
        return fields
    values = {name: value for name, value in fields.items() if name not in ("type", FIRST)}
    if kind is events.RunStarted and "config" in values:  # written before runs had a spec
        del values["config"]
        values |= {"spec": None, "settings": None}
    return kind(**values)


class TraceWriter:
    def __init__(self) -> None:
        self._path: Path | None = None
        self._clock = 0.0  # Unix seconds at the zero of the events' clock
        self._processes: dict[str, int] = {}

    def __call__(self, event: Event) -> None:
        if isinstance(event, events.RunStarted):
            self._path = event.folder / FILE_NAME
            self._path.touch()
            _shorten(self._path, MAX_BYTES)  # begins it, or cuts off an incomplete last line
            self._clock = time.time() - time.monotonic()
            self._processes = {}
        if self._path is None:
            return
        text = "".join(json.dumps(line) + ",\n" for line in self._lines(event)).encode()
        if self._path.stat().st_size + len(text) > MAX_BYTES:
            _shorten(self._path, MAX_BYTES // 2)
        with self._path.open("ab", buffering=0) as file:
            write_whole(file, text)

    def _lines(self, event: Event) -> Iterator[Line]:
        match event:
            case events.RunStarted(devices=devices):
                yield self._line("M", "process_name", event.started, {"name": "controller"})
                for worker, device in devices.items():
                    yield from self._names(worker, device)
            case events.WorkerSpawned(worker=worker, device=device):
                yield from self._names(worker, device)
            case FromWorker(worker=worker):
                yield from self._worker_lines(event, self._processes.get(worker, CONTROLLER))
                return
        name, ph = SPANS.get(type(event), (type(event).__name__, "i"))
        time_ = getattr(event, "time", getattr(event, "started", time.monotonic()))
        yield self._line(ph, name, time_, encode(event))

    def _names(self, worker: str, device: str) -> Iterator[Line]:
        process = self._processes.setdefault(worker, len(self._processes) + 1)
        now, name = time.monotonic(), {"name": f"{worker} ({device})"}
        yield self._line("M", "process_name", now, name, pid=process)
        for thread, what in enumerate(("work", "rewards", "events")):
            yield self._line("M", "thread_name", now, {"name": what}, pid=process, tid=thread)

    def _worker_lines(self, event: FromWorker, process: int) -> Iterator[Line]:
        match event.event:
            case events.Activity(spans):
                for span in spans:
                    thread = REWARDS if span.kind == "score" else WORK
                    duration = round((span.ended - span.started) * 1e6)
                    more = {"pid": process, "tid": thread, "dur": duration}
                    yield self._line("X", span.kind, span.started, {}, **more)
        name = type(event.event).__name__
        yield self._line("i", name, event.time, encode(event), pid=process, tid=EVENTS)

    def _line(self, ph: str, name: str, time_: float, args: Line, **more: int) -> Line:
        ts = round((time_ + self._clock) * 1e6)
        line = {"ph": ph, "name": name, "ts": ts, "pid": CONTROLLER, "tid": WORK, "args": args}
        return line | more


def _shorten(path: Path, max_bytes: int) -> None:
    """Shorten the trace to names, RunStarted and the newest lines, `max_bytes` in all. Older
    iterations, evaluations and notes may take half as much again. Published by one rename."""
    kept: list[str] = []
    num_bytes = 0
    for line in reversed(path.read_text(errors="replace").splitlines(keepends=True)):
        is_name = any(text in line for text in NAMES)
        is_result = any(text in line for text in RESULTS)
        limit = math.inf if is_name else max_bytes * (1.5 if is_result else 1.0)
        if line.endswith("},\n") and num_bytes + len(line) <= limit:
            kept.append(line)
            num_bytes += len(line)
    replace_file(path, "[\n" + "".join(reversed(kept)))
