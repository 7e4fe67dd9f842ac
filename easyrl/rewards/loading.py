"""Resolve the entries of `reward.functions`: a built-in name, `file.py:function`,
`package.module:function`, or the folder or hub id of a reward model."""

import functools
import hashlib
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from easyrl.config import ConfigError
from easyrl.config.hints import did_you_mean
from easyrl.config.reward import JudgeConfig
from easyrl.config.spec import RewardSpec
from easyrl.data.hub import is_hub_id
from easyrl.data.streams import RESERVED_COLUMNS
from easyrl.formatting import EXTRAS, require
from easyrl.rewards import functions, math
from easyrl.rewards.code import check_code, code
from easyrl.rewards.functions import RewardFunction
from easyrl.rewards.judge import Judge, read_template
from easyrl.types import Prompt
from easyrl.user_code import digest_files, load_function, read_files

KEY = "reward.functions (--reward)"
BUILT_IN: Mapping[str, Callable[[RewardSpec], RewardFunction]] = {
    "none": lambda rewards: functions.none,
    "exact_match": lambda rewards: functions.exact_match,
    "math": lambda rewards: math.math,
    "gsm8k": lambda rewards: math.gsm8k,
    "code": lambda rewards: functools.partial(code, rewards.options),
    "judge": lambda rewards: Judge(rewards.options.judge),
    "regex": lambda rewards: functools.partial(functions.regex, rewards.options.pattern or ""),
    "format": lambda rewards: functions.format_,
    "countdown": lambda rewards: functions.countdown,
    "length_penalty": lambda rewards: functools.partial(
        functions.length_penalty, rewards.max_completion_length
    ),
    "environment": lambda rewards: functions.environment,
    "reasoning_gym": lambda rewards: functions.reasoning_gym,
    "agent": lambda rewards: functions.agent,
}
"""Each binds a function to its settings."""
PER_COMPLETION = ("code", "math", "reasoning_gym")  # slow: each completion is a call of its own
FORMS = f"one of {', '.join(BUILT_IN)}, or file.py:function, or package.module:function, "
FORMS += "or the folder or hub id (owner/name) of a reward model"
MODELS = "easyrl.model.reward_model"
"""Module that scores by reward models. It is in a higher layer, so it is imported by its name."""


def is_model(spec: str) -> bool:
    if spec in BUILT_IN or ":" in spec or spec.endswith(".py"):
        return False
    return Path(spec).expanduser().is_dir() or ("/" in spec and is_hub_id(spec))


def needs_environments(function: RewardFunction) -> bool:
    """Return whether a function has a parameter `environments`: it is called where these are."""
    return "environments" in inspect.signature(function).parameters


def check_given(rewards: RewardSpec) -> None:
    """Raise ConfigError if neither the config nor a preset names a reward function."""
    if not rewards.functions:
        names = ", ".join(rewards.datasets)
        raise ConfigError(f"{KEY}: expected {FORMS}, got none; {names} has no default")


def check_rewards(rewards: RewardSpec, example: Prompt, specs: Sequence[str] | None = None) -> None:
    """Load every function, or those of `specs`, and check that the data has its columns."""
    check_given(rewards)
    for spec in rewards.functions if specs is None else specs:
        function = load_reward(spec, rewards)
        if spec == "environment" and rewards.acts != "environment":
            raise ConfigError(
                f"{KEY}: 'environment' is the reward of an environment: expected "
                "rollout.environment (--environment) too, as in --environment guess"
            )
        if spec == "agent" and rewards.acts != "agent":
            raise ConfigError(f"{KEY}: 'agent' is the reward of rollout.agent (--agent), got none")
        own = ["environments"] if rewards.acts in ("environment", "tools") else []
        given = dict.fromkeys([*RESERVED_COLUMNS, *example.columns, *own])
        try:
            inspect.signature(function).bind(**accepted_arguments(function, given))
        except TypeError as error:
            raise lacks_column(spec, str(error), example) from None
        if spec == "code":
            check_code(rewards, example.columns)
        column = {"gsm8k": "answer", "countdown": "target"}.get(spec, "")
        if str in map(type, math.reference_numbers(example.columns.get(column))):
            raise ConfigError(
                f"{KEY}: '{spec}': expected a number in the column {column} (for gsm8k alone or "
                f"after ####), got {example.columns[column]!r:.80}; math and exact_match compare "
                "other answers"
            )


def lacks_column(spec: str, problem: str, example: Prompt) -> ConfigError:
    return ConfigError(
        f"{KEY}: '{spec}': {problem}; the data has: {', '.join(example.columns) or 'none'} "
        "(data.columns renames columns)"
    )


def load_reward(spec: str, rewards: RewardSpec) -> RewardFunction:
    if spec in BUILT_IN:
        if spec in EXTRAS:
            require(spec, f"{KEY}: '{spec}'")
        return BUILT_IN[spec](rewards)
    if is_model(spec):
        return functools.partial(importlib.import_module(MODELS).score, rewards, spec)
    return load_function(spec, KEY, FORMS + did_you_mean(spec, BUILT_IN))


def read_sources(code: Mapping[str, Sequence[str]], judge: JudgeConfig) -> dict[str, str]:
    """Read the user's files by path: all workers use them as they are now. `code`: `RunSpec.code`,
    the functions and classes by the keys that name them."""
    return read_files(chain(*code.values())) | read_template(judge)


def digest_code(code: Mapping[str, Sequence[str]], judge: JudgeConfig) -> dict[str, str]:
    """Digest the user's files by the keys that name them; empty where a key names none."""
    digests = {key: digest_files(specs) for key, specs in code.items()}
    for text in read_template(judge).values():
        digests["reward.judge.template"] = hashlib.sha256(text.encode()).hexdigest()
    return digests


def accepted_arguments(
    function: Callable[..., Any], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments that the function has parameters for."""
    parameters = inspect.signature(function).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return {name: value for name, value in arguments.items() if takes_any or name in parameters}
