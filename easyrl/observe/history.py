"""The history of a run from its folder, for reports and plots.

    config.yaml, metrics.jsonl, summary.json ─┐
    trace.json: workers, evaluations, notes  ─┼► History ─► page, plots, CSV
    samples.jsonl                            ─┘

Every file but config.yaml may be missing or lack its end: a run may be going on, or was killed.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from easyrl import events
from easyrl.config import Config, load_config
from easyrl.events import Event
from easyrl.formatting import counted
from easyrl.observe.report import training_sampling, with_error
from easyrl.observe.samples import SAMPLES, folded
from easyrl.observe.trace import FILE_NAME, GrowingFile, RunFiles
from easyrl.observe.view import ViewState
from easyrl.runtime.metrics import BUSY, LAST_ITERATIONS, overlap
from easyrl.runtime.run_folder import is_locked
from easyrl.runtime.supervisor import SIGNALLED

METRICS, SUMMARY = "metrics.jsonl", "summary.json"
ACCURACY, ERROR, OVERLAP = "eval/accuracy", "eval/standard_error", "overlap"
SAMPLED_ITERATIONS = 10
"""Samples are from this many of the newest iterations that have any."""
Line = Mapping[str, Any]


@dataclass(slots=True)
class History:
    """One run."""

    folder: Path
    config: Config
    name: str = ""  # differs from the names of the other runs
    lines: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Number of iterations trained -> metrics. The accuracy before training is at 0, alone."""
    summary: Mapping[str, Any] = field(default_factory=dict)  # empty until the run has finished
    errors: dict[int, float | None] = field(default_factory=dict)
    """Number of iterations trained -> standard error of the accuracy."""
    state: ViewState = field(default_factory=ViewState)  # of the newest command
    starts: dict[int, float] = field(default_factory=dict)
    """Iteration, from 0 -> its start, in the newest command."""
    messages: Counter[str] = field(default_factory=Counter)  # notes and warnings -> how often
    status: str = ""

    @property
    def num_done(self) -> int:
        """Finished iterations."""
        return max((n for n, line in self.lines.items() if "reward" in line), default=0)

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Return the iterations that have the metric, from 1, and its values."""
        values = {n: line.get(key) for n, line in self.lines.items()}
        found = {n: v for n, v in values.items() if isinstance(v, (int, float))}
        return list(found), list(map(float, found.values()))

    def _apply(self, event: Event) -> None:
        is_resumed = self.state.run is not None
        self.state.apply(event)
        match event:
            case events.RunStarted(num_iterations=done):
                if is_resumed:
                    self.messages[f"resumed after {counted(done, 'iteration')}"] += 1
                self.starts.clear()
            case events.Evaluated(standard_error=error, num_iterations=number):
                self.errors[number] = error
            case events.IterationStarted(time, iteration):
                self.starts[iteration] = time
            case events.Note(text) | events.NoEvents(warning=text) if text:
                self.messages[text] += 1
            case events.RunEnded(exit_code, message) if message:
                self.messages[f"ended with exit code {exit_code}: {message}"] += 1


def read_history(folder: Path) -> History:
    """Read the folder of a run. Raises ValueError if it is none."""
    file = folder / "config.yaml"
    if not file.is_file() or not any((folder / name).is_file() for name in (METRICS, FILE_NAME)):
        raise ValueError(
            f"'{folder}': expected the folder of a run of `easyrl grpo` (runs/<time>-<task>), with "
            f"config.yaml and {METRICS} or {FILE_NAME}"
        )
    run = History(folder, load_config(file))
    with contextlib.suppress(ValueError):  # no trace, or one of an older version
        for event in RunFiles(folder).read():
            run._apply(event)
    for number, accuracy in run.state.accuracies.items():
        run.lines[number] = {ACCURACY: accuracy, ERROR: run.errors.get(number)}
    if (folder / METRICS).is_file():  # has every iteration; a long trace has lost the oldest ones
        for line in GrowingFile(folder / METRICS).read():
            if not isinstance(line, dict) or "iteration" not in line:
                raise ValueError(
                    f"{folder / METRICS}: expected metrics of `easyrl grpo`, got others"
                )
            number = line["iteration"] + 1
            run.lines[number] = {**run.lines.get(number, {}), **line, "iteration": number}
            run.lines[number][OVERLAP] = overlap_of([line])
    if (folder / SUMMARY).is_file():
        run.summary = json.loads((folder / SUMMARY).read_text())
    run.lines = {number: {"iteration": number, **run.lines[number]} for number in sorted(run.lines)}
    run.status = _status(run)
    return run


def overlap_of(lines: Collection[Line]) -> float:
    """Return the overlap of generating and training in these iterations together."""

    def total(name: str) -> float:
        return sum(line.get(f"perf/{name}") or 0.0 for line in lines)

    return overlap(**{name: total(name) for name in BUSY}, wall_seconds=total("iteration_seconds"))


def _status(run: History) -> str:
    end, done = run.state.ended, f"{run.num_done} of {run.config.train.iterations} iterations"
    if run.summary:
        return f"finished, {done}"
    if is_locked(run.folder):
        return f"still running, {done} so far"
    if end is None:
        return f"killed after {done}: its process is gone"
    how = "stopped" if end.exit_code > SIGNALLED else "failed" if end.exit_code else "ended"
    return f"{how} after {done}"


def read_histories(folders: Sequence[Path]) -> list[History]:
    """Read several runs, and name them. Raises ValueError for a folder that is no run."""
    runs = [read_history(folder) for folder in dict.fromkeys(folders)]
    short = Counter(run.folder.absolute().name for run in runs)
    for run in runs:
        name = run.folder.absolute().name
        run.name = name if short[name] == 1 else str(run.folder)
    return runs


def worst_to_best(run: History, limit: int) -> list[tuple[Line, int]]:
    """Return at most `limit` samples of the newest iterations, evenly from the lowest to the
    highest reward, each with the number of equal ones."""
    file = run.folder / SAMPLES
    lines = list(GrowingFile(file).read()) if file.is_file() else []
    newest = sorted({line["iteration"] for line in lines})[-SAMPLED_ITERATIONS:]
    samples = list(folded(line for line in lines if line["iteration"] in newest))
    samples.sort(key=lambda each: -math.inf if each[0]["reward"] is None else each[0]["reward"])
    chosen = {round(n * (len(samples) - 1) / max(1, limit - 1)) for n in range(limit)}
    return [sample for number, sample in enumerate(samples) if number in chosen]


def rewards_text(run: History) -> str:
    """`0.500 → 0.900`: means at both ends, as in `summary.json` where there are enough."""
    values = run.series("reward")[1]
    num = LAST_ITERATIONS if len(values) >= 2 * LAST_ITERATIONS else 1
    ends = " → ".join(f"{sum(part) / num:.3f}" for part in (values[:num], values[-num:]) if part)
    return f"{ends} (first and last {counted(num, 'iteration')})" if values else "none"


def accuracies_text(run: History) -> str:
    """`0.500 ± 0.050 → 0.900 ± 0.030`, and how it was sampled."""
    numbers = run.series(ACCURACY)[0]
    ends = [run.lines[number] for number in dict.fromkeys([*numbers[:1], *numbers[-1:]])]
    text = " → ".join(with_error(line[ACCURACY], line.get(ERROR)) for line in ends)
    return f"{text}, {training_sampling(run.config)}" if text else "not measured"


def reward_functions(runs: Iterable[History]) -> list[str]:
    """Names of the metrics of single reward functions."""
    keys = dict.fromkeys(key for run in runs for line in run.lines.values() for key in line)
    return [key for key in keys if re.fullmatch(r"rewards/.+/mean", key)]


def to_csv(runs: Sequence[History]) -> str:
    """Return a row for each run and iteration, with all metrics. Iterations count from 1; row 0 has
    the accuracy before training."""
    lines = [{"run": run.name, **line} for run in runs for line in run.lines.values()]
    columns = dict.fromkeys(key for line in lines for key in line)
    writer = csv.DictWriter(text := io.StringIO(), list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()
