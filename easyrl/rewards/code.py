"""The reward `code`: run a completion's program against the unit tests of its row.

    completion ──► its last ```python block ──► sandbox ──► outputs ──► compared here ──► score

The column `tests` has one of the forms in which data sets keep tests:

    "assert add(1, 2) == 3"                       Python, or a list of it (MBPP, KodCode, ...)
    "def check(candidate): ..."                   with a column entry_point (HumanEval)
    {"inputs": ["1 2"], "outputs": ["3"]}         standard input and output (APPS, TACO, PRIME);
                                                  with fn_name: arguments and return values
    [{"input": "1 2", "output": "3", ...}, ...]   the same, one by one (LiveCodeBench, DeepCoder)

The last two may be JSON in a string. Expected outputs never enter the sandbox.
"""

from __future__ import annotations

import ast
import contextlib
import json
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from easyrl.config import Config, ConfigError
from easyrl.config.sections import RewardConfig
from easyrl.rewards import sandbox
from easyrl.rewards.functions import Completions, text_of

BLOCK = re.compile(
    r"^[ \t]*```[ \t]*(?:python3?|py)\b[^\n]*\n(.*?)(?:^[ \t]*```|\Z)",
    re.DOTALL | re.MULTILINE | re.IGNORECASE,
)
FORMS = (
    'column tests: expected Python code or a list of it, {"inputs": [...], "outputs": [...]} (with '
    '"fn_name" for function calls), or a list of {"input": ..., "output": ...}'
)
TOLERANCE = 1e-6
"""Relative and absolute; for numbers whose expected value has a decimal point."""
OPTIONAL_COLUMNS = ("entry_point", "test_imports", "test_setup_code")
FUNCTION_CALLS = {"functional", "function_call"}
"""Test types of function calls; tests of other types use standard input and output."""


@dataclass(frozen=True, slots=True)
class Suite:
    """The tests of one row."""

    kind: Literal["asserts", "stdin", "function"]
    tests: list[Any]
    """Sources; standard inputs; or argument lists."""
    expected: list[Any] = field(default_factory=list)
    """Outputs or return values; empty for asserts."""
    function: str | None = None
    """The function to call; of asserts the entry point for `check`."""

    def passes(self, program: str, settings: RewardConfig) -> bool:
        """Whether the program passes all tests. Raises SandboxError where nothing can be run."""
        token = secrets.token_hex(16)  # asserts end with it
        job = {"kind": self.kind, "tests": self.tests, "function": self.function}
        job |= {"program": program, "token": token}
        outputs = sandbox.run(job, settings.code_sandbox, settings.code_timeout_seconds)
        expected = self.expected or [token] * len(self.tests)
        return len(outputs) == len(expected) and all(map(self._accepts, outputs, expected))

    def _accepts(self, output: str | None, expected: Any) -> bool:
        if output is None or self.kind == "asserts":
            return bool(output == expected)
        if self.kind == "stdin":
            return same_text(output, expected)
        try:
            value = json.loads(output)
        except (ValueError, RecursionError):
            return False
        # APPS wraps a return value in a list of one, but not everywhere.
        return same_value(value, expected) or same_value([value], expected)


def code(
    settings: RewardConfig,
    /,
    completions: Completions,
    tests: Sequence[Any],
    **columns: Sequence[Any],
) -> list[float]:
    """1.0 where all tests pass, else 0.0. Raises ValueError for tests that cannot be used, and
    SandboxError where nothing can be run."""
    scores = []
    for index, completion in enumerate(completions):
        row = {name: columns[name][index] for name in OPTIONAL_COLUMNS if name in columns}
        suite = read_tests(tests[index], row)
        scores.append(float(suite.passes(program_of(text_of(completion)), settings)))
    return scores


def program_of(text: str) -> str:
    """The last ```python block, closed or not; without one the whole text."""
    blocks = BLOCK.findall(text)
    return str(blocks[-1]) if blocks else text


def check_code(config: Config, columns: Mapping[str, Any]) -> None:
    """Check settings, first row and sandbox before a run. Raises ConfigError."""
    reward = config.reward
    limit = reward.timeout_seconds or config.runtime.timeout_seconds
    if reward.code_timeout_seconds >= limit:
        raise ConfigError(
            f"reward.code_timeout_seconds: expected less than {limit:g}, the limit of a call "
            "(reward.timeout_seconds, by default runtime.timeout_seconds), got "
            f"{reward.code_timeout_seconds:g}"
        )
    try:
        read_tests(columns["tests"], columns)
        sandbox.check(reward.code_sandbox)
    except sandbox.SandboxError as error:
        raise ConfigError(f"reward.code_sandbox={reward.code_sandbox}: {error}") from None
    except ValueError as error:
        raise ConfigError(str(error)) from None


def read_tests(tests: Any, columns: Mapping[str, Any]) -> Suite:
    """Read tests in any of the forms; `columns` may have OPTIONAL_COLUMNS. Raises ValueError for
    anything else, and for tests that run nothing."""
    if isinstance(tests, str) and tests.lstrip()[:1] in ("{", "["):
        with contextlib.suppress(ValueError):  # Python code may begin like this, too
            tests = json.loads(tests)
    tests = [tests] if isinstance(tests, str) else tests
    entry_point = columns.get("entry_point") or None
    if isinstance(tests, Mapping):
        inputs, outputs = tests.get("inputs"), tests.get("outputs")
        if inputs and outputs:
            return _read_pairs(inputs, outputs, tests.get("fn_name"))
    elif isinstance(tests, Sequence) and tests:
        if all(isinstance(test, str) for test in tests):
            return _read_asserts(tests, columns, entry_point)
        if all(isinstance(test, Mapping) and {"input", "output"} <= test.keys() for test in tests):
            function = tests[0].get("fn_name") or (tests[0].get("metadata") or {}).get("func_name")
            if tests[0].get("testtype", tests[0].get("type")) in FUNCTION_CALLS:
                function = function or entry_point
                if function is None:
                    raise ValueError("function calls need fn_name or a column entry_point")
            inputs, outputs = ([test[key] for test in tests] for key in ("input", "output"))
            return _read_pairs(inputs, outputs, function)
    raise ValueError(f"{FORMS}, got {tests!r:.80}")


def _read_asserts(
    sources: Sequence[str], columns: Mapping[str, Any], entry_point: str | None
) -> Suite:
    try:
        statements = [node for source in sources for node in ast.parse(source).body]
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{FORMS}, got {sources!r:.80} ({error})") from None
    passive = (ast.Import, ast.ImportFrom, ast.Assign)
    if not any(
        node.name.startswith("test") or (node.name == "check" and entry_point is not None)
        if isinstance(node, ast.FunctionDef)
        else not isinstance(node, passive)
        for node in statements
    ):
        raise ValueError(
            "column tests: expected an assert, a call, a function test_*, or check(candidate) with "
            f"a column entry_point that names the candidate, got {sources[0]!r:.80}"
        )
    setup = [_as_text(columns.get(name) or "") for name in OPTIONAL_COLUMNS[1:]]
    return Suite("asserts", ["\n".join([*setup, test]) for test in sources], function=entry_point)


def _read_pairs(inputs: Sequence[Any], outputs: Sequence[Any], function: str | None) -> Suite:
    if len(inputs) != len(outputs):
        raise ValueError(
            f"column tests: expected as many outputs as inputs, got {len(inputs)} inputs and "
            f"{len(outputs)} outputs"
        )
    if function is None:
        return Suite("stdin", [_as_text(each) for each in inputs], list(map(_as_text, outputs)))
    arguments = [_as_arguments(each) for each in inputs]
    return Suite("function", arguments, [_as_value(each) for each in outputs], function)


def _as_text(value: Any) -> str:
    """Text that some data sets have as a list of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _as_arguments(value: Any) -> list[Any]:
    """A list of arguments; in a string they are JSON, one per line."""
    if isinstance(value, str):
        return [_as_value(line) for line in value.splitlines()]
    return value if isinstance(value, list) else [value]


def _as_value(value: Any) -> Any:
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return json.loads(value)
    return value


def same_text(output: str, expected: str) -> bool:
    """Compare line by line and word by word. Where a number is expected with a decimal point, a
    number within TOLERANCE is accepted."""
    lines, wanted = (
        [line.split() for line in text.strip().splitlines()] for text in (output, expected)
    )
    return [len(line) for line in lines] == [len(line) for line in wanted] and all(
        all(map(_same_word, *pair)) for pair in zip(lines, wanted, strict=True)
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
    return math.isclose(value, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
