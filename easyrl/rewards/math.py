"""Built-in rewards that compare mathematical answers: `math` and `gsm8k`.

`math` leaves parsing and comparing to the library math-verify, which imports sympy: only reward
processes import it, and only where `math` is used. The library's verdict is final, also where it is
debatable (tests/math_answers.py lists such answers).
"""

import logging
import math as mathematics
import re
import resource
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from easyrl.data.values import answers_of
from easyrl.rewards.functions import ANSWER, Completions, final_text
from easyrl.rewards.typography import in_one_form, spaces_between_digits
from easyrl.types import Messages

MAX_CPU_SECONDS = 3
"""Longest comparison of one answer. Real answers take a few hundredths; `9^{9^{9}}` never ends."""
LIMITED_CLOCK = -8
"""The clock that Linux compares with RLIMIT_CPU (CPUCLOCK_PROF of this process). It counts ticks:
in a process that has run for long it differs from `time.process_time` by seconds."""
FORMULA = re.compile(r"\\boxed|\$[^$]*\$|\\\(|\\\[|####|[Aa]nswer\b")
"""Marks of an answer in a text. A text without one is an answer as a whole."""
CURRENCY = re.compile(r"(?<!\\)\\\$|[€£¥₹]")
BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:(?=\{)|([^\s{$][^\s$]*?)(?=[.,;]?(?:[\s$]|\Z)))")
"""`\fbox{42}`, or `\boxed 42`."""
NUMBER = re.compile(
    r"\d+(?::\d+|/\d+/\d+)+|((?>(?:(?<![\d)])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?"
    r"|\.\d+)(?:[eE][+-]?\d+)?(?:/0*[1-9]\d*)?))"
)
"""`18`, `-3.5`, `1,234.50`, `2e3`, `3/4`; of `7-5` 7 and 5. Times and dates have no group 1."""
MARK = re.compile(  # `\boxed{18}`, or `#### 18`, which is not a heading of Markdown
    r"\\boxed\{((?>[^{}]+|\{(?>[^{}]+|\{[^{}]*\})*\})*)"
    r"|####[\s*]*(?!\d+[.):][^\S\n]*[A-Za-z])((?=-?\.?\d)[^\n(]*|\Z)"
)
FRACTION = re.compile(r"(?<!\d)\\[dt]?frac *(?:\{(\d+)\}|(\d)) *(?:\{(\d+)\}|(\d))(?!\d)")
r"""`\frac{1}{2}`, or `\frac12`; `\frac123` is (1/2) 3."""
WRAPPING = re.compile(  # LaTeX around a number
    r"\\(boxed|mbox|(text|math)(bf|it|rm)?|large|Large|LARGE|huge|displaystyle|textstyle)\b"
    r"|\\[,;:>!% ]|\\q?quad\b|[{}]|\^\{?\\circ"
)
LEADING_SIGN = re.compile(r"\A\s*(?:\\approx|\\sim|≈|\+)\s*(?=\d)")
r"""Before a number: `\approx 5`, `+5`. It makes no expression of the number."""
UNIT_POWER = re.compile(
    r"(?<=[\d\s])((?:[cdkm]?m|ft|in|mi|yd|inch(?:es)?|f(?:oo|ee)t|miles?|yards?|units?"
    r"|(?:centi|deci|kilo|milli)?met(?:er|re)s?)\s*)(?:\^\s*[23]|[²³])"
    r"(?=\s*(?:\Z|[.,;)]|[a-z]{2}))"
)
"""The power of a unit, as in `18 cm^2`. It makes no expression of the number."""
EXPRESSION = re.compile(
    r"[\\^_+*×÷√²³½]|\A-?\d[\d,.]*\s*(?:[A-Za-z%]+\s+)?(?:[-–]|and\b|or\b|to\b)\s*\d"
)
"""Signs that a text is more than one number: `2^5`, `5-3`, `2 days and 3 hours`."""


def math(completions: Completions, answer: Sequence[Any], **_: Sequence[Any]) -> list[float | None]:
    r"""Score 1.0 where math-verify finds the completion's answer equal to the row's, else 0.0; None
    without an answer.

    The answer is what is in the last `<answer>` tags after the thinking, else in the last box, else
    what follows "answer is" or "answer:", else the last formula or number. The library's timeouts
    are off, since no alarm is handled during one multiplication of huge numbers: the kernel ends
    the process (SIGXCPU) after MAX_CPU_SECONDS, which the pool counts as a wrong answer.
    """
    import math_verify  # noqa: F401  takes seconds, which do not count

    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_CPU)
    seconds_used = time.clock_gettime(LIMITED_CLOCK)
    limit = mathematics.ceil(seconds_used) + MAX_CPU_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (limit, hard_limit))
    try:
        return [*map(_math_score, completions, answer)]
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, (soft_limit, hard_limit))


def _math_score(completion: str | Messages, answer: Any) -> float | None:
    accepted = answers_of(answer)
    if not accepted:
        return None
    text = _answer_part(completion)
    try:
        return float(any(_are_equal(text, right) for right in accepted))
    except Exception:  # recursion too deep, out of memory, ...
        return 0.0


def _are_equal(text: str, right: str) -> bool:
    from math_verify import verify

    reference = _parsed(_reference_part(right)) or [right.strip()]  # else compared as text
    return bool(verify(reference, _parsed(text), timeout_seconds=None))


@lru_cache(maxsize=256)
def _parsed(text: str) -> list[Any]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs what it refuses
    kinds = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    return list(parse(text, extraction_config=kinds, parsing_timeout=None))


def _answer_part(completion: str | Messages) -> str:
    text = final_text(completion)
    tagged = ANSWER.findall(text)
    return _as_formula(tagged[-1]) if tagged else _plain(text)


def _reference_part(answer: str) -> str:
    tagged = ANSWER.findall(answer)
    return _as_formula(tagged[-1] if tagged else answer)


def _as_formula(answer: str) -> str:
    answer = _plain(answer.strip("*\n")).strip(" \n*")
    return answer if FORMULA.search(answer) else rf"\boxed{{{answer}}}"


def _plain(text: str) -> str:
    """Return the text without signs of currency, with numbers and answers in one form, and with the
    same braces for all boxes."""
    return BOX.sub(_in_braces, in_one_form(CURRENCY.sub("", text)))


def _in_braces(box: re.Match[str]) -> str:
    without_braces = box[1]
    return rf"\boxed{{{without_braces}}}" if without_braces else r"\boxed"


def gsm8k(completions: Completions, answer: Sequence[Any], **_: Any) -> list[float | None]:
    r"""Score 1.0 where the completion's number equals the row's, else 0.0; None without an answer.

    The number is that of the last mark after the thinking (`#### 18`, `\boxed{18}`, `<answer>`
    tags); without a mark the last one, as in lm-evaluation-harness's `flexible-extract`. Answers
    that are no numbers (`2:30`) are compared as text.
    """
    return [*map(_gsm8k_score, completions, answer)]


def _gsm8k_score(completion: str | Messages, answer: Any) -> float | None:
    accepted = reference_numbers(answer)
    if not accepted:
        return None
    return float(_number_of(_answer_part(completion)) in accepted)


def reference_numbers(answer: Any) -> list[float | str]:
    """Return what `gsm8k` accepts for a row's answer: text where that is no number."""
    return [_number_of(_reference_part(each)) for each in answers_of(answer)]


def _number_of(text: str) -> float | str:
    """Return the number of the last mark, or the text there; without a mark the last number."""
    text = text.replace("$", "").replace("−", "-").strip()
    marks = MARK.findall(text)
    if not marks:
        numbers = _numbers_in(_without_latex(text))
        return _as_float(numbers[-1]) if numbers else text
    in_box, behind_hashes = marks[-1]
    marked: str = (in_box or behind_hashes).strip(" *")
    right_side = marked.rpartition("=")[2]
    plain = _without_latex(right_side)
    plain = LEADING_SIGN.sub("", UNIT_POWER.sub(r"\1", plain))
    numbers = _numbers_in(plain)
    if not numbers or EXPRESSION.search(plain):
        return marked
    if len(numbers) > 1 and not behind_hashes:
        return marked
    return _as_float(numbers[0])


def _without_latex(text: str) -> str:
    with_slashes = FRACTION.sub(r"\1\2/\3\4", text)
    return WRAPPING.sub("", spaces_between_digits(with_slashes))


def _numbers_in(text: str) -> list[str]:
    return [number for number in NUMBER.findall(text) if number]


def _as_float(number: str) -> float:
    numerator, _, denominator = number.replace(",", "").partition("/")
    return float(numerator) / float(denominator or 1)
