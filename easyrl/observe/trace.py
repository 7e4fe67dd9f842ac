"""`trace.json`: what each worker did when, in Chrome's trace format (ui.perfetto.dev opens it).

    process 0            controller: iterations, evaluations, groups; counters for ring and reward
    process 1, 2, …      one per worker: thread 0 its own work, thread 1 rewards being scored

One JSON object per line, written as things happen. The format allows a list without its end, so the
trace of a killed run opens, too. Times are microseconds since the run began. `easyrl watch` reads
the file while it is written.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import NoneType
from typing import IO, Any

from easyrl import events
from easyrl.events import WORKING, Event, FromWorker
from easyrl.runtime.run_folder import finite

FILE_NAME = "trace.json"
MAX_BYTES = 16 * 2**20
"""At this size the oldest half of the file is removed, except for metadata and evaluations."""
MAX_KEPT = 5000  # lines with metadata and evaluations that are kept of the removed part
CONTROLLER = 0
WORK, REWARDS = 0, 1
EVALUATIONS = 1  # the controller's second thread: an evaluation may take place inside an iteration
Line = dict[str, Any]
CATEGORIES: Mapping[type[Event], tuple[str, str]] = {
    events.IterationStarted: ("iteration", "B"),
    events.IterationFinished: ("iteration", "E"),
    events.RoundStarted: ("round", "i"),
    events.EvaluationStarted: ("evaluation", "B"),
    events.Evaluated: ("evaluation", "E"),
    events.NoEvents: ("quiet", "i"),
    events.Stopping: ("stopping", "i"),
    events.SavingModel: ("saving", "B"),
    events.RunFinished: ("saving", "E"),
}
"""How an event of the controller is written: its category, and begin, end or instant."""


class TraceWriter:
    """An observer that writes the trace."""

    def __init__(self) -> None:
        self._file: IO[str] | None = None
        self._size = 0
        self._started = 0.0  # when the run's first command began
        self._command_started = 0.0
        self._processes: dict[str, int] = {}
        self._starting: set[int] = set()  # processes with a step of their start under way
        self._num_in_ring = self._num_answered = 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, events.RunStarted):
            self._open(event)
        if self._file is None:
            return
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
        before = _start_of(path)
        earlier = max(0.0, started - before) if before is not None else 0.0
        self._command_started, self._started = run.started, run.started - earlier
        if before is None:
            path.write_text("[\n")
        self._shorten(path, MAX_BYTES)
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

    def _shorten(self, path: Path, max_bytes: int) -> None:
        rewrite(path, max_bytes)
        self._file, self._size = path.open("a"), path.stat().st_size

    def _write(self, lines: Iterable[Line]) -> None:
        assert self._file is not None
        text = "".join(json.dumps(line) + ",\n" for line in lines)
        if self._size + len(text) > MAX_BYTES:
            self._file.close()
            self._shorten(Path(self._file.name), MAX_BYTES // 2)
        self._file.write(text)
        self._file.flush()
        self._size += len(text)

    def _lines(self, event: Any) -> Iterator[Line]:
        match event:
            case FromWorker(worker, time_, worker_event):
                process = self._processes.get(worker, CONTROLLER)
                yield from self._worker_lines(process, time_, worker_event)
            case events.FirstRollout(seconds):
                yield self._line("i", "first rollout", self._command_started + seconds, {})
            case events.Note():
                yield self._line("i", "note", time.monotonic(), event)
            case events.NoEvents(warning=""):
                pass
            case _ if type(event) in CATEGORIES:
                category, ph = CATEGORIES[type(event)]
                line = self._line(ph, category, event.time, event)
                yield line | {"tid": EVALUATIONS if category == "evaluation" else WORK}
        if isinstance(event, events.IterationFinished):
            reward = {"reward": event.metrics["reward"]}
            yield self._line("C", "reward", event.time, reward)
        elif isinstance(event, events.EvaluationStarted):
            self._num_answered = 0

    def _worker_lines(self, process: int, time_: float, event: Any) -> Iterator[Line]:
        match event:
            case events.Starting() | events.Ready():
                if process in self._starting:
                    ready = {"ready": isinstance(event, events.Ready)}
                    yield self._line("E", "start-up", time_, ready, process)
                self._starting.discard(process)
                if isinstance(event, events.Starting):
                    self._starting.add(process)
                    yield self._line("B", "start-up", time_, {}, process) | {"name": event.what}
            case events.Activity(spans, num_tokens, num_groups, under_way):
                # The counts are written with the newest span that can have produced them.
                counts = {"tokens": num_tokens, "groups": num_groups}
                working = [n for n, span in enumerate(spans) if span.kind in WORKING]
                owner = working[-1] if working else len(spans) - 1
                for number, span in enumerate(spans):
                    args = counts if number == owner else {}
                    line = self._line("X", "activity", span.started, args, process)
                    line |= {"name": span.kind, "tid": REWARDS if span.kind == "score" else WORK}
                    yield line | {"dur": self._microseconds(span.ended) - line["ts"]}
                if num_groups:
                    yield self._count_ring(spans[-1].ended, -num_groups)
                if under_way is not None:
                    kind = {"kind": under_way.kind}
                    yield self._line("i", "under way", under_way.started, kind, process)
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
                answers = {"answers": self._num_answered}
                yield self._line("C", "held-out answers", time_, answers)
            case events.CheckpointSaved(error=""):
                yield self._line("i", "checkpoint", time_, event)

    def _count_ring(self, time_: float, change: int) -> Line:
        self._num_in_ring += change
        return self._line("C", "groups in the ring", time_, {"groups": self._num_in_ring})

    def _line(
        self, ph: str, category: str, time_: float, details: Any, process: int = CONTROLLER
    ) -> Line:
        """`details`: a mapping, or an event, of which all plain values but the time are written."""
        args = details if isinstance(details, dict) else asdict(details)
        plain = (float, int, str, NoneType)
        return {
            "ph": ph,
            "name": category,
            "ts": self._microseconds(time_),
            "pid": process,
            "tid": WORK,
            "cat": category,
            "args": finite({k: v for k, v in args.items() if k != "time" and isinstance(v, plain)}),
        }

    def _microseconds(self, time_: float) -> int:
        return round((time_ - self._started) * 1e6)


def rewrite(path: Path, max_bytes: int) -> None:
    """Keep a trace's newest lines up to `max_bytes` and, of the older ones, metadata and
    evaluations, as a list without its end. Published by one rename."""
    lines = [line.strip(b",\r\n") for line in path.read_bytes().split(b"\n")[:-1]]
    lines = [line for line in lines if line.startswith(b"{") and line.endswith(b"}")]
    size, first = 0, len(lines)
    while first > 0 and size + len(lines[first - 1]) + 2 < max_bytes:
        first -= 1
        size += len(lines[first]) + 2
    important = (b'"ph": "M"', b'"cat": "evaluation"')
    kept = [line for line in lines[:first] if any(text in line for text in important)]
    new = path.with_name(path.name + ".unfinished")
    new.write_bytes(b"[\n" + b"".join(line + b",\n" for line in [*kept[:MAX_KEPT], *lines[first:]]))
    new.rename(path)


def _start_of(file: Path) -> float | None:
    """When the run of a trace began, in Unix seconds; None if there is no such trace."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        _, first, *_ = file.read_text().split("\n", 2)
        return float(json.loads(first.rstrip(","))["args"]["started_unix_seconds"])
    return None


def _name(what: str, process: int, name: str, thread: int = WORK, **details: Any) -> Line:
    args = {"name": name, **details}
    return {"ph": "M", "name": f"{what}_name", "pid": process, "tid": thread, "args": args}
