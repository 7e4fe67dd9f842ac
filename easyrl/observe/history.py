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

METRICS, SUMMARY = "metrics.jsonl", "summary.json"
ACCURACY, ERROR, OVERLAP = "eval/accuracy", "eval/standard_error", "overlap"
SAMPLED_ITERATIONS = 10
"""Samples are from this many of the newest iterations that have any."""


@dataclass(slots=True)
class History:
    folder: Path
    spec: RunSpec
    settings: Mapping[str, Any]
    """Values by the full names of their keys: {"train.iterations": 60, …}."""
    name: str = ""  # differs from the names of the other runs
    lines: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Number of iterations trained -> metrics. The accuracy before training is at 0, alone."""
    summary: Mapping[str, Any] = field(default_factory=dict)  # empty until the run has finished
    state: RunState = field(default_factory=RunState)  # of the newest command
    starts: dict[int, float] = field(default_factory=dict)
    """Iteration, from 1 -> its start, in the newest command."""
    messages: Counter[str] = field(default_factory=Counter)  # notes and warnings -> how often

    @property
    def num_done(self) -> int:
        return max((n for n, line in self.lines.items() if "reward" in line), default=0)

    @property
    def devices(self) -> Mapping[str, str]:
        return self.state.run.devices if self.state.run else {}

    @property
    def status(self) -> str:
        end = self.state.ended
        done = f"{self.num_done} of {self.spec.schedule.iterations} iterations"
        if self.summary:
            return f"finished, {done}"
        if is_locked(self.folder):
            return f"still running, {done} so far"
        if end is None:
            return f"killed after {done}: its process is gone"
        how = "stopped" if end.exit_code > SIGNALLED else "failed" if end.exit_code else "ended"
        return f"{how} after {done}"

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Return the iterations that have the metric, from 1, and its values."""
        values = {n: line.get(key) for n, line in self.lines.items()}
        found = {n: v for n, v in values.items() if isinstance(v, (int, float))}
        return list(found), list(map(float, found.values()))

    def results(self) -> dict[str, str]:
        """Return the results by name, as at the end of a run. Before its end: what is known."""
        lines = [line for number, line in self.lines.items() if number and "reward" in line]
        if not lines:
            return {}
        newest = max(self.series(ACCURACY)[0], default=0)
        ends = {"before": self.lines.get(0, {}), "after": self.lines[newest] if newest else {}}
        schedule = replace(self.spec.schedule, iterations=len(lines))
        num_devices = max(1, count_devices(self.devices.values()))
        state = SavedState(num_iterations=len(lines))
        names = self.spec.rewards.names
        summary = summarize(lines, schedule, names, state, num_devices=num_devices)
        summary |= {f"accuracy_{when}": line.get(ACCURACY) for when, line in ends.items()}
        summary |= {f"error_{when}": line.get(ERROR) for when, line in ends.items()}
        summary |= {f"held_out_reward_{w}": line.get("eval/reward") for w, line in ends.items()}
        return dict(result_rows(summary | dict(self.summary), self.spec, self.devices))

    def _apply(self, event: Event) -> None:
        is_resumed = self.state.run is not None
        self.state.apply(event)
        match event:
            case events.RunStarted(num_iterations=done):
                if is_resumed:
                    self.messages[f"resumed after {counted(done, 'iteration')}"] += 1
                self.lines = {n: line for n, line in self.lines.items() if n <= done}
                self.starts.clear()
            case events.Evaluated(_, accuracy, _, error, number, reward):
                measured = {ACCURACY: accuracy, ERROR: error, "eval/reward": reward}
                self.lines[number] = {"iteration": number, **measured}
            case events.IterationStarted(time, iteration):
                self.starts[iteration] = time
            case events.Note(text) if text:
                self.messages[text] += 1
            case events.RunEnded(exit_code, message) if message:
                self.messages[f"ended with exit code {exit_code}: {message}"] += 1


def read_history(folder: Path) -> History:
    """Read the folder of a run. Raises ConfigError if it is none."""
    file = folder / "config.yaml"
    if not file.is_file() or not any((folder / name).is_file() for name in (METRICS, FILE_NAME)):
        files = f"config.yaml and {METRICS} or {FILE_NAME}"
        raise ConfigError(f"'{folder}': expected a run's folder, with {files}")
    config = load_config(file)
    run = History(folder, resolve(config), by_name(config.model_dump(mode="json")))
    with contextlib.suppress(ValueError):  # no trace, or one of an older version
        for event in RunFiles(folder).read():
            run._apply(event)
    if (folder / METRICS).is_file():  # has every iteration; a long trace has lost the oldest ones
        for line in from_1(folder, GrowingFile(folder / METRICS).read()):
            number = line["iteration"]
            run.lines[number] = {**run.lines.get(number, {}), **line, OVERLAP: overlap([line])}
    run.lines = dict(sorted(run.lines.items()))
    with contextlib.suppress(OSError, ValueError):  # none, or a damaged one
        run.summary = json.loads((folder / SUMMARY).read_text())
    return run


def read_histories(folders: Sequence[Path]) -> list[History]:
    """Read several runs, and name them. Raises ConfigError for a folder that is no run."""
    runs = [read_history(folder) for folder in dict.fromkeys(folders)]
    names = [run.folder.absolute().name for run in runs]
    for run, name in zip(runs, names, strict=True):
        run.name = printable(name if names.count(name) == 1 else str(run.folder))
    return runs


def worst_to_best(run: History, limit: int) -> list[tuple[Line, int]]:
    """Return at most `limit` samples of the newest iterations, evenly from the lowest to the
    highest reward, each with the number of equal ones."""
    file = run.folder / SAMPLES
    lines = list(from_1(run.folder, GrowingFile(file).read())) if file.is_file() else []
    newest = sorted({line["iteration"] for line in lines})[-SAMPLED_ITERATIONS:]
    samples = list(folded(line for line in lines if line["iteration"] in newest))
    samples.sort(key=lambda each: -math.inf if each[0]["reward"] is None else each[0]["reward"])
    chosen = {round(n * (len(samples) - 1) / max(1, limit - 1)) for n in range(limit)}
    return [sample for number, sample in enumerate(samples) if number in chosen]
