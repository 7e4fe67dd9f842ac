"""Resolve the entries of `reward.functions`: a built-in name, `file.py:function` or
`package.module:function`, in one of two forms.

    TRL    f(prompts, completions, completion_ids, **columns) -> [score]      one group
    verl   f(data_source, solution_str, ground_truth, extra_info) -> score    one completion

Problems are ConfigErrors; an error in the user's own file is shown with its traceback.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from easyrl.config import Config, ConfigError
from easyrl.config.sections import RewardConfig
from easyrl.data.presets import preset_of
from easyrl.data.streams import RESERVED_COLUMNS
from easyrl.events import SAMPLE_COLUMNS
from easyrl.rewards import functions, math
from easyrl.rewards.code import check_code, code
from easyrl.rewards.functions import RewardFunction, text_of
from easyrl.types import Prompt

KEY = "reward.functions (--reward)"
BUILT_IN: Mapping[str, Callable[[Config], RewardFunction]] = {
    "exact_match": lambda config: functions.exact_match,
    "math": lambda config: math.math,
    "gsm8k": lambda config: math.gsm8k,
    "code": lambda config: functools.partial(code, config.reward),
    "regex": lambda config: functools.partial(functions.regex, config.reward.pattern or ""),
    "format": lambda config: functions.format_,
    "countdown": lambda config: functions.countdown,
    "length_penalty": lambda config: functools.partial(
        functions.length_penalty, config.rollout.max_completion_length
    ),
}
"""Each binds a function to its settings."""
PER_COMPLETION = ("code", "math")
"""Slow ones: each completion is a call of its own."""
FORMS = f"one of {', '.join(BUILT_IN)}, or file.py:function, or package.module:function"


def reward_specs(config: Config) -> list[str]:
    """`reward.functions`, by default the preset's reward."""
    if config.reward.functions:
        return list(config.reward.functions)
    presets = [preset_of(name, config.data) for name in config.data.datasets]
    defaults = list(dict.fromkeys(preset.reward if preset else None for preset in presets))
    if len(defaults) != 1 or defaults[0] is None:
        names = ", ".join(config.data.datasets)
        raise ConfigError(f"{KEY}: expected {FORMS}, got none; {names} has no default")
    return [defaults[0]]


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
    given = dict.fromkeys([*RESERVED_COLUMNS, *example.columns])
    for spec in reward_specs(config):
        function = BUILT_IN[spec](config) if spec in BUILT_IN else _find(spec)
        try:
            if _is_verl(function):
                _truth_column(example.columns)
            else:
                inspect.signature(function).bind(**accepted_arguments(function, given))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{KEY}: '{spec}': {error}; the data has: {', '.join(example.columns) or 'none'} "
                "(data.columns renames columns)"
            ) from None
        if spec == "code":
            check_code(config, example.columns)


def load_reward(spec: str, config: Config) -> RewardFunction:
    """Load the function of one entry of `reward.functions`, in TRL's form."""
    function = BUILT_IN[spec](config) if spec in BUILT_IN else _find(spec)
    return _from_verl(function, ", ".join(config.data.datasets)) if _is_verl(function) else function


def accepted_arguments(
    function: Callable[..., Any], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Those of the arguments that the function has parameters for."""
    parameters = inspect.signature(function).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return {name: value for name, value in arguments.items() if takes_any or name in parameters}


def user_traceback(error: BaseException) -> str:
    """The traceback without EasyRL's and importlib's frames at its start."""
    frame = error.__traceback__
    ignored = (str(Path(__file__).parent), importlib.__file__, "<frozen importlib")
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(ignored):
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame)).rstrip()


def _find(spec: str) -> RewardFunction:
    """The user's function, unchanged."""
    path, _, name = spec.rpartition(":")
    if not path or not name:
        raise ConfigError(f"{KEY}: expected {FORMS}, got '{spec}'")
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
        raise ConfigError(f"{KEY}: cannot load '{path}':\n{user_traceback(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        own = (n for n, each in inspect.getmembers(module, inspect.isfunction))
        raise ConfigError(f"{KEY}: '{path}' has no function '{name}'; it has: {', '.join(own)}")
    reward: RewardFunction = function
    return reward


@functools.cache  # entries of the same file share one module
def _load_file(file: Path) -> ModuleType:
    name = f"easyrl_reward_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # the suffix is .py
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _is_verl(function: Callable[..., Any]) -> bool:
    return {"solution_str", "ground_truth"} <= inspect.signature(function).parameters.keys()


def _truth_column(columns: Collection[str]) -> str:
    """The column that a function in verl's form gets its ground truth from."""
    candidates = ("reward_model", "ground_truth", RewardConfig.answer_column)
    for name in candidates:
        if name in columns:
            return name
    raise TypeError(f"expected one of the columns {', '.join(candidates)}")


def _from_verl(compute_score: Callable[..., Any], dataset: str) -> RewardFunction:
    """Wrap a function in verl's form as one in TRL's form.

    It is called for each completion with the columns `data_source` (else the data set's name),
    `reward_model["ground_truth"]` (else the column `ground_truth`, else `answer`) and `extra_info`
    (else an empty mapping). It returns a number, or a mapping with the number as `score`, whose
    other entries become columns of the samples.
    """

    async def score(
        completions: Sequence[Any], log_extra: Callable[..., None], **columns: Sequence[Any]
    ) -> list[Any]:
        truth_column = _truth_column(columns)
        results = []
        for index, completion in enumerate(completions):
            given = ("data_source", "extra_info", truth_column)
            row = {name: columns[name][index] for name in given if name in columns}
            truth = row[truth_column]
            arguments = {
                "data_source": row.get("data_source", dataset),
                "solution_str": text_of(completion),
                "ground_truth": truth["ground_truth"] if truth_column == "reward_model" else truth,
                "extra_info": row.get("extra_info") or {},
            }
            results.append(compute_score(**accepted_arguments(compute_score, arguments)))
        if inspect.isawaitable(results[0]):
            results = await asyncio.gather(*results)
        rows = [each if isinstance(each, Mapping) else {"score": each} for each in results]
        for key in dict.fromkeys(key for row in rows for key in row):
            if key not in ("score", *SAMPLE_COLUMNS):
                log_extra(key, [row.get(key) for row in rows])
        return [row["score"] for row in rows]

    return score
