"""Score groups in processes of their own, so that a slow reward never stops generation.

    rollout worker                              reward processes (reward.num_workers)
      submit(key, group) ──── pebble pool ────►  f(prompts, completions, completion_ids, **columns)
      fileno() readable  ◄────── eventfd ──────  scores, or errors
      finished()  ──► [ScoredGroup(key, scores, errors)]

A group is one call for the user's functions and the cheap built-in ones, and one call per
completion for `code` and `math`. Only `close` blocks. The processes import no torch and end with
the rollout worker, also when it is killed.

A call that raises, exceeds its timeout or ends its process fails alone; pebble starts another
process. A pool that breaks (a process killed between two calls) is replaced, and its calls are
repeated. A broken pool may forget calls without waking anyone: call `finished` at least every
POLL_SECONDS while groups are being scored.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, NamedTuple

import numpy as np
from pebble import ProcessExpired, ProcessPool

from easyrl.config import Config
from easyrl.rewards.functions import RewardError
from easyrl.rewards.loading import PER_COMPLETION, reward_names, reward_specs
from easyrl.rewards.worker import (
    Call,
    CallResult,
    TrainerState,
    call_functions,
    describe_prompt,
    start,
)
from easyrl.types import Float32, Messages

POLL_SECONDS = 1.0
MAX_RESTARTS = 3
"""Pools that may break one after the other without scoring a group."""


class ScoredGroup(NamedTuple):
    key: Hashable
    scores: list[list[float | None]] | None
    """[functions][G]; None where `reward.on_error=skip_group` applies."""
    errors: Sequence[str] = ()
    """Failures that the run survives."""
    metrics: Mapping[str, float] = {}
    """From `log_metric`."""
    columns: Mapping[str, Sequence[Any]] = {}  # from log_extra, [G] each


@dataclass(slots=True, eq=False)
class _Group:
    key: Hashable
    prompt: str | Messages
    num_completions: int
    calls: dict[Call, Future[CallResult]]


class RewardPool:
    """Create it in a thread that lives as long as the pool: Linux ends the processes with the
    thread that started them."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._names = reward_names(config)
        specs = reward_specs(config)
        self._per_completion = [n for n, spec in enumerate(specs) if spec in PER_COMPLETION]
        self._per_group = [n for n, spec in enumerate(specs) if spec not in PER_COMPLETION]
        self._timeout_seconds = config.reward.timeout_seconds or config.runtime.timeout_seconds
        self._groups: list[_Group] = []  # being scored
        self._num_restarts = 0
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._pool = self._start_pool()

    def submit(
        self,
        key: Hashable,
        prompt: str | Messages,
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Any],
        *,
        trainer_state: TrainerState | None = None,
    ) -> None:
        """Score the G completions of one prompt; `key` identifies the group in `finished`."""
        size, state = len(completions), trainer_state or TrainerState()
        parts = [(self._per_group, 0, size)] if self._per_group else []
        parts += [([index], n, n + 1) for index in self._per_completion for n in range(size)]
        calls = {}
        for functions, first, end in parts:
            texts, ids = completions[first:end], completion_ids[first:end]
            call = Call(functions, first, prompt, texts, ids, columns, state)
            calls[call] = self._schedule(call)
        self._groups.append(_Group(key, prompt, size, calls))

    def finished(self) -> list[ScoredGroup]:
        """The groups scored since the last call, without waiting.

        Raises RewardError where a function failed and `reward.on_error` is `stop`.
        """
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        if self.is_broken:
            self._restart()
        scored = [group for group in self._groups if all(map(_has_result, group.calls.values()))]
        for group in scored:
            self._groups.remove(group)
            self._num_restarts = 0
        return [self._collect(group) for group in scored]

    @property
    def is_broken(self) -> bool:
        """Whether calls may have been lost with the pool; `finished` repeats them."""
        return bool(self._groups) and not self._pool.active

    def fileno(self) -> int:
        """Readable when `finished` has something: for select or multiprocessing.connection.wait."""
        return self._wake_fd

    def close(self) -> None:
        """End all processes at once, whatever they are doing."""
        self._stop_pool()
        if self._wake_fd >= 0:
            os.close(self._wake_fd)
            self._wake_fd = -1

    def _start_pool(self) -> ProcessPool:
        pool = ProcessPool(
            max_workers=self._config.reward.num_workers,
            initializer=start,
            initargs=(self._config,),
            context=get_context("spawn"),
        )
        pool.schedule(int)  # pebble starts the processes with the first task
        return pool

    def _stop_pool(self) -> None:
        self._pool.stop()  # type: ignore[no-untyped-call]
        self._pool.join()

    def _restart(self) -> None:
        self._num_restarts += 1
        if self._num_restarts > MAX_RESTARTS:
            raise RewardError(f"the reward processes ended {self._num_restarts} times")
        self._stop_pool()
        self._pool = self._start_pool()
        for group in self._groups:
            for call in [call for call, future in group.calls.items() if not _has_result(future)]:
                group.calls[call] = self._schedule(call)

    def _schedule(self, call: Call) -> Future[CallResult]:
        future: Future[CallResult] = Future()
        try:
            future = self._pool.schedule(call_functions, (call,), timeout=self._timeout_seconds)
        except RuntimeError as error:  # the pool is broken, which `finished` will see
            future.set_exception(BrokenProcessPool(str(error)))
        future.add_done_callback(lambda _: self._wake())  # in a thread of the pool
        return future

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # closed: nobody waits
            os.eventfd_write(self._wake_fd, 1)

    def _collect(self, group: _Group) -> ScoredGroup:
        scores: list[list[float | None]] = [[0.0] * group.num_completions for _ in self._names]
        errors: list[str] = []
        metrics: dict[str, float] = {}
        columns: dict[str, Sequence[Any]] = {}
        for call, future in group.calls.items():
            result = self._result_of(call, future)
            for function, part in zip(call.functions, result.scores, strict=False):
                scores[function][call.first : call.first + len(part)] = part
            errors += result.errors
            metrics |= result.metrics
            columns |= result.columns
        by_completion = enumerate(zip(*scores, strict=True))
        without = [index for index, values in by_completion if set(values) == {None}]
        for index in without:
            scores[0][index] = 0.0
        if without:
            errors.append(
                f"reward ({', '.join(self._names)}): every function returned None for "
                f"completion {', '.join(map(str, without))}, {describe_prompt(group.prompt)}"
            )
        on_error = self._config.reward.on_error
        if errors and on_error == "stop":
            raise RewardError(errors[0])
        is_skipped = bool(errors) and on_error == "skip_group"
        errors = list(dict.fromkeys(errors))  # one endless program per completion is one error
        return ScoredGroup(group.key, None if is_skipped else scores, errors, metrics, columns)

    def _result_of(self, call: Call, future: Future[CallResult]) -> CallResult:
        """The result, or an error for a call that did not return."""
        match future.exception():
            case None:
                return future.result()
            case TimeoutError():
                problem = f"took longer than {self._timeout_seconds:g} s (reward.timeout_seconds)"
            case ProcessExpired(exitcode=code):
                if code == -signal.SIGXCPU and call.functions != self._per_group:
                    return CallResult()  # math.MAX_CPU_SECONDS: the score is 0
                problem = f"ended its process (exit code {code})"
            case error:  # a function cannot be loaded, or a result cannot be pickled
                problem = f"failed: {error}"
        names = ", ".join(self._names[index] for index in call.functions)
        return CallResult(errors=[f"reward ({names}) {problem}, {describe_prompt(call.prompt)}"])


def weighted_sum(scores: Sequence[Sequence[float | None]], weights: Sequence[float]) -> Float32:
    """The weighted sum [G] of the functions' scores [functions][G]; None does not count."""
    table = np.array(scores, dtype=np.float64)  # None becomes nan; scores themselves are finite
    rewards: Float32 = np.nansum(table * np.array(weights)[:, None], axis=0).astype(np.float32)
    return rewards


def _has_result(future: Future[CallResult]) -> bool:
    """Whether the call is over, and not lost with a broken pool."""
    return future.done() and not isinstance(future.exception(), BrokenProcessPool)
