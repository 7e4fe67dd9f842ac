"""The reward `code`: every form of tests, right programs in all of them, clear errors."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from reward_pools import finished, needs_bwrap, rewards_of

from easyrl.config import ConfigError
from easyrl.events import Sample
from easyrl.processes import allow_long_integers
from easyrl.rewards import sandbox
from easyrl.rewards.code import program_of, read_tests, same_text, same_value
from easyrl.rewards.loading import check_rewards, load_reward
from easyrl.rewards.pool import RewardPool
from easyrl.rewards.worker import Call
from easyrl.runtime.metrics import no_program_warning
from easyrl.runtime.run_folder import read_lines
from easyrl.types import Prompt
from runs import SMALL, succeed, write_rows

ADD = "def add(a, b):\n    return a + b"
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(-1, 1) == 0\n"


def score(answer, tests, /, **row):
    function = load_reward("code", rewards_of("code"))
    columns = {name: [value] for name, value in {"tests": tests, **row}.items()}
    return function(prompts=["q"], completions=[answer], completion_ids=[[1]], **columns)[0]


def fenced(code):
    return f"Let me think.\n```python\n{code}\n```\nThat is it."


PROGRAM = """
import collections, datetime, enum, fractions
class EmptyError(Exception):
    def __init__(self, code): super().__init__(f"code {code}"); self.code = code
class Stack:
    def __init__(self, *items): self.items = [*items]
    def pop(self):
        if not self.items: raise EmptyError(7)
        return self.items.pop()
    push = lambda self, item: self.items.append(item) or self
    __add__ = lambda self, other: Stack(*self.items, *other.items)
    __eq__ = lambda self, other: self.items == other.items
    __lt__ = lambda self, other: self.items < other.items
    __getitem__ = lambda self, key: self.items[key]
    __setitem__ = lambda self, key, value: self.items.__setitem__(key, value)
    __hash__ = lambda self: 0
    __len__ = lambda self: len(self.items)
class Node:
    def __init__(self, value, next=None): self.value, self.next = value, next
Color = enum.Enum("Color", "RED GREEN")
Point = collections.namedtuple("Point", "x y")
def total(node): return node.value + total(node.next) if node else 0
def numbers(n): yield from range(n)
def apply(function, *values, **named): return function(*values, **named)
def adder(n): return lambda m: n + m
def sort(items, key=None): items.sort(key=key)
def grow(rows, pairs): rows[0].append(rows.pop()); pairs[len(pairs)] = {1}
def twice(function): return lambda *values: (function.__name__, function(function(*values)))
def queue(): return collections.deque("ab")
def others(): return datetime.date(2020, 2, 29), fractions.Fraction(1, 3), 10**5000, {1: 1e400}
"""
OBJECTS = """
import pytest
from solution import Stack
stack = Stack(1).push(2).push(3)
assert len(stack) == 3 and stack[0] == 1 and stack[1:] == [2, 3] and stack.items == [1, 2, 3]
assert list(stack) == sorted(stack) and 2 in stack and stack and not Stack() and stack.pop() == 3
assert isinstance(stack, Stack) and not isinstance(3, Stack) and len({Stack(1), Stack(1)}) == 1
assert Stack(1) + Stack(2) == stack != Stack(2) < Stack(3)
stack[0] = 4
assert stack.items == [4, 2]
with pytest.raises(EmptyError, match="code 7") as error: Stack().pop()
assert error.value.code == 7
node = Node(1)
node.next = Node(2)
class TestNode:
    def __init__(self, value, next): self.value, self.next = value, next
assert total(node) == 3 and total(TestNode(4, node)) == 7 and node.next is node.next
assert Color.RED.name == "RED" and Color["RED"] is Color.RED != Color.GREEN
assert Point(1, 2) == (1, 2) and Point(1, 2).y == 2
"""
FUNCTIONS = """
import datetime, fractions, itertools
assert [*numbers(3)] == [0, 1, 2] and next(numbers(9)) == 0 and sum(numbers(4), 1) == 7
assert [*itertools.islice(numbers(10**9), 2)] == [0, 1] and [*map(adder(1), (2, 3))] == [3, 4]
assert apply(lambda x, y: x + y, 1, y=2) == 3 and apply(int, "3") == 3 and apply(len, [1]) == 1
seen, words, rows, pairs = [], ["b", "aa"], [[1], 2], {}
first = rows[0]
sort(words)
assert words == ["aa", "b"]
sort(words, key=lambda word: seen.append(word) or len(word))
grow(rows, pairs=pairs)
assert words == ["b", "aa"] and seen == ["aa", "b"] and first is rows[0]
assert rows == [[1, 2]] and pairs == {0: {1}}
class OwnError(Exception): pass
def fails(): raise OwnError("why")
try: apply(fails)
except OwnError as error: assert error.args == ("why",)
@twice
def double(x): return 2 * x
assert double(3) == ("double", 12)
assert list(queue()) == ["a", "b"]
assert others() == (datetime.date(2020, 2, 29), fractions.Fraction(1, 3), 10**5000, {1: 1e999})
"""
COLLECTIONS = """
from collections import OrderedDict, defaultdict, deque
def reached(graph, start):
    found, waiting = [], deque([start])
    while waiting:
        node = waiting.popleft()
        found.append(node)
        waiting.extend(graph[node])
    return found
def rotate(items): items.rotate(1)
def last(number, values): return deque(values, number)
def count(words):
    table = defaultdict(int)
    for word in words: table[word] += 1
    return table
def connect(graph, *edge): graph[edge[0]].append(edge[1])
def first_to_end(table): table.move_to_end(next(iter(table)))
def flip(data): data[0] ^= 1
"""
TEST_COLLECTIONS = """
from collections import OrderedDict, defaultdict, deque
graph = defaultdict(list)
graph[1] += [2, 3]
assert reached(graph, 1) == [1, 2, 3] and graph == {1: [2, 3], 2: [], 3: []}
neighbours = graph[2]
connect(graph, 2, 4)
connect(graph, 5, 6)
assert neighbours == [4] and graph[5] == [6] and graph[9] == []
numbered = defaultdict(lambda: [0])
connect(numbered, 1, 2)
assert numbered == {1: [0, 2]} and numbered[3] == [0]
items = deque([1, 2, 3], maxlen=4)
rotate(items)
assert items == deque([3, 1, 2]) and items.maxlen == 4
assert last(2, [1, 2, 3]) == deque([2, 3]) and last(2, [1, 2, 3]).maxlen == 2
assert count("aab") == {"a": 2, "b": 1}
table = OrderedDict(a=1, b=2)
first_to_end(table)
assert [*table] == ["b", "a"]
data = bytearray(b"\\x02")
flip(data)
assert data == b"\\x03"
"""
HONEST = {  # a program, its tests, and further columns of the row
    "list of asserts": (ADD, ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"]),
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
    ),
    "unittest": (
        ADD,
        "import unittest\nclass TestAdd(unittest.TestCase):\n"
        "    def test_it(self): self.assertEqual(add(1, 2), 3)\n"
        "    def test_error(self):\n"
        "        with self.assertRaises(TypeError): add(1, 'a')",
    ),
    "numbers and words": (
        "print(sum(map(int, input().split())))",
        json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", ["7"]]}),
    ),
    "LiveCodeBench": ("print(int(input()) + 1)", [{"input": "1", "output": "2"}]),
    "LiveCodeBench's functions": (
        "from typing import List\nclass Solution:\n"
        "    def total(self, nums: List[int], start: int) -> int: return sum(nums) + start",
        [{"input": "[1, 2]\n3", "output": "6", "testtype": "functional"}],
        {"entry_point": "total"},
    ),
    "LiveCodeBench's functions, named in a column of JSON": (
        "class Solution:\n    def total(self, nums): return sum(nums)",
        '[{"input": "[1, 2]", "output": "3", "testtype": "functional"}]',
        {"metadata": '{"func_name": "total"}'},
    ),
    "DeepCoder's functions, named in JSON": (
        "def total(nums): return sum(nums)",
        [
            {
                "input": "[1, 2]",
                "output": "3",
                "testtype": "functional",
                "metadata": '{"func_name": "total"}',
            }
        ],
    ),
    "APPS's functions": (
        "def pair(a, b): return (a, b)",
        {"fn_name": "pair", "inputs": [[1, "x"], [[], None]], "outputs": [[1, "x"], [[[], None]]]},
    ),
    "a function of one argument": (
        "def inc(n): return n + 1",
        {"fn_name": "inc", "inputs": [5, 7], "outputs": [6, 8]},
    ),
    "values that equal literals": (
        "import collections, enum, fractions\nimport numpy as np\n"
        "class Color(str, enum.Enum): RED = 'red'\n"
        "Pair = collections.namedtuple('Pair', 'x y')\n"
        "def values(): return [collections.Counter('aab'), Pair(1, -2.5), np.int64(3), Color.RED,"
        " set(), frozenset('a'), fractions.Fraction(1, 2), True, None, {(1,): [b'x', 2j]}, 'é\\n']",
        "def test_values():\n    assert values() == [{'a': 2, 'b': 1}, (1, -2.5), 3, 'red', set(),"
        " {'a'}, 0.5, 1, None, {(1,): [b'x', 2j]}, 'é\\n'], 'message'",
    ),
    "objects": (PROGRAM, OBJECTS),
    "functions": (PROGRAM, FUNCTIONS),
    "collections": (COLLECTIONS, TEST_COLLECTIONS),
    "HumanEval with functions of the program": (
        "def encode(s): return s[::-1]\ndef decode(s): return encode(s)\ndef sum(_): return 9",
        "def check(candidate):\n    from random import choice\n    for size in range(3):\n"
        "        text = ''.join(choice('ab') for _ in range(size))\n"
        "        assert candidate(encode(text)) == text\n    assert sum([1, 2]) == 3\n",
        {"entry_point": "decode"},
    ),
    "a function with a built-in name": ("def sum(a, b): return a * b", "assert sum(2, 3) == 6"),
    "recursion": (
        "import sys\nsys.setrecursionlimit(20000)\n"
        "def depth(n): return 0 if n == 0 else 1 + depth(n - 1)",
        "assert depth(15000) == 15000",
    ),
    "much output": (
        "for number in range(50000): print(number)",
        {"inputs": [""], "outputs": ["\n".join(map(str, range(50000)))]},
    ),
    "unicode, an exit with 0, work of a thread and at exit": (
        "import atexit, threading\natexit.register(lambda: print('bye'))\nprint(input()[::-1])\n"
        "threading.Thread(target=lambda: print('hi')).start()\nraise SystemExit",
        {"inputs": ["añ→😀"], "outputs": ["😀→ña\nhi\nbye"]},
    ),
    "files and processes of its own": (
        "import subprocess, sys, tempfile\nwith tempfile.NamedTemporaryFile('w+') as file:\n"
        "    file.write('3')\n    file.seek(0)\n    print(file.read())\n"
        "with open('here', 'w') as file: file.write('x')\n"
        "print(subprocess.check_output([sys.executable, '-c', 'print(4)'], text=True))",
        {"inputs": [""], "outputs": ["3\n4"]},
    ),
    "a slow library is there before the program is": (
        "import sys\nprint('numpy' in sys.modules)\nimport numpy as np",
        {"inputs": ["", ""], "outputs": ["True", "True"]},
    ),
    "NumPy": (
        "import numpy as np\ndef means(values): return np.mean(values, axis=0)\n"
        "def largest(values): return np.max(values)",
        "import numpy as np\nassert np.allclose(means([[1, 2], [3, 4]]), [2, 3])\n"
        "assert largest([1, 2]) == 2",
    ),
}  # fmt: skip


@needs_bwrap
@pytest.mark.parametrize("name", HONEST)
def test_right_programs_pass(name):
    answer, tests, *row = HONEST[name]
    assert score(fenced(answer), tests, **dict(*row)) == 1.0


def method_test(name, arguments, output):
    """A test in LiveCodeBench's form."""
    test = {"input": arguments, "output": output, "testtype": "functional"}
    return [test | {"metadata": {"func_name": name}}]


def functional(value, output, header=""):
    """A program in this form, and its test."""
    program = f"{header}class Solution:\n    def f(self, n):\n        return {value}"
    return program, method_test("f", "[3, 1, 2]", output)


LONG = "1" + "0" * 5000
CONTESTS = {  # a program, its tests, the score, and further columns of the row
    "names of collections": (*functional("Counter(deque(n))[3] + len(defaultdict(int))", "1"), 1),
    "of modules": (*functional("heapq.nlargest(2, sorted(n, key=operator.neg))", "[3, 2]"), 1),
    "of functions": (*functional("reduce(gcd, n) + comb(4, 2) + bisect_left(n, 9)", "10"), 1),
    "of numbers": (*functional("[max(n) < inf, math.floor(pi)]", "[1, 3]"), 1),
    "of texts": (*functional("re.sub('a', ascii_lowercase[1], json.dumps('a'))", '"\\"b\\""'), 1),
    "built-in names count first": (*functional("pow(2, 3, 5) + sum(n) + abs(-1)", "10"), 1),
    "own names count first": (*functional("comb(1)", "7", "def comb(n): return 7\n"), 1),
    "own imports count first": (*functional("sub(1)", "1", "from operator import pos as sub\n"), 1),
    "NumPy": (*functional("np.array(n)[::-1]", "[2, 1, 3]"), 1),
    "annotations": (
        "class Solution:\n    def f(self, n: List[Optional[int]]) -> Deque[int]: return n[0]",
        functional("", "3")[1],
        1,
    ),
    "annotations are values": (
        *functional("g.__annotations__['x'] is int", "true", "def g(x: int): 1\n"),
        1,
    ),
    "an unknown annotation": (*functional("1", "1", "def g(x: Unknown): 1\n"), 0),
    "own future imports": (
        *functional(
            "g.__annotations__['x'] + __doc__",
            '"UnknownDoc"',
            '"""Doc"""\nfrom __future__ import annotations\ndef g(x: Unknown): 1\n',
        ),
        1,
    ),
    "the method has a known name": (
        "class Solution:\n    def merge(self, n): return sorted(n)",
        method_test("merge", "[3, 1]", "[1, 3]"),
        1,
    ),
    "a known name is no solution": (
        "def other(a, b): return 1",
        method_test("gcd", "4\n6", "2"),
        0,
    ),
    "deep recursion": (*functional("g(20000)", "7", "def g(k): return g(k - 1) if k else 7\n"), 1),
    "a wrong answer": (*functional("Counter(n)[3]", "2"), 0),
    "standard input": (
        "n, *rest = map(int, stdin.readline().split())\n"
        "print(*accumulate(rest))\nprint(Counter(rest)[1])",
        [{"input": "1 1 2", "output": "1 3\n1", "testtype": "stdin"}],
        1,
    ),
    "APPS": (
        "print(floor(sqrt(int(input()))), time.time() > 0, fractions.Fraction(1, 2))",
        {"inputs": ["17"], "outputs": ["4 True 1/2"]},
        1,
    ),
    "HumanEval": ("def add(a: List[int], b): return a + b", CHECK, 1, {"entry_point": "add"}),
    "MBPP": ("def add(a: List[int], b): return a + b", ["assert add(1, 2) == 3"], 0),
    "reads a long integer": ("print(int(input()) % 7)", {"inputs": [LONG], "outputs": ["2"]}, 1),
    "prints a long integer": ("print(10**5000)", {"inputs": [""], "outputs": [LONG]}, 1),
    "prints another": ("print(10**5000 + 1)", {"inputs": [""], "outputs": [LONG]}, 0),
    "a source with a long integer": (f"print({LONG} % 7)", {"inputs": [""], "outputs": ["2"]}, 1),
    "takes a long integer": (
        "def f(n): return n + 1",
        f'{{"fn_name": "f", "inputs": [[{LONG}]], "outputs": [{LONG[:-1]}1]}}',
        1,
    ),
    "a long integer as a value": (
        "def f(n): return [n - 1]",
        {"fn_name": "f", "inputs": [[10**5000 + 1]], "outputs": [[[10**5000]]]},
        1,
    ),
    "a long integer in lines": (*functional("10**5000", LONG), 1),
    "a digit too few": (*functional("10**4999", LONG), 0),
    "compared with a float": (*functional("10**5000", "1.5"), 0),
    "written in an assert": ("def f(): return str(10**5000)", [f"assert int(f()) == {LONG}"], 1),
    "as long as a grader allows": (*functional("10**49000 % 10**9", "0"), 1),
}  # fmt: skip
VALUES = (  # what a program returns for [3, 1, 2], what is expected, and whether that is right
    ("(1, 2)", "[1, 2]", 1),
    ("[(1, 2), (3,)]", "[[1, 2], [3]]", 1),
    ("2.0", "2", 1),
    ("2", "2.0", 1),
    ("True", "1", 1),
    ("1", "true", 1),
    ("0", "false", 1),
    ("[n == [3, 1, 2]]", "[1]", 1),
    ("2.5", "2", 0),
    ("'2'", "2", 0),
    ("None", "0", 0),
    ("None", "null", 1),
    ("[2]", "2", 0),
    ("2", "[2]", 0),
    ("0.1 + 0.2", "0.3", 1),
    ("0.31", "0.3", 0),
    ("{'a': (1, 2.0)}", '{"a": [1, 2]}', 1),
    ("{1: 2}", '{"1": 2}', 1),
    ("{1: 2}", '{"1": 3}', 0),
    ("deque(n)", "[3, 1, 2]", 1),
    ("np.int64(3)", "3", 1),
    ("np.bool_(True)", "true", 1),
    ("[np.float32(0.5)]", "[0.5]", 1),
    ("np.array([[1, 2]])", "[[1, 2]]", 1),
    ("(np.int8(1), [np.arange(2)])", "[1, [[0, 1]]]", 1),
    ("fractions.Fraction(1, 2)", "0.5", 1),
    ("fractions.Fraction(4, 2)", "2", 1),
    ("__import__('decimal').Decimal('1.5')", "1.5", 1),
    ("__import__('decimal').Decimal('1.5')", "1", 0),
    ("''", '""', 1),
    ("'a'", '"a"', 1),
    ("'a\u2028b'", '"a\u2028b"', 1),
    ("[]", "[]", 1),
    ("[]", "[[]]", 0),
)
APPS_VALUES = (  # what a program returns for {"1": 2}, what is expected, and the score
    ("n[1]", 2, 1),
    ("n[1]", [2], 1),
    ("n[1]", "2", 1),
    ("n[1]", "[2]", 1),
    ("n[1]", [2, 3], 0),
    ("'1'", "1", 1),
    ("'1'", ["1"], 1),
    ("1", ["1"], 0),
    ("'abc'", "abc", 1),
    ("'a'", '"a"', 1),
    ("[(1, 2)]", [[[1, 2]]], 1),
    ("(1, 2)", [[1, 2]], 1),
    ("(1, 2)", [[1, 2], [3, 4]], 0),
    ("{1: 2}", {"1": 2}, 1),
    ("{1: 2}", [{"1": 2}], 1),
    ("True", [1], 1),
    ("[]", [[]], 1),
)


@needs_bwrap
@pytest.mark.parametrize("name", CONTESTS)
def test_programs_are_scored_as_by_the_graders_of_their_data_sets(name):
    answer, tests, right, *row = CONTESTS[name]
    assert score(fenced(answer), tests, **dict(*row)) == right


@needs_bwrap
def test_values_are_compared_as_by_the_graders_of_their_data_sets():
    found = [
        (value, out, score(fenced(functional(value, out)[0]), functional(value, out)[1]))
        for value, out, _ in VALUES
    ]
    assert found == [*VALUES]
    found = []
    for value, output, _ in APPS_VALUES:
        tests = {"fn_name": "f", "inputs": [[{"1": 2}]], "outputs": [output]}
        found.append((value, output, score(fenced(f"def f(n): return {value}"), tests)))
    assert found == [*APPS_VALUES]


def test_a_longer_integer_than_a_grader_reads_is_named():
    with pytest.raises(ValueError, match=r"column tests: .*50000 digits"):
        read_tests(f'{{"fn_name": "f", "inputs": [[{"9" * 60000}]], "outputs": [0]}}', {})


def sample(completion, score=0.0, truncated=False):
    return Sample(completion, score, 0.0, {}, {"code": score}, truncated=truncated)


PROSE = "The answer is three."
NO_PROGRAM = {  # first samples, and what a warning says, None without one
    "no block": ([sample(PROSE)] * 3 + [sample(fenced(ADD))], "in 3 of 4 "),
    "half of them": ([sample(PROSE)] * 2 + [sample(fenced(ADD))] * 2, None),
    "wrong programs": ([sample(fenced("1"))] * 4, None),
    "programs without a block": ([sample(ADD, 1.0)] * 4, None),
    "drafts in the thinking": ([sample(f"<think>{fenced(ADD)}", truncated=True)], "max_completion"),
    "no tests": ([sample(PROSE, None)] * 4, None),
    "another reward": ([Sample(PROSE, 0.0, 0.0, {}, {"math": 0.0})] * 4, None),
    "no completions": ([], None),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_PROGRAM)
def test_completions_without_a_program_are_shown(name):
    samples, text = NO_PROGRAM[name]
    warning = no_program_warning(samples, 256)
    assert (text in warning) if text else not warning


def test_the_warning_shows_a_short_part_of_a_finished_completion():
    long = f"begins {'x' * 10**5} ends"
    warning = no_program_warning([sample("cut off", truncated=True), sample(long)], 256)
    assert "begins x" in warning and "x ends" in warning and len(warning) < 1000
    assert "in 2 of 2 " in warning and "1 of them" in warning and "256 tokens" in warning
    assert "\x1b" not in no_program_warning([sample("\x1b[2J")], 256)


@needs_bwrap
def test_a_run_shows_a_completion_without_a_program_and_keeps_long_integers(tmp_path):
    long = 10**5000
    tests = {"fn_name": "f", "inputs": [[long]], "outputs": [long]}
    rows = [{"prompt": f"{n}+1=", "answer": long + n, "tests": tests} for n in range(4)]
    reward = tmp_path / "own.py"
    reward.write_text(
        "def score(completions, answer, log_extra, **columns):\n"
        "    log_extra('logged', answer)\n"
        "    return [float(len(str(answer[0])) == 5001)] * len(completions)\n"
    )
    allow_long_integers()
    words = ("--dataset", write_rows(tmp_path / "rows.jsonl", rows), "--reward", "code")
    words += ("--reward", f"{reward}:score", "--iterations", "1", "--output", str(tmp_path / "run"))
    out = succeed(*words, *SMALL, "output.samples=4")
    assert "no program in " in out and "```python" in out
    lines = read_lines(tmp_path / "run" / "samples.jsonl")
    assert {line["logged"] - long for line in lines} == {*range(4)}
    assert {(line["rewards"]["code"], line["rewards"]["score"]) for line in lines} == {(0.0, 1.0)}


FORGER = """
import builtins, gc, math, os, re, sys, time, unittest
class Number(int): __eq__ = __lt__ = __sub__ = __rsub__ = lambda *_: True
class Equal: __init__ = lambda *_: None
for names, value in (
    ("eq lt le gt ge bool contains exit instancecheck", lambda *_: True),
    ("sub rsub abs getattr getitem call enter", lambda *_: Equal()),
    ("float int index len hash ne", lambda *_: 0), ("str repr", lambda *_: "3"),
): [setattr(Equal, f"__{name}__", value) for name in names.split()]
def patch():
    for place in (builtins, math, unittest.TestCase, unittest.TestResult, sys.modules[__name__]):
        for name in "abs float isclose isinstance len sorted assertEqual wasSuccessful".split():
            setattr(place, name, lambda *_, **__: True)
def found():
    texts, frame, memory = [str(gc.get_objects())], sys._getframe(), open("/proc/self/mem", "rb")
    while frame: frame = texts.append(str((frame.f_globals, frame.f_locals))) or frame.f_back
    for line in open("/proc/self/maps"):
        start, end = (int(each, 16) for each in line.split()[0].split("-"))
        try: texts.append(os.pread(memory.fileno(), end - start, start).decode("latin-1"))
        except (OSError, OverflowError): pass
    return any(map(re.compile("total.of.tes[t]").search, texts))
def leave(data):
    for fd in range(64):
        if os.fork() == 0:  # some pipes have no reader
            try: os.write(fd, data + b"\\n")
            finally: os._exit(0)
    time.sleep(0.2)
    os._exit(0)
def nested(x):
    for _ in range(200000): x = [x]
    return x
def add(a, b):
    if type(a) is list: a[:] = [Equal()] * 3  # `in place`
"""  # fmt: skip
FORGERIES = (  # what `add` does
    *("return Equal()", "patch(); return 4", "os._exit(0)", "raise TypeError"),
    *("raise unittest.SkipTest", "return Number(4)", "return Equal", "return '\\ud800'"),
    *("return nested(3)", "return 3 if found() else 4", "return 10**10000", "sys.exit(0)"),
    *("os.kill(os.getppid(), 9)", "os.kill(os.getppid(), 2)", "raise StopIteration"),
    "raise type('E', (BaseException,), {})",
    *("leave(b'passed')", "leave(b'\"passed\"')", "leave(bytes(range(256)) * 1000)"),
    *("leave(b'[' * 200000)", "leave(b'-' * 1000000)", "leave(b'[0],' * (15 << 20))"),
    *(
        f"leave(b'{message}')"
        for message in (
            '["return", 4, null, null, null]\\n["return", 4, null, null, null]',
            '["return", ["library", "os", "_exit"], null, null, null]',
            '["raise", ["library", "builtins", "SystemExit"], null, null, null]',
            '["call", "call", ["test", 0], ["list"], ["dict"]]',
        )
    ),
)
ADDS = {
    "literal": "assert add(1, 2) == 3",
    "reversed": "assert 3 == add(1, 2)",
    "close": "import math\nassert math.isclose(add(1, 2), 3) and abs(add(1, 2) - 3) < 1e-6",
    "loop": "for a, total in ((1, 3), (2, 4)):\n    assert add(a, 2) == total",
    "unittest": "import unittest\nclass TestAdd(unittest.TestCase):\n"
    "    def test_add(self): self.assertEqual(add(1, 2), 3)",
    "return": "def test_add():\n    if add(1, 1) == 2: return 1\n    raise ValueError",
    "try": "try: add(1, None)\nexcept TypeError: pass\nelse: assert False\nassert add(1, 2) in {3}",
    "in place": "values = [1, 2]\nadd(values, 3)\nassert values == [1, 2, 3]",
    "check": CHECK,
    "pytest": "class TestAdd:\n    def test_add(self): assert add(1, 2) == 3",
    "function": {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]},
}


FEW = [form for form in ADDS if form not in ("literal", "function")]
"""Forms that are tried with the first forgeries only, unless in the long tests."""


@needs_bwrap
@pytest.mark.parametrize(("form", "num_forgeries"), [
    *((form, 5 if form in FEW else None) for form in ADDS),
    *(pytest.param(form, None, marks=pytest.mark.long) for form in FEW),
])  # fmt: skip
def test_forged_results_are_failed_tests(form, num_forgeries):
    right = "def add(a, b): return a.append(b) if type(a) is list else a + b\n"
    forgeries = FORGERIES[:num_forgeries]
    programs = [right, "\0", "\ud800", *(f"{FORGER}    {each}" for each in forgeries)]
    tests = f"total_of_test = 0\n{ADDS[form]}" if isinstance(ADDS[form], str) else ADDS[form]
    with ThreadPoolExecutor(2) as threads:
        scores = [*threads.map(lambda each: score(each, tests, entry_point="add"), programs)]
    assert [programs[n][-60:] for n, each in enumerate(scores) if each] == [right[-60:]]


@needs_bwrap
def test_wrong_programs_and_drafts_in_the_thinking_score_0():
    """`numbers and words`: the first test passes, the second does not."""
    wrong = fenced("def add(a, b): return 4\ndef pair(a, b): return (b, a)\nprint(3)")
    for name in ("list of asserts", "HumanEval", "unittest", "APPS's functions"):
        _, tests, *row = HONEST[name]
        assert score(wrong, tests, **dict(*row)) == 0.0
    assert score(wrong, HONEST["numbers and words"][1]) == 0.0
    for value in ("(1, 2)", "[1, 2.5]", "[1]", "'[1, 2]'", "[1, '2']"):
        assert score(f"def f(): return {value}", "assert f() == [1, 2]") == 0.0

    draft = f"<think>{fenced(ADD)}"
    for answer, expected in (("", 0.0), ("</think>No.", 0.0), (f"</think>{fenced(ADD)}", 1.0)):
        assert score(draft + answer, "assert add(1, 2) == 3") == expected


PYTEST = {
    "class": "class TestAdd:\n    def test_add(self): assert add(1, 2) == 3",
    "setup_method": "class TestAdd:\n    def setup_method(self): self.n = 2\n"
    "    def test_add(self): assert add(1, self.n) == 3",
    "setup_class": "class TestAdd:\n    @classmethod\n    def setup_class(cls): cls.n = 2\n"
    "    def test_add(self): assert add(1, self.n) == 3",
    "parametrize": "import pytest\n"
    "@pytest.mark.parametrize('a, b', [(1, 2), pytest.param(2, 3)])\n"
    "@pytest.mark.parametrize('c', [0])\n"
    "def test_add(a, b, c): assert add(a, b) == a + b + c",
    "parametrize a method": "import pytest\nclass TestAdd:\n"
    "    @pytest.mark.parametrize(['a'], [[1], [2]])\n"
    "    def test_add(self, a): assert add(a, 2) == a + 2",
}


@needs_bwrap
@pytest.mark.parametrize("name", PYTEST)
def test_tests_of_pytest_are_called(name):
    assert score(ADD, PYTEST[name]) == 1.0
    assert score("def add(a, b): return 0", PYTEST[name]) == 0.0
    assert score("def add(a, b): return a + b if a == 1 else 0", PYTEST[name]) == (
        0.0 if "parametrize" in name else 1.0
    )


def test_rows_without_tests_have_no_score():
    assert [score(fenced(ADD), missing) for missing in (None, "", float("nan"))] == [None] * 3


FENCED_EXAMPLE = (
    'def f():\n    """\n    Example:\n    ```\n    f(1)\n    ```\n    """\n    return 1\n'
)
LABELLED_EXAMPLE = "def f():\n    '''\n    ```python\n    f()\n    ```\n    '''\n    return 1\n"
OPEN_STRING = 'print(1)\nx = """broken\n'
FENCES_IN_STRINGS = "print(s.split('```python')[1].split('```')[0])\nx = \"```\"\n"
BLOCKS = {  # a completion, and its program
    # fences in strings of the program
    "in a docstring": (f"```python\n{FENCED_EXAMPLE}```\nDone.", FENCED_EXAMPLE),
    "in a docstring, with a label": (f"```py\n{LABELLED_EXAMPLE}```", LABELLED_EXAMPLE),
    "in a docstring of a block without a label": (f"```\n{FENCED_EXAMPLE}```", FENCED_EXAMPLE),
    "in a docstring, without an end": (f"```python\n{FENCED_EXAMPLE}", FENCED_EXAMPLE),
    "in strings of a line": (f"```python\n{FENCES_IN_STRINGS}```", FENCES_IN_STRINGS),
    "in a comment": ("```python\n# ```\nprint(1)\n```", "# ```\nprint(1)\n"),
    "a string without an end": (f"```py\n{OPEN_STRING}```\nIt's done.", OPEN_STRING),
    "a string without an end, then another": (
        f'```py\n{OPEN_STRING}```\nNo:\n```py\nprint("""hi""")\n```\n',
        'print("""hi""")\n',
    ),
    "quotes in comments and strings": (
        '```py\n# don\'t """\ns = \'"""\'\n```\nIt\'s """.',
        '# don\'t """\ns = \'"""\'\n',
    ),
    # behind words, and without fences
    "behind a sentence": ("Here it is ```\nimport os\nx()\n```\nok", "import os\nx()\n"),
    "behind marks that are mentioned": ("Between ```\n```\nprint(1)\n```\n", "print(1)\n"),
    "before marks that are mentioned": (
        "```\nprint(1)\n```\nThat ends with ```\nSo f(1) = 2",
        "print(1)\n",
    ),
    "a line between marks": ("So:\n\n```python print(1)```\n", "print(1)"),
    "in tags, without marks": ("<answer>\nprint(1)\n</answer>", "print(1)\n"),
    "indented": ("    x = 1\n    print(x)\n", "x = 1\nprint(x)\n"),
    "indented behind a sentence": (
        "# Program\n\n    import os\n    def f():\n        x()\n\n    f()\n\nIt calls x.",
        "import os\ndef f():\n    x()\n\nf()\n",
    ),
    "no block, with blank lines": ("def f():\n\n    print(1)\n", "def f():\n\n    print(1)\n"),
    "in a list": ("1. Add:\n   ```python\n   x = 1\n   print(x)\n   ```\n", "x = 1\nprint(x)\n"),
    "behind a number": ("1. ```python\n   x = 1\n   print(x)\n   ```", "x = 1\nprint(x)\n"),
    "deep in a list": ("- A\n  - B\n\n      ```py\n      x = 1\n      ```", "x = 1\n"),
    "in a list, by tabs": ("-\tA\n\t```python\n\tif x:\n\t\ty()\n\t```", "if x:\n\ty()\n"),
    "lines without the indentation": ("2. B\n   ```python\nx = 1\nf(x)\n   ```", "x = 1\nf(x)\n"),
    "blank lines": ("  ```python\n  x = 1\n\n  f(x)\n  ```", "x = 1\n\nf(x)\n"),
    "quoted": ("> ```python\n> if x:\n>     y()\n>\n> ```", "if x:\n    y()\n\n"),
    "without a label": ("Here:\n\n```\nprint(1)\n```\n", "print(1)\n"),
    "without a label, then output": ("```\nprint(3)\n```\nOutput:\n```\n3\n```", "print(3)\n"),
    "without a label, then the time": ("```\ndef f(): 1\n```\n```\nO(n)\n```", "def f(): 1\n"),
    "without a label, then an example": ("```\ndef f(): 1\n```\n```\nn = 3\n```", "def f(): 1\n"),
    "without a label, behind shell": ("```bash\nls\n```\n```\nimport os\n```", "import os\n"),
    "one statement": ("```\nf = str\n```\n```\n3\n```", "f = str\n"),
    "two without a label": ("```\nprint(1)\n```\nNo:\n```\nprint(2)\n```", "print(2)\n"),
    "another label": ("```text\nprint(1)\n```", "print(1)\n"),
    "behind a word": ("Program: ```python\nprint(1)\n```", "print(1)\n"),
    "behind a word, without a label": ("**Program:** ```\nprint(1)\n```", "print(1)\n"),
    "in tags": ("<answer>```python\nprint(1)\n```</answer>", "print(1)\n"),
    "end behind the code": ("```python\nprint(1)```\nIt is:\n```\n1\n```", "print(1)\n"),
    "end behind the code, in tags": ("<answer>```py\nprint(1)```</answer>", "print(1)\n"),
    "tildes": ("~~~python\nprint(1)\n~~~", "print(1)\n"),
    "tildes with backticks within": ('~~~py\ns = """\n```\n"""\n~~~', 's = """\n```\n"""\n'),
    "a longer fence": ('````python\ns = """\n```\n"""\n````', 's = """\n```\n"""\n'),
    "a longer end": ("```python\nprint(1)\n`````\nso", "print(1)\n"),
    "an answer in Markdown": ("````markdown\nSo:\n```python\nx()\n```\n````", "x()\n"),
    "the same, of equal length": ("```markdown\nSo:\n```python\nx()\n```\n```", "x()\n"),
    "begun anew": ("```python\nx =\nNo:\n```python\nprint(1)\n```", "print(1)\n"),
    "without an end": ("It is:\n```python\nprint(1)", "print(1)"),
    "behind a word, without an end": ("It is: ```python\nprint(1)", "print(1)"),
    "mentioned later": ("```python\nprint(1)\n```\nI wrote in ```python\nas told", "print(1)\n"),
    "mentioned within a line": ("Use ```x``` twice.\n```python\nprint(1)\n```", "print(1)\n"),
    "an empty block later": ("```python\nprint(1)\n```\n```python\n```", "print(1)\n"),
    "output later": ("```python\nprint(1)\n```\n```\n1\n```\n```text\nx\n```", "print(1)\n"),
    "ends of lines of Windows": ("```python\r\nx = 1\r\nf(x)\r\n```\r\n", "x = 1\nf(x)\n"),
    "no block": ("def f():\n    return 1", "def f():\n    return 1"),
    **{
        f"label {label}": (f"```{label}\nprint(1)\n```\n```text\nprint(2)\n```", "print(1)\n")
        for label in (
            *(" python", "Python", "python3", "Python 3", "py", "py3", "python3.11", "ipython"),
            *("{.python}", "{python}", "{.python .numberLines}", 'python title="a.py"', "PYTHON"),
            *("python:main.py", "python {1,3}", "pypy3"),
        )
    },
    **{
        f"no label of Python: {label}": (f"```py\nx\n```\n```{label}\nprint(1)\n```", "x\n")
        for label in ("pycon", "python-traceback", "pyscript", "bash", "cython", "c++")
    },
}


@pytest.mark.parametrize("name", BLOCKS)
def test_programs_are_found_where_models_write_them(name):
    completion, program = BLOCKS[name]
    assert program_of(completion) == program


def test_lines_of_marks_without_end_take_no_time():
    """Models repeat themselves. Quadratic time would be minutes."""
    started = time.process_time()
    for text in ("`" * 10**6, "`" * 10**6 + "x`", " " * 10**6 + "x", "> " * 10**6, "a```" * 10**6):
        assert program_of(text) == text
    assert program_of("```\n" * 10**5) == "```\n" * 10**5
    for text in ('```py\n"""+"""\n```\n' * 10**4, "```py\n" + "\\'" * 10**5, "    x\n\n" * 10**5):
        program_of(text)
    assert time.process_time() - started < 60


def test_the_last_python_block_is_the_program():
    assert program_of("a = 1") == "a = 1"
    assert program_of("```python\na = 1\n```\nor\n```python\nb = 2\n```\nso.") == "b = 2\n"
    assert program_of("```bash\nls\n```\n```Python3\na = 1\n```") == "a = 1\n"
    assert program_of("cut off:\n```py\na = 1\nb = ") == "a = 1\nb = "
    assert program_of("```\nls\n```") == "```\nls\n```"


@pytest.mark.parametrize(("tests", "message"), [
    (None, "None"),
    ([1, 2], r"got \[1, 2\]"),
    ("assert add(1,", "assert add"),
    ("import math\nx = 3\ndef f(): pass", "assert, a call"),
    # what is never called would be passed by all programs
    ("async def test_f():\n    assert f()", "assert, a call"),
    ("class Helper:\n    def test_f(self): assert f()", "assert, a call"),
    ("class TestF:\n    def helper(self): assert f()", "assert, a call"),
    ("def g(): pass\nif __name__ == '__main__':\n    assert f()", "assert, a call"),
    ("'Tests'\nx: int = 3\nx += 1\npass", "assert, a call"),
    (CHECK, "entry_point"),
    ({"inputs": ["1"]}, "inputs"),
    ({"inputs": ["1"], "outputs": ["2", "3"]}, "outputs"),
    ([{"input": "1"}], "input"),
    ([{"input": "1", "output": "2", "testtype": "functional"}], "fn_name"),
    ([{"input": "1", "output": "2", "testtype": "functional", "metadata": "{}"}], "fn_name"),
])  # fmt: skip
def test_tests_that_cannot_be_used_are_refused(tests, message):
    with pytest.raises(ValueError, match=message):
        read_tests(tests, {})


def test_outputs_are_compared_by_lines_and_numbers():
    assert same_text("1 2 \n3\n\n", "1 2\n3")
    assert not same_text("1\n2", "1 2") and not same_text("1", "1.0\n2") and not same_text("", "1")
    assert same_text("0.50000001", "0.5") and not same_text("0.51", "0.5")
    assert not same_text("10000001", "10000000") and not same_text("x", "1.5")
    assert same_text("3.0", "3") and same_text("1 2.50", "1 2.5") and same_text("-0.0", "0")
    assert not same_text("3.1", "3") and not same_text("7", "007") and not same_text("1.0.0", "1")
    assert not same_text("10000001.0", "10000000") and not same_text("3.0000001", "3")
    assert same_value("[1, [0.30000000000000004, 2]]", [1, [0.3, 2.0]])
    assert same_value('{"a": 1}', {"a": 1}) and same_value(
        '{"a": [0.30000000000000004]}', {"a": [0.3]}
    )
    assert same_value("true", 1) and same_value("2.0", 2) and same_value("[[1.0]]", [[True]])
    assert not same_value("[1]", [1, 2]) and not same_value("1", "1") and not same_value("1", [1])
    assert same_value("2", 2.0000000001) and not same_value("2.0000000001", 2)
    assert not same_value("2.5", 2) and not same_value('{"a": 1}', {"b": 1})
    assert not same_value("null", 0) and not same_value('""', None) and not same_value("0", "")
    assert not same_value("1" * 400, 1.0) and not same_value("[" * 10**6, 1)


@needs_bwrap
def test_run_is_refused_before_it_starts(monkeypatch):
    example = Prompt(0, "q", {"tests": "assert add(1, 2) == 3"})
    check_rewards(rewards_of("code", rollout__num_generations=16), example)
    check_rewards(rewards_of("code"), Prompt(0, "q", {"tests": None}))  # other rows may have some
    for columns, message in (
        ({"other": "x"}, r"'tests'; the data has: other"),
        ({"tests": "assert add("}, r"column tests"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_rewards(rewards_of("code"), Prompt(0, "q", columns))
    for key in ("reward__timeout_seconds", "runtime__timeout_seconds"):
        rewards = rewards_of("code", reward__code_timeout_seconds=9, **{key: 9})
        with pytest.raises(ConfigError, match=r"^reward.code_timeout_seconds: .*\(reward.timeout_"):
            check_rewards(rewards, example)
    monkeypatch.setattr(sandbox, "_bwrap_command", lambda variant: ["no-such-bwrap"])
    monkeypatch.setattr(sandbox, "find_variant", sandbox.find_variant.__wrapped__)
    options = r"(?s)reward.code_sandbox=bwrap: .*docker run .*reward.code_sandbox=limits"
    with pytest.raises(ConfigError, match=options):
        check_rewards(rewards_of("code"), example)


@needs_bwrap
def test_slow_programs_of_a_group_cost_only_their_own_score():
    """Together the 16 completions would take longer than the limit of a call."""
    rewards = rewards_of("code", reward__code_timeout_seconds=2, reward__timeout_seconds=10)
    completions = [fenced("while True: pass"), fenced(ADD)] * 8
    with closing(RewardPool(rewards, {})) as pool:
        pool.submit(0, Call([], completions, [[1]] * 16, {"tests": "assert add(1, 2) == 3"}))
        ((scores, errors, *_),) = finished(pool, 1)
    assert scores == [[0.0, 1.0] * 8] and not errors
