"""`easyrl plan`: its predictions for real runs, and the command."""

import json
import re
from collections import deque

import pytest
from pydantic import TypeAdapter
from typer.testing import CliRunner

from easyrl.cli import app
from easyrl.config import load_config
from easyrl.planning.simulation import (
    MeasuredRun,
    Split,
    flags_of,
    mean_speed,
    predict_splits,
    read_rates,
)
from runs import succeed

RATES = [[0.0186, 0.00035, 0.0], [0.31, 0.0007, 0.0]]
"""Of an engine and a trainer (`altered_run.py`): three times what `bench loop` recorded for its
small model on one core of a Xeon each, so that all else takes little."""
WORDS = (
    *("--no-live", "--iterations", "7", "data.num_held_out=0", "devices.threads=1"),
    *("train.prompts_per_iteration=24", "rollout.num_generations=8", "train.keep_checkpoints=0"),
    *("rollout.max_completion_length=64", "rollout.max_concurrent_groups=4"),
    *("data.max_prompt_length=32", "train.max_tokens_per_micro_batch=1024"),
    *("algorithm.beta=0.04", "train.learning_rate=0"),  # every group is trained
)


@pytest.mark.long
@pytest.mark.alone
def test_predictions_are_within_a_tenth_of_real_runs(tmp_path):
    """Engines and trainers sleep, so that two cores are enough. The rates are those of one run with
    one of each."""
    measured = {}
    for engines, trainers in ((1, 1), (2, 1), (1, 2), (3, 1)):
        folder = tmp_path / f"{engines}+{trainers}"
        words = "--infer-devices", f"cpu:{engines}", "--train-devices", f"cpu:{trainers}"
        succeed(*("--output", str(folder), *WORDS, *words), altered=True, RATES=json.dumps(RATES))
        measured[engines, trainers] = mean_speed(read_rates(folder).iterations)
    run = read_rates(tmp_path / "1+1")
    plan = {
        (split.engines, split.trainers): split.tokens_per_second
        for num_devices in (2, 3, 4)
        for split in predict_splits(run, run.config, num_devices)
    }
    ratios = {split: plan[split] / speed for split, speed in measured.items()}
    print({split: (plan[split], measured[split], ratio) for split, ratio in ratios.items()})
    assert all(0.9 < ratio < 1.1 for ratio in ratios.values()), ratios


def plan(*words):
    result = CliRunner().invoke(app, ["plan", *words])
    return result.exit_code, result.output


def test_every_split_of_a_finished_run_and_the_best_one(finished_run, tmp_path):
    file = tmp_path / "splits.json"
    words = "train.prompts_per_iteration=16", "--json", str(file), "--force"
    code, output = plan(str(finished_run.folder), "--devices", "8", *words)
    assert code == 0, output
    found = json.loads(file.read_text())
    splits = found["splits"]
    assert [(s["engines"], s["trainers"]) for s in splits] == [(n, 8 - n) for n in range(1, 8)]
    assert found["best"] == max(splits, key=lambda split: split["tokens_per_second"])
    for split in splits:
        assert 0 < split["tokens_per_second_low"] <= split["tokens_per_second_high"]
        assert re.search(rf"{split['engines']} +{split['trainers']} .*%", output)
    assert f"--infer-devices cpu:{found['best']['engines']} " in output  # as measured
    assert plan(str(finished_run.folder), "--devices", "8", *words) == (0, output), "equal draws"


@pytest.mark.parametrize(
    ("devices", "size", "flags"),
    [
        (["cpu", "cpu"], 1, "--infer-devices cpu:2 --train-devices cpu:3"),
        (["10.0.0.2/cpu"] * 2, 1, "--infer-devices ray:cpu:2 --train-devices ray:cpu:3"),
        (["cuda:0,1", "cuda:2"], 2, "--infer-devices 0-3 --train-devices 4-6"),
    ],
)
def test_flags_name_devices_of_the_measured_kind(devices, size, flags):
    config = load_config(None, {"rollout.tensor_parallel_size": size})
    run = MeasuredRun(config, dict(zip(("rollout-0", "train-0"), devices, strict=True)), deque())
    assert flags_of(run, Split(2, 3, 1.0, 1.0, 1.0, 0.0, 0.0)) == flags


def test_a_benchmark_file_gives_the_same_plan_as_the_run(tmp_path, finished_run):
    rates = TypeAdapter(MeasuredRun).dump_python(read_rates(finished_run.folder), mode="json")
    file, devices = tmp_path / "loop.json", ("--devices", "3")
    file.write_text(json.dumps({"results": [{"model": "a", "rates": rates}]}))
    assert plan(str(file), *devices) == plan(str(finished_run.folder), *devices)
    file.write_text(json.dumps({"results": [{"rates": rates | {"iterations": []}}]}))
    code, output = plan(str(file), *devices)
    assert code == 2 and "two finished iterations" in output


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("{run}", "--devices", "1"), "--devices"),
        (("{run}", "--devices", "8", "model.dtype=bfloat16"), "model.dtype"),
        (("{run}", "--devices", "8", "--json", "no/such/folder/plan.json"), "--json"),
        (("no/such/run", "--devices", "8"), "no/such/run"),
    ],
)
def test_mistakes_are_reported_with_their_names(words, named, finished_run):
    code, output = plan(*(word.format(run=finished_run.folder) for word in words))
    assert code == 2 and named in output, output
