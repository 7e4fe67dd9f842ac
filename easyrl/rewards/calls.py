"""In a reward process: one group through every reward function, each answer looked at.

A call is all functions on one group. One that fails is answered by `reward.on_error`: under
`stop` it raises a RewardError that names function and prompt, else the message goes back beside
the scores, in which the function that failed gave every completion 0. Asynchronous functions are
awaited together, on one event loop for all calls of the process, so that a client may be kept.

A call that needs more memory than `reward.memory_limit_gib` ends the process, which may hold on to
what it took; where the machine's memory ends first, the kernel takes this process before others.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import os
import signal
import sys
import traceback
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pebble import CONSTS

from easyrl.config import Config
from easyrl.delays import maybe_sleep
from easyrl.lifeline import die_with_parent
from easyrl.rewards.functions import RewardError, RewardFunction
from easyrl.rewards.loading import (
    load_reward,
    own_traceback,
    reward_names,
    reward_specs,
    slow_imports,
)
from easyrl.rewards.logged import START, Logged, TrainerState
from easyrl.rewards.output import Printed
from easyrl.rewards.signatures import Takes
from easyrl.types import Messages
from easyrl.wording import counted

LARGEST = 1e30
"""Scores are summed with weights in float32, whose largest number is about 3e38."""
EXIT_ZERO = 254
"""The exit code that stands for 0: by the pool a process that ends with 0 is not missed, and its
call not answered before its time is up."""
EXIT_OUT_OF_MEMORY = 253
Scores = list[list[float | None]]  # [functions][G]


@dataclass(frozen=True, slots=True)
class Group:
    """What the functions are given of one prompt."""

    prompt: str | Messages
    completions: Sequence[str]  # [G]
    completion_ids: Sequence[Any]  # [G][R]
    columns: Mapping[str, Any]
    trainer_state: TrainerState = START

    def __str__(self) -> str:
        return f"for the prompt {self.prompt!r:.200}"


@dataclass(frozen=True, slots=True)
class Answer:
    scores: Scores
    errors: Sequence[str] = ()
    """What went wrong, where the run goes on all the same."""
    metrics: Mapping[str, float] = field(default_factory=dict)  # logged by the functions
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # logged, [G] each
    num_dropped: int = 0
    """Bytes printed beyond what is kept."""


class _Loaded(NamedTuple):
    name: str
    function: RewardFunction
    takes: Takes


_config: Config | None = None
_functions: list[_Loaded] = []
_loop = asyncio.Runner()
_printed: Printed | None = None


def start_worker(
    config: Config, lock_timeout_seconds: float, output: Connection, kept_bytes: int
) -> None:
    """What a process of the pool does first. It ends itself when it has waited
    `lock_timeout_seconds` for the pool's pipes: whoever has locked them is dead. What it prints
    goes to `output`, up to `kept_bytes`."""
    global _config, _printed  # noqa: PLW0603  one process, one run
    CONSTS.channel_lock_timeout = lock_timeout_seconds
    # At once, without pebble's clean-up: there is nothing to clean up, and close() waits for it.
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)
    die_with_parent()
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    output.close()
    _printed = Printed(kept_bytes)
    end = os._exit
    os._exit = lambda status: end(status or EXIT_ZERO)
    _config = config
    for module in slow_imports(config):
        with contextlib.suppress(Exception, SystemExit):  # which the call tells
            importlib.import_module(module)
    if "numpy.random" in sys.modules:  # forked: else all draw the same
        np.random.seed()
    _limit_memory(config.reward.memory_limit_gib)


def score_group(group: Group) -> Answer:
    """The scores, and what the functions have logged."""
    assert _config is not None and _printed is not None
    maybe_sleep()
    logged = Logged(len(group.completions))
    if not _functions:  # not in start_worker: an error there would be nobody's answer
        _load(_config)
    scores: Scores = []
    errors: list[RewardError] = []
    for loaded, returned in zip(_functions, _call_all(group, logged), strict=True):
        try:
            scores.append(_checked(loaded.name, returned, group))
        except RewardError as error:
            errors.append(error)
            scores.append([0.0] * len(group.completions))
    for index, of_completion in enumerate(zip(*scores, strict=True)):
        if all(score is None for score in of_completion):
            what = f"every reward function returned None for completion {index}, {group}"
            errors.append(RewardError(what))
            scores[0][index] = 0.0
    num_dropped = _printed.take_dropped()
    if errors and _config.reward.on_error == "stop":
        raise errors[0]
    messages = [str(error) for error in errors]
    return Answer(scores, messages, logged.metrics, logged.columns, num_dropped)


def _load(config: Config) -> None:
    try:
        loaded = [load_reward(spec, config) for spec in reward_specs(config)]
    except ValueError as error:  # complete in itself
        raise RewardError(str(error)) from None
    for name, function in zip(reward_names(config), loaded, strict=True):
        _functions.append(_Loaded(name, function, Takes.of(function)))


def _call_all(group: Group, logged: Logged) -> list[Any]:
    """What each function returns, or the RewardError that it failed with."""
    num_generations = len(group.completions)
    is_chat = not isinstance(group.prompt, str)
    arguments = {column: [value] * num_generations for column, value in group.columns.items()}
    arguments["prompts"] = [group.prompt] * num_generations
    arguments["completions"] = [
        [{"role": "assistant", "content": text}] if is_chat else text for text in group.completions
    ]
    arguments["completion_ids"] = [np.asarray(ids).tolist() for ids in group.completion_ids]
    from_trainer = {
        "trainer_state": group.trainer_state,
        "log_extra": logged.log_extra,
        "log_metric": logged.log_metric,
    }
    returned: list[Any] = []
    for loaded in _functions:
        try:
            returned.append(loaded.function(**loaded.takes.chosen(arguments | from_trainer)))
        except BaseException as error:  # the process is the reward's own
            returned.append(_failed(loaded.name, error, group))
    waiting = {place: each for place, each in enumerate(returned) if inspect.isawaitable(each)}
    if waiting:
        names = [_functions[place].name for place in waiting]
        answers = _loop.run(_await_together(names, list(waiting.values()), group))
        for place, answer in zip(waiting, answers, strict=True):
            returned[place] = answer
    return returned


async def _await_together(
    names: Sequence[str], waiting: Sequence[Awaitable[Any]], group: Group
) -> list[Any]:
    async def answer(name: str, each: Awaitable[Any]) -> Any:
        try:
            return await each
        except BaseException as error:
            return _failed(name, error, group)

    return await asyncio.gather(*map(answer, names, waiting))


def _failed(name: str, error: BaseException, group: Group) -> RewardError:
    if isinstance(error, MemoryError):
        with contextlib.suppress(MemoryError):
            traceback.print_exception(error)
            sys.stderr.flush()
        os._exit(EXIT_OUT_OF_MEMORY)
    return RewardError(
        f"reward '{name}' failed, {group}, "
        f"columns {', '.join(group.columns) or 'none'}:\n{own_traceback(error)}"
    )


def _limit_memory(limit_gib: float | None) -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    if limit_gib is None or sys.platform != "linux":
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = int(limit_gib * 2**30)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    # What it may write to alone: address space counts what is only mapped, too.
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _checked(name: str, returned: Any, group: Group) -> list[float | None]:
    def refuse(what: str) -> RewardError:
        return RewardError(f"reward '{name}' returned {what}, {group}")

    if isinstance(returned, RewardError):
        raise returned

    wanted = len(group.completions)
    accepted = f"accepted: a list of {wanted} numbers or None, one per completion"
    try:
        if isinstance(returned, (str, bytes, dict)) or not hasattr(returned, "__len__"):
            raise TypeError
        values = list(returned)  # a zero-dimensional array has a length, and refuses to tell it
    except Exception:
        raise refuse(f"{_shown(returned)}; {accepted}") from None
    if len(values) != wanted:
        raise refuse(f"{counted(len(values), 'value')}; {accepted}")
    scores: list[float | None] = []
    for value in values:
        if value is None:
            scores.append(None)
            continue
        try:
            if isinstance(value, (str, bytes)):
                raise TypeError
            score = float(value)  # numbers of Python, NumPy and torch
        except Exception:
            raise refuse(f"{_shown(value)} among its values; {accepted}") from None
        if not abs(score) <= LARGEST:
            raise refuse(
                f"{score}; accepted: finite numbers up to {LARGEST:g} in size, or None for 'does "
                "not apply'"
            )
        scores.append(score)
    return scores


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.80}"
    except Exception:
        return f"a {type(value).__name__}"
