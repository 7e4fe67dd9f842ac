"""The built-in rewards: one record for each, with its function and all that is special about it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from easyrl.config import ConfigError
from easyrl.config.spec import RewardSpec
from easyrl.data.row_form import ANSWER_COLUMN
from easyrl.data.row_shapes import is_conversation, is_nested, likely_reference
from easyrl.rewards import functions, math
from easyrl.rewards.code import check_code, code
from easyrl.rewards.functions import RewardFunction
from easyrl.rewards.judge import Judge, check_judge
from easyrl.types import Prompt

KEY = "reward.functions (--reward)"


def _no_check(rewards: RewardSpec, example: Prompt) -> None:
    pass


def _no_trial(rewards: RewardSpec, example: Prompt) -> list[str]:
    return []


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A built-in reward."""

    make: Callable[[RewardSpec], RewardFunction]
    """Bind the function to its settings. Raises ConfigError where a setting is missing."""
    check: Callable[[RewardSpec, Prompt], None] = _no_check
    """Check settings, the first row and the sandbox before a run. Raises ConfigError. That the data
    has the columns of the function's parameters is checked for all functions alike."""
    try_once: Callable[[RewardSpec, Prompt], list[str]] = _no_trial
    """Ask the server that it needs once before a run. Returns warnings; raises ConfigError."""
    extra: str | None = None
    """Extra of EasyRL whose packages it needs (`formatting.EXTRAS`)."""
    preload: str | None = None
    """Module that takes long to import: reward processes import it before their first call."""
    call: Literal["shared", "own", "per_completion"] = "shared"
    """How a group is scored: in one call with all other functions that share it; in a call of its
    own, for one that waits for a server; or, if slow, in a call for each completion."""
    has_own_timeouts: bool = False
    """Whether the function itself ends calls that take too long: then only `reward.timeout_seconds`
    limits a call, and not `runtime.timeout_seconds`."""


def _environment(rewards: RewardSpec) -> RewardFunction:
    if rewards.acts != "environment":
        raise ConfigError(
            f"{KEY}: 'environment' is the reward of an environment: expected "
            "rollout.environment (--environment) too, as in --environment guess"
        )
    return functions.environment


def _agent(rewards: RewardSpec) -> RewardFunction:
    if rewards.acts != "agent":
        raise ConfigError(f"{KEY}: 'agent' is the reward of rollout.agent (--agent), got none")
    return functions.agent


def _check_answer(reward: str, rewards: RewardSpec, example: Prompt) -> None:
    """Check that the answer of the first row is no mapping and no list of messages."""
    answer = example.columns.get(ANSWER_COLUMN)
    if not is_nested(answer):
        return
    if is_conversation(answer):
        advice = "data.answer_from=last_message takes the text of the last message"
    else:
        advice = f"'data.columns={{{ANSWER_COLUMN}: \"{ANSWER_COLUMN}.KEY\"}}' takes a part of it"
        likely = likely_reference({ANSWER_COLUMN: answer})
        if likely is not None:
            advice = advice.replace(f"{ANSWER_COLUMN}.KEY", likely)
    raise ConfigError(
        f"{KEY}: '{reward}': expected a text, a number or a list of these in the column "
        f"{ANSWER_COLUMN}, got {answer!r:.80}; {advice}"
    )


def _check_number(reward: str, column: str, rewards: RewardSpec, example: Prompt) -> None:
    """Check that the first row has a number in a column."""
    if column == ANSWER_COLUMN:
        _check_answer(reward, rewards, example)
    numbers = math.reference_numbers(example.columns.get(column))
    if any(isinstance(number, str) for number in numbers):
        raise ConfigError(
            f"{KEY}: '{reward}': expected a number in the column {column} (for gsm8k alone or "
            f"after ####), got {example.columns[column]!r:.80}; math and exact_match compare "
            "other answers"
        )


BUILT_IN: Mapping[str, BuiltIn] = {
    "none": BuiltIn(lambda rewards: functions.none),
    "exact_match": BuiltIn(
        lambda rewards: functions.exact_match,
        check=partial(_check_answer, "exact_match"),
    ),
    "math": BuiltIn(
        lambda rewards: math.math,
        check=partial(_check_answer, "math"),
        extra="math",
        preload="math_verify",
        call="per_completion",
    ),
    "gsm8k": BuiltIn(lambda rewards: math.gsm8k, check=partial(_check_number, "gsm8k", "answer")),
    "code": BuiltIn(
        lambda rewards: partial(code, rewards.options),
        check=check_code,
        call="per_completion",
    ),
    "judge": BuiltIn(
        lambda rewards: Judge(rewards.options.judge),
        try_once=check_judge,
        extra="judge",
        call="own",
        has_own_timeouts=True,
    ),
    "regex": BuiltIn(lambda rewards: partial(functions.regex, rewards.options.pattern or "")),
    "format": BuiltIn(lambda rewards: functions.format_),
    "countdown": BuiltIn(
        lambda rewards: functions.countdown,
        check=partial(_check_number, "countdown", "target"),
    ),
    "length_penalty": BuiltIn(
        lambda rewards: partial(functions.length_penalty, rewards.max_completion_length)
    ),
    "environment": BuiltIn(_environment),
    "reasoning_gym": BuiltIn(
        lambda rewards: functions.reasoning_gym,
        extra="reasoning-gym",
        call="per_completion",
    ),
    "agent": BuiltIn(_agent),
}
