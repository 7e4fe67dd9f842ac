"""Score groups in processes of their own, so that a slow reward never stops generation.

    rollout worker                              reward processes (reward.num_workers)
      submit(key, group) ──── pebble pool ────►  f(prompts, completions, completion_ids, **columns)
      fileno() readable  ◄────── eventfd ──────  scores, or errors
      finished()  ──► [(key, Scored(scores, errors, ...))]

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
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain
from multiprocessing import get_context
from typing import Any

import numpy as np
from pebble import ProcessExpired, ProcessPool

from easyrl.config import ConfigError
from easyrl.config.spec import RewardSpec
from easyrl.processes import UNGUARDED_MESSAGE
from easyrl.rewards import loading
from easyrl.rewards.functions import GroupLost, RewardError
from easyrl.rewards.judge import check_judge
from easyrl.rewards.worker import Call, Scored, run_call, start, try_function
from easyrl.types import Float32, Prompt

POLL_SECONDS = 1.0
CHECK_SECONDS = 10.0  # longest check of a function, with the time that its file takes to load
PROCESS_BYTES = 76 * 2**20  # of a process of functions: Python and math-verify, measured on Linux
MAX_RESTARTS = 3  # pools that may break one after the other without scoring a group


@dataclass(slots=True, eq=False)
class _Task:
    call: Call
    completions: slice  # in the group
    future: Future[Any]  # the arguments of `Scored`
    is_repeated: bool = False  # after a kill
    is_elsewhere: bool = False  # not in this pool


class RewardPool:
    """Create it in a thread that lives as long as the pool: Linux ends the processes with it."""

    def __init__(
        self,
        rewards: RewardSpec,
        sources: Mapping[str, str],
        report: Callable[[str], None] = lambda text: None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`sources`: of the user's files (`loading.read_sources`).
        `report` is called when lost reward processes are replaced. `environment`: variables that
        show the process of the reward models its device."""
        self._rewards, self._report = rewards, report
        self._environment = environment or {}
        self._sources = sources
        specs = rewards.functions
        self._per_completion = [n for n, each in enumerate(specs) if each in loading.PER_COMPLETION]
        self._models = [n for n, spec in enumerate(specs) if loading.is_model(spec)]
        self._judges = [n for n, spec in enumerate(specs) if spec == "judge"]
        others = {*self._per_completion, *self._models, *self._judges}
        self._fast = [n for n in range(len(specs)) if n not in others]
        self._groups: dict[Hashable, list[_Task]] = {}  # being scored
        self._num_restarts = 0
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._start_pools()

    def submit(
        self, key: Hashable, group: Call, elsewhere: tuple[Sequence[int], Future[Any]] | None = None
    ) -> None:
        """Score the completions of one prompt by all functions. `elsewhere`: functions that are
        called in another process, and their future result."""
        size, (others, future) = len(group.completions), elsewhere or ((), None)
        parts = [(numbers, slice(0, size)) for numbers in (self._models, self._fast, self._judges)]
        parts += [([each], slice(n, n + 1)) for each in self._per_completion for n in range(size)]
        tasks = self._groups[key] = []
        if future is not None:
            call = group._replace(functions=others)
            tasks.append(_Task(call, slice(0, size), future, is_elsewhere=True))
            future.add_done_callback(lambda _: self._wake())
        for numbers, part in parts:
            if functions := [number for number in numbers if number not in others]:
                texts, ids = group.completions[part], group.completion_ids[part]
                call = group._replace(functions=functions, completions=texts, completion_ids=ids)
                tasks.append(_Task(call, part, self._schedule(call)))

    def finished(self) -> list[tuple[Hashable, Scored]]:
        """Return the groups scored since the last call, without waiting. Raises RewardError where a
        function failed and `reward.on_error` is `stop`."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        if self.is_broken:
            self._restart()
        for task in chain(*self._groups.values()):
            if _was_killed(task) and not task.is_repeated:
                self._report("a reward process was killed by SIGKILL; its call is repeated")
                task.is_repeated, task.future = True, self._schedule(task.call)
        keys = [key for key, tasks in self._groups.items() if all(map(_is_over, tasks))]
        if keys:
            self._num_restarts = 0
        return [(key, self._collect(self._groups.pop(key))) for key in keys]

    @property
    def is_broken(self) -> bool:
        """Whether calls may have been lost with the pool; `finished` repeats them."""
        return bool(self._groups) and not all(pool.active for pool in self._pools)

    def fileno(self) -> int:
        """Readable when `finished` has something: for select or multiprocessing.connection.wait."""
        return self._wake_fd

    def close(self) -> None:
        """End all processes at once, whatever they are doing."""
        _end_pools(self._pools)
        if self._wake_fd >= 0:
            os.close(self._wake_fd)
            self._wake_fd = -1

    def _start_pools(self) -> None:
        rewards, models = self._rewards, self._models
        self._pools: list[ProcessPool] = []
        if len(models) < len(rewards.functions):
            num_workers = rewards.options.num_workers
            self._pools = [_open_pool(num_workers, rewards, self._sources)]
            self._pools[0].schedule(int)  # pebble starts the processes with the first task
        if models:
            specs = [rewards.functions[number] for number in models]
            self._pools.append(_open_pool(1, rewards, self._sources, specs, self._environment))
            loads = Call("", [], [], {}, functions=models)  # no completions, and no timeout
            self._pools[-1].schedule(run_call, (loads,))

    def _restart(self) -> None:
        self._num_restarts += 1
        if self._num_restarts > MAX_RESTARTS:
            raise RewardError(f"the reward processes ended {self._num_restarts} times")
        self._report("the reward processes were lost; new ones start, and repeat their calls")
        _end_pools(self._pools)
        self._start_pools()
        for tasks in self._groups.values():
            for task in tasks:
                if not _is_over(task) and not task.is_elsewhere:
                    task.future = self._schedule(task.call)

    def _schedule(self, call: Call) -> Future[Any]:
        pool = self._pools[-1 if call.functions[0] in self._models else 0]
        limit: float | None = self._rewards.timeout_seconds
        if call.functions[0] in self._judges:  # its retries and their timeouts bound it
            limit = self._rewards.options.timeout_seconds
        future: Future[Any] = Future()
        try:
            future = pool.schedule(run_call, (call,), timeout=limit)
        except RuntimeError as error:  # the pool is broken, which `finished` will see
            future.set_exception(BrokenProcessPool(str(error)))
        future.add_done_callback(lambda _: self._wake())  # in a thread of the pool
        return future

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # closed: nobody waits
            os.eventfd_write(self._wake_fd, 1)

    def _collect(self, tasks: Sequence[_Task]) -> Scored:
        num_completions = max(task.completions.stop for task in tasks)
        group = Scored([[0.0] * num_completions for _ in self._rewards.names], [], {}, {})
        for task in tasks:
            result = self._result_of(task)
            # A call that did not return has no scores: they stay 0.
            for function, scores in zip(task.call.functions, result.scores, strict=False):
                group.scores[function][task.completions] = scores
            group.errors.extend(result.errors)
            group.metrics.update(result.metrics)
            group.columns.update(result.columns)
        for index, values in enumerate(zip(*group.scores, strict=True)):
            if set(values) == {None}:
                group.scores[0][index] = 0.0
                names = ", ".join(self._rewards.names)
                group.errors.append(
                    f"reward ({names}): every function returned None for completion {index}: "
                    "does the row lack an answer? (reward.on_error=zero takes 0)"
                )
        if not group.errors:
            return group
        prompt = f"for the prompt {tasks[0].call.prompt!r:.200}"
        errors = [f"{error}\n{prompt}" for error in dict.fromkeys(group.errors)]
        if self._rewards.options.on_error == "stop":
            raise RewardError(errors[0])
        is_skipped = self._rewards.options.on_error == "skip_group"
        return group._replace(scores=[] if is_skipped else group.scores, errors=errors)

    def _result_of(self, task: _Task) -> Scored:
        match task.future.exception():
            case None:
                return Scored(*task.future.result())
            case TimeoutError():
                limit = self._rewards.timeout_seconds
                problem = f"took longer than {limit:g} s (reward.timeout_seconds)"
            case GroupLost() as error if self._rewards.options.on_error == "stop":
                self._report(f"{error}; its group's rewards are 0")
                return Scored([], [], {}, {})
            case ProcessExpired(exitcode=code):
                if code == -signal.SIGXCPU and {*task.call.functions} <= {*self._per_completion}:
                    return Scored([], [], {}, {})  # math.MAX_CPU_SECONDS: the score is 0
                how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
                problem = f"ended its process ({how}); reward.on_error decides what follows"
            case error:  # a function cannot be loaded, or a result cannot be pickled
                problem = f"failed: {error}"
        names = ", ".join(self._rewards.names[index] for index in task.call.functions)
        return Scored([], [f"reward ({names}) {problem}"], {}, {})


def try_rewards(rewards: RewardSpec, example: Prompt | None) -> list[str]:
    """Check the reward functions on a prompt before a run starts; return warnings. Without a
    prompt, the user's functions, which have a process of their own, are only loaded. Raises
    ConfigError for one that cannot be loaded, lacks a column, or takes or returns another form."""
    loading.check_given(rewards)
    specs = rewards.functions
    known = {*loading.BUILT_IN, *rewards.models}  # models are checked elsewhere
    own = [each for each in specs if each not in known and not each.startswith("easyrl.")]
    warnings = []
    if example is not None:
        loading.check_rewards(rewards, example, [spec for spec in specs if spec not in own])
        warnings += check_judge(rewards.options, example) if "judge" in specs else []
    if not own:
        return warnings
    pool = _open_pool(1, rewards, {}, own)
    try:
        for spec in own:
            tried = pool.schedule(try_function, (spec, example), timeout=CHECK_SECONDS)
            try:
                warnings.append(tried.result())
            except (TimeoutError, ProcessExpired) as error:
                is_late = isinstance(error, TimeoutError)
                how = f"took longer than {CHECK_SECONDS:g} s" if is_late else "ended its process"
                warnings.append(f"warning: reward '{spec}' {how} when it was tried (reward.check)")
    except BrokenProcessPool:  # the process ended while it started
        if "easyrl.api.calls" not in sys.modules:
            raise
        raise ConfigError(UNGUARDED_MESSAGE) from None
    finally:
        _end_pools([pool])
    return list(filter(None, warnings))


def weighted_sum(scores: Sequence[Sequence[float | None]], weights: Sequence[float]) -> Float32:
    """The weighted sum [G] of the functions' scores [functions][G]; None does not count."""
    table = np.array(scores, dtype=np.float64)  # None becomes nan; scores themselves are finite
    rewards: Float32 = np.nansum(table * np.array(weights)[:, None], axis=0).astype(np.float32)
    return rewards


def _open_pool(num_workers: int, *arguments: Any) -> ProcessPool:
    context = get_context("spawn")
    return ProcessPool(num_workers, initializer=start, initargs=arguments, context=context)


def _end_pools(pools: Sequence[ProcessPool]) -> None:
    for pool in pools:
        pool.stop()  # type: ignore[no-untyped-call]
        pool.join()


def _was_killed(task: _Task) -> bool:
    error = task.future.exception() if task.future.done() else None
    return isinstance(error, ProcessExpired) and error.exitcode == -signal.SIGKILL


def _is_over(task: _Task) -> bool:
    """Return whether the call is over, and not lost with a broken pool."""
    return task.future.done() and not isinstance(task.future.exception(), BrokenProcessPool)
