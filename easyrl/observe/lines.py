"""Plain output: one line per iteration, and a table at the end.

Used without a terminal and with --no-live; the table also follows the live view.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from importlib.util import find_spec
from shlex import quote
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from easyrl import events
from easyrl.config.rollout import SamplingChoice
from easyrl.config.spec import RunSpec
from easyrl.events import Event, FromWorker
from easyrl.formatting import EXTRAS, counted, printable, shorten
from easyrl.model.checkpoint_files import CHECKPOINTS
from easyrl.observe.state import problems_in
from easyrl.observe.text import safe, say, say_once, say_rich, shown
from easyrl.runtime.metrics import LAST_ITERATIONS

LOW_OVERLAP, SMALL_SHARE, IMBALANCE = 0.5, 0.1, 0.25
"""Below this overlap the table says what raises it, unless generating or training takes less than
SMALL_SHARE of the time. If the two sides' busy shares differ by more than IMBALANCE, both are
shown."""


class PlainLines:
    """Print to standard output; why a run failed goes to standard error."""

    def __init__(self) -> None:
        self._run: events.RunStarted
        self._shown: set[str] = set()

    def __call__(self, event: Event) -> None:
        match event:
            case events.RunStarted(_, folder):
                self._run = event
                say(f"run folder {folder}\n{event.description}")
            case FromWorker(_, time, events.Starting(what)):
                say_once(self._shown, what, f"{what} (after {time - self._run.started:.1f} s)")
            case (
                FromWorker(event=events.GroupScored(errors=[error, *_]))
                | FromWorker(event=events.PromptEvaluated(errors=[error, *_]))
            ):
                file = self._run.folder / "reward_errors.jsonl"
                about = f"the run continues (reward.on_error); all errors: {file}"
                say_once(self._shown, "errors", f"{error}\n{about}")
            case FromWorker(_, _, events.CheckpointSaved(version, seconds, num_bytes, "")):
                iteration = version // self._run.spec.schedule.updates_per_iteration
                path = self._run.folder / CHECKPOINTS / str(version)
                size = f"{num_bytes / 2**20:,.0f} MiB in {seconds:.1f} s"
                say(f"checkpoint of iteration {iteration}: {path} ({size})")
            case events.EvaluationStarted(_, num_prompts):
                say(f"evaluating {counted(num_prompts, 'held-out problem')}")
            case events.Evaluated(_, accuracy, num_prompts, error, num_iterations, reward):
                sampling = training_sampling(self._run.spec.sampling)
                how = f"{counted(num_prompts, 'problem')}, {sampling}"
                trained = counted(num_iterations, "iteration")
                value = with_error(accuracy, error) + mean_reward(accuracy, reward)
                say(f"held-out accuracy {value} ({how}) after {trained}")
            case events.IterationFinished(_, metrics):
                self._report_iteration(metrics)
            case events.Note(text) if text:
                say(safe(text))
            case events.RunFinished(_, summary):
                say_rich(end_table(self._run, summary))
            case events.RunEnded(exit_code, message) if message:
                print_end(exit_code, message)

    def _report_iteration(self, metrics: Mapping[str, Any]) -> None:
        number = metrics["iteration"]
        to_teacher = metrics.get("teacher/kl")
        teacher = "" if to_teacher is None else f"teacher KL {to_teacher:.4f}  "
        calls = f"tool calls {metrics['tools/calls']:.1f}  " if "tools/calls" in metrics else ""
        num_inserted = metrics.get("completions/mean_inserted_length")
        inserted = "" if num_inserted is None else f"inserted {num_inserted:.1f}  "
        say(
            f"iteration {number}/{self._run.spec.schedule.iterations}  "
            f"reward {shown(metrics['reward'], '.3f')}  "
            f"no spread {shown(metrics.get('frac_reward_zero_std'), '.0%')}  "
            f"length {metrics['completions/mean_length']:.1f}  {inserted}"
            f"loss {shown(metrics['loss'], '+.4f')}  "
            f"grad_norm {shown(metrics['grad_norm'], '.3f')}  {teacher}{calls}"
            f"{metrics['perf/iteration_seconds']:.2f} s  "
            f"{metrics['perf/tokens_per_second']:.0f} tokens/s"
        )
        if problems := problems_in(metrics):
            say(f"iteration {number}: {', '.join(problems)}")


def function_of(metric: str) -> str:
    """Return the name of the reward function whose mean the metric is; empty for other metrics."""
    match = re.fullmatch("rewards/(.+)/mean", metric)
    return printable(match[1]) if match else ""


def with_error(value: float | None, error: float | None, sign: str = "") -> str:
    """`0.500 ± 0.050`; without the error if that is undefined."""
    text = shown(value, f"{sign}.3f")
    return text if shown(error, "") == "none" else f"{text} ± {error:.3f}"


def mean_reward(accuracy: float | None, reward: float | None) -> str:
    """`, mean reward 0.500` of graded rewards; empty where it is the accuracy."""
    is_graded = accuracy is not None and reward is not None and abs(accuracy - reward) > 1e-5
    return f", mean reward {reward:.3f}" if is_graded else ""


def sampling_text(about: Mapping[str, Any]) -> str:
    if about["temperature"] == 0:
        return "one greedy answer each"
    text = f"{counted(about['num_samples'], 'sample')} each at temperature {about['temperature']:g}"
    if about["top_p"] < 1:
        text += f", top_p {about['top_p']:g}"
    return text + (f", top_k {about['top_k']}" if about["top_k"] else "")


def training_sampling(sampling: SamplingChoice) -> str:
    """Describe how a run samples the answers to its held-out problems."""
    return sampling_text(asdict(replace(sampling, num_samples=1)))


def print_end(exit_code: int, message: str) -> None:
    if exit_code == 0 or exit_code > 128:  # nothing to do, or stopped by the user
        say(safe(message))
    else:
        say(f"easyrl: {safe(message)}", sys.stderr)


def end_table(run: events.RunStarted, summary: Mapping[str, Any]) -> RenderableType:
    """Return what a finished run reached, at what speed, and the next commands."""
    columns = Column(style="dim", no_wrap=True), Column(overflow="fold")
    table = Table(*columns, show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, value in result_rows(summary, run.spec, run.devices):
        table.add_row(name, value)
    table.add_row("run folder", Text(str(run.folder)))
    folder, schedule = quote(str(run.folder)), run.spec.schedule
    commands = [f"easyrl samples {folder}"]
    if find_spec(EXTRAS["report"]) is not None:
        commands.append(f"easyrl report {folder}")
    if schedule.keep_checkpoints:
        commands.append(f"easyrl grpo --resume {folder} --iterations {2 * schedule.iterations}")
    lines = [Text(f"  {each}", no_wrap=True, overflow="ignore") for each in commands]
    return Group(Text("finished", "bold green"), table, Text("next commands", "dim"), *lines)


def result_rows(
    summary: Mapping[str, Any], spec: RunSpec, devices: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Yield names and results. `summary`: as `summary.json`, or without what only the end gives."""
    whens = ("before", "after")
    if summary["accuracy_after"] is not None:
        pairs = [(summary[f"accuracy_{when}"], summary.get(f"error_{when}")) for when in whens]
        values = " → ".join(with_error(*pair) for pair in pairs)
        yield "held-out accuracy", f"{values} ({training_sampling(spec.sampling)})"
        rewards = [summary.get(f"held_out_reward_{when}") for when in whens]
        if any(map(mean_reward, (summary[f"accuracy_{when}"] for when in whens), rewards)):
            yield "  mean reward", " → ".join(shown(each, ".3f") for each in rewards)
        best = summary.get("accuracy_best")
        if best is not None and best > summary["accuracy_after"]:
            yield "  best", f"{best:.3f} after iteration {summary['iterations_best']}"
    if summary["reward_last"] is not None:
        values = " → ".join(shown(summary[f"reward_{when}"], ".3f") for when in ("first", "last"))
        is_mean = summary["iterations"] >= 2 * LAST_ITERATIONS
        each = f"means of the first and last {LAST_ITERATIONS} iterations"
        yield "reward", f"{values} ({each if is_mean else 'first and last iteration'})"
        functions = summary.get("rewards", {})  # not in older ones
        for name, ends in functions.items() if len(functions) > 1 else ():
            yield f"  {shorten(name, 24)}", " → ".join(shown(value, ".3f") for value in ends)
    tokens, wall_seconds = summary["completion_tokens"], summary.get("wall_seconds")
    groups = f"{summary['groups_trained']} groups, {summary['groups_off_policy']} off-policy"
    time = f" in {wall_seconds:.1f} s" if wall_seconds else ""
    inserted = summary.get("inserted_tokens", 0)  # not in older ones
    kinds = f"sampled and {inserted:,} inserted tokens" if inserted else "tokens"
    yield "trained", f"{groups}; {tokens:,} {kinds}{time}"
    if (seconds := summary.get("iteration_seconds", 0.0)) > 0:
        per_device = summary["tokens_per_second_per_device"]
        speed = f"{tokens / seconds:,.0f} in iterations ({per_device:,.0f} per device)"
        whole = f", {tokens / wall_seconds:,.0f} with start-up" if wall_seconds else ""
        yield "tokens/s", speed + whole
        yield from _balance(summary, spec.schedule.schedule, devices)
    if (updates := summary["updates_per_iteration"]) > 1:
        yield "updates", f"{updates} per iteration: only the first is strictly on-policy"
    if (calls := summary.get("judge_calls")) is not None:
        text = f"{calls:,.0f} calls, {summary['judge_retries']:,.0f} of them retries; "
        text += f"{summary['judge_cache_hits']:,.0f} answers from the cache; "
        text += f"{summary['judge_tokens']:,.0f} tokens"
        yield "judge", f"{text}, {summary['judge_seconds']:,.0f} s of requests, added"
    if cut_off := summary.get("judge_cut_off"):  # older runs did not count them
        text = f"{counted(int(cut_off), 'answer')} without a score: set a higher max_tokens in "
        yield "  cut off", f"{text}reward.judge.options"
    counts = {**summary, "num_updates_not_finite": summary["updates_not_finite"]}
    if problems := problems_in(counts):
        yield "warning", ", ".join(problems)
    gap = shown(summary["sampling_logp_difference_max"], ".1e")
    if gap != "none":  # else no group had a gradient
        yield "engine and trainer", f"log-probabilities differ by at most {gap}"
    if sha256 := summary.get("weights_sha256"):
        yield "weights", f"sha256 {sha256[:16]}"


def _balance(
    summary: Mapping[str, Any], schedule: str, devices: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """The overlap, and what raises a low one; how busy each side was, if they differ much."""
    seconds = summary["iteration_seconds"]
    infer, train = summary["infer_seconds"] / seconds, summary["train_seconds"] / seconds
    engines = [name for worker, name in devices.items() if worker.startswith("rollout")]
    trainers = [name for worker, name in devices.items() if worker.startswith("train")]
    is_shared = engines != [] and engines == trainers and "cpu" not in engines[0]
    both = ("generating", "training") if infer < train else ("training", "generating")
    text = f"{summary['overlap']:.0%} of {both[0]} ran while {both[1]}"
    is_low = summary["overlap"] < LOW_OVERLAP and min(infer, train) >= SMALL_SHARE
    if is_low and schedule == "periodic" and not is_shared:
        text += "; a higher train.prompts_per_iteration raises it"
    yield "overlap", text
    if engines and trainers and not is_shared and abs(infer - train) > IMBALANCE:
        hint = f"; for a better split: easyrl plan RUN --devices {len(devices)}"
        text = f"rollout workers busy {infer:.0%}, trainer {train:.0%}"
        yield "balance", text + hint * (len(devices) > 2)


def status_table(status: Mapping[str, Any]) -> RenderableType:
    """Show the reply of a live run to `easyrl status`."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    columns = ("name", "pid", "device", "state", "restarts")
    for name in columns:
        table.add_column(name, justify="right" if name in ("pid", "restarts") else "left")
    for worker in status["workers"]:
        table.add_row(*(str(worker[name]) for name in columns))
    rollout, train = (shown(status["waiting"][side], ".0%") for side in ("rollout", "train"))
    text = (
        f"{status['iteration']} of {counted(status['num_iterations'], 'iteration')} done\n"
        f"waiting in the last iterations: rollout workers {rollout}, train workers {train}\n"
        f"rollout workers that balance both: {shown(status['balanced_rollout_workers'], 'd')}"
    )
    return Group(table, Text(text))
