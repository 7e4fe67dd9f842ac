"""`easyrl report` and `easyrl plot`: what they show, of which folders, and in a browser."""

from __future__ import annotations

import csv
import html
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from easyrl import cli, events
from easyrl.config import Config
from easyrl.observe.history import read_history, worst_to_best
from easyrl.observe.trace import TraceWriter
from run_events import METRICS, run_events
from runs import Finished, lines_of, start, summary_of, wait_for_line

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
EVIL = "<script>document.title = 'hit'</script><img src='http://example.org/x.png'> [bold]\x1b[2J"


def call(*words: object) -> Result:
    return CliRunner().invoke(cli.app, list(map(str, words)))


def page_of(*runs: Path) -> str:
    file = runs[0] / "page.html"
    done = call("report", *runs, "-o", file, "--force")
    assert done.exit_code == 0, done.output
    return file.read_text()


def text_of(page: str) -> str:
    """The text that a reader sees."""
    body = re.sub(r"<(style|script).*?</\1>", "", page, flags=re.DOTALL)
    return html.unescape(" ".join(re.sub(r"<[^>]*>", " ", body).split()))


@pytest.fixture
def run(finished_run: Finished, tmp_path: Path) -> Path:
    """A copy, for tests that change it."""
    return Path(shutil.copytree(finished_run.folder, tmp_path / "run"))


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Write a run folder from events and metrics, without a run."""

    def make(name: str, run: list[Any], lines: list[dict[str, Any]], config: str = "") -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.yaml").write_text(config)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "metrics.jsonl").write_text(text)
        notify = TraceWriter()
        for event in run:
            is_start = isinstance(event, events.RunStarted)
            notify(events.RunStarted(**{**vars(event), "folder": folder}) if is_start else event)
        return folder

    return make


def line(iteration: int, **more: Any) -> dict[str, Any]:
    """A line of metrics.jsonl."""
    values = {"policy_version": iteration + 1, "num_tokens": 100 * (iteration + 1)}
    return {**METRICS, "iteration": iteration, **values, **more}


def test_page_shows_what_the_run_was(run: Path) -> None:
    page, summary = text_of(page_of(run)), summary_of(run)
    iterations = lines_of(run / "metrics.jsonl")
    assert "finished, 3 of 3 iterations" in page
    rewards = [iterations[n]["reward"] for n in (0, -1)]
    assert f"{rewards[0]:.3f} → {rewards[1]:.3f} (first and last iteration)" in page
    for name in ("accuracy_before", "accuracy_after"):
        assert f"{summary[name]:.3f} ± 0." in page
    assert "1 sample each at temperature 1" in page
    assert f"overlap {summary['overlap']:.0%} of" in page
    for text in (
        "trained 12 groups, 0 off-policy",
        "policy versions 1 to 3, none missing",
        f"differ by at most {summary['sampling_logp_difference_max']:.1e}",
        summary["weights_sha256"][:16],
        "train.prompts_per_iteration 16 4",
        "Not measured: KL divergence",
        "iteration 3",
        "both at once",
    ):
        assert text in page, text
    assert "output.dir" not in page


def test_samples_go_from_the_lowest_to_the_highest_reward(run: Path) -> None:
    rewards = [0.5, 1.0, 1.0, 1.0, None, 0.0]
    more = {"advantage": 0.0, "answer": "the answer", "rewards": {"right": 0.25, "brief": 1}}
    lines = [
        {"iteration": 2, "prompt_index": 5, "prompt": EVIL, "completion": EVIL, "reward": reward}
        | more
        for reward in rewards
    ]
    lines.append({**lines[0], "iteration": 0, "completion": "old"})
    many = [{**lines[0], "iteration": 2 + n, "completion": f"many {n}"} for n in range(10)]
    text = "".join(json.dumps(line) + "\n" for line in [lines[-1], *lines[:-1], *many])
    (run / "samples.jsonl").write_text(text + '{"iteration": 9, "comp')
    found = worst_to_best(read_history(run), 4)
    assert [sample["reward"] for sample, _ in found] == [None, 0.5, 0.5, 1.0]
    assert [count for _, count in found] == [1, 1, 1, 3]
    page = page_of(run)
    assert "<script" not in page and "<img" not in page and "\x1b" not in page
    shown = text_of(page)
    assert shown.index("reward none") < shown.index("reward 0 ") < shown.index("reward 1 ×3")
    assert "answer the answer" in shown and "right 0.25" in shown
    assert "[bold]" in shown and "old" not in re.findall(r"\w+", shown)


def test_several_runs_share_figures_and_differing_settings_are_marked(
    run: Path, make_run: Callable[..., Path]
) -> None:
    lines = [line(n, **{"rewards/a/mean": 0.1, "rewards/b/mean": 0.2 * n}) for n in range(4)]
    other = make_run("other", [], lines, "train: {learning_rate: 0.5}")
    alone, both = page_of(other), page_of(other, run)
    assert "Reward function a" in text_of(alone) and "Reward function b" in text_of(alone)
    assert alone.count('class="card plot"') < both.count('class="card plot"')
    assert "#D55E00" in both and "#D55E00" not in re.sub(r"<svg.*?</svg>", "", alone)
    row = re.search(r"train.learning_rate</code>.*?</tr>", both, flags=re.DOTALL)
    assert row is not None and 'class="other"' in row[0] and "0.5" in row[0]
    assert "other: trace.json has no iteration" in text_of(both)


def test_restarts_and_warnings_are_listed(make_run: Callable[..., Path]) -> None:
    """The second command resumes after the first iteration; what was undone is not shown."""
    first = run_events(Path(), Config())[:-2]
    started = first[0]
    assert isinstance(started, events.RunStarted)
    resumed = events.RunStarted(
        **{**vars(started), "num_iterations": 1, "accuracies": [(0, 0.5), (1, 0.7)]}
    )
    first.append(events.Evaluated(started.started, 0.9, 2, 0.1, num_iterations=2))
    second = [resumed, events.Note("a note"), events.RunEnded(1, "no more memory")]
    run = make_run("run", [*first, *second], [line(0, groups_skipped=2)])
    assert read_history(run).series("eval/accuracy") == ([0, 1], [0.5, 0.7])
    page = text_of(page_of(run))
    assert "0.500 ± 0.200 → 0.700 ± 0.100" in page
    for text in (
        "failed after 1 of 60 iterations",
        "resumed after 1 iteration",
        "a note (×2)",
        "no events for 60 s",
        "2 groups skipped",
        "ended with exit code 1: no more memory",
    ):
        assert text in page, text


def test_long_run_gives_a_small_page(make_run: Callable[..., Path]) -> None:
    lines = [line(n, kl=n % 7, entropy=None if n % 2 else 1.0) for n in range(3000)]
    page = page_of(make_run("long", [], lines))
    assert len(page) < 500_000
    assert "3000 iterations" not in page and "1 to 3000, none missing" in text_of(page)


def test_csv_has_a_row_for_each_iteration(
    run: Path, make_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "easyrl.observe.report", None)  # with matplotlib
    other = make_run("other", [], [line(0, only_here=7)])
    rows = list(csv.DictReader(io.StringIO(call("report", "--csv", run, other).output)))
    assert [(row["run"], row["iteration"]) for row in rows] == [
        *(("run", str(n)) for n in range(4)),
        ("other", "1"),
    ]
    metrics = lines_of(run / "metrics.jsonl")
    assert float(rows[1]["reward"]) == metrics[0]["reward"] and rows[0]["reward"] == ""
    assert float(rows[0]["eval/accuracy"]) == summary_of(run)["accuracy_before"]
    assert rows[4]["only_here"] == "7" and rows[1]["only_here"] == ""
    assert call("report", "--csv", run, "-o", run / "table.csv").exit_code == 0
    assert len((run / "table.csv").read_text().splitlines()) == 5


def test_plot_writes_the_format_of_its_name(run: Path) -> None:
    for name, beginning in (("c.svg", b"<?xml"), ("c.png", b"\x89PNG")):
        done = call("plot", run, "-o", run / name)
        assert done.exit_code == 0 and (run / name).read_bytes().startswith(beginning)


def test_files_of_others_are_replaced_only_by_force(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    other = shutil.copytree(run, tmp_path / "other")
    for words, file in {
        ("plot", run, "-o", "mine.svg"): "mine.svg",
        ("report", run, "--csv", "-o", "mine.csv"): "mine.csv",
        ("report", run, other): "report.html",
    }.items():
        Path(file).write_text("mine")
        assert call(*words).exit_code == 2 and Path(file).read_text() == "mine"
        assert call(*words, "--force").exit_code == 0 and Path(file).read_text() != "mine"
    assert [call("plot", run).exit_code for _ in range(2)] == [0, 0]  # the run's own file
    Path("rates.json").write_text("mine")
    for words in (("plan", run, "--devices", 4), ("bench", "ring")):
        assert call(*words, "--json", "rates.json").exit_code == 2
    assert Path("rates.json").read_text() == "mine"


def test_any_name_of_a_run_can_be_drawn(run: Path, tmp_path: Path) -> None:
    names = "lr$\\q$x", "_hidden", "esc\x1b[2J<b>"
    runs = [shutil.copytree(run, tmp_path / name) for name in names]
    assert call("plot", *runs, "-o", tmp_path / "c.svg").exit_code == 0
    picture, page = (tmp_path / "c.svg").read_text(), page_of(*runs)
    # Each letter is a path of its own, named in a comment.
    for shown in ("lr$\\q$x", "_hidden", "esc\N{REPLACEMENT CHARACTER}[2J"):
        assert f"<!-- {shown}" in picture and shown in text_of(page)
    assert "\x1b" not in picture + page


def test_mistakes_are_user_errors(run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    evaluation = tmp_path / "evaluation"
    evaluation.mkdir()
    for name in ("config.yaml", "settings.json", "samples.jsonl"):
        (evaluation / name).write_text("")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "config.yaml").write_text("")
    (foreign / "metrics.jsonl").write_text('{"step": 1}\n')
    for words, text in {
        ("report", tmp_path / "nothing"): "nothing",
        ("report", foreign): "metrics.jsonl",
        ("report", tmp_path / "empty"): "config.yaml",
        ("report", run, evaluation): "evaluation",
        ("report", run, "-o", tmp_path): "--output",
        ("plot", run, "-o", run / "curve.gif"): ".png",
        ("plot", tmp_path / "empty"): "config.yaml",
    }.items():
        refused = call(*words)
        assert refused.exit_code == 2 and text in refused.output, refused.output
    assert not list(run.glob("curve.*"))


def test_run_that_has_lost_its_trace_is_shown_without_a_timeline(run: Path) -> None:
    (run / "trace.json").unlink()
    history = read_history(run)
    assert history.num_done == len(lines_of(run / "metrics.jsonl")) and not history.starts


def test_running_run_and_what_is_left_of_a_killed_one(tmp_path: Path) -> None:
    """Its files may end in the middle of a line."""
    folder = tmp_path / "run"
    words = ("train.prompts_per_iteration=2", "rollout.max_completion_length=8")
    process = start("--output", str(folder), "--iterations", "100000", "--no-live", *words)
    try:
        wait_for_line(process, "iteration 2/")
        assert "still running" in text_of(page_of(folder))
    finally:
        process.kill()
        process.communicate()
    for name in ("metrics.jsonl", "samples.jsonl", "trace.json"):
        with (folder / name).open("a") as file:
            file.write('{"iteration": 99999, "rew')
    page = text_of(page_of(folder))
    assert "of 100000 iterations: its process is gone" in page
    assert "none missing" in page and "both at once" in page
    shutil.copy(folder / "config.yaml", tmp_path / "config.yaml")
    (tmp_path / "metrics.jsonl").write_text("")
    assert "No iteration has finished so far" in text_of(page_of(tmp_path))


# In a browser.

PROBE = """
const page = document.querySelector("iframe").contentDocument, found = {plots: [], problems: []}
const ids = [...page.querySelectorAll("[id]")].map(each => each.id)
if (new Set(ids).size < ids.length) found.problems.push("an id is used twice")
for (const figure of page.querySelectorAll("figure.plot")) {
  const svg = figure.querySelector("svg"), box = svg.getBoundingClientRect()
  const drawn = [...svg.querySelectorAll("path, use")].filter(each => {
    const place = each.getBBox()
    return place.width > 0 || place.height > 0
  })
  for (const [, id] of svg.outerHTML.matchAll(/(?:url\\(#|href="#)([^)"]+)/g))
    if (!svg.querySelector("#" + CSS.escape(id))) found.problems.push("no element " + id)
  found.plots.push([svg.getAttribute("aria-label"), Math.round(box.width), Math.round(box.height),
                    drawn.length, svg.querySelectorAll("text").length])
}
const root = page.documentElement
if (root.scrollWidth > root.clientWidth) found.problems.push("wider than the screen")
document.body.innerHTML = "<pre>" + JSON.stringify(found) + "</pre>"
"""


def browse(page: Path) -> str:
    """Open a page in headless Chromium; return its elements, as its scripts leave them."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += [f"--user-data-dir={page.parent / 'browser'}", "--dump-dom", page.as_uri()]
    command.insert(1, "--host-resolver-rules=MAP * ~NOTFOUND")  # Chromium itself asks for updates
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium (Debian's package `chromium`)")
@pytest.mark.parametrize("width", [390, 1400], ids=["phone", "wide"])
def test_page_in_a_browser(run: Path, tmp_path: Path, width: int) -> None:
    """No console error, every plot drawn within the width, and no request to the network."""
    shutil.copytree(run, tmp_path / "second run")
    page = page_of(run, tmp_path / "second run")
    assert "default-src 'none'" in page  # blocks requests; one is then an error on the console
    assert "Samples from the lowest" in browse(run / "page.html")
    # The same page in a frame, so that a script can look at it.
    frame = f'<iframe style="border: 0; width: {width}px" srcdoc="{html.escape(page)}"></iframe>'
    (tmp_path / "frame.html").write_text(f"{frame}<script>onload = () => {{{PROBE}}}</script>")
    elements = browse(tmp_path / "frame.html")
    match = re.search(r"<pre>(.*)</pre>", elements)
    assert match is not None
    found = json.loads(html.unescape(match[1]))
    assert found["problems"] == []
    titles = [title for title, *_ in found["plots"]]
    assert {"Reward", "Held-out accuracy", "Entropy", "Timeline of second run"} <= {*titles}
    assert len(titles) == page.count("<svg") >= 14
    for title, box_width, height, num_drawn, num_texts in found["plots"]:
        assert 300 <= box_width <= 1000 and height >= 100 and num_drawn > 6 and num_texts > 4, title
        assert box_width <= width or "Timeline" in title  # which scrolls within its card
