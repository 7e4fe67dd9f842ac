"""`easyrl plan`: the simulation of an iteration, and its predictions for real runs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from easyrl.bench import plan as bench_plan
from easyrl.bench.plan import Split, _read_run, _search, make_plan
from easyrl.cli import app
from easyrl.config import Config, load_config
from easyrl.config.devices import DeviceSet
from easyrl.runtime.rates import Group, MeasuredIteration, Rates, _with_devices, fit
from easyrl.runtime.simulation import Outcome, compare, mean_speed, simulate
from runs import SMALL, Finished, finish, lines_of, summary_of

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
def test_predictions_are_within_a_tenth_of_real_runs(tmp_path: Path) -> None:
    """Engines and trainers sleep, so that two cores are enough. The rates are those of one run with
    one of each."""
    measured = {}
    for engines, trainers in ((1, 1), (2, 1), (1, 2), (3, 1)):
        folder = tmp_path / f"{engines}+{trainers}"
        words = "--infer-devices", f"cpu:{engines}", "--train-devices", f"cpu:{trainers}"
        code, _, err = finish(
            *("--output", str(folder), *WORDS, *words), altered=True, RATES=json.dumps(RATES)
        )
        assert (code, err) == (0, "")
        measured[engines, trainers] = mean_speed(_read_run(folder).iterations)
    plan = {
        (split.engines, split.trainers): split.tokens_per_second
        for num_devices in (2, 3, 4)
        for split in make_plan([tmp_path / "1+1"], num_devices).splits
    }
    ratios = {split: plan[split] / speed for split, speed in measured.items()}
    print({split: (plan[split], measured[split], ratio) for split, ratio in ratios.items()})
    assert all(0.9 < ratio < 1.1 for ratio in ratios.values()), ratios


def make_rates(**changes: Any) -> Rates:
    """Only engines and trainers take time."""
    rates = Rates(
        engine=(0.01, 0.0, 0.0),
        trainer=(0.1, 0.0, 0.0),
        **dict.fromkeys(("communication", "broadcast", "overhead", "message"), 0.0),
        **dict.fromkeys(("messages_per_second", "prompt_tokens"), 0.0),
        groups=[Group([100] * 4, 0.0, True, True)],
    )
    return replace(rates, **changes)


def make_config(**changes: Any) -> Config:
    settings = {
        "train.prompts_per_iteration": 8,
        "rollout.num_generations": 4,
        "rollout.max_concurrent_groups": 2,
        "train.max_tokens_per_micro_batch": 4096,
    }
    return load_config(None, settings | {k.replace("__", "."): v for k, v in changes.items()})


def outcome(
    rates: Rates, config: Config, num_engines: int = 1, num_trainers: int = 1, **of_group: Any
) -> Outcome:
    group = rates.groups[0]._replace(**of_group)
    groups = [group] * config.train.prompts_per_iteration
    return simulate(rates, groups, config, num_engines, num_trainers)


def test_an_engine_and_a_trainer_take_as_long_as_worked_out() -> None:
    """Four times two groups of 100 steps; the trainer computes each two while the next are
    generated, and the last two after that."""
    found = outcome(make_rates(trainer=(0.1, 0.0, 0.5)), make_config())
    generating = 4 * 99 * 0.01 + 0.01  # the first tokens of later groups cost no step of their own
    assert found.num_tokens == 8 * 400
    assert found.seconds == pytest.approx(generating + 0.1 + 0.5, abs=2e-3)
    assert found.infer_busy == pytest.approx(generating / found.seconds, abs=1e-3)
    assert found.train_busy == pytest.approx((4 * 0.1 + 0.5) / found.seconds, abs=1e-3)


def test_a_slow_trainer_decides() -> None:
    """It starts with the first two groups; later ones wait, until a micro-batch is full."""
    found = outcome(
        make_rates(trainer=(0.0, 0.005, 0.0)), make_config(train__max_tokens_per_micro_batch=800)
    )
    assert found.seconds == pytest.approx(100 * 0.01 + 8 * 400 * 0.005, abs=2e-2)


def test_the_schedule_sync_adds_both_times() -> None:
    rates = make_rates(trainer=(0.0, 0.001, 0.0))
    periodic, sync = (
        outcome(rates, make_config(runtime__schedule=schedule)) for schedule in ("periodic", "sync")
    )
    assert sync.seconds == pytest.approx(4 * 99 * 0.01 + 3.2, abs=0.02)
    assert periodic.seconds < sync.seconds - 2.0


def test_engines_share_the_prompts() -> None:
    """Two groups each at a time: with four engines all start at once, with one in four turns."""
    for num_engines, num_turns in ((1, 4), (4, 1), (8, 1)):
        found = outcome(make_rates(trainer=(0.0, 0.0, 0.0)), make_config(), num_engines)
        assert found.seconds == pytest.approx(num_turns * 99 * 0.01 + 0.01, abs=2e-3)


@pytest.mark.parametrize(("num_engines", "num_trainers"), [(2, 1), (1, 2), (4, 4), (8, 8)])
def test_more_devices_are_not_slower_where_messages_cost_nothing(
    num_engines: int, num_trainers: int
) -> None:
    rates = make_rates(engine=(0.01, 0.001, 0.02), trainer=(0.1, 0.001, 0.2))
    one = outcome(rates, make_config())
    assert outcome(rates, make_config(), num_engines, num_trainers).seconds <= one.seconds + 1e-9


def test_broadcast_messages_scoring_and_communication_cost_time() -> None:
    """Of 8 engines and 2 trainers: four rounds of a broadcast."""
    config, rates = make_config(), make_rates()
    plain = outcome(rates, config, 8, 2).seconds
    for change, seconds in (
        ({"broadcast": 1.0}, 4.0),
        ({"overhead": 1.0}, 1.0),
        ({"communication": 1.0}, 0.5 + 0.5 / 3),  # of one micro-batch, and to gather the weights
    ):
        assert outcome(replace(rates, **change), config, 8, 2).seconds - plain == pytest.approx(
            seconds, abs=1e-3
        )
    later = outcome(rates, config, 8, 2, scoring_seconds=1.0).seconds
    assert later - plain == pytest.approx(1.0, abs=1e-3)
    slow_controller = replace(rates, message=0.1, messages_per_second=4.0)
    assert outcome(slow_controller, config, 8, 2).seconds > 10 * 4.0 * 0.1 * plain


def test_groups_without_a_gradient_are_not_trained() -> None:
    found = outcome(make_rates(), make_config(), is_trained=False)
    assert found.train_busy == 0.0 and found.num_tokens == 3200


def test_uneven_completions_are_shared_out_in_order() -> None:
    """Two trainers and completions of 300, 100, 100, 100 tokens: shares of 300 and 300; the longest
    one is the largest share of four trainers."""
    rates = make_rates(engine=(0.0, 0.0, 0.0), trainer=(0.0, 0.01, 0.0))
    config = make_config(train__prompts_per_iteration=1)
    for num_trainers, tokens in ((1, 600), (2, 300), (4, 300)):
        found = outcome(rates, config, 1, num_trainers, lengths=[300, 100, 100, 100])
        assert found.seconds == pytest.approx(tokens * 0.01, rel=2e-3)


def test_rates_are_found_again_in_rows_that_they_give() -> None:
    engine = [[n, n * rows, p, 0.01 * n + 1e-4 * n * rows + 1e-3 * p]
              for n, rows, p in ((10, 32, 0), (8, 5, 64), (20, 17, 32), (3, 1, 0))]  # fmt: skip
    trainer = [[n, tokens, u, n * half, 0.1 * n + 1e-3 * tokens + 0.3 * u + 0.2 * n * half]
               for n, tokens, u, half in ((3, 900, 0, 0.5), (1, 700, 1, 0.5), (2, 300, 0, 0),
                                          (2, 950, 1, 0), (1, 100, 0, 0.5))]  # fmt: skip
    iteration = MeasuredIteration(
        num_engines=3,
        num_trainers=2,
        num_tokens=1000,
        seconds=2.0,
        weights_seconds=0.4 + 0.2 / 6 + 2 * 5 * 1e-3,  # rounds, to gather the weights, messages
        overhead_seconds=0.05,
        controller_seconds=0.02,
        num_messages=20,
        engine_rows=engine,
        train_rows=trainer,
        groups=[Group([500, 500], 0.0, True, True)],
        max_concurrent_groups=4,
    )
    rates = fit([iteration])
    assert rates.engine == pytest.approx((0.01, 1e-4, 96 * 1e-3))
    assert rates.trainer == pytest.approx((0.1, 1e-3, 0.3))
    assert rates.communication == pytest.approx(0.2)
    assert rates.broadcast == pytest.approx(0.2)  # in two rounds
    assert (rates.message, rates.overhead) == pytest.approx((1e-3, 0.05))
    assert MeasuredIteration.from_json(json.loads(json.dumps(asdict(iteration)))) == iteration


def test_too_few_iterations_give_no_comparison() -> None:
    assert set(compare([], Config()).values()) == {None}


# -- the command ----------------------------------------------------------------------------------


def plan(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *words])
    return result.exit_code, result.output


def test_every_split_of_a_finished_run_and_the_best_one(
    finished_run: Finished, tmp_path: Path
) -> None:
    picture, file = tmp_path / "splits.png", tmp_path / "splits.json"
    words = "train.prompts_per_iteration=16", "-o", str(picture), "--json", str(file), "--force"
    code, output = plan(str(finished_run.folder), "--devices", "8", *words)
    assert code == 0, output
    found = json.loads(file.read_text())
    splits = found["splits"]
    assert [(s["engines"], s["trainers"]) for s in splits] == [(n, 8 - n) for n in range(1, 8)]
    assert found["best"] == max(splits, key=lambda split: split["tokens_per_second"])
    for split in splits:
        assert 0 < split["tokens_per_second_low"] <= split["tokens_per_second_high"]
        assert 0 <= split["infer_idle"] <= 1 and 0 <= split["train_idle"] <= 1
    assert picture.read_bytes().startswith(b"\x89PNG")
    devices = DeviceSet("cpu", tuple(range(found["best"]["engines"])))  # as measured
    assert f"--infer-devices {devices} " in output
    again = CliRunner().invoke(app, ["plan", str(finished_run.folder), "--devices", "8", *words])
    assert again.output == output, "the same draws"


def test_a_search_comes_close_to_the_best_of_many_splits(
    finished_run: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "train.prompts_per_iteration=48", "rollout.max_concurrent_groups=2"
    monkeypatch.setattr(bench_plan, "MAX_DRAWS", 8)
    some = make_plan([finished_run.folder], 40, words)
    monkeypatch.setattr(bench_plan, "MAX_SPLITS", 100)
    every = make_plan([finished_run.folder], 40, words)
    assert len(some.splits) < len(every.splits) == 39
    assert some.best.tokens_per_second > 0.95 * every.best.tokens_per_second


@pytest.mark.parametrize("num_splits", [1, 24, 25, 49, 130, 1023])
def test_a_search_finds_a_single_peak(num_splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for peak in {0, 1, num_splits // 3, num_splits // 2 + 2, num_splits - 1}:

        def predict(num_engines: int, *_: Any, peak: int = peak) -> tuple[Split, Any]:
            return Split(num_engines, 1, -abs(num_engines - peak), 0.0, 0.0, 0.0, 0.0), None

        monkeypatch.setattr(bench_plan, "_predict", predict)
        found = _search([(number, 1) for number in range(num_splits)], [], Config())
        assert len(found) <= 40
        highest = max(split.tokens_per_second for split, _ in found)
        assert highest == max(-abs(number - peak) for number in range(num_splits))


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["cpu"], "cpu"),
        (["10.0.0.2/cpu"], "cpu"),  # on a Ray cluster
        (["cuda:0", "cuda:3"], "0,3"),
        (["cuda:0,1", "cuda:2,3"], "0,1,2,3"),
    ],
)
def test_a_plan_knows_the_devices_that_were_chosen_for_null(names: list[str], chosen: str) -> None:
    devices = {f"rollout-{number}": name for number, name in enumerate(names)}
    found = _with_devices(Config(), {**devices, "train-0": "cuda:7"}).devices
    assert (found.infer, found.train) == (chosen, "7")


def test_the_summary_has_the_predicted_and_the_measured_throughput(tmp_path: Path) -> None:
    words = (*SMALL, "data.num_held_out=0", "train.keep_checkpoints=0", "devices.threads=1")
    code, _, err = finish("--output", str(tmp_path / "run"), "--iterations", "5", *words)
    assert (code, err) == (0, "")
    summary, lines = summary_of(tmp_path / "run"), lines_of(tmp_path / "run" / "metrics.jsonl")
    left_out = [lines[2], lines[4]]  # the first iteration warms up
    seconds = sum(line["perf/iteration_seconds"] for line in left_out)
    tokens = sum(
        line["perf/tokens_per_second"] * line["perf/iteration_seconds"] for line in left_out
    )
    assert summary["measured_tokens_per_second"] == pytest.approx(tokens / seconds, rel=1e-3)
    ratio = summary["predicted_tokens_per_second"] / summary["measured_tokens_per_second"]
    assert 0.3 < ratio < 3  # machines are noisy


def test_a_benchmark_file_is_read_by_its_models(tmp_path: Path, finished_run: Finished) -> None:
    source = _read_run(finished_run.folder)
    rates = {
        "config": source.config.model_dump(mode="json"),
        "iterations": [asdict(each) for each in source.iterations],
    }
    file, devices = tmp_path / "loop.json", ("--devices", "3")
    rows = [{"model": name, "rates": rates} for name in ("0.6B", "1.7B")]
    file.write_text(json.dumps({"results": rows[:1]}))
    code, of_file = plan(str(file), *devices)
    assert code == 0, of_file
    of_run = plan(str(finished_run.folder), *devices)[1]
    assert of_run.splitlines()[-8:] == of_file.splitlines()[-8:]
    rows[1]["rates"] = rates | {
        "config": rates["config"] | {"devices": {"infer": "0-3", "train": "4"}}
    }
    file.write_text(json.dumps({"results": rows}))
    code, output = plan(str(file), *devices, "--model", "1.7B")
    assert code == 0 and re.search(r"--infer-devices (0-1 --train-devices 2|0 .* 1-2),", output)
    code, output = plan(str(file), str(finished_run.folder), *devices, "--model", "1.7B")
    assert code == 2 and "1.7B" in output, "rates of two models"
    for words in ((), ("--model", "32B")):
        code, output = plan(str(file), *devices, *words)
        assert code == 2 and "0.6B or 1.7B" in output
    rates["iterations"] = []
    file.write_text(json.dumps({"results": rows[:1]}))
    assert plan(str(file), *devices)[0] == 2
    file.write_text(json.dumps({"results": [{"mode": "sync"}]}))
    code, output = plan(str(file), *devices)
    assert code == 2 and "bench loop --json" in output


def test_a_run_without_rates_is_refused(finished_run: Finished, tmp_path: Path) -> None:
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    for name in ("config.yaml", "trace.json"):
        text = (finished_run.folder / name).read_text()
        lines = [line for line in text.splitlines() if '"IterationFinished"' not in line]
        (unfinished / name).write_text("\n".join(lines) + "\n")
    code, output = plan(str(unfinished), "--devices", "8")
    assert code == 2 and "two finished iterations" in output


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("{run}", "--devices", "1"), "--devices"),
        (("{run}", "--devices", "1025"), "--devices"),
        (("{run}", "--devices", "8", "model.dtype=bfloat16"), "model.dtype"),
        (("{run}", "--devices", "8", "-o", "no/such/folder/plan.png"), "--output"),
        (("{run}", "--devices", "8", "train.prompts=3"), "train.prompts"),
        (("{run}", "--devices", "8", "-o", "plan.txt"), "--output"),
        (("--devices", "8", "train.prompts_per_iteration=8"), "RATES"),
        (("no/such/run", "--devices", "8"), "no/such/run"),
        (("{run}/model", "--devices", "8"), "config.yaml"),
    ],
)
def test_mistakes_are_reported_with_their_names(
    words: Sequence[str], named: str, finished_run: Finished
) -> None:
    code, output = plan(*(word.format(run=finished_run.folder) for word in words))
    assert code == 2 and named in output, output
