"""In a reward process: one group through every reward function, each answer looked at.

A call is all functions on one group. One that fails is answered by `reward.on_error`: under
`stop` it raises a RewardError that names function and prompt, else the message goes back beside
the scores, in which the function that failed gave every completion 0.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pebble import CONSTS

from easyrl.config import Config
from easyrl.delays import maybe_sleep
from easyrl.lifeline import die_with_parent
from easyrl.rewards.functions import RewardError, RewardFunction
from easyrl.rewards.loading import load_reward, own_traceback, reward_names, reward_specs
from easyrl.types import Messages
from easyrl.wording import counted

LARGEST = 1e30
"""Scores are summed with weights in float32, whose largest number is about 3e38."""
EXIT_ZERO = 254
"""The exit code that stands for 0: by the pool a process that ends with 0 is not missed, and its
call not answered before its time is up."""
Scores = list[list[float | None]]  # [functions][G]


@dataclass(frozen=True, slots=True)
class Group:
    """What the functions are given of one prompt."""

    prompt: str | Messages
    completions: Sequence[str]  # [G]
    completion_ids: Sequence[Any]  # [G][R]
    columns: Mapping[str, Any]

    def __str__(self) -> str:
        return f"for the prompt {self.prompt!r:.200}"


_config: Config | None = None
_functions: list[tuple[str, RewardFunction]] = []


def start_worker(config: Config, lock_timeout_seconds: float) -> None:
    """What a process of the pool does first. It ends itself when it has waited
    `lock_timeout_seconds` for the pool's pipes: whoever has locked them is dead."""
    global _config  # noqa: PLW0603  one process, one run
    CONSTS.channel_lock_timeout = lock_timeout_seconds
    # At once, without pebble's clean-up: there is nothing to clean up, and close() waits for it.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent()
    end = os._exit
    os._exit = lambda status: end(status or EXIT_ZERO)
    _config = config


def score_group(group: Group) -> tuple[Scores, list[str]]:
    """The scores, and what went wrong where the run goes on all the same."""
    assert _config is not None
    maybe_sleep()
    if not _functions:  # not in start_worker: an error there would be nobody's answer
        _load(_config)
    scores: Scores = []
    errors: list[RewardError] = []
    for name, function in _functions:
        try:
            scores.append(_call(name, function, group))
        except RewardError as error:
            errors.append(error)
            scores.append([0.0] * len(group.completions))
    for index, of_completion in enumerate(zip(*scores, strict=True)):
        if all(score is None for score in of_completion):
            what = f"every reward function returned None for completion {index}, {group}"
            errors.append(RewardError(what))
            scores[0][index] = 0.0
    if errors and _config.reward.on_error == "stop":
        raise errors[0]
    return scores, [str(error) for error in errors]


def _load(config: Config) -> None:
    try:
        loaded = [load_reward(spec, config) for spec in reward_specs(config)]
    except ValueError as error:  # complete in itself
        raise RewardError(str(error)) from None
    _functions.extend(zip(reward_names(config), loaded, strict=True))


def _call(name: str, function: RewardFunction, group: Group) -> list[float | None]:
    num_generations = len(group.completions)
    is_chat = not isinstance(group.prompt, str)
    arguments = {column: [value] * num_generations for column, value in group.columns.items()}
    arguments["prompts"] = [group.prompt] * num_generations
    arguments["completions"] = [
        [{"role": "assistant", "content": text}] if is_chat else text for text in group.completions
    ]
    arguments["completion_ids"] = [np.asarray(ids).tolist() for ids in group.completion_ids]
    try:
        returned = function(**arguments)
    except BaseException as error:  # the process is the reward's own
        raise RewardError(
            f"reward '{name}' failed, {group}, "
            f"columns {', '.join(group.columns) or 'none'}:\n{own_traceback(error)}"
        ) from None
    return _checked(name, returned, group)


def _checked(name: str, returned: Any, group: Group) -> list[float | None]:
    def refuse(what: str) -> RewardError:
        return RewardError(f"reward '{name}' returned {what}, {group}")

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
