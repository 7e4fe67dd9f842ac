"""Plain output: one line per iteration, and a table at the end.

Used without a terminal and with --no-live; the table also follows the live view.
"""

import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
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
from easyrl.runtime.verdict import accuracy_change

LOW_OVERLAP = 0.5
"""Below this overlap the table says what raises it."""
SMALL_SHARE = 0.1
"""If generating or training takes a smaller share of the time, a low overlap costs little."""
IMBALANCE = 0.25
"""If the busy shares of the two sides differ by more than this, both are shown."""
SAME_REWARD = 1e-5
"""A mean reward that differs less from the accuracy is equal to it: rewards are sums in float32."""
MANY_CUT_OFF = 0.5
"""From this share of completions on that reach the limit, it is shown."""
ROWS_OF_SPEED = ("tokens/s", "overlap", "balance")
"""Results that are left out where nothing was learned: the reason is more important."""
Row = tuple[str, str]  # name and value, of a table


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
                seconds = time - self._run.started
                say_once(self._shown, what, f"{what} (after {seconds:.1f} s)")
            case (
                FromWorker(event=events.GroupScored(errors=[error, *_]))
                | FromWorker(event=events.PromptEvaluated(errors=[error, *_]))
            ):
                file = self._run.folder / "reward_errors.jsonl"
                about = f"the run continues (reward.on_error); all errors: {file}"
                say_once(self._shown, "errors", f"{error}\n{about}")
            case FromWorker(event=events.CheckpointSaved(error="") as saved):
                self._report_checkpoint(saved)
            case events.EvaluationStarted(_, num_prompts):
                say(f"evaluating {counted(num_prompts, 'held-out problem')}")
            case events.Evaluated():
                self._report_evaluation(event)
            case events.IterationFinished(_, metrics):
                self._report_iteration(metrics)
            case events.Note(text) if text:
                say(safe(text))
            case events.RunFinished(_, summary):
                say_rich(end_table(self._run, summary))
            case events.RunEnded(exit_code, message) if message:
                print_end(exit_code, message)

    def _report_checkpoint(self, saved: events.CheckpointSaved) -> None:
        version = saved.policy_version
        iteration = version // self._run.spec.schedule.updates_per_iteration
        path = self._run.folder / CHECKPOINTS / str(version)
        mib = saved.num_bytes / 2**20
        seconds = saved.seconds
        say(f"checkpoint of iteration {iteration}: {path} ({mib:,.0f} MiB in {seconds:.1f} s)")

    def _report_evaluation(self, evaluated: events.Evaluated) -> None:
        accuracy = evaluated.accuracy
        value = with_error(accuracy, evaluated.standard_error)
        value += mean_reward(accuracy, evaluated.reward)
        problems = counted(evaluated.num_prompts, "problem")
        sampling = training_sampling(self._run.spec.sampling)
        trained = counted(evaluated.num_iterations, "iteration")
        say(f"held-out accuracy {value} ({problems}, {sampling}) after {trained}")

    def _report_iteration(self, metrics: Mapping[str, Any]) -> None:
        number = metrics["iteration"]
        total = self._run.spec.schedule.iterations
        length = metrics["completions/mean_length"]
        parts = [f"iteration {number}/{total}"]
        if not self._run.spec.rewards.scores_nothing:
            reward = shown(metrics["reward"], ".3f")
            no_spread = shown(metrics.get("frac_reward_zero_std"), ".0%")
            parts.append(f"reward {reward}")
            parts.append(f"no spread {no_spread}")
        parts.append(f"length {length:.1f}")
        cut_off = metrics.get("completions/clipped_ratio")
        if cut_off is not None and cut_off >= MANY_CUT_OFF:
            parts.append(f"cut off {cut_off:.0%}")
        num_inserted = metrics.get("completions/mean_inserted_length")
        if num_inserted is not None:
            parts.append(f"inserted {num_inserted:.1f}")
        loss = shown(metrics["loss"], "+.4f")
        grad_norm = shown(metrics["grad_norm"], ".3f")
        parts.append(f"loss {loss}")
        parts.append(f"grad_norm {grad_norm}")
        to_teacher = metrics.get("teacher/kl")
        if to_teacher is not None:
            parts.append(f"teacher KL {to_teacher:.4f}")
        if "tools/calls" in metrics:
            parts.append(f"tool calls {metrics['tools/calls']:.1f}")
        seconds = metrics["perf/iteration_seconds"]
        speed = metrics["perf/tokens_per_second"]
        parts.append(f"{seconds:.2f} s")
        parts.append(f"{speed:.0f} tokens/s")
        say("  ".join(parts))
        problems = problems_in(metrics)
        if problems:
            say(f"iteration {number}: {', '.join(problems)}")


def function_of(metric: str) -> str:
    """Return the name of the reward function whose mean the metric is; empty for other metrics."""
    match = re.fullmatch("rewards/(.+)/mean", metric)
    return printable(match[1]) if match else ""


def with_error(value: float | None, error: float | None, sign: str = "") -> str:
    """Return `0.500 ± 0.050`; without the error if that is undefined. `sign`: as in a format."""
    text = shown(value, f"{sign}.3f")
    if error is None or math.isnan(error):
        return text
    return f"{text} ± {error:.3f}"


def mean_reward(accuracy: float | None, reward: float | None) -> str:
    """Return `, mean reward 0.500` of graded rewards; empty where it is the accuracy."""
    if accuracy is None or reward is None:
        return ""
    is_graded = abs(accuracy - reward) > SAME_REWARD
    return f", mean reward {reward:.3f}" if is_graded else ""


def sampling_text(about: Mapping[str, Any]) -> str:
    """Describe how answers were sampled, as in `4 samples each at temperature 0.6, top_p 0.95`."""
    if about["temperature"] == 0:
        return "one greedy answer each"
    samples = counted(about["num_samples"], "sample")
    text = f"{samples} each at temperature {about['temperature']:g}"
    if about["top_p"] < 1:
        text += f", top_p {about['top_p']:g}"
    if about["top_k"]:
        text += f", top_k {about['top_k']}"
    return text


def training_sampling(sampling: SamplingChoice) -> str:
    """Describe how a run samples the answers to its held-out problems."""
    return sampling_text(asdict(replace(sampling, num_samples=1)))


def print_end(exit_code: int, message: str) -> None:
    if exit_code == 0 or exit_code > 128:  # nothing to do, or stopped by the user
        say(safe(message))
    else:
        say(f"easyrl: {safe(message)}", sys.stderr)


def verdict_lines(summary: Mapping[str, Any]) -> list[str]:
    """Return why a run has learned nothing, the usual causes and what to look at; empty if it has
    learned something. `summary`: as `summary.json`."""
    nothing = summary.get("nothing_learned")  # older versions lack it
    if not nothing:
        return []
    causes = [f"{number}. {cause}" for number, cause in enumerate(nothing["causes"], 1)]
    return [f"nothing was learned: {nothing['reason']}", "usual causes:", *causes]


def end_table(run: events.RunStarted, summary: Mapping[str, Any]) -> RenderableType:
    """Return what a finished run reached, at what speed, and the next commands. Of a run that has
    learned nothing that stands first, and where to look."""
    table = Table(
        Column(style="dim", no_wrap=True),
        Column(overflow="fold"),
        show_header=False,
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    verdict = verdict_lines(summary)
    for name, value in result_rows(summary, run.spec, run.devices):
        if not (verdict and name in ROWS_OF_SPEED):
            table.add_row(name, value)
    table.add_row("run folder", Text(str(run.folder)))
    folder = quote(str(run.folder))
    schedule = run.spec.schedule
    commands = [f"easyrl samples {folder}"]
    if find_spec(EXTRAS["report"]) is not None:
        commands.append(f"easyrl report {folder}")
    if schedule.keep_checkpoints and not verdict:  # more iterations would not help
        commands.append(f"easyrl grpo --resume {folder} --iterations {2 * schedule.iterations}")
    lines = [Text(f"  {each}", no_wrap=True, overflow="ignore") for each in commands]
    heading = [Text("finished", "bold green")]
    if verdict:
        first, *causes = verdict
        heading = [Text(f"finished, but {first}", "bold yellow")]
        heading += [Text(line) for line in causes]
    return Group(*heading, table, Text("next commands", "dim"), *lines)


def result_rows(
    summary: Mapping[str, Any], spec: RunSpec, devices: Mapping[str, str]
) -> Iterator[Row]:
    """Yield names and results. `summary`: as `summary.json`, or without what only the end gives."""
    if summary["accuracy_after"] is not None:
        yield from _accuracy_rows(summary, spec.sampling)
    if summary["reward_last"] is not None:
        yield from _reward_rows(summary)
    if summary.get("teacher_kl_last") is not None:  # older versions lack it
        kls = [summary["teacher_kl_first"], summary["teacher_kl_last"]]
        yield "teacher KL", f"{_change(kls, '.4f')} ({_ends_of(summary)})"
    cut_off = summary.get("cut_off_last")  # older versions lack it
    if cut_off is not None and cut_off >= MANY_CUT_OFF and not summary.get("nothing_learned"):
        limit = spec.limits.max_completion_length
        text = f"{cut_off:.0%} of the last completions, after {limit} tokens"
        yield "cut off", f"{text}; a higher rollout.max_completion_length may let them end"
    yield from _token_rows(summary)
    if summary.get("iteration_seconds", 0.0) > 0:
        yield from _balance_rows(summary, spec.schedule.schedule, devices)
    updates = summary["updates_per_iteration"]
    if updates > 1:
        yield "updates", f"{updates} per iteration: only the first is strictly on-policy"
    yield from _judge_rows(summary)
    counts = {**summary, "num_updates_not_finite": summary["updates_not_finite"]}
    problems = problems_in(counts)
    if problems:
        yield "warning", ", ".join(problems)
    gap = shown(summary["sampling_logp_difference_max"], ".1e")
    if gap != "none":  # else no group had a gradient
        yield "engine and trainer", f"log-probabilities differ by at most {gap}"
    if summary.get("weights_sha256"):
        yield "weights", f"sha256 {summary['weights_sha256'][:16]}"


def _accuracy_rows(summary: Mapping[str, Any], sampling: SamplingChoice) -> Iterator[Row]:
    """Held-out accuracy before and after, the mean rewards where they differ, and the best."""
    values = []
    rewards = []
    is_graded = False
    for when in ("before", "after"):
        accuracy = summary[f"accuracy_{when}"]
        reward = summary.get(f"held_out_reward_{when}")
        values.append(with_error(accuracy, summary.get(f"error_{when}")))
        rewards.append(reward)
        if mean_reward(accuracy, reward):
            is_graded = True
    text = " → ".join(values)
    change = accuracy_change(summary)
    if change is not None and change.is_clear is False:
        text += ", no clear change"
    about = training_sampling(sampling)
    num_problems = summary.get("held_out_problems")  # older versions lack it
    if num_problems:
        problems = counted(num_problems, "problem")
        about = f"{problems}, {about}"
    yield "held-out accuracy", f"{text} ({about})"
    if is_graded:
        yield "  mean reward", _change(rewards)
    best = summary.get("accuracy_best")
    if best is not None and best > summary["accuracy_after"]:
        yield "  best", f"{best:.3f} after iteration {summary['iterations_best']}"


def _reward_rows(summary: Mapping[str, Any]) -> Iterator[Row]:
    """The reward at the start and at the end; of several reward functions each one's, too."""
    change = _change([summary["reward_first"], summary["reward_last"]])
    yield "reward", f"{change} ({_ends_of(summary)})"
    functions = summary.get("rewards", {})  # older versions lack it
    if len(functions) > 1:
        for name, ends in functions.items():
            short_name = shorten(name, 24)
            yield f"  {short_name}", _change(ends)


def _ends_of(summary: Mapping[str, Any]) -> str:
    """Say which iterations the summary's first and last values are means of."""
    if summary["iterations"] >= 2 * LAST_ITERATIONS:
        return f"means of the first and last {LAST_ITERATIONS} iterations"
    return "first and last iteration"


def _change(values: Iterable[float | None], number_format: str = ".3f") -> str:
    """Return `0.250 → 0.500`."""
    texts = [shown(value, number_format) for value in values]
    return " → ".join(texts)


def _token_rows(summary: Mapping[str, Any]) -> Iterator[Row]:
    """What was trained, and the speed."""
    num_tokens = summary["completion_tokens"]
    wall_seconds = summary.get("wall_seconds")
    num_inserted = summary.get("inserted_tokens", 0)  # older versions lack it
    kinds = f"sampled and {num_inserted:,} inserted tokens" if num_inserted else "tokens"
    groups = f"{summary['groups_trained']} groups, {summary['groups_off_policy']} off-policy"
    trained = f"{groups}; {num_tokens:,} {kinds}"
    if wall_seconds:
        trained += f" in {wall_seconds:.1f} s"
    yield "trained", trained
    seconds = summary.get("iteration_seconds", 0.0)
    if seconds > 0:
        per_device = summary["tokens_per_second_per_device"]
        in_iterations = num_tokens / seconds
        speed = f"{in_iterations:,.0f} in iterations ({per_device:,.0f} per device)"
        if wall_seconds:
            in_all = num_tokens / wall_seconds
            speed += f", {in_all:,.0f} with start-up"
        yield "tokens/s", speed


def _balance_rows(
    summary: Mapping[str, Any], schedule: str, devices: Mapping[str, str]
) -> Iterator[Row]:
    """The overlap, and what raises a low one; how busy each side was, if they differ much."""
    seconds = summary["iteration_seconds"]
    infer = summary["infer_seconds"] / seconds
    train = summary["train_seconds"] / seconds
    engines = [name for worker, name in devices.items() if worker.startswith("rollout")]
    trainers = [name for worker, name in devices.items() if worker.startswith("train")]
    is_shared = bool(engines) and engines == trainers and "cpu" not in engines[0]
    overlap = summary["overlap"]
    if infer < train:
        text = f"{overlap:.0%} of generating ran while training"
    else:
        text = f"{overlap:.0%} of training ran while generating"
    is_low = overlap < LOW_OVERLAP
    costs_time = min(infer, train) >= SMALL_SHARE
    can_overlap = schedule == "periodic" and not is_shared
    if is_low and costs_time and can_overlap:
        text += "; a higher train.prompts_per_iteration raises it"
    yield "overlap", text
    if engines and trainers and not is_shared and abs(infer - train) > IMBALANCE:
        text = f"rollout workers busy {infer:.0%}, trainer {train:.0%}"
        if len(devices) > 2:  # else there is no other split
            text += f"; for a better split: easyrl plan RUN --devices {len(devices)}"
        yield "balance", text


def _judge_rows(summary: Mapping[str, Any]) -> Iterator[Row]:
    """What judging took; nothing without a judge."""
    num_calls = summary.get("judge_calls")
    if num_calls is not None:
        num_retries = summary["judge_retries"]
        num_cached = summary["judge_cache_hits"]
        num_tokens = summary["judge_tokens"]
        seconds = summary["judge_seconds"]
        parts = [
            f"{num_calls:,.0f} calls, {num_retries:,.0f} of them retries",
            f"{num_cached:,.0f} answers from the cache",
            f"{num_tokens:,.0f} tokens, {seconds:,.0f} s of requests, added",
        ]
        yield "judge", "; ".join(parts)
    num_cut_off = summary.get("judge_cut_off")  # older versions lack it
    if num_cut_off:
        answers = counted(int(num_cut_off), "answer")
        advice = "set a higher max_tokens in reward.judge.options"
        yield "  cut off", f"{answers} without a score: {advice}"


def status_table(status: Mapping[str, Any]) -> RenderableType:
    """Show the reply of a live run to `easyrl status`."""
    table = Table(
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        header_style="dim",
    )
    columns = ("name", "pid", "device", "state", "restarts")
    for name in columns:
        is_number = name in ("pid", "restarts")
        table.add_column(name, justify="right" if is_number else "left")
    for worker in status["workers"]:
        cells = [str(worker[name]) for name in columns]
        table.add_row(*cells)
    iterations = counted(status["num_iterations"], "iteration")
    rollout = shown(status["waiting"]["rollout"], ".0%")
    train = shown(status["waiting"]["train"], ".0%")
    balanced = shown(status["balanced_rollout_workers"], "d")
    text = (
        f"{status['iteration']} of {iterations} done\n"
        f"waiting in the last iterations: rollout workers {rollout}, train workers {train}\n"
        f"rollout workers that balance both: {balanced}"
    )
    return Group(table, Text(text))
