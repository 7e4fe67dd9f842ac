"""The reward `code`: run a completion's program against the unit tests of its row.

    completion ──► its last ```python block ──► sandbox ──► outputs ──► compared here ──► score

docs/rewards.md lists the forms of the column `tests`. Expected outputs never enter the sandbox;
Python tests run there in a process of their own, which the program cannot reach.
"""

import ast
import contextlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from easyrl.config import Config, ConfigError, RewardConfig
from easyrl.rewards import sandbox
from easyrl.rewards.functions import Completions, final_text
from easyrl.types import is_missing

BLOCK = re.compile(
    r"^[ \t]*```[ \t]*(?:python3?|py)\b[^\n]*\n(.*?)(?:^[ \t]*```|\Z)",
    re.DOTALL | re.MULTILINE | re.IGNORECASE,
)
FORMS = (
    'column tests: expected Python code or a list of it, {"inputs": [...], "outputs": [...]} (with '
    '"fn_name" for function calls), or a list of {"input": ..., "output": ...}'
)
TOLERANCE = 1e-6  # relative and absolute; for numbers whose expected value has a decimal point
MAX_LENGTH = 2**20  # of outputs in characters, and eight times the expected length
OPTIONAL_COLUMNS = ("entry_point", "test_imports", "test_setup_code")


@dataclass(frozen=True, slots=True)
class Suite:
    kind: Literal["asserts", "stdin", "function"]
    tests: list[Any]  # sources; standard inputs; or argument lists
    expected: list[Any]  # outputs; return values; of asserts "passed"
    function: str | None = None  # to call; of asserts the entry point for `check`

    def passes(self, program: str, settings: RewardConfig) -> bool:
        """Run all tests; return whether all passed. Raises SandboxError if nothing can be run."""
        job = {"kind": self.kind, "tests": self.tests, "function": self.function}
        job["program"] = program
        outputs = sandbox.run(job, settings.code_sandbox, settings.code_timeout_seconds)
        texts = [output for output in outputs if output is not None]  # None: the program failed
        if len(texts) != len(self.tests):
            return False
        same = same_value if self.kind == "function" else same_text
        return all(
            len(text) <= MAX_LENGTH + 8 * len(repr(expected)) and same(text, expected)
            for text, expected in zip(texts, self.expected, strict=True)
        )


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
    """Return the last ```python block, closed or not; without one the whole text."""
    blocks = BLOCK.findall(text)
    return str(blocks[-1]) if blocks else text


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
    if isinstance(tests, str) and tests.lstrip()[:1] in ("{", "["):
        with contextlib.suppress(ValueError):  # Python code may begin like this, too
            tests = json.loads(tests)
    tests = tests if isinstance(tests, list) else [tests]
    if tests and all(isinstance(test, str) for test in tests):
        return _read_asserts(tests, columns)
    try:
        if {"inputs", "outputs"} <= tests[0].keys():
            (pairs,) = tests
            return _read_pairs(pairs["inputs"], pairs["outputs"], pairs.get("fn_name"))
        function = tests[0].get("fn_name") or (tests[0].get("metadata") or {}).get("func_name")
        if "function" in str(tests[0].get("testtype") or tests[0].get("type")):
            function = function or columns["entry_point"]
        inputs, outputs = ([test[key] for test in tests] for key in ("input", "output"))
        return _read_pairs(inputs, outputs, function)
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


def _read_pairs(inputs: Sequence[Any], outputs: Sequence[Any], function: str | None) -> Suite:
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")
    if function is None:
        return Suite("stdin", list(map(_as_text, inputs)), list(map(_as_text, outputs)))
    arguments, expected = list(map(_as_arguments, inputs)), list(map(_as_value, outputs))
    return Suite("function", arguments, expected, function)


def _as_arguments(value: Any) -> list[Any]:
    """A list of arguments; in a string they are JSON, one per line."""
    if isinstance(value, str):
        return [_as_value(line) for line in value.splitlines()]
    return value if isinstance(value, list) else [value]


def _as_text(value: Any) -> str:
    """Text that some data sets have as a list of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _as_value(value: Any) -> Any:
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return json.loads(value)
    return value


def same_text(output: str, expected: str) -> bool:
    """Compare line by line and word by word. Where a number is expected with a decimal point, a
    number within TOLERANCE is accepted."""
    pair = output.strip(), expected.strip()
    lines, wanted_lines = ([line.split() for line in text.splitlines()] for text in pair)
    return list(map(len, lines)) == list(map(len, wanted_lines)) and all(
        all(map(_same_word, *words)) for words in zip(lines, wanted_lines, strict=True)
    )


def _same_word(word: str, wanted: str) -> bool:
    if word == wanted or "." not in wanted:
        return word == wanted
    try:
        return _is_close(float(word), float(wanted))
    except ValueError:
        return False


def same_value(output: str, expected: Any) -> bool:
    """Compare a return value, as JSON, with the expected one, which APPS may wrap in a list."""
    try:
        value = json.loads(output)
    except (ValueError, RecursionError):
        return False
    return _is_same(value, expected) or _is_same([value], expected)


def _is_same(value: Any, expected: Any) -> bool:
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(_is_same, value, expected))
    if isinstance(value, float) and isinstance(expected, float):
        return _is_close(value, expected)
    types = type(value), type(expected)
    return (types[0] is types[1] or types == (int, float)) and bool(value == expected)


def _is_close(value: float, expected: float) -> bool:
    return math.isclose(value, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
