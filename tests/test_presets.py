"""The named presets: what they say of prompts, columns and rewards; the user's keys win."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from easyrl.config import ConfigError, load_config
from easyrl.data import datasets
from easyrl.data.datasets import open_prompts
from easyrl.data.presets import PRESETS, TRAINED, HubRows, eval_sampling
from easyrl.data.problems import problems_of, with_eval_data
from easyrl.data.streams import PromptStream
from easyrl.rewards.loading import reward_specs
from hub_rows import DEEPSCALER, GSM8K, put_in_place_of_the_hub

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@pytest.fixture(autouse=True)
def _hub(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_place_of_the_hub(monkeypatch)


def opened(name: str, *words: str) -> PromptStream:
    return open_prompts(load_config(None, {"data.dataset": name}, words))


def error_of(name: str, *words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        opened(name, *words)
    return str(caught.value)


def test_gsm8k_asks_for_a_boxed_answer_and_hands_on_the_datas() -> None:
    stream = opened("gsm8k", "data.shuffle=false")
    assert stream.epoch_length == 8
    asked = GSM8K[0]["question"] + BOXED
    assert stream.prompt(0).content == [{"role": "user", "content": asked}]
    assert stream.prompt(0).columns == {"answer": GSM8K[0]["answer"]}
    assert [prompt.columns["answer"] for prompt in stream.held_out()] == [
        row["answer"] for row in GSM8K[:2]
    ]
    assert stream.held_out()[1].content == stream.prompt(1).content


def test_math_is_measured_on_math500() -> None:
    stream = opened("math", "data.shuffle=false")
    content = DEEPSCALER[0]["problem"] + BOXED
    assert stream.prompt(0).content == [{"role": "user", "content": content}]
    assert stream.prompt(0).columns["answer"] == r"\frac{1}{2}"
    assert len(stream.held_out()) == 6
    assert stream.held_out()[0].columns["answer"] == "2"


@pytest.mark.parametrize("name", TRAINED)
def test_every_preset_brings_prompts_and_a_reward(name: str) -> None:
    stream = opened(name)
    assert stream.held_out()
    assert reward_specs(load_config(None, {"data.dataset": name})) == [PRESETS[name].reward]
    assert len(stream.examples()) >= len(stream.held_out())


@pytest.mark.parametrize(
    ("name", "answer"), [("gsm8k", GSM8K[0]["answer"]), ("math500", "2"), ("aime24", "100")]
)
def test_presets_for_evaluations_have_prompts_and_sampling(name: str, answer: str) -> None:
    config = load_config(None, {"data.dataset": name})
    stream = open_prompts(config)
    problems = stream.held_out() or [stream.prompt(i) for i in range(stream.epoch_length or 0)]
    assert problems[0].columns["answer"] == answer
    assert str(problems[0].content[0]["content"]).endswith(BOXED)  # type: ignore[index, call-overload]
    assert eval_sampling(config.data)["temperature"] == (0.0 if name == "gsm8k" else 0.6)
    for others in ("arithmetic", "a.jsonl", [name]):
        assert eval_sampling(load_config(None, {"data.dataset": others}).data) == {}


@pytest.mark.parametrize("name", ["gsm8k", "math", "math500"])
def test_for_an_evaluation_only_what_is_held_out_is_fetched(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened_rows: list[HubRows | None] = []
    open_hub = datasets.open_hub
    monkeypatch.setattr(
        datasets, "open_hub", lambda rows: opened_rows.append(rows) or open_hub(rows)
    )
    config = with_eval_data(load_config(None, {"data.dataset": name}))
    alone = problems_of(open_prompts(config, is_trained=False), config).held_out()
    assert opened_rows == [PRESETS[name].held_out]
    assert alone == problems_of(open_prompts(config), config).held_out()


def test_what_the_user_gives_wins() -> None:
    words = ("data.prompt_template=Q: {question}", "data.chat=false", "data.shuffle=false")
    stream = opened("gsm8k", *words)
    assert stream.prompt(0).content == "Q: " + GSM8K[0]["question"]
    assert str(stream.held_out()[0].content).startswith("Q: ")
    words = ("data.prompt_column=answer", "data.chat=false", "data.shuffle=false")
    assert opened("gsm8k", *words).prompt(0).content == GSM8K[0]["answer"]
    words = ("data.system_prompt=Be brief.", "data.shuffle=false")
    assert opened("gsm8k", *words).prompt(0).content[0] == {
        "role": "system",
        "content": "Be brief.",
    }
    assert opened("openai/gsm8k:main:test", "data.preset=gsm8k").epoch_length == 2
    assert opened("gsm8k", "data.num_held_out=0").held_out() == []
    config = load_config(None, {"data.dataset": "gsm8k"}, ["reward.functions=[a.py:f]"])
    assert reward_specs(config) == ["a.py:f"]


@pytest.fixture
def own_rows(tmp_path: Path) -> str:
    """GSM8K's rows, in a file of the user's."""
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in GSM8K))
    return str(file)


def test_rows_of_ones_own_are_asked_and_scored_as_a_presets(own_rows: str, tmp_path: Path) -> None:
    flags = {"data.dataset": own_rows, "data.preset": "gsm8k", "data.shuffle": False}
    config = load_config(None, flags)
    stream, hub = open_prompts(config), opened("gsm8k", "data.shuffle=false")
    assert [stream.prompt(i) for i in range(8)] == [hub.prompt(i) for i in range(8)]
    assert stream.held_out() == [] and reward_specs(config) == ["gsm8k"]
    assert eval_sampling(config.data) == eval_sampling(
        load_config(words=["data.dataset=gsm8k"]).data
    )
    (tmp_path / "c.jsonl").write_text('{"target": 28, "nums": [95, 11, 56]}\n')  # as on the hub
    words = ["data.preset=countdown", f"data.dataset={tmp_path / 'c.jsonl'}"]
    config = load_config(None, {}, words)
    assert "Numbers: [95, 11, 56]. Target: 28." in str(open_prompts(config).prompt(0).content)
    assert reward_specs(config) == ["countdown"]


def test_a_preset_for_ones_own_rows_leaves_presets_as_they_are(own_rows: str) -> None:
    both = {"data.dataset": [own_rows, "countdown"], "data.preset": "gsm8k"}
    mixed = open_prompts(load_config(None, both))
    contents = {str(mixed.prompt(i).columns["data_source"]): mixed.prompt(i) for i in range(4)}
    assert str(contents[own_rows].content[0]["content"]).endswith(BOXED)  # type: ignore[index, call-overload]
    assert "Numbers:" in str(contents["countdown"].content)
    flags = {"data.dataset": own_rows, "data.preset": "gsm8k", "eval.dataset": "math500"}
    measured = with_eval_data(load_config(None, flags))
    assert "of $14$" in str(open_prompts(measured).prompt(0).content)
    flags["eval.dataset"] = own_rows
    assert with_eval_data(load_config(None, flags)).data.preset == "gsm8k"


def test_a_preset_that_is_none_or_has_no_rows_to_be_for_is_told(own_rows: str) -> None:
    assert "did you mean gsm8k?" in error_of(own_rows, "data.preset=gsm8")
    assert error_of("math", "data.preset=gsm8k").startswith("data.preset")
    assert error_of(own_rows, "data.preset=math500").startswith("data.prompt_template")


def test_generated_problems_take_templates_and_names_too() -> None:
    words = ("data.prompt_template={prompt} {answer}?", "data.columns={solution: answer}")
    prompt = opened("arithmetic", *words).prompt(0)
    plain = opened("arithmetic").prompt(0)
    assert prompt.content == f"{plain.content} {plain.columns['answer']}?"
    assert prompt.columns == {"solution": plain.columns["answer"]}
    assert error_of("arithmetic", "data.prompt_template={question}").startswith("data.prompt_temp")


def test_a_held_out_row_that_is_too_long_is_left_out() -> None:
    stream = opened("math", "data.shuffle=false")
    num_rows = len(DEEPSCALER)
    assert stream.location(num_rows + 2) == "held out, HuggingFaceH4/MATH-500, row 2"
    fewer = stream.without([0, num_rows + 2])
    assert fewer.epoch_length == num_rows - 1
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


def test_a_hub_without_the_held_out_problems_says_how_to_do_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    for name in ("gsm8k", "math"):
        message = error_of(name)
        assert "HF_ENDPOINT" in message
        assert message.endswith(f"--dataset FILE data.preset={name}")
