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
LINES = ("solid", "dashed", "dotted")
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
FORMATS = (".svg", ".png", ".pdf")


@dataclass(frozen=True, slots=True)
class Panel:
    """A figure with one curve per run."""

    key: str
    title: str
    about: str = ""
    is_share: bool = False
    is_log: bool = False
    band: tuple[str, str] | None = None  # metrics of the lower and the upper edge


PANELS = (
    Panel("reward", "Reward", "Mean over all completions of an iteration."),
    Panel(ACCURACY, "Held-out accuracy", "Bars: one standard error.", is_share=True),
    Panel("rewards", "Reward function"),  # one for each
    Panel("frac_reward_zero_std", "Groups without reward spread",
          "All rewards of such a group are equal, so it teaches nothing.", is_share=True),
    Panel("completions/mean_length", "Completion length", "Tokens; band: shortest to longest.",
          band=("completions/min_length", "completions/max_length")),
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
          "Largest difference of a token's log-probability in both.", is_log=True),
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


def look(number: int) -> tuple[str, Any]:
    """Colour and line style of a run."""
    return COLOURS[number % len(COLOURS)], LINES[number // len(COLOURS) % len(LINES)]


def draw_curves(runs: Sequence[History], panel: Panel) -> Figure | None:
    """Draw a panel; None if no run has its metric."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    if not any(run.series(panel.key)[0] for run in runs):
        return None
    with rc_context(STYLE):
        figure = Figure(figsize=(4.2, 2.3), layout="constrained")
        _draw(figure.add_subplot(), runs, panel)
    return figure


def _draw(axes: Axes, runs: Sequence[History], panel: Panel) -> None:
    from matplotlib.ticker import MaxNLocator

    for number, run in enumerate(runs):
        colour, style = look(number)
        x, y = map(np.array, run.series(panel.key))
        if panel.key == ACCURACY:
            errors = [run.lines[iteration].get(ERROR) or 0.0 for iteration in x]
            axes.errorbar(x, y, errors, color=colour, linestyle=style, marker="o", markersize=3,
                          capsize=2, elinewidth=1, linewidth=1.5)  # fmt: skip
            continue
        low = high = y
        if panel.band and len(runs) == 1:
            low, high = (np.array(run.series(key)[1]) for key in panel.band)
        x, y, low, high = _thin(x, np.mean), _thin(y, np.mean), _thin(low, min), _thin(high, max)
        if len(low) == len(high) == len(x) and (low < high).any():
            axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
        marker = "." if len(x) < 30 else ""
        axes.plot(x, y, color=colour, linestyle=style, linewidth=1.5, marker=marker)
    axes.set_xlabel("iteration")
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=True))
    if panel.is_log and axes.dataLim.ymax > 0:
        axes.set_yscale("log")
    if panel.is_share:
        bottom, top = axes.get_ylim()
        axes.set_ylim(max(bottom, -0.01), min(max(top, 0.1), 1.01))
        axes.yaxis.set_major_formatter("{x:.0%}")


def _thin(values: Any, function: Any) -> Any:
    """Join neighbours by a function of them, so that at most MAX_POINTS are left."""
    parts = np.array_split(values, max(1, min(MAX_POINTS, len(values))))
    return np.array([function(part) for part in parts if len(part)])


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
    lanes = [
        worker
        for role in ("rollout", "train")
        for worker in [each for each in workers if each.name.startswith(role)][:MAX_LANES]
    ]
    with rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(8.6, 0.75 + 0.3 * (len(lanes) + 1)), layout="constrained")
        axes = figure.add_subplot()
        for place, worker in enumerate(lanes):
            _draw_lane(axes, place, kinds[worker.name], seconds)
        _draw_lane(axes, len(lanes), _together(kinds), seconds)
        labels = [worker.name for worker in lanes]
        axes.set_yticks(range(len(lanes) + 1), [*labels, BOTH])
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


def _draw_lane(axes: Axes, place: int, kinds: Sequence[str], seconds: float) -> None:
    """Draw runs of one kind as bars."""
    bars: dict[str, list[tuple[float, float]]] = {}
    start = 0
    for kind, same in groupby(kinds):
        length = len(list(same))
        bars.setdefault(kind, []).append((start * seconds, length * seconds))
        start += length
    for kind, spans in bars.items():
        axes.broken_barh(spans, (place - 0.4, 0.8), facecolors=KIND_COLOURS[kind], linewidth=0)


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


def write_plot(runs: Sequence[History], keys: Sequence[str], file: Path) -> None:
    """Write a figure with a panel for each metric, one above the other. Raises ValueError for a
    metric that no run has, and for a format that cannot be written."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    if file.suffix not in FORMATS:
        raise ValueError(
            f"--output: expected a file that ends in {', '.join(FORMATS)}, got '{file}'"
        )
    known = {panel.key: panel for panel in panels_of(runs)}
    for key in keys:
        if not any(run.series(key)[0] for run in runs):
            names = sorted({name for run in runs for line in run.lines.values() for name in line})
            raise ValueError(f"--metric: expected one of {', '.join(names)}, got '{key}'")
    with rc_context({**STYLE, "svg.fonttype": "path"}):
        figure = Figure(figsize=(6.4, 0.4 + 2.8 * len(keys)), layout="constrained", dpi=150)
        all_axes = np.atleast_1d(figure.subplots(len(keys), sharex=True))
        for axes, key in zip(all_axes, keys, strict=True):
            panel = known.get(key, Panel(key, key))
            axes.set_title(panel.title, loc="left")
            _draw(axes, runs, panel)
        looks = [look(number) for number in range(len(runs))]
        handles = [Line2D([], [], color=colour, linestyle=style) for colour, style in looks]
        figure.legend(handles, [run.name for run in runs], loc="outside lower left", frameon=False)
        figure.savefig(file)
