"""The built-in rewards, loading reward functions, and errors before a run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from reward_pools import config_of

from easyrl.config import ConfigError
from easyrl.data.datasets import open_prompts
from easyrl.rewards.loading import (
    BUILT_IN,
    check_rewards,
    load_reward,
    reward_names,
    reward_specs,
    reward_weights,
)
from easyrl.types import Prompt
from math_answers import GSM8K, KNOWN, MATH, NAN, TYPED


def scores(name: str, completions: list[Any], /, **columns: Any) -> list[float | None]:
    """Names with `__` are settings; others are columns, the same for each completion."""
    settings = {key: value for key, value in columns.items() if "__" in key}
    num = len(completions)
    ids = columns.pop("completion_ids", [[1]] * num)
    function = load_reward(name, config_of(name, **settings))
    values = {key: [value] * num for key, value in columns.items() if "__" not in key}
    found: list[float | None] = function(completions=completions, completion_ids=ids, **values)
    return found


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


# exact_match, regex, format, length_penalty


def test_exact_match_compares_the_whole_completion() -> None:
    texts = ["42", " 42\n", "4", "it is 42", chat("42")]
    assert scores("exact_match", texts, answer=42) == [1.0, 1.0, 0.0, 0.0, 1.0]
    assert scores("exact_match", ["42"], answer=None) == [None]


def test_regex_searches_for_the_pattern() -> None:
    texts = ["the sum is 12", chat("12"), "twelve", "a\n12"]
    assert scores("regex", texts, reward__pattern=r"\d+$") == [1.0, 1.0, 0.0, 1.0]
    assert scores("regex", texts, reward__pattern=r"^\d+$") == [0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>1+1</think><answer>2</answer>", 1.0),
        ("<think>1\n+1</think>\n<answer>2\n</answer>\n", 1.0),
        ("<think>1+1</think> so <answer>2</answer>", 0.0),
        ("Well, <think>1+1</think><answer>2</answer>", 0.0),
        ("<think>1+1</think><answer>2</answer> Right?", 0.0),
        ("<think><think>1</think></think><answer>2</answer>", 0.0),
        ("<think>1</think><answer>2</answer><think>3</think><answer>4</answer>", 0.0),
        ("<answer>2</answer><think>1+1</think>", 0.0),
        ("<think>1+1</think>2", 0.0),
        ("1+1\n</think>\n<answer>2</answer>", 1.0),  # the template has opened <think>
        ("1+1</think>1</think><answer>2</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_format_is_thinking_then_an_answer(text: str, score: float) -> None:
    assert scores("format", [text, chat(text)]) == [score, score]


def test_length_penalty_is_that_of_dapo() -> None:
    """The paper's numbers: 20,480 tokens, of which the last 4,096 cost."""
    lengths = [0, 1, 16_384, 16_385, 18_432, 20_479, 20_480, 20_481]
    expected = [0, 0, 0, -1 / 4096, -0.5, -4095 / 4096, -1, -1]
    found = scores(
        "length_penalty",
        [""] * len(lengths),
        rollout__max_completion_length=20480,
        train__max_tokens_per_micro_batch=32768,
        completion_ids=[[7] * length for length in lengths],
    )
    assert found == expected


# countdown


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("(44 - 19) * 35 / 7", 0.0),  # 7 is not there
        ("44 + 19 + 35", 1.0),
        (" 19+(35+44) ", 1.0),
        ("44 + 19 + 35 = 98", 0.0),
        ("44 + 19 + 35 + 0", 0.0),
        ("-(-44) + 19 + 35", 1.0),
        ("44 + 19 + 35.0", 0.0),
        ("44 + 19 - -35", 1.0),
        ("44 // 19 // 35", 0.0),
        ("44 ** 19 ** 35", 0.0),
        ("44 / (19 - 19) + 35", 0.0),
        ("98", 0.0),
        ("__import__('os').getpid()", 0.0),
        ("(" * 400 + "44" + ")" * 400, 0.0),
        ("-" * 495 + "44", 0.0),
        ("1" * 499, 0.0),
        ("", 0.0),
        ("44 +", 0.0),
        ("44(19)(35)", 0.0),
        ("044 + 19 + 35", 0.0),
        ("</answer></think> 44 + 19 + 35", 0.0),
    ],
)
def test_countdown_needs_each_number_once_and_the_target(answer: str, score: float) -> None:
    text = f"<think>44, 19 and 35</think> <answer>{answer}</answer>"
    found = scores("countdown", [text, chat(text)], nums=[44, 19, 35], target=98)
    assert found == [score, score]


def test_countdown_is_exact_and_reads_the_last_answer() -> None:
    texts = [
        "<answer>3 / (1 - 2 / 3)</answer>",  # 9 in thirds, 8.999... in floats
        "<answer>1</answer> no, <answer>3/(1-2/3)</answer>",
        "<answer>3/(1-2/3)</answer> no, <answer>1</answer>",
        "3/(1-2/3)",
    ]
    assert scores("countdown", texts, nums=[1, 2, 3, 3], target=9) == [1.0, 1.0, 0.0, 0.0]
    for nums, target in ((None, 9), ([1, 2, 3, 3], float("nan")), ("", "9")):
        assert scores("countdown", texts, nums=nums, target=target) == [None] * 4
    for nums, target in (([1.0, 2.0, 3.0, 3.0], 9.0), ("[1, 2, 3, 3]", "9"), (list("1233"), 9)):
        assert scores("countdown", texts[:2], nums=nums, target=target) == [1.0, 1.0]


# math, gsm8k; an endless comparison is in test_reward_pool


def solution(answer: str) -> str:
    boxed = answer if "boxed" in answer else rf"\boxed{{{answer.strip('$')}}}"
    return f"As $1 + 1 = 2$ and $x^2 \\ge 0$, the answer is {boxed}."


ROWS: dict[str, tuple[list[tuple[str, str, int]], str, Callable[[str], dict[str, str]]]] = {
    "gsm8k": (GSM8K, "answer", lambda answer: {"question": "q", "answer": answer}),
    "math500": (MATH + KNOWN, "answer", lambda answer: {"problem": "q", "answer": answer}),
    "math": (
        MATH + KNOWN,
        "solution",
        lambda answer: {"problem": "q", "solution": solution(answer)},
    ),
}


@pytest.mark.parametrize("preset", ROWS)
def test_rows_of_presets_have_the_scores_checked_by_hand(preset: str, tmp_path: Path) -> None:
    answers, column, row = ROWS[preset]
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(row(answer)) + "\n" for answer, _, _ in answers))
    settings = {"data__preset": preset, "data__columns": f"{{answer: {column}}}"}
    config = config_of(data__dataset=file, data__shuffle="false", **settings)
    stream, (spec,) = open_prompts(config), reward_specs(config)
    function = load_reward(spec, config)
    for index, (answer, text, score) in enumerate(answers):
        columns = {name: [value] for name, value in stream.prompt(index).columns.items()}
        assert function(completions=[chat(text)], **columns) == [score], (answer, text)


ANSWERED = ("exact_match", "gsm8k", "math", "easyrl.data.tasks:score")


@pytest.mark.parametrize("name", ANSWERED)
def test_rows_without_an_answer_have_no_score(name: str) -> None:
    assert scores(name, [chat("#4")], prompts="q", answer=4)[0] is not None
    for missing in (None, "", NAN, np.float32("nan"), pandas.NA, [], [None]):
        assert scores(name, [chat("#4")], prompts="q", answer=missing) == [None]


@pytest.mark.parametrize(("name", "answer", "text", "score"), TYPED)
def test_answers_are_compared_whatever_their_type(
    name: str, answer: Any, text: str, score: float | None
) -> None:
    assert scores(name, [text], prompts="q", answer=answer) == [score]


def test_gsm8k_refuses_data_whose_answers_are_no_numbers() -> None:
    with pytest.raises(ConfigError, match=r"'gsm8k'.*answer"):
        check_rewards(config_of("gsm8k"), Prompt(0, "q", {"answer": "Tom has 2 and Ann has 3"}))
    check_rewards(config_of("gsm8k"), Prompt(0, "q", {"answer": NAN}))


@pytest.mark.parametrize("part", ["1", "1,", "1/", "$ ", "{", "####\n", r"\boxed{", "<answer>"])
def test_endless_texts_cost_no_time(part: str) -> None:
    started = time.process_time()
    for name in ("exact_match", "gsm8k", "format", "countdown"):
        scores(name, [part * 50_000], answer="1", nums=[1], target=1)
    assert time.process_time() - started < 5


@pytest.mark.parametrize("reward", ["gsm8k", "easyrl.data.tasks:score"])
def test_of_an_episode_the_last_text_of_the_model_counts(reward: str) -> None:
    """Not the result of a tool behind it."""
    result = {"role": "tool", "name": "calculate", "content": "#5"}
    episodes = [[*chat("#### 4"), result], [*chat("#### 5"), result]]
    assert scores(reward, episodes, prompts="q", answer=" 4") == [1.0, 0.0]


def test_only_math_imports_sympy() -> None:
    code = """
import sys
from easyrl.config import load_config
from easyrl.rewards.loading import check_rewards
from easyrl.types import Prompt
config = load_config(None, {"reward.functions": ["math", "gsm8k", "countdown"]})
check_rewards(config, Prompt(0, "q", {"answer": "1", "nums": [1], "target": 1}))
assert not {"sympy", "math_verify"} & set(sys.modules)
import math_verify
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# Settings and columns.


@pytest.mark.parametrize(
    ("name", "settings", "key"),
    [
        ("regex", {}, "reward.pattern"),
        ("regex", {"reward__pattern": "("}, "reward.pattern"),
        ("format", {"reward__pattern": "a"}, "reward.pattern"),
    ],
)
def test_inconsistent_settings_are_refused(name: str, settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        config_of(name, **settings)


@pytest.mark.parametrize("name", sorted(BUILT_IN.keys() - {"code", "environment"}))
def test_missing_column_is_an_error_before_the_run(name: str) -> None:
    settings = {"reward__pattern": "a"} if name == "regex" else {}
    config = config_of(name, **settings)
    everything = {"answer": "4", "nums": [4], "target": 4}
    check_rewards(config, Prompt(0, "q", everything))
    needed = {"countdown": ["nums", "target"], "format": [], "length_penalty": [], "regex": []}
    for column in needed.get(name, ["answer"]):
        rest = {other: value for other, value in everything.items() if other != column}
        with pytest.raises(ConfigError, match=f"'{name}': .*'{column}'"):
            check_rewards(config, Prompt(0, "q", rest))


# Loading.


def test_preset_has_a_default_reward() -> None:
    assert reward_specs(config_of()) == ["easyrl.data.tasks:score"]
    assert reward_specs(config_of("exact_match")) == ["exact_match"]
    assert reward_weights(config_of("exact_match", "my.py:chat")) == [1.0, 1.0]
    with pytest.raises(ConfigError, match=r"reward.functions.*data.jsonl"):
        reward_specs(config_of(data__dataset="data.jsonl"))


def test_names_of_metrics_are_unique() -> None:
    names = reward_names(config_of("/x/a.py:score", "/y/a.py:score", "/y/a.py:other", "math"))
    assert names == ["/x/a.py:score", "/y/a.py:score", "other", "math"]


def test_functions_load_from_files_and_modules(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "beside_my_reward.py").write_text("VALUE = 4.0")
    (tmp_path / "r.py").write_text("import beside_my_reward as b\ndef f(**_): return [b.VALUE]")
    assert load_reward(f"{tmp_path / 'r.py'}:f", config_of())() == [4.0]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "inner.py").write_text("def f(**_): return [3.0]")
    assert load_reward("my_package.inner:f", config_of())() == [3.0]


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("exactmatch", "exact_match"),
        ("none.py:f", "none.py"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("json.decoder:no_such", "no function 'no_such'"),
        ("json.decoder:NaN", "no function 'NaN'"),
    ],
)
def test_unknown_reward_is_an_error_that_names_what_exists(spec: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_reward(spec, config_of())
    assert "reward.functions (--reward)" in str(caught.value)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("import no_such_thing", "No module named 'no_such_thing'"),
        ("def f(:", "SyntaxError"),
        ("x = 1\nraise KeyError('mine')", "line 2, in <module>"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
    ],
)
def test_error_in_the_users_file_has_its_traceback(source: str, shown: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text(source)
    for _ in range(2):  # a failed import leaves no half-initialized module
        with pytest.raises(ConfigError) as caught:
            load_reward(f"{file}:f", config_of())
        assert shown in str(caught.value) and "bad.py" in str(caught.value)
        assert "loading.py" not in str(caught.value)
