"""The reward `code`: run a completion's program against the unit tests of its row.

    completion ──► its program (code_blocks) ──► sandbox ──► outputs ──► compared here ──► score

docs/rewards.md lists the forms of the column `tests`. Expected outputs never enter the sandbox;
Python tests run there in a process of their own, which the program cannot reach. What is right is
what the data sets' own graders accept; facts about them are from LiveCodeBench's `testing_util.py`,
that of APPS (hendrycks/apps, eval/), which TACO shares, and that of PRIME (verl, `prime_code`).
"""

import ast
import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from easyrl.config import ConfigError, RewardConfig
from easyrl.config.spec import RewardSpec
from easyrl.data.values import is_missing
from easyrl.processes import allow_long_integers
from easyrl.rewards import sandbox
from easyrl.rewards.code_blocks import find_program
from easyrl.rewards.code_names import names_used, slow_imports
from easyrl.rewards.functions import Completions, final_text
from easyrl.types import Prompt

FORMS = (
    'column tests: expected Python code or a list of it, {"inputs": [...], "outputs": [...]} (with '
    '"fn_name" for function calls), or a list of {"input": ..., "output": ...}'
)
TOLERANCE = 1e-6
"""Relative and absolute tolerance for numbers whose expected value has a decimal point."""
MAX_LENGTH = 2**20
"""Characters of an output that are read, beside eight times the expected length."""
SETUP_COLUMNS = ("test_imports", "test_setup_code")
OPTIONAL_COLUMNS = ("entry_point", "metadata", *SETUP_COLUMNS)
"""Columns that are read beside `tests`. In LiveCodeBench's rows `metadata` is JSON."""


DEFINITIONS = (
    ast.Import,
    ast.ImportFrom,
    ast.Assign,
    ast.AnnAssign,
    ast.AugAssign,
    ast.AsyncFunctionDef,
    ast.Pass,
)
"""Statements that run nothing of a program, beside functions and classes that nobody calls."""


@dataclass(frozen=True, slots=True)
class Suite:
    """The tests of a row. An example of each kind:

    asserts    tests ["assert add(1, 2) == 3"],  expected ["passed"]
    stdin      tests ["1 2\\n"],                 expected ["3\\n"]
    function   tests [[1, 2]],                   expected [[3]], function "add"
    """

    kind: Literal["asserts", "stdin", "function"]
    tests: list[Any]
    """Sources of Python, standard inputs, or lists of arguments, by the kind."""
    expected: list[Any]
    """For each test: "passed", the output, or a list of values of which each is right."""
    function: str | None = None
    """The function that is called; with asserts the entry point, the argument of `check`."""
    has_integer_keys: bool = False
    """Whether the first argument may be a dictionary whose integer keys JSON has made strings."""

    @property
    def has_usual_names(self) -> bool:
        """Whether programs may use the names of `code_names` without importing them. Graders of
        contest problems import these names; where there is an entry point (HumanEval), the row's
        prompt does. Neither is true of MBPP."""
        return self.kind != "asserts" or self.function is not None

    def passes(self, program: str, settings: RewardConfig) -> bool:
        """Run all tests; return whether all passed. Raises SandboxError if nothing can be run."""
        names = names_used(program) if self.has_usual_names else {}
        slow: list[str] = []
        # Of Python tests a generator of random numbers would be the program's, too.
        if self.kind != "asserts" and len(self.tests) > 1:
            slow = slow_imports(program)
            if "np" in names:
                slow.append("numpy")
        job = {
            "kind": self.kind,
            "tests": self.tests,
            "function": self.function,
            "has_integer_keys": self.has_integer_keys,
            "program": program,
            "names": names,
            "slow_imports": slow,
        }
        outputs = sandbox.run(job, settings.code_sandbox, settings.code_timeout_seconds)
        if len(outputs) != len(self.tests):  # some were not reached
            return False
        return all(map(self._is_right, outputs, self.expected))

    def _is_right(self, output: str | None, expected: Any) -> bool:
        if output is None:  # the program failed
            return False
        if len(output) > MAX_LENGTH + 8 * len(repr(expected)):
            return False
        if self.kind == "function":
            return any(same_value(output, value) for value in expected)
        return same_text(output, expected)


def code(
    settings: RewardConfig, /, completions: Completions, tests: Sequence[Any], **columns: Any
) -> list[float | None]:
    """Score 1.0 where all tests pass, else 0.0; None where the row has none. Raises ValueError for
    tests that cannot be used, and SandboxError if nothing can be run."""
    given = [name for name in OPTIONAL_COLUMNS if name in columns]
    scores: list[float | None] = []
    for index, completion in enumerate(completions):
        if is_missing(tests[index]):
            scores.append(None)
            continue
        row = {name: columns[name][index] for name in given}
        suite = read_tests(tests[index], row)
        program = program_of(final_text(completion))
        has_passed = suite.passes(program, settings)
        scores.append(float(has_passed))
    return scores


def program_of(text: str) -> str:
    """Return the program in a block of code; without one the whole text."""
    program = find_program(text)
    return text if program is None else program


def check_code(rewards: RewardSpec, example: Prompt) -> None:
    """Check the time limits, the first row and the sandbox before a run. Raises ConfigError."""
    settings = rewards.options
    limit = rewards.timeout_seconds
    if settings.code_timeout_seconds >= limit:
        raise ConfigError(
            f"reward.code_timeout_seconds: expected less than {limit:g}, the limit of a call "
            "(reward.timeout_seconds, by default runtime.timeout_seconds), got "
            f"{settings.code_timeout_seconds:g}"
        )
    try:
        tests = example.columns["tests"]
        if not is_missing(tests):
            read_tests(tests, example.columns)
        sandbox.find_variant(settings.code_sandbox)
    except sandbox.SandboxError as error:
        raise ConfigError(f"reward.code_sandbox={settings.code_sandbox}: {error}") from None
    except ValueError as error:
        raise ConfigError(str(error)) from None


def read_tests(tests: Any, columns: Mapping[str, Any]) -> Suite:
    """Read tests in any of the forms; `columns` may have OPTIONAL_COLUMNS. Raises ValueError for
    anything else, and for tests that run nothing."""
    allow_long_integers()
    try:
        if isinstance(tests, str) and tests.lstrip()[:1] in ("{", "["):
            tests = _as_value(tests)  # Python code may begin like this, too
    except ValueError as error:
        raise ValueError(f"column tests: {error}") from None
    tests = tests if isinstance(tests, list) else [tests]
    if tests and all(isinstance(test, str) for test in tests):
        return _read_asserts(tests, columns)
    try:
        first = tests[0]
        if {"inputs", "outputs"} <= first.keys():
            (pairs,) = tests
            return _read_apps(pairs["inputs"], pairs["outputs"], pairs.get("fn_name"))
        function = _function_of(first, columns)
        inputs = [test["input"] for test in tests]
        outputs = [test["output"] for test in tests]
        is_of_livecodebench = first.get("testtype") is not None
        read = _read_livecodebench if is_of_livecodebench else _read_apps
        return read(inputs, outputs, function)
    except (IndexError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{FORMS}, got {tests!r:.80} ({error!r})") from None


def _function_of(test: Mapping[str, Any], columns: Mapping[str, Any]) -> str | None:
    """Return the name of the function that the tests call; None where programs read their standard
    input. Raises KeyError for calls of a function that nothing names."""
    named = test.get("fn_name") or _function_in_metadata(test)
    if named:
        return str(named)
    kind = str(test.get("testtype") or test.get("type"))
    if "function" not in kind:
        return None
    of_row = _function_in_metadata(columns) or columns.get("entry_point")
    if not of_row:
        raise KeyError("entry_point")
    return str(of_row)


def _function_in_metadata(row: Mapping[str, Any]) -> str | None:
    metadata = _as_value(row.get("metadata"))
    name = metadata.get("func_name") if isinstance(metadata, dict) else None
    return None if name is None else str(name)


def _read_asserts(sources: Sequence[str], columns: Mapping[str, Any]) -> Suite:
    entry_point = columns.get("entry_point") or None
    statements: list[ast.stmt] = []
    try:
        for source in sources:
            statements += ast.parse(source).body
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{FORMS}, got {sources!r:.80} ({error})") from None
    called = ("test", "check") if entry_point else ("test",)
    if not any(_runs_something(statement, called) for statement in statements):
        raise ValueError(
            "column tests: expected an assert, a call, a function test_*, a class Test*, or "
            f"check(candidate) and a column entry_point, got {sources[0]!r:.80}"
        )
    setup = ""
    for name in SETUP_COLUMNS:
        setup += _as_text(columns.get(name) or "") + "\n"
    tests = [setup + source for source in sources]
    return Suite("asserts", tests, ["passed"] * len(tests), entry_point)


def _runs_something(statement: ast.stmt, called: tuple[str, ...]) -> bool:
    """Return whether a statement of a test does more than to define names. `called`: beginnings of
    the names of functions that are called."""
    match statement:
        case ast.FunctionDef(name=name):
            return name.startswith(called)
        case ast.ClassDef(name=name, bases=bases, body=body):
            is_called = name.startswith("Test") or bases  # pytest's, or derived from unittest's
            return bool(is_called) and any(_is_test_method(each) for each in body)
        case ast.If(test=condition):
            return "__name__" not in ast.unparse(condition)  # it is "tests", not "__main__"
        case ast.Expr(value=ast.Constant()):  # such as a docstring
            return False
    return not isinstance(statement, DEFINITIONS)


def _is_test_method(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.FunctionDef) and statement.name.startswith("test")


def _read_livecodebench(
    inputs: Sequence[Any], outputs: Sequence[Any], function: str | None
) -> Suite:
    _check_pairs(inputs, outputs)
    if function is None:
        return _read_stdin(inputs, outputs)
    expected = [[_as_value(output)] for output in outputs]
    return Suite("function", list(map(_as_arguments, inputs)), expected, function)


def _read_apps(inputs: Sequence[Any], outputs: Sequence[Any], function: str | None) -> Suite:
    """Read tests of APPS, TACO and PRIME. Values are JSON, wrapped in a list, or plain strings."""
    _check_pairs(inputs, outputs)
    if function is None:
        return _read_stdin(inputs, outputs)
    return Suite(
        "function",
        tests=[*map(_as_arguments, inputs)],
        expected=[*map(_right_values, outputs)],
        function=function,
        has_integer_keys=True,
    )


def _check_pairs(inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")


def _read_stdin(inputs: Sequence[Any], outputs: Sequence[Any]) -> Suite:
    return Suite("stdin", list(map(_as_text, inputs)), list(map(_as_text, outputs)))


def _as_arguments(value: Any) -> list[Any]:
    """Return the list of arguments of a call. In a string they are JSON, one per line."""
    if isinstance(value, str):
        lines = value.rstrip("\n").split("\n") if value.strip() else []
        return list(map(_as_value, lines))
    return value if isinstance(value, list) else [value]


def _right_values(output: Any) -> list[Any]:
    """Return all values that an expected value of APPS stands for: the string "[1]" also for the
    list [1], and that for 1."""
    values = [output]
    from_json = _as_value(output)
    if isinstance(output, str) and from_json != output:
        values.append(from_json)
    for value in [*values]:
        if isinstance(value, list) and len(value) == 1:
            values.append(value[0])
    return values


def _as_text(value: Any) -> str:
    """Return the text of a value: some data sets have a list of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _as_value(value: Any) -> Any:
    """Read a string as JSON; return other values and other strings unchanged. Raises ValueError for
    an integer with more digits than MAX_INT_DIGITS."""
    if isinstance(value, str):
        with contextlib.suppress(json.JSONDecodeError):
            return json.loads(value)
    return value


def same_text(output: str, expected: str) -> bool:
    """Compare line by line and word by word. Numbers with a decimal point are compared by value:
    within TOLERANCE where the expected one has the point."""
    lines = output.strip().splitlines()
    expected_lines = expected.strip().splitlines()
    return len(lines) == len(expected_lines) and all(map(_same_line, lines, expected_lines))


def _same_line(line: str, expected: str) -> bool:
    words = line.split()
    expected_words = expected.split()
    return len(words) == len(expected_words) and all(map(_same_word, words, expected_words))


def _same_word(word: str, expected: str) -> bool:
    if word == expected or ("." not in word and "." not in expected):
        return word == expected
    try:
        if "." in expected:
            return _is_close(float(word), float(expected))
        return Decimal(word) == Decimal(expected)  # without rounding: 3.0 equals 3
    except (ValueError, ArithmeticError):
        return False


def same_value(output: str, expected: Any) -> bool:
    """Compare a return value, as JSON, with the expected one."""
    try:
        value = json.loads(output)
    except (ValueError, RecursionError):
        return False
    return _is_same(value, expected)


def _is_same(value: Any, expected: Any) -> bool:
    """Compare as Python does (1, 1.0 and True are equal), but numbers within TOLERANCE where the
    expected one is a float."""
    match value, expected:
        case list(), list():
            return _are_same_lists(value, expected)
        case dict(), dict():
            if value.keys() != expected.keys():
                return False
            return all(_is_same(value[key], expected[key]) for key in value)
        case int() | float(), float():
            with contextlib.suppress(OverflowError):  # the integer is larger than any float
                return _is_close(value, expected)
    return bool(value == expected)


def _are_same_lists(values: list[Any], expected: list[Any]) -> bool:
    if len(values) != len(expected):
        return False
    return all(map(_is_same, values, expected))


def _is_close(value: float, expected: float) -> bool:
    return math.isclose(value, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
