"""Rewards in processes of their own, so that a slow one never stops generation.

    rollout worker                              reward processes (num_workers)
      submit(key, group) ──── pebble pool ────►  f(prompts, completions, ids, **columns)
      fileno() readable  ◄─── wake-up pipe ────  scores, or the error
      finished()  ──► [Scored(key, scores, errors)]

Nothing here blocks but `close`, and the first `submit` for as long as what the processes are forked
from still imports. The processes import no torch, ignore Ctrl-C (their parent decides), and die
with their parent, however it dies. They are forked from multiprocessing's fork server, which has
imported what they need: one in the place of a lost one costs milliseconds of processor time
instead of 0.3 s, or 1.4 s where the reward is `math`, and they share that memory.

A call that raises, hangs or ends its process costs that call alone, and is answered as
`reward.on_error` says. The pool puts a new process in the place of one that is gone; where the
pool itself is lost (a process killed between two calls), there is a new pool, and what was under
way is sent again. A lost pool may have forgotten calls and wake nobody: ask every LOOK_SECONDS.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, NamedTuple

import numpy as np
from pebble import ProcessExpired, ProcessPool

from easyrl.config import Config
from easyrl.rewards.calls import (
    EXIT_OUT_OF_MEMORY,
    EXIT_ZERO,
    Answer,
    Group,
    Scores,
    score_group,
    start_worker,
)
from easyrl.rewards.functions import RewardError
from easyrl.rewards.loading import reward_names, reward_specs, slow_imports
from easyrl.rewards.logged import START, TrainerState
from easyrl.rewards.output import KEPT_BYTES, RewardOutput
from easyrl.rewards.template import start_template
from easyrl.types import Float32, Messages

LOOK_SECONDS = 1.0
"""How often to ask `is_lost` while something is being scored."""
LOCK_TIMEOUT_SECONDS = 10.0
"""A process that is killed while it reads or writes the pool's pipes leaves them locked; the others
hold that lock for the milliseconds of one message."""
MAX_SENT = 3
"""A call that is under way whenever the pool is lost is sent so many times: it may be the cause."""


class Scored(NamedTuple):
    key: Hashable
    scores: Scores | None
    """None where `reward.on_error=skip_group` has answered."""
    errors: Sequence[str] = ()
    """What went wrong, where the run goes on."""
    metrics: Mapping[str, float] = {}
    """What the functions have logged (`log_metric`, `log_extra`)."""
    columns: Mapping[str, Sequence[Any]] = {}  # [G] each


@dataclass(slots=True, eq=False)
class _Call:
    key: Hashable
    group: Group
    future: Future[Answer] | None = None
    num_sent: int = 0


class Scorer:
    """A pool of processes that score groups. Make it in a thread that lives as long as it does:
    on Linux the kernel ends the processes with the thread that started them."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._names = ", ".join(reward_names(config))
        self._num_functions = len(reward_specs(config))
        self._on_error = config.reward.on_error
        own = config.reward.timeout_seconds
        self._timeout_key = "runtime.timeout_seconds" if own is None else "reward.timeout_seconds"
        self._timeout_seconds = config.runtime.timeout_seconds if own is None else own
        self._open: dict[_Call, None] = {}  # submitted, not answered; in order
        self._finished: deque[tuple[_Call, Future[Answer]]] = deque()
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        os.set_blocking(self._wake_writer, False)
        self._output = RewardOutput()
        with _sigint_blocked():
            self._context = start_template([score_group.__module__, *slow_imports(config)])
        self._pool = self._make_pool()

    def submit(
        self,
        key: Hashable,
        prompt: str | Messages,
        completions: Sequence[str],
        completion_ids: Sequence[Any],
        columns: Mapping[str, Any],
        *,
        trainer_state: TrainerState = START,
    ) -> None:
        """Score the G completions of one prompt; `key` names the group in `finished`."""
        call = _Call(key, Group(prompt, completions, completion_ids, columns, trainer_state))
        self._open[call] = None
        try:
            self._send(call)
        except RuntimeError:  # the pool was lost, and nobody waited for it
            self._on_lost_pool()

    def finished(self) -> list[Scored]:
        """The groups scored since the last call, in order of completion; does not wait for any.

        Raises RewardError where a function failed and `reward.on_error` is `stop`.
        """
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_reader, 65536)
        scored = []
        while self._finished:
            call, future = self._finished.popleft()
            if future is not call.future:
                continue  # of a pool that was lost: it has been sent again
            if _was_lost(future) and call.num_sent < MAX_SENT:
                self._on_lost_pool()
                continue
            del self._open[call]
            scored.append(self._answer(call, future))
        if self.is_lost:
            self._on_lost_pool()
        return scored

    @property
    def is_lost(self) -> bool:
        """Whether calls may be forgotten, with the pool that had them: `finished` mends it."""
        return bool(self._open) and not self._pool.active

    def fileno(self) -> int:
        """Readable when `finished` has something: for select or multiprocessing.connection.wait."""
        return self._wake_reader

    def close(self) -> None:
        """End all processes at once, whatever they are doing."""
        if self._wake_writer < 0:
            return
        self._end_pool()
        self._output.close()
        os.close(self._wake_reader)
        os.close(self._wake_writer)
        self._wake_reader = self._wake_writer = -1

    def _make_pool(self) -> ProcessPool:
        """Its processes are started with the first call: the template is then ready to be forked,
        and nobody has waited for it."""
        share = KEPT_BYTES // self._config.reward.num_workers
        return ProcessPool(
            max_workers=self._config.reward.num_workers,
            initializer=start_worker,
            initargs=(self._config, LOCK_TIMEOUT_SECONDS, self._output.writer, share),
            context=self._context,
        )

    def _on_lost_pool(self) -> None:
        if self._on_error == "stop":
            raise RewardError(
                f"reward ({self._names}): its processes were killed between calls. It may be for "
                "want of memory (fewer reward.num_workers need less); with "
                "reward.on_error=skip_group they are started anew"
            )
        self._renew_pool()

    def _renew_pool(self) -> None:
        """A new pool in the place of a lost one; what that one has left open is sent again."""
        self._end_pool()
        self._pool = self._make_pool()
        for call in self._open:
            is_done = call.future is not None and call.future.done()
            if not is_done or (_was_lost(call.future) and call.num_sent < MAX_SENT):
                self._send(call)

    def _send(self, call: _Call) -> None:
        try:
            future = self._schedule(call)
        except BrokenProcessPool:  # which has not even started: the template is lost
            self._end_pool()
            self._context = get_context("spawn")
            self._pool = self._make_pool()
            future = self._schedule(call)
        call.future = future
        call.num_sent += 1
        future.add_done_callback(lambda done: self._on_done(call, done))

    def _schedule(self, call: _Call) -> Future[Answer]:
        with _sigint_blocked():  # inherited by the pool's threads, and by what they start
            return self._pool.schedule(
                score_group, args=(call.group,), timeout=self._timeout_seconds
            )

    def _end_pool(self) -> None:
        self._pool.stop()  # type: ignore[no-untyped-call]
        self._pool.join()

    def _on_done(self, call: _Call, future: Future[Answer]) -> None:
        """Called in the pool's thread."""
        self._finished.append((call, future))
        with contextlib.suppress(OSError):  # full: it is readable anyway; closed: nobody waits
            os.write(self._wake_writer, b"x")

    def _answer(self, call: _Call, future: Future[Answer]) -> Scored:
        try:
            answer = future.result()
        except RewardError as error:
            errors = [str(error)]
        except TimeoutError:
            limit = f"{self._timeout_seconds:g} s ({self._timeout_key})"
            errors = [f"reward ({self._names}) took longer than {limit}, {call.group}"]
        except ProcessExpired as error:
            errors = [f"reward ({self._names}) {self._how_ended(error.exitcode)}, {call.group}"]
        except BrokenProcessPool as error:
            errors = [f"reward ({self._names}) lost its processes ({error}), {call.group}"]
        else:
            is_skipped = bool(answer.errors) and self._on_error == "skip_group"
            return Scored(
                call.key,
                None if is_skipped else answer.scores,
                [*answer.errors, *self._flood(call, answer.num_dropped)],
                answer.metrics,
                answer.columns,
            )
        if self._on_error == "stop":
            raise RewardError(errors[0])
        if self._on_error == "skip_group":
            return Scored(call.key, None, errors)
        zeros: list[float | None] = [0.0] * len(call.group.completions)
        return Scored(call.key, [zeros] * self._num_functions, errors)

    def _how_ended(self, exit_code: int) -> str:
        if exit_code == EXIT_OUT_OF_MEMORY:
            limit = self._config.reward.memory_limit_gib
            return (
                "needed more memory than there is"
                if limit is None
                else f"needed more than {limit:g} GiB of memory (reward.memory_limit_gib)"
            )
        return f"ended its process (exit code {0 if exit_code == EXIT_ZERO else exit_code})"

    def _flood(self, call: _Call, own: int) -> list[str]:
        """That rewards print without measure: told with the answer of the call that did, or, where
        that cannot be known, with those that come meanwhile. Their scores are good."""
        dropped = own + self._output.take_dropped()
        if dropped == 0:
            return []
        return [
            f"reward ({self._names}) printed {dropped / 2**20:,.1f} MiB more than the "
            f"{KEPT_BYTES // 2**20} MiB that are kept of all its processes together, "
            f"{'' if own else 'before the answer '}{call.group}; its scores count"
        ]


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


def _was_lost(done: Future[Any] | None) -> bool:
    """Whether the answer is that its pool was lost."""
    return done is not None and isinstance(done.exception(), BrokenProcessPool)


@contextlib.contextmanager
def _sigint_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
