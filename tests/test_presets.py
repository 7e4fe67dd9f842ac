"""The named presets: what they say of prompts, columns and rewards; the user's keys win."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from easyrl.config import ConfigError, load_config
from easyrl.data import datasets
from easyrl.data.datasets import open_prompts, problems_of, with_eval_data
from easyrl.data.presets import PRESETS, TRAINED, eval_sampling
from easyrl.data.streams import PromptStream
from easyrl.rewards.loading import reward_specs
from hub_rows import DEEPSCALER, GSM8K, put_in_place_of_the_hub

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@pytest.fixture(autouse=True)
def _hub(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_place_of_the_hub(monkeypatch)


def opened(name: object, *words: str) -> PromptStream:
    return open_prompts(load_config(None, {"data.dataset": name}, words))


def error_of(name: object, *words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        opened(name, *words)
    return str(caught.value)


def asked(row: dict[str, str], column: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": row[column] + BOXED}]


def test_gsm8k_asks_for_a_boxed_answer_and_keeps_the_columns() -> None:
    stream = opened("gsm8k", "data.shuffle=false")
    assert stream.epoch_length == 8
    assert stream.prompt(0).content == asked(GSM8K[0], "question")
    assert stream.prompt(0).columns == {"answer": GSM8K[0]["answer"]}
    held_out = stream.held_out()
    assert [prompt.columns["answer"] for prompt in held_out] == [r["answer"] for r in GSM8K[:2]]
    assert held_out[1].content == stream.prompt(1).content


def test_math_is_measured_on_math500() -> None:
    stream = opened("math", "data.shuffle=false")
    assert stream.prompt(0).content == asked(DEEPSCALER[0], "problem")
    assert stream.prompt(0).columns["answer"] == r"\frac{1}{2}"
    assert [prompt.columns["answer"] for prompt in stream.held_out()][:2] == ["2", "4"]


@pytest.mark.parametrize("name", TRAINED)
def test_every_preset_brings_prompts_and_a_reward(name: str) -> None:
    stream = opened(name)
    assert stream.held_out() and len(stream.examples()) >= len(stream.held_out())
    assert reward_specs(load_config(None, {"data.dataset": name})) == [PRESETS[name].reward]


def test_presets_bring_the_sampling_of_evaluations() -> None:
    for name, temperature in (("gsm8k", 0.0), ("math500", 0.6), ("aime24", 0.6)):
        config = load_config(None, {"data.dataset": name})
        assert eval_sampling(config.data)["temperature"] == temperature
        asked_first = open_prompts(config, is_trained=False).prompt(0).content
        assert str(asked_first[0]["content"]).endswith(BOXED)  # type: ignore[index, call-overload]
    assert eval_sampling(load_config().data) == {}


@pytest.mark.parametrize("name", ["gsm8k", "math", "math500"])
def test_for_an_evaluation_only_what_is_held_out_is_fetched(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened_rows: list[str | None] = []
    open_hub = datasets.open_hub
    monkeypatch.setattr(
        datasets, "open_hub", lambda rows: opened_rows.append(rows) or open_hub(rows)
    )
    config = with_eval_data(load_config(None, {"data.dataset": name}))
    problems = problems_of(open_prompts(config, is_trained=False), config).values()
    assert opened_rows == [PRESETS[name].held_out]
    if name != "math500":
        assert [*problems] == [*problems_of(open_prompts(config), config).values()]


@pytest.mark.parametrize(
    ("words", "content"),
    [
        (["data.prompt_template=Q: {question}", "data.chat=false"], "Q: " + GSM8K[0]["question"]),
        (["data.prompt_column=answer", "data.chat=false"], GSM8K[0]["answer"]),
        (
            ["data.system_prompt=Be brief."],
            [{"role": "system", "content": "Be brief."}, *asked(GSM8K[0], "question")],
        ),
    ],
)
def test_what_the_user_sets_wins(words: list[str], content: object) -> None:
    stream = opened("gsm8k", "data.shuffle=false", *words)
    assert stream.prompt(0).content == stream.held_out()[0].content == content


@pytest.fixture
def own_rows(tmp_path: Path) -> str:
    """GSM8K's rows, in a file of the user's."""
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in GSM8K))
    return str(file)


def test_rows_of_ones_own_are_asked_and_scored_as_a_presets(own_rows: str, tmp_path: Path) -> None:
    config = load_config(None, {"data.dataset": own_rows, "data.preset": "gsm8k"})
    stream, hub = open_prompts(config), opened("gsm8k")
    assert [stream.prompt(i) for i in range(8)] == [hub.prompt(i) for i in range(8)]
    assert stream.held_out() == [] and reward_specs(config) == ["gsm8k"]
    assert eval_sampling(config.data)["temperature"] == 0.0
    assert opened("openai/gsm8k:main:test", "data.preset=gsm8k").epoch_length == 2
    file = tmp_path / "c.jsonl"
    file.write_text('{"target": 28, "nums": [95, 11, 56]}\n')  # as on the hub
    prompt = opened(str(file), "data.preset=countdown").prompt(0)
    assert "Numbers: [95, 11, 56]. Target: 28." in str(prompt.content)


def test_a_preset_for_ones_own_rows_leaves_presets_as_they_are(own_rows: str) -> None:
    mixed = opened([own_rows, "countdown"], "data.preset=gsm8k")
    contents = {
        prompt.columns["data_source"]: str(prompt.content) for prompt in map(mixed.prompt, range(4))
    }
    assert "boxed" in contents[own_rows] and "Numbers:" in contents["countdown"]
    flags = {"data.dataset": own_rows, "data.preset": "gsm8k", "eval.dataset": "math500"}
    measured = with_eval_data(load_config(None, flags))
    assert "of $14$" in str(open_prompts(measured, is_trained=False).prompt(0).content)
    flags["eval.dataset"] = own_rows
    assert with_eval_data(load_config(None, flags)).data.preset == "gsm8k"


def test_an_unknown_preset_or_one_for_other_rows_is_refused(own_rows: str) -> None:
    assert "gsm8k" in error_of(own_rows, "data.preset=gsm8") and "gsm8k?" in error_of("gsm8")
    assert error_of("math", "data.preset=gsm8k").startswith("data.preset")
    assert error_of(own_rows, "data.preset=math500").startswith("data.prompt_template")


def test_a_held_out_row_that_is_too_long_is_left_out() -> None:
    stream = opened("math", "data.shuffle=false")
    third = len(DEEPSCALER) + 2
    locations = list(stream.examples())
    assert locations[third] == "HuggingFaceH4/MATH-500::test, row 2"
    fewer = stream.without([locations[0], locations[third]])
    assert fewer.epoch_length == len(DEEPSCALER) - 1
    assert [prompt.columns["answer"] for prompt in fewer.held_out()] == ["2", "4", "8", "10", "12"]


def test_presets_mix_where_their_rewards_agree() -> None:
    config = load_config(None, {"data.dataset": ["math", "gsm8k"]})
    with pytest.raises(ConfigError, match=r"^reward\.functions"):
        reward_specs(config)
    mixed = open_prompts(config)
    assert {mixed.prompt(i).columns["data_source"] for i in range(4)} == {"math", "gsm8k"}
    sources = [prompt.columns["data_source"] for prompt in mixed.held_out()]
    assert sources == ["math", "gsm8k"] * 2 + ["math"] * 4
    both = {"data.dataset": ["countdown", "countdown-small"]}
    assert reward_specs(load_config(None, both)) == ["countdown"]
