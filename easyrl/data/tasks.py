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

HELD_OUT_BYTES = 256 // 8
"""A problem is never trained if the first byte of its hash is below this: an eighth of all."""


class Task:
    """Problems that are drawn from a seed, and their rows."""

    seed_prefix: str  # tasks draw from different random numbers
    num_held_out: int  # number of held-out problems that accuracy is measured on
    draw: Callable[[random.Random], Any]
    """Returns a problem, or None: draw again."""
    key: Callable[[Any], str]
    """Returns a problem's text, whose hash decides whether it is held out."""
    row: Callable[[Any], dict[str, Any]]
    """Returns a problem's row: `prompt`, and columns for the reward."""

    def problem(self, seed: int, index: int) -> Any:
        """Return the training problem at an index."""
        drawn = self._drawn(f"train {seed} {index}")
        problem = next(drawn)
        while self._is_held_out(problem):
            problem = next(drawn)
        return problem

    def train_row(self, seed: int, index: int) -> dict[str, Any]:
        return self.row(self.problem(seed, index))

    def held_out_rows(self) -> list[dict[str, Any]]:
        """Return the rows, the same in every run, that accuracy is measured on."""
        chosen: dict[Any, None] = {}  # a set that keeps the order
        for problem in self._drawn("held out"):
            if len(chosen) == self.num_held_out:
                break
            if self._is_held_out(problem):
                chosen[problem] = None
        return [self.row(problem) for problem in chosen]

    def _drawn(self, name: str) -> Iterator[Any]:
        """Yield problems without end, drawn from random numbers that `name` seeds."""
        rng = random.Random(self.seed_prefix + name)
        while True:
            problem = self.draw(rng)
            if problem is not None:
                yield problem

    def _is_held_out(self, problem: Any) -> bool:
        key = self.key(problem)
        first_byte = hashlib.sha256(key.encode()).digest()[0]
        return first_byte < HELD_OUT_BYTES


class Arithmetic(Task):
    """Problems are tuples of the numbers to add."""

    seed_prefix = ""
    num_held_out = 512

    def draw(self, rng: random.Random) -> tuple[int, ...]:
        count = rng.randint(2, 8)
        return tuple(rng.randint(10, 99) for _ in range(count))

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
    """Score 1.0 where the text after the last `#` is exactly the answer, else 0.0; None where the
    row has no answer."""
    scores: list[float | None] = []
    for completion, given in zip(completions, answer, strict=True):
        right = answers_of(given)
        if not right:
            scores.append(None)
            continue
        endings = tuple("#" + text for text in right)
        scores.append(float(text_of(completion).endswith(endings)))
    return scores


class CountdownProblem(NamedTuple):
    nums: tuple[int, ...]
    target: int  # value of the expression to find


@dataclass(frozen=True, slots=True)
class Countdown(Task):
    """Problems are numbers, and the value that an expression of them must have."""

    seed_prefix: str
    num_held_out: int
    num_numbers: tuple[int, ...]  # how many numbers a problem may have
    largest_number: int
    operations: str  # as in "+-*/"
    targets: range
    largest_value: int  # largest intermediate value

    def draw(self, rng: random.Random) -> CountdownProblem | None:
        count = rng.choice(self.num_numbers)
        nums = [rng.randint(1, self.largest_number) for _ in range(count)]
        values = list(nums)
        while len(values) > 1:
            rng.shuffle(values)
            operation = rng.choice(self.operations)
            left = values.pop()
            right = values.pop()
            value = applied(operation, left, right)
            if value is None or value > self.largest_value:
                return None
            values.append(value)
        target = values[0]
        if target not in self.targets or target in nums:
            return None
        return CountdownProblem(tuple(nums), target)

    def key(self, problem: CountdownProblem) -> str:
        return f"{sorted(problem.nums)} {problem.target}"

    def row(self, problem: CountdownProblem) -> dict[str, Any]:
        numbers = " ".join(map(str, problem.nums))
        return {
            "prompt": f"{numbers} = {problem.target}\n",
            "nums": list(problem.nums),
            "target": problem.target,
        }


def applied(operation: str, left: int, right: int) -> int | None:
    """Return `left operation right` of two numbers from 0 on; None where that is negative or not an
    integer."""
    if operation == "+":
        return left + right
    if operation == "*":
        return left * right
    if operation == "-":
        return left - right if left >= right else None
    is_integer = right != 0 and left % right == 0
    return left // right if is_integer else None


class Guess(Task):
    """Problems are the numbers to find. The prompt is always the same."""

    seed_prefix = "guess "
    num_held_out = 8
    numbers = range(100)

    def draw(self, rng: random.Random) -> int:
        return rng.choice(self.numbers)

    def key(self, problem: int) -> str:
        return f"guess {problem}"

    def row(self, problem: int) -> dict[str, Any]:
        first = self.numbers[0]
        last = self.numbers[-1]
        return {"prompt": f"{first}-{last}", "secret": problem}


ARITHMETIC = Arithmetic()
GUESS = Guess()
COUNTDOWN = Countdown(
    seed_prefix="countdown full ",
    num_held_out=256,
    num_numbers=(3, 4),
    largest_number=99,
    operations="+-*/",
    targets=range(10, 101),
    largest_value=10_000,
)
COUNTDOWN_SMALL = Countdown(
    seed_prefix="countdown small ",
    num_held_out=128,
    num_numbers=(3,),
    largest_number=9,
    operations="+-*",
    targets=range(1, 51),
    largest_value=50,
)
"""The level for a model of half a million parameters."""
