"""Runs in a reward process: call reward functions on completions of one prompt, check their scores.

A function that fails affects its own scores only: they become 0, and the error is returned beside
them. Asynchronous functions are awaited together, on one event loop for the process's lifetime, so
that a function may keep a client open.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import io
import json
import reprlib
import resource
import signal
import sys
from collections.abc import Awaitable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pebble import CONSTS

from easyrl.config import Config
from easyrl.processes import die_with_parent, maybe_sleep
from easyrl.rewards.functions import RewardFunction
from easyrl.rewards.loading import load_reward, own_traceback, reward_names, reward_specs
from easyrl.rewards.signatures import Signature, TrainerState
from easyrl.types import SAMPLE_COLUMNS, Messages

MAX_SCORE = 1e30
"""Scores are summed with weights in float32, whose largest number is about 3e38."""
MAX_OUTPUT_CHARACTERS = 2**24
"""Most that a function may print in a call, so that endless output fills no disk."""
LOCK_TIMEOUT_SECONDS = 5.0
"""A process that waits longer for the pool's pipe ends: the process that held the pipe's lock was
killed. Others hold it for milliseconds."""


@dataclass(frozen=True, slots=True)
class Call:
    """One task of the pool: some functions on some completions of a prompt."""

    functions: tuple[int, ...]  # indices into reward.functions
    prompt: str | Messages
    completions: Sequence[str]  # [N]
    completion_ids: Sequence[Sequence[int]]  # [N][R]
    columns: Mapping[str, Any]
    trainer_state: TrainerState


@dataclass(slots=True)
class CallResult:
    scores: list[list[float | None]] = field(default_factory=list)  # [functions][N]
    errors: list[str] = field(default_factory=list)
    """Failures of functions; their scores are 0."""
    metrics: Mapping[str, float] = field(default_factory=dict)  # from log_metric
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # from log_extra, [N] each


class _InvalidReturn(TypeError):
    pass


class _BoundedOutput(io.TextIOWrapper):
    num_left = MAX_OUTPUT_CHARACTERS

    def write(self, text: str, /) -> int:
        if len(text) > self.num_left:
            raise OSError(f"printed more than {MAX_OUTPUT_CHARACTERS // 2**20} MiB in one call")
        self.num_left -= len(text)
        return super().write(text)


_config: Config | None = None
_loaded: list[tuple[str, RewardFunction, Signature]] = []
_outputs: list[_BoundedOutput] = []
_loop = asyncio.Runner()


def start(config: Config) -> None:
    """Initialize a process of the pool."""
    global _config  # noqa: PLW0603  one process, one run
    _config = config
    CONSTS.channel_lock_timeout = LOCK_TIMEOUT_SECONDS
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # end at once
    die_with_parent()
    for name in ("stdout", "stderr"):
        stream = _BoundedOutput(
            getattr(sys, name).buffer, errors="backslashreplace", line_buffering=True
        )
        setattr(sys, name, stream)
        _outputs.append(stream)
    if "math" in reward_specs(config):
        with contextlib.suppress(Exception):  # the call that needs it reports the error
            import math_verify  # noqa: F401  takes long: before the first call's timeout runs
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError):  # where memory runs out, the kernel ends this process first
        Path("/proc/self/oom_score_adj").write_text("1000")
    if config.reward.memory_limit_gib is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = int(config.reward.memory_limit_gib * 2**30)
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        # Private writable memory; RLIMIT_AS would count what is only mapped, too.
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def call_functions(call: Call) -> CallResult:
    """Score the completions. Raises ConfigError where a function cannot be loaded."""
    assert _config is not None
    maybe_sleep()
    if not _loaded:  # here, since pebble does not report an initializer's error
        for spec, name in zip(reward_specs(_config), reward_names(_config), strict=True):
            function = load_reward(spec, _config)
            _loaded.append((name, function, Signature.of(function)))
    num_completions = len(call.completions)
    logged = _Logged(num_completions)
    result = CallResult(columns=logged.columns)
    for index, returned in zip(call.functions, _call_all(call, logged), strict=True):
        try:
            if isinstance(returned, BaseException):
                raise returned
            result.scores.append(_checked(returned, num_completions))
        except BaseException as error:
            result.errors.append(_describe(_loaded[index][0], error, call))
            result.scores.append([0.0] * num_completions)
    result.metrics = {name: sum(values) / len(values) for name, values in logged.values.items()}
    return result


def describe_prompt(prompt: str | Messages) -> str:
    return f"for the prompt {prompt!r:.200}"


def _call_all(call: Call, logged: _Logged) -> list[Any]:
    """What each function returned, or its exception. Each gets arguments of its own, which it may
    change."""
    num_completions = len(call.completions)
    is_chat = not isinstance(call.prompt, str)
    arguments = {column: [value] * num_completions for column, value in call.columns.items()}
    arguments["prompts"] = [call.prompt] * num_completions
    arguments["completions"] = [
        [{"role": "assistant", "content": text}] if is_chat else text for text in call.completions
    ]
    arguments["completion_ids"] = [np.asarray(ids).tolist() for ids in call.completion_ids]
    from_trainer = {
        "trainer_state": call.trainer_state,
        "log_extra": logged.log_extra,
        "log_metric": logged.log_metric,
    }
    returned: list[Any] = []
    for index in call.functions:
        _, function, signature = _loaded[index]
        own = copy.deepcopy(signature.select(arguments)) | signature.select(from_trainer)
        for output in _outputs:
            output.num_left = MAX_OUTPUT_CHARACTERS
        try:
            returned.append(function(**own))
        except BaseException as error:  # SystemExit too: the process belongs to the rewards
            returned.append(error)
    waiting = {index: value for index, value in enumerate(returned) if inspect.isawaitable(value)}
    if waiting:
        results = _loop.run(_await_all(list(waiting.values())))
        for index, result in zip(waiting, results, strict=True):
            returned[index] = result
    return returned


async def _await_all(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    async def result_of(awaitable: Awaitable[Any]) -> Any:
        try:
            return await awaitable
        except BaseException as error:
            return error

    return await asyncio.gather(*map(result_of, awaitables))


def _describe(name: str, error: BaseException, call: Call) -> str:
    if isinstance(error, _InvalidReturn):
        return f"reward '{name}': {error}, {describe_prompt(call.prompt)}"
    return (
        f"reward '{name}' failed, {describe_prompt(call.prompt)}, "
        f"columns {', '.join(call.columns) or 'none'}:\n{own_traceback(error)}"
    )


def _checked(returned: Any, num_completions: int) -> list[float | None]:
    expected = f"expected a list of {num_completions} numbers or None, one per completion"
    try:
        if isinstance(returned, (str, bytes, Mapping, Set)):
            raise TypeError
        if len(returned) != num_completions:
            expected += f", got {len(returned)}"
            raise ValueError
        scores = [None if value is None else _number(value) for value in returned]
    except Exception:
        raise _InvalidReturn(f"{expected}, got {reprlib.repr(returned)}") from None
    for score in scores:
        if score is not None and not abs(score) <= MAX_SCORE:
            raise _InvalidReturn(f"expected finite numbers up to {MAX_SCORE:g}, got {score}")
    return scores


def _number(value: Any) -> float:
    if isinstance(value, (str, bytes)):
        raise TypeError
    return float(value)  # numbers of Python, NumPy and torch


class _Logged:
    """What the functions of one call log."""

    def __init__(self, num_completions: int) -> None:
        self.num_completions = num_completions
        self.columns: dict[str, list[Any]] = {}  # of samples.jsonl, [N] each
        self.values: dict[str, list[float]] = {}  # by metric

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Add a column to the samples, one value per completion."""
        if column in SAMPLE_COLUMNS:
            raise ValueError(
                f"log_extra: expected a name other than {', '.join(SAMPLE_COLUMNS)}, got '{column}'"
            )
        values = list(values)
        if len(values) != self.num_completions:
            raise ValueError(
                f"log_extra: expected {self.num_completions} values for the column '{column}', "
                f"one per completion, got {len(values)}"
            )
        self.columns[str(column)] = [_as_json(value) for value in values]

    def log_metric(self, name: str, value: float) -> None:
        """Log a number to metrics.jsonl, averaged over the iteration's groups."""
        number = float(value)  # may raise, before there is an empty list
        self.values.setdefault(str(name), []).append(number)


def _as_json(value: Any) -> Any:
    """The value as JSON represents it; arrays as lists, NaN and infinity as null, else its text."""

    def convert(value: Any) -> Any:
        return value.tolist() if hasattr(value, "tolist") else str(value)  # NumPy and torch

    return json.loads(json.dumps(value, default=convert), parse_constant=lambda _: None)
