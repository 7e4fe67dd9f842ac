"""Call reward functions on completions of one prompt, in a reward process, and check their scores.

A function that fails affects its own scores only: they become 0, and the error is returned beside
them. Asynchronous functions are awaited together, on one event loop: a client may stay open.
"""

import asyncio
import contextlib
import copy
import inspect
import io
import json
import multiprocessing
import os
import reprlib
import resource
import signal
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence, Set
from contextvars import ContextVar
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from easyrl import user_code
from easyrl.config import ConfigError
from easyrl.config.spec import RewardSpec
from easyrl.events import SAMPLE_COLUMNS
from easyrl.processes import allow_long_integers, die_with_parent, maybe_sleep, set_name
from easyrl.rewards import loading
from easyrl.rewards.functions import RewardFunction
from easyrl.types import Messages, Prompt
from easyrl.user_code import user_traceback

MAX_SCORE = 1e30  # scores are summed with weights in float32, whose largest number is about 3e38
MAX_OUTPUT_CHARACTERS = 2**24  # of a function in a call, so that endless output fills no disk
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
PROCESS_NAME = "easyrl-reward"


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


class Scored(NamedTuple):
    """Results of a call, or of all calls of a group."""

    scores: list[list[float | None]]
    """[functions][N]; 0 for a failed call. Empty if skipped (`reward.on_error=skip_group`)."""
    errors: list[str]
    metrics: dict[str, float]  # from log_metric
    columns: dict[str, list[Any]]  # from log_extra, [N] each


class BoundedOutput(io.TextIOWrapper):
    """Standard output and error of all calls. Each call may print MAX_OUTPUT_CHARACTERS."""

    _num_left: ContextVar[list[int]] = ContextVar("num_left")
    _last: ClassVar = [MAX_OUTPUT_CHARACTERS]  # of the newest call, for threads that one starts

    @classmethod
    def begin_call(cls) -> None:
        """Count what this context (a thread or a task) prints as the output of a new call."""
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
"""Runs a coroutine. Where environments are, their own event loop does."""


def start(
    rewards: RewardSpec,
    sources: Mapping[str, str],
    specs: Sequence[str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Initialize a process of the pool. `sources`: of the user's files (`user_code.sources`);
    `specs`: the functions that it calls, if not all; `environment`: variables of the process of
    the reward models, whose memory is not limited (None: another process)."""
    global _rewards  # noqa: PLW0603  one process, one run
    _rewards = rewards
    os.environ.update(environment or {})  # before torch is imported
    user_code.sources.update(sources)
    # User code may start processes as in any program; they end with this one.
    multiprocessing.set_start_method(None, force=True)  # `spawn` is EasyRL's
    multiprocessing.current_process().daemon = False
    os.register_at_fork(after_in_child=lambda: die_with_parent(os.getppid()))
    sys.modules["__main__"].__spec__ = find_spec("easyrl.processes")  # others import it at first
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # end at once
    die_with_parent()
    set_name(PROCESS_NAME)
    allow_long_integers()
    output = BoundedOutput(sys.stderr.buffer, errors="backslashreplace", line_buffering=True)
    sys.stdout = sys.stderr = output  # what `--dry-run` prints to its own is a config file
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # where memory runs out, Linux ends this process first
        Path("/proc/self/oom_score_adj").write_text("1000")
    memory_limit_gib = rewards.options.memory_limit_gib
    if memory_limit_gib is not None and environment is None:
        # Private writable memory; RLIMIT_AS would count what is only mapped, too.
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        with contextlib.suppress(ValueError):  # the hard limit is lower
            limit = int(memory_limit_gib * 2**30)
            resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    if "math" in (specs or rewards.functions):
        import math_verify  # noqa: F401  takes long: before the first call's timeout runs


def functions_with_environments() -> list[int]:
    return [index for index, each in enumerate(_loaded()) if loading.needs_environments(each)]


def _loaded() -> list[RewardFunction]:
    if not _functions:  # here, since pebble does not report an initializer's error
        _functions.extend(loading.load_reward(spec, _rewards) for spec in _rewards.functions)
    return _functions


def run_call(call: Call, environments: Sequence[Any] = (), run_async: Await = _loop.run) -> Scored:
    """Score the completions. Raises ConfigError where a function cannot be loaded."""
    maybe_sleep()
    num_completions = len(call.completions)
    result = Scored([], [], {}, {})
    logged: dict[str, list[float]] = {}

    def log_extra(column: str, values: Sequence[Any]) -> None:
        """Add a column to the samples, one value per completion."""
        if column in SAMPLE_COLUMNS or len(values) != num_completions:
            raise ValueError(
                f"log_extra: expected {num_completions} values, one per completion, and a name "
                f"other than {', '.join(SAMPLE_COLUMNS)}, got {len(values)} values for '{column}'"
            )
        result.columns[str(column)] = [_as_json(value) for value in values]

    def log_metric(name: str, value: float) -> None:
        """Log a number to metrics.jsonl, averaged over the iteration's groups."""
        logged[str(name)] = [*logged.get(str(name), []), float(value)]

    services: dict[str, Any] = {"log_extra": log_extra, "log_metric": log_metric}
    services |= {"environments": environments} if environments else {}
    for index, returned in zip(call.functions, _call_all(call, services, run_async), strict=True):
        try:
            result.scores.append(_as_scores(returned, num_completions))
        except BaseException as error:  # SystemExit too: the process belongs to the rewards
            result.scores.append([0.0] * num_completions)
            name = _rewards.names[index]
            limit = ""
            if isinstance(error, MemoryError):
                limit = f"\n(reward.memory_limit_gib is {_rewards.options.memory_limit_gib})"
            result.errors.append(f"reward '{name}' failed:\n{user_traceback(error)}{limit}")
    result.metrics.update({name: sum(values) / len(values) for name, values in logged.items()})
    return Scored(*json.loads(json.dumps(result)))  # the caller unpickles nothing of a user's


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
    content, num_dummies = example.content, min(8, _rewards.num_generations)
    returned = _call_on_dummies(content, example, num_dummies)
    has_all = all(value is not None for value in example.columns.values())
    is_of_column = "left operand" in str(returned)  # `18 in completion`
    # A missing value may be what is wrong, too.
    if isinstance(returned, WRONG_FORM) and has_all and not is_of_column:
        is_text = isinstance(content, str)
        other: Messages | str = [{"role": "user", "content": content}] if is_text else str(content)
        if not isinstance(_call_on_dummies(other, example, num_dummies), BaseException):
            need = NEEDS_MESSAGES if is_text else NEEDS_TEXT
            raise ConfigError(f"{loading.KEY}: '{spec}' {need}")
    if isinstance(returned, KeyError) and isinstance(key := (*returned.args, None)[0], str):
        # It is a column, and not a key of the function's own, if a row with it has another end.
        row = replace(example, columns={key: None, **example.columns})
        if repr(_call_on_dummies(content, row, num_dummies)) != repr(returned):
            raise loading.lacks_column(spec, f"it reads the column '{key}'", example)
    try:
        _as_scores(returned, num_dummies)
    except BaseException as error:
        if returned is not error and isinstance(error, TypeError):
            raise ConfigError(f"{loading.KEY}: '{spec}' on dummy completions: {error}") from None
        # A match that dummies lack is None, which has no attributes.
        is_mistake = isinstance(error, AttributeError | TypeError) and "NoneType" not in str(error)
        if is_mistake or isinstance(error, (NameError, ImportError)):
            raise ConfigError(f"{loading.KEY}: '{spec}':\n{user_traceback(error)}") from None
        return (
            f"warning: reward '{spec}' failed on a dummy completion; the run starts, since real "
            f"ones may differ (reward.check=false: no such calls):\n{user_traceback(error)}"
        )
    return ""


class _DummyMessages(list[dict[str, str]]):
    """Chat messages which show that a function looks for a text in the list of them."""

    def __contains__(self, value: object) -> bool:
        if isinstance(value, str):
            raise TypeError("the completion is a list of chat messages, which contains no text")
        return super().__contains__(value)


def _call_on_dummies(content: str | Messages, example: Prompt, number: int) -> Any:
    texts: list[Any] = [f"This is dummy completion {n}." for n in range(number)]
    if not isinstance(content, str):
        texts = [_DummyMessages([{"role": "assistant", "content": text}]) for text in texts]
    call = Call(content, texts, [[0] * 5] * number, example.columns, functions=[0])
    (returned,) = _call_all(call, dict.fromkeys(("log_extra", "log_metric"), lambda *_: None))
    return returned


def _call_all(call: Call, services: Mapping[str, Any], run_async: Await = _loop.run) -> list[Any]:
    """Return each function's result or exception. Each gets its own copy of the arguments."""
    texts, is_chat = call.completions, not isinstance(call.prompt, str)
    chat = [
        [{"role": "assistant", "content": each}] if isinstance(each, str) else each
        for each in texts
    ]
    data: dict[str, Any] = {name: [value] * len(texts) for name, value in call.columns.items()}
    data |= {"prompts": [call.prompt] * len(texts), "completions": chat if is_chat else texts}
    data |= {"completion_ids": call.completion_ids, "trainer_state": call.trainer_state}
    returned: list[Any] = []
    for function in (_loaded()[index] for index in call.functions):
        BoundedOutput.begin_call()
        try:
            arguments = copy.deepcopy(loading.accepted_arguments(function, data))
            arguments |= loading.accepted_arguments(function, services)
            returned.append(function(**arguments))
        except BaseException as error:
            returned.append(error)
    return list(run_async(_await_all(returned)))


async def _await_all(returned: Iterable[Any]) -> list[Any]:
    async def value_of(value: Any) -> Any:
        BoundedOutput.begin_call()  # each task has a context of its own
        return await value if inspect.isawaitable(value) else value

    return await asyncio.gather(*map(value_of, returned), return_exceptions=True)


def _as_scores(returned: Any, num_completions: int) -> list[float | None]:
    """Convert what a function returned. Raises its exception, TypeError, or ValueError for NaN."""
    if isinstance(returned, BaseException):
        raise returned
    scores: list[float | None] = []
    with contextlib.suppress(Exception):  # any: `float` calls the user's types
        values = [] if isinstance(returned, (Mapping, Set)) else list(returned)  # no order
        numbers = [value for value in values if not isinstance(value, str)]
        scores = [None if value is None else float(value) for value in numbers]  # also of torch
    is_list = len(scores) == num_completions
    if is_list and all(score is None or abs(score) <= MAX_SCORE for score in scores):
        return scores
    raise (ValueError if is_list else TypeError)(
        f"expected a list of {num_completions} finite numbers or None, one per completion, got "
        f"{reprlib.repr(returned)}"
    )


def _as_json(value: Any) -> Any:
    """Convert a value to JSON: arrays to lists, NaN and infinity to null, other types to text."""
    text = json.dumps(value, default=lambda x: x.tolist() if hasattr(x, "tolist") else str(x))
    return json.loads(text, parse_constant=lambda _: None)
