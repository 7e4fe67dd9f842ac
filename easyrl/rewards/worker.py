"""Call reward functions on completions of one prompt, in a reward process, and check their scores.

A function that fails affects its own scores only: they become 0, and the error is returned beside
them. Asynchronous functions are awaited together, on one event loop: a client may stay open.
"""

import asyncio
import contextlib
import copy
import importlib
import inspect
import io
import json
import multiprocessing
import os
import reprlib
import resource
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence, Set
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from easyrl import user_code
from easyrl.config import ConfigError
from easyrl.config.spec import RewardSpec
from easyrl.data.pictures import with_images
from easyrl.events import SAMPLE_COLUMNS
from easyrl.processes import (
    REWARD_PROCESS,
    allow_long_integers,
    die_with_parent,
    maybe_sleep,
    set_name,
)
from easyrl.rewards import loading
from easyrl.rewards.builtin import BUILT_IN
from easyrl.rewards.functions import RewardFunction
from easyrl.rewards.leftovers import mark_programs
from easyrl.types import Messages, Prompt
from easyrl.user_code import user_traceback

MAX_SCORE = 1e30
"""Largest score: the weighted sum is float32, whose largest number is about 3e38."""
MAX_OUTPUT_CHARACTERS = 2**24
"""Characters that a call may print, so that endless output fills no disk."""
NEEDS_MESSAGES = (
    "reads chat messages (completion[0]['content']), but the prompts of the data are strings: set "
    "data.chat=true, which makes chats of them, or read the string"
)
NEEDS_TEXT = (
    "reads strings, but the prompts of the data are chats: read completion[0]['content'], or set "
    "data.chat=false if a preset makes chats of strings"
)
WRONG_FORM = (TypeError, AttributeError, LookupError)
"""Exceptions of a function that expects chat messages and gets text, or the reverse."""
TAKES_FILES = "takes_picture_files"
"""Attribute of a built-in function that gets pictures as files, and not as images."""
SEARCH_SECONDS = 0.5
"""A call that fails sooner is repeated with each completion alone, for at most this long, to find
the one that it fails on."""


class TrainerState(NamedTuple):
    """The run's progress. Names as in transformers' `TrainerState`."""

    global_step: int = 0  # optimizer updates of the policy that sampled the completions
    max_steps: int = 0  # of the whole run


class Call(NamedTuple):
    prompt: str | Messages
    completions: list[str] | list[Messages]  # [N]; of an episode, all messages after the prompt
    completion_ids: list[list[int]]  # [N][R]
    columns: Mapping[str, Any]
    trainer_state: TrainerState = TrainerState()
    functions: Sequence[int] = ()  # indices into reward.functions


class CallError(NamedTuple):
    """Why a function's scores of a call are missing."""

    text: str  # what failed, and the function's traceback
    completion: int | None = None  # index of one that it fails on; None: unknown


class Scored(NamedTuple):
    """Results of a call."""

    scores: list[list[float | None]]
    """[functions][N]; 0 for a failed call. Empty if the call did not return."""
    errors: list[CallError]
    metrics: dict[str, float]  # from log_metric
    columns: dict[str, list[Any]]  # from log_extra, [N] each


class BoundedOutput(io.TextIOWrapper):
    """Standard output and error of all calls. Each call may print MAX_OUTPUT_CHARACTERS."""

    _num_left: ContextVar[list[int]] = ContextVar("num_left")
    _last: ClassVar = [MAX_OUTPUT_CHARACTERS]
    """What is left to the newest call, for threads that a function starts."""

    @classmethod
    def begin_call(cls) -> None:
        """Begin a new call, to which all that this context (a thread or a task) prints counts."""
        cls._last = [MAX_OUTPUT_CHARACTERS]
        cls._num_left.set(cls._last)

    def write(self, text: str, /) -> int:
        num_left = self._num_left.get(self._last)
        if len(text) > num_left[0]:
            raise OSError(f"printed more than {MAX_OUTPUT_CHARACTERS // 2**20} MiB in one call")
        num_left[0] -= len(text)
        return super().write(text)


_rewards: RewardSpec
_functions: list[RewardFunction] = []
_loop = asyncio.Runner()
Await = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine to its end. In a process of environments it is their event loop that does."""


def start(
    rewards: RewardSpec,
    sources: Mapping[str, str],
    pool_mark: str = "",
    specs: Sequence[str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Initialize a reward process.

    Args:
        rewards: the functions, and how they are run.
        sources: texts of the user's files, by path, as `user_code.sources` keeps them.
        pool_mark: by which the pool finds the programs that functions start; "": it does not.
        specs: the functions that this process calls; by default all.
        environment: environment variables that are set before torch is imported. They are given to
            the process of the reward models alone, whose memory is not limited.
    """
    global _rewards  # noqa: PLW0603  one process, one run
    _rewards = rewards
    os.environ.update(environment or {})  # before torch is imported
    user_code.sources.update(sources)
    # User code may start processes as in any program; they end with this one.
    multiprocessing.set_start_method(None, force=True)  # `spawn` is EasyRL's
    multiprocessing.current_process().daemon = False
    if pool_mark:
        mark_programs(pool_mark)
    os.register_at_fork(after_in_child=lambda: die_with_parent(os.getppid()))
    sys.modules["__main__"].__spec__ = find_spec("easyrl.processes")  # others import it at first
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # end at once
    die_with_parent()
    set_name(REWARD_PROCESS)
    allow_long_integers()
    output = BoundedOutput(sys.stderr.buffer, errors="backslashreplace", line_buffering=True)
    # Functions print to standard error: `--dry-run` writes a config file to standard output.
    sys.stdout = sys.stderr = output
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # Linux then ends this process first where memory runs out
        Path("/proc/self/oom_score_adj").write_text("1000")
    memory_limit_gib = rewards.options.memory_limit_gib
    if memory_limit_gib is not None and environment is None:
        # Private writable memory; RLIMIT_AS would count what is only mapped, too.
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        with contextlib.suppress(ValueError):  # the hard limit may be lower
            limit = int(memory_limit_gib * 2**30)
            resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    for spec in specs or rewards.functions:
        built_in = BUILT_IN.get(spec)
        if built_in is not None and built_in.preload is not None:
            importlib.import_module(built_in.preload)  # before the first call's timeout runs


def functions_with_environments() -> list[int]:
    """Return the indices of the functions that are called where the environments are."""
    return [index for index, each in enumerate(_loaded()) if loading.needs_environments(each)]


def _loaded() -> list[RewardFunction]:
    """Return all functions, which the first call loads: pebble reports no initializer's error."""
    if not _functions:
        for spec in _rewards.functions:
            _functions.append(loading.load_reward(spec, _rewards))
    return _functions


class _Log:
    """What the functions of a call log beside their scores."""

    def __init__(self, num_completions: int) -> None:
        self.num_completions = num_completions
        self.columns: dict[str, list[Any]] = {}
        self.values: dict[str, list[float]] = {}

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Add a column to the samples, one value per completion."""
        if column in SAMPLE_COLUMNS or len(values) != self.num_completions:
            raise ValueError(
                f"log_extra: expected {self.num_completions} values, one per completion, and a "
                f"name other than {', '.join(SAMPLE_COLUMNS)}, got {len(values)} values for "
                f"'{column}'"
            )
        self.columns[str(column)] = [_as_json(value) for value in values]

    def log_metric(self, name: str, value: float) -> None:
        """Log a number to metrics.jsonl, averaged over the iteration's groups."""
        number = float(value)
        self.values.setdefault(str(name), []).append(number)

    def means(self) -> dict[str, float]:
        return {name: sum(values) / len(values) for name, values in self.values.items()}


def run_call(call: Call, environments: Sequence[Any] = (), run_async: Await = _loop.run) -> Scored:
    """Score the completions. Raises ConfigError where a function cannot be loaded."""
    maybe_sleep()
    num_completions = len(call.completions)
    log = _Log(num_completions)
    services: dict[str, Any] = {"log_extra": log.log_extra, "log_metric": log.log_metric}
    if environments:
        services["environments"] = environments
    started = time.monotonic()
    all_returned = _call_all(call, services, run_async)
    is_fast = time.monotonic() - started < SEARCH_SECONDS
    all_scores: list[list[float | None]] = []
    errors: list[CallError] = []
    for index, returned in zip(call.functions, all_returned, strict=True):
        try:
            scores = _as_scores(returned, num_completions)
        except BaseException as error:  # SystemExit too: the process belongs to the rewards
            scores = [0.0] * num_completions
            failing = None
            if is_fast and not environments and not isinstance(error, (MemoryError, OSError)):
                failing = _find_failing(call._replace(functions=[index]), run_async)
            errors.append(_describe_failure(index, error, failing, num_completions))
        all_scores.append(scores)
    result = Scored(all_scores, errors, log.means(), log.columns)
    return scored_of(*json.loads(json.dumps(result)))  # the caller unpickles nothing of a user's


def scored_of(scores: Any, errors: Any, metrics: Any, columns: Any) -> Scored:
    """Return a result that was sent as JSON, in which tuples are lists."""
    return Scored(scores, [CallError(*error) for error in errors], metrics, columns)


def _find_failing(call: Call, run_async: Await) -> int | None:
    """Find a completion on which the function of a failed call fails alone, for an error message.
    The search ends after SEARCH_SECONDS."""
    deadline = time.monotonic() + SEARCH_SECONDS
    services = {"log_extra": _log_nothing, "log_metric": _log_nothing}
    for index in range(len(call.completions)):
        alone = call._replace(
            completions=call.completions[index : index + 1],
            completion_ids=call.completion_ids[index : index + 1],
        )
        (returned,) = _call_all(alone, services, run_async)
        if isinstance(returned, BaseException):
            return index
        if time.monotonic() > deadline:
            break
    return None


def _describe_failure(
    index: int, error: BaseException, failing: int | None, num_completions: int
) -> CallError:
    name = _rewards.names[index]
    where = ""
    if failing is not None and num_completions > 1:
        where = f" on completion {failing + 1} of {num_completions}"
    limit = ""
    if isinstance(error, MemoryError):
        limit = f"\n(reward.memory_limit_gib is {_rewards.options.memory_limit_gib})"
    text = f"reward '{name}' failed{where}:\n{user_traceback(error)}{limit}"
    return CallError(text, failing)


def try_function(spec: str, example: Prompt | None) -> str:
    """Load a function, check its columns, and call it on dummy completions (`reward.check`). Return
    a warning, empty if all is well. Raises ConfigError where a run would fail."""
    function = loading.load_reward(spec, _rewards)
    if example is None:
        return ""
    loading.check_rewards(_rewards, example, [spec])
    if not _rewards.options.check or loading.needs_environments(function):
        return ""
    _functions[:] = [function]
    num_dummies = min(8, _rewards.num_generations)
    returned = _call_on_dummies(example.content, example, num_dummies)
    if isinstance(returned, WRONG_FORM):
        _check_form(spec, example, num_dummies, returned)
    if isinstance(returned, KeyError):
        _check_key(spec, example, num_dummies, returned)
    try:
        _as_scores(returned, num_dummies)
    except BaseException as error:
        has_returned = returned is not error
        if has_returned and isinstance(error, TypeError):
            raise ConfigError(f"{loading.KEY}: '{spec}' on dummy completions: {error}") from None
        if _is_mistake(error):
            raise ConfigError(f"{loading.KEY}: '{spec}':\n{user_traceback(error)}") from None
        return (
            f"warning: reward '{spec}' failed on a dummy completion; the run starts, since real "
            f"ones may differ (reward.check=false: no such calls):\n{user_traceback(error)}"
        )
    return ""


def _check_form(spec: str, example: Prompt, num_dummies: int, error: BaseException) -> None:
    """Raise ConfigError where a function fails because it reads chat messages and gets strings, or
    the reverse: then it does not fail with the other form."""
    if any(value is None for value in example.columns.values()):
        return  # a missing value may be what is wrong
    if "left operand" in str(error):
        return  # `18 in completion`: the value of the column is no text
    content: Messages | str = str(example.content)
    need = NEEDS_TEXT
    if isinstance(example.content, str):
        content = [{"role": "user", "content": example.content}]
        need = NEEDS_MESSAGES
    returned = _call_on_dummies(content, example, num_dummies)
    if not isinstance(returned, BaseException):
        raise ConfigError(f"{loading.KEY}: '{spec}' {need}")


def _check_key(spec: str, example: Prompt, num_dummies: int, error: KeyError) -> None:
    """Raise ConfigError where the missing key is a column, and not a key of the function's own: a
    row that has it then has another result."""
    key = error.args[0] if error.args else None
    if not isinstance(key, str):
        return
    columns = {key: None, **example.columns}
    row = replace(example, columns=columns)
    returned = _call_on_dummies(example.content, row, num_dummies)
    if repr(returned) != repr(error):
        raise loading.lacks_column(spec, f"it reads the column '{key}'", example)


def _is_mistake(error: BaseException) -> bool:
    """Return whether an exception shows a mistake in the function, whatever the completion is."""
    if isinstance(error, (NameError, ImportError)):
        return True
    # A match that dummies lack is None, which has no attributes.
    return isinstance(error, (AttributeError, TypeError)) and "NoneType" not in str(error)


class _DummyMessages(list[dict[str, str]]):
    """Chat messages which show that a function looks for a text in the list of them."""

    def __contains__(self, value: object) -> bool:
        if isinstance(value, str):
            raise TypeError("the completion is a list of chat messages, which contains no text")
        return super().__contains__(value)


def _call_on_dummies(content: str | Messages, example: Prompt, num_dummies: int) -> Any:
    """Return what the function returns, or the exception that it raises."""
    completions: list[Any] = []
    for number in range(num_dummies):
        text = f"This is dummy completion {number}."
        if isinstance(content, str):
            completions.append(text)
        else:
            message = {"role": "assistant", "content": text}
            completions.append(_DummyMessages([message]))
    ids = [[0] * 5] * num_dummies
    call = Call(content, completions, ids, example.columns, functions=[0])
    services = {"log_extra": _log_nothing, "log_metric": _log_nothing}
    (returned,) = _call_all(call, services)
    return returned


def _log_nothing(name: str, value: Any) -> None:
    """Stand for `log_extra` and `log_metric` in a call on dummies."""


def _call_all(call: Call, services: Mapping[str, Any], run_async: Await = _loop.run) -> list[Any]:
    """Return each function's result or exception. Each gets its own copy of the arguments, with
    images of PIL in the places of pictures."""
    data = _arguments_of(call)
    open_column = lru_cache(maxsize=None)(lambda name: with_images(call.columns[name]))
    functions = [_loaded()[index] for index in call.functions]
    returned: list[Any] = []
    for function in functions:
        BoundedOutput.begin_call()
        try:
            accepted = loading.accepted_arguments(function, data)
            if not getattr(function, TAKES_FILES, False):
                for name in accepted.keys() & call.columns.keys():
                    accepted[name] = [open_column(name)] * len(call.completions)
            arguments = copy.deepcopy(accepted)
            arguments |= loading.accepted_arguments(function, services)
            returned.append(function(**arguments))
        except BaseException as error:
            returned.append(error)
    return list(run_async(_await_all(returned)))


def _arguments_of(call: Call) -> dict[str, Any]:
    """Return the arguments for functions by name. Lists have an entry per completion."""
    num_completions = len(call.completions)
    data: dict[str, Any] = {}
    for name, value in call.columns.items():
        data[name] = [value] * num_completions
    completions: list[Any] = list(call.completions)
    if not isinstance(call.prompt, str):
        for index, text in enumerate(completions):
            if isinstance(text, str):
                completions[index] = [{"role": "assistant", "content": text}]
    data["prompts"] = [call.prompt] * num_completions
    data["completions"] = completions
    data["completion_ids"] = call.completion_ids
    data["trainer_state"] = call.trainer_state
    return data


async def _await_all(returned: Iterable[Any]) -> list[Any]:
    async def value_of(value: Any) -> Any:
        BoundedOutput.begin_call()  # each task has a context of its own
        try:
            return await value if inspect.isawaitable(value) else value
        except SystemExit as error:  # it would end the process
            return error

    return await asyncio.gather(*map(value_of, returned), return_exceptions=True)


def _as_scores(returned: Any, num_completions: int) -> list[float | None]:
    """Convert what a function returned. Raises its exception, TypeError, or ValueError for NaN."""
    if isinstance(returned, BaseException):
        raise returned
    scores: list[float | None] = []
    has_no_order = isinstance(returned, (Mapping, Set))
    if not has_no_order:
        with contextlib.suppress(Exception):  # any: `float` calls the user's types, as of torch
            scores = [*map(_as_score, returned)]
    is_list = len(scores) == num_completions
    if is_list and all(score is None or abs(score) <= MAX_SCORE for score in scores):
        return scores
    raise (ValueError if is_list else TypeError)(
        f"expected a list of {num_completions} finite numbers or None, one per completion, got "
        f"{reprlib.repr(returned)}"
    )


def _as_score(value: Any) -> float | None:
    if isinstance(value, str):
        raise TypeError("a text is no number")
    return None if value is None else float(value)


def _as_json(value: Any) -> Any:
    """Convert a value to JSON: arrays to lists, NaN and infinity to null, other types to text."""
    text = json.dumps(value, default=lambda x: x.tolist() if hasattr(x, "tolist") else str(x))
    return json.loads(text, parse_constant=lambda _: None)
