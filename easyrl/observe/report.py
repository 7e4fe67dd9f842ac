"""The page of `easyrl report`: one HTML file with tables, figures and samples of runs."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from easyrl import __version__
from easyrl.config import KEYS, Config, by_name
from easyrl.observe import plots
from easyrl.observe.history import History, worst_to_best
from easyrl.observe.samples import Line, branches_of, columns_of
from easyrl.observe.text import safe, shown

SIZE = 4.2, 2.4  # of a figure, in inches
NUM_SAMPLES = 10  # of each run
MAX_TEXT = 3000  # characters of a prompt, a completion or a message
MAX_VALUE = 200  # characters of another column
MAX_MESSAGES = 30


def to_page(runs: Sequence[History]) -> str:
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["printable"] = lambda text: safe(str(text), MAX_TEXT)
    template = environment.from_string(Path(__file__).with_name("page.html").read_text("utf-8"))
    overviews = [_overview(run) for run in runs]
    rows = dict.fromkeys(name for overview in overviews for name in overview)
    return template.render(
        version=__version__,
        branches_of=branches_of,
        runs=runs,
        colours=plots.COLOURS * len(runs),
        overview={name: [each.get(name, "") for each in overviews] for name in rows},
        figures={
            title: plots.to_svg(plots.draw_curves(runs, {key: title}, SIZE), title, f"f{number}")
            for number, (key, title) in enumerate(plots.titles_of(runs).items())
        },
        settings=_settings([run.settings for run in runs]),
        timelines=[
            plots.to_svg(plots.draw_timeline(run), f"Timeline of {run.name}", f"t{number}")
            for number, run in enumerate(runs)
        ],
        messages=[list(run.messages.items())[-MAX_MESSAGES:] for run in runs],
        samples=[map(_sample, worst_to_best(run, NUM_SAMPLES)) for run in runs],
    )


def _overview(run: History) -> dict[str, str]:
    devices = ", ".join(f"{name}: {device}" for name, device in run.devices.items())
    return {
        "model": run.spec.model.path,
        "data": run.spec.data.options.shown,
        "devices": devices or "unknown",
        **run.results(),
    }


def _settings(runs: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, list[str]]]:
    """Key, default and the runs' values, of each setting that differs from its default."""
    rows = []
    defaults = by_name(Config().model_dump(mode="json"))
    for key in KEYS:
        default = json.dumps(defaults[key], ensure_ascii=False)
        values = [json.dumps(settings[key], ensure_ascii=False) for settings in runs]
        if set(values) != {default} and key != "output.dir":
            rows.append((key, default, values))
    return rows


def _sample(sample: tuple[Line, int]) -> tuple[str, str, Line]:
    line, count = sample
    reward = shown(line["reward"], ".3g") + (f" ×{count}" if count > 1 else "")
    others = {name: line[name] for name in line if name not in ("reward", "prompt_index")}
    return reward, " · ".join(columns_of(others, MAX_VALUE)), line
