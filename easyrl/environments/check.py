"""Check environments and their conversations before a run starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from easyrl.config import Config, ConfigError
from easyrl.data.streams import ENVIRONMENT_COLUMN
from easyrl.environments.loading import KEY, Interface
from easyrl.environments.pool import FAILURES, EnvironmentPool
from easyrl.rewards.loading import reward_specs
from easyrl.types import Prompt

Interfaces = Mapping[str, Interface]


def check_environments(config: Config, example: Prompt | None) -> tuple[Interfaces, list[str]]:
    """Load all environments in a process of their own, and reset that of a prompt, if there is one
    (`reward.check`). Return their interfaces, and warnings. Raises ConfigError."""
    if not config.rollout.has_environments:
        return {}, []
    pool = EnvironmentPool(config, {})
    try:
        interfaces = pool.loaded().interfaces
        if config.reward.check and example is not None:
            name = name_of(example, interfaces)
            (future,) = pool.start((0,), name, row_of(example, name), [0])
            try:
                pool.wait_for(future)
            except FAILURES as error:
                raise ConfigError(f"{KEY}: reset failed on the first row:\n{error}") from None
    finally:
        pool.close()
    return interfaces, _check_rewards(config, interfaces)


def _check_rewards(config: Config, interfaces: Interfaces) -> list[str]:
    is_used = "environment" in reward_specs(config)
    have_rewards = [each.has_reward for each in interfaces.values()]
    if is_used and not any(have_rewards):
        raise ConfigError(
            "reward.functions (--reward): expected reward functions, because the environment has "
            "no method get_reward, got none"
        )
    if not is_used and any(have_rewards):
        return [
            "warning: the environment's get_reward is not used; add 'environment' to "
            "reward.functions to use it"
        ]
    return []


def name_of(prompt: Prompt, interfaces: Interfaces) -> str:
    """Return the name of a prompt's environment."""
    return "" if "" in interfaces else str(prompt.columns[ENVIRONMENT_COLUMN])


def row_of(prompt: Prompt, name: str) -> dict[str, Any]:
    """Return the arguments of `reset`: the row, without the name of its environment."""
    row = {"prompt": prompt.content, **prompt.columns}
    if name:
        del row[ENVIRONMENT_COLUMN]
    return row


def longest_tools(interfaces: Interfaces) -> list[dict[str, Any]]:
    """Return the longest descriptions of tools that a prompt has."""
    return max((each.schemas for each in interfaces.values()), key=lambda x: len(json.dumps(x)))
