"""The page of `easyrl report`: one HTML file with tables, figures and samples of runs."""

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from easyrl import __version__
from easyrl.config import KEYS, Config, by_name
from easyrl.observe import plots
from easyrl.observe.history import History, worst_to_best
from easyrl.observe.samples import Line, branches_of, columns_of, picture_files
from easyrl.observe.text import safe, shown

SIZE = 4.2, 2.4  # of a figure, in inches
NUM_SAMPLES = 10  # of each run
MAX_TEXT = 3000  # characters of a prompt, a completion or a message
MAX_VALUE = 200  # characters of another column
MAX_MESSAGES = 30
MAX_PICTURES = 8  # of a sample


def to_page(runs: Sequence[History]) -> str:
    """Return the HTML of a report of the runs."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["printable"] = lambda text: safe(str(text), MAX_TEXT)
    template = environment.from_string(Path(__file__).with_name("page.html").read_text("utf-8"))
    timelines = []
    messages = []
    samples = []
    for number, run in enumerate(runs):
        timeline = plots.draw_timeline(run)
        title = f"Timeline of {run.name}"
        timelines.append(plots.to_svg(timeline, title, f"t{number}"))
        messages.append(list(run.messages.items())[-MAX_MESSAGES:])
        chosen = worst_to_best(run, NUM_SAMPLES)
        samples.append([_sample(run.folder, each) for each in chosen])
    return template.render(
        version=__version__,
        branches_of=branches_of,
        runs=runs,
        colours=plots.COLOURS * len(runs),
        overview=_overview(runs),
        figures=_figures(runs),
        settings=_settings([run.settings for run in runs]),
        timelines=timelines,
        messages=messages,
        samples=samples,
    )


def _figures(runs: Sequence[History]) -> dict[str, Markup]:
    """Return the figures by their titles; empty where no run has the metric."""
    figures: dict[str, Markup] = {}
    titles = plots.titles_of(runs)
    for number, key in enumerate(titles):
        title = titles[key]
        figure = plots.draw_curves(runs, {key: title}, SIZE)
        figures[title] = plots.to_svg(figure, title, f"f{number}")
    return figures


def _overview(runs: Sequence[History]) -> dict[str, list[str]]:
    """Return the runs' values of each row of the first table."""
    facts = [_facts(run) for run in runs]
    names: dict[str, None] = {}  # a set that keeps the order
    for of_run in facts:
        names |= dict.fromkeys(of_run)
    rows = {}
    for name in names:
        rows[name] = [of_run.get(name, "") for of_run in facts]
    return rows


def _facts(run: History) -> dict[str, str]:
    devices = [f"{name}: {device}" for name, device in run.devices.items()]
    return {
        "model": run.spec.model.path,
        "data": run.spec.data.options.shown,
        "devices": ", ".join(devices) or "unknown",
        **run.results(),
    }


class Setting(NamedTuple):
    """A setting that differs from its default in some run. Values are JSON."""

    key: str
    default: str
    values: list[str]  # of the runs


def _settings(runs: Sequence[Mapping[str, Any]]) -> list[Setting]:
    defaults = by_name(Config().model_dump(mode="json"))
    rows = []
    for key in KEYS:
        default = _to_json(defaults[key])
        values = [_to_json(settings[key]) for settings in runs]
        if set(values) != {default} and key != "output.dir":
            rows.append(Setting(key, default, values))
    return rows


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


class ShownSample(NamedTuple):
    reward: str  # and how many samples are equal, as in `0.5 ×3`
    columns: str
    line: Line
    pictures: list[str]  # of its prompt, small, as `data:` addresses


def _sample(folder: Path, sample: tuple[Line, int]) -> ShownSample:
    line, count = sample
    reward = shown(line["reward"], ".3g")
    if count > 1:
        reward += f" ×{count}"
    others = dict(line)
    del others["reward"]
    others.pop("prompt_index", None)
    pictures = []
    for file in picture_files(folder, line)[:MAX_PICTURES]:
        if file.is_file():
            content = base64.b64encode(file.read_bytes()).decode()
            pictures.append(f"data:image/jpeg;base64,{content}")
    return ShownSample(reward, " · ".join(columns_of(others, MAX_VALUE)), line, pictures)
