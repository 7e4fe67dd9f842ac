"""The built-in rewards by name: what of the config each is bound to, and what columns it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from easyrl.config import Config
from easyrl.config_reward import length_cache
from easyrl.rewards.code import check_code, code
from easyrl.rewards.countdown import countdown
from easyrl.rewards.functions import RewardFunction, exact_match, format_, length_penalty, regex
from easyrl.rewards.logged import TRAINER_ARGUMENTS
from easyrl.rewards.maths import gsm8k, math


@dataclass(frozen=True, slots=True)
class BuiltIn:
    bind: Callable[[Config], RewardFunction]
    columns: tuple[str, ...] = ()
    """That the data must have."""
    needs_answer: bool = False
    """The data must have the column `reward.answer_column`."""
    slow_imports: tuple[str, ...] = ()
    """Modules that are to be there before the first call's time runs."""
    check: Callable[[Config, Mapping[str, Any]], None] = lambda config, columns: None
    """Raises ConfigError for what else can be seen to be wrong from the settings and a row."""


def _bind_regex(config: Config) -> RewardFunction:
    assert config.reward.pattern is not None, "the config has checked itself"
    return partial(regex, config.reward.pattern)


def _bind_code(config: Config) -> RewardFunction:
    def score(**arguments: Any) -> list[float | None]:
        for name in TRAINER_ARGUMENTS:  # all that it is given else is a column
            arguments.pop(name, None)
        return code(config.reward, **arguments)

    return score


def _bind_length_penalty(config: Config) -> RewardFunction:
    longest = config.rollout.max_completion_length
    return partial(length_penalty, longest, length_cache(config.reward, longest))


BUILT_IN: Mapping[str, BuiltIn] = {
    "exact_match": BuiltIn(
        lambda config: partial(exact_match, config.reward.answer_column), needs_answer=True
    ),
    "math": BuiltIn(
        lambda config: partial(math, config.reward.answer_column),
        needs_answer=True,
        slow_imports=("math_verify",),
    ),
    "gsm8k": BuiltIn(lambda config: partial(gsm8k, config.reward.answer_column), needs_answer=True),
    "code": BuiltIn(_bind_code, check=check_code),
    "regex": BuiltIn(_bind_regex),
    "format": BuiltIn(lambda config: format_),
    "countdown": BuiltIn(lambda config: countdown, columns=("nums", "target")),
    "length_penalty": BuiltIn(_bind_length_penalty),
}
