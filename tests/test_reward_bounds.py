"""A reward that sleeps, dies, eats memory or prints a lot costs its own call, and is counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from easyrl import events
from easyrl.rewards import output
from easyrl.rewards.scorer import Scored, Scorer
from easyrl.runtime.iteration import IterationRecord
from runs import finish, lines_of, summary_of
from scorers import Open, finished

HOSTILE = """
import io, os, sys, time, zlib

def eats(completions, **_):
    eaten = []
    while True:
        eaten.append(bytearray(2**25))

def peak(completions, **_):
    with open("/proc/self/oom_score_adj") as file:
        return [float(file.read())] * len(completions)

def prints(completions, **_):
    for _ in range(64):
        os.write(1, b"x" * 2**20)
    print("y" * 2**20)
    return [1.0] * len(completions)

def says(completions, **_):
    print("a word")
    return [1.0] * len(completions)

def dies(completions, **_):
    os.write(2, b"last words")
    os._exit(3)

def sleeps(completions, **_):
    time.sleep(1000)

def floods(completions, **_):
    line = "x" * 1000
    for _ in range(2**20):
        print(line)
    return [1.0] * len(completions)

def floods_where_asked(prompts, completions, **_):
    if prompts[0] == "flood":
        for _ in range(2**18):
            print("x" * 1000)
    return [1.0] * len(completions)

def replaces(completions, **_):
    sys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding="utf-8")
    print("a word")
    return [1.0] * len(completions)

def closes(completions, **_):
    sys.stdout.close()
    sys.stderr.close()
    return [1.0] * len(completions)

def prints_and_dies(completions, **_):
    print("said on stderr", file=sys.stderr)
    print(f"said on {sys.stdout.name}, in part", end="")
    os._exit(1)

def good(prompts, completions, **_):
    return [len(text) % 7 / 7 for text in completions]

def some_are_hostile(prompts, completions, **_):
    chosen = zlib.crc32(prompts[0].encode()) % 40
    if chosen < 4:
        return [sleeps, dies, eats, floods][chosen](completions)
    return good(prompts, completions)
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "hostile.py"
    file.write_text(HOSTILE)
    return file


@pytest.fixture
def open_scorer(own: Path, open_scorer: Open) -> Open:
    def make(function: str, **settings: object) -> Scorer:
        return open_scorer(f"{own}:{function}", reward__on_error="skip_group", **settings)

    return make


def score(scorer: Scorer) -> Scored:
    scorer.submit(0, "q", ["2", "3"], [[5], [6, 7]], {})
    return finished(scorer, 1)[0]


def test_a_call_that_eats_memory_fails_and_is_told(open_scorer: Open) -> None:
    scored = score(open_scorer("eats", reward__memory_limit_gib=0.25))
    assert scored.scores is None
    assert "needed more than 0.25 GiB of memory (reward.memory_limit_gib)" in scored.errors[0]


def test_where_memory_ends_the_kernel_takes_a_reward_process_first(open_scorer: Open) -> None:
    assert score(open_scorer("peak")).scores == [[1000.0, 1000.0]]


def test_a_call_has_a_time_of_its_own(open_scorer: Open) -> None:
    scored = score(open_scorer("sleeps", reward__timeout_seconds=1))
    assert "took longer than 1 s (reward.timeout_seconds)" in scored.errors[0]


def test_what_is_printed_is_passed_on_up_to_a_bound_and_the_scores_count(
    open_scorer: Open, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "KEPT_BYTES", 4096)
    scored = score(open_scorer("prints"))
    assert scored.scores == [[1.0, 1.0]]
    assert "MiB more than" in scored.errors[0] and "its scores count" in scored.errors[0]
    assert float(scored.errors[0].split("printed ")[1].split()[0]) > 60
    printed = capfd.readouterr().err
    assert 4096 < len(printed) < 5000 and "left out" in printed


def test_what_is_printed_without_measure_is_told_of_the_call_that_did(
    open_scorer: Open, capfd: pytest.CaptureFixture[str]
) -> None:
    """Dropped where it is printed: three calls that are answered meanwhile do not hear of it."""
    scorer = open_scorer("floods_where_asked", reward__num_workers=2)
    for prompt in ("flood", "a", "b", "c"):
        scorer.submit(prompt, prompt, ["2", "3"], [[5], [6, 7]], {})
    errors = {each.key: list(each.errors) for each in finished(scorer, 4)}
    assert [key for key, told in errors.items() if told] == ["flood"]
    (error,) = errors["flood"]
    assert "for the prompt 'flood'" in error and "before the answer" not in error
    bytes_printed = 1001 * 2**18
    dropped = float(error.split("printed ")[1].split()[0]) * 2**20
    share = output.KEPT_BYTES // 2
    assert abs(bytes_printed - share - dropped) < 2**18
    scorer.close()
    printed = capfd.readouterr().err
    notice = output.NOTICE.decode()
    assert printed.count(notice) == 1 and len(printed) == share + len(notice)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_what_is_printed_before_a_crash_is_lost_only_where_python_buffers_it(
    unbuffered: str, own: Path, tmp_path: Path
) -> None:
    code = f"""if __name__ == "__main__":
    import select
    from easyrl.config import load_config
    from easyrl.rewards.scorer import Scorer
    flags = {{"reward.functions": ["{own}:prints_and_dies"], "reward.on_error": "zero"}}
    scorer = Scorer(load_config(None, flags, []))
    scorer.submit(0, "q", ["2"], [[5]], {{}})
    select.select([scorer], [], [])
    scorer.close()
"""
    (tmp_path / "script.py").write_text(code)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")],
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "said on stderr\n" in done.stderr
    assert ("said on <stdout>, in part" in done.stderr) == bool(unbuffered)


COUNTED = """
import sys
from easyrl.rewards import output

class Counting(output.Printed):
    num_writes = 0

    def write(self, descriptor, data):
        self.num_writes += 1
        super().write(descriptor, data)

printed = Counting(room=4096)
for _ in range(10_000):
    print("x" * 99, file=sys.{stream})
assert printed.take_dropped() == 10_000 * 100 - 4096
assert printed.num_writes < 400, printed.num_writes
print("and more", file=sys.{stream}, flush=True)
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_what_is_dropped_is_taken_in_large_pieces_also_where_each_line_counts(
    stream: str, unbuffered: str
) -> None:
    """A gigabyte of lines would else cost two seconds of processor time, not half of one."""
    done = subprocess.run(
        [sys.executable, "-c", COUNTED.format(stream=stream)],
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        capture_output=True,
        timeout=60,
        check=True,
    )
    told, other = (done.stdout, done.stderr) if stream == "stdout" else (done.stderr, done.stdout)
    assert told == (b"x" * 99 + b"\n") * 40 + b"x" * 96 + output.NOTICE and other == b""


THREADS = """
import sys, threading
from easyrl.rewards import output

printed = output.Printed(room=2**16)
threads = [
    threading.Thread(target=lambda: [print("x" * 999_999, file=sys.stderr) for _ in range(4)])
    for _ in range(4)
]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert printed.take_dropped() == 16 * 10**6 - 2**16
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_threads_that_print_at_once_have_one_bound(unbuffered: str) -> None:
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", THREADS],
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0 and len(done.stderr) == 2**16 + len(output.NOTICE)


def test_a_reward_may_close_what_it_prints_to(open_scorer: Open) -> None:
    scorer = open_scorer("closes", reward__num_workers=1)
    assert [score(scorer).scores for _ in range(2)] == [[[1.0, 1.0]]] * 2


@pytest.mark.parametrize(
    ("function", "words"), [("says", "a word\n"), ("dies", "last words"), ("replaces", "a word\n")]
)
def test_what_is_printed_is_not_lost(
    function: str, words: str, open_scorer: Open, capfd: pytest.CaptureFixture[str]
) -> None:
    scorer = open_scorer(function)
    score(scorer)
    scorer.close()
    assert capfd.readouterr().err == words


def test_what_is_logged_is_averaged_over_the_groups_that_have_it() -> None:
    record = IterationRecord(0)
    for index, logged in enumerate([{"words": 2.0, "reward": 1.0}, {"words": 3.0}, {}]):
        record.add_group(
            "rollout-0",
            events.GroupScored(
                iteration=0,
                place=index,
                prompt_index=index,
                rewards=[0.0, 1.0],
                rewards_by_function=[[0.0, 1.0]],
                completion_lengths=[3, 5],
                num_truncated=1,
                busy_seconds=0.0,
                logged=logged,
            ),
            1.0,
        )
    assert record.logged(taken=["reward"]) == {"words": 2.5, "logged/reward": 1.0}


LOGS = """
def score(prompts, completions, log_extra, log_metric, trainer_state, **_):
    log_extra("first", [text[:1] for text in completions])
    log_metric("steps", trainer_state.global_step)
    return [float(len(text)) for text in completions]
"""


@pytest.mark.long
def test_what_rewards_log_is_in_the_runs_files(tmp_path: Path) -> None:
    (tmp_path / "logs.py").write_text(LOGS)
    folder = tmp_path / "run"
    code, _, err = finish(
        *("--output", str(folder), "--iterations", "2", "--reward", f"{tmp_path}/logs.py:score"),
        *("train.prompts_per_iteration=2", "rollout.num_generations=2", "data.num_held_out=0"),
    )
    assert (code, err) == (0, "")
    assert [line["steps"] for line in lines_of(folder / "metrics.jsonl")] == [0, 1]
    for line in lines_of(folder / "metrics.jsonl"):
        assert {"rewards/score/mean", "rewards/score/std"} <= line.keys()
    for sample in lines_of(folder / "samples.jsonl"):
        assert sample["first"] == sample["completion"][:1]


@pytest.mark.long
def test_hostile_rewards_leave_a_run_its_speed(tmp_path: Path, own: Path) -> None:
    """In one group of ten: endless sleep, a dead process, too much memory, a gigabyte printed. An
    iteration takes longer than the time that the one who sleeps has: at its end all wait for it."""
    seconds = {}
    for function in ("good", "some_are_hostile"):
        folder = tmp_path / function
        code, _, err = finish(
            *("--output", str(folder), "--iterations", "5", "--reward", f"{own}:{function}"),
            *("train.prompts_per_iteration=48", "rollout.num_generations=16"),
            *("data.num_held_out=0", "reward.num_workers=4", "reward.on_error=zero"),
            *(
                "reward.timeout_seconds=2",
                "reward.memory_limit_gib=0.5",
                "train.keep_checkpoints=0",
            ),
            timeout=600,
        )
        assert (code, err) == (0, "")
        metrics = lines_of(folder / "metrics.jsonl")
        seconds[function] = sum(line["perf/iteration_seconds"] for line in metrics)
    errors = [json.dumps(line) for line in lines_of(folder / "reward_errors.jsonl")]
    for told in ("took longer", "exit code 3", "GiB of memory", "MiB more than"):
        assert any(told in line for line in errors), told
    assert summary_of(folder)["reward_errors"] == len(errors)
    assert seconds["good"] / seconds["some_are_hostile"] > 0.8, seconds
    assert sum(file.stat().st_size for file in (folder / "logs").iterdir()) < 20 * 2**20
