"""Score groups in processes of their own, so that a slow reward never stops generation.

    rollout worker                              reward processes (reward.num_workers)
      submit(key, group) ──── pebble pool ────►  f(prompts, completions, completion_ids, **columns)
      fileno() readable  ◄────── eventfd ──────  scores, or errors
      finished()  ──► [(key, ScoredGroup(scores, errors, ...))]

A group is one call for the user's functions and the cheap built-in ones, one for `judge`, one for
the reward models, and one per completion for `code`, `math` and `reasoning_gym`. Only `close`
blocks. The processes of functions import no torch, and all end with the rollout worker.

A pool that breaks (a process killed between two calls) is replaced, and its calls are repeated:
call `finished` at least every POLL_SECONDS while groups are being scored.
"""

import contextlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from secrets import token_hex
from typing import Any, NamedTuple

import numpy as np
from pebble import ProcessExpired, ProcessPool

from easyrl.config import ConfigError
from easyrl.config.spec import RewardSpec
from easyrl.events import FailedCall
from easyrl.processes import UNGUARDED_MESSAGE
from easyrl.rewards import loading
from easyrl.rewards.builtin import BUILT_IN
from easyrl.rewards.functions import GroupLost, RewardError
from easyrl.rewards.heartbeat import Heartbeat
from easyrl.rewards.leftovers import end_programs, end_programs_of_lost_processes
from easyrl.rewards.worker import (
    Call,
    CallError,
    Scored,
    run_call,
    scored_of,
    start,
    try_function,
)
from easyrl.types import Float32, Prompt, as_text, short_columns

POLL_SECONDS = 1.0
CHECK_SECONDS = 10.0  # longest check of a function, with the time that its file takes to load
PROCESS_BYTES = 76 * 2**20  # of a process of functions: Python and math-verify, measured on Linux
MAX_RESTARTS = 3  # pools that may break one after the other without scoring a group


class ScoredGroup(NamedTuple):
    """Results of all calls of a group of G completions."""

    scores: list[list[float | None]]
    """[functions][G]; 0 for a failed call. Empty if skipped (`reward.on_error=skip_group`)."""
    errors: Sequence[FailedCall]
    metrics: dict[str, float]  # from log_metric
    columns: dict[str, list[Any]]  # from log_extra, [G] each


@dataclass(slots=True, eq=False)
class _Task:
    """A call of some functions on some completions of a group."""

    group: "_Group"
    call: Call
    completions: slice  # those of the group that are scored
    future: Future[Any] = field(default_factory=Future)  # its result: the arguments of `Scored`
    scheduled: float = 0.0  # when, in Unix seconds
    is_repeated: bool = False  # after its process was killed, or this one was stopped
    is_elsewhere: bool = False  # another process than the pool's scores them


@dataclass(slots=True, eq=False)
class _Group:
    """A group that is being scored."""

    key: Hashable
    number: int  # in the order in which groups were submitted
    tasks: list[_Task] = field(default_factory=list)
    num_open: int = 0  # tasks that are not over


class _Done(NamedTuple):
    """A call has ended."""

    task: _Task
    future: Future[Any]  # not the task's own one any more, if that is repeated


class RewardPool:
    """Create it in a thread that lives as long as the pool: Linux ends the processes with it."""

    def __init__(
        self,
        rewards: RewardSpec,
        sources: Mapping[str, str],
        report: Callable[[str], None] = lambda text: None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the reward processes.

        Args:
            rewards: the functions, and how they are run.
            sources: texts of the user's files by path (`loading.read_sources`).
            report: is called with a text when lost reward processes are replaced.
            environment: environment variables that show the process of the reward models its
                device.
        """
        self._rewards = rewards
        self._report = report
        self._environment = environment or {}
        self._sources = sources
        # Indices of the functions, by how they are called.
        self._models: list[int] = []
        self._shared: list[int] = []
        self._own_calls: list[int] = []
        self._per_completion: list[int] = []
        lists = {
            "shared": self._shared,
            "own": self._own_calls,
            "per_completion": self._per_completion,
        }
        for index, spec in enumerate(rewards.functions):
            reward = BUILT_IN.get(spec)
            if reward is not None:
                lists[reward.call].append(index)
            elif loading.is_model(spec):
                self._models.append(index)
            else:
                self._shared.append(index)
        self._groups: dict[Hashable, _Group] = {}  # being scored
        self._done: deque[_Done] = deque()  # calls that have ended; threads of the pools add them
        self._scored: list[_Group] = []  # whose calls have all ended
        self._num_submitted = 0
        self._heartbeat = Heartbeat()
        self._mark = token_hex(8)  # of the programs that functions start
        self._num_restarts = 0
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._start_pools()

    def submit(
        self, key: Hashable, group: Call, elsewhere: tuple[Sequence[int], Future[Any]] | None = None
    ) -> None:
        """Score the completions of one prompt by all functions. `elsewhere`: functions that are
        called in another process, and their future result."""
        size = len(group.completions)
        whole = slice(0, size)
        scored_group = _Group(key, self._num_submitted)
        self._num_submitted += 1
        self._groups[key] = scored_group
        called_elsewhere: Sequence[int] = ()

        def new_task(call: Call, part: slice) -> _Task:
            task = _Task(scored_group, call, part)
            scored_group.tasks.append(task)
            scored_group.num_open += 1
            return task

        if elsewhere is not None:
            called_elsewhere, future = elsewhere
            task = new_task(group._replace(functions=called_elsewhere), whole)
            task.is_elsewhere = True
            self._await(task, future)

        def add_task(functions: Sequence[int], part: slice) -> None:
            functions = [index for index in functions if index not in called_elsewhere]
            if functions:
                call = group._replace(
                    functions=functions,
                    completions=group.completions[part],
                    completion_ids=group.completion_ids[part],
                )
                self._schedule(new_task(call, part))

        add_task(self._models, whole)
        add_task(self._shared, whole)
        for function in self._own_calls:
            add_task([function], whole)
        for function in self._per_completion:
            for index in range(size):
                add_task([function], slice(index, index + 1))

    def finished(self) -> list[tuple[Hashable, ScoredGroup]]:
        """Return the groups scored since the last call, without waiting. Raises RewardError where a
        function failed and `reward.on_error` is `stop`."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        if self.is_broken:
            self._restart()
        has_lost_process = False
        while self._done:
            task, future = self._done.popleft()
            if future is not task.future or not _is_over(task):
                continue  # The call is repeated, or will be once the broken pool is replaced.
            error = future.exception()
            has_lost_process |= isinstance(error, (TimeoutError, ProcessExpired))
            reason = self._reason_to_repeat(task)
            if reason:
                self._report(f"{reason}; its call is repeated")
                task.is_repeated = True
                self._schedule(task)
                continue
            task.group.num_open -= 1
            if task.group.num_open == 0:
                self._scored.append(task.group)
        if has_lost_process:
            end_programs_of_lost_processes(self._mark)
        if self._scored:
            self._num_restarts = 0
        self._scored.sort(key=lambda group: group.number)
        collected = []
        while self._scored:
            group = self._scored.pop(0)
            del self._groups[group.key]
            collected.append((group.key, self._collect(group)))
        return collected

    def _reason_to_repeat(self, task: _Task) -> str:
        """Return why a call that is over is repeated; empty if it is not."""
        if task.is_repeated or task.is_elsewhere:
            return ""
        match task.future.exception():
            case ProcessExpired(exitcode=code) if code == -signal.SIGKILL:
                return "a reward process was killed by SIGKILL"
            case TimeoutError() if self._heartbeat.has_paused_since(task.scheduled):
                return "a reward took too long while this process was stopped"
        return ""

    def _open_tasks(self) -> Iterator[_Task]:
        for group in self._groups.values():
            for task in group.tasks:
                if not _is_over(task):
                    yield task

    @property
    def is_broken(self) -> bool:
        """Whether calls may have been lost with the pool; `finished` repeats them."""
        return bool(self._groups) and not all(pool.active for pool in self._pools)

    def fileno(self) -> int:
        """Return a descriptor for `select`, readable when `finished` has something."""
        return self._wake_fd

    def close(self) -> None:
        """End all processes at once, whatever they are doing."""
        self._heartbeat.stop()
        _end_pools(self._pools, self._mark)
        if self._wake_fd >= 0:
            os.close(self._wake_fd)
            self._wake_fd = -1

    def _start_pools(self) -> None:
        """Start the processes of the functions, and the one of the reward models, if there are
        any. The pool of the models is the last one."""
        rewards = self._rewards
        self._pools: list[ProcessPool] = []
        if len(self._models) < len(rewards.functions):
            pool = _open_pool(rewards.options.num_workers, rewards, self._sources, self._mark)
            pool.schedule(int)  # pebble starts the processes with the first task
            self._pools.append(pool)
        if self._models:
            specs = [rewards.functions[index] for index in self._models]
            pool = _open_pool(1, rewards, self._sources, self._mark, specs, self._environment)
            # A call without completions loads the models. It has no timeout.
            loading_call = Call("", [], [], {}, functions=self._models)
            pool.schedule(run_call, (loading_call,))
            self._pools.append(pool)

    def _restart(self) -> None:
        self._num_restarts += 1
        if self._num_restarts > MAX_RESTARTS:
            ended = f"the reward processes ended {self._num_restarts} times"
            raise RewardError(FailedCall(ended))
        self._report("the reward processes were lost; new ones start, and repeat their calls")
        _end_pools(self._pools, self._mark)
        self._start_pools()
        for task in self._open_tasks():
            if not task.is_elsewhere:
                self._schedule(task)

    def _schedule(self, task: _Task) -> None:
        first = task.call.functions[0]  # the others are called alike
        pool = self._pools[-1] if first in self._models else self._pools[0]
        limit = self._limit_of(self._rewards.functions[first])
        future: Future[Any] = Future()
        try:
            future = pool.schedule(run_call, (task.call,), timeout=limit)
        except RuntimeError as error:  # the pool is broken, which `finished` will see
            future.set_exception(BrokenProcessPool(str(error)))
        self._await(task, future)

    def _await(self, task: _Task, future: Future[Any]) -> None:
        """Let `finished` see the end of a call."""

        def note(future: Future[Any]) -> None:  # in a thread of the pool
            self._done.append(_Done(task, future))
            self._wake()

        task.future = future
        task.scheduled = time.time()
        future.add_done_callback(note)

    def _limit_of(self, spec: str) -> float | None:
        """Return the longest time of a call in seconds; None: the function ends it itself."""
        reward = BUILT_IN.get(spec)
        if reward is not None and reward.has_own_timeouts:
            return self._rewards.options.timeout_seconds
        return self._rewards.timeout_seconds

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # closed, so nobody waits
            os.eventfd_write(self._wake_fd, 1)

    def _collect(self, scored: _Group) -> ScoredGroup:
        """Join the results of a group's calls. Raises RewardError, see `finished`."""
        on_error = self._rewards.options.on_error
        tasks = scored.tasks
        num_completions = max(task.completions.stop for task in tasks)
        all_scores: list[list[float | None]] = []
        for _ in self._rewards.names:
            all_scores.append([0.0] * num_completions)
        group = ScoredGroup(all_scores, [], {}, {})
        failed: dict[str, FailedCall] = {}  # by the text of the error
        for task in tasks:
            result = self._result_of(task)
            if result.scores:  # else the call did not return: its scores stay 0
                for function, scores in zip(task.call.functions, result.scores, strict=True):
                    all_scores[function][task.completions] = scores
            for error in result.errors:
                failed.setdefault(error.text, _failed_call(task, error))
            group.metrics.update(result.metrics)
            group.columns.update(result.columns)
        self._replace_missing(group, tasks, failed)
        if failed and on_error == "stop":
            first, *_ = failed.values()
            raise RewardError(first, scored.key)
        if failed and on_error == "skip_group":
            group = group._replace(scores=[])
        return group._replace(errors=[*failed.values()])

    def _replace_missing(
        self, group: ScoredGroup, tasks: Sequence[_Task], failed: dict[str, FailedCall]
    ) -> None:
        """Score 0 where no function has a score, and add the error to `failed`."""
        for index in range(len(group.scores[0])):
            if any(scores[index] is not None for scores in group.scores):
                continue
            group.scores[0][index] = 0.0
            names = ", ".join(self._rewards.names)
            text = (
                f"reward ({names}): every function returned None for completion {index + 1}: "
                "does the row lack an answer? (reward.on_error=zero takes 0)"
            )
            [task, *_] = (task for task in tasks if _has_completion(task, index))
            error = CallError(text, index - task.completions.start)
            failed[text] = _failed_call(task, error)

    def _result_of(self, task: _Task) -> Scored:
        match task.future.exception():
            case None:
                return scored_of(*task.future.result())
            case TimeoutError():
                limit = self._rewards.timeout_seconds
                problem = f"took longer than {limit:g} s (reward.timeout_seconds)"
            case GroupLost() as error if self._rewards.options.on_error == "stop":
                self._report(f"{error}; its group's rewards are 0")
                return Scored([], [], {}, {})
            case ProcessExpired(exitcode=code):
                is_of_completion = task.call.functions[0] in self._per_completion
                if code == -signal.SIGXCPU and is_of_completion:
                    return Scored([], [], {}, {})  # math.MAX_CPU_SECONDS: the score is 0
                how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
                problem = f"ended its process ({how}); reward.on_error decides what follows"
            case error:  # a function cannot be loaded, or a result cannot be pickled
                problem = f"failed: {error}"
        names = ", ".join(self._rewards.names[index] for index in task.call.functions)
        return Scored([], [CallError(f"reward ({names}) {problem}")], {}, {})


def _has_completion(task: _Task, index: int) -> bool:
    start: int = task.completions.start
    stop: int = task.completions.stop
    return start <= index < stop


def _failed_call(task: _Task, error: CallError) -> FailedCall:
    """Describe an error with what the call was given."""
    call = task.call
    return FailedCall(
        error.text,
        prompt=as_text(call.prompt),
        completion=as_text(call.completions[error.completion or 0]),
        row=short_columns(call.columns),
    )


def try_rewards(rewards: RewardSpec, example: Prompt | None) -> list[str]:
    """Check the reward functions on a prompt before a run starts; return warnings. Without a
    prompt, the user's functions, which have a process of their own, are only loaded. Raises
    ConfigError for one that cannot be loaded, lacks a column, or takes or returns another form."""
    loading.check_given(rewards)
    own: list[str] = []
    others: list[str] = []
    for spec in rewards.functions:
        is_model = spec in rewards.models  # they are checked elsewhere
        is_own = spec not in BUILT_IN and not is_model and not spec.startswith("easyrl.")
        (own if is_own else others).append(spec)
    warnings: list[str] = []
    if example is not None:
        loading.check_rewards(rewards, example, others)
        for spec in others:
            if spec in BUILT_IN:
                warnings += BUILT_IN[spec].try_once(rewards, example)
    if not own:
        return warnings
    mark = token_hex(8)
    pool = _open_pool(1, rewards, {}, mark, own)
    try:
        for spec in own:
            tried = pool.schedule(try_function, (spec, example), timeout=CHECK_SECONDS)
            try:
                warnings.append(tried.result())
            except (TimeoutError, ProcessExpired) as error:
                how = "ended its process"
                if isinstance(error, TimeoutError):
                    how = f"took longer than {CHECK_SECONDS:g} s"
                warnings.append(f"warning: reward '{spec}' {how} when it was tried (reward.check)")
    except BrokenProcessPool:  # the process ended while it started
        if "easyrl.api.calls" not in sys.modules:
            raise
        raise ConfigError(UNGUARDED_MESSAGE) from None
    finally:
        _end_pools([pool], mark)
    return [warning for warning in warnings if warning]


def weighted_sum(scores: Sequence[Sequence[float | None]], weights: Sequence[float]) -> Float32:
    """Return the weighted sum [G] of the functions' scores [functions][G]. None does not count."""
    table = np.array(scores, dtype=np.float64)  # None becomes nan; scores themselves are finite
    rewards: Float32 = np.nansum(table * np.array(weights)[:, None], axis=0).astype(np.float32)
    return rewards


def _open_pool(num_workers: int, *arguments: Any) -> ProcessPool:
    context = get_context("spawn")
    return ProcessPool(num_workers, initializer=start, initargs=arguments, context=context)


def _end_pools(pools: Sequence[ProcessPool], mark: str) -> None:
    """End pools, and the programs of their processes, which have a mark."""
    for pool in pools:
        pool.stop()  # type: ignore[no-untyped-call]
        pool.join()
    end_programs(mark)


def _is_over(task: _Task) -> bool:
    """Return whether the call is over, and not lost with a broken pool."""
    return task.future.done() and not isinstance(task.future.exception(), BrokenProcessPool)
