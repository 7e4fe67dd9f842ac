"""The tasks whose problems are generated: `arithmetic`, `countdown` and `guess`.

    task          prompt          completion of the built-in model
    arithmetic    17+58+34=       17+50=67+8=75
                                  75+30=105+4=109
                                  #109
    countdown     3 7 12 = 16     tries, then <answer>(7-3)+12</answer>
    guess         0-99            50; another number after each answer of `environments.guess`

In `arithmetic` two to eight two-digit numbers are added. In `countdown` an expression of the given
numbers, each used once, must have the given value: the numbers combined at random. The prompt is
the bare statement; a preset adds the instructions.

Problems are a function of seed and index. A hash of the problem decides whether it is held out,
whatever the seed.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from easyrl.data.values import answers_of
from easyrl.types import Messages, text_of

HELD_OUT_SHARE = 1 / 8  # share of all problems that is never trained


class Task:
    """Problems, drawn from a seed, and their rows: `prompt` and the columns for the reward."""

    seed_prefix: str
    num_held_out: int
    draw: Callable[[random.Random], Any]  # a problem; None: draw again
    key: Callable[[Any], str]  # the text whose hash decides whether a problem is held out
    row: Callable[[Any], dict[str, Any]]

    def problem(self, seed: int, index: int) -> Any:
        drawn = self._drawn(f"train {seed} {index}")
        return next(problem for problem in drawn if not self._is_held_out(problem))

    def train_row(self, seed: int, index: int) -> dict[str, Any]:
        return self.row(self.problem(seed, index))

    def held_out_rows(self) -> list[dict[str, Any]]:
        """Return the rows, the same in every run, that accuracy is measured on."""
        held_out = filter(self._is_held_out, self._drawn("held out"))
        chosen: dict[Any, None] = {}  # a set that keeps the order
        while len(chosen) < self.num_held_out:
            chosen[next(held_out)] = None
        return [self.row(problem) for problem in chosen]

    def _drawn(self, name: str) -> Iterator[Any]:
        rng = random.Random(self.seed_prefix + name)
        while True:
            if (problem := self.draw(rng)) is not None:
                yield problem

    def _is_held_out(self, problem: Any) -> bool:
        first_byte = hashlib.sha256(self.key(problem).encode()).digest()[0]
        return first_byte < HELD_OUT_SHARE * 256


class Arithmetic(Task):
    """Problems are tuples of numbers."""

    seed_prefix, num_held_out = "", 512

    def draw(self, rng: random.Random) -> tuple[int, ...]:
        return tuple(rng.randint(10, 99) for _ in range(rng.randint(2, 8)))

    def key(self, problem: Sequence[int]) -> str:
        return "+".join(map(str, problem)) + "="

    def row(self, problem: Sequence[int]) -> dict[str, Any]:
        return {"prompt": self.key(problem), "answer": str(sum(problem))}


def score(
    prompts: Sequence[str | Messages],
    completions: Sequence[str | Messages],
    completion_ids: Sequence[Sequence[int]],
    *,
    answer: Sequence[Any],
    **columns: Any,
) -> list[float | None]:
    """Reward 1.0 where the text after the last `#` is exactly the answer, else 0.0."""
    return [
        float(text_of(each).endswith(tuple("#" + text for text in right))) if right else None
        for each, right in zip(completions, map(answers_of, answer), strict=True)
    ]


class CountdownProblem(NamedTuple):
    nums: tuple[int, ...]
    target: int


@dataclass(frozen=True, slots=True)
class Countdown(Task):
    seed_prefix: str
    num_held_out: int
    num_numbers: tuple[int, ...]
    largest_number: int
    operations: str
    targets: range
    largest_value: int  # largest intermediate value

    def draw(self, rng: random.Random) -> CountdownProblem | None:
        count = rng.choice(self.num_numbers)
        nums = [rng.randint(1, self.largest_number) for _ in range(count)]
        values = list(nums)
        while len(values) > 1:
            rng.shuffle(values)
            value = applied(rng.choice(self.operations), values.pop(), values.pop())
            if value is None or value > self.largest_value:
                return None
            values.append(value)
        is_problem = values[0] in self.targets and values[0] not in nums
        return CountdownProblem(tuple(nums), values[0]) if is_problem else None

    def key(self, problem: CountdownProblem) -> str:
        return f"{sorted(problem.nums)} {problem.target}"

    def row(self, problem: CountdownProblem) -> dict[str, Any]:
        nums, target = problem
        prompt = f"{' '.join(map(str, nums))} = {target}\n"
        return {"prompt": prompt, "nums": list(nums), "target": target}


def applied(operation: str, left: int, right: int) -> int | None:
    """Return `left operation right`; None where that is negative or not an integer."""
    if operation == "/":
        return left // right if right and left % right == 0 else None
    value = {"+": left + right, "-": left - right, "*": left * right}[operation]
    return value if value >= 0 else None


class Guess(Task):
    """Problems are the numbers to find. The prompt is always the same."""

    seed_prefix, num_held_out = "guess ", 8
    numbers = range(100)

    def draw(self, rng: random.Random) -> int:
        return rng.choice(self.numbers)

    def key(self, problem: int) -> str:
        return f"guess {problem}"

    def row(self, problem: int) -> dict[str, Any]:
        return {"prompt": f"{self.numbers[0]}-{self.numbers[-1]}", "secret": problem}


ARITHMETIC = Arithmetic()
GUESS = Guess()
COUNTDOWN = Countdown("countdown full ", 256, (3, 4), 99, "+-*/", range(10, 101), 10_000)
COUNTDOWN_SMALL = Countdown("countdown small ", 128, (3,), 9, "+-*", range(1, 51), 50)
"""The level for a model of half a million parameters."""
