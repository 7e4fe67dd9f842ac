"""What `easyrl eval` prints: progress while problems are answered, then tables of the results.

Progress is a bar on a terminal, else a line every few seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from easyrl import events
from easyrl.events import Event
from easyrl.formatting import counted
from easyrl.observe.report import print_end
from easyrl.observe.text import clock, is_live_terminal, printable, safe, say, shown

LINE_SECONDS = 5.0
"""Minimum time between two lines of progress."""
NUM_DIFFERING = 10
"""Problems shown of a comparison."""
PROMPT_CHARACTERS = 60


class EvalView:
    """An observer that prints an evaluation, with a bar if `live` and standard output is a
    terminal."""

    def __init__(self, *, live: bool) -> None:
        self._bar: Progress | None = None
        if live and is_live_terminal():
            console = Console()
            console.width -= 5  # free for a printed `^C`: a line that wraps would appear twice
            figures = TextColumn("{task.fields[figures]}", markup=False)
            self._bar = Progress(
                BarColumn(),
                MofNCompleteColumn(),
                figures,
                "ETA",
                TimeRemainingColumn(),
                console=console,
            )
        self._phases: set[str] = set()
        self._has_errors = False
        self._num_problems = self._num_before = self._num_tokens = 0
        self._began = self._printed = 0.0

    def __call__(self, event: Event) -> None:
        match event:
            case events.EvalStarted():
                self._print_start(event)
            case events.FromWorker(_, _, events.Starting(what)) if what not in self._phases:
                self._phases.add(what)
                self._say(what)
            case events.EvaluationStarted(now):
                self._began = self._printed = now
                if self._bar is not None:
                    self._bar.start()
                    self._bar.add_task(
                        "", total=self._num_problems, completed=self._num_before, figures=""
                    )
            case events.ProblemsAnswered():
                self._print_progress(event)
            case events.FromWorker(event=events.PromptEvaluated(errors=[message, *_])) if (
                not self._has_errors
            ):
                self._has_errors = True
                self._say(f"{message}\nthe evaluation continues (reward.on_error)")
            case (
                events.Note(text)
                | events.FromWorker(event=events.Note(text))
                | events.NoEvents(warning=text)
            ) if text:
                self._say(text)
            case events.EvalFinished(folder=folder, results=results):
                self._close()
                _print(result_table(results))
                _print(Text(f"in {folder}: eval.json, samples.jsonl", style="dim"))
            case events.EvalCompared():
                for table in comparison_tables(event):
                    _print(table)
            case events.RunEnded(exit_code, message):
                self._close()
                if message:
                    print_end(exit_code, message)

    def _say(self, text: str) -> None:
        if self._bar is None or not self._bar.live.is_started:
            say(safe(text))
        else:
            self._bar.console.print(Text(safe(text)))

    def _print_start(self, record: events.EvalStarted) -> None:
        self._num_problems, self._num_before = record.num_problems, record.num_done
        about = record.about
        self._say(
            f"evaluation of {about['model']} on {about['dataset']}: "
            f"{counted(record.num_problems, 'problem')}, {_sampling(about)}\n"
            f"folder {record.folder}"
        )
        if record.num_done < record.num_problems:
            self._say(record.description)
        if record.num_done:
            self._say(f"{record.num_done} of them are already answered")

    def _print_progress(self, record: events.ProblemsAnswered) -> None:
        self._num_tokens += record.num_tokens
        seconds = max(1e-9, record.time - self._began)
        accuracy = _with_error(record.accuracy, record.standard_error)
        figures = f"accuracy {accuracy}  {self._num_tokens / seconds:,.0f} tokens/s"
        is_last = record.num_done == self._num_problems
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=record.num_done, figures=figures)
        elif is_last or record.time - self._printed >= LINE_SECONDS:
            self._printed = record.time
            speed = (record.num_done - self._num_before) / seconds
            remaining = (self._num_problems - record.num_done) / max(speed, 1e-9)
            self._say(f"{record.num_done}/{self._num_problems}  {figures}  ETA {clock(remaining)}")

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def result_table(results: Mapping[str, Any]) -> RenderableType:
    table = _grid()
    table.add_row("accuracy", _with_error(results["accuracy"], results["standard_error"]))
    for name in ("pass_at_k", "avg_at_k"):
        values = results.get(name, {})
        if len(values) > 1:
            ks = [k for k in values if int(k).bit_count() == 1 or k == list(values)[-1]]
            by_k = "  ".join(f"{k}: {values[k]:.3f}" for k in ks)  # all k are in eval.json
            table.add_row(name.replace("_at_", "@"), by_k)
    if results["accuracy"] is not None:
        reward = _with_error(results["reward"], results["reward_standard_error"])
        table.add_row("mean reward", reward)
    if len(results.get("rewards", {})) > 1:
        means = "  ".join(f"{name}: {mean:.3f}" for name, mean in results["rewards"].items())
        table.add_row("  per function", Text(means))
    problems = f"{results['num_problems']}, {_sampling(results)}"
    if results["num_skipped"]:
        problems += f"; {results['num_skipped']} more with a failed reward call"
    if results["num_too_long"]:
        problems += f"; {results['num_too_long']} more skipped as too long"
    table.add_row("problems", problems)
    table.add_row("mean length", f"{results['mean_completion_length']:.1f} tokens")
    table.add_row("truncated", f"{results['truncated_share']:.1%}")
    table.add_row(
        "speed",
        f"{results['completion_tokens']:,} tokens in {results['wall_seconds']:.1f} s, "
        f"{shown(results['tokens_per_second'], ',.0f')} tokens/s",
    )
    return table


def comparison_tables(record: events.EvalCompared) -> list[RenderableType]:
    whole = record.comparison
    table = _grid("", "this one", "the other")
    models = (str(about["model"] or "unknown") for about in (record.results, whole))
    table.add_row("model", *map(Text, models))
    table.add_row(
        f"accuracy on {counted(whole['num_problems'], 'common problem')}",
        _with_error(whole["accuracy"], whole["accuracy_standard_error"]),
        _with_error(whole["other_accuracy"], whole["other_accuracy_standard_error"]),
    )
    table.add_row("better on", str(whole["num_better"]), str(whole["num_worse"]))
    table.add_row("only in", str(whole["num_only_here"]), str(whole["num_only_there"]))
    difference = _with_error(whole["difference"], whole["standard_error"], sign="+")
    verdict = Text(f"difference {difference}, p = {whole['p_value']:.3g} ({whole['test']})\n")
    parts: list[RenderableType] = [Text(f"\ncompared with {whole['with']}", style="bold")]
    parts += [table, verdict]
    differing = [p for p in record.problems if p["accuracy"] != p["other_accuracy"]]
    if differing:
        parts.append(_problem_table(differing[:NUM_DIFFERING]))
    if len(differing) > NUM_DIFFERING:
        parts.append(Text(f"and {counted(len(differing) - NUM_DIFFERING, 'more problem')}"))
    return [*parts, Text(f"all problems: {record.file}", style="dim")]


def _problem_table(problems: Sequence[Mapping[str, Any]]) -> Table:
    table = _grid("this one", "the other", "problem")
    for problem in problems:
        prompt = Text(printable(" ".join(str(problem["prompt"]).split())))
        prompt.truncate(PROMPT_CHARACTERS, overflow="ellipsis")
        table.add_row(f"{problem['accuracy']:.3f}", f"{problem['other_accuracy']:.3f}", prompt)
    return table


def _grid(*headings: str) -> Table:
    table = Table(show_header=bool(headings), box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in headings or ("", ""):
        table.add_column(heading, overflow="fold")
    return table


def _sampling(about: Mapping[str, Any]) -> str:
    if about["temperature"] == 0:
        return "one greedy answer each"
    text = f"{counted(about['num_samples'], 'sample')} each at temperature {about['temperature']:g}"
    if about["top_p"] < 1:
        text += f", top_p {about['top_p']:g}"
    return text + (f", top_k {about['top_k']}" if about["top_k"] else "")


def _with_error(value: float | None, error: float | None, sign: str = "") -> str:
    text = shown(value, f"{sign}.3f")
    return text if shown(error, "") == "none" else f"{text} ± {error:.3f}"


def _print(what: RenderableType) -> None:
    console = Console(highlight=False)
    with console.capture() as capture:  # by itself rich ends the process on a broken pipe
        console.print(what, crop=False)
    say("\n".join(line.rstrip() for line in capture.get().removesuffix("\n").split("\n")))
