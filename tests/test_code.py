"""The reward `code`: every form of tests, right programs in all of them, clear errors."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any

import pytest
from reward_pools import config_of, finished, needs_bwrap

from easyrl.config import ConfigError
from easyrl.rewards import sandbox
from easyrl.rewards.code import program_of, read_tests, same_text, same_value
from easyrl.rewards.loading import check_rewards, load_reward
from easyrl.rewards.pool import RewardPool
from easyrl.rewards.worker import Call
from easyrl.types import Prompt

ADD = "def add(a, b):\n    return a + b"
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(-1, 1) == 0\n"


def score(answer: str, tests: Any, /, **row: Any) -> float | None:
    function = load_reward("code", config_of("code"))
    columns = {name: [value] for name, value in {"tests": tests, **row}.items()}
    (found,) = function(prompts=["q"], completions=[answer], completion_ids=[[1]], **columns)
    return found  # type: ignore[no-any-return]


def fenced(code: str) -> str:
    return f"Let me think.\n```python\n{code}\n```\nThat is it."


def prints(output: str) -> dict[str, list[str]]:
    return {"inputs": [""], "outputs": [output]}


HONEST: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "list of asserts": (ADD, ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"], {}),
    "HumanEval": (ADD, CHECK, {"entry_point": "add"}),
    "a method as entry point": (
        "class Solution:\n    def add(self, a, b): return a + b",
        CHECK,
        {"entry_point": "Solution().add"},
    ),
    "MBPP with imports": (
        "import math\ndef area(r): return math.pi * r * r",
        ["assert math.isclose(area(1), pi)"],
        {"test_imports": ["import math"], "test_setup_code": "from math import pi"},
    ),
    "imported as solution": (
        ADD,
        "from solution import add\nimport solution\n"
        "def test_add():\n    assert add(1, 2) == solution.add(2, 1) == 3",
        {},
    ),
    "unittest": (
        ADD,
        "import unittest\nclass TestAdd(unittest.TestCase):\n"
        "    def test_it(self): self.assertEqual(add(1, 2), 3)\n"
        "    def test_error(self):\n"
        "        with self.assertRaises(TypeError): add(1, 'a')",
        {},
    ),
    "numbers and words": (
        "print(sum(map(int, input().split())))",
        json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", ["7"]]}),
        {},
    ),
    "LiveCodeBench": ("print(int(input()) + 1)", [{"input": "1", "output": "2"}], {}),
    "LiveCodeBench's functions": (
        "from typing import List\nclass Solution:\n"
        "    def total(self, nums: List[int], start: int) -> int: return sum(nums) + start",
        [{"input": "[1, 2]\n3", "output": "6", "testtype": "functional"}],
        {"entry_point": "total"},
    ),
    "APPS's functions": (
        "def pair(a, b): return (a, b)",
        {"fn_name": "pair", "inputs": [[1, "x"], [[], None]], "outputs": [[1, "x"], [[[], None]]]},
        {},
    ),
    "a function of one argument": (
        "def inc(n): return n + 1",
        {"fn_name": "inc", "inputs": [5, 7], "outputs": [6, 8]},
        {},
    ),
    "values that equal literals": (
        "import collections, enum, fractions\nimport numpy as np\n"
        "class Color(str, enum.Enum): RED = 'red'\n"
        "Pair = collections.namedtuple('Pair', 'x y')\n"
        "def values(): return [collections.Counter('aab'), Pair(1, -2.5), np.int64(3), Color.RED,"
        " set(), frozenset('a'), fractions.Fraction(1, 2), True, None, {(1,): [b'x', 2j]}, 'é\\n']",
        "def test_values():\n    assert values() == [{'a': 2, 'b': 1}, (1, -2.5), 3, 'red', set(),"
        " {'a'}, 0.5, 1, None, {(1,): [b'x', 2j]}, 'é\\n'], 'message'",
        {},
    ),
    "asserts of other forms": (
        ADD,
        "def check(candidate):\n    for a in range(3):\n        assert candidate(a, 1) == a + 1\n"
        "    assert candidate(1, 2) < 4\n    assert candidate([], []) == []\n"
        "    values = [2]\n    values += candidate([1], [3])\n    assert values == [2, 1, 3]\n"
        "def test_stops():\n    if add(1, 1) == 2: return\n    assert add(1, 1) == 3\n"
        "def test_stops(again=1):\n    assert 3 == add(1, 2) == 3\n"
        "check(add)\ncheck(lambda a, b: a + b)",
        {},
    ),
    "recursion": (
        "import sys\nsys.setrecursionlimit(20000)\n"
        "def depth(n): return 0 if n == 0 else 1 + depth(n - 1)",
        "assert depth(15000) == 15000",
        {},
    ),
    "unicode": ("print(input()[::-1])", {"inputs": ["añ→😀"], "outputs": ["😀→ña"]}, {}),
    "much output": (
        "for number in range(50000): print(number)", prints("\n".join(map(str, range(50000)))), {}
    ),
    "exit with 0": ("print(3)\nraise SystemExit", prints("3"), {}),
    "work of a thread and at exit": (
        "import atexit, threading\natexit.register(lambda: print('bye'))\n"
        "threading.Thread(target=lambda: print('hi')).start()",
        prints("hi\nbye"),
        {},
    ),
    "files and processes of its own": (
        "import subprocess, sys, tempfile\nwith tempfile.NamedTemporaryFile('w+') as file:\n"
        "    file.write('3')\n    file.seek(0)\n    print(file.read())\n"
        "with open('here', 'w') as file: file.write('x')\n"
        "print(subprocess.check_output([sys.executable, '-c', 'print(4)'], text=True))",
        prints("3\n4"),
        {},
    ),
    "NumPy": (
        "import numpy as np\ndef means(values): return np.mean(values, axis=0)\n"
        "def largest(values): return np.max(values)",
        "import numpy as np\nassert np.allclose(means([[1, 2], [3, 4]]), [2, 3])\n"
        "assert largest([1, 2]) == 2",
        {},
    ),
}  # fmt: skip


@needs_bwrap
@pytest.mark.parametrize("name", HONEST)
def test_right_programs_pass(name):
    answer, tests, row = HONEST[name]
    assert score(fenced(answer), tests, **row) == 1.0


EQUAL = """
class Equal:
    __eq__ = __lt__ = __ge__ = lambda *_: True
    __hash__ = lambda self: 0
    __repr__ = __str__ = lambda self: "3"
class Number(int):
    __eq__ = lambda *_: True
    __hash__ = int.__hash__
    __repr__ = __str__ = lambda self: "3"
"""
FIND = """
import gc, json, os, sys
jobs = gc.get_objects() + [*sys._getframe(1).f_locals.values()]
jobs = [each for each in jobs if type(each) is dict and "token" in each]
token, out = jobs[-1]["token"], [fd for fd in range(3, 64) if os.path.exists(f"/dev/fd/{fd}")]
def leave(data):
    for fd in out[:2]:
        os.truncate(fd, 0)
        os.pwrite(fd, data, 0)
    os._exit(0)
"""
FORGERIES = {
    "equals everything": EQUAL + "add = lambda *_: Equal()",
    "a number that equals everything": EQUAL + "add = lambda *_: Number(4)",
    "finds the token": FIND + "leave(token.encode())",
    "the form without values": FIND + "leave(f'{token!r}, []'.encode())",
    "values of other types": FIND + "leave(f'{token!r}, [(0, [3]), (1, None)]'.encode())",
    "an index that is no number": FIND + "leave(f'{token!r}, [([], 3)]'.encode())",
    "too many brackets": FIND + "leave(b'[' * 200000)",
    "minus signs": FIND + "leave(b'-' * 1000000)",
    "bytes": FIND + "leave(bytes(range(256)) * 1000)",
    "60 MiB": FIND + "leave(b'[0],' * (15 << 20))",
    "a line of the runner": FIND + "leave(json.dumps({'output': 5}).encode())",
    "other writes": "import os\nwrite = os.write\n"
    "os.write = lambda fd, data: write(fd, data.replace(b'4', b'3'))\n"
    "def add(a, b): return [4]",
    "patched built-ins": "import builtins\nbuiltins.isinstance = lambda *_: True\n"
    "def add(a, b): return 4",
    "half a surrogate": "def add(a, b): return '\\ud800'",
    "too deep": "def add(a, b):\n    x = 3\n    for _ in range(200000): x = [x]\n    return x",
    "a list of itself": "def add(a, b):\n    x = []\n    x.append(x)\n    return x",
    "a number of 10,000 digits": "def add(a, b): return 10**10000",
    "an exception of its own": "class E(BaseException): __str__ = None\ndef add(a, b): raise E",
    "zero bytes": "\0",
    "no text": "\ud800",
}
ADDS: dict[str, Any] = {
    "assert": "assert add(1, 2) == 3",
    "test": "def test_add():\n    assert add(1, 2) == 3",
    "function": {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]},
    "stdin": {"inputs": ["1 2"], "outputs": ["3"]},
}


@needs_bwrap
@pytest.mark.parametrize("tests", ADDS)
def test_forged_results_are_failed_tests(tests):
    passed = {name: score(program, ADDS[tests]) for name, program in FORGERIES.items()}
    assert {name for name, each in passed.items() if each} == set()
    assert score(ADD + "\nprint(sum(map(int, input().split())))" * (tests == "stdin"), ADDS[tests])


@needs_bwrap
def test_wrong_programs_score_0():
    """`numbers and words`: the first test passes, the second does not."""
    wrong = fenced("def add(a, b): return 4\ndef pair(a, b): return (b, a)\nprint(3)")
    for name in ("list of asserts", "HumanEval", "unittest", "APPS's functions"):
        _, tests, row = HONEST[name]
        assert score(wrong, tests, **row) == 0.0
    assert score(wrong, HONEST["numbers and words"][1]) == 0.0
    for value in ("(1, 2)", "[1, 2.5]", "[1]", "'[1, 2]'", "[1, '2']"):
        assert score(f"def f(): return {value}", "assert f() == [1, 2]") == 0.0


@needs_bwrap
def test_a_draft_in_the_thinking_is_no_program():
    draft = f"<think>{fenced(ADD)}"
    assert score(draft, "assert add(1, 2) == 3") == 0.0
    assert score(f"{draft}</think>I do not know.", "assert add(1, 2) == 3") == 0.0
    assert score(f"{draft}</think>{fenced(ADD)}", "assert add(1, 2) == 3") == 1.0


def test_rows_without_tests_have_no_score():
    assert [score(fenced(ADD), missing) for missing in (None, "", float("nan"))] == [None] * 3


def test_the_last_python_block_is_the_program():
    assert program_of("a = 1") == "a = 1"
    assert program_of("```python\na = 1\n```\nor\n```python\nb = 2\n```\nso.") == "b = 2\n"
    assert program_of("```bash\nls\n```\n```Python3\na = 1\n```") == "a = 1\n"
    assert program_of("cut off:\n```py\na = 1\nb = ") == "a = 1\nb = "
    assert program_of("```\nls\n```") == "```\nls\n```"


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        (None, "None"),
        ([1, 2], r"got \[1, 2\]"),
        ("assert add(1,", "assert add"),
        ("import math\nx = 3\ndef f(): pass", "assert, a call"),
        (CHECK, "entry_point"),
        ({"inputs": ["1"]}, "inputs"),
        ({"inputs": ["1"], "outputs": ["2", "3"]}, "outputs"),
        ([{"input": "1"}], "input"),
        ([{"input": "1", "output": "2", "testtype": "functional"}], "fn_name"),
    ],
)
def test_tests_that_cannot_be_used_are_refused(tests, message):
    with pytest.raises(ValueError, match=message):
        read_tests(tests, {})


def test_outputs_are_compared_by_lines_and_numbers():
    assert same_text("1 2 \n3\n\n", "1 2\n3")
    assert not same_text("1\n2", "1 2") and not same_text("1", "1.0\n2") and not same_text("", "1")
    assert same_text("0.50000001", "0.5") and not same_text("0.51", "0.5")
    assert not same_text("10000001", "10000000") and not same_text("x", "1.5")
    assert same_value("[1, [0.30000000000000004, 2]]", [1, [0.3, 2.0]])
    assert same_value('{"a": 1}', {"a": 1}) and same_value("1", [1])
    assert not same_value("true", 1) and not same_value("[1]", [1, 2]) and not same_value("1", "1")
    assert not same_value("1" * 400, 1.0) and not same_value("[" * 10**6, 1)


@needs_bwrap
def test_run_is_refused_before_it_starts(monkeypatch):
    example = Prompt(0, "q", {"tests": "assert add(1, 2) == 3"})
    check_rewards(config_of("code", rollout__num_generations=16), example)
    check_rewards(config_of("code"), Prompt(0, "q", {"tests": None}))  # other rows may have some
    for columns, message in (
        ({"other": "x"}, r"'tests'; the data has: other"),
        ({"tests": "assert add("}, r"column tests"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_rewards(config_of("code"), Prompt(0, "q", columns))
    for key in ("reward__timeout_seconds", "runtime__timeout_seconds"):
        config = config_of("code", reward__code_timeout_seconds=9, **{key: 9})
        with pytest.raises(ConfigError, match=r"^reward.code_timeout_seconds: .*\(reward.timeout_"):
            check_rewards(config, example)
    monkeypatch.setattr(sandbox, "_bwrap_command", lambda variant: ["no-such-bwrap"])
    monkeypatch.setattr(sandbox, "find_variant", sandbox.find_variant.__wrapped__)
    options = r"(?s)reward.code_sandbox=bwrap: .*docker run .*reward.code_sandbox=limits"
    with pytest.raises(ConfigError, match=options):
        check_rewards(config_of("code"), example)


@needs_bwrap
def test_slow_programs_of_a_group_cost_only_their_own_score():
    """Together the 16 completions would take longer than the limit of a call."""
    config = config_of("code", reward__code_timeout_seconds=2, reward__timeout_seconds=10)
    completions = [fenced("while True: pass"), fenced(ADD)] * 8
    with closing(RewardPool(config)) as pool:
        pool.submit(0, Call([], completions, [[1]] * 16, {"tests": "assert add(1, 2) == 3"}))
        ((scores, errors, *_),) = finished(pool, 1)
    assert scores == [[0.0, 1.0] * 8] and not errors
