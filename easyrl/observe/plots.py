"""Figures of runs, drawn by matplotlib: curves with several runs in one, and the timeline."""

import io
import re
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from easyrl.events import WORKING
from easyrl.observe.history import ACCURACY, ERROR, OVERLAP, History
from easyrl.observe.lines import function_of
from easyrl.observe.state import main_kind

# Okabe and Ito's colours, which people with any kind of colour vision tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#999999",
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlesize": "medium",
    "axes.grid": True,
    "axes.formatter.limits": (-3, 5),
    "axes.formatter.useoffset": False,
    "grid.color": "#e8e8e8",
    "figure.dpi": 150,
    "svg.hashsalt": "easyrl",
    "text.parse_math": False,  # names may have dollar signs
}
RESULTS = {"reward": "Reward", ACCURACY: "Held-out accuracy"}
OTHERS = {
    "frac_reward_zero_std": "Groups without reward spread (nothing to learn)",
    "completions/mean_length": "Completion length (mean, sampled tokens)",
    "completions/mean_inserted_length": "Tokens inserted into a completion (mean)",
    "completions/clipped_ratio": "Truncated completions",
    "kl": "KL divergence from the reference",
    "teacher/kl": "KL divergence from the teacher",
    "entropy": "Entropy",
    "grad_norm": "Gradient norm (before clipping)",
    "learning_rate": "Learning rate",
    "perf/tokens_per_second": "Throughput (sampled tokens trained per second)",
    OVERLAP: "Overlap of generating and training",
    "perf/weights_seconds": "Weight exchange (seconds)",
    "sampling/sampling_logp_difference/max": "Largest log-probability gap, engine to trainer",
}
"""The figures: metric -> title."""
SHARES = (ACCURACY, OVERLAP, "frac_reward_zero_std", "completions/clipped_ratio")
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


def titles_of(runs: Sequence[History]) -> dict[str, str]:
    """Return the titles of all figures by metric, with those of several reward functions."""
    keys = dict.fromkeys(key for run in runs for line in run.lines.values() for key in line)
    functions = {key: f"Reward function {name}" for key in keys if (name := function_of(key))}
    return {**RESULTS, **(functions if len(functions) > 1 else {}), **OTHERS}


@rc_context(STYLE)
def draw_curves(
    runs: Sequence[History], titles: Mapping[str, str], size: tuple[float, float]
) -> Figure | None:
    """Draw metrics that any run has, one above the other, each of this size in inches, or None."""
    keys = [key for key in titles if any(run.series(key)[0] for run in runs)]
    if not keys:
        return None
    figure = Figure((size[0], size[1] * len(keys)), layout="constrained")
    all_axes = figure.subplots(len(keys), sharex=True, squeeze=False)[:, 0]
    for axes, key in zip(all_axes, keys, strict=True):
        axes.set_title(titles[key])
        for run, colour in zip(runs, cycle(COLOURS), strict=False):
            iterations, values = run.series(key)
            errors = [run.lines[n].get(ERROR) or 0.0 for n in iterations]
            if iterations:
                axes.errorbar(iterations, values, errors if key == ACCURACY else None,
                              color=colour, label=run.name, capsize=2,
                              marker="." if len(values) < 30 else "")  # fmt: skip
        if key in SHARES:
            bottom, top = axes.get_ylim()
            axes.set_ylim(max(bottom, -0.01), min(max(top, 0.1), 1.01))
            axes.yaxis.set_major_formatter("{x:.0%}")
    all_axes[-1].set_xlabel("iteration")
    all_axes[-1].locator_params("x", nbins=6, integer=True, min_n_ticks=1)
    return figure


@rc_context({**STYLE, "axes.grid": False})
def draw_timeline(run: History) -> Figure | None:
    """Draw what took most of each moment of the newest iterations, with a lane per worker, and
    below them when both groups worked. None without a trace of that."""
    workers = run.state.workers.values()
    shown = list(run.starts)[-ITERATIONS_SHOWN:]
    if not shown or not any(worker.spans for worker in workers):
        return None
    since, until = run.starts[shown[0]], run.state.newest
    if seconds_of_last := run.lines.get(shown[-1], {}).get("perf/iteration_seconds"):
        until = run.starts[shown[-1]] + seconds_of_last
    step = max(1e-6, until - since) / NUM_SLICES
    lanes: dict[str, list[str]] = {}
    are_working = {"rollout": np.zeros(NUM_SLICES, bool), "train": np.zeros(NUM_SLICES, bool)}
    for worker in workers:
        slices = worker.seconds_by_kind(since, step, NUM_SLICES)
        lanes[worker.name] = [main_kind(work, step) for work in slices]
        are_working[worker.name.partition("-")[0]] |= np.isin(lanes[worker.name], WORKING)
    lanes[BOTH] = [BOTH if each else "wait" for each in np.logical_and(*are_working.values())]
    figure = Figure((8.6, 1 + 0.3 * len(lanes)), layout="constrained")
    axes = figure.add_subplot()
    axes.imshow([[to_rgb(KIND_COLOURS[kind]) for kind in lane] for lane in lanes.values()],
                aspect="auto", interpolation="none",
                extent=(0, until - since, len(lanes) - 0.5, -0.5))  # fmt: skip
    axes.hlines(np.arange(len(lanes) - 1) + 0.5, 0, until - since, color="white", linewidth=4)
    axes.set_yticks(range(len(lanes)), list(lanes))
    axes.set_xlabel("seconds")
    axes.spines[:].set_visible(False)
    for iteration in shown:
        x = run.starts[iteration] - since
        axes.axvline(x, color="#666666", linewidth=0.8, linestyle=":")
        axes.annotate(f" iteration {iteration}", (x, 1.0), va="bottom",
                      xycoords=("data", "axes fraction"))  # fmt: skip
    patches = [Patch(color=colour) for colour in KIND_COLOURS.values()]
    names = ["idle" if kind == "wait" else kind for kind in KIND_COLOURS]
    figure.legend(patches, names, loc="outside lower left", ncols=len(names), frameon=False)
    return figure


@rc_context({**STYLE, "svg.fonttype": "none"})
def to_svg(figure: Figure | None, title: str, prefix: str) -> Markup:
    """Return an `svg` element for HTML; empty for None. The prefix makes its ids unique."""
    if figure is None:
        return Markup()
    file = io.StringIO()
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(file, format="svg", metadata=metadata, transparent=True)
    _, start, text = file.getvalue().partition("<svg ")
    text = re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{prefix}-", text)
    return Markup(start + 'role="img" aria-label="{}" ').format(title) + Markup(text)
