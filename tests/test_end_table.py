"""What stands on the screen when a run has finished, and what is pasted from there."""

from __future__ import annotations

import math
import shlex
from pathlib import Path

import pytest

from easyrl import events
from easyrl.config import load_config
from easyrl.observe.plain_lines import print_end, print_end_table
from easyrl.runtime.iteration import IterationRecord
from easyrl.runtime.run_folder import finite
from easyrl.runtime.totals import Totals

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


@pytest.mark.parametrize("name", ["runs/1", "a [red]b:smile:", "slash[/b]", "x" * 120])
def test_commands_can_be_pasted_whatever_the_folder_is_called(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    resumed = ["easyrl", "grpo", "--resume", name, "--iterations", "120"]
    further = [
        *("easyrl", "grpo", "--config", f"{name}/config.yaml"),
        *("--model", f"{name}/model", "--output", f"{name}-2"),
        "train.learning_rate=0.0003",  # the built-in model's, which its folder's would not be
    ]
    for keep, onward in ((2, resumed), (0, further)):  # without checkpoints nothing is resumed
        config = load_config(words=[f"train.keep_checkpoints={keep}"])
        print_end_table(SUMMARY, Path(name), config)
        lines = capsys.readouterr().out.splitlines()
        typed = [shlex.split(line, comments=True) for line in lines if line.startswith("  easyrl")]
        assert typed == [["easyrl", "watch", name], ["easyrl", "config", "--diff", name], onward]


def test_with_lora_it_is_told_what_the_two_folders_are_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["model.lora.rank=4", "train.keep_checkpoints=0"]
    print_end_table(SUMMARY, Path("run"), load_config(words=words))
    shown = capsys.readouterr().out
    assert "the adapter merged" in shown and "AutoPeftModelForCausalLM" in shown
    assert "train.learning_rate=0.003 " in shown
    print_end_table(SUMMARY, Path("run"), load_config())
    assert "adapter" not in capsys.readouterr().out


def test_what_is_not_known_is_none_and_lost_updates_are_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_end_table(SUMMARY, Path("run"), load_config())
    shown = capsys.readouterr().out
    assert "0.500 -> none" in shown and "1,234,567 tokens" in shown
    assert "2 updates dropped, not finite (lower train.learning_rate)" in shown


@pytest.mark.parametrize("count", [1, 4])
def test_only_the_first_of_several_updates_is_called_strictly_on_policy(
    capsys: pytest.CaptureFixture[str], count: int
) -> None:
    print_end_table({**SUMMARY, "updates_per_iteration": count}, Path("run"), load_config())
    text = "4 per iteration: only the first is strictly on-policy"
    assert (text in capsys.readouterr().out) == (count > 1)


def test_what_was_generated_and_not_trained_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    replaced = {"generated_tokens": 2345678, "groups_replaced": 900, "groups_not_replaced": 7}
    print_end_table({**SUMMARY, **replaced}, Path("run"), load_config())
    shown = " ".join(capsys.readouterr().out.split())
    assert "1,234,567 tokens" in shown and "2,345,678 generated" in shown
    assert "960 trained, 0 off-policy, 900 replaced" in shown
    assert "7 groups without an advantage, no round left" in shown
    print_end_table({**SUMMARY, "reward_errors": 1}, Path("run"), load_config())
    assert "1 reward call failed" in " ".join(capsys.readouterr().out.split())
    print_end_table({**SUMMARY, "generated_tokens": 1234567}, Path("run"), load_config())
    assert "generated and trained" in capsys.readouterr().out


def test_a_gap_that_nothing_was_compared_for_is_told_as_such(
    capsys: pytest.CaptureFixture[str],
) -> None:
    totals = Totals(2, 0.0)
    for gap, largest in ((math.nan, None), (1e-6, 1e-6), (math.nan, 1e-6), (3e-6, 3e-6)):
        record = IterationRecord(0)
        metrics = {"num_updates_not_finite": 0.0, "sampling/sampling_logp_difference/max": gap}
        record.trained = events.IterationTrained(0, 1, 4, 0, 10, 1.0, metrics)
        totals.add_iteration(record, 0.5, 2.0)
        summary = finite(totals.summary(load_config().train, 1, None, None, "a" * 64))
        assert summary["sampling_logp_difference_max"] == largest
    print_end_table({**SUMMARY, "sampling_logp_difference_max": None}, Path("run"), load_config())
    assert "not compared: no group had a gradient" in capsys.readouterr().out


def test_a_cause_of_others_making_cannot_take_over_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_end(1, "bad \x1b[2J\x07 \udcff\nsecond line" + "." * 100_000)
    shown = capsys.readouterr().err
    assert "\x1b" not in shown and "\x07" not in shown and "\udcff" not in shown
    assert shown.count("second line") == 1 and len(shown) < 10_000
