"""A run's records from its folder alone, also while they are being written.

    config.yaml ────────────┐
    trace.json ─────────────┼──► RunStarted, WorkerActive, GroupArrived, …, RunEnded
    metrics.jsonl ──────────┤
    samples.jsonl ──────────┤        times are seconds since the run began
    reward_errors.jsonl ────┤
    summary.json ───────────┘

The trace leads; of the other files as much is read as belongs before it. Whatever the length of a
run, no more than a line of each is held. Only whole lines are read; what is cut off, or is no JSON,
is passed over.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from easyrl import records
from easyrl.config import Config, load_config
from easyrl.events import Activity, Span, UnderWay
from easyrl.model.checkpoint_files import CHECKPOINTS
from easyrl.observe import trace
from easyrl.observe.process_identity import is_alive
from easyrl.records import Record

TAIL_BYTES = 65536


class GrowingFile:
    """The lines of JSON that have come since last asked, one at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def read(self, is_due: Callable[[Any], bool] = lambda line: True) -> Iterator[Any]:
        """Up to the first line that is not due yet, which comes first the next time."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            file.seek(self._offset)
            for text in file:
                if not text.endswith(b"\n"):
                    return
                try:
                    line = json.loads(text.strip().rstrip(b","))
                except ValueError:  # the brackets around a trace, a line that was cut off
                    self._offset += len(text)
                    continue
                if not is_due(line):
                    return
                self._offset += len(text)
                yield line

    def last_lines(self) -> list[bytes]:
        """The last few, whole or not."""
        with self.path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return file.read().splitlines()


class RunFiles:
    def __init__(self, folder: Path) -> None:
        """Raises ValueError where that is no run folder."""
        self.folder = folder
        for name in ("config.yaml", trace.FILE_NAME):
            if not (folder / name).is_file():
                what = f"has no {name}" if folder.is_dir() else "is no folder"
                raise ValueError(
                    f"'{folder}' {what}; expected: the folder of a run, as `easyrl grpo` says it "
                    "at its start (runs/<time>-<task>)"
                )
        self.config: Config = load_config(folder / "config.yaml")
        self.seconds_of_silence = 0.0
        """How long nothing has been written."""
        self._trace = GrowingFile(folder / trace.FILE_NAME)
        self._metrics = GrowingFile(folder / "metrics.jsonl")
        self._samples = GrowingFile(folder / "samples.jsonl")
        self._errors = GrowingFile(folder / "reward_errors.jsonl")
        self._controller: Mapping[str, Any] = {}
        self._workers: dict[int, str] = {}  # by their process number in the trace
        self._iteration = self._round = 0
        self._now = 0.0  # of the newest event
        self._earlier = 0.0  # from the run's start to that of the command that went on with it

    def now(self) -> float:
        """Seconds since the run began, on the machine's wall clock."""
        return time.time() - float(self._controller["started_unix_seconds"])

    @property
    def is_alive(self) -> bool | None:
        """Whether the run's process lives; None where that cannot be seen from here."""
        return is_alive(self._controller)

    def read(self) -> Iterator[Record]:
        """The records of what has been written since last asked."""
        written = max(f.stat().st_mtime for f in (self._trace.path, self.folder / "config.yaml"))
        self.seconds_of_silence = time.time() - written
        for event in self._trace.read():
            yield from self._records(event)
        yield from self._texts()

    @property
    def is_begun(self) -> bool:
        """Whether the run's first record has been read."""
        return bool(self._controller)

    @property
    def has_ended(self) -> bool:
        """Whether the trace has its end, without reading it."""
        return any(b'"exit_code"' in line for line in self._trace.last_lines()[-3:])

    def _texts(self) -> Iterator[Record]:
        """Completions and reward errors of the iterations begun so far."""

        def is_due(line: Any) -> bool:
            return line["iteration"] is None or int(line["iteration"]) <= self._iteration

        for line in self._errors.read(is_due):
            now, index = self._now, line["prompt_index"]
            yield records.RewardFailed(now, line["iteration"], index, line["error"])
        for line in self._samples.read(is_due):
            yield records.Sampled(line)

    def _records(self, event: trace.Event) -> Iterator[Record]:
        if event["ph"] == "M":
            yield from self._metadata(event["args"])
            return
        if not self._controller:
            raise ValueError(
                f"'{self.folder}': its {trace.FILE_NAME} does not begin with the run; expected: "
                "one that was written by this version of EasyRL, as a whole"
            )
        self._now = now = event["ts"] / 1e6
        match event:
            case {"cat": trace.ACTIVITY}:
                yield self._activity(event, now)
            case {"cat": trace.UNDER_WAY, "pid": process, "args": {"kind": kind}}:
                begun = UnderWay(kind, now)
                yield records.WorkerActive(self._workers[process], Activity((), 0, 0, begun))
            case {"cat": trace.QUIET, "args": {"text": text}}:
                yield records.Quiet(now, text)
            case {"cat": trace.GROUP, "args": group}:
                yield records.GroupArrived(now, **group)
            case {"cat": trace.STOPPING, "args": {"text": text}}:
                yield records.Stopping(now, text)
            case {"cat": trace.CHECKPOINT, "args": details}:
                path = self.folder / CHECKPOINTS / details.pop("name")
                yield records.CheckpointSaved(now, path, **details)
            case {"cat": trace.START_UP, "ph": "B", "pid": process, "name": what}:
                yield records.WorkerStarting(now, self._workers[process], what)
            case {"cat": trace.START_UP, "ph": "E", "pid": process, "args": {"ready": True}}:
                yield records.WorkerReady(now, self._workers[process])
            case _:
                yield from self._phases(event, now)

    def _phases(self, event: trace.Event, now: float) -> Iterator[Record]:
        match event:
            case {"cat": trace.ITERATION, "ph": "B", "args": {"iteration": iteration}}:
                self._iteration = iteration
                yield records.IterationStarted(now, iteration)
            case {"cat": trace.ROUND, "args": details}:
                yield records.RoundStarted(now, **details)
            case {"cat": trace.ITERATION, "ph": "E"}:
                yield from self._texts()
                for line in self._metrics.read(lambda line: line["iteration"] <= self._iteration):
                    yield records.IterationFinished(now, line)
            case {"cat": trace.NOTE, "args": {"text": text}}:
                yield records.Note(text)
            case {"cat": trace.EVALUATION, "ph": "B", "args": details}:
                self._round = details["round"]
                yield records.EvaluationStarted(now, **details)
            case {"cat": trace.EVALUATION, "ph": "E", "args": details}:
                yield records.Evaluated(now, **details)
            case {"name": "held-out answers", "args": {"answers": number}}:
                yield records.PromptsEvaluated(now, self._round, number)
            case {"name": "first rollout"}:
                yield records.FirstRollout(now - self._earlier)
            case {"cat": trace.SAVING, "ph": "B"}:
                yield records.SavingModel(now, self.folder / "model")
            case {"cat": trace.SAVING, "ph": "E"}:
                summary = json.loads((self.folder / "summary.json").read_text())
                yield records.RunFinished(now, summary)

    def _metadata(self, details: Mapping[str, Any]) -> Iterator[Record]:
        match details:
            case {"devices": devices, "description": description}:
                self._controller = details
                self._workers = dict(enumerate(devices, start=1))
                self._earlier = details.get("earlier_seconds", 0.0)
                yield records.RunStarted(
                    self._earlier,
                    self.folder,
                    self.config,
                    devices,
                    self.config.ring_slots,
                    description,
                )
            case {"exit_code": exit_code, "message": message}:
                yield from self._texts()
                yield records.RunEnded(exit_code, message)

    def _activity(self, event: trace.Event, now: float) -> Record:
        details = event.get("args", {})
        span = Span(event["name"], now, now + event["dur"] / 1e6)
        return records.WorkerActive(
            self._workers[event["pid"]],
            Activity((span,), details.get("tokens", 0), details.get("groups", 0)),
        )
