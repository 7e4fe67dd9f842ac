"""Order of prompts and number of groups in flight, chosen by simulation (`runtime.tuning`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_dynamic_sampling import scored

from easyrl.bench.plan import make_plan
from easyrl.config import Config, load_config
from easyrl.config.devices import DeviceSet
from easyrl.runtime.memory import ModelSize
from easyrl.runtime.placement import resolve_placement
from easyrl.runtime.rates import Group, MeasuredIteration
from easyrl.runtime.tuning import NUM_TUNED, Tuner
from easyrl.types import IndexedPrompt, Prompt
from runs import finish, lines_of, summary_of

NUM_PROMPTS, NUM_GENERATIONS = 48, 4
SMALL = ModelSize(2, 8, 16, 2, 1, 4, 99, True, True, 10_000, None)
GPU = DeviceSet("accelerator", (0,))
FLAT = 0.01, 0.0
"""Seconds of an engine's step and of a row in it: more rows cost nothing."""
PROPORTIONAL = 0.0, 1e-3


def make_config(*words: str) -> Config:
    sizes = (
        f"train.prompts_per_iteration={NUM_PROMPTS}",
        f"rollout.num_generations={NUM_GENERATIONS}",
    )
    return load_config(words=["devices.threads=1", *sizes, *words])


def measured(engine: tuple[float, float], *, trained_token: float) -> MeasuredIteration:
    """An iteration with these rates: all else takes no time."""
    groups = [Group([20 + n % 7] * NUM_GENERATIONS, 0.0, True, True) for n in range(NUM_PROMPTS)]
    steps = [(10, 640), (30, 600), (20, 100)]
    engine_rows = [[n, tokens, 0.0, n * engine[0] + tokens * engine[1]] for n, tokens in steps]
    train_rows = [[1.0, tokens, 0.0, 0.0, tokens * trained_token] for tokens in (100.0, 4000.0)]
    num_tokens = sum(sum(group.lengths) for group in groups)
    return MeasuredIteration(
        1, 1, num_tokens, 1.0, 0.0, 0.0, 0.0, 100, engine_rows, train_rows, groups, NUM_PROMPTS
    )


def prompt(index: int) -> Prompt:
    """The same prompts in each epoch."""
    return Prompt(index, f"question {index % NUM_PROMPTS}", {})


def make_tuner(
    config: Config, *iterations: MeasuredIteration, size: ModelSize | None = SMALL, **others: Any
) -> Tuner:
    placement = replace(resolve_placement(config), **others)
    return Tuner(config, placement, size, prompt, [*iterations])


def prompts(first: int = 0) -> list[IndexedPrompt]:
    return [(n, prompt(first + n)) for n in range(NUM_PROMPTS)]


def length_of(group_index: int) -> int:
    """Mixed, from 2 to 200 tokens."""
    return 2 + group_index * 29 % NUM_PROMPTS * 4


def observe(tuner: Tuner, batch: Sequence[IndexedPrompt]) -> None:
    for indexed in batch:
        report = scored(indexed)
        lengths = [length_of(indexed[0])] * NUM_GENERATIONS
        tuner.add(replace(report, completion_lengths=lengths, rewards=[0.0, 1.0, 0.0, 1.0]))


def arrange(tuner: Tuner, batch: Sequence[IndexedPrompt]) -> tuple[list[int], list[Any]]:
    """Group indices in the order of handing out, and what is reported."""
    reported: list[Any] = []
    return [group_index for group_index, _ in tuner.arrange(batch, reported.append)], reported


def test_more_groups_are_in_flight_where_rows_cost_nothing() -> None:
    tuner = make_tuner(make_config(), measured(FLAT, trained_token=1e-5))
    assert tuner.max_concurrent_groups == 16
    for expected in (32, NUM_PROMPTS):
        _, (note,) = arrange(tuner, prompts())
        assert tuner.max_concurrent_groups == expected
        assert "rollout.max_concurrent_groups" in note.text
    assert arrange(tuner, prompts())[1] == []


def test_fewer_groups_are_in_flight_where_rows_cost_most_and_the_trainer_waits() -> None:
    tuner = make_tuner(make_config(), measured(PROPORTIONAL, trained_token=1e-3))
    arrange(tuner, prompts())
    assert tuner.max_concurrent_groups < 16


def test_the_number_in_flight_is_chosen_in_the_first_iterations() -> None:
    iterations = [measured(PROPORTIONAL, trained_token=1e-6)]
    config = make_config()
    tuner = Tuner(config, resolve_placement(config), SMALL, prompt, iterations)
    for _ in range(NUM_TUNED):
        assert arrange(tuner, prompts())[1] == []
    iterations.extend([measured(FLAT, trained_token=1e-5)] * 4)
    assert arrange(tuner, prompts())[1] == []


def test_a_number_that_gains_little_beside_the_order_stays() -> None:
    tuner = make_tuner(make_config(), measured((0.01, 1e-4), trained_token=6e-4))
    arrange(tuner, prompts())
    observe(tuner, prompts())
    got, notes = arrange(tuner, prompts(NUM_PROMPTS))
    assert got != list(range(NUM_PROMPTS))
    assert (tuner.max_concurrent_groups, notes) == (16, [])


@pytest.mark.parametrize(
    ("words", "size"),
    [
        (["rollout.max_concurrent_groups=16"], SMALL),
        ([], replace(SMALL, is_batched=False)),
        ([], None),
        (["rollout.max_completion_length=100000"], replace(SMALL, num_layers=10_000)),
    ],
    ids=["given", "one group at a time", "unknown memory", "no memory"],
)
def test_the_number_in_flight_does_not_grow(words: list[str], size: ModelSize | None) -> None:
    tuner = make_tuner(make_config(*words), measured(FLAT, trained_token=1e-5), size=size)
    assert arrange(tuner, prompts())[1] == []
    assert tuner.max_concurrent_groups == 16


@pytest.mark.parametrize(("trained_token", "sign"), [(1e-5, -1), (6e-4, 1)])
def test_long_groups_start_first_if_engines_are_slower_and_short_ones_if_not(
    trained_token: float, sign: int
) -> None:
    config = make_config("rollout.max_concurrent_groups=8")
    tuner = make_tuner(config, measured(FLAT, trained_token=trained_token))
    given = list(range(NUM_PROMPTS))
    assert arrange(tuner, prompts())[0] == given  # unknown prompts keep their order
    observe(tuner, prompts())
    got, _ = arrange(tuner, prompts(NUM_PROMPTS))
    assert got == sorted(given, key=lambda n: sign * length_of(n))


def test_groups_of_an_earlier_update_stay_before_others() -> None:
    config = make_config("rollout.max_concurrent_groups=8", "train.updates_per_iteration=2")
    tuner = make_tuner(config, measured(FLAT, trained_token=1e-5))
    arrange(tuner, prompts())
    observe(tuner, prompts())
    got, _ = arrange(tuner, prompts(NUM_PROMPTS))
    half = NUM_PROMPTS // 2
    assert got != list(range(NUM_PROMPTS))
    assert sorted(got[:half]) == list(range(half))


@pytest.mark.parametrize(
    ("words", "others"),
    [
        (["runtime.deterministic=true"], {}),
        (["rollout.environment=guess"], {}),
        ([], {"lends_cores": True}),
        ([], {"infer": GPU, "train": GPU}),
    ],
)
def test_nothing_changes_in_such_runs(words: list[str], others: dict[str, Any]) -> None:
    tuner = make_tuner(make_config(*words), measured(FLAT, trained_token=1e-5), **others)
    for first in (0, NUM_PROMPTS):
        assert arrange(tuner, prompts(first)) == (list(range(NUM_PROMPTS)), [])
        observe(tuner, prompts(first))
    assert tuner.max_concurrent_groups == 16


def test_lengths_of_replacements_are_known_too() -> None:
    tuner = make_tuner(
        make_config("rollout.max_concurrent_groups=8"), measured(FLAT, trained_token=1e-5)
    )
    observe(tuner, [(n, prompt(NUM_PROMPTS + n)) for n in range(NUM_PROMPTS)])
    assert arrange(tuner, prompts())[0] != list(range(NUM_PROMPTS))


@pytest.mark.alone
def test_a_run_gets_more_groups_in_flight_and_is_predicted_with_them(tmp_path: Path) -> None:
    """Engine and trainer sleep. The prompts of every iteration are the same."""
    data, folder = tmp_path / "data.jsonl", tmp_path / "run"
    rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(64)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, _, err = finish(
        *("--output", str(folder), "--no-live", "--iterations", "6"),
        *("--dataset", str(data), "--reward", "length_penalty", "data.num_held_out=0"),
        *("devices.threads=1", "train.prompts_per_iteration=64", "rollout.num_generations=4"),
        *("rollout.max_completion_length=64", "train.keep_checkpoints=0"),
        altered=True,
        RATES="[[0.01, 0, 0], [0.005, 0, 0]]",
        ENDS="0.01,0.1",
    )
    assert (code, err) == (0, "")
    summary, lines = summary_of(folder), lines_of(folder / "metrics.jsonl")
    assert summary["groups_trained"] == 6 * 64
    assert [line["perf/max_concurrent_groups"] for line in lines] == [16, 16, 32, 64, 64, 64]
    seconds = [line["perf/iteration_seconds"] for line in lines]
    assert max(seconds[3:]) < seconds[1]
    plan = make_plan([folder], 2)
    speeds = [line["perf/tokens_per_second"] for line in lines[3:]]
    assert plan.best.tokens_per_second == pytest.approx(sum(speeds) / 3, rel=0.25)
    ratio = summary["predicted_tokens_per_second"] / summary["measured_tokens_per_second"]
    assert ratio == pytest.approx(1, rel=0.25)
