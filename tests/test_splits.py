"""`easyrl plan`: its predictions, and the command."""

import re
from statistics import median

import pytest

from easyrl.bench.plan import (
    Measured,
    Split,
    find_ties,
    flags_of,
    measure,
    predict_splits,
    verdict,
)
from easyrl.config import ConfigError, load_config
from easyrl.runtime.resolve import resolve
from runs import easyrl, lines_of


def run_of(*words, devices=("cpu", "cpu")):
    """Measured with one engine and one trainer: 1 s for the weights, 1 s that nothing explains."""
    seconds = {"seconds": 8.0, "generating": 6.0, "training": 2.0, "weights": 1.0}
    return Measured(
        resolve(load_config(None, {}, words)), devices, 1, 1, num_tokens=800.0, **seconds
    )


def test_the_slower_side_decides_what_a_split_takes():
    slow, fast = predict_splits(run_of(), 3)
    assert slow == Split(1, 2, 100.0, infer_idle=0.25, train_idle=1 - 1 / 8)
    assert fast == Split(2, 1, 160.0, infer_idle=0.4, train_idle=0.6)
    assert predict_splits(run_of("runtime.schedule=sync"), 3)[1].tokens_per_second == 800 / 6
    prompts = "train.prompts_per_iteration=4", "train.updates_per_iteration=2"
    splits = predict_splits(run_of(*prompts), 9)  # more engines than prompts do not help
    assert [(split.engines, split.trainers) for split in splits] == [(7, 2), (8, 1)]
    assert splits[1].tokens_per_second == 800 / 4
    with pytest.raises(ConfigError, match="--devices"):
        predict_splits(run_of("rollout.tensor_parallel_size=4"), 4)


def test_every_split_of_a_finished_run_and_the_best_one(finished_run):
    result = easyrl("plan", finished_run.folder, "--devices", 5)
    assert result.exit_code == 0, result.output
    lines, run = lines_of(finished_run.folder / "metrics.jsonl"), measure(finished_run.folder)
    assert run.training == median(line["perf/train_seconds"] for line in lines[1:])
    splits = predict_splits(run, 5)
    assert [(s.engines, s.trainers) for s in splits] == [(n, 5 - n) for n in range(1, 5)]
    for split in splits:
        assert split.tokens_per_second > 0
        assert re.search(rf"{split.engines} +{split.trainers} .*%", result.output)
    best = flags_of(run, max(splits, key=lambda split: split.tokens_per_second))
    assert result.output.startswith(f"fastest: {best}, ") and "cpu" in best  # as measured


def test_splits_that_a_run_cannot_tell_apart_are_a_tie():
    clear = predict_splits(run_of(), 3)
    assert [(split.engines, split.trainers) for split in find_ties(clear)] == [(2, 1)]
    assert verdict(run_of(), clear).count("\n") == 0
    # With 4 prompts more than 4 engines do not help, so that 4 or 5 of them are as fast.
    small = run_of("train.prompts_per_iteration=4")
    splits = predict_splits(small, 8)
    assert [split.engines for split in find_ties(splits)] == [4, 5, 6]
    text = verdict(small, splits)
    assert text.startswith("fastest: --infer-devices cpu:4 --train-devices cpu:4, 229 tokens/s\n")
    assert "(4+4, 5+3, 6+2)" in text and "too small" in text and "(now 4)" in text


@pytest.mark.parametrize(
    ("devices", "size", "flags"),
    [
        (["cpu", "cpu"], 1, "--infer-devices cpu:2 --train-devices cpu:3"),
        (["10.0.0.2/cpu"] * 2, 1, "--infer-devices ray:cpu:2 --train-devices ray:cpu:3"),
        (["cuda:0,1", "cuda:2"], 2, "--infer-devices 0-3 --train-devices 4-6"),
    ],
)
def test_flags_name_devices_of_the_measured_kind(devices, size, flags):
    run = run_of(f"rollout.tensor_parallel_size={size}", devices=devices)
    assert flags_of(run, Split(2, 3, 1.0, 0.0, 0.0)) == flags


def test_mistakes_are_reported_with_their_names(finished_run):
    for folder, number, named in (
        (finished_run.folder, 1, "--devices"),
        ("no/such/run", 8, "no/such/run"),
    ):
        result = easyrl("plan", folder, "--devices", number)
        assert result.exit_code == 2 and named in result.output, result.output
