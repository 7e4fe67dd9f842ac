"""Output of `easyrl eval`: progress while problems are answered, then tables of the results."""

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


class EvalView:
    """Print an evaluation. Progress is a bar on a terminal, else a line every few seconds."""

    def __init__(self, *, live: bool) -> None:
        self._is_live = live and is_live_terminal()
        figures = TextColumn("{task.fields[figures]}", markup=False)
        self.bar = Progress(BarColumn(), MofNCompleteColumn(), figures, disable=not self._is_live)
        self._shown: set[str] = set()
        self._next_report = 0.0

    def start(self, about: Named, folder: Path, placement: str, total: int, num_done: int) -> None:
        self._correct_reward = about["correct_reward"]
        self._total, self._num_before = total, num_done
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
                about = "the evaluation continues (reward.on_error)"
                say_once(self._shown, "errors", f"{message}\n{about}")
            case events.Note(text) if text:
                say(safe(text))

    def show_progress(self, seconds: float, answers: Answers, num_tokens: int) -> None:
        """`answers`: all so far; `seconds`, `num_tokens`: of the answers of this command."""
        num_left = self._total - len(answers)
        if seconds < self._next_report and num_left:
            return
        self._next_report = seconds + (1.0 if self._is_live else 5.0)
        rewards = rewards_of(answers.values())  # [N, S]
        correct = is_correct(rewards, self._correct_reward).mean(axis=1) if len(rewards) else []
        accuracy, error = mean_and_error(correct)
        mean = mean_reward(accuracy, float(rewards.mean()) if len(rewards) else None)
        speed = f"{num_tokens / max(1e-9, seconds):,.0f} tokens/s"
        remaining = clock(num_left * seconds / (len(answers) - self._num_before))
        figures = f"accuracy {with_error(accuracy, error)}{mean}  {speed}  ETA {remaining}"
        self.bar.update(self.bar.task_ids[0], completed=len(answers), figures=figures)
        if not self._is_live:
            say(f"{len(answers)}/{self._total}  {figures}")


def show_results(folder: Path, results: Named) -> None:
    table = _grid("", "")
    table.add_row("accuracy", with_error(results["accuracy"], results["standard_error"]))
    if results["accuracy"] is not None:
        values = results["pass_at_k"]
        ks = [k for k in values if int(k).bit_count() == 1 or k == list(values)[-1]]
        table.add_row("pass@k", "  ".join(f"{k}: {values[k]:.3f}" for k in ks))
        reward = with_error(results["reward"], results["reward_standard_error"])
        means = [f"{name}: {mean:.3f}" for name, mean in results["rewards"].items()]
        table.add_row("mean reward", Text("  ".join([reward, *means])))
    problems = f"{results['num_problems']}, {sampling_text(results)}"
    if results["num_skipped"]:
        problems += f"; {results['num_skipped']} more with a failed reward call"
    if results["num_too_long"]:
        problems += f"; {results['num_too_long']} more skipped as too long"
    table.add_row("problems", problems)
    length = f"{results['mean_completion_length']:.1f} tokens"
    if results["inserted_tokens"]:
        length += f" sampled and {results['mean_inserted_length']:.1f} inserted"
    table.add_row("mean length", f"{length}, {results['truncated_share']:.1%} truncated")
    if (speed := results["tokens_per_second"]) is not None:  # None: nothing was left to answer
        table.add_row("speed", f"{speed:,.0f} tokens/s for {results['wall_seconds']:.1f} s")
    say_rich(table)
    say_rich(Text(f"in {folder}: eval.json, samples.jsonl", style="dim"))


def show_comparison(figures: Named, other: str, file: Path) -> None:
    """Print the figures of `figures.compare`; `file` lists the problems."""
    table = _grid("", "this one", other)
    num = counted(figures["num_problems"], "common problem")
    for title, name in ((f"accuracy on {num}", "accuracy"), ("mean reward", "reward")):
        both = (name, f"other_{name}")
        values = [with_error(figures[key], figures[f"{key}_standard_error"]) for key in both]
        table.add_row(title, *values)
    table.add_row("better on", str(figures["num_better"]), str(figures["num_worse"]))
    say_rich(table)
    difference = with_error(figures["difference"], figures["standard_error"], sign="+")
    say(f"difference {difference}, p = {figures['p_value']:.3g} ({figures['test']})")
    say_rich(Text(f"all problems: {file}", style="dim"))


def _grid(*headings: str) -> Table:
    columns = [Column(Text(heading), overflow="fold") for heading in headings]
    return Table(
        *columns, show_header=any(headings), box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
