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

from easyrl.config import Config, ConfigError
from easyrl.config.algorithm import LOSS_KEY
from easyrl.config.hints import did_you_mean
from easyrl.data.hub import is_hub_id
from easyrl.data.presets import preset_of
from easyrl.data.streams import RESERVED_COLUMNS
from easyrl.formatting import EXTRAS, require
from easyrl.rewards import functions, math
from easyrl.rewards.code import check_code, code
from easyrl.rewards.functions import RewardFunction
from easyrl.rewards.judge import Judge, read_template
from easyrl.types import Prompt
from easyrl.user_code import digest_files, load_function, read_files

KEY = "reward.functions (--reward)"
BUILT_IN: Mapping[str, Callable[[Config], RewardFunction]] = {
    "none": lambda config: functions.none,
    "exact_match": lambda config: functions.exact_match,
    "math": lambda config: math.math,
    "gsm8k": lambda config: math.gsm8k,
    "code": lambda config: functools.partial(code, config.reward),
    "judge": lambda config: Judge(config.reward.judge),
    "regex": lambda config: functools.partial(functions.regex, config.reward.pattern or ""),
    "format": lambda config: functions.format_,
    "countdown": lambda config: functions.countdown,
    "length_penalty": lambda config: functools.partial(
        functions.length_penalty, config.rollout.max_completion_length
    ),
    "environment": lambda config: functions.environment,
    "reasoning_gym": lambda config: functions.reasoning_gym,
    "agent": lambda config: functions.agent,
}
"""Each binds a function to its settings."""
PER_COMPLETION = ("code", "math", "reasoning_gym")  # slow: each completion is a call of its own
FORMS = f"one of {', '.join(BUILT_IN)}, or file.py:function, or package.module:function, "
FORMS += "or the folder or hub id (owner/name) of a reward model"
MODELS = "easyrl.model.reward_model"
"""Module that scores by reward models. It is in a higher layer, so it is imported by its name."""


def reward_specs(config: Config) -> list[str]:
    """`reward.functions`, by default the environment's `get_reward` or the preset's reward. What an
    agent returns is a reward in any case, the first unless `reward.functions` names it."""
    own = list(config.reward.functions or ()) * (not config.reward.is_none)
    if config.rollout.agent is not None and "agent" not in own and not config.reward.is_none:
        return ["agent", *own]
    if own:
        return own
    if config.rollout.environment is not None:
        return ["environment"]
    presets = [preset_of(name, config.data) for name in config.data.datasets]
    defaults = list(dict.fromkeys(preset.reward if preset else None for preset in presets))
    if len(defaults) != 1 or defaults[0] is None:
        if config.reward.is_none:
            return ["none"]
        names = ", ".join(config.data.datasets)
        raise ConfigError(f"{KEY}: expected {FORMS}, got none; {names} has no default")
    return [defaults[0]]


def is_model(spec: str) -> bool:
    if spec in BUILT_IN or ":" in spec or spec.endswith(".py"):
        return False
    return Path(spec).expanduser().is_dir() or ("/" in spec and is_hub_id(spec))


def reward_models(config: Config) -> list[str]:
    return list(dict.fromkeys(filter(is_model, config.reward.functions or ())))


def reward_names(config: Config) -> list[str]:
    """Names for metrics: those of the functions; where some are equal, with the names of their
    files, or else their whole entries."""
    specs = reward_specs(config)
    forms = [(Path(spec.rpartition(":")[2]).name, Path(spec).name, spec) for spec in specs]
    columns = [*zip(*forms, strict=True)]
    return [
        next(name for name, all_ in zip(own, columns, strict=True) if all_.count(name) == 1)
        for own in forms
    ]


def reward_weights(config: Config) -> list[float]:
    """One weight per function, by default 1."""
    num_specs = len(reward_specs(config))
    weights = config.reward.weights or [1.0] * num_specs
    return [1.0] * (num_specs - len(weights)) + weights  # the agent's


def needs_environments(function: RewardFunction) -> bool:
    """Return whether a function has a parameter `environments`: it is called where these are."""
    return "environments" in inspect.signature(function).parameters


def check_rewards(config: Config, example: Prompt, specs: Sequence[str] | None = None) -> None:
    """Load every function, or those of `specs`, and check that the data has its columns."""
    for spec in reward_specs(config) if specs is None else specs:
        function = load_reward(spec, config)
        if spec == "environment" and config.rollout.environment is None:
            raise ConfigError(
                f"{KEY}: 'environment' is the reward of an environment: expected "
                "rollout.environment (--environment) too, as in --environment guess"
            )
        if spec == "agent" and config.rollout.agent is None:
            raise ConfigError(f"{KEY}: 'agent' is the reward of rollout.agent (--agent), got none")
        has_own = config.rollout.has_environments and config.rollout.agent is None
        own = ["environments"] if has_own else []
        given = dict.fromkeys([*RESERVED_COLUMNS, *example.columns, *own])
        try:
            inspect.signature(function).bind(**accepted_arguments(function, given))
        except TypeError as error:
            raise lacks_column(spec, str(error), example) from None
        if spec == "code":
            check_code(config, example.columns)
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


def load_reward(spec: str, config: Config) -> RewardFunction:
    if spec in BUILT_IN:
        if spec in EXTRAS:
            require(spec, f"{KEY}: '{spec}'")
        return BUILT_IN[spec](config)
    if is_model(spec):
        return functools.partial(importlib.import_module(MODELS).score, config, spec)
    return load_function(spec, KEY, FORMS + did_you_mean(spec, BUILT_IN))


def code_of(config: Config) -> dict[str, list[str]]:
    """The functions and classes that the config names, by key."""
    return {
        "reward.functions": reward_specs(config),
        "rollout.environment": [*filter(None, config.rollout.environments.values())],
        "rollout.tools": config.rollout.tools,
        "rollout.agent": [] if config.rollout.agent_words else [config.rollout.agent or ""],
        LOSS_KEY: [config.algorithm.loss_type],
    }


def read_sources(config: Config) -> dict[str, str]:
    """Read the user's files by path: all workers use them as they are now."""
    return read_files(chain(*code_of(config).values())) | read_template(config.reward.judge)


def digest_code(config: Config) -> dict[str, str]:
    """Digests of the user's files, by the keys that name them; empty where a key names none."""
    digests = {key: digest_files(specs) for key, specs in code_of(config).items()}
    for text in read_template(config.reward.judge).values():
        digests["reward.judge.template"] = hashlib.sha256(text.encode()).hexdigest()
    return digests


def accepted_arguments(
    function: Callable[..., Any], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments that the function has parameters for."""
    parameters = inspect.signature(function).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return {name: value for name, value in arguments.items() if takes_any or name in parameters}
