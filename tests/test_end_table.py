"""The result of a finished run: its figures, and commands that can be pasted."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

import pytest

from easyrl.config import load_config
from easyrl.observe.lines import end_table, print_end
from easyrl.observe.text import say_rich
from easyrl.runtime.metrics import summarize
from easyrl.runtime.resume import SavedState

SUMMARY = {
    "iterations": 60,
    "iteration_seconds": 50.0,
    "infer_seconds": 40.0,
    "train_seconds": 35.0,
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


CPUS = {"rollout-0": "cpu", "train-0": "cpu"}
Capture = pytest.CaptureFixture[str]


def show(
    capsys: Capture,
    *words: str,
    folder: str = "run",
    devices: Mapping[str, str] = CPUS,
    **more: object,
) -> str:
    say_rich(end_table({**SUMMARY, **more}, Path(folder), load_config(words=words), devices))
    return capsys.readouterr().out


@pytest.mark.parametrize("name", ["runs/1", "a [red]b:smile:", "slash[/b]", "x" * 120])
def test_commands_can_be_pasted_whatever_the_folder_is_called(capsys: Capture, name: str) -> None:
    lines = [line for line in show(capsys, folder=name).splitlines() if line.startswith("  easyrl")]
    resumed = ["easyrl", "grpo", "--resume", name, "--iterations", "120"]
    reads = [["easyrl", command, name] for command in ("samples", "report")]
    assert [shlex.split(line) for line in lines] == [*reads, resumed]


def test_shows_figures_and_what_went_wrong(capsys: Capture) -> None:
    shown = " ".join(show(capsys, groups_not_replaced=7, accuracy_after=None).split())
    for text in ("reward 0.500 → 0.750", "1,234,567 tokens", "960 groups, 0 off-policy"):
        assert text in shown
    assert "24,691 in iterations (1,000 per device), 20,074 with start-up" in shown
    assert "means of the first and last 5 iterations" in shown
    assert "(first and last iteration)" in show(capsys, iterations=9)
    assert "2 updates dropped" in shown and "7 groups without advantages" in shown
    assert "3.000" not in show(capsys, rewards={"one": [2.0, 3.0]})
    several = one_line(show(capsys, rewards={"one": [2.0, 3.0], "other": [None, 0.5]}))
    assert "one 2.000 → 3.000 other none → 0.500" in several
    assert "accuracy" not in shown and "none → 0.500" in show(capsys, accuracy_before=None)


def one_line(text: str) -> str:
    return " ".join(text.split())


GPUS = {f"rollout-{n}": f"cuda:{n}" for n in range(4)}
GPUS |= {f"train-{n}": f"cuda:{n}" for n in range(4, 8)}
PAIRS = {"rollout-0": "cuda:0,1", "train-0": "cuda:2", "train-1": "cuda:3", "train-2": "cuda:4"}
CPU_WORKERS = {"rollout-0": "cpu", "train-0": "cpu", "train-1": "cpu"}


@pytest.mark.parametrize(
    ("devices", "infer", "train", "words"),
    [
        (GPUS, 47.0, 20.0, "--infer-devices 0-4 --train-devices 5-7"),
        (GPUS, 15.0, 45.0, "--infer-devices 0-1 --train-devices 2-7"),
        (PAIRS, 49.0, 5.0, "--infer-devices 0-3 --train-devices 4"),
        (CPU_WORKERS, 48.0, 15.0, "--infer-devices cpu:2 --train-devices cpu:1"),
        (CPUS, 48.0, 15.0, ""),  # no other split
        (GPUS, 40.0, 35.0, None),  # balanced
        ({"rollout-0": "cuda:0", "train-0": "cuda:0"}, 40.0, 10.0, None),  # one for both
    ],
)
def test_unbalanced_sides_get_a_better_split_of_the_devices(
    capsys: Capture, devices: Mapping[str, str], infer: float, train: float, words: str | None
) -> None:
    shown = one_line(show(capsys, devices=devices, infer_seconds=infer, train_seconds=train))
    assert ("balance" in shown) == (words is not None)
    assert ("--infer-devices" in shown) == bool(words) and (words or "") in shown


def test_low_overlap_is_explained(capsys: Capture) -> None:
    for words, cause in (((), "train.prompts_per_iteration"), (("runtime.schedule=sync",), "sync")):
        assert cause in one_line(show(capsys, *words, overlap=0.2))
        assert cause not in one_line(show(capsys, *words, overlap=0.8))
    assert "prompts_per" not in show(capsys, overlap=0.2, train_seconds=1.0)  # it costs little


def test_ends_of_short_runs_are_single_iterations() -> None:
    for number, (first, last) in {9: (0.0, 8.0), 10: (2.0, 7.0)}.items():
        config = load_config(words=[f"train.iterations={number}"])
        timing = {"perf/iteration_seconds": 2.0, "sampling/sampling_logp_difference/max": None}
        lines = [{"reward": float(n), **timing} for n in range(number)]
        summary = summarize(lines, config, SavedState(1, 1), num_devices=2)
        assert (summary["reward_first"], summary["reward_last"]) == (first, last)


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
