"""Metrics of an iteration from its reports, and how they go on from earlier lines."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from easyrl import events
from easyrl.config import load_config
from easyrl.layout.tree import TokenTree
from easyrl.runtime.metrics import iteration_metrics, summarize
from easyrl.runtime.resolve import resolve
from easyrl.runtime.resume import SavedState
from easyrl.types import Completion


def iteration_line(before, **reported):
    """Metrics of an iteration with a trained group and a rejected one, in a run with tools."""
    rewards = resolve(load_config(None, {"rollout.environment": "guess"})).rewards
    rewards = replace(rewards, names=())  # no scores by function
    rejected = events.GroupScored(
        1, 0, 0, [1.0, 1.0], [], [2, 4], 0, 1.0, num_inserted_tokens=1, num_prompt_tokens=10
    )
    group = replace(rejected, completion_lengths=[7, 8], num_inserted_tokens=9)
    trained = events.IterationTrained(0, 1, 1, 15, 1.0, {}, inserted_tokens=9)
    ledger = SimpleNamespace(
        reports=[rejected, group], trained=trained, round=1, engine_seconds={"": 1.0}
    )
    return iteration_metrics(ledger, rewards, before, {"perf/iteration_seconds": 2.0}, 2)


def test_a_resumed_run_goes_on_from_the_counts_of_an_older_version():
    line = iteration_line({})
    counts = {
        "num_completion_tokens": 15,
        "num_inserted_tokens": 9,
        "num_trainer_tokens": 24,
        "num_generated_tokens": 21,
        "num_tokens": 41,
        "completions/mean_length": 5.25,
        "completions/min_length": 2,
        "completions/mean_inserted_length": 2.5,
        "perf/tokens_per_second": 7.5,
        "perf/tokens_per_second_per_device": 3.75,
    }
    assert {name: line[name] for name in counts} == counts
    # An older line has one count of what was trained, with inserted tokens.
    old = {"num_tokens": 100, "num_generated_tokens": 130}
    resumed = iteration_line(old)
    assert resumed["num_completion_tokens"] == 115 and resumed["num_inserted_tokens"] == 9
    assert resumed["num_trainer_tokens"] == 124 and resumed["num_generated_tokens"] == 151
    again = iteration_line(resumed)
    assert again["num_completion_tokens"] == 130 and again["num_trainer_tokens"] == 148
    schedule = resolve(load_config()).schedule
    for newest, sampled, total in ((old, 100, 100), (again, 130, 148)):
        summary = summarize([newest], schedule, [], SavedState(), 1)
        assert (summary["completion_tokens"], summary["trainer_tokens"]) == (sampled, total)


def test_tokens_read_before_the_first_sampled_one_are_those_of_its_own_path():
    # A prompt of 4 tokens. Node 1: a request of 3 tokens whose answer never came. Node 2, beside
    # it: a request of 2 tokens and an answer of 2.
    tree = TokenTree(np.array([4, 3, 4]), np.array([-1, 0, 0]))
    is_sampled = np.array([0, 0, 0, 0, 0, 1, 1], bool)
    ids = np.arange(7, dtype=np.int32)
    logprobs = np.zeros(7, np.float32)
    completion = Completion(ids, logprobs, "stop", is_sampled, tree)
    assert completion.num_read_before(4) == 4 + 2
    assert completion.num_sampled == 2 and completion.num_inserted == 5
    assert replace(completion, tree=None).num_read_before(4) == 4 + 5
