"""`trace.json`: what each worker did when, in Chrome's trace format (ui.perfetto.dev opens it).

    process 0            controller: iterations, evaluations, groups; counters for ring and reward
    process 1, 2, …      one per worker: thread 0 its own work, thread 1 rewards being scored

One JSON object per line, written as things happen. The format allows a list without its end, so the
trace of a killed run opens, too. Times are microseconds since the run began. `easyrl watch` reads
the file while it is written. The file is bounded: at MAX_BYTES the oldest half is removed, except
for metadata and evaluations.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from easyrl import events
from easyrl.events import WORKING, Event, FromWorker
from easyrl.runtime.run_folder import finite

FILE_NAME = "trace.json"
MAX_BYTES = 16 * 2**20
MAX_KEPT = 5000
"""Lines with metadata and evaluations that are kept of the removed part."""
CONTROLLER = 0
WORK, REWARDS = 0, 1
EVALUATIONS = 1
"""The controller's second thread: an evaluation may take place inside an iteration."""
Line = dict[str, Any]


class TraceWriter:
    """An observer that writes the trace."""

    def __init__(self) -> None:
        self._file: IO[str] | None = None
        self._size = 0
        self._started = 0.0
        self._earlier = 0.0  # seconds from the run's start to this command's
        self._processes: dict[str, int] = {}
        self._begun: dict[tuple[str, int], tuple[str, float]] = {}
        """(category, process) -> (name, time) of what has begun and not ended"""
        self._num_in_ring = self._num_answered = 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, events.RunStarted):
            self._open(event)
        if self._file is None:
            return
        for line in self._lines(event):
            self._write(json.dumps(line) + ",\n")
        if isinstance(event, events.RunEnded):
            end = _name("process", CONTROLLER, "controller", **asdict(event))
            self._write(json.dumps(end) + "\n]\n")  # the list is complete: no comma
            self._file.close()
            self._file = None

    def _open(self, run: events.RunStarted) -> None:
        """Start the trace; a resumed run appends to it, on the same time axis."""
        path = run.folder / FILE_NAME
        started = time.time() - (time.monotonic() - run.started)  # Unix seconds
        before = _start_of(path)
        earlier = max(0.0, started - before) if before is not None else 0.0
        self._started, self._earlier = run.started, earlier
        if before is None:
            path.write_text("[\n")
        else:
            rewrite(path, MAX_BYTES)
        self._file, self._size = path.open("a"), path.stat().st_size
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
        self._write("".join(json.dumps(line) + ",\n" for line in lines))

    def _write(self, text: str) -> None:
        assert self._file is not None
        if self._size + len(text) > MAX_BYTES:
            path = Path(self._file.name)
            self._file.close()
            rewrite(path, MAX_BYTES // 2)
            self._file, self._size = path.open("a"), path.stat().st_size
        self._file.write(text)
        self._file.flush()
        self._size += len(text)

    def _lines(self, event: Event) -> Iterator[Line]:
        match event:
            case FromWorker(worker, time_, worker_event):
                process = self._processes.get(worker, CONTROLLER)
                yield from self._worker_lines(process, time_, worker_event)
            case events.IterationStarted(time_):
                yield self._begin("iteration", time_, event)
            case events.RoundStarted(time_):
                yield self._instant("round", time_, event)
            case events.IterationFinished(time_, metrics):
                yield self._end("iteration", time_, {"iteration": metrics["iteration"]})
                yield self._counter("reward", time_, metrics["reward"])
            case events.EvaluationStarted(time_):
                self._num_answered = 0
                yield self._begin("evaluation", time_, event)
            case events.Evaluated(time_):
                yield self._end("evaluation", time_, event) | {"tid": EVALUATIONS}
            case events.FirstRollout(seconds):
                yield self._instant("first rollout", self._started + seconds, {})
            case events.Stopping(time_, text):
                yield self._instant("stopping", time_, {"text": text})
            case events.NoEvents(time_, text) if text:
                yield self._instant("quiet", time_, {"text": text})
            case events.Note():
                yield self._instant("note", time.monotonic(), event)
            case events.SavingModel(time_):
                yield self._begin("saving", time_, {})
            case events.RunFinished(time_):
                yield self._end("saving", time_, {})

    def _worker_lines(
        self, process: int, time_: float, event: events.WorkerEvent
    ) -> Iterator[Line]:
        match event:
            case events.Starting() | events.Ready():
                what = getattr(event, "what", "")
                if ("start-up", process) in self._begun:
                    yield self._end("start-up", time_, {}, process)
                yield self._begin("start-up", time_, {"what": what}, process, name=what)
            case events.Activity(spans, num_tokens, num_groups, under_way):
                # The counts are written with the newest span that can have produced them.
                working = [n for n, span in enumerate(spans) if span.kind in WORKING]
                owner = working[-1] if working else len(spans) - 1
                for number, span in enumerate(spans):
                    line = self._line("X", span.kind, span.started, "activity", process)
                    line["tid"] = REWARDS if span.kind == "score" else WORK
                    line["dur"] = self._microseconds(span.ended) - line["ts"]
                    if number == owner:
                        line["args"] = {"tokens": num_tokens, "groups": num_groups}
                    yield line
                if num_groups:
                    yield self._count_ring(spans[-1].ended, -num_groups)
                if under_way is not None:
                    kind = {"kind": under_way.kind}
                    yield self._instant("under way", under_way.started, kind, process)
            case events.GroupScored(iteration, _, prompt_index, is_rejected=is_rejected):
                details = {
                    "iteration": iteration,
                    "prompt_index": prompt_index,
                    "mean_reward": sum(event.rewards) / max(1, len(event.rewards)),
                    "num_tokens": sum(event.completion_lengths),
                    "is_rejected": is_rejected,
                }
                yield self._instant("group", time_, details)
                if not is_rejected:
                    yield self._count_ring(time_, +1)
            case events.PromptEvaluated():
                self._num_answered += 1
                yield self._counter("held-out answers", time_, self._num_answered)
            case events.CheckpointSaved(error=""):
                yield self._instant("checkpoint", time_, event)

    def _count_ring(self, time_: float, change: int) -> Line:
        self._num_in_ring += change
        return self._counter("groups in the ring", time_, self._num_in_ring)

    def _begin(
        self, category: str, time_: float, details: Any, process: int = CONTROLLER, name: str = ""
    ) -> Line:
        """An instant, so that `easyrl watch` sees the begin; `_end` writes the span."""
        self._begun[category, process] = name or category, time_
        return self._instant(category, time_, details, process)

    def _end(self, category: str, time_: float, details: Any, process: int = CONTROLLER) -> Line:
        name, began = self._begun.pop((category, process), (category, time_))
        line = self._line("X", name, began, category, process)
        line["dur"] = self._microseconds(time_) - line["ts"]
        return line | {"args": _args(details)}

    def _instant(
        self, category: str, time_: float, details: Any, process: int = CONTROLLER
    ) -> Line:
        line = self._line("i", category, time_, category, process)
        return line | {"s": "t", "args": _args(details)}

    def _counter(self, name: str, time_: float, value: float) -> Line:
        return self._line("C", name, time_, "counter", CONTROLLER) | {"args": _args({name: value})}

    def _line(self, ph: str, name: str, time_: float, category: str, process: int) -> Line:
        line: Line = {"ph": ph, "name": name, "ts": self._microseconds(time_)}
        return line | {"pid": process, "tid": WORK, "cat": category}

    def _microseconds(self, time_: float) -> int:
        return round((time_ - self._started + self._earlier) * 1e6)


def _args(details: Any) -> Line:
    """The details of a line: a mapping, or an event, of which all fields but the time count."""
    args = details if isinstance(details, dict) else asdict(details)
    return finite({name: value for name, value in args.items() if name != "time"})


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
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        with file.open() as lines:
            lines.readline()
            first = json.loads(lines.readline().rstrip(",\n"))
        return float(first["args"]["started_unix_seconds"])
    return None


def _name(what: str, process: int, name: str, thread: int = WORK, **details: Any) -> Line:
    args = {"name": name, **details}
    return {"ph": "M", "name": f"{what}_name", "pid": process, "tid": thread, "args": args}
