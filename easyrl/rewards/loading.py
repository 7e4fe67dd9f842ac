"""Resolve the entries of `reward.functions`: a built-in name, `file.py:function` or
`package.module:function`.

Errors are ConfigErrors that name what was searched and what exists; an error in the user's own file
is shown with its traceback.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from easyrl.config import Config, ConfigError
from easyrl.data.presets import preset_of
from easyrl.rewards import functions, math
from easyrl.rewards.code import check_code, code
from easyrl.rewards.functions import RewardFunction
from easyrl.rewards.signatures import from_verl, ground_truth_column, is_verl, required_columns
from easyrl.types import Prompt

KEY = "reward.functions (--reward)"


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A built-in reward."""

    bind: Callable[[Config], RewardFunction]
    """Bind the function to its settings."""
    columns: tuple[str, ...] = ()
    """Columns that the data must have."""
    check: Callable[[Config, Mapping[str, Any]], None] = lambda config, columns: None
    """Check the settings and the first row; raises ConfigError."""


def _bind_length_penalty(config: Config) -> RewardFunction:
    longest = config.rollout.max_completion_length
    return functools.partial(functions.length_penalty, longest, max(1, longest // 5))  # DAPO


BUILT_IN: Mapping[str, BuiltIn] = {
    "exact_match": BuiltIn(lambda config: functions.exact_match, ("answer",)),
    "math": BuiltIn(lambda config: math.math, ("answer",)),
    "gsm8k": BuiltIn(lambda config: math.gsm8k, ("answer",)),
    "code": BuiltIn(lambda config: functools.partial(code, config.reward), check=check_code),
    "regex": BuiltIn(
        lambda config: functools.partial(functions.regex, config.reward.pattern or "")
    ),
    "format": BuiltIn(lambda config: functions.format_),
    "countdown": BuiltIn(lambda config: functions.countdown, ("nums", "target")),
    "length_penalty": BuiltIn(_bind_length_penalty),
}
PER_COMPLETION = ("code", "math")
"""Slow ones: each completion is a task of its own in the pool."""
FORMS = f"one of {', '.join(BUILT_IN)}, or file.py:function, or package.module:function"


def reward_specs(config: Config) -> list[str]:
    """`reward.functions`, by default the preset's reward."""
    if config.reward.functions:
        return list(config.reward.functions)
    of_presets = {}
    for name in config.data.datasets:
        preset = preset_of(name, config.data)
        if preset is None:
            raise ConfigError(f"{KEY}: expected {FORMS}, got none; '{name}' has no default")
        of_presets[preset.reward] = name
    if len(of_presets) > 1:
        rewards = ", ".join(f"{reward} of '{name}'" for reward, name in of_presets.items())
        raise ConfigError(f"{KEY}: expected {FORMS}, got none, and different defaults: {rewards}")
    return list(of_presets)


def reward_names(config: Config) -> list[str]:
    """A unique name per function for metrics: the function's name; where two are equal, with the
    file or module; where those are equal too, the whole entry."""
    specs = reward_specs(config)
    names = [spec.rpartition(":")[2] for spec in specs]
    for longer in ([spec.rpartition("/")[2] for spec in specs], specs):
        counts = Counter(names)
        names = [
            name if counts[name] == 1 else other for name, other in zip(names, longer, strict=True)
        ]
    return names


def reward_weights(config: Config) -> list[float]:
    """One weight per function, by default 1."""
    return config.reward.weights or [1.0] * len(reward_specs(config))


def check_rewards(config: Config, example: Prompt) -> None:
    """Load every function and check that the data has its columns, before a run starts."""
    for spec in reward_specs(config):
        if spec in BUILT_IN:
            load_reward(spec, config)
            _check_columns(spec, BUILT_IN[spec].columns, config, example)
            BUILT_IN[spec].check(config, example.columns)
        else:
            function = _find(spec)
            if not is_verl(function):
                _check_columns(spec, required_columns(function), config, example)
            elif ground_truth_column(example.columns, config.reward.answer_column) is None:
                raise ConfigError(
                    f"{KEY}: '{spec}' has verl's signature and needs a column reward_model (with "
                    f"ground_truth in it), ground_truth or {config.reward.answer_column} "
                    f"(see data.columns); {_columns_of(example)}"
                )


def _check_columns(spec: str, needed: Sequence[str], config: Config, example: Prompt) -> None:
    for column in needed:
        if column not in example.columns:
            key = "data.columns" if column == config.reward.answer_column else KEY
            raise ConfigError(
                f"{key}: '{spec}' needs a column '{column}'; {_columns_of(example)}. A parameter "
                "of a function of your own that has a default needs no column"
            )


def _columns_of(example: Prompt) -> str:
    return f"the data has: {', '.join(example.columns) or 'no other column'}"


def load_reward(spec: str, config: Config) -> RewardFunction:
    """Load the function of one entry of `reward.functions`, in TRL's form."""
    if spec in BUILT_IN:
        return BUILT_IN[spec].bind(config)
    function = _find(spec)
    if not is_verl(function):
        return function
    column, dataset = config.reward.answer_column, ", ".join(config.data.datasets)
    return from_verl(function, answer_column=column, dataset=dataset)


def _find(spec: str) -> RewardFunction:
    """The user's function, unchanged."""
    path, colon, name = spec.rpartition(":")
    if not colon or not path or not name.isidentifier():
        near = difflib.get_close_matches(spec, BUILT_IN, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ConfigError(f"{KEY}: expected {FORMS}, got '{spec}'{hint}")
    is_file = path.endswith(".py")
    file = Path(path).expanduser().resolve()
    if is_file and not file.is_file():
        raise ConfigError(f"{KEY}: there is no file '{path}'")
    # The user's code can import its neighbours. Last in the path: it shadows nothing.
    folder = str(file.parent if is_file else Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        module = _load_file(file) if is_file else importlib.import_module(path)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and not is_file and f"{path}.".startswith(f"{missing}."):
            raise ConfigError(f"{KEY}: expected {FORMS}, got '{spec}' ({error})") from None
        raise ConfigError(f"{KEY}: '{path}' fails to load:\n{own_traceback(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        existing = [
            found
            for found, value in vars(module).items()
            if inspect.isfunction(value)
            and value.__module__ == module.__name__
            and not found.startswith("_")
        ]
        raise ConfigError(
            f"{KEY}: '{path}' has no function '{name}'; it has: {', '.join(existing) or 'none'}"
        )
    reward: RewardFunction = function
    return reward


def own_traceback(error: BaseException) -> str:
    """The traceback without EasyRL's own frames at its start."""
    frame: TracebackType | None = error.__traceback__
    ours = str(Path(__file__).parent)
    while frame is not None:
        file = frame.tb_frame.f_code.co_filename
        if not file.startswith((ours, "<frozen importlib", importlib.__file__ or ours)):
            break
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame)).rstrip()


@functools.cache  # entries of the same file share one module
def _load_file(file: Path) -> ModuleType:
    name = f"easyrl_reward_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # the suffix is .py
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
