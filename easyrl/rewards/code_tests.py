"""The forms in which data sets keep unit tests of programs, read into one form.

    "assert add(1, 2) == 3"                       Python, or a list of it (MBPP, KodCode, ...)
    "def check(candidate): ..."                   with a column entry_point (HumanEval)
    {"inputs": ["1 2"], "outputs": ["3"]}         standard input and output (APPS, TACO, PRIME);
                                                  with fn_name: arguments and return values
    [{"input": "1 2", "output": "3", ...}, ...]   the same, one by one (LiveCodeBench, DeepCoder)

The last two may be JSON in a string. Raises ValueError for anything else, and for tests that pass
whatever the program is.
"""

from __future__ import annotations

import ast
import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

FORMS = (
    'expected Python code or a list of it, {"inputs": [...], "outputs": [...]} (with "fn_name" for '
    'function calls), or a list of {"input": ..., "output": ...}'
)
RELATIVE_TOLERANCE = 1e-6
"""Tolerance for numbers whose expected value has a decimal point."""
FUNCTION_CALLS = {"functional", "function_call"}
"""Test types of function calls; tests of other types use standard input and output."""


@dataclass(frozen=True, slots=True)
class Suite:
    """The tests of one row."""

    kind: Literal["asserts", "stdin", "function"]
    tests: list[Any]
    """Sources; standard inputs; or argument lists."""
    expected: list[Any] = field(default_factory=list)
    """Outputs or return values; they never enter the sandbox."""
    function: str | None = None
    """The function to call; of asserts the entry point for `check`."""

    def job(self) -> dict[str, Any]:
        return {"kind": self.kind, "tests": self.tests, "function": self.function}

    def accepts(self, index: int, output: str, token: str) -> bool:
        """Whether this is the right output of test `index`; `token` is what asserts end with."""
        if self.kind == "asserts":
            return output == token
        expected = self.expected[index]
        if self.kind == "stdin":
            return same_text(output, expected)
        try:
            value = json.loads(output)
        except (ValueError, RecursionError):
            return False
        # APPS wraps a return value in a list of one, but not everywhere.
        return same_value(value, expected) or (
            isinstance(expected, list) and len(expected) == 1 and same_value(value, expected[0])
        )


def read_tests(tests: Any, columns: Mapping[str, Any]) -> Suite:
    """`columns` are the row's: entry_point, and MBPP's test_setup_code and test_imports."""
    if isinstance(tests, str) and tests.lstrip()[:1] in ("{", "["):
        with contextlib.suppress(ValueError):  # Python code may begin like this, too
            tests = json.loads(tests)
    tests = tests.tolist() if hasattr(tests, "tolist") else tests
    tests = [tests] if isinstance(tests, str) else tests
    entry_point = columns.get("entry_point") or None
    if isinstance(tests, Mapping):
        inputs, outputs = tests.get("inputs"), tests.get("outputs")
        if isinstance(inputs, Sequence) and isinstance(outputs, Sequence) and inputs:
            return _read_pairs(inputs, outputs, tests.get("fn_name"))
    elif isinstance(tests, Sequence) and tests:
        if all(isinstance(test, str) for test in tests):
            return _read_sources(tests, columns, entry_point)
        if all(isinstance(test, Mapping) and {"input", "output"} <= test.keys() for test in tests):
            first, (kind, *others) = tests[0], {t.get("testtype", t.get("type")) for t in tests}
            function = first.get("fn_name") or (first.get("metadata") or {}).get("func_name")
            if kind in FUNCTION_CALLS and not (function := function or entry_point):
                raise ValueError("function calls need fn_name or a column entry_point")
            if not others:
                inputs, outputs = ([test[key] for test in tests] for key in ("input", "output"))
                return _read_pairs(inputs, outputs, function)
    raise ValueError(f"{FORMS}, got {tests!r:.80}")


def _read_sources(
    tests: Sequence[str], columns: Mapping[str, Any], entry_point: str | None
) -> Suite:
    setup: list[str] = []
    for name in ("test_imports", "test_setup_code"):
        lines = columns.get(name) or []
        setup += [lines] if isinstance(lines, str) else list(lines)
    can_fail = False
    for source in tests:
        try:
            statements = ast.parse(source).body
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"{FORMS}, got {source!r:.80} ({error})") from None
        can_fail |= any(_can_fail(statement, entry_point) for statement in statements)
    if not can_fail:
        raise ValueError(
            "expected an assert, a call, a function test_*, or check(candidate) with a column "
            f"entry_point that names the candidate, got {tests[0]!r:.80}"
        )
    return Suite("asserts", ["\n".join([*setup, test]) for test in tests], function=entry_point)


def _can_fail(statement: ast.stmt, entry_point: str | None) -> bool:
    """Whether the statement can fail because of the program."""
    match statement:
        case ast.FunctionDef(name=name):
            return name.startswith("test") or (name == "check" and entry_point is not None)
        case ast.ClassDef(bases=bases):
            return bool(bases)
        case ast.Expr(value=value):
            return not isinstance(value, ast.Constant)
    passive = (
        ast.Import,
        ast.ImportFrom,
        ast.Assign,
        ast.AnnAssign,
        ast.Pass,
        ast.AsyncFunctionDef,
    )
    return not isinstance(statement, passive)


def _read_pairs(inputs: Sequence[Any], outputs: Sequence[Any], function: str | None) -> Suite:
    if len(inputs) != len(outputs):
        raise ValueError(
            f"expected as many outputs as inputs, got {len(inputs)} and {len(outputs)} outputs"
        )
    if function is None:
        return Suite("stdin", [_as_text(each) for each in inputs], list(map(_as_text, outputs)))
    arguments = [_as_arguments(each) for each in inputs]
    return Suite("function", arguments, [_as_value(each) for each in outputs], function)


def _as_text(value: Any) -> str:
    """Standard input or output; some data sets have it as a list of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _as_arguments(value: Any) -> list[Any]:
    """A list of arguments; in a string they are JSON, one per line."""
    if isinstance(value, str):
        return [_as_value(line) for line in value.splitlines()]
    return list(value) if isinstance(value, list) else [value]


def _as_value(value: Any) -> Any:
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return json.loads(value)
    return value


def same_text(output: str, expected: str) -> bool:
    """Compare line by line and word by word. Where a number is expected with a
    decimal point, a number within RELATIVE_TOLERANCE is accepted."""
    lines, wanted = (
        [line.split() for line in text.strip().splitlines()] for text in (output, expected)
    )
    return len(lines) == len(wanted) and all(
        len(line) == len(words) and all(map(_same_word, line, words))
        for line, words in zip(lines, wanted, strict=True)
    )


def _same_word(word: str, wanted: str) -> bool:
    if word == wanted:
        return True
    try:
        return "." in wanted and _is_close(float(word), float(wanted))
    except ValueError:
        return False


def same_value(value: Any, expected: Any) -> bool:
    """Compare values of JSON; types must be equal, but an int may stand for an expected float."""
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(same_value, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(
            same_value(value[key], expected[key]) for key in value
        )
    if isinstance(value, (int, float)) and isinstance(expected, float):
        with contextlib.suppress(OverflowError):  # an int beyond the range of floats
            return _is_close(value, expected)
        return False
    return type(value) is type(expected) and bool(value == expected)


def _is_close(value: float, expected: float) -> bool:
    return math.isclose(value, expected, rel_tol=RELATIVE_TOLERANCE, abs_tol=RELATIVE_TOLERANCE)
