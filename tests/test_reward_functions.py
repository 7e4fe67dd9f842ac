"""Reward functions: the built-in ones, those written for TRL, and errors before a run."""

import time
from pathlib import Path

import numpy as np
import pytest
from reward_pools import call, config_of, rewards_of

from easyrl.config import ConfigError
from easyrl.data.datasets import open_prompts
from easyrl.rewards.loading import check_rewards, load_reward
from easyrl.runtime.resolve import resolve, short_names
from easyrl.types import Prompt
from math_answers import FORMS, FORMULA_FORMS, GSM8K, MATH, NAN, TYPED, TYPESET, TYPESET_FORMULAS
from runs import write_rows

TEXTS = [r"It is \boxed{4}.", "Five", r"\boxed{5}"]


@pytest.fixture(autouse=True)
def _no_limit_of_this_process(monkeypatch):
    """`math` lets the kernel end its process where a comparison takes long: here that of the tests,
    whose other threads take time too."""
    monkeypatch.setattr("easyrl.rewards.math.MAX_CPU_SECONDS", 10_000)


def scores(name, completions, /, **columns):
    """Names with `__` are settings; others are columns, the same for each completion."""
    settings = {key: value for key, value in columns.items() if "__" in key}
    num = len(completions)
    ids = columns.pop("completion_ids", [[1]] * num)
    function = load_reward(name, rewards_of(name, **settings))
    values = {key: [value] * num for key, value in columns.items() if "__" not in key}
    return function(completions=completions, completion_ids=ids, **values)


def chat(text):
    return [{"role": "assistant", "content": text}]


def test_exact_match_compares_the_whole_completion_and_regex_searches_it():
    texts = ["42", " 42\n", "4", "it is 42", chat("42")]
    assert scores("exact_match", texts, answer=42) == [1.0, 1.0, 0.0, 0.0, 1.0]
    texts = ["the sum is 12", chat("12"), "twelve", "a\n12"]
    assert scores("regex", texts, reward__pattern=r"\d+$") == [1.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>1+1</think><answer>2</answer>", 1.0),
        ("<think>1+1</think> so <answer>2</answer>", 0.0),
        ("<think>1+1</think><answer>2</answer> Right?", 0.0),
        ("<answer>2</answer><think>1+1</think>", 0.0),
        ("1+1\n</think>\n<answer>2</answer>", 1.0),  # the template has opened <think>
        ("", 0.0),
    ],
)
def test_format_is_thinking_then_an_answer(text, score):
    assert scores("format", [text, chat(text)]) == [score, score]


def test_length_penalty_is_that_of_dapo():
    """The paper's numbers: 20,480 tokens, of which the last 4,096 cost."""
    lengths = [0, 1, 16_384, 16_385, 18_432, 20_479, 20_480, 20_481]
    settings = {"rollout__max_completion_length": 20480, "train__max_tokens_per_micro_batch": 32768}
    ids = [[7] * length for length in lengths]
    found = scores("length_penalty", [""] * len(lengths), completion_ids=ids, **settings)
    assert found == [0, 0, 0, -1 / 4096, -0.5, -4095 / 4096, -1, -1]


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("(44 - 19) * 35 / 7", 0.0),  # 7 is not there
        ("44 + 19 + 35", 1.0),
        ("-(-44) + 19 + 35", 1.0),
        ("44 ** 19 ** 35", 0.0),
        ("44 / (19 - 19) + 35", 0.0),
        ("__import__('os').getpid()", 0.0),
        ("(" * 400 + "44" + ")" * 400, 0.0),
        ("", 0.0),
    ],
)
def test_countdown_needs_each_number_once_and_the_target(answer, score):
    text = f"<think>44, 19 and 35</think> <answer>{answer}</answer>"
    found = scores("countdown", [text, chat(text)], nums=[44, 19, 35], target=98)
    assert found == [score, score]


def test_countdown_is_exact_and_reads_the_last_answer():
    texts = [
        "<answer>1</answer> no, <answer>3 / (1 - 2 / 3)</answer>",  # 8.999... in floats
        "<answer>3/(1-2/3)</answer> no, <answer>1</answer>",
        "3/(1-2/3)",
    ]
    for nums, target in (([1, 2, 3, 3], 9), ("[1, 2, 3, 3]", "9")):
        assert scores("countdown", texts, nums=nums, target=target) == [1.0, 0.0, 0.0]
    assert scores("countdown", texts, nums=None, target=9) == [None] * 3
    assert scores("countdown", texts, nums=[1, 2, 3, 3], target="nine") == [0.0] * 3
    with pytest.raises(ConfigError, match="column target"):
        check_rewards(rewards_of("countdown"), Prompt(0, "q", {"nums": [1], "target": "nine"}))
    with pytest.raises(ConfigError, match="column answer"):
        check_rewards(rewards_of("gsm8k"), Prompt(0, "q", {"answer": "2:30"}))


def solution(answer):
    boxed = answer if "boxed" in answer else rf"\boxed{{{answer.strip('$')}}}"
    return f"As $1 + 1 = 2$ and $x^2 \\ge 0$, the answer is {boxed}."


@pytest.mark.parametrize(
    ("preset", "answers", "column"),
    [("gsm8k", GSM8K, "answer"), ("math500", MATH, "answer"), ("math", MATH, "solution")],
)
def test_rows_of_presets_have_the_scores_checked_by_hand(preset, answers, column, tmp_path):
    rows = [{"question": "q", "problem": "q", "answer": a, "solution": a} for a, _, _ in answers]
    if column == "solution":
        rows = [{"problem": "q", "solution": solution(answer)} for answer, _, _ in answers]
    file = write_rows(tmp_path / "data.jsonl", rows)
    settings = {"data__preset": preset, "data__columns": f"{{answer: {column}}}"}
    run = resolve(config_of(data__dataset=file, data__shuffle="false", **settings))
    stream, (spec,) = open_prompts(run.data), run.rewards.functions
    function = load_reward(spec, run.rewards)
    for index, (answer, text, score) in enumerate(answers):
        columns = {name: [value] for name, value in stream.prompt(index).columns.items()}
        assert function(completions=[chat(text)], **columns) == [score], (answer, text)


@pytest.mark.parametrize(
    ("name", "forms", "answers"),
    [
        ("math", FORMS, TYPESET),
        ("math", FORMULA_FORMS, TYPESET_FORMULAS),
        ("gsm8k", FORMS, TYPESET),
    ],
)
def test_the_verdict_is_the_same_however_an_answer_is_typeset_and_marked(name, forms, answers):
    other = []
    for number, text, is_right in answers:
        for form in forms:
            written = form % text
            (of_completion,) = scores(name, [written], answer=number)
            (of_row,) = scores(name, [rf"\boxed{{{number}}}"], answer=written)
            if (of_completion, of_row) != (is_right, is_right):
                other.append((number, written, of_completion, of_row))
    assert not other


@pytest.mark.parametrize("name", ["exact_match", "gsm8k", "math", "easyrl.data.tasks:score"])
def test_rows_without_an_answer_have_no_score(name):
    assert scores(name, [chat("#4")], prompts="q", answer=4)[0] is not None
    pandas = pytest.importorskip("pandas")
    for missing in (None, "", NAN, np.float32("nan"), pandas.NA, [], [None]):
        assert scores(name, [chat("#4")], prompts="q", answer=missing) == [None]


@pytest.mark.parametrize(("name", "answer", "text", "score"), TYPED)
def test_answers_are_compared_whatever_their_type(name, answer, text, score):
    assert scores(name, [text], prompts="q", answer=answer) == [score]


ENDLESS = [
    "1 234 ",
    "5 . ",
    r"\!",
    r"\quad ",
    r"\text{ }",
    "**1",
    "...",
    "~",
    "$$ ",
    r"1\,000\,",
    "5.}",
]


@pytest.mark.parametrize(
    "part", ["1", "1,", "1/", "$ ", "{", "####\n", r"\boxed{", "<answer>", *ENDLESS]
)
def test_endless_texts_cost_no_time(part):
    started = time.process_time()
    for name in ("exact_match", "gsm8k", "format", "countdown"):
        scores(name, [part * 50_000], answer="1", nums=[1], target=1)
    assert time.process_time() - started < 5


@pytest.mark.parametrize("reward", ["gsm8k", "easyrl.data.tasks:score"])
def test_of_an_episode_the_last_text_of_the_model_counts(reward):
    """Not the result of a tool behind it."""
    result = {"role": "tool", "name": "calculate", "content": "#5"}
    episodes = [[*chat("#### 4"), result], [*chat("#### 5"), result]]
    assert scores(reward, episodes, prompts="q", answer=" 4") == [1.0, 0.0]


def test_functions_load_from_files_and_modules(monkeypatch, tmp_path):
    (tmp_path / "beside_my_reward.py").write_text("VALUE = 4.0")
    (tmp_path / "r.py").write_text("import beside_my_reward as b\ndef f(**_): return [b.VALUE]")
    assert load_reward(f"{tmp_path / 'r.py'}:f", rewards_of())() == [4.0]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "inner.py").write_text("def f(**_): return [3.0]")
    assert load_reward("my_package.inner:f", rewards_of())() == [3.0]


# The shapes that TRL's documentation shows: what each reads, and how.
TRL = """
import asyncio
import re

def by_reference(completions, ground_truth, **kwargs):
    boxed = [re.search(r"\\\\boxed\\{(.*?)\\}", text) for text in completions]
    return [float(bool(b) and b.group(1) == g) for b, g in zip(boxed, ground_truth)]

def of_a_chat(completions, **kwargs):
    return [float(completion[0]["content"] == "4") for completion in completions]

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

def forwards(**kwargs): return logs(**kwargs)
def without_kwargs(prompts, completions): return [float(p == "What is 2+2?") for p in prompts]
"""


@pytest.mark.parametrize(
    ("name", "row", "texts", "scores"),
    [
        ("by_reference", {"prompt": "What is 2+2?", "ground_truth": "4"}, TEXTS, [1, 0, 0]),
        ("for_maths", {"prompt": "Add two numbers.", "task": "code"}, TEXTS, [None] * 3),
        ("asynchronous", {"prompt": "The sky is"}, ["", "a", "b"], [0, 1, 1]),
        ("in_stages", {"prompt": "The sky is"}, TEXTS, [0.25] * 3),
        ("logs", {"prompt": "The sky is"}, TEXTS, [0.5] * 3),
        ("forwards", {"prompt": "The sky is"}, TEXTS, [0.5] * 3),
        ("without_kwargs", {"prompt": "What is 2+2?", "level": 3}, TEXTS, [1, 1, 1]),
        ("of_a_chat", {"prompt": [{"role": "user", "content": "2+2?"}]}, ["4", "5"], [1, 0]),
    ],
)
def test_trl_functions_and_formats_work_unchanged(name, row, texts, scores, tmp_path):
    (tmp_path / "trl.py").write_text(TRL)
    data = write_rows(tmp_path / "data.jsonl", [row])
    run = resolve(config_of(f"{tmp_path}/trl.py:{name}", data__dataset=data))
    prompt = open_prompts(run.data).prompt(0)
    check_rewards(run.rewards, prompt)
    result = call(run.rewards, prompt, texts)
    assert result.scores == [scores] and not result.errors
    if name in ("logs", "forwards"):
        assert result.metrics == {"words": 5 / 3}
        assert result.columns["first_word"] == ["It", "Five", r"\boxed{5}"]
        assert result.columns["parts"][1] == {"words": ["Five"], "none": None}


def test_function_in_verls_form_works_as_the_docs_wrap_it(tmp_path):
    page = (Path(__file__).parent.parent / "docs" / "trl_and_verl.md").read_text()
    own = "def compute_score(*args): return args == ('gsm8k', '4', '4', {'index': 7})\n"
    (tmp_path / "v.py").write_text(own + page.split("```python\n")[1].partition("```")[0])
    row = {"data_source": "gsm8k", "reward_model": {"ground_truth": "4"}}
    row["extra_info"] = {"index": 7}
    prompt = Prompt(0, [{"role": "user", "content": "2+2?"}], row)
    assert call(rewards_of(f"{tmp_path}/v.py:score"), prompt, ["4", "5"]).scores == [[1, 0]]


def test_reward_for_json_in_the_docs_gives_more_for_each_step(tmp_path):
    page = (Path(__file__).parent.parent / "docs" / "rewards.md").read_text()
    code = page.split("```python\n# json_rewards.py\n")[1].partition("```")[0]
    (tmp_path / "json_rewards.py").write_text(code)
    prompt = Prompt(0, [{"role": "user", "content": "2+2?"}], {"answer": "4"})
    steps = ["4 it is", '{"answer": 4', '{"result": 4}', '{"answer": 5}', '{"answer": 4}']
    no_objects = ["[4]", "4", "[" * 100_000]
    result = call(rewards_of(f"{tmp_path}/json_rewards.py:json_answer"), prompt, steps + no_objects)
    assert result.scores == [[0.0, 0.1, 0.2, 0.4, 1.0, 0.0, 0.0, 0.0]] and not result.errors


def test_functions_of_one_name_are_told_apart_by_their_files():
    specs = ["/a/r.py:f", "/a/s.py:f", "/b/s.py:g", "/a/t.py:h", "/b/t.py:h", "math"]
    assert short_names(specs) == ["r.py:f", "s.py:f", "g", *specs[3:]]
