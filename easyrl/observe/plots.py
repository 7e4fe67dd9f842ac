"""Figures of runs, drawn by matplotlib: curves with several runs in one, and the timeline.

For the page of `easyrl report` each figure becomes SVG that is part of the HTML; `easyrl plot`
writes a file.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from easyrl.events import WORKING, SpanKind
from easyrl.observe.history import ACCURACY, ERROR, OVERLAP, History, reward_functions
from easyrl.observe.view import main_kind

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which people with any kind of colour vision tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#999999",
    "axes.labelcolor": "#555555",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.limits": (-3, 5),
    "axes.formatter.useoffset": False,
    "grid.color": "#e8e8e8",
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "svg.fonttype": "none",
    "svg.hashsalt": "easyrl",
}
MAX_POINTS = 200  # of a curve
BOTH = "both at once"
KIND_COLOURS = {
    "generate": "#009E73",
    "prefill": "#56B4E9",
    "score": "#E69F00",
    "train": "#CC79A7",
    "weights": "#222222",
    "wait": "#eeeeee",
    BOTH: "#0072B2",
}
NUM_SLICES = 600  # of the timeline
ITERATIONS_SHOWN = 3  # in the timeline
MAX_LANES = 8  # of each group of workers
FORMATS = (".svg", ".png")


@dataclass(frozen=True, slots=True)
class Panel:
    """A figure with one curve per run."""

    key: str
    title: str
    about: str = ""
    is_share: bool = False


PANELS = (
    Panel("reward", "Reward", "Mean over all completions of an iteration."),
    Panel(ACCURACY, "Held-out accuracy", "Bars: one standard error.", is_share=True),
    Panel("rewards", "Reward function"),  # one for each
    Panel("frac_reward_zero_std", "Groups without reward spread",
          "All rewards of such a group are equal, so it teaches nothing.", is_share=True),
    Panel("completions/mean_length", "Completion length", "Tokens; mean."),
    Panel("completions/clipped_ratio", "Truncated completions",
          "Cut off at rollout.max_completion_length.", is_share=True),
    Panel("kl", "KL divergence from the reference", "Mean over the trained tokens."),
    Panel("entropy", "Entropy", "Mean over the trained tokens."),
    Panel("grad_norm", "Gradient norm", "Before clipping."),
    Panel("learning_rate", "Learning rate"),
    Panel("perf/tokens_per_second", "Throughput", "Completion tokens trained per second."),
    Panel(OVERLAP, "Overlap", "Of generating and training, the share of the shorter one that ran "
          "during the other.", is_share=True),
    Panel("perf/weights_seconds", "Weight exchange", "Seconds per iteration."),
    Panel("sampling/sampling_logp_difference/max", "Gap between engine and trainer",
          "Largest difference of a token's log-probability in both."),
)  # fmt: skip
"""The page's figures."""


def panels_of(runs: Sequence[History]) -> list[Panel]:
    """Return the panels, with one for each reward function."""
    found = []
    for panel in PANELS:
        if panel.key != "rewards":
            found.append(panel)
        elif len(names := reward_functions(runs)) > 1:  # the only one is the reward itself
            found += [Panel(name, f"Reward function {name.split('/')[1]}") for name in names]
    return found


def has_data(runs: Sequence[History], panel: Panel) -> bool:
    """Return whether any run has the panel's metric."""
    return any(run.series(panel.key)[0] for run in runs)


def colour_of(number: int) -> str:
    """Colour of a run."""
    return COLOURS[number % len(COLOURS)]


def draw_curves(
    runs: Sequence[History], panels: Sequence[Panel], size: tuple[float, float]
) -> Figure:
    """Draw panels, one above the other, each of this size in inches."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with rc_context(STYLE):
        height = size[1] * len(panels)
        figure = Figure(figsize=(size[0], height), layout="constrained", dpi=150)
        all_axes = np.atleast_1d(figure.subplots(len(panels), sharex=True))
        for axes, panel in zip(all_axes, panels, strict=True):
            for number, run in enumerate(runs):
                _draw_curve(axes, run, panel, colour_of(number))
            if panel.is_share:
                bottom, top = axes.get_ylim()
                axes.set_ylim(max(bottom, -0.01), min(max(top, 0.1), 1.01))
                axes.yaxis.set_major_formatter("{x:.0%}")
        all_axes[-1].set_xlabel("iteration")
        all_axes[-1].xaxis.set_major_locator(
            MaxNLocator(6, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1)
        )
    return figure


def _draw_curve(axes: Axes, run: History, panel: Panel, colour: str) -> None:
    x, y = map(np.array, run.series(panel.key))
    if panel.key == ACCURACY:
        errors = [run.lines[iteration].get(ERROR) or 0.0 for iteration in x]
        axes.errorbar(x, y, errors, color=colour, marker="o", markersize=3, capsize=2,
                      elinewidth=1, linewidth=1.5)  # fmt: skip
    elif len(x):
        parts = min(MAX_POINTS, len(x))  # of neighbours, whose means are drawn
        x, y = (np.array([*map(np.mean, np.array_split(values, parts))]) for values in (x, y))
        axes.plot(x, y, color=colour, linewidth=1.5, marker="." if len(x) < 30 else "")


# -- the timeline ---------------------------------------------------------------------------------


def draw_timeline(run: History) -> Figure | None:
    """Draw what the workers did in the newest iterations; None without a trace of them.

    A lane per worker and, below them, the times at which both groups worked.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    workers = list(run.state.workers.values())
    # Of a worker with many spans the oldest ones are lost.
    full = [w.spans[0].started for w in workers if len(w.spans) == w.spans.maxlen]
    known = [n for n, started in run.starts.items() if started >= max(full, default=-math.inf)]
    shown = sorted(known)[-ITERATIONS_SHOWN:]
    if not shown or not any(worker.spans for worker in workers):
        return None
    since, until = run.starts[shown[0]], run.state.newest
    if seconds_of_last := run.lines.get(shown[-1] + 1, {}).get("perf/iteration_seconds"):
        until = run.starts[shown[-1]] + seconds_of_last
    seconds = max(1e-6, until - since) / NUM_SLICES
    kinds = {
        worker.name: [
            main_kind(work, seconds) for work in worker.seconds_by_kind(since, seconds, NUM_SLICES)
        ]
        for worker in workers
    }
    rows: dict[str, Sequence[str]] = {}
    for role in ("rollout", "train"):
        rows |= dict([each for each in kinds.items() if each[0].startswith(role)][:MAX_LANES])
    rows[BOTH] = _together(kinds)
    with rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(8.6, 0.75 + 0.3 * len(rows)), layout="constrained")
        axes = figure.add_subplot()
        for row, row_kinds in enumerate(rows.values()):
            _draw_row(axes, row, row_kinds, seconds)
        axes.set_yticks(range(len(rows)), list(rows))
        axes.invert_yaxis()
        axes.set_xlim(0, until - since)
        axes.set_xlabel("seconds")
        axes.spines[:].set_visible(False)
        for iteration in shown:
            x = run.starts[iteration] - since
            axes.axvline(x, color="#666666", linewidth=0.8, linestyle=":")
            axes.annotate(f" iteration {iteration + 1}", (x, 1.0), va="bottom", color="#555555",
                          xycoords=("data", "axes fraction"))  # fmt: skip
    return figure


def _together(kinds: Mapping[str, Sequence[SpanKind]]) -> list[str]:
    """For each slice of time, whether both groups of workers process tokens."""
    groups = [name.partition("-")[0] for name in kinds]
    return [
        "wait" if len({g for g, k in zip(groups, each, strict=True) if k in WORKING}) < 2 else BOTH
        for each in zip(*kinds.values(), strict=True)
    ]


def _draw_row(axes: Axes, row: int, kinds: Sequence[str], seconds: float) -> None:
    bars: dict[str, list[tuple[float, float]]] = {}
    start = 0
    for kind, same in groupby(kinds):
        length = len(list(same))
        bars.setdefault(kind, []).append((start * seconds, length * seconds))
        start += length
    for kind, spans in bars.items():
        axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=KIND_COLOURS[kind], linewidth=0)


# -- output ---------------------------------------------------------------------------------------


def to_svg(figure: Figure, title: str, prefix: str) -> str:
    """Return an `svg` element for HTML. Its ids get the prefix, so that figures of one page share
    none."""
    from markupsafe import escape
    from matplotlib import rc_context

    file = io.StringIO()
    with rc_context(STYLE):
        metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=metadata, transparent=True)
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{prefix}-", text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1)


def write_plot(runs: Sequence[History], file: Path) -> None:
    """Write the curves of reward and held-out accuracy. Raises ValueError for another format."""
    from matplotlib import rc_context
    from matplotlib.lines import Line2D

    if file.suffix not in FORMATS:
        raise ValueError(
            f"--output: expected a file that ends in {' or '.join(FORMATS)}, got '{file}'"
        )
    panels = [panel for panel in PANELS[:2] if has_data(runs, panel)] or PANELS[:1]
    figure = draw_curves(runs, panels, (6.4, 3.0))
    for axes, panel in zip(figure.axes, panels, strict=True):
        axes.set_title(panel.title, loc="left")
    handles = [Line2D([], [], color=colour_of(number)) for number in range(len(runs))]
    figure.legend(handles, [run.name for run in runs], loc="outside lower left", frameon=False)
    with rc_context({**STYLE, "svg.fonttype": "path"}):
        figure.savefig(file)
