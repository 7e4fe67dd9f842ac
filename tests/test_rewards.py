"""Rewards: TRL's signature, clear errors, and processes that neither block nor outlive a run."""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from easyrl.config import ConfigError
from easyrl.rewards.functions import exact_match
from easyrl.rewards.loading import (
    check_rewards,
    load_reward,
    reward_names,
    reward_specs,
    reward_weights,
)
from easyrl.rewards.scorer import RewardError, Scorer, Scores, combine
from easyrl.types import Prompt
from scorers import Open, config_of, finished

CHAT = [{"role": "user", "content": "1+1?"}]
OWN = """
import os, sys, time
import numpy as np

def arguments(prompts, completions, completion_ids, answer, **columns):
    assert prompts == ["1+1="] * 2, prompts
    assert completions == ["2", "3"], completions
    assert completion_ids == [[5], [6, 7]], completion_ids
    assert answer == ["2", "2"], answer
    from_trainer = {"trainer_state", "log_extra", "log_metric"}
    assert columns.keys() - from_trainer == {"level"} and columns["level"] == [4, 4], columns
    assert columns.keys() >= from_trainer, columns
    return [0.5, None]

def chat(prompts, completions, completion_ids, **columns):
    assert prompts == [[{"role": "user", "content": "1+1?"}]] * 2, prompts
    return [float(completion[0]["content"]) for completion in completions]

def torch_free(completions, **_):
    return [float("torch" in sys.modules)] * len(completions)

def process(completions, **_):
    return [os.getpid()] * len(completions)

def sleepy(completions, **_):
    time.sleep(float(completions[0]))
    return [1.0] * len(completions)

def hang(completions, **_):
    while True:
        time.sleep(60)

def crash(completions, **_):
    os._exit(7)

def leave(completions, **_):
    sys.exit("no")

def broken(completions, **_):
    return [1 / 0]

def greedy(completions, answer, **_):
    return [1.0] * len(completions)

def numpy_scores(completions, **_):
    return np.array([0.25, 0.75], dtype=np.float32)

def too_few(completions, **_): return [1.0]
def text(completions, **_): return ["1.0", 2.0]
def nan(completions, **_): return [1.0, float("nan")]
def scalar(completions, **_): return 1.0
def nothing(completions, **_): return None
def never(completions, **_): return [None, 1.0]
not_a_function = 3
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "my_rewards.py"
    file.write_text(OWN, encoding="utf-8")
    return file


def submit(scorer: Scorer, key: Any = 0, *, prompt: Any = "1+1=", **columns: Any) -> None:
    scorer.submit(key, prompt, ["2", "3"], [[5], [6, 7]], columns)


def wait_for(scorer: Scorer, count: int = 1) -> list[tuple[Any, Scores]]:
    pairs = []
    for key, scores, *_ in finished(scorer, count):
        assert scores is not None
        pairs.append((key, scores))
    return pairs


def error_of(scorer: Scorer, **columns: Any) -> str:
    submit(scorer, **columns)
    with pytest.raises(RewardError) as caught:
        wait_for(scorer)
    return str(caught.value)


def ended(pid: int, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


# The functions.


def test_exact_match_compares_the_whole_completion() -> None:
    completions = ["42", " 42\n", "4", "it is 42"]
    scores = exact_match("answer", ["q"] * 4, completions, [[1]] * 4, answer=[42, "42", "42", "42"])
    assert scores == [1.0, 1.0, 0.0, 0.0]


def test_exact_match_reads_chat_completions_and_skips_rows_without_answer() -> None:
    completions = [[{"role": "assistant", "content": "2"}]] * 2
    scores = exact_match("answer", [CHAT] * 2, completions, [[1]] * 2, answer=["2", None])
    assert scores == [1.0, None]


def test_exact_match_uses_the_answer_column() -> None:
    function = load_reward("exact_match", config_of(reward__answer_column="solution"))
    assert function(["q"], ["a"], [[1]], solution=["a"]) == [1.0]
    with pytest.raises(ValueError, match=r"'solution' \(reward.answer_column\).*has: answer"):
        function(["q"], ["a"], [[1]], answer=["a"])
    # No name of a column is in the way.
    assert function(["q"], ["a"], [[1]], solution=["a"], answer_column=["b"]) == [1.0]


# Loading.


def test_task_brings_its_reward_and_own_functions_replace_it(own: Path) -> None:
    assert reward_specs(config_of()) == ["easyrl.tasks.arithmetic:score"]
    assert reward_specs(config_of("exact_match")) == ["exact_match"]
    assert reward_weights(config_of("exact_match", f"{own}:chat")) == [1.0, 1.0]
    with pytest.raises(ConfigError, match=r"reward.functions.*data.jsonl.*accepted: exact_match"):
        reward_specs(config_of(data__dataset="data.jsonl"))


def test_names_are_the_functions_and_as_much_more_as_tells_them_apart() -> None:
    names = reward_names(config_of("a.py:score", "/x/b.py:score", "m.n:score", "exact_match"))
    assert names == ["a.py:score", "b.py:score", "m.n:score", "exact_match"]
    names = reward_names(config_of("/x/a.py:score", "/y/a.py:score", "/y/a.py:other"))
    assert names == ["/x/a.py:score", "/y/a.py:score", "other"]
    assert reward_names(config_of("a.py:score")) == ["score"]


def test_function_from_file_and_from_module(
    own: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert load_reward(f"{own}:numpy_scores", config_of())(completions=[]) is not None
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "inner.py").write_text("def f(**_): return [3.0]")
    assert load_reward("my_package.inner:f", config_of())() == [3.0]


def test_file_may_import_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "beside_my_reward.py").write_text("VALUE = 4.0")
    (tmp_path / "r.py").write_text("import beside_my_reward as b\ndef f(**_): return [b.VALUE]")
    assert load_reward(f"{tmp_path / 'r.py'}:f", config_of())() == [4.0]


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("exactmatch", "did you mean exact_match?"),
        ("my.py:", "accepted: exact_match, math, gsm8k, "),
        (":f", "accepted: exact_match, math, gsm8k, "),
        ("none.py:f", "there is no file 'none.py'"),
        ("no_such_module:f", "there is no module 'no_such_module'"),
        ("json.no_such:f", "there is no module 'json.no_such'"),
        ("json.decoder:no_such", "has no function 'no_such'; it has: py_scanstring, JSONObject"),
    ],
)
def test_unknown_reward_is_told(spec: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_reward(spec, config_of())
    assert "reward.functions (--reward)" in str(caught.value)
    assert told in str(caught.value)


def test_missing_function_lists_those_there_are(own: Path) -> None:
    for name in ("scroe", "not_a_function"):
        with pytest.raises(ConfigError, match=f"no function '{name}'; it has: arguments, chat"):
            load_reward(f"{own}:{name}", config_of())


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("import no_such_thing", "No module named 'no_such_thing'"),
        ("def f(:", "SyntaxError"),
        ("x = 1\nraise KeyError('mine')", "line 2, in <module>"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
    ],
)
def test_error_in_the_users_file_is_shown_as_it_is(source: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text(source)
    for _ in range(2):  # a failed import leaves nothing half made behind
        with pytest.raises(ConfigError) as caught:
            load_reward(f"{file}:f", config_of())
        assert told in str(caught.value)
        assert "bad.py' fails to load" in str(caught.value)
        assert "loading.py" not in str(caught.value)


def test_check_finds_a_missing_answer_column_before_the_run() -> None:
    check_rewards(config_of("exact_match"), Prompt(0, "q", {"answer": "a"}))
    with pytest.raises(ConfigError, match="no column 'answer' for exact_match; the data has: x"):
        check_rewards(config_of("exact_match"), Prompt(0, "q", {"x": "a"}))


# Scoring.


def test_function_gets_trls_arguments(own: Path, open_scorer: Open) -> None:
    scorer = open_scorer(f"{own}:arguments", f"{own}:numpy_scores")
    submit(scorer, "key", answer="2", level=4)
    assert wait_for(scorer) == [("key", [[0.5, None], [0.25, 0.75]])]


def test_chat_completions_are_assistant_messages(own: Path, open_scorer: Open) -> None:
    scorer = open_scorer(f"{own}:chat")
    submit(scorer, prompt=CHAT)
    assert wait_for(scorer) == [(0, [[2.0, 3.0]])]


def test_task_scores_itself(open_scorer: Open) -> None:
    scorer = open_scorer()
    scorer.submit(7, "1+1=", ["#2", "#3"], [[1], [2]], {"answer": "2"})
    assert wait_for(scorer) == [(7, [[1.0, 0.0]])]


def test_reward_processes_import_no_torch(own: Path, open_scorer: Open) -> None:
    scorer = open_scorer(f"{own}:torch_free")
    submit(scorer)
    assert wait_for(scorer) == [(0, [[0.0, 0.0]])]


@pytest.mark.alone
def test_slow_reward_does_not_block(own: Path, open_scorer: Open) -> None:
    scorer = open_scorer(f"{own}:sleepy")
    scorer.submit(0, "q", ["0"], [[1]], {})
    wait_for(scorer)  # the process is up
    began = time.perf_counter()
    scorer.submit(1, "q", ["0.5"], [[1]], {})
    assert scorer.finished() == []
    assert select.select([scorer], [], [], 0)[0] == []
    assert time.perf_counter() - began < 0.1
    assert wait_for(scorer) == [(1, [[1.0]])]
    assert select.select([scorer], [], [], 0)[0] == []  # the wake-up is used up


@pytest.mark.alone
def test_several_processes_score_at_once(own: Path, open_scorer: Open) -> None:
    scorer = open_scorer(f"{own}:sleepy", reward__num_workers=2)
    for key in range(2):
        scorer.submit(key, "q", ["0.3"], [[1]], {})
    wait_for(scorer, 2)
    began = time.perf_counter()
    for key in range(2):
        scorer.submit(key, "q", ["0.8"], [[1]], {})
    assert {key for key, _ in wait_for(scorer, 2)} == {0, 1}
    assert time.perf_counter() - began < 1.5


@pytest.mark.alone
def test_dispatch_takes_well_under_two_milliseconds(open_scorer: Open) -> None:
    scorer = open_scorer()
    seconds = []
    for key in range(101):
        began = time.perf_counter()
        scorer.submit(key, "1+1=", ["#2"] * 8, [[1] * 100] * 8, {"answer": "2"})
        wait_for(scorer)
        seconds.append(time.perf_counter() - began)
    assert sorted(seconds)[50] < 2e-3


@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("too_few", "returned 1 value; accepted: a list of 2 numbers or None"),
        ("text", "returned '1.0' among its values"),
        ("nan", "returned nan; accepted: finite numbers"),
        ("scalar", "returned 1.0; accepted: a list of 2"),
        ("nothing", "returned None; accepted: a list of 2"),
        ("broken", "ZeroDivisionError"),
        ("leave", "SystemExit: no"),
        ("crash", "ended its process (exit code 7)"),
        ("greedy", "missing 1 required positional argument: 'answer'"),
        ("never", "every reward function returned None for completion 0"),
    ],
)
def test_bad_reward_is_an_error_that_names_function_and_prompt(
    function: str, told: str, own: Path, open_scorer: Open
) -> None:
    message = error_of(open_scorer(f"{own}:{function}"), level=3)
    assert told in message
    assert "'1+1='" in message
    assert function in message or function == "never"
    assert "scorer.py" not in message


def test_killed_process_is_an_error_and_no_wait(own: Path, open_scorer: Open) -> None:
    scorer = open_scorer(f"{own}:process")
    submit(scorer)
    ((_, [[pid, _]]),) = wait_for(scorer)
    assert pid is not None
    os.kill(int(pid), signal.SIGKILL)
    with pytest.raises(RewardError, match=r"reward \(process\).*process"):
        while True:  # before the pool noticed, or after
            submit(scorer)
            wait_for(scorer)


def test_hanging_reward_is_bounded(own: Path, open_scorer: Open) -> None:
    message = error_of(open_scorer(f"{own}:hang", runtime__timeout_seconds=1))
    assert "reward (hang) took longer than 1 s (runtime.timeout_seconds)" in message


def test_error_in_the_reward_file_reaches_the_parent(tmp_path: Path, open_scorer: Open) -> None:
    (tmp_path / "bad.py").write_text("import no_such_thing")
    message = error_of(open_scorer(f"{tmp_path / 'bad.py'}:f"))
    assert "No module named 'no_such_thing'" in message


# The processes.


@pytest.mark.alone
def test_close_ends_a_hanging_reward_at_once(own: Path, open_scorer: Open) -> None:
    scorer = open_scorer(f"{own}:process", f"{own}:sleepy")
    scorer.submit(0, "q", ["0"], [[1]], {})
    ((_, [[pid], _]),) = wait_for(scorer)
    assert pid is not None
    for key in range(50):  # one running, the others queued
        scorer.submit(key, "q", ["60"], [[1] * 10_000], {})
    time.sleep(0.2)
    began = time.monotonic()
    scorer.close()
    assert time.monotonic() - began < 2
    assert ended(int(pid), 0.1)
    scorer.close()  # again: nothing


def test_ctrl_c_leaves_the_reward_processes_alone(own: Path, open_scorer: Open) -> None:
    scorer = open_scorer(f"{own}:process")
    submit(scorer)
    ((_, [[pid, _]]),) = wait_for(scorer)
    assert pid is not None
    os.kill(int(pid), signal.SIGINT)
    submit(scorer)
    assert wait_for(scorer) == [(0, [[pid, pid]])]


PARENT = """
import select, sys
from easyrl.config import load_config
from easyrl.rewards.scorer import Scorer

if __name__ == "__main__":
    functions = [f"{sys.argv[1]}:process", f"{sys.argv[1]}:sleepy"]
    scorer = Scorer(load_config(None, {"reward.functions": functions}))
    scorer.submit(0, "q", ["0"], [[1]], {})
    select.select([scorer], [], [])
    print(int(scorer.finished()[0][1][0][0]), flush=True)
    scorer.submit(1, "q", ["600"], [[1]], {})
    select.select([scorer], [], [])
"""


def test_reward_processes_die_with_a_killed_parent(own: Path, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    command = [sys.executable, str(script), str(own)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert psutil.pid_exists(pid)
        parent.kill()
    assert ended(pid)


# Several functions.


def test_combine_is_the_weighted_sum_of_what_applies() -> None:
    rewards = combine([[1.0, None, 0.0], [2.0, 4.0, None]], [1.0, 0.5])
    assert rewards.tolist() == [2.0, 2.0, 0.0]
    assert rewards.dtype == "float32"


def test_combine_refuses_a_completion_that_no_function_scores() -> None:
    with pytest.raises(ValueError, match="completion 1"):
        combine([[1.0, None], [1.0, None]], [1.0, 1.0])
