"""Score groups in processes of their own, so that a slow reward never stops generation.

    rollout worker                              reward processes (reward.num_workers)
      submit(key, group) ──── pebble pool ────►  f(prompts, completions, completion_ids, **columns)
      fileno() readable  ◄─── wake-up pipe ────  scores, or errors
      finished()  ──► [ScoredGroup(key, scores, errors)]

A group is one task for the user's functions and the cheap built-in ones, and one task per
completion for `code` and `math`. Only `close` blocks. The processes import no torch and end with
the rollout worker, also when it is killed.

A task that raises, exceeds its timeout or ends its process costs that task only; the pool starts
another process. A pool that breaks (a process killed between two tasks) is replaced, and its tasks
are repeated up to MAX_ATTEMPTS times. A broken pool may forget tasks without waking anyone: call
`finished` at least every POLL_SECONDS while groups are being scored.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any, NamedTuple

import numpy as np
from pebble import ProcessExpired, ProcessPool

from easyrl.config import Config
from easyrl.rewards.functions import RewardError
from easyrl.rewards.loading import PER_COMPLETION, reward_names, reward_specs
from easyrl.rewards.signatures import TrainerState
from easyrl.rewards.worker import Call, CallResult, call_functions, describe_prompt, start
from easyrl.types import Float32, Messages

POLL_SECONDS = 1.0
MAX_ATTEMPTS = 3
"""A task that is repeated whenever the pool breaks may be the cause."""


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
    scores: list[list[float | None]]  # [functions][G]
    num_open_tasks: int = 0
    errors: list[str] = field(default_factory=list)
    metrics: Mapping[str, float] = field(default_factory=dict)
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Task:
    group: _Group
    call: Call
    first: int  # index of its first completion in the group
    future: Future[CallResult] = field(default_factory=Future)
    num_attempts: int = 0


class RewardPool:
    """Create it in a thread that lives as long as the pool: Linux ends the processes with the
    thread that started them."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._names = reward_names(config)
        specs = reward_specs(config)
        per_completion = [n for n, spec in enumerate(specs) if spec in PER_COMPLETION]
        self._per_completion: list[tuple[int, ...]] = [(index,) for index in per_completion]
        self._per_group = tuple(index for index in range(len(specs)) if index not in per_completion)
        own = config.reward.timeout_seconds
        self._timeout_key = "runtime.timeout_seconds" if own is None else "reward.timeout_seconds"
        self._timeout_seconds = config.runtime.timeout_seconds if own is None else own
        self._open: dict[_Task, None] = {}  # without a result, in order of submission
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        os.set_blocking(self._wake_writer, False)
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
        scores: list[list[float | None]] = [[0.0] * len(completions) for _ in self._names]
        group = _Group(key, prompt, scores)
        state = trainer_state or TrainerState()
        tasks = [(self._per_group, 0, len(completions))] if self._per_group else []
        for functions in self._per_completion:
            tasks += [(functions, index, index + 1) for index in range(len(completions))]
        for functions, first, end in tasks:
            texts, ids = completions[first:end], completion_ids[first:end]
            call = Call(functions, prompt, texts, ids, columns, state)
            task = _Task(group, call, first)
            group.num_open_tasks += 1
            self._open[task] = None
            self._send(task)

    def finished(self) -> list[ScoredGroup]:
        """The groups scored since the last call, without waiting.

        Raises RewardError where a function failed and `reward.on_error` is `stop`.
        """
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_reader, 65536)
        if self.is_broken:
            lost = [task for task in self._open if not task.future.done() or _is_lost(task)]
            self._pool.stop()  # type: ignore[no-untyped-call]
            self._pool.join()
            self._pool = self._start_pool()
            for task in lost:
                self._send(task)
        groups = []
        for task in [task for task in self._open if task.future.done() and not _is_lost(task)]:
            groups += self._record(task)
        return groups

    @property
    def is_broken(self) -> bool:
        """Whether tasks may have been lost with the pool; `finished` repeats them."""
        return bool(self._open) and not self._pool.active

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

    def _start_pool(self) -> ProcessPool:
        pool = ProcessPool(
            max_workers=self._config.reward.num_workers,
            initializer=start,
            initargs=(self._config,),
            context=get_context("spawn"),
        )
        pool.schedule(int)  # pebble starts the processes with the first task
        return pool

    def _send(self, task: _Task) -> None:
        if task.num_attempts == MAX_ATTEMPTS:
            task.future = Future()
            task.future.set_exception(BrokenProcessPool("the reward processes were killed"))
        else:
            task.num_attempts += 1
            try:
                task.future = self._pool.schedule(
                    call_functions, args=(task.call,), timeout=self._timeout_seconds
                )
            except RuntimeError:  # the pool is broken, which `finished` will see
                task.future = Future()
                self._wake()
        task.future.add_done_callback(lambda _: self._wake())  # in a thread of the pool

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it is readable anyway; closed: nobody waits
            os.write(self._wake_writer, b"x")

    def _record(self, task: _Task) -> list[ScoredGroup]:
        """Enter a task's result into its group; returns the group once it is complete."""
        del self._open[task]
        group, functions = task.group, task.call.functions
        result = self._result_of(task)
        for function, scores in zip(functions, result.scores, strict=False):
            group.scores[function][task.first : task.first + len(scores)] = scores
        group.errors += result.errors
        if functions == self._per_group:
            group.metrics, group.columns = result.metrics, result.columns
        group.num_open_tasks -= 1
        if group.num_open_tasks == 0:
            without = [
                index
                for index, scores in enumerate(zip(*group.scores, strict=True))
                if all(score is None for score in scores)
            ]
            for index in without:
                group.scores[0][index] = 0.0
            if without:
                group.errors.append(
                    f"reward ({', '.join(self._names)}): every function returned None for "
                    f"completion {', '.join(map(str, without))}, {describe_prompt(group.prompt)}"
                )
        on_error = self._config.reward.on_error
        if group.errors and on_error == "stop":
            raise RewardError(group.errors[0])
        if group.num_open_tasks > 0:
            return []
        is_skipped = bool(group.errors) and on_error == "skip_group"
        rewards = None if is_skipped else group.scores
        errors = [*dict.fromkeys(group.errors)]
        return [ScoredGroup(group.key, rewards, errors, group.metrics, group.columns)]

    def _result_of(self, task: _Task) -> CallResult:
        """The result, or an error for a call that did not return."""
        try:
            return task.future.result()
        except TimeoutError:
            problem = f"took longer than {self._timeout_seconds:g} s ({self._timeout_key})"
        except ProcessExpired as expired:
            if expired.exitcode == -signal.SIGXCPU and task.call.functions != self._per_group:
                return CallResult()  # math.MAX_CPU_SECONDS: the score is 0
            problem = f"ended its process (exit code {expired.exitcode})"
        except BrokenProcessPool as error:
            problem = f"lost its processes {MAX_ATTEMPTS} times ({error})"
        except Exception as error:  # a function cannot be loaded, or a result cannot be pickled
            problem = f"failed: {error}"
        names = ", ".join(self._names[index] for index in task.call.functions)
        return CallResult(
            errors=[f"reward ({names}) {problem}, {describe_prompt(task.group.prompt)}"]
        )


def combine(scores: Sequence[Sequence[float | None]], weights: Sequence[float]) -> Float32:
    """The weighted sum [G] of the functions' scores [functions][G]; None does not count.

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


def _is_lost(task: _Task) -> bool:
    """Whether the task is to be repeated in another pool."""
    failed = task.future.done() and isinstance(task.future.exception(), BrokenProcessPool)
    return failed and task.num_attempts < MAX_ATTEMPTS
