"""Reward functions written for TRL or verl work as they are, on data in TRL's formats."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from reward_pools import config_of, finished

from easyrl.config import Config, ConfigError
from easyrl.data.datasets import open_prompts
from easyrl.rewards.loading import check_rewards
from easyrl.rewards.pool import RewardPool, ScoredGroup
from easyrl.rewards.signatures import TrainerState
from easyrl.types import Prompt

# The shapes that TRL's documentation shows: what each reads, and how.
TRL = """
import asyncio
import re

def by_number_of_tokens(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]

def by_number_of_characters(completions, **kwargs):
    return [float(len(text)) for text in completions]

def by_format(completions, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [float(bool(re.match(r"^<think>.*?</think><answer>.*?</answer>$", c))) for c in contents]

def by_reference(completions, ground_truth, **kwargs):
    boxed = [re.search(r"\\\\boxed\\{(.*?)\\}", text) for text in completions]
    return [float(bool(b) and b.group(1) == g) for b, g in zip(boxed, ground_truth)]

def for_maths(prompts, completions, task, **kwargs):
    return [1.0 if t == "math" else None for t in task]

def for_code(prompts, completions, task, **kwargs):
    return [-1.0 if t == "code" else None for t in task]

async def asynchronous(prompts, completions, **kwargs):
    await asyncio.sleep(0.01)
    return [1.0 if completion else 0.0 for completion in completions]

def in_stages(completions, trainer_state, **kwargs):
    return [trainer_state.global_step / trainer_state.max_steps for _ in completions]

def logs(completions, log_extra=None, log_metric=None, **kwargs):
    if log_extra:
        log_extra("first_word", [text.split()[0] for text in completions])
        log_extra("parts", [{"words": text.split(), "none": float("nan")} for text in completions])
    if log_metric:
        log_metric("words", sum(len(text.split()) for text in completions) / len(completions))
    return [0.5 for _ in completions]

def forwards(**kwargs):
    return logs(**kwargs)

def without_kwargs(prompts, completions):
    return [float(p == "What is 2+2?") for p in prompts]
"""
TEXTS = [r"It is \boxed{4}.", "Five", r"\boxed{5}"]
GOOD = "<think>2+2</think><answer>4</answer>"
TABLE = [
    # function, rows of the data, the completions, the scores
    ("by_number_of_tokens", {"prompt": "The sky is"}, TEXTS, [2, 3, 1]),
    ("by_number_of_characters", {"prompt": "The sky is"}, TEXTS, [16, 4, 9]),
    (
        "by_format",
        {"prompt": [{"role": "user", "content": "What is 2+2?"}]},
        [GOOD, "4", GOOD + "."],
        [1, 0, 0],
    ),
    (
        "by_format",
        {
            "prompt": [
                {"role": "system", "content": "Think first."},
                {"role": "user", "content": "What is 2+2?"},
            ],
            "ground_truth": "4",
        },
        [GOOD, GOOD, "4"],
        [1, 1, 0],
    ),
    ("by_reference", {"prompt": "What is 2+2?", "ground_truth": "4"}, TEXTS, [1, 0, 0]),
    ("for_maths", {"prompt": "What is 2+2?", "task": "math"}, TEXTS, [1, 1, 1]),
    ("for_maths", {"prompt": "Add two numbers.", "task": "code"}, TEXTS, [None] * 3),
    ("for_code", {"prompt": "Add two numbers.", "task": "code"}, TEXTS, [-1, -1, -1]),
    ("asynchronous", {"prompt": "The sky is"}, ["", "a", "b"], [0, 1, 1]),
    ("in_stages", {"prompt": "The sky is"}, TEXTS, [0.25] * 3),
    ("logs", {"prompt": "The sky is"}, TEXTS, [0.5] * 3),
    ("forwards", {"prompt": "The sky is"}, TEXTS, [0.5] * 3),
    ("without_kwargs", {"prompt": "What is 2+2?", "level": 3}, TEXTS, [1, 1, 1]),
]


def score(config: Config, prompt: Prompt, completions: list[str]) -> ScoredGroup:
    with closing(RewardPool(config)) as pool:
        ids = [[7] * length for length in (2, 3, 1)]
        state = TrainerState(global_step=5, max_steps=20)
        pool.submit(0, prompt.content, completions, ids, prompt.columns, trainer_state=state)
        return finished(pool, 1)[0]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "trl.py").write_text(TRL)
    return tmp_path / "data.jsonl"


@pytest.mark.parametrize("rows", sorted({json.dumps(row) for _, row, _, _ in TABLE}))
def test_trl_functions_and_formats_work_unchanged(rows: str, data: Path) -> None:
    data.write_text(rows + "\n")
    table = [line for line in TABLE if json.dumps(line[1]) == rows]
    texts = table[0][2]
    names = [name for name, _, completions, _ in table if completions == texts]
    config = config_of(*(f"{data.parent}/trl.py:{name}" for name in names), data__dataset=data)
    prompt = open_prompts(config).prompt(0)
    check_rewards(config, prompt)
    # None of a single function is an error; beside another one it is what the table says.
    config = config_of(
        *(f"{data.parent}/trl.py:{n}" for n in (*names, "asynchronous")), data__dataset=data
    )
    scored = score(config, prompt, texts)
    assert not scored.errors and scored.scores is not None
    for name, row, completions, expected in table:
        if completions == texts:
            assert scored.scores[names.index(name)] == expected, (name, row)
    if "logs" in names:
        assert scored.metrics == {"words": 5 / 3}
        assert scored.columns["first_word"] == ["It", "Five", r"\boxed{5}"]
        assert scored.columns["parts"][1] == {"words": ["Five"], "none": None}


ASYNC = """
import asyncio

started = []

async def slow(completions, **kwargs):
    started.append(1)
    while len(started) < 2:  # only together do they come to an end
        await asyncio.sleep(0.01)
    return [1.0] * len(completions)

async def slow_too(completions, **kwargs):
    return await slow(completions)

async def fails(completions, **kwargs):
    raise KeyError("mine")
"""


def test_asynchronous_functions_are_awaited_together_and_fail_alone(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(ASYNC)
    config = config_of(
        *(f"{file}:{name}" for name in ("slow", "fails", "slow_too")),
        reward__on_error="zero",
        reward__timeout_seconds=10,
    )
    scored = score(config, Prompt(0, "q", {}), TEXTS)
    assert scored.scores == [[1.0] * 3, [0.0] * 3, [1.0] * 3]
    assert len(scored.errors) == 1 and "KeyError: 'mine'" in scored.errors[0]
    assert "asyncio" not in scored.errors[0]  # the user's frames alone


VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "openai/gsm8k" and extra_info == {"index": 7}
    return float(solution_str == ground_truth)

def with_more(data_source, solution_str, ground_truth, extra_info, **kwargs):
    right = solution_str == ground_truth
    return {"score": 2.0 * right, "acc": right, "pred": solution_str}

def short(solution_str, ground_truth):
    return float(solution_str == ground_truth)

async def later(solution_str, ground_truth, extra_info=None):
    assert extra_info == {}
    return float(solution_str == ground_truth)

"""
VERL_ROW = {
    "data_source": "openai/gsm8k",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 7},
}


def test_verl_function_is_called_for_each_completion(tmp_path: Path) -> None:
    file = tmp_path / "v.py"
    file.write_text(VERL)
    config = config_of(*(f"{file}:{n}" for n in ("compute_score", "with_more", "short")))
    prompt = Prompt(0, [{"role": "user", "content": "2+2?"}], VERL_ROW)
    check_rewards(config, prompt)
    scored = score(config, prompt, ["4", "5", " 4"])
    assert scored.scores == [[1, 0, 0], [2, 0, 0], [1, 0, 0]] and not scored.errors
    assert scored.columns == {"acc": [True, False, False], "pred": ["4", "5", " 4"]}


@pytest.mark.parametrize("row", [{"ground_truth": "4"}, {"answer": "4"}])
def test_verl_ground_truth_may_be_a_column(row: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "v.py").write_text(VERL)
    config = config_of(f"{tmp_path}/v.py:later")
    check_rewards(config, Prompt(0, "q", row))
    assert score(config, Prompt(0, "q", row), ["4", "5", "4"]).scores == [[1, 0, 1]]


# Errors, before the run and in it.


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("def f(completions, level, **_): ...", "'level'"),
        ("def f(completions, *, level): ...", "'level'"),
        ("def f(solution_str, ground_truth): ...", "ground_truth"),
    ],
)
def test_missing_column_is_an_error_before_the_run(source: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text(source)
    config = config_of(f"{tmp_path}/f.py:f")
    with pytest.raises(ConfigError, match=f"{named}.*the data has: x, y"):
        check_rewards(config, Prompt(0, "q", {"x": 1, "y": 2}))


WRONG = """
def too_few(completions, log_extra, **_):
    log_extra("x", [1])

def taken(completions, log_extra, **_):
    log_extra("reward", [1, 2, 3])

def no_number(completions, log_metric, **_):
    log_metric("x", "many")

def no_score(data_source, solution_str, ground_truth, extra_info):
    return {"acc": 1.0}
"""


def test_invalid_logging_or_a_missing_score_fails_the_function(tmp_path: Path) -> None:
    (tmp_path / "w.py").write_text(WRONG)
    names = ("too_few", "taken", "no_number", "no_score")
    specs = [f"{tmp_path}/w.py:{name}" for name in names]
    config = config_of(*specs, reward__on_error="zero")
    errors = score(config, Prompt(0, "q", {"answer": "4"}), TEXTS).errors
    for error, name, named in zip(
        errors, names, ["'x'", "'reward'", "'many'", "'score'"], strict=True
    ):
        assert name in error and named in error


@pytest.mark.parametrize("name", ["trainer_state", "log_extra", "log_metric", "completions"])
def test_column_with_the_name_of_an_argument_is_refused(name: str, data: Path) -> None:
    data.write_text(json.dumps({"prompt": "q", name: 1}) + "\n")
    with pytest.raises(ConfigError, match=f"column '{name}' .*has the name of an argument"):
        open_prompts(config_of("format", data__dataset=data))
