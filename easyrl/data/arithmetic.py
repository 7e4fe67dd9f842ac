"""The task `arithmetic`: add two to eight two-digit numbers and show the working.

    prompt       17+58+34=
    completion   17+50=67+8=75
                 75+30=105+4=109
                 #109

Each line adds one number to the running sum, its tens first and then its units; the text after
`#` is the answer. A hash of the problem's text decides whether it is for training or held out: the
two never overlap, whatever the seed.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

from easyrl.types import Prompt

MIN_TERMS, MAX_TERMS = 2, 8
MAX_COMPLETION_LENGTH = 128
"""Characters of the longest working with an end-of-sequence token, rounded up."""
NUM_HELD_OUT = 512
HELD_OUT_SHARE = 1 / 8
"""Share of all problems that is never trained."""


def problem(seed: int, index: int) -> tuple[int, ...]:
    """Return the numbers to add in training problem `index` of a seed."""
    return next(ops for ops in _operands(f"train {seed} {index}") if not is_held_out(ops))


def prompt_text(operands: Sequence[int]) -> str:
    """Return the question as the model sees it: `17+58+34=` (6 to 24 characters)."""
    return "+".join(map(str, operands)) + "="


def worked_solution(operands: Sequence[int]) -> str:
    """Return the working and the answer, without an end-of-sequence token."""
    total = operands[0]
    lines = []
    for number in operands[1:]:
        tens, units = number // 10 * 10, number % 10
        lines.append(f"{total}+{tens}={total + tens}+{units}={total + number}\n")
        total += number
    return "".join(lines) + f"#{total}"


def train_prompt(seed: int, index: int) -> Prompt:
    """Return training prompt `index` of a seed."""
    return _prompt(index, problem(seed, index))


def held_out_prompts() -> list[Prompt]:
    """Return the NUM_HELD_OUT prompts, the same in every run, that accuracy is measured on."""
    held_out = (operands for operands in _operands("held out") if is_held_out(operands))
    chosen: dict[tuple[int, ...], None] = {}
    while len(chosen) < NUM_HELD_OUT:
        chosen[next(held_out)] = None
    return [_prompt(index, operands) for index, operands in enumerate(chosen)]


def is_held_out(operands: Sequence[int]) -> bool:
    """Whether a problem is held out, by a hash of its text."""
    first_byte = hashlib.sha256(prompt_text(operands).encode()).digest()[0]
    return first_byte < HELD_OUT_SHARE * 256


def score(
    prompts: Sequence[str],
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    *,
    answer: Sequence[str],
    **columns: Any,
) -> list[float]:
    """Reward 1.0 where the text after the last `#` is exactly the answer, else 0.0."""
    return [
        float(completion.rpartition("#")[1:] == ("#", expected))
        for completion, expected in zip(completions, answer, strict=True)
    ]


def _prompt(index: int, operands: tuple[int, ...]) -> Prompt:
    return Prompt(index, prompt_text(operands), {"answer": str(sum(operands))})


def _operands(name: str) -> Iterator[tuple[int, ...]]:
    """Draw problems for ever from a generator that `name` seeds, the same on every machine."""
    rng = random.Random(name)
    while True:
        yield tuple(rng.randint(10, 99) for _ in range(rng.randint(MIN_TERMS, MAX_TERMS)))
