"""The live view: progress, workers, rewards and the newest completion, drawn by Rich.

    controller's thread ──event──► RunState ◄──lock──► Rich's refresh thread ──► terminal

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
from collections.abc import Callable, Sequence
from itertools import groupby, pairwise
from pathlib import Path
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
from easyrl.events import Event, SpanKind
from easyrl.formatting import counted
from easyrl.observe.report import end_table, print_end
from easyrl.observe.state import RunState, WorkerState
from easyrl.observe.text import clock, is_in_foreground, printable, safe, say, say_rich, shown

REFRESHES_PER_SECOND = 2
LAG_SECONDS = 0.4
"""Workers report a few times a second: what they did is known after this long."""
LAST_PICTURE_LINES = 22
NARROW = 60
"""With fewer columns, details are left out."""
MAX_SAMPLE = 8000
"""Characters of a prompt or completion."""
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
ITERATIONS_SHOWN = 4
"""A lane shows about this many iterations."""
MIN_LANE_SECONDS = 2.5
BLOCKS = " ▁▂▃▄▅▆▇█"


class LiveView:
    def __init__(
        self, now: Callable[[], float] = time.monotonic, log_file: Path | None = None
    ) -> None:
        """`now` is the clock of the events. Other output goes to `log_file`, or to the run's
        logs."""
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
            case events.CheckStarted(what):
                say(what)
            case events.RunStarted(folder=folder) if self._live is None:
                self._start(self._log_file or folder / "logs" / "controller.log")
            case events.RunEnded():
                self.close()
                print_last_picture(self._state)
            case events.Note(text) if self._state.ended is not None:
                say(safe(text))

    def close(self) -> None:
        """Restore the terminal; may be called again."""
        self._restore.close()

    def _start(self, log_file: Path) -> None:
        terminal = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
        self._restore.callback(terminal.close)
        self._restore.enter_context(redirected_output(log_file))
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
        if threading.current_thread() is threading.main_thread():
            for signum, handler in ((signal.SIGTSTP, self._suspend), (signal.SIGCONT, self._show)):
                if signal.getsignal(signum) is signal.SIG_DFL:
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


@contextlib.contextmanager
def redirected_output(log_file: Path) -> Any:
    """Send what this process prints to the terminal to a file, C libraries included."""
    saved = {stream: os.dup(stream) for stream in (1, 2) if os.isatty(stream)}
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    for stream in saved:
        os.dup2(log, stream)
    os.close(log)
    try:
        yield
    finally:
        for file in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                file.flush()
        for stream, duplicate in saved.items():
            os.dup2(duplicate, stream)
            os.close(duplicate)


class LastPicture:
    """Show only how a run ended."""

    def __init__(self) -> None:
        self._state = RunState()

    def __call__(self, event: Event) -> None:
        self._state.apply(event)
        if isinstance(event, events.RunEnded):
            print_last_picture(self._state)


def print_last_picture(state: RunState) -> None:
    """Print the picture, then the end table or the reason why the run ended."""
    run, ended = state.run, state.ended
    assert ended is not None
    try:
        width = Console().width
        say_rich(render(state, state.newest, width, LAST_PICTURE_LINES), LAST_PICTURE_LINES)
    finally:
        if run is not None and state.summary is not None and ended.exit_code == 0:
            say_rich(end_table(state.summary, run.folder, run.config))
        else:
            print_end(ended.exit_code, ended.message)


# -- the picture ----------------------------------------------------------------------------------


def render(state: RunState, now: float, width: int, height: int) -> RenderableType:
    """Draw the state at the time `now` of the events' clock."""
    if state.run is None:
        return Text("EasyRL", style="bold")
    if state.ended is not None:
        now = state.newest
    header = [*_header(state, now, width), *_warnings(state)]
    lines = [*header, *_workers(state, now, width, max_lanes=max(2, height - len(header) - 9))]
    if state.rewards:
        lines.append(_rewards(state, width))
    layout = Layout()
    rows = [Layout(Group(*lines), size=len(lines))]
    num_left = height - len(lines)
    if num_left >= 3 and state.is_starting:
        about = f"\nrun folder {state.run.folder}\n{state.run.description}"
        rows.append(Layout(Text(safe(about), style="dim")))
    elif num_left >= 3:
        rows.append(Layout(_sample(state, num_left)))
    layout.split_column(*rows)
    for row in layout.children:
        row.minimum_size = 0
    return layout


def _line(*parts: str | tuple[str, str]) -> Text:
    return Text.assemble(*parts, no_wrap=True, overflow="crop")


def _header(state: RunState, now: float, width: int) -> list[RenderableType]:
    assert state.run is not None
    config = state.run.config
    what = f"  {printable(config.model.path)} on {printable(config.data.shown)}"
    if width >= NARROW:
        devices = ", ".join(dict.fromkeys(worker.device for worker in state.workers.values()))
        what += f" · {counted(state.num_devices, 'device')} ({devices})"
    title = Table.grid(expand=True)
    title.add_column(no_wrap=True, overflow="ellipsis")
    title.add_column(justify="right", no_wrap=True)
    title.add_row(_line(("EasyRL", "bold"), what), Text(clock(now - state.run.started), "dim"))
    lines: list[RenderableType] = [title, _progress(state, now, width)]
    if state.ended is None and not state.is_starting:
        lines.append(_rates(state, now - LAG_SECONDS, width))
    return lines


def _progress(state: RunState, now: float, width: int) -> RenderableType:
    """What the run does, how much of it is done, and the time left."""
    assert state.run is not None
    train = state.run.config.train
    done, total, right, style = len(state.rewards), train.iterations, "", "bold"
    if state.ended is not None:
        is_finished = state.ended.exit_code == 0
        text = f"{'finished' if is_finished else 'ended'} after {done}/{total} iterations"
        style = "bold green" if is_finished else "bold red"
    elif state.stopping:
        return _line((printable(state.stopping), "bold red"))
    elif state.evaluation is not None:
        round_ = state.evaluation.round
        done, total = state.num_answered, state.evaluation.num_prompts
        when = {0: "before training", 1: "after training"}
        text = f"held-out problems {when.get(round_, f'after iteration {round_ - 1}')}"
        text += f" {done}/{total}"
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
            text += f", round {state.round}" if state.round else ""
    row = Table.grid(expand=True, padding=(0, 1, 0, 0))
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True)
    bar = ProgressBar(total=max(1, total), completed=done, complete_style="blue")
    row.add_row(Text(text, style), bar, Text(right, "bold"))
    return row


def _rates(state: RunState, until: float, width: int) -> Text:
    generated = state.worker_tokens_per_second(until, rollout=True)
    trained = state.worker_tokens_per_second(until, rollout=False)
    per_device = state.tokens_per_second / max(1, state.num_devices)
    items = {"tokens/s  generated": f"{generated:,.0f}", "trained": f"{trained:,.0f}"}
    if state.overlap is not None:
        if width >= NARROW:
            items["per device"] = f"{per_device:,.0f}"
        items["overlap"] = f"{state.overlap:.0%}"
    parts = [part for name, value in items.items() for part in (f"{name} ", (value, "bold"), "   ")]
    return _line(*parts)


def _warnings(state: RunState) -> list[RenderableType]:
    what = {
        "groups_skipped": ("group", "skipped"),
        "groups_not_replaced": ("group", "without advantages"),
        "reward_errors": ("reward call", "failed"),
        "num_updates_not_finite": ("update", "dropped, not finite"),
    }
    counts = ", ".join(
        f"{counted(count, what[name][0])} {what[name][1]}"
        for name, count in state.counts.items()
        if count
    )
    texts = [text for text in (counts, state.note, state.warning) if text]
    return [_line((printable(text), "bold yellow")) for text in texts]


def _workers(state: RunState, now: float, width: int, max_lanes: int) -> list[RenderableType]:
    """A line per worker with what it did recently, a legend, and the ring."""
    until = now if state.ended is not None else now - LAG_SECONDS
    workers: list[WorkerState | None] = list(state.workers.values())
    if len(workers) > max_lanes:  # the first ones and the last one, which trains
        workers = [*workers[: max(0, max_lanes - 2)], None, workers[-1]]
    lanes = [worker for worker in workers if worker is not None]
    is_wide = width >= NARROW
    labels = {w.name: printable(f"{w.name} {w.device}" if is_wide else w.name) for w in lanes}
    label_width = max(map(len, labels.values())) + 1
    right_width = 15 if is_wide else 5
    num_slices = max(1, width - label_width - right_width)
    wanted = max(MIN_LANE_SECONDS, ITERATIONS_SHOWN * (state.mean_iteration_seconds or 0.0))
    seconds = next((s for s in SLICE_SECONDS if s * num_slices >= wanted), SLICE_SECONDS[-1])
    title = "start" if state.is_starting else f"the last {num_slices * seconds:.0f} s"
    lines: list[RenderableType] = [Rule(title, align="left", style="dim")]
    for worker in workers:
        if worker is None:
            lines.append(_line((f"and {len(state.workers) - len(lanes)} more", "dim")))
            continue
        label = f"{labels[worker.name]:<{label_width}}"
        if state.is_starting:
            phase = f"{worker.phase}, {now - worker.phase_started:.1f} s"
            status = (printable(phase), "bold") if worker.phase else ("ready", "bold green")
            lines.append(_line(label, status))
            continue
        right = f" {worker.busy_share(until):>4.0%}"
        if is_wide:
            right += f"{worker.tokens_per_second(until):>8,.0f}/s"
        lane = _lane(worker, until, num_slices, seconds)
        lines.append(_line(label, *lane, (right.rjust(right_width), "bold")))
    if state.is_starting:
        return lines
    names = {"wait": "idle"}
    legend = [
        part for kind, look in LOOKS.items() for part in (look, f" {names.get(kind, kind)}  ")
    ]
    return [*lines, _line(*legend, ("%: busy", "dim"))]


def _lane(
    worker: WorkerState, until: float, num_slices: int, seconds: float
) -> list[tuple[str, str]]:
    """One character per slice of time: the kind of work that took most of it."""
    # Slices start at multiples of their length, so that a lane moves by whole characters.
    since = (int(until // seconds) - num_slices) * seconds
    started = worker.spans[False][0].started if worker.spans[False] else math.inf
    kinds: list[SpanKind | None] = []
    for number, work in enumerate(worker.seconds_by_kind(since, seconds, num_slices)):
        scoring = work.pop("score", 0.0)
        if "weights" in work:  # separates iterations, however short it is
            kinds.append("weights")
            continue
        idle = seconds - sum(work.values())
        if since + (number + 1) * seconds > started and idle > 0.0:
            work["wait"] = work.get("wait", 0.0) + idle
        longest = max(work.items(), key=lambda item: item[1])[0] if work else None
        kinds.append("score" if scoring and longest in ("wait", None) else longest)
    looks = (LOOKS[kind] if kind is not None else (" ", "") for kind in kinds)
    return [(look[0] * len(list(run)), look[1]) for look, run in groupby(looks)]


def _rewards(state: RunState, width: int) -> Text:
    """The newest reward and accuracies, and a sparkline of the rewards."""
    text = f"reward {shown(state.rewards[-1], '.3f')}"
    if state.accuracies:
        newest = [shown(accuracy, ".3f") for accuracy in list(state.accuracies.values())[-3:]]
        text += (" · held-out accuracy " if width >= NARROW else " · ") + " -> ".join(newest)
    finite = [reward for reward in state.rewards if math.isfinite(reward)] or [0.0]
    low, high = min(finite), max(finite)
    bars = ""
    for reward in _averages(state.rewards, max(1, width - len(text) - 1)):
        share = (reward - low) / (high - low or 1.0)
        bars += BLOCKS[1 + round(7 * share)] if math.isfinite(reward) else BLOCKS[0]
    return _line((f"{text} ", "bold"), (bars, "blue"))


def _averages(values: Sequence[float], num_columns: int) -> Sequence[float]:
    """Means of neighbours, so that at most `num_columns` values are left."""
    if len(values) <= num_columns:
        return values
    edges = [len(values) * column // num_columns for column in range(num_columns + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def _sample(state: RunState, height: int) -> RenderableType:
    """The newest completion below its prompt; what does not fit is cut off."""
    sample = state.sample
    if sample is None:
        return Text(" ")
    reward = "none" if sample["reward"] is None else f"{sample['reward']:.3g}"
    prompt = safe(str(sample["prompt"]), MAX_SAMPLE).splitlines()[-max(1, height // 3) :]
    return Group(
        Rule(f"iteration {sample['iteration'] + 1}, reward {reward}", align="left", style="dim"),
        Text("\n".join(prompt), style="dim", overflow="fold"),
        Text(safe(str(sample["completion"]), MAX_SAMPLE), overflow="fold"),
    )
