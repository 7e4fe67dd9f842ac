"""`trace.json`: what each worker did when, in Chrome's trace format (ui.perfetto.dev opens it).

One event a line, written as things happen; the format allows a list without its end, so a run that
is cut off leaves a trace that opens. Times are microseconds since the command began. `read_trace`
turns the lines back into the records they came from: `easyrl watch` lives on them.

    process 0            controller: iterations, evaluations; counters for ring and reward
    process 1, 2, …      a worker each: thread 0 its own work, thread 1 its rewards
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from easyrl import records
from easyrl.events import Activity, Span
from easyrl.records import Record

FILE_NAME = "trace.json"
CONTROLLER = 0
WORK, REWARDS = 0, 1
ACTIVITY, START_UP, PHASE = "activity", "start-up", "phase"  # categories of spans
Event = dict[str, Any]


class TraceWriter:
    def __init__(self) -> None:
        self._file: IO[str] | None = None
        self._started = 0.0
        self._processes: dict[str, int] = {}
        self._starting: dict[str, records.WorkerStarting] = {}
        self._phase_started = 0.0
        self._num_in_ring = 0

    def __call__(self, record: Record) -> None:
        events = list(self._events(record))
        if self._file is not None and events:
            self._file.write("".join(json.dumps(event) + ",\n" for event in events))
            self._file.flush()
        if isinstance(record, records.RunEnded):
            self._close()

    def _events(self, record: Record) -> Iterator[Event]:
        match record:
            case records.RunStarted():
                yield from self._open(record)
            case records.WorkerStarting():
                yield from self._end_start_up(record.worker, record.time)
                self._starting[record.worker] = record
            case records.WorkerReady(now, worker):
                yield from self._end_start_up(worker, now)
            case records.WorkerActive(worker, activity):
                yield from self._activity(self._processes[worker], activity)
            case records.GroupArrived(now):
                yield self._count_ring(now, +1)
            case records.IterationStarted(now) | records.EvaluationStarted(now):
                self._phase_started = now
            case records.Evaluated(now, round_, accuracy, num_prompts):
                details = {"round": round_, "accuracy": accuracy, "num_prompts": num_prompts}
                yield self._span("evaluation", PHASE, self._phase_started, now, details)
            case records.IterationFinished(now, metrics):
                number = metrics["iteration"]
                yield self._span(f"iteration {number}", PHASE, self._phase_started, now)
                yield self._event("C", "reward", now, args={"reward": metrics["reward"]})

    def _open(self, run: records.RunStarted) -> Iterator[Event]:
        self._started = run.started
        self._file = (run.folder / FILE_NAME).open("w")
        self._file.write("[\n")
        age = time.monotonic() - run.started
        yield _name("process", CONTROLLER, "controller", started_unix_seconds=time.time() - age)
        for number, (worker, device) in enumerate(run.devices.items(), start=1):
            self._processes[worker] = number
            yield _name("process", number, f"{worker} ({device})", worker=worker, device=device)
            yield _name("thread", number, "work", WORK)
            if worker.startswith("rollout"):
                yield _name("thread", number, "rewards", REWARDS)

    def _end_start_up(self, worker: str, now: float) -> Iterator[Event]:
        if (begun := self._starting.pop(worker, None)) is not None:
            process = self._processes[worker]
            yield self._span(begun.what, START_UP, begun.time, now, process=process)

    def _activity(self, process: int, activity: Activity) -> Iterator[Event]:
        for number, span in enumerate(activity.spans):
            is_last = number == len(activity.spans) - 1
            details = {"tokens": activity.num_tokens, "groups": activity.num_groups}
            yield self._span(
                span.kind,
                ACTIVITY,
                span.started,
                span.ended,
                details if is_last else None,
                process=process,
                thread=REWARDS if span.kind == "score" else WORK,
            )
        if activity.num_groups:
            yield self._count_ring(time.monotonic(), -activity.num_groups)

    def _count_ring(self, now: float, change: int) -> Event:
        self._num_in_ring += change
        return self._event("C", "groups in the ring", now, args={"groups": self._num_in_ring})

    def _span(
        self,
        name: str,
        category: str,
        started: float,
        ended: float,
        details: Event | None = None,
        *,
        process: int = CONTROLLER,
        thread: int = WORK,
    ) -> Event:
        event = self._event("X", name, started, pid=process, tid=thread, cat=category)
        event["dur"] = self._microseconds(ended) - event["ts"]
        return event | ({"args": details} if details else {})

    def _event(self, kind: str, name: str, now: float, **more: Any) -> Event:
        place = {"pid": CONTROLLER, "tid": WORK}
        return {"ph": kind, "name": name, "ts": self._microseconds(now), **place, **more}

    def _microseconds(self, now: float) -> int:
        return round((now - self._started) * 1e6)

    def _close(self) -> None:
        if self._file is not None:
            end = _name("process", CONTROLLER, "controller")  # no comma may stand before the end
            self._file.write(json.dumps(end) + "\n]\n")
            self._file.close()
            self._file = None


def _name(what: str, process: int, name: str, thread: int = WORK, **details: Any) -> Event:
    args = {"name": name, **details}
    return {"ph": "M", "name": f"{what}_name", "pid": process, "tid": thread, "args": args}


def read_events(file: Path) -> Iterator[Event]:
    """The events of a trace, a run's that goes on included."""
    for line in file.read_text().splitlines():
        if line.startswith("{") and line.rstrip(",").endswith("}"):
            yield json.loads(line.rstrip(","))


def activity_records(events: Iterable[Event], started: float) -> Iterator[Record]:
    """The records of workers' activity, with `started` as the beginning of time."""
    workers: dict[int, str] = {}
    for event in events:
        match event:
            case {"ph": "M", "name": "process_name", "args": {"worker": worker}, "pid": process}:
                workers[process] = worker
            case {"ph": "X", "cat": "activity", "name": kind, "ts": ts, "dur": duration}:
                begun = started + ts / 1e6
                details = event.get("args", {})
                yield records.WorkerActive(
                    workers[event["pid"]],
                    Activity(
                        (Span(kind, begun, begun + duration / 1e6),),
                        details.get("tokens", 0),
                        details.get("groups", 0),
                    ),
                )
