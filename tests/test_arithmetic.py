"""The built-in demo: the task `arithmetic` and the model `tiny`."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from easyrl.data import arithmetic
from easyrl.data.hub import BUILT_IN_MODELS

TINY = BUILT_IN_MODELS["tiny"]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(TINY)


def reward(completion: str, answer: str = "109") -> float:
    return arithmetic.score(["17+58+34="], [completion], [[]], answer=[answer])[0]


def test_a_problem_depends_on_its_seed_and_index_alone():
    stream, again = arithmetic.train_prompts(7), arithmetic.train_prompts(7)
    backwards = [again[index] for index in reversed(range(200))]
    assert [stream[index] for index in range(200)] == backwards[::-1]
    other = arithmetic.train_prompts(8)
    assert sum(stream[index].content == other[index].content for index in range(200)) < 10


def test_the_problems_are_the_same_on_every_machine():
    assert arithmetic.train_prompts(0)[3].content == "73+40+16+92="
    assert arithmetic.held_out_prompts()[0].content == "15+34+52+66+79+17="


def test_the_stream_counts_its_prompts_and_has_no_negative_ones():
    stream = arithmetic.train_prompts(0)
    assert [prompt.index for prompt, _ in zip(stream, range(5), strict=False)] == list(range(5))
    with pytest.raises(IndexError, match="got -1"):
        stream[-1]


def test_held_out_problems_are_never_trained_on():
    held_out = arithmetic.held_out_prompts()
    contents = {prompt.content for prompt in held_out}
    assert len(contents) == len(held_out) == 512
    assert contents == {prompt.content for prompt in arithmetic.held_out_prompts()}
    for seed in (0, 1):
        stream = arithmetic.train_prompts(seed)
        assert contents.isdisjoint(stream[index].content for index in range(10_000))


def test_lengths_spread_widely_within_their_limits():
    problems = [arithmetic.problem(0, index) for index in range(2000)]
    prompts = [len(arithmetic.prompt_text(operands)) for operands in problems]
    completions = [len(arithmetic.worked_solution(operands)) + 1 for operands in problems]
    assert (min(prompts), max(prompts)) == (6, 24)
    assert 60 <= sum(completions) / len(completions) <= 80
    assert min(completions) < 20
    assert 110 < max(completions) <= arithmetic.MAX_COMPLETION_LENGTH
    longest = len(arithmetic.worked_solution((99,) * arithmetic.MAX_TERMS))
    assert longest + 1 <= arithmetic.MAX_COMPLETION_LENGTH


def test_working_adds_tens_then_units():
    working = "17+50=67+8=75\n75+30=105+4=109\n#109"
    assert arithmetic.worked_solution((17, 58, 34)) == working


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("17+50=67+8=75\n75+30=105+4=109\n#109", 1.0),
        ("#109", 1.0),
        ("#75\n#109", 1.0),  # only the last answer counts
        ("#109\n#75", 0.0),
        ("#110", 0.0),
        ("#0109", 0.0),
        ("# 109", 0.0),
        ("#109\n", 0.0),
        ("#109 or so", 0.0),
        ("#10", 0.0),  # truncated
        ("17+50=67+8=75\n75+30=105+4=109\n#", 0.0),
        ("17+50=67+8=75\n75+30=105+4=109", 0.0),
        ("109", 0.0),
        ("", 0.0),
    ],
)
def test_reward_asks_for_exactly_the_answer(completion: str, expected: float):
    assert reward(completion) == expected


def test_every_worked_solution_earns_the_reward():
    prompts = arithmetic.held_out_prompts()
    completions = [
        arithmetic.worked_solution([int(number) for number in prompt.content[:-1].split("+")])
        for prompt in prompts
    ]
    answers = [prompt.columns["answer"] for prompt in prompts]
    contents = [prompt.content for prompt in prompts]
    ids: list[list[int]] = [[] for _ in prompts]
    assert arithmetic.score(contents, completions, ids, answer=answers) == [1.0] * len(prompts)


def test_tiny_is_small(model):
    assert sum(file.stat().st_size for file in TINY.iterdir()) <= 4 * 2**20
    assert (TINY / "model.safetensors").stat().st_size <= 4_000_000
    assert model.num_parameters() <= 1_500_000
    assert model.config.model_type == "qwen3"


def test_tokenizer_gives_one_token_a_character_and_the_text_back(tokenizer):
    texts = [arithmetic.worked_solution(arithmetic.problem(0, index)) for index in range(2000)]
    for text in [*texts, "17+58=", " a  b ,.\n\n!", "Don 't ."]:
        ids = tokenizer.encode(text)
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text
    assert tokenizer.unk_token_id not in tokenizer.encode("".join(map(chr, range(32, 127))))


def test_end_of_sequence_is_the_same_everywhere(model, tokenizer):
    assert tokenizer.eos_token == "<eos>"
    assert tokenizer.eos_token_id == model.config.eos_token_id
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id
    assert tokenizer.pad_token_id == model.config.pad_token_id != tokenizer.eos_token_id
    ids = [*tokenizer.encode("#75"), tokenizer.eos_token_id]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "#75"


def test_before_rl_tiny_is_right_in_a_part_of_its_samples(model, tokenizer):
    prompts = arithmetic.held_out_prompts()[:256]
    contents = [prompt.content for prompt in prompts]
    batch = tokenizer(contents, return_tensors="pt", padding=True, padding_side="left")
    torch.manual_seed(0)
    output = model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        do_sample=True,
        temperature=1.0,
        top_k=0,
        max_new_tokens=arithmetic.MAX_COMPLETION_LENGTH,
    )
    ids = output[:, batch["input_ids"].shape[1] :]
    completions = tokenizer.batch_decode(ids, skip_special_tokens=True)
    answers = [prompt.columns["answer"] for prompt in prompts]
    rewards = arithmetic.score(contents, completions, ids.tolist(), answer=answers)
    assert 0.2 <= sum(rewards) / len(rewards) <= 0.6


def test_warm_start_makes_a_model_that_loads(tmp_path):
    command = [sys.executable, "-m", "easyrl.model.built_in.make_tiny", "--output", str(tmp_path)]
    subprocess.run([*command, "--steps", "2", "2", "--threads", "1"], check=True, timeout=120)
    assert {file.name for file in tmp_path.iterdir()} >= {file.name for file in TINY.iterdir()}
    made = AutoModelForCausalLM.from_pretrained(tmp_path)
    shipped = AutoModelForCausalLM.from_pretrained(TINY)
    shapes = {name: tensor.shape for name, tensor in shipped.state_dict().items()}
    assert {name: tensor.shape for name, tensor in made.state_dict().items()} == shapes
    assert AutoTokenizer.from_pretrained(tmp_path).encode("1+2=") == AutoTokenizer.from_pretrained(
        TINY
    ).encode("1+2=")
