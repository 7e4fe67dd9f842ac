"""The live view: progress, workers, rewards and the newest completion, drawn by Rich.

    controller's thread ──event──► ViewState ◄──lock──► Rich's refresh thread ──► terminal

While the view is up, everything else that the process prints goes to a log file. At the end the
terminal is restored, and the last picture with the result is printed to it.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby, pairwise
from pathlib import Path
from statistics import fmean
from types import FrameType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.layout import Layout
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from easyrl import events
from easyrl.config.devices import count_devices
from easyrl.config.sections import TrainConfig
from easyrl.events import Event, SpanKind
from easyrl.formatting import counted
from easyrl.observe.report import end_table, print_end, problems_in
from easyrl.observe.state import ViewState, WorkerState
from easyrl.observe.text import clock, is_in_foreground, printable, safe, say, say_rich, shown
from easyrl.runtime.metrics import overlap

REFRESHES_PER_SECOND = 2
LAG_SECONDS = 0.4  # workers report a few times a second: what they did is known after this long
LAST_PICTURE_LINES = 22
NARROW = 60  # with fewer columns, details are left out
MAX_SAMPLE = 8000  # characters of a prompt or completion
LOOKS: dict[SpanKind, tuple[str, str]] = {
    "generate": ("█", "green"),
    "prefill": ("▒", "cyan"),
    "score": ("▪", "yellow"),
    "train": ("▓", "magenta"),
    "weights": ("W", "bold bright_white"),
    "wait": ("·", "dim"),
}
"""Every kind of work has its own character, so that lanes can be read without colours."""
SLICE_SECONDS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
ITERATIONS_SHOWN = 4  # a lane shows about this many iterations
MIN_LANE_SECONDS = 2.5
BLOCKS = "▁▂▃▄▅▆▇█"


class LiveView:
    """An observer that draws the run on an alternate screen, and prints how it ended."""

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        log_file: Path | None = None,
        *,
        is_running: bool = True,
    ) -> None:
        """`now` is the clock of the events. Other output goes to `log_file`, or to the run's logs.
        Of a run that is not running, only the end is printed."""
        self._now, self._log_file, self._is_running = now, log_file, is_running
        self._state = ViewState()
        self._lock = threading.Lock()
        self._live: Live | None = None
        self._restore = contextlib.ExitStack()

    def __call__(self, event: Event) -> None:
        with self._lock:
            self._state.apply(event)
        match event:
            case events.CheckStarted(what):
                say(what)
            case events.RunStarted(folder=folder) if self._live is None and self._is_running:
                self._start(self._log_file or folder / "logs" / "controller.log")
            case events.RunEnded():
                self.close()
                self._print_end(event)
            case events.Note(text) if self._state.ended is not None:
                say(safe(text))

    def close(self) -> None:
        """Restore the terminal; may be called again."""
        self._restore.close()

    def _start(self, log_file: Path) -> None:
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
        self._restore.callback(self._hide)
        for signum, handler in ((signal.SIGTSTP, self._suspend), (signal.SIGCONT, self._show)):
            self._restore.callback(signal.signal, signum, signal.signal(signum, handler))
        atexit.register(self.close)
        self._restore.callback(atexit.unregister, self.close)
        self._show()

    def _show(self, signum: int = 0, frame: FrameType | None = None) -> None:
        """Draw, unless the process runs in the background of its terminal."""
        assert self._live is not None
        if is_in_foreground(self._console.file.fileno()):
            self._live.start(refresh=True)

    def _hide(self) -> None:
        assert self._live is not None
        with contextlib.suppress(OSError):  # the terminal may be gone
            self._live.stop()

    def _suspend(self, signum: int, frame: FrameType | None) -> None:
        """Ctrl-Z: give the terminal back, then stop as without a handler."""
        self._hide()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._suspend)

    def _render(self) -> RenderableType:
        with contextlib.suppress(OSError):
            self._console.size = os.get_terminal_size(self._console.file.fileno())  # type: ignore[assignment]
        try:
            with self._lock:
                return render(self._state, self._now(), *self._console.size)
        except Exception as error:  # in the refresh thread, nobody would see it
            return Text(f"the live view failed: {type(error).__name__}: {error}")

    def _print_end(self, end: events.RunEnded) -> None:
        """Print the last picture, then the end table or the reason why the run ended."""
        state = self._state
        picture = render(state, state.newest, Console().width, LAST_PICTURE_LINES)
        say_rich(picture, LAST_PICTURE_LINES)
        if state.run is not None and state.summary is not None and end.exit_code == 0:
            say_rich(end_table(state.summary, state.run.folder, state.run.config))
        else:
            print_end(end.exit_code, end.message)


# -- the picture ----------------------------------------------------------------------------------


def render(state: ViewState, now: float, width: int, height: int) -> RenderableType:
    """Draw the state at the time `now` of the events' clock."""
    if state.run is None:
        return Text("EasyRL", style="bold")
    if state.ended is not None:
        now = state.newest
    lines = [*_header(state, state.run, now, width), *_warnings(state)]
    lines += _workers(state, now, width, max_lanes=max(2, height - len(lines) - 9))
    if state.rewards:
        lines.append(_rewards(state, width))
    num_left = height - len(lines)
    if num_left >= 3 and state.is_starting:
        about = f"\nrun folder {state.run.folder}\n{state.run.description}"
        lines.append(Text(safe(about), style="dim"))
    elif num_left >= 3 and state.sample is not None:
        lines += _sample(state.sample, num_left)
    return Layout(Group(*lines))  # cut off at the height


def _line(*parts: str | tuple[str, str]) -> Text:
    return Text.assemble(*parts, no_wrap=True, overflow="crop")


def _header(
    state: ViewState, run: events.RunStarted, now: float, width: int
) -> Iterator[RenderableType]:
    config, devices = run.config, run.devices.values()
    num_devices = count_devices(devices)
    what = f"  {printable(config.model.path)} on {printable(config.data.shown)}"
    if width >= NARROW:
        what += f" · {counted(num_devices, 'device')} ({', '.join(dict.fromkeys(devices))})"
    title = Table.grid(expand=True)
    title.add_column(no_wrap=True, overflow="ellipsis")
    title.add_column(justify="right", no_wrap=True)
    title.add_row(_line(("EasyRL", "bold"), what), Text(clock(now - run.started), "dim"))
    yield title
    yield _progress(state, config.train, now, width)
    if state.ended is not None or state.is_starting:
        return
    parts: list[str | tuple[str, str]] = ["tokens/s"]
    for name, what in (("rollout", "generated"), ("train", "trained")):
        workers = [worker for worker in state.workers.values() if worker.name.startswith(name)]
        speed = sum(worker.tokens_per_second(now - LAG_SECONDS) for worker in workers)
        parts += [f"  {what} ", (f"{speed:,.0f}", "bold"), " "]
    if state.metrics:
        if width >= NARROW:
            speed = state.metrics["perf/tokens_per_second"] / max(1, num_devices)
            parts += ["  per device ", (f"{speed:,.0f}", "bold"), " "]
        names = ("infer", "train", "weights")
        seconds = {f"{name}_seconds": state.metrics[f"perf/{name}_seconds"] for name in names}
        share = overlap(**seconds, wall_seconds=state.metrics["perf/iteration_seconds"])
        parts += ["  overlap ", (f"{share:.0%}", "bold")]
    yield _line(*parts)


def _progress(state: ViewState, train: TrainConfig, now: float, width: int) -> RenderableType:
    """Current work of the run, its progress, and the time left."""
    done, total, right, style = len(state.rewards), train.iterations, "", "bold"
    if state.ended is not None:
        is_finished = state.ended.exit_code == 0
        text = f"{'finished' if is_finished else 'ended'} after {done}/{total} iterations"
        style = "bold green" if is_finished else "bold red"
    elif state.evaluation is not None:
        done, total = state.num_answered, state.evaluation.num_prompts
        after = f"after iteration {state.evaluation.round - 1}"
        when = {0: "before training", 1: "after training"}.get(state.evaluation.round, after)
        text = f"held-out problems {when} {done}/{total}"
    elif state.saving_since is not None:
        text = f"saving the model, {now - state.saving_since:.1f} s"
    elif state.is_starting:
        text = "starting the workers"
    else:
        text = f"iteration {min(done + 1, total)}/{total}"
        left = state.seconds_left(now)
        right = f"ETA {clock(left)}" if left is not None else "ETA -:--"
        if width >= NARROW:
            text += f"  groups {state.num_groups}/{train.prompts_per_iteration}"
    row = Table.grid(expand=True, padding=(0, 1, 0, 0))
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True)
    bar = ProgressBar(total=max(1, total), completed=done, complete_style="blue")
    row.add_row(Text(text, style), bar, Text(right, "bold"))
    return row


def _warnings(state: ViewState) -> list[RenderableType]:
    texts = (", ".join(problems_in(state.problems)), state.note, state.warning)
    return [_line((printable(text), "bold yellow")) for text in texts if text]


def _workers(state: ViewState, now: float, width: int, max_lanes: int) -> list[RenderableType]:
    """A line per worker with what it did recently, and a legend."""
    workers = list(state.workers.values())
    num_hidden = len(workers) - max_lanes + 1
    if num_hidden > 1:  # show the first ones and the last one, which trains
        workers = [*workers[: max_lanes - 2], workers[-1]]
    is_wide = width >= NARROW
    labels = [printable(f"{w.name} {w.device}" if is_wide else w.name) for w in workers]
    label_width = max(map(len, labels)) + 1
    right_width = 15 if is_wide else 5
    num_slices = max(1, width - label_width - right_width)
    wanted = max(MIN_LANE_SECONDS, ITERATIONS_SHOWN * (state.mean_iteration_seconds or 0.0))
    seconds = next((s for s in SLICE_SECONDS if s * num_slices >= wanted), SLICE_SECONDS[-1])
    until = now if state.ended is not None else now - LAG_SECONDS
    lines: list[RenderableType] = []
    for worker, label in zip(workers, labels, strict=True):
        if state.is_starting:
            phase = f"{worker.phase}, {now - worker.phase_started:.1f} s"
            parts = [(printable(phase), "bold") if worker.phase else ("ready", "bold green")]
        else:
            right = f" {worker.busy_share(until):>4.0%}"
            if is_wide:
                right += f"{worker.tokens_per_second(until):>8,.0f}/s"
            lane = _lane(worker, until, num_slices, seconds)
            parts = [*lane, (right.rjust(right_width), "bold")]
        lines.append(_line(label.ljust(label_width), *parts))
    if num_hidden > 1:
        lines.insert(-1, _line((f"and {num_hidden} more", "dim")))
    title = "start" if state.is_starting else f"the last {num_slices * seconds:.0f} s"
    lines.insert(0, Rule(title, align="left", style="dim"))
    if not state.is_starting:
        legend = _line()
        for kind, look in LOOKS.items():
            legend.append(*look).append(f" {'idle' if kind == 'wait' else kind}  ")
        lines.append(legend.append("%: busy", "dim"))
    return lines


def _lane(
    worker: WorkerState, until: float, num_slices: int, seconds: float
) -> list[tuple[str, str]]:
    """One character per slice of time: the kind of work that took most of it."""
    # Slices start at multiples of their length, so that a lane moves by whole characters.
    since = (int(until // seconds) - num_slices) * seconds
    started = worker.spans[0].started if worker.spans else math.inf
    looks = []
    for number, work in enumerate(worker.seconds_by_kind(since, seconds, num_slices)):
        scoring = work.pop("score", 0.0)
        idle = seconds - sum(work.values())
        if since + (number + 1) * seconds > started and idle > 0.0:
            work["wait"] = work.get("wait", 0.0) + idle
        kind = max(work, key=work.__getitem__, default=None)
        if "weights" in work:  # separates iterations, however short it is
            kind = "weights"
        elif scoring and kind in ("wait", None):
            kind = "score"
        looks.append((" ", "") if kind is None else LOOKS[kind])
    return [(look[0] * len(list(run)), look[1]) for look, run in groupby(looks)]


def _rewards(state: ViewState, width: int) -> Text:
    """The newest reward and accuracies, and a sparkline of the rewards."""
    text = f"reward {shown(state.rewards[-1], '.3f')}"
    if newest := [shown(accuracy, ".3f") for accuracy in [*state.accuracies.values()][-3:]]:
        text += (" · held-out accuracy " if width >= NARROW else " · ") + " -> ".join(newest)
    # Means of neighbours, so that they fit into the line.
    num_bars = max(1, min(len(state.rewards), width - len(text) - 1))
    edges = [len(state.rewards) * bar // num_bars for bar in range(num_bars + 1)]
    means = [fmean(state.rewards[a:b]) for a, b in pairwise(edges)]
    finite = [mean for mean in means if math.isfinite(mean)] or [0.0]
    low, high = min(finite), max(finite)
    bars = "".join(
        BLOCKS[round(7 * (mean - low) / (high - low or 1.0))] if math.isfinite(mean) else " "
        for mean in means
    )
    return _line((f"{text} ", "bold"), (bars, "blue"))


def _sample(sample: Mapping[str, Any], height: int) -> list[RenderableType]:
    """The newest completion below its prompt."""
    title = f"iteration {sample['iteration'] + 1}, reward {shown(sample['reward'], '.3g')}"
    prompt = safe(str(sample["prompt"]), MAX_SAMPLE).splitlines()[-max(1, height // 3) :]
    return [
        Rule(title, align="left", style="dim"),
        Text("\n".join(prompt), style="dim", overflow="fold"),
        Text(safe(str(sample["completion"]), MAX_SAMPLE), overflow="fold"),
    ]
