"""`trace.json`: what each worker did when, in Chrome's trace format (ui.perfetto.dev opens it).

    process 0            controller: iterations, evaluations, groups; counters for ring and reward
    process 1, 2, …      one per worker: thread 0 its own work, thread 1 rewards being scored

One JSON object per line, written as things happen. The format allows a list without its end, so the
trace of a killed run opens, too. Times are microseconds since the run began. `easyrl watch` reads
the file while it is written.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from types import NoneType
from typing import IO, Any

from easyrl import events
from easyrl.events import WORKING, Event, FromWorker
from easyrl.runtime.run_folder import finite

FILE_NAME = "trace.json"
MAX_BYTES = 16 * 2**20
"""At this size the oldest half of the file is removed, except for metadata and evaluations."""
IMPORTANT = ('"ph": "M"', '"cat": "evaluation"')
CONTROLLER = 0
WORK, REWARDS = 0, 1
EVALUATIONS = 1  # the controller's second thread: an evaluation may take place inside an iteration
Line = dict[str, Any]
CATEGORIES: Mapping[type[Event], tuple[str, str]] = {
    events.IterationStarted: ("iteration", "B"),
    events.IterationFinished: ("iteration", "E"),
    events.EvaluationStarted: ("evaluation", "B"),
    events.Evaluated: ("evaluation", "E"),
    events.NoEvents: ("quiet", "i"),
    events.SavingModel: ("saving", "B"),
    events.RunFinished: ("saving", "E"),
}
"""How an event of the controller is written: its category, and begin, end or instant."""


class TraceWriter:
    """An observer that writes the trace."""

    def __init__(self) -> None:
        self._file: IO[str] | None = None
        self._started = 0.0  # when the run's first command began
        self._processes: dict[str, int] = {}
        self._starting: set[int] = set()  # processes with a step of their start under way
        self._num_in_ring = self._num_answered = 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, events.RunStarted):
            self._open(event)
        elif self._file is not None:
            self._write(self._lines(event))
            if isinstance(event, events.RunEnded):
                end = _name("process", CONTROLLER, "controller", **asdict(event))
                self._file.write(json.dumps(end) + "\n]\n")  # the list is complete: no comma
                self._file.close()
                self._file = None

    def _open(self, run: events.RunStarted) -> None:
        """Start the trace; a resumed run appends to it, on the same time axis."""
        path = run.folder / FILE_NAME
        started = time.time() - (time.monotonic() - run.started)  # Unix seconds
        earlier = 0.0
        try:
            first = json.loads(path.read_text().split("\n", 2)[1].rstrip(","))
            earlier = max(0.0, started - first["args"]["started_unix_seconds"])
            _shorten(path, MAX_BYTES)
        except (OSError, LookupError, ValueError):  # a new run
            path.write_text("[\n")
        self._file = path.open("a")
        self._started = run.started - earlier
        self._processes = {worker: number for number, worker in enumerate(run.devices, start=1)}
        details: Line = {
            "started_unix_seconds": started - earlier,
            "earlier_seconds": earlier,
            "devices": dict(run.devices),
            "description": run.description,
        }
        lines = [_name("process", CONTROLLER, "controller", **details)]
        lines.append(_name("thread", CONTROLLER, "evaluations", EVALUATIONS))
        for worker, process in self._processes.items():
            lines.append(_name("process", process, f"{worker} ({run.devices[worker]})"))
            lines.append(_name("thread", process, "work", WORK))
            lines.append(_name("thread", process, "rewards", REWARDS))
        self._write(lines)

    def _write(self, lines: Iterable[Line]) -> None:
        assert self._file is not None
        text = "".join(json.dumps(line) + ",\n" for line in lines)
        if self._file.tell() + len(text) > MAX_BYTES:
            self._file.close()
            path = Path(self._file.name)
            _shorten(path, MAX_BYTES // 2)
            self._file = path.open("a")
        self._file.write(text)
        self._file.flush()

    def _lines(self, event: Any) -> Iterator[Line]:
        match event:
            case FromWorker(worker, time_, worker_event):
                process = self._processes.get(worker, CONTROLLER)
                yield from self._worker_lines(process, time_, worker_event)
            case events.Note():
                yield self._line("i", "note", time.monotonic(), event)
            case _ if type(event) in CATEGORIES:
                category, ph = CATEGORIES[type(event)]
                thread = EVALUATIONS if category == "evaluation" else WORK
                yield self._line(ph, category, event.time, event, tid=thread)
        match event:
            case events.IterationFinished(time_, metrics):
                yield self._line("C", "reward", time_, {"reward": metrics["reward"]})
            case events.EvaluationStarted():
                self._num_answered = 0

    def _worker_lines(self, process: int, time_: float, event: Any) -> Iterator[Line]:
        match event:
            case events.Starting() | events.Ready():
                ready = {"ready": isinstance(event, events.Ready)}
                if process in self._starting:
                    yield self._line("E", "start-up", time_, ready, pid=process)
                self._starting.discard(process)
                if isinstance(event, events.Starting):
                    self._starting.add(process)
                    yield self._line("B", "start-up", time_, {}, pid=process, name=event.what)
            case events.Activity(spans, num_tokens, num_groups, under_way):
                # The counts are written with the newest span that can have produced them.
                counts = {"tokens": num_tokens, "groups": num_groups}
                owner = max(spans, key=lambda s: (s.kind in WORKING, s.ended), default=None)
                for span in spans:
                    args = counts if span is owner else {}
                    line = self._line("X", "activity", span.started, args, pid=process)
                    line |= {"name": span.kind, "tid": REWARDS if span.kind == "score" else WORK}
                    yield line | {"dur": self._microseconds(span.ended) - line["ts"]}
                if num_groups:
                    yield self._count_ring(spans[-1].ended, -num_groups)
                if under_way is not None:
                    kind = {"kind": under_way.kind}
                    yield self._line("i", "under way", under_way.started, kind, pid=process)
            case events.GroupScored(iteration, _, prompt_index, is_rejected=is_rejected):
                details = {
                    "iteration": iteration,
                    "prompt_index": prompt_index,
                    "mean_reward": sum(event.rewards) / max(1, len(event.rewards)),
                    "num_tokens": sum(event.completion_lengths),
                    "is_rejected": is_rejected,
                }
                yield self._line("i", "group", time_, details)
                if not is_rejected:
                    yield self._count_ring(time_, +1)
            case events.PromptEvaluated():
                self._num_answered += 1
                yield self._line("C", "held-out answers", time_, {"answers": self._num_answered})
            case events.CheckpointSaved(error=""):
                yield self._line("i", "checkpoint", time_, event)

    def _count_ring(self, time_: float, change: int) -> Line:
        self._num_in_ring += change
        return self._line("C", "groups in the ring", time_, {"groups": self._num_in_ring})

    def _line(self, ph: str, category: str, time_: float, details: Any, **more: Any) -> Line:
        """`details`: a mapping, or an event, of which all plain values but the time are written;
        `more`: where the line differs from one of the controller's own work."""
        args = details if isinstance(details, dict) else asdict(details)
        plain = (float, int, str, NoneType)
        return {
            "ph": ph,
            "name": category,
            "ts": self._microseconds(time_),
            "pid": CONTROLLER,
            "tid": WORK,
            "cat": category,
            "args": finite({k: v for k, v in args.items() if k != "time" and isinstance(v, plain)}),
            **more,
        }

    def _microseconds(self, time_: float) -> int:
        return round((time_ - self._started) * 1e6)


def _shorten(path: Path, max_bytes: int) -> None:
    """Keep a trace's newest lines up to `max_bytes` and, of the older ones, the important ones, as
    a list without its end. Published by one rename."""
    lines = [line.rstrip(",") + ",\n" for line in path.read_text().split("\n")[1:-1]]
    lines = [line for line in lines if line.endswith("},\n")]
    sizes = accumulate(map(len, reversed(lines)))
    first = len(lines) - sum(size < max_bytes for size in sizes)
    important = [line for line in lines[:first] if any(text in line for text in IMPORTANT)]
    new = path.with_name(path.name + ".unfinished")
    new.write_text("[\n" + "".join(important + lines[first:]))
    new.rename(path)


def _name(what: str, process: int, name: str, thread: int = WORK, **details: Any) -> Line:
    args = {"name": name, **details}
    return {"ph": "M", "name": f"{what}_name", "pid": process, "tid": thread, "args": args}
