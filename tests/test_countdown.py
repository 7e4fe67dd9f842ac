"""The task `countdown`: problems from a seed that have a solution, and the model made for it."""

from __future__ import annotations

import random
from itertools import permutations
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from easyrl.data import countdown
from easyrl.data.countdown import FULL, SMALL, Countdown, Problem
from easyrl.data.hub import BUILT_IN_MODELS
from easyrl.model.built_in import make_tiny
from runs import finish, summary_of

LEVELS = pytest.mark.parametrize("level", [FULL, SMALL], ids=lambda level: level.name)


def is_solvable(nums: tuple[int, ...], target: int, operations: str) -> bool:
    """By trying everything."""
    if len(nums) == 1:
        return nums[0] == target
    for left, right, *others in permutations(nums):
        for operation in operations:
            value = countdown.applied(operation, left, right)
            if value is not None and is_solvable((value, *others), target, operations):
                return True
    return False


@LEVELS
def test_every_problem_has_a_solution(level: Countdown) -> None:
    for index in range(150):
        nums, target = level.problem(3, index)
        assert len(nums) in level.num_numbers
        assert all(1 <= number <= level.largest_number for number in nums)
        assert level.smallest_target <= target <= level.largest_target
        assert is_solvable(nums, target, level.operations)


@LEVELS
def test_a_problem_depends_on_its_seed_and_index_alone(level: Countdown) -> None:
    stream, again = level.train_prompts(7), level.train_prompts(7)
    backwards = [again[index] for index in reversed(range(100))]
    assert [stream[index] for index in range(100)] == backwards[::-1]
    other = level.train_prompts(8)
    assert sum(stream[index].content == other[index].content for index in range(100)) < 10
    with pytest.raises(IndexError, match="got -1"):
        stream[-1]


@LEVELS
def test_held_out_problems_are_never_trained_on_in_any_order(level: Countdown) -> None:
    def key(columns: object) -> tuple[object, ...]:
        return (*sorted(columns["nums"]), columns["target"])  # type: ignore[index]

    held_out = level.held_out_prompts()
    keys = {key(prompt.columns) for prompt in held_out}
    assert len({prompt.content for prompt in held_out}) == level.num_held_out
    assert held_out == level.held_out_prompts()
    stream = level.train_prompts(0)
    assert keys.isdisjoint(key(stream[index].columns) for index in range(3000))
    assert countdown.is_held_out(Problem((1, 2, 3), 9)) == countdown.is_held_out(
        Problem((3, 1, 2), 9)
    )


def test_problems_are_the_same_on_every_machine() -> None:
    assert SMALL.problem(0, 2) == ((7, 9, 1), 17)
    assert FULL.problem(0, 3) == ((36, 2, 50, 27), 38)
    assert SMALL.train_prompts(0)[2].content == "7 9 1 = 17\n"


def test_tries_of_the_built_in_model_are_correct_and_include_all_solutions() -> None:
    for index in range(300):
        problem = SMALL.problem(0, index)
        for each in make_tiny.tries(problem):
            first, second = each.working.partition(";")[0].split(",")
            for step in (first, second):
                made, _, value = step.partition("=")
                assert eval(made) == int(value)
            assert eval(each.expression) == each.value
            assert each.working.endswith("=\n") == (each.value == problem.target)
        assert problem.target in {each.value for each in make_tiny.tries(problem)}


def test_search_ends_with_the_correct_answer_unless_given_up() -> None:
    rng = random.Random(0)
    problems = [SMALL.problem(0, index) for index in range(200)]
    for give_up, least, most in ((0.0, 200, 200), (0.2, 60, 160), (1.0, 5, 80)):
        searches = [make_tiny.search(problem, rng, give_up) for problem in problems]
        assert all(text.count("<answer>") == text.count("</answer>") == 1 for text in searches)
        right = sum(
            eval(text.partition("<answer>")[2].removesuffix("</answer>")) == problem.target
            for text, problem in zip(searches, problems, strict=True)
        )
        assert least <= right <= most


def test_training_script_makes_a_model_like_the_built_in_one(tmp_path: Path) -> None:
    make_tiny.make("tiny-countdown", tmp_path, num_steps=(1, 1), seed=0)
    made = AutoModelForCausalLM.from_pretrained(tmp_path)
    shipped = AutoModelForCausalLM.from_pretrained(BUILT_IN_MODELS["tiny-countdown"])
    shapes = {name: tensor.shape for name, tensor in shipped.state_dict().items()}
    assert {name: tensor.shape for name, tensor in made.state_dict().items()} == shapes
    folder = BUILT_IN_MODELS["tiny-countdown"]
    assert sum(file.stat().st_size for file in folder.iterdir()) < 1_000_000
    assert (folder / "tokenizer.json").read_text() == (
        BUILT_IN_MODELS["tiny"] / "tokenizer.json"
    ).read_text()


@pytest.mark.long
def test_it_learns_on_the_cpu_within_five_minutes(tmp_path: Path) -> None:
    config = Path(__file__).parent.parent / "configs" / "countdown_small.yaml"
    words = ("--config", str(config), "--output", str(tmp_path / "run"))
    code, _, err = finish(*words, timeout=900)
    assert (code, err) == (0, "")
    summary = summary_of(tmp_path / "run")
    assert summary["accuracy_after"] >= summary["accuracy_before"] + 0.2
