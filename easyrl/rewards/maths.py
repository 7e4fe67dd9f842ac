"""The built-in rewards that judge a mathematical answer: `math` and `gsm8k`.

`math` leaves reading and comparing to the library math-verify, which brings sympy: imported in the
reward processes alone, and only where `math` is used. What the library thinks of an answer is
followed, also where one may think otherwise (tests/math_answers.py has such answers).
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from functools import cache, lru_cache
from typing import Any

from easyrl.rewards.bounded import which_hold
from easyrl.rewards.functions import answers_of, text_of
from easyrl.types import Messages

MAX_SECONDS = 3
"""Answers that are meant take a few hundredths; `9^{9^{9}}` has no end."""
FORMULA = re.compile(r"\\boxed|\$|\\\(|\\\[")
"""What math-verify finds a formula by; an answer without is taken for one as a whole."""
NUMBER = re.compile(
    r"(?:(?<![\d)])-)?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+)?"
)
"""`18`, `-3.5`, `$1,234.50`, `.5`, `2e3`; in `7-5` the numbers are 7 and 5."""
SPACED = str.maketrans({"−": "-", "\u202f": None, "\u2009": None})
LATEX_SEPARATORS = re.compile(r"\{,\}|\\[,!]")


def math(
    answer_column: str,
    /,
    prompts: Sequence[str | Messages],
    completions: Sequence[str | Messages],
    completion_ids: Sequence[Sequence[int]],
    **columns: Sequence[Any],
) -> list[float | None]:
    r"""1.0 where math-verify finds the completion's answer equal to the row's, else 0.0; None where
    the row has none.

    The answer is looked for behind the last `</think>`: the last `\boxed{...}` there, else what
    stands behind "answer is" or "answer:", else the last formula or number. One that takes more
    than MAX_SECONDS of processor time to compare is wrong; the library's own timeouts, which take
    the process's one alarm, are off. Raises ValueError where the row's own answer cannot be read.
    """
    answers = answers_of(columns, answer_column)
    scores: list[float | None] = [None] * len(completions)
    scored = [place for place, answer in enumerate(answers) if answer is not None]
    pairs = [(text_of(completions[place]), _gold(str(answers[place]))) for place in scored]
    right = which_hold(_is_right, pairs, seconds=MAX_SECONDS)
    for place, is_right in zip(scored, right, strict=True):
        scores[place] = float(is_right)
    return scores


def _is_right(pair: tuple[str, list[Any]]) -> bool:
    from math_verify import parse, verify

    completion, gold = pair
    text = completion.rpartition("</think>")[2]
    found = parse(text, extraction_config=_extraction(), parsing_timeout=None)
    return bool(verify(gold, found, timeout_seconds=None))


@cache
def _extraction() -> tuple[Any, ...]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig

    for name in ("math_verify.parser", "math_verify.grader"):  # each answer that it cannot read
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()


@lru_cache(maxsize=256)
def _gold(answer: str) -> list[Any]:
    """What math-verify reads in a row's answer."""
    from math_verify import parse

    text = answer if FORMULA.search(answer) else rf"\boxed{{{answer}}}"
    parsed: list[Any] = parse(text, extraction_config=_extraction(), parsing_timeout=None)
    if not parsed:
        raise ValueError(f"math-verify reads no answer in {answer!r:.80} (reward.answer_column)")
    return parsed


def gsm8k(
    answer_column: str,
    /,
    prompts: Sequence[str | Messages],
    completions: Sequence[str | Messages],
    completion_ids: Sequence[Sequence[int]],
    **columns: Sequence[Any],
) -> list[float | None]:
    r"""1.0 where the completion's number is the row's, else 0.0; None where the row has no answer.

    The row's is what follows its last `####` (without one, its last number). A completion's is the
    first number after its last `####`, as in the data; without one, the last number in its last
    `\boxed{...}`; without both, its last number, as lm-evaluation-harness's `flexible-extract` and
    verl's flexible method take it. Thousands separators and dollar signs do not count, and 18.0 is
    18. Raises ValueError where the row's own answer has no number.
    """
    scores: list[float | None] = []
    for completion, answer in zip(completions, answers_of(columns, answer_column), strict=True):
        if answer is None:
            scores.append(None)
            continue
        right = _number_in(str(answer))
        if right is None:
            raise ValueError(f"there is no number in the answer {answer!r:.80}")
        scores.append(float(_number_in(text_of(completion)) == right))
    return scores


def _number_in(text: str) -> Decimal | None:
    text = LATEX_SEPARATORS.sub(lambda found: "," if found[0] == "{,}" else "", text)
    text = text.translate(SPACED)
    _, marker, after = text.rpartition("####")
    if marker:
        return _decimal(NUMBER.search(after))
    _, marker, after = text.rpartition(r"\boxed{")
    numbers = list(NUMBER.finditer(_braced(after) if marker else text))
    return _decimal(numbers[-1]) if numbers else None


def _braced(text: str) -> str:
    """Up to the brace that closes one opened before the text."""
    depth = 1
    for place, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:place]
    return text


def _decimal(found: re.Match[str] | None) -> Decimal | None:
    if found is not None:
        with contextlib.suppress(InvalidOperation):  # an exponent beyond all decimals
            return Decimal(found[0].replace(",", "").replace("$", ""))
    return None
