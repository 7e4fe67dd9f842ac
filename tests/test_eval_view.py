"""What `easyrl eval` prints: lines or a bar, then tables."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from easyrl import events
from easyrl.evaluate import view as eval_view
from easyrl.evaluate.view import EvalView, show_comparison

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


def from_worker(event: events.WorkerEvent) -> Callable[[EvalView], None]:
    return lambda view: view.observe(events.FromWorker("rollout-0", 1.0, event))


RUN: list[Callable[[EvalView], None]] = [
    lambda view: view.start(ABOUT, Path("ev"), "so", 100, 40),
    from_worker(events.Starting("loading the model")),
    from_worker(events.Starting("loading the model")),
    lambda view: view.start_progress(10.0),
    lambda view: view.show_progress(11.0, 41, (0.5, 0.1), 100),
    lambda view: view.show_progress(20.0, 70, (0.5, 0.1), 1000),
    from_worker(events.PromptEvaluated(0, 3, [], errors=["reward 'f' failed\x1b[2J"])),
    from_worker(events.PromptEvaluated(0, 4, [], errors=["reward 'f' failed again"])),
    lambda view: view.show_progress(30.0, 100, (0.5, 0.1), 1900),
]


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    return lambda: re.sub(r"\s+", " ", capsys.readouterr().out)


def test_lines_show_progress_and_remaining_time(printed: Callable[[], str]) -> None:
    view = EvalView(live=False)
    for step in RUN:
        step(view)
    output = printed()
    assert "my [bold]model on gsm8k: 100 problems, 8 samples each" in output
    assert output.count("loading the model") == 1 and "41/100" not in output
    # 30 in 10 s, and 30 remain.
    assert "70/100 accuracy 0.500 ± 0.100 100 tokens/s ETA 0:10" in output
    assert "100/100" in output and output.count("reward 'f' failed") == 1 and "\x1b" not in output


def test_result_table_has_every_figure(printed: Callable[[], str]) -> None:
    EvalView(live=False).show_results(Path("ev"), RESULTS)
    output = printed()
    for line in (
        "accuracy 0.500 ± 0.050",
        "pass@k 1: 0.100 2: 0.200 4: 0.400 8: 0.800",
        "avg@k 1: 0.500 2: 0.500 4: 0.500 8: 0.500",
        "mean reward 0.750 ± 0.030",
        "right: 0.500 format: 0.250",
        "12.5%",
        "12,345 tokens in 10.0 s, 1,234 tokens/s",
    ):
        assert line in output, line
    nothing = {**RESULTS, "accuracy": None, "standard_error": None, "tokens_per_second": None}
    for name in ("pass_at_k", "avg_at_k", "reward", "rewards"):
        del nothing[name]
    EvalView(live=False).show_results(Path("ev"), nothing)
    assert "accuracy none" in printed()


def test_comparison_shows_the_problems_that_differ_most(printed: Callable[[], str]) -> None:
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
    show_comparison("my model", comparison, problems, Path("c.jsonl"))
    output = printed()
    assert "0.500 ± 0.100 0.400" in output and "+0.100 ± 0.050, p = 0.04" in output
    assert "[red]problem 0" in output and "[red]problem 10" not in output
    assert "2 more" in output and "\x1b" not in output and "c.jsonl" in output


@pytest.mark.parametrize("num_steps", range(len(RUN) + 1))
def test_bar_is_removed_however_the_evaluation_ends(
    num_steps: int, printed: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eval_view, "is_live_terminal", lambda: True)
    view = EvalView(live=True)
    for step in RUN[:num_steps]:
        step(view)
    view.end(130, "stopped by SIGINT")
    assert view._bar is not None and not view._bar.live.is_started
    assert "stopped by SIGINT" in printed()
