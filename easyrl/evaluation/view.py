"""Output of `easyrl eval`: progress while problems are answered, then tables of the results."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column, Table
from rich.text import Text

from easyrl import events
from easyrl.evaluation.figures import Answers, rewards_of
from easyrl.events import Event
from easyrl.formatting import counted
from easyrl.observe.lines import mean_reward, sampling_text, with_error
from easyrl.observe.text import clock, is_live_terminal, safe, say, say_once, say_rich
from easyrl.runtime.metrics import is_correct, mean_and_error

Named = Mapping[str, Any]  # values by the keys of `eval.json`
LIVE_SECONDS = 1.0  # between two updates of the bar
LINE_SECONDS = 5.0  # between two lines


class EvalView:
    """Print an evaluation. Progress is a bar on a terminal, else a line every few seconds."""

    def __init__(self, *, live: bool) -> None:
        self._is_live = live and is_live_terminal()
        figures = TextColumn("{task.fields[figures]}", markup=False)
        self.bar = Progress(BarColumn(), MofNCompleteColumn(), figures, disable=not self._is_live)
        self._shown: set[str] = set()
        self._next_report = 0.0

    def start(self, about: Named, folder: Path, placement: str, total: int, num_done: int) -> None:
        """Print what is evaluated. `about`: its settings; `num_done`: problems that are answered
        already, of `total`."""
        self._correct_reward = about["correct_reward"]
        self._total = total
        self._num_before = num_done
        self.bar.add_task("", total=total, completed=num_done, figures="")
        say(
            f"evaluation of {about['model']} on {about['dataset']}: {counted(total, 'problem')}, "
            f"{sampling_text(about)}\nfolder {folder}\n{placement}"
        )
        if num_done:
            say(f"{num_done} of them are already answered")

    def observe(self, event: Event) -> None:
        match event:
            case events.FromWorker(_, _, events.Starting(what)):
                say_once(self._shown, what, what)
            case events.FromWorker(event=events.PromptEvaluated(errors=[message, *_])):
                about = (
                    "the evaluation continues (reward.on_error); all errors: reward_errors.jsonl"
                )
                say_once(self._shown, "errors", f"{message}\n{about}")
            case events.Note(text) if text:
                say(safe(text))

    def show_progress(self, seconds: float, answers: Answers, num_tokens: int) -> None:
        """Show the figures of all `answers` so far. `seconds`, `num_tokens`: of the answers of this
        command."""
        num_left = self._total - len(answers)
        is_due = seconds >= self._next_report or num_left == 0
        if not is_due:
            return
        self._next_report = seconds + (LIVE_SECONDS if self._is_live else LINE_SECONDS)
        accuracy = error = math.nan
        reward = None
        rewards = rewards_of(answers.values())  # [N, S]
        if len(rewards):
            correct = is_correct(rewards, self._correct_reward)
            accuracy, error = mean_and_error(correct.mean(axis=1))
            reward = float(rewards.mean())
        speed = num_tokens / max(1e-9, seconds)
        num_answered = len(answers) - self._num_before
        seconds_left = num_left * seconds / num_answered
        shown_accuracy = with_error(accuracy, error)
        shown_reward = mean_reward(accuracy, reward)
        figures = (
            f"accuracy {shown_accuracy}{shown_reward}  {speed:,.0f} tokens/s  "
            f"ETA {clock(seconds_left)}"
        )
        self.bar.update(self.bar.task_ids[0], completed=len(answers), figures=figures)
        if not self._is_live:
            say(f"{len(answers)}/{self._total}  {figures}")


def show_results(folder: Path, results: Named) -> None:
    """Print the content of `eval.json`."""
    table = _grid("", "")
    table.add_row("accuracy", _with_error(results, "accuracy", "standard_error"))
    if results["accuracy"] is not None:
        table.add_row("pass@k", _pass_text(results["pass_at_k"]))
        means = [_with_error(results, "reward", "reward_standard_error")]
        for name, mean in results["rewards"].items():
            means.append(f"{name}: {mean:.3f}")
        table.add_row("mean reward", Text("  ".join(means)))
    table.add_row("problems", _problems_text(results))
    table.add_row("mean length", _length_text(results))
    speed = results["tokens_per_second"]
    if speed is not None:  # None: nothing was left to answer
        seconds = results["wall_seconds"]
        table.add_row("speed", f"{speed:,.0f} tokens/s for {seconds:.1f} s")
    say_rich(table)
    say_rich(Text(f"in {folder}: eval.json, samples.jsonl", style="dim"))


def _with_error(figures: Named, name: str, error: str, sign: str = "") -> str:
    return with_error(figures[name], figures[error], sign=sign)


def _length_text(results: Named) -> str:
    sampled = results["mean_completion_length"]
    inserted = results["mean_inserted_length"]
    truncated = results["truncated_share"]
    text = f"{sampled:.1f} tokens"
    if results["inserted_tokens"]:
        text += f" sampled and {inserted:.1f} inserted"
    return f"{text}, {truncated:.1%} truncated"


def _pass_text(pass_at_k: Mapping[str, float]) -> str:
    """Return pass@k for powers of two, and for the largest k."""
    largest = max(map(int, pass_at_k))
    shown = []
    for k, value in pass_at_k.items():
        number = int(k)
        if number.bit_count() == 1 or number == largest:
            shown.append(f"{k}: {value:.3f}")
    return "  ".join(shown)


def _problems_text(results: Named) -> str:
    num_problems = results["num_problems"]
    num_skipped = results["num_skipped"]
    num_too_long = results["num_too_long"]
    text = f"{num_problems}, {sampling_text(results)}"
    if num_skipped:
        text += f"; {num_skipped} more with a failed reward call"
    if num_too_long:
        text += f"; {num_too_long} more skipped as too long"
    return text


def show_comparison(figures: Named, other: str, file: Path) -> None:
    """Print the figures of `figures.compare`; `file` lists the problems."""
    table = _grid("", "this one", other)
    num_common = counted(figures["num_problems"], "common problem")
    titles = {"accuracy": f"accuracy on {num_common}", "reward": "mean reward"}
    for name, title in titles.items():
        own = _with_error(figures, name, f"{name}_standard_error")
        others = _with_error(figures, f"other_{name}", f"other_{name}_standard_error")
        table.add_row(title, own, others)
    table.add_row("better on", str(figures["num_better"]), str(figures["num_worse"]))
    say_rich(table)
    difference = _with_error(figures, "difference", "standard_error", sign="+")
    p_value = figures["p_value"]
    test = figures["test"]
    say(f"difference {difference}, p = {p_value:.3g} ({test})")
    say_rich(Text(f"all problems: {file}", style="dim"))


def _grid(*headings: str) -> Table:
    columns = [Column(Text(heading), overflow="fold") for heading in headings]
    return Table(
        *columns, show_header=any(headings), box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
