"""The history of a run from the files of its folder, for reports.

Every file but config.yaml may be missing or lack its end: a run may be going on, or was killed.
"""

import contextlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from easyrl import events
from easyrl.config import ConfigError, by_name, load_config
from easyrl.config.devices import count_devices
from easyrl.config.spec import RunSpec
from easyrl.events import Event
from easyrl.formatting import counted, printable
from easyrl.observe.lines import result_rows
from easyrl.observe.run_files import GrowingFile, RunFiles
from easyrl.observe.samples import SAMPLES, Line, folded
from easyrl.observe.state import RunState
from easyrl.observe.trace import FILE_NAME
from easyrl.runtime.metrics import overlap, summarize
from easyrl.runtime.resolve import resolve
from easyrl.runtime.resume import SavedState
from easyrl.runtime.run_folder import from_1, is_locked
from easyrl.runtime.supervisor import SIGNALLED
from easyrl.runtime.verdict import nothing_learned

METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
ACCURACY = "eval/accuracy"
ERROR = "eval/standard_error"
REWARD = "eval/reward"
PROBLEMS = "eval/problems"
OVERLAP = "overlap"
SAMPLED_ITERATIONS = 10
"""Samples are from this many of the newest iterations that have any."""


@dataclass(slots=True)
class History:
    """What the files of a run's folder say about it."""

    folder: Path
    spec: RunSpec
    settings: Mapping[str, Any]
    """Values by the full names of their keys: {"train.iterations": 60, …}."""
    name: str = ""  # differs from the names of the other runs of a report
    lines: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Number of iterations trained -> metrics. At 0 there is only the accuracy before training."""
    summary: Mapping[str, Any] = field(default_factory=dict)  # empty until the run has finished
    state: RunState = field(default_factory=RunState)  # of the newest command
    starts: dict[int, float] = field(default_factory=dict)
    """Iteration, from 1 -> time of its start. Of the newest command alone."""
    messages: Counter[str] = field(default_factory=Counter)
    """Note or warning -> how often it was shown."""

    @property
    def num_done(self) -> int:
        """Number of iterations trained so far."""
        trained = [number for number, line in self.lines.items() if "reward" in line]
        return max(trained, default=0)

    @property
    def devices(self) -> Mapping[str, str]:
        """Worker -> device; empty if there is no trace."""
        return self.state.run.devices if self.state.run else {}

    @property
    def status(self) -> str:
        """How the run has ended, or that it is running, as in `finished, 20 of 20 iterations`."""
        end = self.state.ended
        done = f"{self.num_done} of {self.spec.schedule.iterations} iterations"
        if self.summary:
            return f"finished, {done}"
        if is_locked(self.folder):
            return f"still running, {done} so far"
        if end is None:
            return f"killed after {done}: its process is gone"
        if end.exit_code > SIGNALLED:
            return f"stopped after {done}"
        if end.exit_code:
            return f"failed after {done}"
        return f"ended after {done}"

    def series(self, key: str) -> dict[int, float]:
        """Return the values of a metric, by the number of iterations trained."""
        found = {}
        for number, line in self.lines.items():
            value = line.get(key)
            if isinstance(value, (int, float)):
                found[number] = float(value)
        return found

    def results(self) -> dict[str, str]:
        """Return the results by name, as at the end of a run. Of a run that goes on: what is known
        so far."""
        summary = self.summarize()
        return dict(result_rows(summary, self.spec, self.devices)) if summary else {}

    def summarize(self) -> Mapping[str, Any]:
        """Return what `summary.json` says. Of a run that goes on or was killed: what is known so
        far; empty before the first iteration."""
        lines = [line for number, line in self.lines.items() if number and "reward" in line]
        if not lines:
            return {}
        so_far = replace(self.spec.schedule, iterations=len(lines))
        state = SavedState(num_iterations=len(lines))
        num_devices = max(1, count_devices(self.devices.values()))
        names = self.spec.rewards.names
        summary = summarize(lines, so_far, names, state, num_devices)
        newest = max(self.series(ACCURACY), default=0)
        measured: dict[str, Mapping[str, Any]] = {
            "before": self.lines.get(0, {}),
            "after": self.lines[newest] if newest else {},
        }
        for when, line in measured.items():
            summary[f"accuracy_{when}"] = line.get(ACCURACY)
            summary[f"error_{when}"] = line.get(ERROR)
            summary[f"held_out_reward_{when}"] = line.get(REWARD)
            if PROBLEMS in line:
                summary["held_out_problems"] = line[PROBLEMS]
        verdict = nothing_learned(lines, self.spec)
        summary["nothing_learned"] = None if verdict is None else verdict._asdict()
        return {**summary, **self.summary}

    def _apply(self, event: Event) -> None:
        is_resumed = self.state.run is not None
        self.state.apply(event)
        match event:
            case events.RunStarted(num_iterations=done):
                if is_resumed:
                    self.messages[f"resumed after {counted(done, 'iteration')}"] += 1
                for number in list(self.lines):
                    if number > done:  # this command trains it again
                        del self.lines[number]
                self.starts.clear()
            case events.Evaluated(num_iterations=number):
                self.lines[number] = {
                    "iteration": number,
                    ACCURACY: event.accuracy,
                    ERROR: event.standard_error,
                    REWARD: event.reward,
                    PROBLEMS: event.num_prompts,
                }
            case events.IterationStarted(time, iteration):
                self.starts[iteration] = time
            case events.Note(text) if text:
                self.messages[text] += 1
            case events.RunEnded(exit_code, message) if message:
                self.messages[f"ended with exit code {exit_code}: {message}"] += 1


def read_history(folder: Path) -> History:
    """Read the folder of a run. Raises ConfigError if it is none."""
    file = folder / "config.yaml"
    has_events = (folder / METRICS).is_file() or (folder / FILE_NAME).is_file()
    if not file.is_file() or not has_events:
        files = f"config.yaml and {METRICS} or {FILE_NAME}"
        raise ConfigError(f"'{folder}': expected a run's folder, with {files}")
    config = load_config(file)
    run = History(folder, resolve(config), by_name(config.model_dump(mode="json")))
    with contextlib.suppress(ValueError):  # no trace, or one of an older version
        for event in RunFiles(folder).read():
            run._apply(event)
    metrics = folder / METRICS
    if metrics.is_file():  # has every iteration; a long trace has lost the oldest ones
        for line in from_1(folder, GrowingFile(metrics).read()):
            number = line["iteration"]
            from_trace = run.lines.get(number, {})
            run.lines[number] = {**from_trace, **line, OVERLAP: overlap([line])}
    run.lines = dict(sorted(run.lines.items()))
    with contextlib.suppress(OSError, ValueError):  # none, or a damaged one
        run.summary = json.loads((folder / SUMMARY).read_text())
    return run


def read_histories(folders: Sequence[Path]) -> list[History]:
    """Read several runs, and name them. Raises ConfigError for a folder that is no run."""
    runs = [read_history(folder) for folder in dict.fromkeys(folders)]
    counts = Counter(_name_of(run) for run in runs)
    for run in runs:
        name = _name_of(run)
        if counts[name] > 1:  # of several folders
            name = str(run.folder)
        run.name = printable(name)
    return runs


def _name_of(run: History) -> str:
    return run.folder.absolute().name


def worst_to_best(run: History, limit: int) -> list[tuple[Line, int]]:
    """Return at most `limit` samples of the newest iterations, evenly from the lowest to the
    highest reward, each with the number of equal ones."""
    file = run.folder / SAMPLES
    if not file.is_file():
        return []
    recent: dict[int, list[Line]] = {}  # by iteration
    for line in from_1(run.folder, GrowingFile(file).read()):
        recent.setdefault(line["iteration"], []).append(line)
        if len(recent) > SAMPLED_ITERATIONS:
            del recent[min(recent)]
    lines = [line for iteration in sorted(recent) for line in recent[iteration]]
    samples = sorted(folded(lines), key=_reward_of)
    if len(samples) <= limit:
        return samples
    last = len(samples) - 1
    chosen = []
    for number in range(limit):
        index = round(number * last / max(1, limit - 1))
        chosen.append(samples[index])
    return chosen


def _reward_of(sample: tuple[Line, int]) -> float:
    """Return a sample's reward; of one without a reward, the lowest."""
    line, _ = sample
    reward = line["reward"]
    return -math.inf if reward is None else float(reward)
