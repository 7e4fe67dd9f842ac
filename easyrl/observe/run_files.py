"""A run's records from its folder alone, also while they are being written.

    config.yaml ─────┐
    trace.json ──────┼──► RunStarted, WorkerActive, GroupArrived, …, RunEnded
    metrics.jsonl ───┤
    samples.jsonl ───┤        times are seconds since the run began
    summary.json ────┘

Only whole lines are read; what is cut off, or is no JSON, is passed over.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from easyrl import records
from easyrl.config import Config, load_config
from easyrl.events import Activity, Span
from easyrl.observe import trace
from easyrl.observe.process_identity import is_alive
from easyrl.observe.run_state import MAX_SAMPLES
from easyrl.records import Record


class GrowingFile:
    """The lines of JSON that have come since last asked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def read(self) -> Iterator[Any]:
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            try:
                yield json.loads(line.rstrip(b","))
            except ValueError:  # the brackets around a trace, a line that was cut off
                continue


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
        self._lines: dict[int, Any] = {}  # of metrics.jsonl, by iteration, not told yet
        self._controller: Mapping[str, Any] = {}
        self._workers: dict[int, str] = {}  # by their process number in the trace
        self._iteration = self._round = 0

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
        for line in list(self._samples.read())[-MAX_SAMPLES:]:
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
        now = event["ts"] / 1e6
        match event:
            case {"cat": trace.ACTIVITY}:
                yield self._activity(event, now)
            case {"cat": trace.GROUP, "args": group}:
                yield records.GroupArrived(now, **group)
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
                self._lines |= {line["iteration"]: line for line in self._metrics.read()}
                if (line := self._lines.pop(self._iteration, None)) is not None:
                    yield records.IterationFinished(now, line)
            case {"cat": trace.EVALUATION, "ph": "B", "args": details}:
                self._round = details["round"]
                yield records.EvaluationStarted(now, **details)
            case {"cat": trace.EVALUATION, "ph": "E", "args": details}:
                yield records.Evaluated(now, **details)
            case {"name": "held-out answers", "args": {"answers": number}}:
                yield records.PromptsEvaluated(now, self._round, number)
            case {"name": "first rollout"}:
                yield records.FirstRollout(now)
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
                slots = self.config.ring_slots
                yield records.RunStarted(0.0, self.folder, self.config, devices, slots, description)
            case {"exit_code": exit_code, "message": message}:
                yield records.RunEnded(exit_code, message)

    def _activity(self, event: trace.Event, now: float) -> Record:
        details = event.get("args", {})
        span = Span(event["name"], now, now + event["dur"] / 1e6)
        return records.WorkerActive(
            self._workers[event["pid"]],
            Activity((span,), details.get("tokens", 0), details.get("groups", 0)),
        )
