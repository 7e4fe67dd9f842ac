"""Rewards in processes of their own, so that a slow one never stops generation.

    rollout worker                              reward processes (num_workers)
      submit(key, group) ──── pebble pool ────►  f(prompts, completions, ids, **columns)
      fileno() readable  ◄─── wake-up pipe ────  scores, or the error
      finished()  ──► [(key, scores)]

Nothing here blocks but the constructor and `close`. The processes import no torch, ignore Ctrl-C
(their parent decides), and die with their parent, however it dies.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import numpy as np
from pebble import ProcessExpired, ProcessPool

from easyrl.config import Config
from easyrl.delays import maybe_sleep
from easyrl.lifeline import die_with_parent
from easyrl.rewards.functions import RewardError, RewardFunction
from easyrl.rewards.loading import load_reward, own_traceback, reward_names, reward_specs
from easyrl.types import Float32, Messages

Scores = list[list[float | None]]  # [functions][G]


@dataclass(frozen=True, slots=True)
class _Group:
    prompt: str | Messages
    completions: Sequence[str]  # [G]
    completion_ids: Sequence[Any]  # [G][R]
    columns: Mapping[str, Any]


class Scorer:
    """A pool of processes that score groups. Make it in a thread that lives as long as it does:
    on Linux the kernel ends the processes with the thread that started them."""

    def __init__(self, config: Config) -> None:
        self._names = ", ".join(reward_names(config))
        self._timeout_seconds = config.runtime.timeout_seconds
        self._finished: deque[tuple[Hashable, _Group, Future[Scores]]] = deque()
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        os.set_blocking(self._wake_writer, False)
        self._pool = ProcessPool(
            max_workers=config.reward.num_workers,
            initializer=_start_worker,
            initargs=(config,),
            context=get_context("spawn"),
        )
        with _sigint_blocked():  # inherited by the processes, and by the thread that renews them
            assert self._pool.active  # starts them

    def submit(
        self,
        key: Hashable,
        prompt: str | Messages,
        completions: Sequence[str],
        completion_ids: Sequence[Any],
        columns: Mapping[str, Any],
    ) -> None:
        """Score the G completions of one prompt; `key` names the group in `finished`."""
        group = _Group(prompt, completions, completion_ids, columns)
        if not self._pool.active:
            raise RewardError(f"reward ({self._names}): its processes were killed while idle")
        future = self._pool.schedule(_score_group, args=(group,), timeout=self._timeout_seconds)
        future.add_done_callback(lambda done: self._on_done(key, group, done))

    def finished(self) -> list[tuple[Hashable, Scores]]:
        """The groups scored since the last call, in order of completion; does not wait.

        Raises RewardError where a function failed.
        """
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_reader, 65536)
        scored = []
        while self._finished:
            key, group, future = self._finished.popleft()
            scored.append((key, self._result(group, future)))
        return scored

    def fileno(self) -> int:
        """Readable when `finished` has something: for select or multiprocessing.connection.wait."""
        return self._wake_reader

    def close(self) -> None:
        """End all processes at once, whatever they are doing."""
        if self._wake_writer < 0:
            return
        self._pool.stop()  # type: ignore[no-untyped-call]
        self._pool.join()
        os.close(self._wake_reader)
        os.close(self._wake_writer)
        self._wake_reader = self._wake_writer = -1

    def _on_done(self, key: Hashable, group: _Group, future: Future[Scores]) -> None:
        """Called in the pool's thread."""
        self._finished.append((key, group, future))
        with contextlib.suppress(OSError):  # full: it is readable anyway; closed: nobody waits
            os.write(self._wake_writer, b"x")

    def _result(self, group: _Group, future: Future[Scores]) -> Scores:
        try:
            return future.result()
        except TimeoutError:
            why = f"took longer than {self._timeout_seconds:g} s (runtime.timeout_seconds)"
        except ProcessExpired as error:
            why = f"ended its process (exit code {error.exitcode})"
        except BrokenProcessPool as error:
            why = f"lost its processes ({error})"
        raise RewardError(f"reward ({self._names}) {why}, {_describe(group)}")


def combine(scores: Sequence[Sequence[float | None]], weights: Sequence[float]) -> Float32:
    """The weighted sum [G] of the functions' scores [functions][G]; None does not apply.

    Raises ValueError where every function gave None for a completion.
    """
    assert len(scores) == len(weights), "one weight per function"
    table = np.array(scores, dtype=np.float64)  # None becomes nan; scores themselves are finite
    applies = ~np.isnan(table)
    if not applies.any(axis=0).all():
        index = int(np.flatnonzero(~applies.any(axis=0))[0])
        raise ValueError(f"every reward function returned None for completion {index}")
    weighted = np.where(applies, table, 0.0) * np.asarray(weights, dtype=np.float64)[:, None]
    rewards: Float32 = weighted.sum(axis=0).astype(np.float32)
    return rewards


# In the reward processes.

_config: Config | None = None
_functions: list[tuple[str, RewardFunction]] = []


def _start_worker(config: Config) -> None:
    global _config  # noqa: PLW0603  one process, one run
    # At once, without pebble's clean-up: there is nothing to clean up, and close() waits for it.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent()
    _config = config


def _score_group(group: _Group) -> Scores:
    assert _config is not None
    maybe_sleep()
    try:
        if not _functions:  # not in _start_worker: an error there would be nobody's answer
            names = reward_names(_config)
            loaded = [load_reward(spec, _config) for spec in reward_specs(_config)]
            _functions.extend(zip(names, loaded, strict=True))
        scores = [_call(name, function, group) for name, function in _functions]
    except ValueError as error:  # of loading: a ConfigError, complete in itself
        raise RewardError(str(error)) from None
    for index, of_completion in enumerate(zip(*scores, strict=True)):
        if all(score is None for score in of_completion):
            raise RewardError(
                f"every reward function returned None for completion {index}, {_describe(group)}"
            )
    return scores


def _call(name: str, function: RewardFunction, group: _Group) -> list[float | None]:
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
    except (Exception, SystemExit) as error:
        raise RewardError(
            f"reward '{name}' failed, {_describe(group)}, "
            f"columns {', '.join(group.columns) or 'none'}:\n{own_traceback(error)}"
        ) from None
    return _checked(name, returned, group)


def _checked(name: str, returned: Any, group: _Group) -> list[float | None]:
    def refuse(what: str) -> RewardError:
        return RewardError(f"reward '{name}' returned {what}, {_describe(group)}")

    wanted = len(group.completions)
    accepted = f"accepted: a list of {wanted} numbers or None, one per completion"
    if isinstance(returned, (str, bytes, dict)) or not hasattr(returned, "__len__"):
        raise refuse(f"{returned!r:.80}; {accepted}")
    if len(returned) != wanted:
        raise refuse(f"{len(returned)} values; {accepted}")
    scores: list[float | None] = []
    for value in returned:
        if value is None:
            scores.append(None)
            continue
        try:
            if isinstance(value, (str, bytes)):
                raise TypeError
            score = float(value)  # numbers of Python, NumPy and torch
        except Exception:
            raise refuse(f"{value!r:.80} among its values; {accepted}") from None
        if not math.isfinite(score):
            raise refuse(f"{score}; accepted: finite numbers, or None for 'does not apply'")
        scores.append(score)
    return scores


def _describe(group: _Group) -> str:
    return f"for the prompt {group.prompt!r:.200}"


@contextlib.contextmanager
def _sigint_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
