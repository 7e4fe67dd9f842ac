"""What `easyrl eval` shows: lines or a bar, and the tables."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from rich.segment import Segment

from easyrl import records
from easyrl.observe.eval_view import EvalBar, EvalLines

ABOUT = {
    "model": "my [bold]model",
    "dataset": "gsm8k",
    "num_samples": 8,
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 0,
}
RESULTS: dict[str, Any] = {
    **ABOUT,
    "accuracy": 0.5,
    "standard_error": 0.05,
    "pass_at_k": {str(k): k / 10 for k in range(1, 9)},
    "avg_at_k": {str(k): 0.5 for k in range(1, 9)},
    "reward": 0.75,
    "reward_standard_error": 0.03,
    "rewards": {"right": 0.5, "format": 0.25},
    "num_problems": 90,
    "num_skipped": 10,
    "num_too_long": 0,
    "completion_tokens": 12345,
    "mean_completion_length": 17.15,
    "truncated_share": 0.125,
    "wall_seconds": 10.0,
    "tokens_per_second": 1234.5,
}
STARTED = records.EvalStarted(0.0, Path("ev"), ABOUT, {"rollout-0": "cpu"}, "so", 100, 40)


def told(*more: records.Record) -> list[records.Record]:
    return [
        STARTED,
        records.WorkerStarting(1.0, "rollout-0", "loading the model"),
        records.WorkerStarting(1.1, "rollout-1", "loading the model"),
        records.EvaluationStarted(10.0, 0, 60),
        records.ProblemsAnswered(11.0, 41, 0.5, 0.1, 100),
        records.ProblemsAnswered(20.0, 70, 0.5, 0.1, 900),
        records.RewardFailed(20.0, None, 3, "reward 'f' failed\x1b[2J"),
        records.RewardFailed(20.0, None, 4, "reward 'f' failed again"),
        records.ProblemsAnswered(30.0, 100, 0.5, 0.1, 900),
        *more,
    ]


def show(view: Any, run: list[records.Record]) -> None:
    for record in run:
        view(record)


def test_lines_tell_how_far_it_is_and_how_long_it_will_take(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show(EvalLines(), told())
    shown = capsys.readouterr().out
    assert "evaluation of my [bold]model on gsm8k: 100 problems, 8 samples each at" in shown
    assert "temperature 0.6, top_p 0.95" in shown and "40 of them are answered" in shown
    assert shown.count("loading the model") == 1 and "41/100" not in shown
    # 30 in 10 s, and 30 are left.
    assert "70/100  accuracy 0.500 ± 0.100  100 tokens/s  ETA 0:10" in shown
    assert "100/100" in shown and shown.count("reward 'f' failed") == 1 and "\x1b" not in shown


def test_the_table_has_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    show(EvalLines(), [STARTED, records.EvalFinished(0.0, Path("ev"), RESULTS)])
    shown = capsys.readouterr().out
    for line in (
        "accuracy 0.500 ± 0.050",
        "pass@k 1: 0.100 2: 0.200 4: 0.400 8: 0.800",
        "avg@k 1: 0.500 2: 0.500 4: 0.500 8: 0.500",
        "mean reward 0.750 ± 0.030",
        "of each function right: 0.500 format: 0.250",
        "10 more whose reward call failed",
        "truncated 12.5%",
        "12,345 tokens in 10.0 s, 1,234 tokens/s",
    ):
        assert line in re.sub(r"\s+", " ", shown), line


def test_nothing_scored_is_told_as_none(capsys: pytest.CaptureFixture[str]) -> None:
    nothing = {**RESULTS, "accuracy": None, "standard_error": None, "tokens_per_second": None}
    for name in ("pass_at_k", "avg_at_k", "reward", "rewards"):
        del nothing[name]
    show(EvalLines(), [STARTED, records.EvalFinished(0.0, Path("ev"), nothing)])
    assert "accuracy     none" in capsys.readouterr().out


def test_a_comparison_names_the_problems_that_differ_most(
    capsys: pytest.CaptureFixture[str],
) -> None:
    comparison = {
        "with": "other",
        "model": None,
        "test": "a test",
        "p_value": 0.04,
        "num_problems": 15,
        "num_only_here": 1,
        "num_only_there": 2,
        "accuracy": 0.5,
        "accuracy_standard_error": 0.1,
        "other_accuracy": 0.4,
        "other_accuracy_standard_error": None,
        "difference": 0.1,
        "standard_error": 0.05,
        "num_better": 8,
        "num_worse": 4,
        "num_equal": 3,
    }
    problems = [
        {"prompt": f"[red]problem\n{n}\x1b[2J", "accuracy": 1.0, "other_accuracy": n / 12}
        for n in range(13)
    ]
    show(EvalLines(), [records.EvalCompared(RESULTS, comparison, problems, Path("c.jsonl"))])
    shown = capsys.readouterr().out
    words = " ".join(shown.split())
    assert "0.500 ± 0.100 0.400" in words and "difference +0.100 ± 0.050, p = 0.04" in words
    assert "[red]problem 0" in shown and "[red]problem 10" not in shown
    assert "and 2 problems more" in shown and "\x1b" not in shown and "c.jsonl" in shown


def test_a_bar_is_gone_whatever_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(len(told()) + 1):
        view = EvalBar()
        show(view, [*told()[:number], records.RunEnded(130, "stopped by SIGINT")])
        assert not view._progress.live.is_started and not view._start_up.live.is_started
        assert "stopped by SIGINT" in capsys.readouterr().out


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_bar_leaves_room_for_a_key_that_is_pressed(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the terminal's ^C goes into the next line, and the bar stands there twice."""
    monkeypatch.setattr("rich._console", None)  # another test's may have a width for good
    monkeypatch.setenv("COLUMNS", str(width))
    view = EvalBar()
    show(view, told())
    view.close()
    console = view._progress.console
    lines = console.render_lines(view._progress.get_renderable(), pad=False)
    assert console.width == width
    assert max(Segment.get_line_length(line) for line in lines) <= width - 4
    assert "ETA" in "".join(segment.text for line in lines for segment in line)
