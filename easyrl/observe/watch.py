"""`easyrl watch RUN`: the live view of a run from another terminal, from the run folder alone.

    config.yaml ────────────┐
    trace.json ─────────────┤
    metrics.jsonl ──────────┼──► the run's events ──► the same views as in the run
    samples.jsonl ──────────┤        times are seconds since the run began
    reward_errors.jsonl ────┤
    summary.json ───────────┘

The trace sets the order; the other files are read up to the group or iteration that it has reached.
Only whole lines are read. A line that is no JSON, or has an unexpected form, is skipped. A run is
alive while its folder is locked.
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from easyrl import events
from easyrl.config import Config, load_config
from easyrl.events import Activity, Event, FromWorker, Observer, Sample, Span, UnderWay
from easyrl.observe import trace
from easyrl.observe.report import PlainLines, print_end
from easyrl.observe.text import is_live_terminal
from easyrl.observe.view import LastPicture, LiveView
from easyrl.runtime.run_folder import is_locked

POLL_SECONDS = 0.25
KILLED = 1
INTERRUPTED = 128 + signal.SIGINT
BAD_LINE = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError)


def watch(folder: Path, *, live: bool) -> int:
    """Show the run until it ends.

    Returns its exit code; 1 if it was killed, 130 if watching was interrupted. Raises ValueError
    if `folder` is no run folder.
    """
    files = RunFiles(folder)
    view = LiveView(files.now, log_file=Path(os.devnull))
    observe: Observer = PlainLines()
    if live and is_live_terminal():
        observe = view if is_locked(folder) else LastPicture()
    exit_code = KILLED
    before = {signum: signal.signal(signum, _stop) for signum in (signal.SIGTERM, signal.SIGHUP)}
    try:
        for event in _follow(files):
            observe(event)
            if isinstance(event, events.RunEnded):
                exit_code = event.exit_code
    except KeyboardInterrupt:
        view.close()
        print_end(INTERRUPTED, f"the run continues; to see it again: easyrl watch {folder}")
        return INTERRUPTED
    except OSError as error:
        raise ValueError(f"'{folder}' cannot be read any more: {error}") from error
    finally:
        view.close()
        for signum, handler in before.items():
            signal.signal(signum, handler)
    return exit_code


def _stop(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)  # through `finally`, which restores the terminal


def _follow(files: RunFiles) -> Iterator[Event]:
    """Yield the events of a run until it ends."""
    is_alive = True
    while is_alive:
        is_alive = is_locked(files.folder)  # before the last read, so that nothing is missed
        ended = None
        for event in files.read():
            ended = event if isinstance(event, events.RunEnded) else None
            if ended is None:  # also after an earlier command's end, of a resumed run
                yield event
        if ended is not None:
            yield ended
            return
        time.sleep(POLL_SECONDS if is_alive else 0.0)
    if not files.has_begun:
        raise ValueError(f"'{files.folder}': expected a run's {trace.FILE_NAME}, got another file")
    yield events.RunEnded(
        KILLED, f"the run was killed: its process is gone; see {files.folder / 'logs'}"
    )


class GrowingFile:
    """A file of JSON lines that another process appends to, or replaces by a newer one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.inode = 0
        self._offset = 0

    def read(self, is_due: Callable[[Any], bool] = lambda line: True) -> Iterator[Any]:
        """Yield new lines up to the first one that is not due; that comes first the next time."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            if os.fstat(file.fileno()).st_ino != self.inode:
                self.inode, self._offset = os.fstat(file.fileno()).st_ino, 0
            file.seek(self._offset)
            while (text := file.readline()).endswith(b"\n"):
                try:
                    line = json.loads(text.strip().rstrip(b","))
                except (ValueError, RecursionError):  # the brackets, a line that was cut off
                    self._offset += len(text)
                    continue
                if not is_due(line):
                    return
                self._offset += len(text)
                yield line


class RunFiles:
    """The events of a run, from its folder."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError if that is no run folder."""
        self.folder = folder
        for name in ("config.yaml", trace.FILE_NAME):
            if not (folder / name).is_file():
                what = f"has no {name}" if folder.is_dir() else "is no folder"
                raise ValueError(
                    f"'{folder}' {what}; expected the folder of a run, as `easyrl grpo` prints it "
                    "at its start (runs/<time>-<task>)"
                )
        self.config: Config = load_config(folder / "config.yaml")
        self._trace = GrowingFile(folder / trace.FILE_NAME)
        self._metrics = GrowingFile(folder / "metrics.jsonl")
        self._samples = GrowingFile(folder / "samples.jsonl")
        self._errors = GrowingFile(folder / "reward_errors.jsonl")
        self._command: Mapping[str, Any] = {}
        """The newest command's first line in the trace."""
        self._workers: dict[int, str] = {}  # process in the trace -> worker
        self._earlier = 0.0  # seconds from the run's start to that of the newest command
        self._iteration = self._round = 0
        self._inode = 0
        self._newest = self._seen = -1.0
        """Seconds of the newest line; the same when the trace was last replaced."""

    def now(self) -> float:
        """Seconds since the run began, by the machine's wall clock."""
        return time.time() - float(self._command["started_unix_seconds"])

    @property
    def has_begun(self) -> bool:
        return bool(self._command)

    def read(self) -> Iterator[Event]:
        """Yield the events written since the last call."""
        for line in self._trace.read():
            if self._trace.inode != self._inode:
                self._inode, self._seen = self._trace.inode, self._newest
            try:
                found = list(self._events(line))
            except BAD_LINE:
                continue
            yield from found

    def _events(self, line: Any) -> Iterator[Event]:
        details = line.get("args", {})
        if line["ph"] == "M":
            yield from self._metadata(details)
            return
        time_ = (line["ts"] + line.get("dur", 0)) / 1e6
        if not (self.has_begun and math.isfinite(time_)) or time_ <= self._seen:
            return
        self._newest = max(self._newest, time_)
        worker = self._workers.get(line["pid"], "")
        # B and E: traces written before version 0.2 had begins and ends instead of durations.
        match line.get("cat", line["name"]), line["ph"]:
            case "activity", "X":
                span = Span(line["name"], line["ts"] / 1e6, time_)
                counts = details.get("tokens", 0), details.get("groups", 0)
                yield FromWorker(worker, time_, Activity((span,), *counts))
            case "under way", _:
                begun = UnderWay(details["kind"], time_)
                yield FromWorker(worker, time_, Activity((), 0, 0, begun))
            case "start-up", "B" | "i":
                what = details.get("what", line["name"])
                yield FromWorker(worker, time_, events.Starting(what) if what else events.Ready())
            case "start-up", "E" if details.get("ready"):
                yield FromWorker(worker, time_, events.Ready())
            case "group", _:
                yield self._group(time_, details)
            case "checkpoint", _ if "policy_version" in details:
                yield FromWorker(worker, time_, events.CheckpointSaved(**details))
            case _ if line["name"] == "held-out answers":
                errors = self._errors.read(lambda line: line["iteration"] is None)
                texts = [line["error"] for line in errors]
                answered = events.PromptEvaluated(self._round, 0, [], errors=texts)
                yield FromWorker(worker, time_, answered)
            case _:
                yield from self._run_events(line, time_, details)

    def _run_events(self, line: Any, time_: float, details: Any) -> Iterator[Event]:
        match line.get("cat", line["name"]), line["ph"]:
            case "iteration", "B" | "i":
                self._iteration = details["iteration"]
                yield events.IterationStarted(time_, self._iteration)
            case "iteration", _:
                newest = details.get("iteration", self._iteration)
                for metrics in self._metrics.read(lambda found: found["iteration"] <= newest):
                    yield events.IterationFinished(time_, metrics)
            case "round", _:
                yield events.RoundStarted(time_, **details)
            case "evaluation", "B" | "i":
                self._round = details["round"]
                yield events.EvaluationStarted(time_, **details)
            case "evaluation", _:
                yield events.Evaluated(time_, **details)
            case "note", _:
                yield events.Note(details["text"])
            case "quiet", _:
                yield events.NoEvents(time_, details["text"])
            case "stopping", _:
                yield events.Stopping(time_, details["text"])
            case "first rollout", _:
                yield events.FirstRollout(time_ - self._earlier)
            case "saving", "B" | "i":
                yield events.SavingModel(time_, self.folder / "model")
            case "saving", _:
                summary = json.loads((self.folder / "summary.json").read_text())
                yield events.RunFinished(time_, summary)

    def _metadata(self, details: Mapping[str, Any]) -> Iterator[Event]:
        match details:
            case {"devices": dict(devices), "description": str(description)}:
                earlier = float(details.get("earlier_seconds", 0.0))
                float(details["started_unix_seconds"])
                if self.has_begun and earlier <= self._earlier:
                    return  # the trace was replaced
                self._workers = dict(enumerate(devices, start=1))
                self._earlier, self._command = earlier, details
                yield events.RunStarted(earlier, self.folder, self.config, devices, description)
            case {"exit_code": int(exit_code), "message": str(message)} if self.has_begun:
                yield events.RunEnded(exit_code, message)

    def _group(self, time_: float, details: Mapping[str, Any]) -> Event:
        """A scored group, with its samples and errors from their files."""
        iteration, prompt_index = details["iteration"], details["prompt_index"]

        def is_due(line: Any) -> bool:
            group = line["iteration"], line["prompt_index"]
            return group[0] is None or group[0] < iteration or group == (iteration, prompt_index)

        lines = [line for line in self._samples.read(is_due) if line["iteration"] == iteration]
        reward = details["mean_reward"]
        scored = events.GroupScored(
            iteration,
            group_index=0,
            prompt_index=prompt_index,
            rewards=[math.nan if reward is None else reward],
            rewards_by_function=[],
            completion_lengths=[details["num_tokens"]],
            num_truncated=0,
            busy_seconds=0.0,
            errors=[line["error"] for line in self._errors.read(is_due)],
            is_rejected=details.get("is_rejected", False),
            prompt=lines[-1]["prompt"] if lines else None,
            samples=[
                Sample(line["completion"], line["reward"], line["advantage"], {}) for line in lines
            ],
        )
        return FromWorker("", time_, scored)
