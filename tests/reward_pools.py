"""Reward pools of tests."""

from __future__ import annotations

import select
import time

from easyrl.config import Config, load_config
from easyrl.rewards.pool import POLL_SECONDS, RewardPool, ScoredGroup


def config_of(*functions: object, **settings: object) -> Config:
    """`reward__num_workers=2` stands for `reward.num_workers=2`."""
    flags = {"reward.functions": [str(each) for each in functions]} if functions else {}
    words = [f"{key.replace('__', '.')}={value}" for key, value in settings.items()]
    return load_config(None, flags, words)


def finished(pool: RewardPool, num_groups: int) -> list[ScoredGroup]:
    """Wait as a rollout worker does, so that a missing wake-up is noticed."""
    scored: list[ScoredGroup] = []
    deadline = time.monotonic() + 60
    while len(scored) < num_groups:
        if select.select([pool], [], [], POLL_SECONDS)[0] or pool.is_broken:
            scored += pool.finished()
        assert time.monotonic() < deadline, "not all was scored in 60 s"
    return scored
