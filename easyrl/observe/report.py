"""Plain output: one line per iteration, and a table at the end.

Used without a terminal and with --no-live; the table also follows the live view.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from easyrl import events
from easyrl.config import Config
from easyrl.events import Event, FromWorker
from easyrl.formatting import counted
from easyrl.model.checkpoint_files import CHECKPOINTS
from easyrl.observe.text import safe, say, say_rich, shown

PROBLEMS = {
    "reward_errors": ("reward call", "failed"),
    "groups_skipped": ("group", "skipped"),
    "groups_not_replaced": ("group", "without advantages"),
    "num_updates_not_finite": ("update", "dropped, not finite (lower train.learning_rate)"),
}
"""Counts in the metrics that a user should be warned about: of what, and what happened to it."""


def problems_in(counts: Mapping[str, Any]) -> list[str]:
    return [
        f"{counted(int(counts[name]), noun)} {what}"
        for name, (noun, what) in PROBLEMS.items()
        if counts.get(name)
    ]


class PlainLines:
    """Print to standard output; why a run failed goes to standard error."""

    def __init__(self) -> None:
        self._folder, self._config = Path(), Config()
        self._started = 0.0
        self._shown: set[str] = set()

    def __call__(self, event: Event) -> None:
        match event:
            case events.RunStarted(started, folder, config):
                self._started, self._folder, self._config = started, folder, config
                say(f"run folder {folder}\n{event.description}")
            case FromWorker(_, time, worker_event):
                self._report_worker(worker_event, time)
            case events.Evaluated():
                after = f" after iteration {event.num_iterations}" if event.round > 1 else ""
                accuracy = with_error(event.accuracy, event.standard_error)
                say(
                    f"held-out accuracy {accuracy} ({counted(event.num_prompts, 'problem')}){after}"
                )
            case events.IterationFinished(_, metrics):
                self._report_iteration(metrics)
            case events.Note(text) | events.NoEvents(warning=text) if text:
                say(safe(text))
            case events.RunFinished(_, summary):
                say_rich(end_table(summary, self._folder, self._config))
            case events.RunEnded(exit_code, message) if message:
                print_end(exit_code, message)

    def _report_worker(self, event: events.WorkerEvent, time: float) -> None:
        match event:
            case events.Starting(what) if what not in self._shown:  # once for all workers
                self._shown.add(what)
                say(f"{what} (after {time - self._started:.1f} s)")
            case (
                events.GroupScored(errors=[message, *_])
                | events.PromptEvaluated(errors=[message, *_])
            ) if "errors" not in self._shown:
                self._shown.add("errors")
                file = self._folder / "reward_errors.jsonl"
                say(f"{safe(message)}\nthe run continues (reward.on_error); all errors: {file}")
            case events.CheckpointSaved(version, seconds, num_bytes, ""):
                iteration = version // self._config.train.updates_per_iteration
                path = self._folder / CHECKPOINTS / str(version)
                size = f"{num_bytes / 2**20:,.0f} MiB in {seconds:.1f} s"
                say(f"checkpoint of iteration {iteration}: {path} ({size})")

    def _report_iteration(self, metrics: Mapping[str, Any]) -> None:
        number = metrics["iteration"] + 1
        replaced = metrics.get("groups_replaced")
        say(
            f"iteration {number}/{self._config.train.iterations}  "
            f"reward {shown(metrics['reward'], '.3f')}  "
            f"length {metrics['completions/mean_length']:.1f}  "
            f"loss {shown(metrics['loss'], '+.4f')}  "
            f"grad_norm {shown(metrics['grad_norm'], '.3f')}  "
            f"{metrics['perf/iteration_seconds']:.2f} s  "
            f"{metrics['perf/tokens_per_second']:.0f} tokens/s"
            + (f"  replaced {replaced}" if replaced else "")
        )
        if problems := problems_in(metrics):
            say(f"iteration {number}: {', '.join(problems)}")


def with_error(value: float | None, error: float | None, sign: str = "") -> str:
    """`0.500 ± 0.050`; without the error if that is undefined."""
    text = shown(value, f"{sign}.3f")
    return text if shown(error, "") == "none" else f"{text} ± {error:.3f}"


def print_end(exit_code: int, message: str) -> None:
    """Print why a run did not finish."""
    if exit_code == 0 or exit_code > 128:  # nothing to do, or stopped by the user
        say(safe(message))
    else:
        say(f"easyrl: {safe(message)}", sys.stderr)


def end_table(summary: Mapping[str, Any], folder: Path, config: Config) -> RenderableType:
    """Return what a finished run reached, at what speed, and the next commands."""
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(summary):
        table.add_row(name, value)
    table.add_row("run folder", Text(str(folder)))
    if config.model.lora.rank is not None:
        table.add_row("  model/", "the adapter merged into the model, for transformers and vLLM")
        table.add_row("  adapter/", "for peft: AutoPeftModelForCausalLM.from_pretrained")
    lines = [Text("\nnext commands", style="dim")]
    for command, what in _next_commands(folder, config).items():
        line = Text(f"  {command}", style="bold", no_wrap=True, overflow="ignore")
        lines.append(line.append(f"  # {what}", style="not bold dim"))
    return Group(Text("finished", style="bold green"), table, *lines)


def _rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    before, after = summary["accuracy_before"], summary["accuracy_after"]
    if after is not None:
        start = "" if before is None else f"{shown(before, '.3f')} -> "
        yield "held-out accuracy", start + shown(after, ".3f")
    if (best := summary.get("accuracy_best")) is not None:
        yield "  best", f"{best:.3f} after iteration {summary['iterations_best']}"
    yield "reward", " -> ".join(shown(summary[f"reward_{end}"], ".3f") for end in ("first", "last"))
    trained = summary["completion_tokens"]
    generated = summary.get("generated_tokens", trained)
    speed = (
        f"{trained:,} tokens in {summary['wall_seconds']:.1f} s, "
        f"{summary['tokens_per_second_per_device']:,.0f} tokens/s per device"
    )
    if generated == trained:
        yield "generated and trained", speed
    else:
        yield "trained", f"{speed}; {generated:,} generated"
    yield "overlap", f"{summary['overlap']:.0%} of the shorter of generating and training"
    groups = f"{summary['groups_trained']} trained, {summary['groups_off_policy']} off-policy"
    for name in ("skipped", "replaced"):
        if count := summary.get(f"groups_{name}"):
            groups += f", {count} {name}"
    yield "groups", groups
    if (updates := summary.get("updates_per_iteration", 1)) > 1:
        yield "updates", f"{updates} per iteration: only the first is strictly on-policy"
    not_finite = {"num_updates_not_finite": summary["updates_not_finite"]}
    for problem in problems_in({**summary, **not_finite, "groups_skipped": 0}):
        yield "warning", problem
    gap = shown(summary["sampling_logp_difference_max"], ".1e")
    yield (
        "engine and trainer",
        "not compared: no group had a gradient"
        if gap == "none"
        else f"log-probabilities differ by at most {gap}",
    )
    yield "weights", f"sha256 {summary['weights_sha256'][:16]}"


def _next_commands(folder: Path, config: Config) -> Mapping[str, str]:
    """Commands, and what each does. To train on, resume if there are checkpoints; else start a new
    run from the final model."""
    run = quote(str(folder))
    if config.train.keep_checkpoints:
        train_on = f"easyrl grpo --resume {run} --iterations {2 * config.train.iterations}"
    else:
        model, file = (quote(str(folder / name)) for name in ("model", "config.yaml"))
        new = quote(f"{folder}-2")
        train_on = f"easyrl grpo --config {file} --model {model} --output {new}"
        if config.train.learning_rate is None:  # null means another rate for another model
            train_on += f" train.learning_rate={config.learning_rate:g}"
    return {
        f"easyrl watch {run}": "show the run again",
        f"easyrl config --diff {run}": "settings that differ from the defaults",
        train_on: "train on",
    }
