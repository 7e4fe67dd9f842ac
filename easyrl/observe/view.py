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
from collections.abc import Callable, Iterator, Sequence
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
from easyrl.observe.lines import end_table, function_of, print_end, verdict_lines
from easyrl.observe.state import PROBLEMS, RunState, WorkerState, main_kind, problems_in
from easyrl.observe.text import clock, safe, say, say_rich, shown
from easyrl.runtime.metrics import overlap

REFRESHES_PER_SECOND = 2
LAG_SECONDS = 0.4
"""Workers report a few times a second: what they did is known after this long."""
LAST_PICTURE_LINES = 22
"""The last picture, which stays on the terminal, has at most so many lines."""
LEAST_PICTURE_LINES = 5
"""It has so many lines even if the results leave less space."""
FIGURES = {
    "length": ("completions/mean_length", ".1f"),
    "inserted": ("completions/mean_inserted_length", ".1f"),
    "entropy": ("entropy", ".3f"),
    "KL": ("kl", ".4f"),
    "teacher KL": ("teacher/kl", ".4f"),
    "tool calls": ("tools/calls", ".1f"),
    "cut off": ("completions/clipped_ratio", ".0%"),
    "no spread": ("frac_reward_zero_std", ".0%"),
}
"""Figures of the newest iteration, if the run has them: name -> metric and format."""
NOTEBOOK_WIDTH = 110
NOTEBOOK_HEIGHT = 22
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
"""Kind of work -> character and style. Every kind has its own character, so that lanes can be read
without colours."""
ITERATIONS_SHOWN = 4
"""A lane shows about this many iterations."""
MIN_LANE_SECONDS = 2.5
LINES_BESIDE_LANES = 8
"""If there are many workers, they leave so many lines: for their title, the legend, completions."""
MIN_WORKER_LINES = 3
"""In less space, workers are not shown."""
MIN_SAMPLE_LINES = 3
"""In less space, completions are not shown."""
BLOCKS = "▁▂▃▄▅▆▇█"


class LiveView:
    """An observer that draws the run on an alternate screen, and prints how it ended."""

    def __init__(
        self, now: Callable[[], float] = time.monotonic, log_file: Path | None = None
    ) -> None:
        """`now`: the clock of the events. Other output goes to `log_file`, or the run's logs."""
        self._now = now
        self._log_file = log_file
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
        """Take over the terminal. Everything that is done here, `close` undoes."""
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
        state = self._state
        console = Console()
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
        self._state = RunState()
        self._next = 0.0  # time of the next picture

    def __call__(self, event: Event) -> None:
        self._state.apply(event)
        if isinstance(event, events.RunStarted):
            self._output = self._display.display(self._display.HTML(""), display_id=True)
        state = self._state
        now = time.monotonic()
        is_end = isinstance(event, events.RunEnded)
        if state.run is None or (now < self._next and not is_end):
            return
        self._next = now + 1.0 / REFRESHES_PER_SECOND
        console = Console(
            record=True,
            file=io.StringIO(),
            width=NOTEBOOK_WIDTH,
            highlight=False,
            force_jupyter=False,
        )
        picture = render(state, now, NOTEBOOK_WIDTH, NOTEBOOK_HEIGHT)
        console.print(picture, height=NOTEBOOK_HEIGHT)
        html = console.export_html(theme=MONOKAI, inline_styles=True, code_format=NOTEBOOK_HTML)
        self._output.update(self._display.HTML(html))
        table = _end_table(state) if is_end else None
        if table is not None:
            say_rich(table)


def _end_table(state: RunState) -> RenderableType | None:
    """Return the results of a run that has finished; None of another one."""
    has_failed = state.ended is not None and state.ended.exit_code != 0
    if state.run is None or state.summary is None or has_failed:
        return None
    return end_table(state.run, state.summary)


def render(state: RunState, now: float, width: int, height: int) -> RenderableType:
    """Draw the state at the time `now` of the events' clock."""
    if state.run is None:
        return Text("EasyRL", style="bold")
    if state.ended is not None:
        now = state.newest
    lines = [*_header(state, state.run, now), *_warnings(state, width)]
    figures: list[Text] = []
    if state.lines:
        figures = [_rewards(state, width), *_figures(state, width)]
    num_left = height - len(lines) - len(figures)
    if num_left >= MIN_WORKER_LINES:
        max_lanes = max(2, num_left - LINES_BESIDE_LANES)
        workers = _workers(state, now, width, max_lanes)
        lines += workers[:num_left]
    lines += figures
    num_left = height - len(lines)
    if state.is_starting:
        about = f"\nrun folder {state.run.folder}\n{state.run.description}"
        lines.append(Text(safe(about), style="dim"))
    elif num_left >= MIN_SAMPLE_LINES:
        lines += _samples(state, width, num_left)
    return Layout(Group(*lines))  # cut off at the height


def _line(*parts: str | tuple[str, str]) -> Text:
    return Text.assemble(*parts, no_wrap=True, overflow="crop")


def _header(state: RunState, run: events.RunStarted, now: float) -> Iterator[RenderableType]:
    devices = run.devices.values()
    num_devices = count_devices(devices)
    names = ", ".join(dict.fromkeys(devices))
    model = run.spec.model.path
    data = run.spec.data.options.shown
    title = f"  {model} on {data} · {counted(num_devices, 'device')} ({names})"
    yield _line(("EasyRL", "bold"), printable(title))
    yield _progress(state, run, now)
    if state.lines and not state.is_starting:
        metrics = state.lines[state.num_done]
        speed = metrics["perf/tokens_per_second"]
        per_device = speed / max(1, num_devices)
        yield _line(
            "tokens/s ",
            (f"{speed:,.0f}", "bold"),
            "  per device ",
            (f"{per_device:,.0f}", "bold"),
            "  overlap ",
            (f"{overlap([metrics]):.0%}", "bold"),
        )


def _progress(state: RunState, run: events.RunStarted, now: float) -> RenderableType:
    """Draw what is going on, with a bar and the time."""
    schedule = run.spec.schedule
    style = "bold"
    right = clock(now - run.started)
    done = state.num_done
    total = schedule.iterations
    if state.ended is not None:
        is_finished = state.ended.exit_code == 0
        how = "finished" if is_finished else "ended"
        text = f"{how} after {done}/{total} iterations"
        style = "bold green" if is_finished else "bold red"
        if is_finished and state.summary is not None and verdict_lines(state.summary):
            style = "bold yellow"
    elif state.evaluation is not None:
        done = state.num_answered
        total = state.evaluation.num_prompts
        text = f"held-out problems {done}/{total}"
    elif state.saving_since is not None:
        text = f"saving the model, {now - state.saving_since:.1f} s"
    elif state.is_starting:
        text = "starting the workers"
    else:
        text = f"iteration {min(done + 1, total)}/{total}"
        text += f"  groups {state.num_groups}/{schedule.prompts_per_iteration}"
        left = state.seconds_left(now)
        eta = "-:--" if left is None else clock(left)
        right += f"  ETA {eta}"
    row = Table.grid(
        Column(no_wrap=True),
        Column(ratio=1),
        Column(no_wrap=True),
        expand=True,
        padding=(0, 1, 0, 0),
    )
    bar = ProgressBar(total=max(1, total), completed=done, complete_style="blue")
    row.add_row(Text(text, style), bar, Text(right, "bold"))
    return row


def _warnings(state: RunState, width: int) -> list[RenderableType]:
    """Draw the lasting note, the problems so far, and the newest note."""
    texts: list[str] = []
    for paragraph in state.lasting_note.split("\n"):
        texts += wrap(paragraph, max(9, width))
    counts = dict.fromkeys(PROBLEMS, 0)
    for line in state.lines.values():
        for name in PROBLEMS:
            counts[name] += line.get(name) or 0
    problems = problems_in(counts)
    texts.append(", ".join(problems))
    texts.append(state.note)
    return [_line((printable(text), "bold yellow")) for text in texts if text]


def _workers(state: RunState, now: float, width: int, max_lanes: int) -> list[RenderableType]:
    """Draw a line per worker with what it did recently, and a legend. If there are too many, leave
    out the first ones: the last are trainers."""
    workers = list(state.workers.values())[-max_lanes:]
    labels = [printable(f"{worker.name} {worker.device} ") for worker in workers]
    label_width = max(map(len, labels))
    busy_width = len(" 100%")
    num_slices = max(1, width - label_width - busy_width)
    until = now if state.ended is not None else now - LAG_SECONDS
    starts = [worker.spans[0].started for worker in workers if worker.spans]
    began = min([until, *starts])
    usual_seconds = ITERATIONS_SHOWN * (state.mean_iteration_seconds or math.inf)
    shown_seconds = max(MIN_LANE_SECONDS, min(usual_seconds, until - began))
    title = "start" if state.is_starting else f"the last {shown_seconds:.0f} s"
    lines: list[RenderableType] = [Rule(title, align="left", style="dim")]
    for worker, label in zip(workers, labels, strict=True):
        if worker.phase:
            seconds = now - worker.phase_started
            phase = printable(worker.phase)
            parts = [(f"{phase}, {seconds:.1f} s", "bold")]
        elif state.is_starting:
            parts = [("ready", "bold green")]
        else:
            parts = _lane(worker, until, num_slices, shown_seconds / num_slices)
        lines.append(_line(label.ljust(label_width), *parts))
    if not state.is_starting:
        lines.append(_legend())
    return lines


def _legend() -> Text:
    legend = _line()
    for kind, (character, style) in LOOKS.items():
        name = "idle" if kind == "wait" else kind
        legend.append(character, style)
        legend.append(f" {name}  ")
    return legend.append("%: busy", "dim")


def _lane(
    worker: WorkerState, until: float, num_slices: int, seconds: float
) -> list[tuple[str, str]]:
    """Draw one character per slice of time, for what took most of it, and the busy share.
    `seconds`: length of a slice."""
    # Slices start at multiples of their length, so that a lane moves by whole characters.
    last = int(until // seconds)
    since = (last - num_slices) * seconds
    lane = []
    busy_seconds = 0.0
    for work in worker.seconds_by_kind(since, seconds, num_slices):
        busy_seconds += sum(work.get(kind, 0.0) for kind in WORKING)
        lane.append(LOOKS[main_kind(work, seconds)])
    busy = min(1.0, busy_seconds / (num_slices * seconds))
    lane.append((f" {busy:>4.0%}", "bold"))
    return lane


def _has_rewards(state: RunState) -> bool:
    return state.run is None or not state.run.spec.rewards.scores_nothing


def _rewards(state: RunState, width: int) -> Text:
    """Draw the rewards of all iterations (without any, how far the teacher is), and the held-out
    accuracies."""
    if _has_rewards(state):
        values = [line["reward"] for line in state.lines.values()]
        newest = shown(values[-1], ".3f")
        text = f"reward {newest} "
    else:
        values = [line.get("teacher/kl") for line in state.lines.values()]
        newest = shown(values[-1], ".4f")
        text = f"teacher KL {newest} "
    accuracies = list(state.accuracies.values())
    accuracy = ""
    if accuracies:
        first = shown(accuracies[0], ".3f")
        accuracy = f" · held-out accuracy {first}"
    if len(accuracies) > 1:
        bars = _bars(accuracies, width // 5)
        last = shown(accuracies[-1], ".3f")
        accuracy += f" {bars} {last}"
    bars = _bars(values, width - len(text) - len(accuracy))
    return _line((text, "bold"), (bars, "blue"), (accuracy, "bold"))


def _bars(found: Sequence[float | None], width: int) -> str:
    """Draw values from the lowest to the highest: means of neighbours, so that they fit."""
    values = [math.nan if value is None else value for value in found]
    num_values = len(values)
    num_bars = max(1, min(num_values, width))
    means = []
    for bar in range(num_bars):
        first = num_values * bar // num_bars
        end = num_values * (bar + 1) // num_bars
        means.append(fmean(values[first:end]))
    finite = [mean for mean in means if math.isfinite(mean)] or [0.0]
    low = min(finite)
    span = max(finite) - low or 1.0
    highest = len(BLOCKS) - 1
    bars = []
    for mean in means:
        if math.isfinite(mean):
            height = round(highest * (mean - low) / span)
            bars.append(BLOCKS[height])
        else:
            bars.append(" ")
    return "".join(bars)


def _figures(state: RunState, width: int) -> list[Text]:
    """Draw the metrics of the newest iteration, and the means of the reward functions."""
    metrics = state.lines[state.num_done]
    figures = {}
    for name, (key, spec) in FIGURES.items():
        value = metrics.get(key)
        is_drawn_above = key == "teacher/kl" and not _has_rewards(state)
        if value is not None and not is_drawn_above:
            figures[name] = shown(value, spec)
    for key, value in metrics.items():
        function = function_of(key)
        if function and value is not None:
            name = shorten(function, width // 2)
            figures[name] = shown(value, ".3f")
    lines: list[Text] = []
    for name, text in figures.items():
        figure = _line(f"{name} ", (text, "bold"))
        if not lines or len(lines[-1]) + len(figure) > width:
            lines.append(_line())
        lines[-1].append_text(figure)
        lines[-1].append("  ")
    return lines


def _mean(rewards: Sequence[float | None]) -> float | None:
    """Return the mean of the rewards that there are: a skipped group has NaN, which is None where
    it has been read from the trace."""
    found = [reward for reward in rewards if reward is not None and not math.isnan(reward)]
    return fmean(found) if found else None


def _samples(state: RunState, width: int, height: int) -> list[RenderableType]:
    """Draw a completion of each of the newest groups below its prompt, as many as fit."""
    lines: list[RenderableType] = []
    for group in state.sampled:
        sample = group.shown
        assert sample is not None
        title = f"iteration {group.iteration}"
        if _has_rewards(state):
            reward = shown(sample.reward, ".3g")
            mean = shown(_mean(group.rewards), ".3g")
            title += f", reward {reward} (mean of the group {mean})"
        branches = sample.episode.get("branches")
        if branches:
            title += f", branches: {len(branches)}"
        num_left = height - len(lines)
        num_prompt_lines = max(1, num_left // 3)
        prompt = _wrapped(group.prompt or "", width, "dim")
        prompt = prompt[-num_prompt_lines:]
        completion = _wrapped(sample.completion, width)
        num_free = num_left - len(prompt) - 1  # without the title
        num_needed = min(MIN_SAMPLE_LINES, len(completion))
        if lines and num_free < num_needed:
            break
        if len(completion) > num_free > 2:  # its start, and its end with the answer
            cut = num_free // 2
            end = completion[cut + 1 - num_free :]
            completion = [*completion[:cut], Text("…"), *end]
        lines += [Rule(title, align="left", style="dim"), *prompt, *completion]
    return lines


def _wrapped(text: str, width: int, style: str = "") -> list[Text]:
    plain = Text(safe(text).rstrip(), style)
    return [*plain.wrap(Console(width=width), width, overflow="fold")]
