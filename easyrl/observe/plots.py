"""Figures of runs, drawn by matplotlib: curves with several runs in one, and the timeline."""

import io
import re
from collections.abc import Mapping, Sequence
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
# As in matplotlib, and the same characters for the legend of a page.
MARKERS = {"o": "●", "s": "■", "^": "▲", "D": "◆", "v": "▼", "P": "✚", "X": "✖"}
LINES = ("-", "--", "-.", ":")
# Curves of several runs lie on each other where their values are equal: the first is the widest,
# so that it is seen on both sides of the next ones.
WIDEST = 4.5
THINNEST = 1.4
LARGEST_MARKER = 10.0
SMALLEST_MARKER = 4.0
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
"""Metric -> title of its figure."""
SHARES = (ACCURACY, OVERLAP, "frac_reward_zero_std", "completions/clipped_ratio")
"""Metrics from 0 to 1, which are shown in per cent."""
BOTH = "both at once"
"""Lane of the timeline: when engines and trainers worked at the same time."""
KIND_COLOURS = {
    "generate": "#009E73",
    "prefill": "#56B4E9",
    "score": "#E69F00",
    "train": "#CC79A7",
    "weights": "#222222",
    "wait": "#eeeeee",
    BOTH: "#0072B2",
}
NUM_SLICES = 600
"""Number of slices of time in which the timeline is drawn."""
ITERATIONS_SHOWN = 3
"""The timeline shows this many iterations, the newest."""
MAX_MARKED = 12  # about so many points of a curve have a marker


def titles_of(runs: Sequence[History]) -> dict[str, str]:
    """Return the titles of all figures by metric, with those of several reward functions."""
    functions = {}
    for run in runs:
        for line in run.lines.values():
            for key in line:
                name = function_of(key)
                if name:
                    functions[key] = f"Reward function {name}"
    if len(functions) == 1:  # its mean is the reward
        functions = {}
    return {**RESULTS, **functions, **OTHERS}


@rc_context(STYLE)
def draw_curves(
    runs: Sequence[History], titles: Mapping[str, str], size: tuple[float, float]
) -> Figure | None:
    """Draw the metrics that any run has, one below the other, in one colour for each run. None if
    there are none. `size`: width and height of each, in inches."""
    keys = [key for key in titles if any(run.series(key) for run in runs)]
    if not keys:
        return None
    width, height = size
    figure = Figure((width, height * len(keys)), layout="constrained")
    all_axes = figure.subplots(len(keys), sharex=True, squeeze=False)[:, 0]
    for axes, key in zip(all_axes, keys, strict=True):
        axes.set_title(titles[key])
        for number, run in enumerate(runs):
            values = run.series(key)
            if not values:
                continue
            errors = None
            if key == ACCURACY:
                errors = [run.lines[iteration].get(ERROR) or 0.0 for iteration in values]
            axes.errorbar(
                list(values),
                list(values.values()),
                errors,
                label=run.name,
                capsize=2,
                markevery=max(1, round(len(values) / MAX_MARKED)),
                **_look(number, len(runs)),
            )
        if key in SHARES:
            bottom, top = axes.get_ylim()
            bottom = max(bottom, -0.01)
            top = min(max(top, 0.1), 1.01)
            axes.set_ylim(bottom, top)
            axes.yaxis.set_major_formatter("{x:.0%}")
    all_axes[-1].set_xlabel("iteration")
    all_axes[-1].locator_params("x", nbins=6, integer=True, min_n_ticks=1)
    return figure


def _look(number: int, num_runs: int) -> dict[str, Any]:
    """Return how the curves of a run are drawn, as keywords of matplotlib. Each run has its own
    colour, marker and kind of line, and is drawn thinner than the run before."""
    share = number / max(1, num_runs - 1)  # 0 of the first run, 1 of the last
    if num_runs == 1:
        share = 1.0
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": LINES[number % len(LINES)],
        "linewidth": WIDEST + share * (THINNEST - WIDEST),
        "elinewidth": THINNEST,
        "marker": list(MARKERS)[number % len(MARKERS)],
        "markersize": LARGEST_MARKER + share * (SMALLEST_MARKER - LARGEST_MARKER),
    }


@rc_context({**STYLE, "axes.grid": False})
def draw_timeline(run: History) -> Figure | None:
    """Draw what took most of each moment of the newest iterations, with a lane per worker, and
    below them when both groups worked. None without a trace of that."""
    shown = list(run.starts)[-ITERATIONS_SHOWN:]
    has_spans = any(worker.spans for worker in run.state.workers.values())
    if not shown or not has_spans:
        return None
    since = run.starts[shown[0]]
    until = run.state.newest
    seconds_of_last = run.lines.get(shown[-1], {}).get("perf/iteration_seconds")
    if seconds_of_last:
        until = run.starts[shown[-1]] + seconds_of_last
    lanes = _lanes(run, since, until)
    colour_of = {kind: to_rgb(colour) for kind, colour in KIND_COLOURS.items()}
    colours = []  # [lanes][slices]
    for lane in lanes.values():
        colours.append([colour_of[kind] for kind in lane])
    figure = Figure((8.6, 1 + 0.3 * len(lanes)), layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(
        colours,
        aspect="auto",
        interpolation="none",
        extent=(0, until - since, len(lanes) - 0.5, -0.5),
    )
    borders = np.arange(len(lanes) - 1) + 0.5
    axes.hlines(borders, 0, until - since, color="white", linewidth=4)
    axes.set_yticks(range(len(lanes)), list(lanes))
    axes.set_xlabel("seconds")
    axes.spines[:].set_visible(False)
    for iteration in shown:
        x = run.starts[iteration] - since
        axes.axvline(x, color="#666666", linewidth=0.8, linestyle=":")
        axes.annotate(
            f" iteration {iteration}",
            (x, 1.0),
            va="bottom",
            xycoords=("data", "axes fraction"),
        )
    patches = []
    for kind, colour in KIND_COLOURS.items():
        name = "idle" if kind == "wait" else kind
        patches.append(Patch(color=colour, label=name))
    figure.legend(
        handles=patches,
        loc="outside lower left",
        ncols=len(patches),
        frameon=False,
    )
    return figure


def _lanes(run: History, since: float, until: float) -> dict[str, list[str]]:
    """Return what took most of each slice of the time, by worker, and when both groups worked."""
    seconds = max(1e-6, until - since) / NUM_SLICES
    lanes: dict[str, list[str]] = {}
    generates = np.zeros(NUM_SLICES, bool)  # any rollout worker
    trains = np.zeros(NUM_SLICES, bool)
    for worker in run.state.workers.values():
        slices = worker.seconds_by_kind(since, seconds, NUM_SLICES)
        lane: list[str] = [main_kind(work, seconds) for work in slices]
        lanes[worker.name] = lane
        is_working = np.isin(lane, WORKING)
        if worker.name.startswith("rollout"):
            generates |= is_working
        else:
            trains |= is_working
    both = np.where(generates & trains, BOTH, "wait")
    lanes[BOTH] = both.tolist()
    return lanes


@rc_context({**STYLE, "svg.fonttype": "none"})
def to_svg(figure: Figure | None, title: str, prefix: str) -> Markup:
    """Return an `svg` element for HTML; empty for None. `prefix` makes its ids unique."""
    if figure is None:
        return Markup()
    file = io.StringIO()
    no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(file, format="svg", metadata=no_metadata, transparent=True)
    _, _, text = file.getvalue().partition("<svg ")  # without the head of an XML file
    text = re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{prefix}-", text)
    start = Markup('<svg role="img" aria-label="{}" ').format(title)
    return start + Markup(text)
