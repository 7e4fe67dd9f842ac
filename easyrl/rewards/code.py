"""The reward `code`: run a completion's program against the unit tests of its row.

    completion ──► its program (code_blocks) ──► sandbox ──► outputs ──► compared here ──► score

docs/rewards.md lists the forms of the column `tests`. Expected outputs never enter the sandbox;
Python tests run there in a process of their own, which the program cannot reach. What is right is
what the data sets' own graders accept; facts about them are from LiveCodeBench's `testing_util.py`,
that of APPS (hendrycks/apps, eval/), which TACO shares, and that of PRIME (verl, `prime_code`).
"""

import ast
import contextlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from easyrl.config import Config, ConfigError, RewardConfig
from easyrl.data.values import is_missing
from easyrl.processes import allow_long_integers
from easyrl.rewards import sandbox
from easyrl.rewards.code_blocks import find_program
from easyrl.rewards.code_names import names_used
from easyrl.rewards.functions import Completions, final_text

FORMS = (
    'column tests: expected Python code or a list of it, {"inputs": [...], "outputs": [...]} (with '
    '"fn_name" for function calls), or a list of {"input": ..., "output": ...}'
)
TOLERANCE = 1e-6  # relative and absolute; for numbers whose expected value has a decimal point
MAX_LENGTH = 2**20  # of outputs in characters, and eight times the expected length
OPTIONAL_COLUMNS = ("entry_point", "test_imports", "test_setup_code")


@dataclass(frozen=True, slots=True)
class Suite:
    """The tests of a row. An example of each kind:

    asserts    tests ["assert add(1, 2) == 3"],  expected ["passed"]
    stdin      tests ["1 2\\n"],                 expected ["3\\n"]
    function   tests [[1, 2]],                   expected [[3]], function "add"
    """

    kind: Literal["asserts", "stdin", "function"]
    tests: list[Any]  # sources; standard inputs; or argument lists
    expected: list[Any]  # outputs; lists of values of which each is right; of asserts "passed"
    function: str | None = None  # to call; of asserts the entry point for `check`
    has_integer_keys: bool = False
    """Whether JSON has made strings of the integer keys of a dictionary, the first argument."""

    @property
    def has_usual_names(self) -> bool:
        """Whether programs need not import usual names. Graders of contest problems import them;
        where there is an entry point (HumanEval), the row's prompt does. MBPP has neither."""
        return self.kind != "asserts" or self.function is not None

    def passes(self, program: str, settings: RewardConfig) -> bool:
        """Run all tests; return whether all passed. Raises SandboxError if nothing can be run."""
        job = {
            "kind": self.kind,
            "tests": self.tests,
            "function": self.function,
            "has_integer_keys": self.has_integer_keys,
            "program": program,
            "names": names_used(program) if self.has_usual_names else {},
        }
        outputs = sandbox.run(job, settings.code_sandbox, settings.code_timeout_seconds)
        texts = [output for output in outputs if output is not None]  # None: the program failed
        if len(texts) != len(self.tests):
            return False
        return all(map(self._is_right, texts, self.expected))

    def _is_right(self, output: str, expected: Any) -> bool:
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
    scores: list[float | None] = []
    for index, completion in enumerate(completions):
        row = {name: columns[name][index] for name in OPTIONAL_COLUMNS if name in columns}
        suite = None if is_missing(tests[index]) else read_tests(tests[index], row)
        program = program_of(final_text(completion))
        scores.append(None if suite is None else float(suite.passes(program, settings)))
    return scores


def program_of(text: str) -> str:
    """Return the program in a block of code; without one the whole text."""
    program = find_program(text)
    return text if program is None else program


def check_code(config: Config, columns: Mapping[str, Any]) -> None:
    """Check the time limits, the first row and the sandbox before a run. Raises ConfigError."""
    reward = config.reward
    limit = reward.timeout_seconds or config.runtime.timeout_seconds
    if reward.code_timeout_seconds >= limit:
        raise ConfigError(
            f"reward.code_timeout_seconds: expected less than {limit:g}, the limit of a call "
            "(reward.timeout_seconds, by default runtime.timeout_seconds), got "
            f"{reward.code_timeout_seconds:g}"
        )
    try:
        if not is_missing(columns["tests"]):
            read_tests(columns["tests"], columns)
        sandbox.find_variant(reward.code_sandbox)
    except sandbox.SandboxError as error:
        raise ConfigError(f"reward.code_sandbox={reward.code_sandbox}: {error}") from None
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
        if {"inputs", "outputs"} <= tests[0].keys():
            (pairs,) = tests
            return _read_apps(pairs["inputs"], pairs["outputs"], pairs.get("fn_name"))
        function = tests[0].get("fn_name") or (tests[0].get("metadata") or {}).get("func_name")
        if "function" in str(tests[0].get("testtype") or tests[0].get("type")):
            function = function or columns["entry_point"]
        inputs = [test["input"] for test in tests]
        outputs = [test["output"] for test in tests]
        if tests[0].get("testtype") is None:  # others have this form, too
            return _read_apps(inputs, outputs, function)
        return _read_livecodebench(inputs, outputs, function)
    except (IndexError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{FORMS}, got {tests!r:.80} ({error!r})") from None


def _read_asserts(sources: Sequence[str], columns: Mapping[str, Any]) -> Suite:
    entry_point = columns.get("entry_point") or None
    try:
        trees = [ast.parse(source) for source in sources]
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{FORMS}, got {sources!r:.80} ({error})") from None
    called = ("test", "check") if entry_point else ("test",)

    def runs_something(node: ast.stmt) -> bool:
        if isinstance(node, ast.FunctionDef):
            return node.name.startswith(called)
        return not isinstance(node, (ast.Import, ast.ImportFrom, ast.Assign))

    if not any(runs_something(node) for tree in trees for node in tree.body):
        raise ValueError(
            "column tests: expected an assert, a call, a function test_*, or check(candidate) and "
            f"a column entry_point, got {sources[0]!r:.80}"
        )
    setup = [_as_text(columns.get(name) or "") for name in OPTIONAL_COLUMNS[1:]]
    tests = ["\n".join([*setup, source]) for source in sources]
    return Suite("asserts", tests, ["passed"] * len(tests), entry_point)


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
    arguments = list(map(_as_arguments, inputs))
    expected = list(map(_right_values, outputs))
    return Suite("function", arguments, expected, function, has_integer_keys=True)


def _check_pairs(inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")


def _read_stdin(inputs: Sequence[Any], outputs: Sequence[Any]) -> Suite:
    return Suite("stdin", list(map(_as_text, inputs)), list(map(_as_text, outputs)))


def _as_arguments(value: Any) -> list[Any]:
    """A list of arguments; in a string they are JSON, one per line."""
    if isinstance(value, str):
        lines = value.rstrip("\n").split("\n") if value.strip() else []
        return list(map(_as_value, lines))
    return value if isinstance(value, list) else [value]


def _right_values(output: Any) -> list[Any]:
    """Return all values that an expected value of APPS stands for: the string "1" also for 1."""
    values = [output]
    if isinstance(output, str) and _as_value(output) != output:
        values.append(_as_value(output))
    wrapped = [value[0] for value in values if isinstance(value, list) and len(value) == 1]
    return values + wrapped


def _as_text(value: Any) -> str:
    """Text that some data sets have as a list of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _as_value(value: Any) -> Any:
    """The value of JSON; what is none stays as it is. Raises ValueError for a longer integer than
    MAX_INT_DIGITS."""
    if isinstance(value, str):
        with contextlib.suppress(json.JSONDecodeError):
            return json.loads(value)
    return value


def same_text(output: str, expected: str) -> bool:
    """Compare line by line and word by word. Numbers with a decimal point are compared by value:
    within TOLERANCE where the expected one has the point."""
    lines = [line.split() for line in output.strip().splitlines()]
    expected_lines = [line.split() for line in expected.strip().splitlines()]
    if list(map(len, lines)) != list(map(len, expected_lines)):
        return False
    words = itertools.chain(*lines)
    expected_words = itertools.chain(*expected_lines)
    return all(map(_same_word, words, expected_words))


def _same_word(word: str, expected: str) -> bool:
    if word == expected or ("." not in word and "." not in expected):
        return word == expected
    try:
        if "." in expected:
            return _is_close(float(word), float(expected))
        return Decimal(word) == Decimal(expected)  # exact: `3.0` is 3
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
    """Compare as Python does (1, 1.0 and True are equal), and floats within TOLERANCE."""
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(_is_same, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(
            _is_same(value[key], expected[key]) for key in value
        )
    if isinstance(value, float) and isinstance(expected, float):
        return _is_close(value, expected)
    return bool(value == expected)


def _is_close(value: float, expected: float) -> bool:
    return math.isclose(value, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
