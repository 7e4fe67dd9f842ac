"""The result of a finished run: its figures, and commands that can be pasted."""

from __future__ import annotations

import math
import shlex
from pathlib import Path

import pytest

from easyrl import events
from easyrl.config import load_config
from easyrl.observe.report import end_table, print_end
from easyrl.observe.text import say_rich
from easyrl.runtime.metrics import IterationRecord, Totals
from easyrl.runtime.resume import SavedState
from easyrl.runtime.run_folder import finite

SUMMARY = {
    "accuracy_before": 0.5,
    "accuracy_after": None,
    "reward_first": 0.5,
    "reward_last": None,
    "completion_tokens": 1234567,
    "wall_seconds": 61.5,
    "tokens_per_second_per_device": 1000.0,
    "overlap": 0.75,
    "groups_trained": 960,
    "groups_off_policy": 0,
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
    resumed = ["easyrl", "grpo", "--resume", name, "--iterations", "120"]
    further = [
        *("easyrl", "grpo", "--config", f"{name}/config.yaml"),
        *("--model", f"{name}/model", "--output", f"{name}-2"),
        "train.learning_rate=0.0003",  # the built-in model's; its folder has another default
    ]
    for keep, onward in ((2, resumed), (0, further)):  # without checkpoints nothing is resumed
        lines = show(capsys, f"train.keep_checkpoints={keep}", folder=name).splitlines()
        typed = [shlex.split(line, comments=True) for line in lines if line.startswith("  easyrl")]
        assert typed == [["easyrl", "watch", name], ["easyrl", "config", "--diff", name], onward]


def test_lora_runs_name_their_adapter(capsys: Capture) -> None:
    shown = show(capsys, "model.lora.rank=4", "train.keep_checkpoints=0")
    assert "adapter/" in shown and "train.learning_rate=0.003 " in shown
    assert "adapter" not in show(capsys)


def test_shows_figures_and_what_went_wrong(capsys: Capture) -> None:
    shown = " ".join(show(capsys).split())
    assert "0.500 -> none" in shown and "generated and trained 1,234,567 tokens" in shown
    assert "2 updates dropped" in shown and "per iteration" not in shown
    counts = {"groups_replaced": 900, "groups_not_replaced": 7, "reward_errors": 1}
    more = {"generated_tokens": 2345678, "updates_per_iteration": 4, **counts}
    shown = " ".join(show(capsys, **more).split())
    for text in (
        "2,345,678 generated",
        "960 trained, 0 off-policy, 900 replaced",
        "7 groups without advantages",
        "1 reward call failed",
        "4 per iteration: only the first is strictly on-policy",
    ):
        assert text in shown


def test_gap_is_the_largest_one_that_was_compared(capsys: Capture) -> None:
    totals = Totals(2, 0.0)
    for gap, largest in ((math.nan, None), (1e-6, 1e-6), (math.nan, 1e-6), (3e-6, 3e-6)):
        record = IterationRecord(0)
        counts = ("groups_skipped", "groups_replaced", "groups_not_replaced", "reward_errors")
        metrics = dict.fromkeys(("num_updates_not_finite", *counts), 0.0)
        metrics |= {"reward": 0.5, "sampling/sampling_logp_difference/max": gap}
        record.trained = events.IterationTrained(0, 1, 4, 0, 10, 1.0, metrics)
        totals.add_iteration(record, metrics, 2.0)
        state = SavedState(1, 1)
        summary = finite(totals.summary(load_config().train, state, None, "a" * 64))
        assert summary["sampling_logp_difference_max"] == largest
    assert "not compared" in show(capsys, sampling_logp_difference_max=None)


def test_error_text_cannot_take_over_the_terminal(capsys: Capture) -> None:
    print_end(1, "bad \x1b[2J\x07 \udcff\nsecond line" + "." * 100_000)
    shown = capsys.readouterr().err
    assert "\x1b" not in shown and "\x07" not in shown and "\udcff" not in shown
    assert shown.count("second line") == 1 and len(shown) < 10_000
