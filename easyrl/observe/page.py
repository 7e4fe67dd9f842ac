"""The page of `easyrl report`: one HTML file with tables, figures and samples of runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from easyrl import __version__
from easyrl.config import KEYS, Config
from easyrl.config.devices import count_devices
from easyrl.formatting import counted
from easyrl.observe import plots
from easyrl.observe.history import (
    SAMPLED_ITERATIONS,
    History,
    Line,
    accuracies_text,
    overlap_of,
    rewards_text,
    worst_to_best,
)
from easyrl.observe.report import PROBLEMS, problems_in
from easyrl.observe.samples import columns_of
from easyrl.observe.text import clock, safe, shown

GAP = "sampling/sampling_logp_difference/max"
NUM_SAMPLES = 10  # of each run
MAX_TEXT = 3000  # characters of a prompt or a completion
MAX_VALUE = 200  # characters of another column
MAX_MESSAGES = 30
LEFT_OUT = ("reward", "prompt_index")
"""Columns of a sample that are in its heading, or say nothing to a reader."""
Rows = list[tuple[str, list[str]]]  # label, a cell for each run


def to_page(runs: Sequence[History]) -> str:
    """Return the page."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(Path(__file__).with_name("page.html").read_text("utf-8"))
    panels = plots.panels_of(runs)
    drawn = [panel for panel in panels if plots.has_data(runs, panel)]
    return template.render(
        version=__version__,
        runs=[
            {
                "name": run.name,
                "folder": run.folder,
                "status": run.status,
                "colour": plots.colour_of(number),
                "timeline": _svg(plots.draw_timeline(run), f"Timeline of {run.name}", f"t{number}"),
                "messages": _messages(run),
                "samples": [_sample(*each) for each in worst_to_best(run, NUM_SAMPLES)],
            }
            for number, run in enumerate(runs)
        ],
        figures=[
            (panel, _svg(plots.draw_curves(runs, [panel], (4.2, 2.3)), panel.title, f"f{number}"))
            for number, panel in enumerate(drawn)
        ],
        missing=[panel.title for panel in panels if panel not in drawn],
        overview=_transposed(map(_overview, runs)),
        proof=_transposed(map(_proof, runs)),
        settings=_settings([run.config for run in runs]),
        kinds=plots.KIND_COLOURS,
        sampled_iterations=SAMPLED_ITERATIONS,
    )


def _svg(figure: Any, title: str, prefix: str) -> Any:
    from markupsafe import Markup

    return figure and Markup(plots.to_svg(figure, title, prefix))


def _transposed(tables: Any) -> Rows:
    """Join the tables of several runs, which have the same labels."""
    columns = list(tables)
    return [(label, [column[label] for column in columns]) for label in columns[0]]


def _overview(run: History) -> dict[str, str]:
    config, lines = run.config, [line for line in run.lines.values() if "reward" in line]
    devices = run.state.run.devices if run.state.run else {}
    seconds = sum(run.series("perf/iteration_seconds")[1])
    tokens = lines[-1]["num_tokens"] if lines else 0
    wall = run.summary.get("wall_seconds")
    speed = shown(tokens / seconds if seconds else None, ",.0f")
    return {
        "state": run.status,
        "model": config.model.path,
        "data": config.data.shown,
        "devices": ", ".join(f"{name}: {device}" for name, device in devices.items()) or "unknown",
        "reward": rewards_text(run),
        "held-out accuracy": accuracies_text(run),
        "trained": f"{tokens:,} completion tokens in {clock(seconds)}",
        "with start, evaluations, saving": clock(wall) if wall else "unknown",
        "throughput": f"{speed} tokens/s on {counted(count_devices(devices.values()), 'device')}",
        "overlap": f"{overlap_of(lines):.0%} of the shorter of generating and training",
    }


def _proof(run: History) -> dict[str, str]:
    train = run.config.train
    iterations, versions = run.series("policy_version")
    per_iteration = train.updates_per_iteration
    are_all_there = versions == [n * per_iteration for n in range(1, run.num_done + 1)]
    gaps = run.series(GAP)[1]
    return {
        "groups trained": f"{len(iterations) * train.prompts_per_iteration:,}",
        "groups of another policy": f"{run.summary.get('groups_off_policy', 0)}"
        " (each is checked on arrival; one would end the run)",
        "policy versions": f"{versions[0]:.0f} to {versions[-1]:.0f}, "
        + ("none missing" if are_all_there else "with gaps: metrics.jsonl lacks iterations")
        if versions
        else "none",
        "updates per iteration": "1"
        if per_iteration == 1
        else f"{per_iteration}, of which only the first is strictly on-policy",
        "largest gap of log-probabilities": f"{shown(max(gaps, default=None), '.1e')} between "
        "engine and trainer",
        "sha256 of the final weights": run.summary.get("weights_sha256", "none")[:16],
    }


def _messages(run: History) -> list[str]:
    """Problems, restarts, notes and warnings."""
    totals = {name: sum(run.series(name)[1]) for name in PROBLEMS}
    found = problems_in(totals)
    if restarts := run.summary.get("worker_restarts"):
        found.append(f"{counted(restarts, 'rollout worker')} replaced")
    notes = [f"{text} (×{count})" if count > 1 else text for text, count in run.messages.items()]
    return [safe(text, MAX_TEXT) for text in found + notes[-MAX_MESSAGES:]]


def _settings(configs: Sequence[Config]) -> list[tuple[str, str, list[str]]]:
    """Key, default and the runs' values, of each setting that differs from its default."""

    def value(config: Config, key: str) -> str:
        found: Any = config
        for name in key.split("."):
            found = getattr(found, name)
        return json.dumps(found, ensure_ascii=False)

    default = Config()
    rows = [(key, value(default, key), [value(each, key) for each in configs]) for key in KEYS]
    return [row for row in rows if set(row[2]) != {row[1]} and row[0] != "output.dir"]


def _sample(line: Line, count: int) -> dict[str, Any]:
    columns = columns_of(line, MAX_VALUE)
    return {
        "reward": shown(line["reward"], ".3g"),
        "count": count,
        "columns": [(name, text) for name, text in columns.items() if name not in LEFT_OUT],
        "prompt": safe(str(line["prompt"]), MAX_TEXT),
        "completion": safe(str(line["completion"]), MAX_TEXT),
    }
