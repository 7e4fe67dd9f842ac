"""The live view: progress, workers, rewards and the newest completion, drawn by Rich.

    controller's thread ──event──► RunState ◄──lock──► Rich's refresh thread ──► terminal

While the view is up, everything else that the process prints goes to a log file. At the end the
terminal is restored, and the last picture with the result is printed to it.
"""

import atexit
import contextlib
import importlib
import io
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from textwrap import wrap

from rich.console import Console, Group, RenderableType
from rich.layout import Layout
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Column, Table
from rich.terminal_theme import MONOKAI
from rich.text import Text

from easyrl import events
from easyrl.config.devices import count_devices
from easyrl.events import WORKING, Event, SpanKind
from easyrl.formatting import counted, printable, shorten
from easyrl.observe.lines import end_table, function_of, print_end
from easyrl.observe.state import PROBLEMS, RunState, WorkerState, main_kind, problems_in
from easyrl.observe.text import clock, safe, say, say_rich, shown
from easyrl.runtime.metrics import overlap

REFRESHES_PER_SECOND = 2
LAG_SECONDS = 0.4  # workers report a few times a second: what they did is known after this long
LAST_PICTURE_LINES, LEAST_PICTURE_LINES = 22, 5
FIGURES = {  # figures of the newest iteration, if the run has them: name -> (metric, format)
    "length": ("completions/mean_length", ".1f"),
    "inserted": ("completions/mean_inserted_length", ".1f"),
    "entropy": ("entropy", ".3f"),
    "KL": ("kl", ".4f"),
    "teacher KL": ("teacher/kl", ".4f"),
    "tool calls": ("tools/calls", ".1f"),
    "cut off": ("completions/clipped_ratio", ".0%"),
    "no spread": ("frac_reward_zero_std", ".0%"),
}
NOTEBOOK_SIZE = 110, 22
NOTEBOOK_HTML = (
    "<pre style='background: {background}; color: {foreground}; padding: 1em; line-height: 1.2; "
    "overflow-x: auto'>{code}</pre>"
)
LOOKS: dict[SpanKind, tuple[str, str]] = {
    "generate": ("█", "green"),
    "prefill": ("▒", "cyan"),
    "score": ("▪", "yellow"),
    "train": ("▓", "magenta"),
    "weights": ("W", "bold bright_white"),
    "wait": ("·", "dim"),
}
"""Every kind of work has its own character, so that lanes can be read without colours."""
ITERATIONS_SHOWN = 4  # a lane shows about this many iterations
MIN_LANE_SECONDS = 2.5
BLOCKS = "▁▂▃▄▅▆▇█"


class LiveView:
    """An observer that draws the run on an alternate screen, and prints how it ended."""

    def __init__(
        self, now: Callable[[], float] = time.monotonic, log_file: Path | None = None
    ) -> None:
        """`now` is the clock of the events. Other output goes to `log_file`, or the run's logs."""
        self._now, self._log_file = now, log_file
        self._state = RunState()
        self._lock = threading.Lock()
        self._live: Live | None = None
        self._restore = contextlib.ExitStack()

    def __call__(self, event: Event) -> None:
        with self._lock:
            self._state.apply(event)
        match event:
            case events.RunStarted(folder=folder) if self._live is None:
                self._start(self._log_file or folder / "logs" / "controller.log")
            case events.RunEnded():
                self.close()
                self._print_end(event)
            case events.Note(text) if self._live is None or self._state.ended is not None:
                say(safe(text))

    def close(self) -> None:
        """Restore the terminal; may be called again."""
        self._restore.close()

    def _start(self, log_file: Path) -> None:
        self._restore.enter_context(contextlib.suppress(OSError))  # the terminal may be gone
        terminal = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
        self._restore.callback(terminal.close)
        with log_file.open("ab") as log:  # takes what C libraries print, too
            for stream in filter(os.isatty, (1, 2)):
                saved = os.dup(stream)
                self._restore.callback(os.close, saved)
                self._restore.callback(os.dup2, saved, stream)
                os.dup2(log.fileno(), stream)
        self._console = Console(file=terminal, force_terminal=True, highlight=False)
        self._live = Live(
            get_renderable=self._render,
            console=self._console,
            screen=True,
            refresh_per_second=REFRESHES_PER_SECOND,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._restore.callback(self._live.stop)
        atexit.register(self.close)
        self._restore.callback(atexit.unregister, self.close)
        self._live.start(refresh=True)

    def _render(self) -> RenderableType:
        try:
            with self._lock:
                return render(self._state, self._now(), *self._console.size)
        except Exception as error:  # in the refresh thread, nobody would see it
            return Text(f"the live view failed: {type(error).__name__}: {error}")

    def _print_end(self, end: events.RunEnded) -> None:
        """Print the last picture, and how the run ended; both fit the terminal."""
        state, console = self._state, Console()
        table = _end_table(state)
        below = console.render_lines(table or Text(safe(end.message)))
        num_left = console.height - len(below) - 1  # the shell's line
        height = min(LAST_PICTURE_LINES, max(LEAST_PICTURE_LINES, num_left))
        say_rich(render(state, state.newest, console.width, height), height)
        if table is not None:
            say_rich(table)
        else:
            print_end(end.exit_code, end.message)


class NotebookView:
    """The live view as one output of a notebook's cell, drawn anew with the events."""

    def __init__(self) -> None:
        self._display = importlib.import_module("IPython.display")
        self._state, self._next = RunState(), 0.0

    def __call__(self, event: Event) -> None:
        self._state.apply(event)
        if isinstance(event, events.RunStarted):
            self._output = self._display.display(self._display.HTML(""), display_id=True)
        state, now = self._state, time.monotonic()
        is_end = isinstance(event, events.RunEnded)
        if state.run is None or (now < self._next and not is_end):
            return
        self._next = now + 1.0 / REFRESHES_PER_SECOND
        width, height = NOTEBOOK_SIZE
        console = Console(
            record=True, file=io.StringIO(), width=width, highlight=False, force_jupyter=False
        )
        console.print(render(state, now, width, height), height=height)
        html = console.export_html(theme=MONOKAI, inline_styles=True, code_format=NOTEBOOK_HTML)
        self._output.update(self._display.HTML(html))
        if is_end and (table := _end_table(state)):
            say_rich(table)


def _end_table(state: RunState) -> RenderableType | None:
    if state.run is None or state.summary is None or (state.ended and state.ended.exit_code):
        return None
    return end_table(state.run, state.summary)


def render(state: RunState, now: float, width: int, height: int) -> RenderableType:
    """Draw the state at the time `now` of the events' clock."""
    if state.run is None:
        return Text("EasyRL", style="bold")
    if state.ended is not None:
        now = state.newest
    lines = [*_header(state, state.run, now), *_warnings(state, width)]
    figures = [_rewards(state, width), *_figures(state, width)] if state.lines else []
    num_left = height - len(lines) - len(figures)
    if num_left >= 3:  # without the legend
        lines += _workers(state, now, width, max_lanes=max(2, num_left - 8))[:num_left]
    lines += figures
    if state.is_starting:
        about = f"\nrun folder {state.run.folder}\n{state.run.description}"
        lines.append(Text(safe(about), style="dim"))
    elif (num_left := height - len(lines)) >= 3:
        lines += _samples(state.sampled, width, num_left)
    return Layout(Group(*lines))  # cut off at the height


def _line(*parts: str | tuple[str, str]) -> Text:
    return Text.assemble(*parts, no_wrap=True, overflow="crop")


def _header(state: RunState, run: events.RunStarted, now: float) -> Iterator[RenderableType]:
    spec, devices = run.spec, run.devices.values()
    num_devices = count_devices(devices)
    what = f"  {spec.model.path} on {spec.data.options.shown} · "
    what += f"{counted(num_devices, 'device')} ({', '.join(dict.fromkeys(devices))})"
    yield _line(("EasyRL", "bold"), printable(what))
    yield _progress(state, run, now)
    if state.lines and not state.is_starting:
        metrics = state.lines[state.num_done]
        speed = metrics["perf/tokens_per_second"]
        line = _line("tokens/s ", (f"{speed:,.0f}", "bold"))
        line.append("  per device ").append(f"{speed / max(1, num_devices):,.0f}", "bold")
        yield line.append("  overlap ").append(f"{overlap([metrics]):.0%}", "bold")


def _progress(state: RunState, run: events.RunStarted, now: float) -> RenderableType:
    right, style = clock(now - run.started), "bold"
    done, total = state.num_done, run.spec.schedule.iterations
    if state.ended is not None:
        is_finished = state.ended.exit_code == 0
        text = f"{'finished' if is_finished else 'ended'} after {done}/{total} iterations"
        style = "bold green" if is_finished else "bold red"
    elif state.evaluation is not None:
        done, total = state.num_answered, state.evaluation.num_prompts
        text = f"held-out problems {done}/{total}"
    elif state.saving_since is not None:
        text = f"saving the model, {now - state.saving_since:.1f} s"
    elif state.is_starting:
        text = "starting the workers"
    else:
        text = f"iteration {min(done + 1, total)}/{total}"
        text += f"  groups {state.num_groups}/{run.spec.schedule.prompts_per_iteration}"
        left = state.seconds_left(now)
        right += f"  ETA {clock(left)}" if left is not None else "  ETA -:--"
    columns = Column(no_wrap=True), Column(ratio=1), Column(no_wrap=True)
    row = Table.grid(*columns, expand=True, padding=(0, 1, 0, 0))
    bar = ProgressBar(total=max(1, total), completed=done, complete_style="blue")
    row.add_row(Text(text, style), bar, Text(right, "bold"))
    return row


def _warnings(state: RunState, width: int) -> list[RenderableType]:
    lines = state.lines.values()
    counts = {name: sum(line.get(name) or 0 for line in lines) for name in PROBLEMS}
    texts = (", ".join(problems_in(counts)), state.note)
    notes = [line for text in state.lasting_note.split("\n") for line in wrap(text, max(9, width))]
    return [_line((printable(line), "bold yellow")) for line in [*notes, *texts] if line]


def _workers(state: RunState, now: float, width: int, max_lanes: int) -> list[RenderableType]:
    """A line per worker with what it did recently, and a legend. The last workers are trainers."""
    workers = list(state.workers.values())[-max_lanes:]
    labels = [printable(f"{worker.name} {worker.device} ") for worker in workers]
    label_width = max(map(len, labels))
    num_slices = max(1, width - label_width - len(" 100%"))
    until = now if state.ended is not None else now - LAG_SECONDS
    began = min([until, *(worker.spans[0].started for worker in workers if worker.spans)])
    usual = ITERATIONS_SHOWN * (state.mean_iteration_seconds or math.inf)
    shown_seconds = max(MIN_LANE_SECONDS, min(usual, until - began))
    title = "start" if state.is_starting else f"the last {shown_seconds:.0f} s"
    lines: list[RenderableType] = [Rule(title, align="left", style="dim")]
    for worker, label in zip(workers, labels, strict=True):
        if worker.phase:
            phase = f"{printable(worker.phase)}, {now - worker.phase_started:.1f} s"
            parts = [(phase, "bold")]
        elif state.is_starting:
            parts = [("ready", "bold green")]
        else:
            parts = _lane(worker, until, num_slices, shown_seconds / num_slices)
        lines.append(_line(label.ljust(label_width), *parts))
    if not state.is_starting:
        legend = _line()
        for kind, look in LOOKS.items():
            legend.append(*look).append(f" {'idle' if kind == 'wait' else kind}  ")
        lines.append(legend.append("%: busy", "dim"))
    return lines


def _lane(
    worker: WorkerState, until: float, num_slices: int, seconds: float
) -> list[tuple[str, str]]:
    """One character per slice of time, for what took most of it, and the busy share."""
    # Slices start at multiples of their length, so that a lane moves by whole characters.
    since = (int(until // seconds) - num_slices) * seconds
    lane, busy = [], 0.0
    for work in worker.seconds_by_kind(since, seconds, num_slices):
        busy += sum(work.get(kind, 0.0) for kind in WORKING)
        lane.append(LOOKS[main_kind(work, seconds)])
    return [*lane, (f" {min(1.0, busy / (num_slices * seconds)):>4.0%}", "bold")]


def _rewards(state: RunState, width: int) -> Text:
    rewards = [line["reward"] for line in state.lines.values()]
    accuracies = list(state.accuracies.values())
    text, accuracy = f"reward {shown(rewards[-1], '.3f')} ", ""
    if accuracies:
        accuracy = f" · held-out accuracy {shown(accuracies[0], '.3f')}"
    if len(accuracies) > 1:
        accuracy += f" {_bars(accuracies, width // 5)} {shown(accuracies[-1], '.3f')}"
    bars = _bars(rewards, width - len(text + accuracy))
    return _line((text, "bold"), (bars, "blue"), (accuracy, "bold"))


def _bars(found: Sequence[float | None], width: int) -> str:
    """Draw values from the lowest to the highest: means of neighbours, so that they fit."""
    values = [math.nan if value is None else value for value in found]
    num_bars = max(1, min(len(values), width))
    edges = [len(values) * bar // num_bars for bar in range(num_bars + 1)]
    means = [fmean(values[a:b]) for a, b in pairwise(edges)]
    finite = [mean for mean in means if math.isfinite(mean)] or [0.0]
    low, high = min(finite), max(finite)
    return "".join(
        BLOCKS[round(7 * (mean - low) / (high - low or 1.0))] if math.isfinite(mean) else " "
        for mean in means
    )


def _figures(state: RunState, width: int) -> list[Text]:
    metrics = state.lines[state.num_done]
    figures = {name: (metrics.get(key), spec) for name, (key, spec) in FIGURES.items()}
    for key, value in metrics.items():
        if name := function_of(key):
            figures[shorten(name, width // 2)] = value, ".3f"
    lines = [_line()]
    for name, (value, spec) in figures.items():
        if value is None:
            continue
        text = shown(value, spec)
        if lines[-1] and len(lines[-1]) + len(f"{name} {text}") > width:
            lines.append(_line())
        lines[-1].append(f"{name} ").append(text, "bold").append("  ")
    return lines if lines[0] else []


def _samples(groups: Iterable[events.GroupScored], width: int, height: int) -> list[RenderableType]:
    """A completion of each of the newest groups below its prompt, as many as fit."""
    lines: list[RenderableType] = []
    for group in groups:
        sample, room = group.shown, height - len(lines)
        assert sample is not None
        title = f"iteration {group.iteration}, reward {shown(sample.reward, '.3g')}"
        title += f" (mean of the group {shown(fmean(group.rewards), '.3g')})"
        if branches := sample.episode.get("branches"):
            title += f", branches: {len(branches)}"
        prompt = _wrapped(group.prompt or "", width, "dim")[-max(1, room // 3) :]
        completion = _wrapped(sample.completion, width)
        num_free = room - len(prompt) - 1
        if lines and num_free < min(3, len(completion)):
            break
        if len(completion) > num_free > 2:  # its start, and its end with the answer
            cut = num_free // 2
            completion = [*completion[:cut], Text("…"), *completion[cut + 1 - num_free :]]
        lines += [Rule(title, align="left", style="dim"), *prompt, *completion]
    return lines


def _wrapped(text: str, width: int, style: str = "") -> list[Text]:
    return [*Text(safe(text).rstrip(), style).wrap(Console(width=width), width, overflow="fold")]
