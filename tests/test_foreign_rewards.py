"""Reward functions written for TRL or verl work as they are, on data in TRL's formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from reward_pools import call, config_of

from easyrl.config import ConfigError
from easyrl.data.datasets import open_prompts
from easyrl.rewards.loading import check_rewards
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
CHAT = [{"role": "system", "content": "Think first."}, {"role": "user", "content": "What is 2+2?"}]
TABLE = [
    # function, row of the data, completions, scores
    ("by_number_of_tokens", {"prompt": "The sky is"}, TEXTS, [1, 2, 3]),
    ("by_number_of_characters", {"prompt": "The sky is"}, TEXTS, [16, 4, 9]),
    ("by_format", {"prompt": CHAT[1:]}, [GOOD, "4", GOOD + "."], [1, 0, 0]),
    ("by_format", {"prompt": CHAT, "ground_truth": "4"}, [GOOD, GOOD, "4"], [1, 1, 0]),
    ("by_reference", {"prompt": "What is 2+2?", "ground_truth": "4"}, TEXTS, [1, 0, 0]),
    ("for_maths", {"prompt": "What is 2+2?", "task": "math"}, TEXTS, [1, 1, 1]),
    ("for_maths", {"prompt": "Add two numbers.", "task": "code"}, TEXTS, [None] * 3),
    ("asynchronous", {"prompt": "The sky is"}, ["", "a", "b"], [0, 1, 1]),
    ("in_stages", {"prompt": "The sky is"}, TEXTS, [0.25] * 3),
    ("logs", {"prompt": "The sky is"}, TEXTS, [0.5] * 3),
    ("forwards", {"prompt": "The sky is"}, TEXTS, [0.5] * 3),
    ("without_kwargs", {"prompt": "What is 2+2?", "level": 3}, TEXTS, [1, 1, 1]),
]


@pytest.mark.parametrize(("name", "row", "texts", "scores"), TABLE)
def test_trl_functions_and_formats_work_unchanged(
    name: str, row: dict[str, Any], texts: list[str], scores: list[float | None], tmp_path: Path
) -> None:
    (tmp_path / "trl.py").write_text(TRL)
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps(row) + "\n")
    config = config_of(f"{tmp_path}/trl.py:{name}", data__dataset=data)
    prompt = open_prompts(config).prompt(0)
    check_rewards(config, prompt)
    result = call(config, prompt, texts)
    assert result.scores == [scores] and not result.errors
    if name in ("logs", "forwards"):
        assert result.metrics == {"words": 5 / 3}
        assert result.columns["first_word"] == ["It", "Five", r"\boxed{5}"]
        assert result.columns["parts"][1] == {"words": ["Five"], "none": None}


ASYNC = """
import asyncio

started = []

async def slow(completions, **kwargs):
    started.append(1)
    while len(started) < 2:  # they end only together
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
    config = config_of(*(f"{file}:{name}" for name in ("slow", "fails", "slow_too")))
    result = call(config, Prompt(0, "q", {}), TEXTS)
    assert result.scores == [[1.0] * 3, [0.0] * 3, [1.0] * 3]
    assert len(result.errors) == 1 and "KeyError: 'mine'" in result.errors[0]


VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "openai/gsm8k" and extra_info == {"index": 7}
    return float(solution_str == ground_truth)

def with_more(data_source, solution_str, ground_truth, extra_info, **kwargs):
    right = solution_str == ground_truth
    return {"score": 2.0 * right, "acc": right}

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
    result = call(config, prompt, ["4", "5", " 4"])
    assert result.scores == [[1, 0, 0], [2, 0, 0], [1, 0, 0]] and not result.errors
    later = config_of(f"{file}:later")
    for row in ({"ground_truth": "4"}, {"answer": "4"}):
        assert call(later, Prompt(0, "q", row), ["4", "5", "4"]).scores == [[1, 0, 1]]


# Errors, before the run and in it.


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("def f(completions, level, **_): ...", "'level'"),
        ("def f(completions, *, level): ...", "'level'"),
        ("def f(solution_str, ground_truth): ...", "ground_truth, reward_model, answer"),
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
    named = {"too_few": "'x'", "taken": "'reward'", "no_number": "'many'", "no_score": "'score'"}
    config = config_of(*(f"{tmp_path}/w.py:{name}" for name in named))
    errors = call(config, Prompt(0, "q", {"answer": "4"}), TEXTS).errors
    for error, (name, cause) in zip(errors, named.items(), strict=True):
        assert name in error and cause in error
