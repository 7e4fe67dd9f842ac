"""What a reward call that fails costs: that call, and what `reward.on_error` says."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from pebble import ProcessFuture

from easyrl import events
from easyrl.rewards.functions import RewardError
from easyrl.rewards.scorer import Scored, Scorer
from easyrl.runtime.iteration import IterationRecord
from runs import SMALL, finish, lines_of, summary_of, without_timing
from scorers import Open, finished

FAILING = """
import os, signal, time
import numpy as np

def good(completions, **_): return [1.0] * len(completions)
def pid(completions, **_): return [os.getpid()] * len(completions)
def raises(completions, **_): raise KeyError("mine")
def too_few(completions, **_): return [1.0]
def nan(completions, **_): return [1.0, float("nan")]
def huge(completions, **_): return [1.0, 1e39]
def no_list(completions, **_): return np.array(1.0)
def none(completions, **_): return [None, None]
def sometimes_none(completions, **_): return [None, 1.0]
def exits(completions, **_): os._exit(3)
def exits_well(completions, **_): os._exit(0)
def crashes(completions, **_): os.kill(os.getpid(), signal.SIGSEGV)
def hangs(completions, **_): time.sleep(1000)

def by_prompt(prompts, completions, **_):
    return {"good": good, "exits": exits, "raises": raises, "hangs": hangs}[prompts[0]](completions)
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "failing.py"
    file.write_text(FAILING)
    return file


@pytest.fixture
def open_scorer(own: Path, open_scorer: Open) -> Open:
    def make(on_error: str, *functions: str, **settings: object) -> Scorer:
        mine = [f"{own}:{function}" for function in functions]
        return open_scorer(*mine, reward__on_error=on_error, runtime__timeout_seconds=2, **settings)

    return make


def score(scorer: Scorer, *prompts: str) -> list[Scored]:
    """Two completions of each prompt, scored; the prompts' numbers are the keys."""
    for key, prompt in enumerate(prompts):
        scorer.submit(key, prompt, ["2", "3"], [[5], [6, 7]], {})
    return sorted(finished(scorer, len(prompts)))


# One call.

FAILURES = {
    "raises": "KeyError: 'mine'",
    "too_few": "returned 1 value; accepted",
    "nan": "returned nan",
    "huge": "returned 1e+39; accepted: finite numbers up to 1e+30",
    "no_list": "returned array(1.); accepted: a list of 2 numbers",
    "none": "every reward function returned None for completion 0",
    "exits": "ended its process (exit code 3)",
    "exits_well": "ended its process (exit code 0)",
    "crashes": "ended its process (exit code -11)",
    "hangs": "took longer than 2 s (runtime.timeout_seconds)",
}


@pytest.mark.parametrize("function", FAILURES)
def test_a_failed_call_is_skipped_or_scores_zero_and_says_why(
    open_scorer: Open, function: str
) -> None:
    for on_error, expected in (("skip_group", None), ("zero", [[0.0, 0.0]])):
        ((_, scores, errors, *_),) = score(open_scorer(on_error, function), "1+1=")
        assert scores == expected
        assert FAILURES[function] in errors[0]
        assert "for the prompt '1+1='" in errors[0]


def test_zero_is_for_the_function_that_failed_and_for_what_none_scored(open_scorer: Open) -> None:
    ((_, scores, errors, *_),) = score(open_scorer("zero", "good", "raises"), "q")
    assert scores == [[1.0, 1.0], [0.0, 0.0]] and len(errors) == 1
    ((_, scores, errors, *_),) = score(open_scorer("zero", "sometimes_none"), "q")
    assert scores == [[0.0, 1.0]] and len(errors) == 1


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_lost_process_costs_its_own_call_and_is_replaced(
    open_scorer: Open, num_workers: int
) -> None:
    scorer = open_scorer("skip_group", "by_prompt", reward__num_workers=num_workers)
    prompts = ["good", "exits", "good", "raises", "good", "hangs", "exits", "good"]
    scored = score(scorer, *prompts)
    assert [s.scores for s in scored] == [
        [[1.0, 1.0]] if prompt == "good" else None for prompt in prompts
    ]
    assert [len(s.errors) for s in scored] == [int(prompt != "good") for prompt in prompts]


def test_a_process_killed_between_two_calls_costs_nothing(open_scorer: Open) -> None:
    scorer = open_scorer("skip_group", "pid")
    for pause in (0.0, 0.5):  # before the pool has noticed, and after
        ((_, scores, *_),) = score(scorer, "q")
        assert scores is not None and scores[0][0] is not None
        os.kill(int(scores[0][0]), signal.SIGKILL)
        time.sleep(pause)
        for _, again, errors, *_ in score(scorer, "q", "q", "q"):
            assert again is not None and again != scores and not errors
    ((template, *others),) = [
        [child, *child.children()]
        for child in psutil.Process().children()
        if "forkserver" in " ".join(child.cmdline())
    ]
    assert len(others) == 1, template  # no pool is left over


def test_pipes_that_a_dead_process_has_locked_cost_nothing(
    open_scorer: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("easyrl.rewards.scorer.LOCK_TIMEOUT_SECONDS", 1.0)
    scorer = open_scorer("skip_group", "pid")
    ((_, before, *_),) = score(scorer, "q")
    pipes = scorer._pool._pool_manager.worker_manager.workers_channel
    assert pipes.mutex.writer_mutex.acquire(timeout=5)  # and never released
    for _, again, errors, *_ in score(scorer, "q", "q"):
        assert again is not None and again != before and not errors


@pytest.mark.parametrize("on_error", ["skip_group", "stop"])
def test_calls_that_a_lost_pool_never_answers_are_sent_again(
    open_scorer: Open, monkeypatch: pytest.MonkeyPatch, on_error: str
) -> None:
    """A pool that is lost between taking a call and looking at it forgets the call."""
    scorer = open_scorer(on_error, "pid")
    ((_, before, *_),) = score(scorer, "q")
    assert before is not None and before[0][0] is not None
    monkeypatch.setattr(scorer._pool, "schedule", lambda *_, **__: ProcessFuture())
    os.kill(int(before[0][0]), signal.SIGKILL)
    if on_error == "stop":
        with pytest.raises(RewardError, match=r"killed between calls.*fewer reward.num_workers"):
            score(scorer, "q")
        return
    for _, again, errors, *_ in score(scorer, "q", "q"):
        assert again is not None and again != before and not errors


# An iteration.


def test_skipped_groups_are_counted_and_have_no_reward() -> None:
    record = IterationRecord(0, num_replacement_rounds=1)
    nan = float("nan")
    for index, (rewards, skipped) in enumerate([([0.0, 1.0], False), ([nan, nan], True)]):
        record.add_group(
            "rollout-0",
            events.GroupScored(
                iteration=0,
                place=index,
                prompt_index=index,
                rewards=rewards,
                rewards_by_function=[] if skipped else [rewards],
                completion_lengths=[3, 5],
                num_truncated=1,
                busy_seconds=0.0,
                errors=["why"] * skipped,
                is_skipped=skipped,
                is_unwanted=skipped,
            ),
            1.0,
        )
    record.trained = events.IterationTrained(0, 1, 2, 0, 16, 0.0, {})
    metrics = record.metrics(["score"])
    assert (metrics["groups_skipped"], metrics["reward_errors"]) == (1, 1)
    assert (metrics["groups_replaced"], metrics["groups_not_replaced"]) == (0, 1)
    assert metrics["reward"] == metrics["rewards/score/mean"] == 0.5
    assert metrics["completions/mean_length"] == 4.0
    record.groups.pop(0)
    assert str(record.metrics(["score"])["reward"]) == "nan"


# A run.

SOMETIMES = """
import os, zlib

def score(prompts, completions, **_):
    kind = zlib.crc32(prompts[0].encode()) % 10
    if kind == 0:
        os._exit(1)
    return [float(len(text)) for text in completions] if kind > 1 else 1 / 0
"""


@pytest.mark.long
def test_skipped_groups_keep_both_schedules_in_step_to_the_last_bit(tmp_path: Path) -> None:
    """Processes that die and calls that raise, under random delays: the same groups are skipped and
    replaced, and the same weights come out."""
    (tmp_path / "r.py").write_text(SOMETIMES)
    ends = {}
    for schedule in ("sync", "periodic"):
        folder = tmp_path / schedule
        code, out, err = finish(
            *("--output", str(folder), "--iterations", "3", "--schedule", schedule, *SMALL),
            *("--reward", f"{tmp_path}/r.py:score", "reward.on_error=skip_group"),
            *("runtime.deterministic=true", "rollout.max_concurrent_groups=2"),
            EASYRL_RANDOM_DELAYS="0.01",
        )
        assert (code, err) == (0, "")
        assert "all such errors are in" in out and "groups skipped" in out
        summary = summary_of(folder)
        metrics = [without_timing(line) for line in lines_of(folder / "metrics.jsonl")]
        assert summary["groups_trained"] == 12
        assert 0 < summary["groups_skipped"] == sum(line["groups_skipped"] for line in metrics) < 12
        assert (summary["groups_replaced"], summary["groups_not_replaced"]) == (
            summary["groups_skipped"],
            0,
        )
        errors = lines_of(folder / "reward_errors.jsonl")
        of_training = [line for line in errors if line["iteration"] is not None]
        assert len(of_training) == summary["reward_errors"] == summary["groups_skipped"]
        assert len(errors) > len(of_training)  # held-out problems, too
        places = sorted((line["iteration"], line["prompt_index"]) for line in of_training)
        ends[schedule] = summary["weights_sha256"], metrics, places
    assert ends["sync"] == ends["periodic"]
