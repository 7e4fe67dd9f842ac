"""Built-in rewards that compare mathematical answers: `math` and `gsm8k`.

`math` leaves parsing and comparing to the library math-verify, which imports sympy: only reward
processes import it, and only where `math` is used. The library's verdict is final, also where it is
debatable (tests/math_answers.py lists such answers).
"""

from __future__ import annotations

import contextlib
import logging
import math as mathematics
import re
import resource
import time
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from typing import Any

from easyrl.rewards.functions import Completions
from easyrl.types import text_of

MAX_CPU_SECONDS = 3
"""Longest comparison of one answer. Real answers take a few hundredths; `9^{9^{9}}` never ends."""
FORMULA = re.compile(r"\\boxed|\$|\\\(|\\\[")
"""Marks of a formula for math-verify; an answer without one is parsed as a formula as a whole."""
NUMBER = re.compile(
    r"(?:(?<![\d)])-)?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+)?"
)
"""`18`, `-3.5`, `$1,234.50`, `.5`, `2e3`; in `7-5` the numbers are 7 and 5."""
THIN_SPACE = re.compile(r"\\[,!]|[\u202f\u2009]")
"""Spaces between thousands."""


def math(completions: Completions, answer: Sequence[Any], **_: Sequence[Any]) -> list[float | None]:
    r"""Score 1.0 where math-verify finds the completion's answer equal to the row's, else 0.0.
    None where the row has no answer.

    The completion's answer is searched after the last `</think>`: the last `\boxed{...}`, else what
    follows "answer is" or "answer:", else the last formula or number. The library's own timeouts
    are off, since they need the main thread's alarm. Instead the kernel ends the process after
    MAX_CPU_SECONDS, which the pool counts as a wrong answer. Raises ValueError where the row's
    answer cannot be parsed.
    """
    import math_verify  # noqa: F401  takes seconds, which do not count

    with _cpu_limit(MAX_CPU_SECONDS):
        return [
            None if right is None else float(_is_right(text_of(completion), _gold(str(right))))
            for completion, right in zip(completions, answer, strict=True)
        ]


@contextlib.contextmanager
def _cpu_limit(seconds: int) -> Iterator[None]:
    """Let the kernel end this process (SIGXCPU) after this much more processor time. Python would
    not handle an alarm during one multiplication of huge numbers."""
    before = resource.getrlimit(resource.RLIMIT_CPU)
    limit = mathematics.ceil(time.process_time()) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, before)


def _is_right(completion: str, gold: list[Any]) -> bool:
    from math_verify import parse, verify

    text = completion.rpartition("</think>")[2]
    try:
        found = parse(text, extraction_config=_extraction(), parsing_timeout=None)
        return bool(verify(gold, found, timeout_seconds=None))
    except Exception:  # recursion too deep, out of memory, ...
        return False


@cache
def _extraction() -> tuple[Any, ...]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig

    for name in ("math_verify.parser", "math_verify.grader"):  # they log each answer they refuse
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()


@lru_cache(maxsize=256)
def _gold(answer: str) -> list[Any]:
    """Parse a row's answer."""
    from math_verify import parse

    text = answer if FORMULA.search(answer) else rf"\boxed{{{answer}}}"
    parsed: list[Any] = parse(text, extraction_config=_extraction(), parsing_timeout=None)
    if not parsed:
        raise ValueError(
            f"column answer: expected an answer that math-verify can parse, got {answer!r:.80}"
        )
    return parsed


def gsm8k(
    completions: Completions, answer: Sequence[Any], **_: Sequence[Any]
) -> list[float | None]:
    r"""Score 1.0 where the completion's number equals the row's, else 0.0; None without an answer.

    The number is the first one after the last `####`, as in the data; else the last one in the last
    `\boxed{...}`; else the last one, as in lm-evaluation-harness's `flexible-extract`. Thousands
    separators and dollar signs are ignored. Raises ValueError where the row has no number.
    """
    scores: list[float | None] = []
    for completion, row in zip(completions, answer, strict=True):
        right = _number_in(str(row))
        if row is not None and right is None:
            raise ValueError(f"column answer: expected a number, got {row!r:.80}")
        scores.append(None if row is None else float(_number_in(text_of(completion)) == right))
    return scores


def _number_in(text: str) -> float | None:
    text = THIN_SPACE.sub("", text).replace("{,}", ",").replace("−", "-")
    _, is_marked, after = text.rpartition("####")
    _, is_boxed, boxed = text.rpartition(r"\boxed{")
    if is_marked:
        numbers = NUMBER.findall(after)[:1]
    else:
        numbers = NUMBER.findall(boxed.partition("}")[0] if is_boxed else text)[-1:]
    return float(numbers[0].replace(",", "").replace("$", "")) if numbers else None
