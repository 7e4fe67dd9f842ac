"""The result of a finished run: its figures, and commands that can be pasted."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from easyrl.config import load_config
from easyrl.observe.report import end_table, print_end
from easyrl.observe.text import say_rich
from easyrl.runtime.metrics import summarize
from easyrl.runtime.resume import SavedState

SUMMARY = {
    "accuracy_before": 0.5,
    "accuracy_after": 0.5,
    "reward_first": 0.5,
    "reward_last": 0.75,
    "completion_tokens": 1234567,
    "wall_seconds": 61.5,
    "tokens_per_second_per_device": 1000.0,
    "overlap": 0.75,
    "groups_trained": 960,
    "groups_off_policy": 0,
    "updates_per_iteration": 2,
    "sampling_logp_difference_max": 1.5e-5,
    "updates_not_finite": 2,
    "reward_errors": 0,
    "weights_sha256": "0123456789abcdef0123",
}


Capture = pytest.CaptureFixture[str]


def show(capsys: Capture, *words: str, folder: str = "run", **more: object) -> str:
    """The table's text, without line breaks inside of a row."""
    say_rich(end_table({**SUMMARY, **more}, Path(folder), load_config(words=words)))
    return capsys.readouterr().out


@pytest.mark.parametrize("name", ["runs/1", "a [red]b:smile:", "slash[/b]", "x" * 120])
def test_commands_can_be_pasted_whatever_the_folder_is_called(capsys: Capture, name: str) -> None:
    lines = [line for line in show(capsys, folder=name).splitlines() if line.startswith("  easyrl")]
    resumed = ["easyrl", "grpo", "--resume", name, "--iterations", "120"]
    assert [shlex.split(line) for line in lines] == [["easyrl", "samples", name], resumed]


def test_shows_figures_and_what_went_wrong(capsys: Capture) -> None:
    shown = " ".join(show(capsys, groups_not_replaced=7, accuracy_after=None).split())
    for text in ("reward 0.500 -> 0.750", "1,234,567 tokens", "960 trained, 0 off-policy"):
        assert text in shown
    assert "2 updates dropped" in shown and "7 groups without advantages" in shown
    assert "accuracy" not in shown and "none -> 0.500" in show(capsys, accuracy_before=None)


def test_gap_is_the_largest_one_that_was_compared(capsys: Capture) -> None:
    lines: list[dict[str, float | None]] = []
    lost = summarize(lines, load_config(), SavedState(1, 1), num_devices=2)  # with metrics.jsonl
    assert lost["sampling_logp_difference_max"] is None
    for gap, largest in ((None, None), (1e-6, 1e-6), (None, 1e-6), (3e-6, 3e-6)):
        tokens = {"num_tokens": 10, "num_generated_tokens": 10, "perf/iteration_seconds": 2.0}
        lines.append({"reward": 0.5, "sampling/sampling_logp_difference/max": gap, **tokens})
        summary = summarize(lines, load_config(), SavedState(1, 1), num_devices=2)
        assert summary["sampling_logp_difference_max"] == largest
    assert "log-probabilities" not in show(capsys, sampling_logp_difference_max=None)


def test_error_text_cannot_take_over_the_terminal(capsys: Capture) -> None:
    print_end(1, "bad \x1b[2J\x07 \udcff\nsecond line" + "." * 100_000)
    shown = capsys.readouterr().err
    assert "\x1b" not in shown and "\x07" not in shown and "\udcff" not in shown
    assert shown.count("second line") == 1 and len(shown) < 10_000
