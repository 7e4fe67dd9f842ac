"""From the words of `reward.functions` to the functions.

A built-in name, `file.py:function` or `package.module:function`. Errors are ConfigErrors that name
what was looked for and what is there; an error in the user's own file is shown as it is.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections import Counter
from pathlib import Path
from types import ModuleType, TracebackType

from easyrl.config import Config, ConfigError
from easyrl.rewards.built_in import BUILT_IN
from easyrl.rewards.functions import RewardFunction
from easyrl.rewards.signatures import columns_of, from_verl, ground_truth_column, is_verl
from easyrl.tasks.presets import preset_of
from easyrl.types import Prompt

KEY = "reward.functions (--reward)"
FORMS = f"accepted: {', '.join(BUILT_IN)}, file.py:function or package.module:function"


def reward_specs(config: Config) -> list[str]:
    """What scores a completion: `reward.functions`, else the task's own."""
    if config.reward.functions:
        return list(config.reward.functions)
    of_presets = {}
    for name in config.data.datasets:
        preset = preset_of(name, config.data)
        if preset is None:
            raise ConfigError(f"{KEY}: none came, and the data set '{name}' brings none; {FORMS}")
        of_presets[preset.reward] = name
    if len(of_presets) > 1:
        whose = ", ".join(f"{reward} of '{name}'" for reward, name in of_presets.items())
        raise ConfigError(f"{KEY}: none came, and the data sets bring several ({whose}); {FORMS}")
    return list(of_presets)


def reward_names(config: Config) -> list[str]:
    """A name per function, for metrics: the function's; where two share it, with its file's or
    module's; where two share that too, the whole entry."""
    specs = reward_specs(config)
    names = [spec.rpartition(":")[2] for spec in specs]
    for longer in ([spec.rpartition("/")[2] for spec in specs], specs):
        counts = Counter(names)
        names = [
            name if counts[name] == 1 else other for name, other in zip(names, longer, strict=True)
        ]
    return names


def reward_weights(config: Config) -> list[float]:
    """One weight per function, 1 where none is given."""
    return config.reward.weights or [1.0] * len(reward_specs(config))


def check_rewards(config: Config, example: Prompt) -> None:
    """Load every function once and look for the columns it needs, so that an error comes before a
    process is started."""
    for spec in reward_specs(config):
        if spec in BUILT_IN:
            load_reward(spec, config)
            _check_built_in(spec, config, example)
            BUILT_IN[spec].check(config, example.columns)
        else:
            _check_user_function(spec, _find(spec), config, example)


def load_reward(spec: str, config: Config) -> RewardFunction:
    """The function that one entry of `reward.functions` names, in TRL's shape."""
    if spec in BUILT_IN:
        return BUILT_IN[spec].bind(config)
    function = _find(spec)
    if not is_verl(function):
        return function
    column, source = config.reward.answer_column, ", ".join(config.data.datasets)
    return from_verl(function, answer_column=column, dataset=source)


def slow_imports(config: Config) -> list[str]:
    """The modules that built-in rewards need and that take long to import."""
    specs = [spec for spec in reward_specs(config) if spec in BUILT_IN]
    return [module for spec in specs for module in BUILT_IN[spec].slow_imports]


def _check_built_in(name: str, config: Config, example: Prompt) -> None:
    if BUILT_IN[name].needs_answer and config.reward.answer_column not in example.columns:
        raise ConfigError(
            f"reward.answer_column: there is no column '{config.reward.answer_column}' for "
            f"{name}; {_the_data_has(example)}"
        )
    for column in BUILT_IN[name].columns:
        if column not in example.columns:
            raise ConfigError(
                f"{KEY}: there is no column '{column}' for {name}; {_the_data_has(example)}"
            )


def _check_user_function(
    spec: str, function: RewardFunction, config: Config, example: Prompt
) -> None:
    if is_verl(function):
        answer = config.reward.answer_column
        if ground_truth_column(example.columns, answer) is None:
            raise ConfigError(
                f"{KEY}: '{spec}' has verl's signature, but there is no column with the ground "
                f"truth; {_the_data_has(example)}; accepted: reward_model (with ground_truth in "
                f"it), ground_truth, or {answer} (reward.answer_column)"
            )
        return
    for column in columns_of(function):
        if column not in example.columns:
            raise ConfigError(
                f"{KEY}: '{spec}' takes '{column}', but there is no such column; "
                f"{_the_data_has(example)}. A parameter with a default may be missing"
            )


def _the_data_has(example: Prompt) -> str:
    return f"the data has: {', '.join(example.columns) or 'no other column'}"


def _find(spec: str) -> RewardFunction:
    """The user's function as it is."""
    where, colon, name = spec.rpartition(":")
    if not colon or not where or not name.isidentifier():
        near = difflib.get_close_matches(spec, BUILT_IN, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ConfigError(f"{KEY}: '{spec}' is no reward function{hint}; {FORMS}")
    module = _load_file(Path(where)) if where.endswith(".py") else _load_module(where)
    function = getattr(module, name, None)
    if not callable(function):
        there = [
            found
            for found, value in vars(module).items()
            if inspect.isfunction(value)
            and value.__module__ == module.__name__
            and not found.startswith("_")
        ]
        raise ConfigError(
            f"{KEY}: '{where}' has no function '{name}'; it has: {', '.join(there) or 'none'}"
        )
    reward: RewardFunction = function
    return reward


def own_traceback(error: BaseException) -> str:
    """The error with the frames of the user's code only, without those that led into it."""
    frame: TracebackType | None = error.__traceback__
    ours = str(Path(__file__).parent)
    while frame is not None:
        file = frame.tb_frame.f_code.co_filename
        if not file.startswith((ours, "<frozen importlib", importlib.__file__ or ours)):
            break
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame)).rstrip()


def _load_file(path: Path) -> ModuleType:
    file = path.expanduser().resolve()
    if not file.is_file():
        raise ConfigError(f"{KEY}: there is no file '{path}'")
    # One name per file, so that two entries of the same file share one module.
    name = f"easyrl_reward_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # the suffix is .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    _find_modules_in(file.parent)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(f"{KEY}: '{path}' fails to load:\n{own_traceback(error)}") from error
    return module


def _load_module(name: str) -> ModuleType:
    _find_modules_in(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(f"{KEY}: there is no module '{name}' ({error}); {FORMS}") from None
        raise ConfigError(f"{KEY}: '{name}' fails to load:\n{own_traceback(error)}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{KEY}: '{name}' fails to load:\n{own_traceback(error)}") from error


def _find_modules_in(folder: Path) -> None:
    """Let the user's code import what lies beside it; last, so that it shadows nothing."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
