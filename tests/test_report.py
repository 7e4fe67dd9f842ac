"""`easyrl report`: its pages and folders. The text of one is a golden file of test_screens.py."""

import html
import re
import shutil
from pathlib import Path

import pytest

from easyrl.observe import plots
from easyrl.observe.history import read_histories
from run_events import METRICS
from runs import easyrl, lines_of, summary_of, write_rows


def page_of(*runs):
    file = runs[0] / "page.html"
    done = easyrl("report", *runs, "-o", file, "--force")
    assert done.exit_code == 0, done.output
    return file.read_text()


def text_of(page):
    body = re.sub(r"<(style|script).*?</\1>", "", page, flags=re.DOTALL)
    return html.unescape(" ".join(re.sub(r"<[^>]*>", " ", body).split()))


@pytest.fixture
def run(finished_run, tmp_path):
    return Path(shutil.copytree(finished_run.folder, tmp_path / "run"))


def make_run(folder, lines, config=""):
    folder.mkdir()
    write_rows(folder / "metrics.jsonl", lines)
    (folder / "config.yaml").write_text(config)
    return folder


def line(iteration, **more):
    values = {"policy_version": iteration, "num_tokens": 100 * iteration}
    return {**METRICS, "iteration": iteration, **values, **more}


def test_several_runs_share_figures_and_differing_settings_are_marked(run, tmp_path):
    lines = [line(n, **{"rewards/a/mean": 0.1, "rewards/b/mean": 0.2 * n}) for n in range(1, 5)]
    other = make_run(tmp_path / "other", lines, "train: {learning_rate: 0.5}")
    alone, both = page_of(other), page_of(other, run)
    assert "Reward function b" in text_of(alone)
    assert summary_of(run)["weights_sha256"][:16] in text_of(both)
    assert alone.count('class="card plot"') < both.count('class="card plot"')
    row = re.search(r"train.learning_rate</code>.*?</tr>", both, flags=re.DOTALL)
    assert 'class="other"' in row[0] and "0.5" in row[0]


def test_history_has_a_line_for_each_iteration(run, tmp_path):
    # Of version 0.2, which counted from 0 in files.
    other = make_run(tmp_path / "other", [{**line(1, only_here=7), "iteration": 0}])
    first, second = read_histories([run, other])
    assert list(first.lines) == [0, 1, 2, 3] and list(second.lines) == [1]
    assert first.lines[1]["reward"] == lines_of(run / "metrics.jsonl")[0]["reward"]
    assert first.lines[0]["eval/accuracy"] == summary_of(run)["accuracy_before"]
    assert second.lines[1]["only_here"] == 7 and "reward" not in first.lines[0]


def test_any_name_of_a_run_can_be_drawn(run, tmp_path):
    other = shutil.copytree(run, tmp_path / "esc\x1b[2J<b>$\\q$")
    page = page_of(run, other)
    assert "esc\N{REPLACEMENT CHARACTER}[2J" in text_of(page) and "\x1b" not in page


def test_files_of_others_are_replaced_only_by_force(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words, file in {
        ("report", run, "-o", "mine.html"): "mine.html",
        ("report", run, make_run(tmp_path / "other", [line(1)])): "report.html",
    }.items():
        Path(file).write_text("mine")
        assert easyrl(*words).exit_code == 2 and Path(file).read_text() == "mine"
        assert easyrl(*words, "--force").exit_code == 0 and Path(file).read_text() != "mine"
    assert [easyrl("report", run).exit_code for _ in range(2)] == [0, 0]  # the run's own file
    Path("rates.json").write_text("mine")
    assert easyrl("bench", "ring", "--json", "rates.json").exit_code == 2
    assert Path("rates.json").read_text() == "mine"


def test_mistakes_are_user_errors(run, tmp_path):
    for folder in ("empty", "evaluation"):
        (tmp_path / folder).mkdir()
    for name in ("config.yaml", "settings.json", "samples.jsonl"):
        (tmp_path / "evaluation" / name).write_text("")
    for words, text in {
        ("report", run, tmp_path / "evaluation"): "evaluation",
        ("report", run, "-o", tmp_path): "--output",
        ("report", tmp_path / "empty"): "config.yaml",
    }.items():
        refused = easyrl(*words)
        assert refused.exit_code == 2 and text in refused.output, refused.output


def test_page_needs_nothing_but_itself(run, tmp_path):
    page = page_of(run, shutil.copytree(run, tmp_path / "second run"))
    assert "default-src 'none'" in page  # blocks requests
    ids = re.findall(r'\sid="([^"]+)"', page)
    used = re.findall(r'(?:url\(#|href="#)([^)"]+)', page)
    assert len(ids) == len(set(ids)) and set(used) <= set(ids)
    assert page.count("<svg") >= 14 and "Timeline of second run" in page


def measured(iteration, accuracy, error=0.02, **more):
    evaluated = {"eval/accuracy": accuracy, "eval/standard_error": error, "eval/problems": 64}
    return line(iteration, **evaluated, **more)


def best_of(*runs):
    found = re.search(r"Best run: (.*?) Overview", text_of(page_of(*runs)))
    return found[1] if found else None


def test_the_best_of_several_runs_is_named_only_where_they_can_be_told_apart(tmp_path):
    rates = {"low": 0.3, "high": 0.7, "close": 0.68}
    runs = {}
    for number, (name, accuracy) in enumerate(rates.items(), 1):
        lines = [measured(1, 0.2), measured(2, accuracy)]
        config = f"train: {{learning_rate: {number}e-3}}"
        runs[name] = make_run(tmp_path / name, lines, config)
    expected = "high, held-out accuracy 0.700 ± 0.020; the next is low (0.300 ± 0.020)"
    assert best_of(runs["low"], runs["high"]) == expected
    close = best_of(*runs.values())
    assert close.startswith("high, ") and "too few problems or iterations to tell" in close
    page = page_of(*runs.values())
    assert "★ best" not in page
    waits = make_run(tmp_path / "waits", lines, "reward: {timeout_seconds: 60}")
    assert best_of(runs["low"], waits).startswith("waits, ")
    other = make_run(tmp_path / "error", lines, "reward: {on_error: zero}")
    assert best_of(runs["low"], other).startswith("none is named, since reward.on_error differs")
    warm = make_run(tmp_path / "warm", lines, "eval: {temperature: 1.0}")
    assert best_of(runs["low"], warm).startswith("none is named, since eval.temperature differs")
    # In the overview, and in the table behind the figures.
    assert page_of(runs["low"], runs["high"]).count("★ best") == 2
    # The setting in which they differ stands before the results; what is equal stands once.
    overview = text_of(page).partition("Overview")[2].partition("Curves")[0]
    assert overview.index("train.learning_rate 0.001 0.002 0.003") < overview.index("held-out")
    assert overview.count("arithmetic") == 1
    again = make_run(tmp_path / "again", [measured(1, 0.2), measured(2, 0.7)])
    assert best_of(runs["high"], again).startswith("none: high and again (0.700 ± 0.020) have the")
    other = make_run(tmp_path / "other", [measured(1, 0.9)], "data: {dataset: countdown}")
    assert best_of(runs["high"], other).startswith("none is named, since data.dataset")
    no_accuracy = make_run(tmp_path / "plain", [line(1, reward=0.9), line(2, reward=0.9)])
    by_reward = best_of(runs["high"], no_accuracy)
    assert by_reward.startswith("plain, reward of the last iterations 0.900; the next is high")
    assert best_of(runs["high"]) is None


def test_equal_curves_are_told_apart_by_their_markers_lines_and_widths(tmp_path):
    lines = [line(number, reward=0.1 * number) for number in range(1, 40)]
    runs = [make_run(tmp_path / name, lines) for name in "abc"]
    figure = plots.draw_curves(read_histories(runs), {"reward": "Reward"}, (4, 2))
    curves = [drawn for drawn, *_ in figure.axes[0].containers]
    for kind in ("marker", "linestyle", "color", "linewidth", "markersize"):
        values = [getattr(curve, f"get_{kind}")() for curve in curves]
        assert len(set(values)) == 3, kind
        if kind in ("linewidth", "markersize"):
            assert values == sorted(values, reverse=True)  # a later run hides no earlier one
    legend = re.findall(r"<b style=\"color: [^>]*>(\S) [abc]</b>", page_of(*runs))
    assert set(legend) == {"●", "■", "▲"}
