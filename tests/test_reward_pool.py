"""Reward processes: never blocking, one failed call costs itself alone, nothing stays behind."""

import multiprocessing
import os
import re
import select
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import psutil
import pytest
from reward_pools import finished, rewards_of

from easyrl.config import ConfigError
from easyrl.processes import REWARD_PROCESS
from easyrl.rewards import heartbeat, worker
from easyrl.rewards import pool as pool_module
from easyrl.rewards.functions import RewardError
from easyrl.rewards.loading import read_sources
from easyrl.rewards.pool import RewardPool, try_rewards, weighted_sum
from easyrl.rewards.worker import Call
from easyrl.types import Prompt
from easyrl.user_code import user_traceback
from own_processes import WAIT_SECONDS
from runs import (
    SMALL,
    both_schedules,
    descendants,
    finish,
    lines_of,
    succeed,
    summary_of,
    wait_until_gone,
)

ROOT = Path(__file__).parent.parent
METHODS = ("fork", "spawn", "forkserver")
FUNCTIONS = """
try: from .beside import nothing
except ImportError: pass
import multiprocessing, os, signal, subprocess, sys, time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
import numpy as np

def evaluates(prompts, completions, **_): return eval(prompts[0])
def numbers(completions, **_): return [float(text) for text in completions]
def good(completions, **_): return [1.0] * len(completions)
def pid(completions, **_): return [os.getpid()] * len(completions)
def none(completions, **_): return [None, 1.0]
def needs_answer(completions, answer, **_): return [1.0] * len(completions)
def raises(completions, **_): raise KeyError("mine")
def nan(completions, **_): return [1.0, float("nan")]
def a_set(completions, **_): return {1.0, 2.0}
def hangs(completions, **_): time.sleep(1000)
async def leaves(completions, **_): sys.exit(3)
def crashes(completions, **_): os.kill(os.getpid(), signal.SIGSEGV)

def sleepy(completions, **_):
    time.sleep(float(completions[0]))
    return [1.0] * len(completions)

def arguments(prompts, completions, completion_ids, answer, **columns):
    assert (prompts, answer) == (["1+1="] * 2, ["2", "2"])
    assert (completions, completion_ids) == (["2", "3"], [[5], [6, 7]])
    assert columns.keys() == {"level", "trainer_state", "log_extra", "log_metric"}, columns
    for argument in (prompts, completions, completion_ids, columns["level"][0]):
        argument.clear()
    return np.array([0.25, np.nan if "torch" in sys.modules else 0.75], dtype=np.float32)

def sees(prompts, completions, completion_ids, level, **_):
    assert prompts and completions and completion_ids and level == [[1, 2]] * 2
    return [1.0, None]

def dies_once():
    with open(os.path.join(os.path.dirname(__file__), "killed"), "a") as file:
        if file.tell() == 0:
            file.write("x")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    return [1.0, 1.0]

def hangs_once():
    with open(os.path.join(os.path.dirname(__file__), "hung"), "a") as file:
        if file.tell() == 0:
            file.write("x")
            file.flush()
            time.sleep(1000)
    return [1.0, 1.0]

def eats(): return [bytearray(2**25) for _ in iter(int, 1)]
def prints(): return [print("x" * 1000) for _ in range(2**20)]

class Text(str):
    def __reduce__(self): return os._exit, (1,)
    def __str__(self): return self

def logs_odd_names(completions, log_extra, log_metric, **_):
    log_extra(Text("column"), [Text("a"), Text("b")])
    log_metric(Text("metric"), np.float32(0.5))
    return [1.0, 1.0]

def length(text): return float(len(text))
def puts(queue, text): queue.put(length(text))

def length_plus(text): return len(text) + BASE
def set_up(value): globals()["BASE"] = value
def add(a, b): return a + b
def sends(pipe, text): pipe.send(len(text))
class Lengths:
    def of(self, text): return len(text)

def piped(completions):
    ours, theirs = multiprocessing.Pipe()
    for text in completions: multiprocessing.Process(target=sends, args=(theirs, text)).start()
    return [ours.recv() for _ in completions]

def managed(completions):
    with multiprocessing.Manager() as manager: return list(manager.list(map(len, completions)))

def in_processes(completions):
    queue = multiprocessing.Queue()
    for text in completions: multiprocessing.Process(target=puts, args=(queue, text)).start()
    return [queue.get() for _ in completions]

KEPT = []

def pids_of_pools_that_are_kept(completions, **_):
    for method in ("fork", "spawn"):
        KEPT.append(ProcessPoolExecutor(1, get_context(method)))
    return [float(pool.submit(os.getpid).result()) for pool in KEPT]
"""
LOST = {
    "os._exit(3)": "exit code 3",
    "crashes([])": "SIGSEGV",
    "hangs([])": "reward.timeout_seconds",
}


@pytest.fixture
def own(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(FUNCTIONS)
    return file


@pytest.fixture
def reports():
    return []


@pytest.fixture
def open_pool(own, reports):
    """Pools of one process, unless more are asked for."""
    with ExitStack() as opened:

        def make(*names, file="own", **settings):
            at = own.with_name(f"{file}.py")
            if at != own:
                at.write_text(FUNCTIONS)
            specs = [name if name == "math" else f"{at}:{name}" for name in names]
            rewards = rewards_of(*specs, **{"reward__num_workers": 1} | settings)
            sources = read_sources({"reward.functions": rewards.functions}, rewards.options.judge)
            pool = RewardPool(rewards, sources, reports.append)
            opened.callback(pool.close)
            return pool

        yield make


def score(pool, *prompts, **columns):
    for key, prompt in enumerate(prompts or ("1+1=",)):
        pool.submit(key, Call(prompt, ["2", "3"], [[5], [6, 7]], columns))
    return finished(pool, len(prompts) or 1)


def scores_of(pool, *prompts, **columns):
    (scored,) = score(pool, *prompts, **columns)
    assert scored.scores and not scored.errors, scored
    return scored.scores


def test_function_that_fails_hangs_or_crashes_when_tried_is_a_warning(own, monkeypatch):
    monkeypatch.setattr(pool_module, "CHECK_SECONDS", 2.0)

    def tried(*names):
        rewards = rewards_of(*(f"{own}:{n}" for n in names), rollout__num_generations=2)
        return try_rewards(rewards, Prompt(0, "1+1=", {"answer": "2"}))

    warnings = tried("hangs", "crashes", "raises", "nan", "leaves", "good", "needs_answer")
    expected = ("2 s", "ended", "KeyError: 'mine'", "nan", "SystemExit: 3")
    for text, warning in zip(expected, warnings, strict=True):
        assert text in warning and "reward.check" in warning
    left = [each for each in descendants(os.getpid()) if each.name() == REWARD_PROCESS]
    assert wait_until_gone(left) == []
    with pytest.raises(ConfigError, match="a_set"):
        tried("good", "a_set")


MISTAKES = {
    "NameError": "return [flot('2' in text) for text in completions]",
    "ModuleNotFoundError": "import no_such_module",
    "'list' object has no attribute": "return [completions.score]",
    "completion[0]['content']": "return [float('2' in text) for text in completions]",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_function_stops_the_start(tmp_path, mistake):
    """`'2' in completion` is one where the completions are lists of chat messages."""
    file = tmp_path / "mine.py"
    file.write_text(f"def f(completions, **columns):\n    {MISTAKES[mistake]}\n")
    content = [{"role": "user", "content": "1+1="}] if "content" in mistake else "1+1="
    with pytest.raises(ConfigError, match=re.escape(mistake)):
        try_rewards(rewards_of(f"{file}:f"), Prompt(0, content, {}))


@pytest.mark.parametrize("folder", [ROOT, ROOT.with_name(f"{ROOT.name}-mine")])
def test_a_traceback_begins_at_the_users_line_also_beside_the_package(folder):
    user = {}
    exec(compile("def f():\n    undefined_name", folder / "mine.py", "exec"), user)
    with ThreadPoolExecutor(1) as thread, pytest.raises(NameError) as raised:
        thread.submit(user["f"]).result()
    text = user_traceback(raised.value.with_traceback(raised.tb.tb_next))  # without this test
    assert text.splitlines()[1].strip() == f'File "{folder}/mine.py", line 2, in f'


def test_functions_get_trl_arguments_and_do_not_share_them(open_pool):
    pool = open_pool("arguments", "sees")
    assert scores_of(pool, answer="2", level=[1, 2]) == [[0.25, 0.75], [1.0, None]]


def test_completions_of_code_and_math_are_tasks_of_their_own(open_pool):
    """An endless comparison is a wrong answer, and costs no other completion its score."""
    pool = open_pool("math", "pid", reward__on_error="stop")
    pool.submit(0, Call("q", [r"\boxed{4}", r"\boxed{9^{9^{9}}}", "4"], [[1]] * 3, {"answer": "4"}))
    ((scores, errors, *_),) = finished(pool, 1)
    assert scores and not errors
    assert scores[0] == [1.0, 0.0, 1.0] and scores[1][0] == scores[1][1] == scores[1][2]


@pytest.mark.alone
def test_slow_reward_does_not_block(open_pool):
    pool = open_pool("sleepy")
    for seconds in ("0", "3"):  # after the first, the processes are up
        began = time.perf_counter()
        pool.submit(0, Call("q", [seconds], [[1]], {}))
        assert pool.finished() == [] and select.select([pool], [], [], 0)[0] == []
        assert time.perf_counter() - began < 2.0 or seconds == "0"
        finished(pool, 1)
        assert select.select([pool], [], [], 0)[0] == []  # the wake-up is used up


def test_results_are_of_plain_types(open_pool):
    """Others would be unpickled in the rollout worker."""
    ((scores, errors, metrics, columns),) = score(open_pool("logs_odd_names"))
    assert (scores, errors) == ([[1.0, 1.0]], []) and metrics == {"metric": 0.5}
    assert columns == {"column": ["a", "b"]}
    assert {type(each) for each in (*metrics, *columns, *columns["column"])} == {str}


WITH_PROCESSES = {  # completions are "2" and "3"
    **{f"get_context('{each}').Pool(1).map(length, completions)": 1.0 for each in METHODS},
    "get_context('forkserver').Pool(1).map(Lengths().of, completions)": 1.0,
    "get_context('spawn').Pool(1, set_up, (3,)).map(length_plus, completions)": 4.0,
    "ProcessPoolExecutor(2).map(length, completions)": 1.0,
    "ProcessPoolExecutor(1, get_context('spawn'), set_up, (3,)).map(length_plus, completions)": 4.0,
    "multiprocessing.Pool(2).starmap(add, [(1, len(text)) for text in completions])": 2.0,
    **{f"{each}(completions)": 1.0 for each in ("in_processes", "piped", "managed")},
}


@pytest.mark.parametrize("name", ["own", "sys", "mine.v2"])  # `sys` is Python's, too
def test_function_may_start_processes(open_pool, name):
    pool = open_pool("evaluates", file=name)
    for prompt, score in list(WITH_PROCESSES.items())[: None if name == "own" else 3]:
        assert scores_of(pool, f"list({prompt})") == [[score, score]]


def test_processes_of_a_function_end_with_the_killed_one(open_pool):
    pool = open_pool("pids_of_pools_that_are_kept", "pid")
    children, (pid, _) = scores_of(pool)
    children = [psutil.Process(int(child)) for child in children]
    os.kill(int(pid), signal.SIGKILL)
    assert not wait_until_gone(children)


ORPHAN = """
import os, runpy, time
parent = os.getpid()
if os.fork():
    os._exit(0)
while os.getppid() == parent:
    time.sleep(0.01)
runpy.run_module("easyrl.processes", run_name="__mp_main__")
print("alive")
"""


def test_process_whose_parent_died_while_it_started_ends():
    """Such a process waits for work for ever: it holds the other end of its pipe itself."""
    how = {"start_new_session": True, "capture_output": True, "timeout": WAIT_SECONDS}
    done = subprocess.run([sys.executable, "-c", ORPHAN], check=False, **how)
    assert (done.stdout, done.stderr) == (b"", b"")


def test_functions_that_score_nothing_or_do_not_load_stop_the_run_by_default(own, open_pool):
    for name in ("a_set", "none"):
        with pytest.raises(RewardError, match=name):
            score(open_pool(name))
    own.write_text("import no_such_thing")
    with pytest.raises(RewardError, match="No module named 'no_such_thing'"):
        score(open_pool("f"))


BESIDE = {
    "mine.py": "# -*- coding: latin-1 -*-\n# é\nimport tools.parse\nfrom helper import grade\n"
    "from package.inner import factor\n"
    "def f(completions, **_):\n"
    "    return [tools.parse.number(text) * factor * grade() for text in completions]\n",
    "helper.py": "from deeper import value\ndef grade(): return value\n",
    "deeper.py": "value = 3\n",
    "tools/parse.py": "number = float\n",
    "package/__init__.py": "from .other import five\n",
    "package/other.py": "five = 5\n",
    "package/inner.py": "from package import five\nimport package.last\nfactor = five\n",
    "package/last.py": "from .deep import at",
    "package/deep/__init__.py": "from ..level import at",
    "package/level.py": "at = 1",
}


def test_modules_beside_a_function_come_with_it_to_another_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Path("mine")
    for name, text in BESIDE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="latin-1")
    rewards = rewards_of(f"{folder}/mine.py:f", reward__num_workers=1)
    sources = read_sources({"reward.functions": rewards.functions}, rewards.options.judge)
    folder.rename("elsewhere")
    with closing(RewardPool(rewards, sources)) as pool:
        assert scores_of(pool) == [[30.0, 45.0]]


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (("reward", "import utils"), ("reward", "import utils"), "utils"),
        (("utils", ""), ("reward", "def later(): import utils"), "utils"),
        (("reward", "from package import one"), ("utils", "from package import two"), "package"),
        (("reward", "import json, utils"), ("reward", "import json"), None),
        (("reward", "import numpy"), ("reward", "import numpy"), None),
    ],
)
def test_files_in_two_folders_need_no_different_modules_of_one_name(tmp_path, first, second, same):
    """Python has one of a name: a function would call what belongs to the other one."""
    specs = []
    for folder, (name, imports) in ((tmp_path / "one", first), (tmp_path / "two", second)):
        (folder / "package").mkdir(parents=True)
        for module in ("utils", "json", "numpy", "package/one", "package/two"):
            (folder / f"{module}.py").write_text("")
        function = (
            f"{imports}\ndef {folder.name}(completions, **_): return [1.0] * len(completions)"
        )
        (folder / f"{name}.py").write_text(function)
        specs.append(f"{folder}/{name}.py:{folder.name}")
    rewards = rewards_of(*specs)
    example = Prompt(0, "1+1=", {})
    if same is None:
        assert try_rewards(rewards, example) == []
        return
    with pytest.raises(ConfigError, match=f"one module '{same}' beside .*/two"):
        try_rewards(rewards, example)


INVALID = {
    "{}['mine']": "KeyError: 'mine'",
    "needs_answer(completions)": "'answer'",
    "[1.0]": "[1.0]",
    "['1.0', 2.0]": "'1.0'",
    "[1.0, float('nan')]": "nan",
    "{1.0, 2.0}": "{1.0, 2.0}",
    "eats()": "memory_limit_gib",
    "prints()": "MiB",
}


def test_failed_calls_score_zero_with_an_error_that_names_the_cause(open_pool, capfd):
    pool = open_pool("good", "evaluates", reward__on_error="zero", reward__memory_limit_gib=0.25)
    for (prompt, named), scored in zip(INVALID.items(), score(pool, *INVALID), strict=True):
        assert scored.scores == [[1.0, 1.0], [0.0, 0.0]], prompt
        error = str(*scored.errors)
        assert "evaluates" in error and named in error and repr(prompt) in error
        assert ("worker.py" in error) == (named == "MiB")  # else the user's frames only
    assert len(capfd.readouterr().out) <= 2 * worker.MAX_OUTPUT_CHARACTERS


def test_failed_call_names_the_completion_that_the_function_fails_on_and_its_row(open_pool):
    """One of three; `none` of them alone fails where the number of scores is wrong."""
    pool = open_pool("numbers", "none", reward__on_error="zero")
    ids = [[1], [2], [3]]
    pool.submit(0, Call("q", ["7", "x", "9"], ids, {"level": [1, 2], "long": "y" * 9999}))
    ((scores, errors, *_),) = finished(pool, 1)
    assert scores == [[0.0] * 3, [0.0] * 3]
    of_numbers, of_none = errors
    assert (of_numbers.prompt, of_numbers.completion) == ("q", "x")
    assert of_numbers.row == {"level": [1, 2]}
    assert of_numbers.error.startswith("reward 'numbers' failed on completion 2 of 3:")
    assert "ValueError" in of_numbers.error and of_none.completion == "7"
    lines = str(of_numbers).splitlines()
    assert lines[-3:] == ["prompt: 'q'", "completion: 'x'", "row: level=[1, 2]"]


def test_lost_process_costs_its_own_call_and_is_replaced(open_pool):
    """By one that the kernel ends first where memory runs out."""
    settings = {"reward__timeout_seconds": 2, "reward__num_workers": 2}
    pool = open_pool("evaluates", reward__on_error="skip_group", **settings)
    good = "[float(open('/proc/self/oom_score_adj').read())] * 2"
    prompts = [prompt for lost in LOST for prompt in (good, lost)]
    for prompt, (scores, errors, *_) in zip(prompts, score(pool, *prompts), strict=True):
        if prompt == good:
            assert scores == [[1000.0, 1000.0]] and not errors
        else:
            assert not scores and len(errors) == 1
            assert errors[0].prompt == prompt and LOST[prompt] in errors[0].error


def test_process_killed_between_two_calls_costs_nothing_and_is_reported(own, open_pool, reports):
    pool = open_pool("pid")
    for pause in (0.0, 0.5):  # before the pool notices, and after
        scores = scores_of(pool)
        own.write_text("a syntax error")
        os.kill(int(scores[0][0]), signal.SIGKILL)
        time.sleep(pause)
        for again, errors, *_ in score(pool, "q", "q", "q"):
            assert again and again != scores and not errors
    assert len(reports) == 2


def test_process_killed_during_a_call_costs_nothing_unless_it_happens_again(open_pool, reports):
    pool = open_pool("evaluates")
    assert scores_of(pool, "dies_once()") == [[1.0, 1.0]] and len(reports) == 1
    with pytest.raises(RewardError, match="SIGKILL"):
        score(pool, "os.kill(os.getpid(), signal.SIGKILL)")


def test_call_that_was_late_while_the_run_was_stopped_is_repeated(open_pool, reports, monkeypatch):
    """Ctrl-Z and a laptop that sleeps stop the run, but not the clock."""
    monkeypatch.setattr(heartbeat, "PAUSE_SECONDS", 0.0)
    pool = open_pool("evaluates", reward__timeout_seconds=2)
    assert scores_of(pool, "hangs_once()") == [[1.0, 1.0]] and len(reports) == 1
    with pytest.raises(RewardError, match="took longer than 2 s"):
        score(pool, "hangs([])")


@pytest.mark.parametrize("is_late", [True, False])
def test_programs_of_a_function_end_with_a_late_call_and_with_the_pool(
    open_pool, tmp_path, is_late
):
    number = tmp_path / "number"
    script = f"echo $$ > {number}.new; mv {number}.new {number}; exec sleep 600"
    limit = 5 if is_late else 600
    pool = open_pool("evaluates", reward__on_error="zero", reward__timeout_seconds=limit)
    pool.submit(0, Call(f"subprocess.run(['sh', '-c', {script!r}])", ["2"], [[1]], {}))
    deadline = time.monotonic() + WAIT_SECONDS
    while not number.exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    program = psutil.Process(int(number.read_text()))
    assert program.is_running()
    if is_late:
        finished(pool, 1)
    else:
        pool.close()
    assert not wait_until_gone([program])


def test_pool_that_breaks_again_and_again_is_an_error(open_pool, monkeypatch):
    monkeypatch.setattr(pool_module, "start", os._exit)  # called with a config: it fails
    with pytest.raises(RewardError, match="processes"):
        score(open_pool("good", reward__on_error="zero"))


@pytest.mark.alone
def test_close_ends_a_hanging_reward_at_once(open_pool):
    pool = open_pool("pid", "sleepy")
    pool.submit(0, Call("q", ["0"], [[1]], {}))
    ((scores, *_),) = finished(pool, 1)
    process = psutil.Process(int(scores[0][0]))
    for key in range(50):  # one running, the others queued
        pool.submit(key, Call("q", ["60"], [[1] * 10_000], {}))
    time.sleep(0.2)
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 30  # its reward takes twice as long
    assert not wait_until_gone([process])


def parent(own, connection):
    pool = RewardPool(rewards_of(f"{own}:pid", f"{own}:sleepy"), {})
    for seconds in ("0", "600"):
        pool.submit(0, Call("q", [seconds], [[1]], {}))
        ((scores, *_),) = finished(pool, 1)
        connection.send(scores[0][0])


def test_reward_processes_end_with_a_killed_parent(own):
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=parent, args=(own, theirs))
    process.start()
    try:
        assert ours.poll(WAIT_SECONDS)
        pid = ours.recv()
        children = psutil.Process(process.pid).children()
    finally:
        process.kill()
        process.join()
    assert pid in [child.pid for child in children] and len(children) >= 2
    assert not wait_until_gone(children)


def test_weighted_sum_ignores_functions_without_a_score():
    rewards = weighted_sum([[1.0, None, 0.0], [2.0, 4.0, None]], [1.0, 0.5])
    assert rewards.tolist() == [2.0, 2.0, 0.0] and rewards.dtype == "float32"


FAILS_LATER = """
def score(completions, answer, trainer_state, **_):
    if trainer_state.global_step >= 2 and "" not in completions:
        raise LookupError("no empty one")
    return [float(len(text)) for text in completions]
"""


def test_run_that_a_reward_ends_has_a_checkpoint_of_its_last_iteration(tmp_path):
    """Its errors are in a file, as with on_error=zero, with which it resumes."""
    (tmp_path / "r.py").write_text(FAILS_LATER)
    folder = tmp_path / "run"
    words = (
        *SMALL,
        "--iterations",
        "4",
        "--reward",
        f"{tmp_path}/r.py:score",
        "train.save_every=9",
    )
    code, out, err = finish("--output", str(folder), *words)
    assert code == 1 and "saving the last checkpoint" in out
    assert [each.name for each in (folder / "checkpoints").iterdir()] == ["2"]
    first, *_ = lines_of(folder / "reward_errors.jsonl")
    assert first["iteration"] == 3 and "LookupError: no empty one" in first["error"]
    assert set(first["row"]) == {"answer"} and first["prompt"].endswith("=")
    assert repr(first["completion"]) in err and "reward.on_error=stop ended it" in err
    assert err.count("LookupError: no empty one") == 1 and "reward_errors.jsonl" in err

    succeed("--resume", str(folder), "reward.on_error=zero")
    errors = lines_of(folder / "reward_errors.jsonl")
    assert (
        len([line for line in errors if line["iteration"]]) == summary_of(folder)["reward_errors"]
    )
    assert {line["iteration"] for line in errors} <= {3, 4, None}


SOMETIMES = """
import os, zlib

def score(prompts, completions, log_extra, log_metric, trainer_state, **_):
    kind = zlib.crc32(prompts[0].encode()) % 10
    if kind == 0:
        os._exit(1)
    log_extra("first", [text[:1] for text in completions])
    log_metric("steps", trainer_state.global_step)
    return [float(len(text)) for text in completions] if kind > 1 else 1 / 0
"""


@pytest.mark.long
def test_skipped_groups_keep_both_schedules_in_step_to_the_last_bit(tmp_path):
    """Processes that die and calls that raise: the same groups are skipped and replaced, and the
    same weights come out."""
    (tmp_path / "r.py").write_text(SOMETIMES)
    folder = both_schedules(
        *(tmp_path, "--iterations", "3", *SMALL, "rollout.max_concurrent_groups=2"),
        *("--reward", f"{tmp_path}/r.py:score", "reward.on_error=skip_group"),
    )
    summary, metrics = summary_of(folder), lines_of(folder / "metrics.jsonl")
    assert (summary["groups_trained"], summary["groups_not_replaced"]) == (12, 0)
    assert 0 < summary["groups_skipped"] == summary["groups_replaced"] < 12
    assert summary["groups_skipped"] == sum(line["groups_skipped"] for line in metrics)
    errors = lines_of(folder / "reward_errors.jsonl")
    of_training = [line for line in errors if line["iteration"] is not None]
    assert len(of_training) == summary["reward_errors"] == summary["groups_skipped"]
    assert len(errors) > len(of_training)  # held-out problems, too
    assert [line["steps"] for line in metrics] == [0, 1, 2]
    samples = [line for line in lines_of(folder / "samples.jsonl") if "first" in line]
    assert samples and all(line["first"] == line["completion"][:1] for line in samples)
