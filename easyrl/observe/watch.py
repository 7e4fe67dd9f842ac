"""`easyrl watch RUN`: the live view of a run from another terminal, from the run folder alone.

    config.yaml ────────────┐
    trace.json ─────────────┤
    metrics.jsonl ──────────┼──► the run's events ──► the same views as in the run
    samples.jsonl ──────────┤        times are seconds since the run began
    reward_errors.jsonl ────┤
    summary.json ───────────┘

The trace sets the order; the other files are read up to the group or iteration that it has reached.
A line that is cut off or damaged is skipped. A run is alive while its folder is locked.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from easyrl import events
from easyrl.config import Config, load_config
from easyrl.events import Activity, Event, FromWorker, Observer, Sample, Span, UnderWay
from easyrl.observe.report import PlainLines, print_end
from easyrl.observe.text import is_live_terminal
from easyrl.observe.trace import CATEGORIES, FILE_NAME
from easyrl.observe.view import LiveView
from easyrl.runtime.run_folder import is_locked

POLL_SECONDS = 0.25
KILLED = 1
INTERRUPTED = 128 + signal.SIGINT
EVENTS: Mapping[tuple[str, bool], Any] = {
    (category, ph == "E"): event for event, (category, ph) in CATEGORIES.items()
}


def watch(folder: Path, *, live: bool) -> int:
    """Show the run until it ends.

    Returns its exit code; 1 if it was killed, 130 if watching was interrupted. Raises ValueError
    if `folder` is no run folder.
    """
    files = RunFiles(folder)
    view = LiveView(files.now, log_file=Path(os.devnull), is_running=is_locked(folder))
    observe: Observer = view if live and is_live_terminal() else PlainLines()
    for signum in (signal.SIGTERM, signal.SIGHUP):  # exit through `finally`
        signal.signal(signum, lambda signum, frame: sys.exit(128 + signum))
    exit_code = KILLED
    try:
        for event in follow(files):
            observe(event)
            if isinstance(event, events.RunEnded):
                exit_code = event.exit_code
    except KeyboardInterrupt:
        view.close()
        print_end(INTERRUPTED, f"the run continues; to see it again: easyrl watch {folder}")
        return INTERRUPTED
    finally:
        view.close()
    return exit_code


def follow(files: RunFiles) -> Iterator[Event]:
    """Yield the events of a run until it ends."""
    is_alive = True
    while is_alive:
        is_alive = is_locked(files.folder)  # before the last read, so that nothing is missed
        found = list(files.read())
        for event in found:  # an earlier command of a resumed run has an end, too
            if event is found[-1] or not isinstance(event, events.RunEnded):
                yield event
        if found and isinstance(found[-1], events.RunEnded):
            return
        time.sleep(POLL_SECONDS if is_alive else 0.0)
    message = f"the run was killed: its process is gone; see {files.folder / 'logs'}"
    yield events.RunEnded(KILLED, message)


class GrowingFile:
    """A file of JSON lines that another process appends to, or replaces by a shorter one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0  # the end of the newest line, in bytes
        self._inode = 0
        self._newest = b"\0"  # the newest line, without its end

    def read(self, is_due: Callable[[Any], bool] = lambda line: True) -> Iterator[Any]:
        """Yield new lines up to the first one that is not due; that comes first the next time."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            inode = os.fstat(file.fileno()).st_ino
            if self.offset and inode != self._inode:
                before, newest, _ = file.read().rpartition(self._newest)
                self.offset = len(before) + len(newest)
            self._inode = inode
            file.seek(self.offset)
            while (text := file.readline()).endswith(b"\n"):
                stripped = text.strip(b",\r\n ")
                try:
                    line = json.loads(stripped)
                except ValueError:  # the brackets, a line that was cut off
                    self.offset += len(text)
                    continue
                if not is_due(line):
                    return
                self.offset += len(text)
                self._newest = stripped
                yield line


class RunFiles:
    """The events of a run, from its folder."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError if that is no run folder."""
        self.folder = folder
        for name in ("config.yaml", FILE_NAME):
            if not (folder / name).is_file():
                raise ValueError(
                    f"'{folder}': expected the folder of a run (runs/<time>-<task>), with {name}"
                )
        self.config: Config = load_config(folder / "config.yaml")
        self._trace, self._metrics, self._samples, self._errors = (
            GrowingFile(folder / name)
            for name in (FILE_NAME, "metrics.jsonl", "samples.jsonl", "reward_errors.jsonl")
        )
        self._started_unix_seconds = 0.0
        self._workers: dict[int, str] = {}  # process in the trace -> worker
        self._iteration = math.inf  # unknown at the beginning of a shortened trace

    def now(self) -> float:
        """Seconds since the run began, by the machine's wall clock."""
        return time.time() - self._started_unix_seconds

    def read(self) -> Iterator[Event]:
        """Yield the events written since the last call."""
        for line in self._trace.read():
            try:
                found = list(self._events(line))
            except (LookupError, TypeError, ValueError):  # of another version, or damaged
                continue
            yield from found

    def _events(self, line: Any) -> Iterator[Event]:  # noqa: PLR0912  one case per kind of line
        is_end, details = line["ph"] in "EX", line.get("args", {})
        time_ = (line.get("ts", 0) + line.get("dur", 0)) / 1e6

        def from_worker(event: events.WorkerEvent) -> FromWorker:
            return FromWorker(self._workers.get(line["pid"], ""), time_, event)

        match line["name"] if line["ph"] in "CM" else line.get("cat", line["name"]):
            case "process_name" if "devices" in details:
                self._started_unix_seconds = details["started_unix_seconds"]
                devices, earlier = details["devices"], details["earlier_seconds"]
                self._workers = dict(enumerate(devices, start=1))
                description = details["description"]
                yield events.RunStarted(earlier, self.folder, self.config, devices, description)
            case "process_name" if "exit_code" in details:
                yield events.RunEnded(details["exit_code"], details["message"])
            case "activity":
                span = Span(line["name"], line["ts"] / 1e6, time_)
                counts = details.get("tokens", 0), details.get("groups", 0)
                yield from_worker(Activity([span], *counts))
            case "under way":
                yield from_worker(Activity([], 0, 0, UnderWay(details["kind"], time_)))
            case "start-up" if not is_end:
                yield from_worker(events.Starting(line["name"]))
            case "start-up" if details.get("ready"):
                yield from_worker(events.Ready())
            case "group":
                yield from_worker(self._group(**details))
            case "checkpoint":
                yield from_worker(events.CheckpointSaved(**details))
            case "held-out answers":
                errors = self._errors.read(lambda line: line["iteration"] is None)
                texts = [line["error"] for line in errors]
                yield from_worker(events.PromptEvaluated(0, 0, [], errors=texts))
            case "note":
                yield events.Note(details["text"])
            case "iteration" if is_end:
                for metrics in self._metrics.read(
                    lambda line: line["iteration"] <= self._iteration
                ):
                    yield events.IterationFinished(time_, metrics)
            case "saving" if is_end:
                summary = json.loads((self.folder / "summary.json").read_text())
                yield events.RunFinished(time_, summary)
            case category if (category, is_end) in EVENTS:
                event = EVENTS[category, is_end](time_, *details.values())
                self._iteration = getattr(event, "iteration", self._iteration)
                yield event

    def _group(
        self, iteration: int, prompt_index: int, is_rejected: bool = False, **more: Any
    ) -> events.GroupScored:
        """A scored group, with its samples and errors from their files."""

        def is_due(line: Any) -> bool:
            group = line["iteration"], line["prompt_index"]
            return group[0] is None or group[0] < iteration or group == (iteration, prompt_index)

        lines = [line for line in self._samples.read(is_due) if line["iteration"] == iteration]
        return events.GroupScored(
            *(iteration, 0, prompt_index, [], [], [], 0, 0.0),  # no view shows rewards and lengths
            errors=[line["error"] for line in self._errors.read(is_due)],
            is_rejected=is_rejected,
            prompt=lines[-1]["prompt"] if lines else None,
            samples=[Sample(line["completion"], line["reward"], 0.0, {}) for line in lines],
        )
