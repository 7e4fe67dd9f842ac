"""Scorers that tests open, and what these have scored."""

from __future__ import annotations

import select
import time
from collections.abc import Callable

from easyrl.config import Config, load_config
from easyrl.rewards.scorer import LOOK_SECONDS, Scored, Scorer

Open = Callable[..., Scorer]
"""Of reward functions (`file.py:function`), and settings as `config_of` takes them."""


def config_of(*functions: object, **settings: object) -> Config:
    """`reward__num_workers=2` stands for `reward.num_workers=2`."""
    flags = {"reward.functions": [str(each) for each in functions]} if functions else {}
    words = [f"{key.replace('__', '.')}={value}" for key, value in settings.items()]
    return load_config(None, flags, words)


def finished(scorer: Scorer, wanted: int) -> list[Scored]:
    """At least so many groups, in the order in which they were done: asked for as a rollout worker
    does, so that a wake-up that does not come is noticed."""
    scored: list[Scored] = []
    latest = time.monotonic() + 30
    while len(scored) < wanted:
        if select.select([scorer], [], [], LOOK_SECONDS)[0] or scorer.is_lost:
            scored += scorer.finished()
        assert time.monotonic() < latest, "not all was scored in 30 s"
    return scored
