"""Output of `easyrl eval`: progress while problems are answered, then tables of the results.

Progress is a bar on a terminal, else a line every few seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from easyrl import events
from easyrl.events import Event
from easyrl.formatting import counted
from easyrl.observe.report import print_end, with_error
from easyrl.observe.text import clock, is_live_terminal, printable, safe, say, say_rich, shown

NUM_DIFFERING = 10  # problems shown of a comparison
PROMPT_CHARACTERS = 60


class EvalView:
    """Print an evaluation, with a bar if `live` and standard output is a terminal."""

    def __init__(self, *, live: bool) -> None:
        self._bar: Progress | None = None
        self.report_seconds = 5.0  # minimum time between two calls of `show_progress`
        if live and is_live_terminal():
            console = Console()
            console.width -= 5  # free for a printed `^C`: a line that wraps would appear twice
            figures = TextColumn("{task.fields[figures]}", markup=False)
            columns = (BarColumn(), MofNCompleteColumn(), figures, "ETA", TimeRemainingColumn())
            self._bar = Progress(*columns, console=console)
            self.report_seconds = 1.0
        self._shown: set[str] = set()
        self._num_problems = self._num_before = 0
        self._began = 0.0

    def start(
        self,
        about: Mapping[str, Any],
        folder: Path,
        description: str,
        num_problems: int,
        num_done: int,
    ) -> None:
        """`about`: the first keys of `eval.json`; `description`: the placement; `num_done`:
        problems that earlier commands answered."""
        self._num_problems, self._num_before = num_problems, num_done
        self.say(
            f"evaluation of {about['model']} on {about['dataset']}: "
            f"{counted(num_problems, 'problem')}, {_sampling(about)}\nfolder {folder}"
        )
        if num_done < num_problems:
            self.say(description)
        if num_done:
            self.say(f"{num_done} of them are already answered")

    def observe(self, event: Event) -> None:
        """Show what the workers report."""
        match event:
            case events.FromWorker(_, _, events.Starting(what)) if what not in self._shown:
                self._shown.add(what)
                self.say(what)
            case events.FromWorker(event=events.PromptEvaluated(errors=[message, *_])) if (
                "error" not in self._shown
            ):
                self._shown.add("error")
                self.say(f"{message}\nthe evaluation continues (reward.on_error)")
            case events.Note(text) | events.NoEvents(warning=text) if text:
                self.say(text)

    def start_progress(self, now: float) -> None:
        self._began = now
        if self._bar is not None:
            self._bar.start()
            self._bar.add_task("", total=self._num_problems, completed=self._num_before, figures="")

    def show_progress(
        self, now: float, num_done: int, accuracy: tuple[float, float], num_tokens: int
    ) -> None:
        """`accuracy`: of all answers so far, with its standard error; `num_tokens`: of the answers
        of this command."""
        seconds = max(1e-9, now - self._began)
        figures = f"accuracy {with_error(*accuracy)}  {num_tokens / seconds:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=num_done, figures=figures)
        else:
            speed = (num_done - self._num_before) / seconds
            remaining = (self._num_problems - num_done) / max(speed, 1e-9)
            self.say(f"{num_done}/{self._num_problems}  {figures}  ETA {clock(remaining)}")

    def show_results(self, folder: Path, results: Mapping[str, Any]) -> None:
        """Print the figures of an `eval.json`."""
        self._close()
        table = _grid()
        table.add_row("accuracy", with_error(results["accuracy"], results["standard_error"]))
        for name in ("pass_at_k", "avg_at_k"):
            values = results.get(name, {})
            if len(values) > 1:
                ks = [k for k in values if int(k).bit_count() == 1 or k == list(values)[-1]]
                by_k = "  ".join(f"{k}: {values[k]:.3f}" for k in ks)  # all k are in eval.json
                table.add_row(name.replace("_at_", "@"), by_k)
        if results["accuracy"] is not None:
            reward = with_error(results["reward"], results["reward_standard_error"])
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
        say_rich(table)
        say_rich(Text(f"in {folder}: eval.json, samples.jsonl", style="dim"))

    def end(self, exit_code: int, message: str) -> None:
        self._close()
        if message:
            print_end(exit_code, message)

    def say(self, text: str) -> None:
        if self._bar is None or not self._bar.live.is_started:
            say(safe(text))
        else:
            self._bar.console.print(Text(safe(text)))

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def show_comparison(
    model: str, whole: Mapping[str, Any], problems: Sequence[Mapping[str, Any]], file: Path
) -> None:
    """Print what `figures.compare` returned; `file` lists the problems."""
    table = _grid("", "this one", "the other")
    table.add_row("model", Text(model), Text(whole["model"] or "unknown"))
    table.add_row(
        f"accuracy on {counted(whole['num_problems'], 'common problem')}",
        with_error(whole["accuracy"], whole["accuracy_standard_error"]),
        with_error(whole["other_accuracy"], whole["other_accuracy_standard_error"]),
    )
    table.add_row("better on", str(whole["num_better"]), str(whole["num_worse"]))
    table.add_row("only in", str(whole["num_only_here"]), str(whole["num_only_there"]))
    say_rich(Text(f"\ncompared with {whole['with']}", style="bold"))
    say_rich(table)
    difference = with_error(whole["difference"], whole["standard_error"], sign="+")
    say_rich(Text(f"difference {difference}, p = {whole['p_value']:.3g} ({whole['test']})\n"))
    differing = [p for p in problems if p["accuracy"] != p["other_accuracy"]]
    table = _grid("this one", "the other", "problem")
    for problem in differing[:NUM_DIFFERING]:
        prompt = Text(printable(" ".join(str(problem["prompt"]).split())))
        prompt.truncate(PROMPT_CHARACTERS, overflow="ellipsis")
        table.add_row(f"{problem['accuracy']:.3f}", f"{problem['other_accuracy']:.3f}", prompt)
    if differing:
        say_rich(table)
    if len(differing) > NUM_DIFFERING:
        say(f"and {counted(len(differing) - NUM_DIFFERING, 'more problem')}")
    say_rich(Text(f"all problems: {file}", style="dim"))


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
