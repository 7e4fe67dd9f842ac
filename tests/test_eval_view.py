"""Output of `easyrl eval`: lines or a bar, then tables."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from easyrl import events
from easyrl.evaluation import view as eval_view
from easyrl.evaluation.figures import compare, summarize
from easyrl.evaluation.view import EvalView, show_comparison, show_results

ABOUT = {"model": "my [bold]model", "dataset": "gsm8k", "num_samples": 8}
ABOUT |= {"temperature": 0.6, "top_p": 0.95, "top_k": 0, "correct_reward": 1.0}


def answers(num_correct: Callable[[int], int]) -> list[list[dict[str, Any]]]:
    """20 problems, 8 samples of each."""
    return [
        [
            {
                "prompt": f"[red]problem\n{problem}\x1b[2J",
                "reward": float(sample < num_correct(problem)),
                "rewards": {"right": float(sample < num_correct(problem)), "format": 0.25},
                "length": 10 + sample,
                "truncated": sample == 0,
            }
            for sample in range(8)
        ]
        for problem in range(20)
    ]


def from_worker(event: events.WorkerEvent) -> Callable[[EvalView], None]:
    return lambda view: view.observe(events.FromWorker("rollout-0", 1.0, event))


def some(num_done: int) -> dict[str, Any]:
    return {str(n): [{"reward": float(n % 2)}] for n in range(num_done)}


RUN: list[Callable[[EvalView], None]] = [
    lambda view: view.start(ABOUT, Path("ev"), "so", 100, 40),
    from_worker(events.Starting("loading the model")),
    from_worker(events.Starting("loading the model")),
    lambda view: view.show_progress(10.0, some(70), 1000),
    lambda view: view.show_progress(11.0, some(75), 1100),  # too soon for another line
    from_worker(events.PromptEvaluated(0, 3, [], errors=["reward 'f' failed\x1b[2J"])),
    from_worker(events.PromptEvaluated(0, 4, [], errors=["reward 'f' failed again"])),
    lambda view: view.show_progress(20.0, some(100), 1900),
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
    assert output.count("loading the model") == 1
    # 30 in 10 s, and 30 remain.
    assert "70/100 accuracy 0.500 ± 0.060 100 tokens/s ETA 0:10" in output
    assert "75/100" not in output and "100/100" in output
    assert output.count("reward 'f' failed") == 1 and "\x1b" not in output


def test_result_table_has_every_figure(printed: Callable[[], str]) -> None:
    run = {**ABOUT, "num_too_long": 0, "wall_seconds": 10.0, "tokens_per_second": 1234.5}
    of_half = answers(lambda problem: 8 * (problem % 2))
    show_results(Path("ev"), {**run, **summarize(of_half, 1.0)})
    output = printed()
    for line in (
        "accuracy 0.500 ± 0.115",
        "pass@k 1: 0.500 2: 0.500 4: 0.500 8: 0.500",
        "mean reward 0.500 ± 0.115 right: 0.500 format: 0.250",
        "problems 20, 8 samples each at temperature 0.6, top_p 0.95",
        "mean length 13.5 tokens, 12.5% truncated",
        "1,234 tokens/s for 10.0 s",
    ):
        assert line in output, line
    nothing = [[{**line, "reward": None} for line in lines] for lines in of_half]
    results = {**run, **summarize(nothing, 1.0), "tokens_per_second": None}
    show_results(Path("ev"), results)
    assert "accuracy none" in printed()


def test_comparison_is_printed(printed: Callable[[], str]) -> None:
    first, second = (
        {f"p{n}": lines for n, lines in enumerate(answers(num))}
        for num in (lambda problem: 8, lambda problem: min(problem // 2, 8))
    )
    show_comparison(compare(first, second, 1.0)[0], "other", Path("c.jsonl"))
    output = printed()
    assert "20 common problems 1.000 ± 0.000 0.550 ± 0.078" in output
    assert "better on 16 0" in output and "c.jsonl" in output
    assert "+0.450 ± 0.078, p = 3.05e-05" in output


def test_bar_is_removed_when_the_evaluation_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eval_view, "is_live_terminal", lambda: True)
    view = EvalView(live=True)
    with pytest.raises(KeyboardInterrupt), view.bar:
        for step in RUN:
            step(view)
        assert view.bar.live.is_started and view.bar.finished
        raise KeyboardInterrupt
    assert not view.bar.live.is_started
