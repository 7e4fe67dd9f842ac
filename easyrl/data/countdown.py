"""The task `countdown`: from given numbers, each used once, make an expression of a given value.

    3 7 12 = 16        (7-3)+12

Numbers are drawn from a seed and combined at random until one is left, which is the target, so that
every problem has a solution. A hash of numbers and target decides whether a problem is for training
or held out: the two never overlap, whatever the seed or the order of the numbers. A prompt here is
the bare statement above; the preset says how a model is asked.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from easyrl.types import Prompt

HELD_OUT_SHARE = 1 / 8
"""Share of all problems that is never trained."""


class Problem(NamedTuple):
    nums: tuple[int, ...]
    target: int


@dataclass(frozen=True, slots=True)
class Countdown:
    """A level of difficulty. Its problems are a function of seed and index, on every machine."""

    name: str
    num_numbers: tuple[int, ...]
    largest_number: int
    operations: str
    targets: range
    largest_value: int
    """Largest intermediate value."""
    num_held_out: int = 256

    def problem(self, seed: int, index: int) -> Problem:
        """Return training problem `index` of a seed."""
        drawn = self._problems(f"train {seed} {index}")
        return next(problem for problem in drawn if not is_held_out(problem))

    def train_prompt(self, seed: int, index: int) -> Prompt:
        """Return training prompt `index` of a seed."""
        return _prompt(index, self.problem(seed, index))

    def held_out_prompts(self) -> list[Prompt]:
        """Return the prompts, the same in every run, that accuracy is measured on."""
        chosen: dict[Problem, None] = {}
        held_out = (problem for problem in self._problems("held out") if is_held_out(problem))
        while len(chosen) < self.num_held_out:
            chosen[next(held_out)] = None
        return [_prompt(index, problem) for index, problem in enumerate(chosen)]

    def _problems(self, name: str) -> Iterator[Problem]:
        rng = random.Random(f"countdown {self.name} {name}")
        while True:
            count = rng.choice(self.num_numbers)
            nums = [rng.randint(1, self.largest_number) for _ in range(count)]
            target = self._combined(nums, rng)
            if target is not None and target in self.targets and target not in nums:
                yield Problem(tuple(nums), target)

    def _combined(self, nums: Sequence[int], rng: random.Random) -> int | None:
        """The value of a random expression; None where an intermediate value is too large."""
        values = list(nums)
        while len(values) > 1:
            rng.shuffle(values)
            value = applied(rng.choice(self.operations), values.pop(), values.pop())
            if value is None or value > self.largest_value:
                return None
            values.append(value)
        return values[0]


FULL = Countdown("full", (3, 4), 99, "+-*/", range(10, 101), 10_000)
SMALL = Countdown("small", (3,), 9, "+-*", range(1, 51), 50, num_held_out=128)
"""For a model of half a million parameters."""


def applied(operation: str, left: int, right: int) -> int | None:
    """Return `left operation right`; None where that is negative or not an integer."""
    match operation:
        case "+":
            return left + right
        case "-":
            return left - right if left >= right else None
        case "*":
            return left * right
        case _:
            return left // right if right and left % right == 0 else None


def is_held_out(problem: Problem) -> bool:
    """Whether a problem is held out, by a hash of its sorted numbers and its target."""
    text = f"{sorted(problem.nums)} {problem.target}"
    return hashlib.sha256(text.encode()).digest()[0] < HELD_OUT_SHARE * 256


def prompt_text(problem: Problem) -> str:
    """Return the bare statement, `3 7 12 = 16`, and a newline."""
    return f"{' '.join(map(str, problem.nums))} = {problem.target}\n"


def _prompt(index: int, problem: Problem) -> Prompt:
    columns = {"nums": list(problem.nums), "target": problem.target}
    return Prompt(index, prompt_text(problem), columns)
