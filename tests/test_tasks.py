"""The generated tasks, and the built-in models made for them."""

import random
from itertools import permutations
from pathlib import Path

import pytest

from benchmarks import make_tiny
from easyrl.data.tasks import ARITHMETIC, COUNTDOWN, COUNTDOWN_SMALL, applied, score
from runs import succeed, summary_of


@pytest.mark.parametrize(
    ("task", "index", "row"),
    [
        (ARITHMETIC, 3, {"prompt": "73+40+16+92=", "answer": "221"}),
        (COUNTDOWN, 3, {"prompt": "36 2 50 27 = 38\n", "nums": [36, 2, 50, 27], "target": 38}),
        (COUNTDOWN_SMALL, 2, {"prompt": "7 9 1 = 17\n", "nums": [7, 9, 1], "target": 17}),
    ],
)
def test_problems_are_the_same_on_every_machine_and_never_held_out_ones(task, index, row):
    def key(row):  # without the order of the numbers
        return (*sorted(row["nums"]), row["target"]) if "nums" in row else row["prompt"]

    assert task.train_row(0, index) == row
    assert sum(task.problem(7, i) == task.problem(8, i) for i in range(200)) < 20
    held_out = task.held_out_rows()
    assert len({row["prompt"] for row in held_out}) == len(held_out) == task.num_held_out
    keys = {key(row) for row in held_out}
    for seed in (0, 1):
        assert keys.isdisjoint(key(task.train_row(seed, index)) for index in range(1000))


def is_solvable(nums, target, operations):
    if len(nums) == 1:
        return nums[0] == target
    for left, right, *others in permutations(nums):
        for operation in operations:
            value = applied(operation, left, right)
            if value is not None and is_solvable((value, *others), target, operations):
                return True
    return False


def test_arithmetic_rewards_exactly_the_answer():
    working = "17+50=67+8=75\n75+30=105+4=109\n#109"
    assert make_tiny.solution((17, 58, 34), random.Random()) == working
    right = [working, "#75\n#109"]  # only the last answer counts
    wrong = ["#109\n#75", "#0109", "#109 or so", "109"]
    assert score([], right + wrong, [], answer=["109"] * 6) == [1.0] * 2 + [0.0] * 4


@pytest.mark.long
def test_countdown_is_learned_on_the_cpu_within_five_minutes(tmp_path):
    config = Path(__file__).parent.parent / "configs" / "countdown_small.yaml"
    words = ("--config", str(config), "--output", str(tmp_path / "run"))
    succeed(*words, timeout=900)
    summary = summary_of(tmp_path / "run")
    assert summary["accuracy_after"] >= summary["accuracy_before"] + 0.2
