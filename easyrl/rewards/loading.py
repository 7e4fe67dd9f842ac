"""Resolve the entries of `reward.functions`: a built-in name, `file.py:function`,
`package.module:function`, or the folder or hub id of a reward model."""

import functools
import hashlib
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from easyrl.config import ConfigError
from easyrl.config.hints import did_you_mean
from easyrl.config.reward import JudgeConfig
from easyrl.config.spec import RewardSpec
from easyrl.data.hub import is_hub_id
from easyrl.data.row_form import ANSWER_COLUMN, RESERVED_COLUMNS
from easyrl.data.row_shapes import (
    REFERENCES,
    conversation_in,
    ends_with_answer,
    likely_reference,
    quoted_name,
)
from easyrl.formatting import require
from easyrl.rewards import builtin
from easyrl.rewards.builtin import BUILT_IN
from easyrl.rewards.functions import RewardFunction
from easyrl.rewards.judge import read_template
from easyrl.types import Prompt
from easyrl.user_code import digest_files, load_function, read_files

KEY = builtin.KEY
FORMS = (
    f"one of {', '.join(BUILT_IN)}, or file.py:function, or package.module:function, or the folder "
    "or hub id (owner/name) of a reward model"
)
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
        raise ConfigError(
            f"{KEY}: expected {FORMS}, but it is not set and {names} has no reward of its own; "
            "with algorithm.teacher as the only signal: --reward none"
        )


def check_rewards(rewards: RewardSpec, example: Prompt, specs: Sequence[str] | None = None) -> None:
    """Load every function, or those of `specs`, and check that the data has its columns and what a
    built-in one needs. Raises ConfigError."""
    check_given(rewards)
    given = [*RESERVED_COLUMNS, *example.columns]
    if rewards.acts in ("environment", "tools"):
        given.append("environments")
    for spec in rewards.functions if specs is None else specs:
        function = load_reward(spec, rewards)
        arguments = accepted_arguments(function, dict.fromkeys(given))
        try:
            inspect.signature(function).bind(**arguments)
        except TypeError as error:
            raise lacks_column(spec, str(error), example) from None
        built_in = BUILT_IN.get(spec)
        if built_in is not None:
            built_in.check(rewards, example)


def lacks_column(spec: str, problem: str, example: Prompt) -> ConfigError:
    return ConfigError(
        f"{KEY}: '{spec}': {problem}; the data has: {', '.join(example.columns) or 'none'} "
        f"({_advice(problem, example)})"
    )


def _advice(problem: str, example: Prompt) -> str:
    """Return which setting gives a reward the column that it lacks, which `problem` names."""
    content = example.content
    for wanted in REFERENCES:
        if f"'{wanted}'" not in problem:
            continue
        ends_with_it = isinstance(content, list) and ends_with_answer(content)
        is_in_conversation = ends_with_it or conversation_in(example.columns) is not None
        if wanted == ANSWER_COLUMN and is_in_conversation:
            return "data.answer_from=last_message takes it from the end of a conversation"
        name = likely_reference(example.columns, wanted)
        if name is not None:
            return f"'data.columns={{{wanted}: {quoted_name(name)}}}' takes it from there"
    return "data.columns renames columns"


def load_reward(spec: str, rewards: RewardSpec) -> RewardFunction:
    """Return the function of an entry. Raises ConfigError where it cannot be loaded."""
    built_in = BUILT_IN.get(spec)
    if built_in is not None:
        if built_in.extra is not None:
            require(built_in.extra, f"{KEY}: '{spec}'")
        return built_in.make(rewards)
    if is_model(spec):
        return functools.partial(importlib.import_module(MODELS).score, rewards, spec)
    return load_function(spec, KEY, FORMS + did_you_mean(spec, BUILT_IN))


def read_sources(code: Mapping[str, Sequence[str]], judge: JudgeConfig) -> dict[str, str]:
    """Read the user's files by path: all workers use them as they are now. `code`: `RunSpec.code`,
    the functions and classes by the keys that name them."""
    entries: list[str] = []
    for of_key in code.values():
        entries += of_key
    return read_files(entries) | read_template(judge)


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
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    if takes_all:
        return dict(arguments)
    return {name: value for name, value in arguments.items() if name in parameters}
