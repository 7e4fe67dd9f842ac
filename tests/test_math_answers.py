"""`math` and `gsm8k` on answers as models give them, and on those that have no end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from easyrl.config import load_config
from easyrl.data.datasets import open_prompts
from easyrl.rewards import maths
from easyrl.rewards.bounded import which_hold
from easyrl.rewards.loading import load_reward
from math_answers import GSM8K, KNOWN, MATH


def scores(name: str, answer: object, *completions: str) -> list[float | None]:
    reward = load_reward(name, load_config(None, {"reward.functions": [name]}))
    count = len(completions)
    given: list[float | None] = reward(
        prompts=["q"] * count,
        completions=list(completions),
        completion_ids=[[1]] * count,
        answer=[answer] * count,
    )
    return given


def test_there_are_many_answers() -> None:
    assert len(MATH) + len(GSM8K) >= 100
    assert len(KNOWN) < len(MATH) / 4


@pytest.fixture(scope="module")
def scored() -> dict[tuple[str, str], float | None]:
    """All answers of the tables of `math`, in one call: what is read once is not read again."""
    rows = [(answer, completion) for answer, completion, _ in MATH + KNOWN]
    reward = load_reward("math", load_config(None, {"reward.functions": ["math"]}))
    given = reward(
        prompts=["q"] * len(rows),
        completions=[completion for _, completion in rows],
        completion_ids=[[1]] * len(rows),
        answer=[answer for answer, _ in rows],
    )
    return dict(zip(rows, given, strict=True))


@pytest.mark.parametrize(("answer", "completion", "score"), MATH + KNOWN)
def test_math_scores_an_answer(
    answer: str, completion: str, score: int, scored: dict[tuple[str, str], float | None]
) -> None:
    assert scored[answer, completion] == score


@pytest.mark.parametrize(("answer", "completion", "score"), GSM8K)
def test_gsm8k_scores_an_answer(answer: str, completion: str, score: int) -> None:
    assert scores("gsm8k", answer, completion) == [score]


@pytest.mark.parametrize("name", ["math", "gsm8k"])
def test_chat_completions_and_rows_without_an_answer(name: str) -> None:
    reward = load_reward(name, load_config(None, {}, ["reward.answer_column=solution"]))
    chat = [[{"role": "assistant", "content": "#### 4"}]] * 2
    rows = {"prompts": ["q"] * 2, "completions": chat, "completion_ids": [[1]] * 2}
    assert reward(**rows, solution=[4, None]) == [1.0, None]


def test_an_answer_of_the_data_that_is_none_is_told() -> None:
    with pytest.raises(ValueError, match=r"reads no answer in '' \(reward.answer_column\)"):
        scores("math", "", r"\boxed{4}")
    with pytest.raises(ValueError, match="no number in the answer 'four'"):
        scores("gsm8k", "four", "#### 4")


def test_an_answer_without_end_is_wrong_and_costs_its_own_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(maths, "MAX_SECONDS", 1)
    right, huge = r"\boxed{4}", r"\boxed{9^{9^{9}}}"
    assert scores("math", "4", right, huge, right) == [1.0, 0.0, 1.0]


def test_a_number_beyond_all_decimals_is_wrong_and_no_error() -> None:
    for huge in ("1e9999999999999999999999", r"\boxed{7e-9999999999999999999999}"):
        assert scores("gsm8k", "#### 4", huge, "#### 4") == [0.0, 1.0]


def test_what_is_judged_may_spin_crash_or_raise() -> None:
    def judge(item: str) -> bool:
        if item == "spins":
            while True:
                pass
        if item == "crashes":
            os._exit(3)
        return {"holds": True, "does not": False}[item]

    items = ["holds", "raises", "crashes", "holds", "spins", "does not", "holds"]
    began = time.process_time()
    assert which_hold(judge, items, seconds=1) == [True, False, False, True, False, False, True]
    assert time.process_time() - began < 0.5  # a child's time


def test_rows_of_gsm8k_and_math_go_from_the_file_to_their_score(tmp_path: Path) -> None:
    (tmp_path / "gsm8k.jsonl").write_text(
        '{"question": "6 * 3?", "answer": "6 * 3 = <<6*3=18>>18\\n#### 18"}\n'
    )
    (tmp_path / "math.jsonl").write_text(
        '{"problem": "1/2 + 1/2?", "solution": "It is $\\\\boxed{1}$.", "level": "Level 1"}\n'
    )
    for name, words, completion in (
        ("gsm8k", ["data.prompt_column=question"], "#### 18"),
        ("math", ["data.prompt_column=problem", "reward.answer_column=solution"], r"\boxed{1}"),
    ):
        flags = {"data.dataset": str(tmp_path / f"{name}.jsonl"), "reward.functions": [name]}
        config = load_config(None, flags, words)
        prompt = open_prompts(config).prompt(0)
        columns = {column: [value] * 2 for column, value in prompt.columns.items()}
        given = load_reward(name, config)(
            prompts=[prompt.content] * 2,
            completions=[completion, "2"],
            completion_ids=[[1], [1]],
            **columns,
        )
        assert given == [1.0, 0.0]


def test_nothing_but_math_imports_sympy() -> None:
    code = """
import sys
from easyrl.config import load_config
from easyrl.rewards.loading import check_rewards, slow_imports
from easyrl.types import Prompt
config = load_config(None, {"reward.functions": ["math", "gsm8k", "countdown"]})
check_rewards(config, Prompt(0, "q", {"answer": "1", "nums": [1], "target": 1}))
assert not {"sympy", "math_verify"} & set(sys.modules)
assert slow_imports(config) == ["math_verify"]
import math_verify
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
