"""Reward pools of tests, and whether programs can be scored here."""

import select
import time

import pytest

from easyrl.config import load_config
from easyrl.rewards import sandbox, worker
from easyrl.rewards.pool import POLL_SECONDS
from easyrl.rewards.worker import Call, TrainerState
from easyrl.runtime.resolve import resolve
from own_processes import WAIT_SECONDS

try:
    sandbox.find_variant("bwrap")
    problem = ""
except sandbox.SandboxError as error:
    problem = str(error)
needs_bwrap = pytest.mark.skipif(bool(problem), reason=problem)


def config_of(*functions, **settings):
    """`reward__num_workers=2` stands for `reward.num_workers=2`."""
    flags = {"reward.functions": [str(each) for each in functions]} if functions else {}
    words = [f"{key.replace('__', '.')}={value}" for key, value in settings.items()]
    return load_config(None, flags, words)


def rewards_of(*functions, **settings):
    return resolve(config_of(*functions, **settings)).rewards


def call(rewards, prompt, completions):
    """Score a group in this process, as a reward process does. Completion n has n + 1 tokens, and
    5 of 20 updates are done."""
    ids = [[7] * (index + 1) for index in range(len(completions))]
    functions = list(range(len(rewards.functions)))
    state = TrainerState(global_step=5, max_steps=20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "_rewards", rewards, raising=False)
        patch.setattr(worker, "_functions", [])
        return worker.run_call(
            Call(prompt.content, completions, ids, prompt.columns, state, functions)
        )


def finished(pool, num_groups):
    """Wait as a rollout worker does, so that a missing wake-up is noticed. Sorted by their keys."""
    scored = []
    deadline = time.monotonic() + WAIT_SECONDS
    while len(scored) < num_groups:
        if select.select([pool], [], [], POLL_SECONDS)[0] or pool.is_broken:
            scored += pool.finished()
        assert time.monotonic() < deadline, "not all was scored in time"
    return [each for _, each in sorted(scored)]
