"""The page of `easyrl report`: one HTML file with tables, figures and samples of runs."""

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from easyrl import __version__
from easyrl.config import KEYS, Config, by_name, keys_marked
from easyrl.config.section import MAY_CHANGE
from easyrl.observe import plots
from easyrl.observe.history import History, worst_to_best
from easyrl.observe.lines import verdict_lines, with_error
from easyrl.observe.samples import Line, branches_of, columns_of, picture_files, replies_of
from easyrl.observe.text import safe, shown
from easyrl.runtime.verdict import Change, sentence

SIZE = 4.2, 2.4  # of a figure, in inches
NUM_SAMPLES = 10  # of each run
MAX_TEXT = 3000  # characters of a prompt, a completion or a message
MAX_VALUE = 200  # characters of another column
MAX_MESSAGES = 30
MAX_PICTURES = 8  # of a sample
MAX_DIFFERENT = 8  # differing settings in the overview; the table of settings has all
DETAILS = ("trained", "tokens/s", "overlap", "balance", "updates", "judge", "  cut off",
           "engine and trainer", "weights")  # fmt: skip
"""Results that stand behind the figures."""
MEASURES = ("data", "eval", "reward")
"""Sections of settings that decide what a run's accuracy and reward mean."""
OUTPUT = "output.dir"


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
    summaries = [run.summarize() for run in runs]
    best = _find_best(runs, summaries)
    results = [run.results() for run in runs]
    settings = _settings([run.settings for run in runs])
    return template.render(
        version=__version__,
        branches_of=branches_of,
        replies_of=replies_of,
        runs=runs,
        colours=plots.COLOURS * len(runs),
        markers=list(plots.MARKERS.values()) * len(runs),
        sentences=[sentence(summary) for summary in summaries],
        verdicts=[verdict_lines(summary) for summary in summaries],
        best=best,
        overview=_overview(runs, results, settings),
        details=_details(runs, results),
        figures=_figures(runs),
        settings=settings,
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


class Best(NamedTuple):
    """The best of several runs."""

    number: int | None  # place among the runs; None: they cannot be told apart, or compared
    text: str  # "lr_3e-4, held-out accuracy 0.72 ± 0.06", and whether that is clear


def _find_best(runs: Sequence[History], summaries: Sequence[Mapping[str, Any]]) -> Best | None:
    """Return the run with the highest held-out accuracy, or without any the highest reward at its
    end; None of a single run, or without a result of each."""
    if len(runs) < 2:
        return None
    measure = "held-out accuracy"
    reached = _results_of(summaries, "accuracy_after", error_name="error_after")
    if reached is None:
        measure = "reward of the last iterations"
        reached = _results_of(summaries, "reward_last", error_name=None)
    if reached is None:
        return None
    different = _different_measures(runs)
    if different:
        keys = ", ".join(different[:3])
        verb = "differs" if len(different) == 1 else "differ"
        return Best(None, f"none is named, since {keys} {verb}: the runs measure different things")
    from_best = sorted(reached, key=lambda result: result.value, reverse=True)  # ties keep order
    first, second = from_best[:2]
    name = runs[first.number].name
    other = f"{runs[second.number].name} ({second})"
    if first.value == second.value:
        return Best(None, f"none: {name} and {other} have the same {measure}")
    text = f"{name}, {measure} {first}; the next is {other}"
    change = Change(second.value, first.value, second.error, first.error)
    if change.is_clear is False:
        return Best(None, f"{text}: too few problems or iterations to tell them apart")
    return Best(first.number, text)


class _Result(NamedTuple):
    """The final accuracy, or reward, of a run."""

    number: int  # place among the runs
    value: float
    error: float | None  # standard error, where it is known

    def __str__(self) -> str:
        return with_error(self.value, self.error)


def _results_of(
    summaries: Sequence[Mapping[str, Any]], name: str, *, error_name: str | None
) -> list[_Result] | None:
    """Return this result of each run; None unless all have it."""
    results = list[_Result]()
    for number, summary in enumerate(summaries):
        value = summary.get(name)
        if value is None:
            return None
        error = summary.get(error_name) if error_name else None
        results.append(_Result(number, value, error))
    return results


def _different_measures(runs: Sequence[History]) -> list[str]:
    """Return the settings that differ between the runs and decide what their results mean."""
    may_change = set(keys_marked(MAY_CHANGE)) - {"reward.on_error"}
    different = []
    for key in KEYS:
        section = key.partition(".")[0]
        is_of_machine = section == "reward" and key in may_change
        if section not in MEASURES or is_of_machine:
            continue
        values = [run.settings[key] for run in runs]
        if any(value != values[0] for value in values):
            different.append(key)
    return different


def _overview(
    runs: Sequence[History], results: Sequence[Mapping[str, str]], settings: Sequence["Setting"]
) -> dict[str, list[str]]:
    """Return the runs' values of each row of the first table: settings that differ between the
    runs, then what was reached."""
    rows = {}
    different = [setting for setting in settings if len(set(setting.values)) > 1]
    for setting in different[:MAX_DIFFERENT]:
        rows[setting.key] = setting.values
    if len(different) > MAX_DIFFERENT:
        num_more = len(different) - MAX_DIFFERENT
        rows[f"{num_more} more settings"] = ["see below"] * len(runs)
    rows["model"] = [run.spec.model.path for run in runs]
    rows["data"] = [run.spec.data.options.shown for run in runs]
    return rows | _table(results, is_detail=False)


def _details(runs: Sequence[History], results: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """Return the rows of the table behind the figures: devices, speed, checksums."""
    folders = [safe(str(run.folder)) for run in runs]
    devices = [_devices_of(run) for run in runs]
    rows = {"folder": folders, "devices": devices}
    return rows | _table(results, is_detail=True)


def _devices_of(run: History) -> str:
    names = [f"{name}: {device}" for name, device in run.devices.items()]
    return ", ".join(names) or "unknown"


def _table(results: Sequence[Mapping[str, str]], *, is_detail: bool) -> dict[str, list[str]]:
    """Return the results of the runs by their names, either those in `DETAILS` or the others."""
    names: dict[str, None] = {}  # a set that keeps the order
    for of_run in sorted(results, key=len, reverse=True):  # the longest has the usual order
        names |= dict.fromkeys(of_run)
    rows = {}
    for name in names:
        if (name in DETAILS) == is_detail:
            rows[name] = [of_run.get(name, "") for of_run in results]
    return rows


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
        if set(values) != {default} and key != OUTPUT:
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
    columns = " · ".join(columns_of(others, MAX_VALUE))
    return ShownSample(reward, columns, line, pictures)
