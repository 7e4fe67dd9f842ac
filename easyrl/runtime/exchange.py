"""Weights from the trainer to the rollout workers: who takes part, and what happens if one dies.

    exchange   all ready workers, over the full channel: at the start of an iteration or evaluation
    admit      one worker that became ready meanwhile, over a temporary channel with train rank 0

    controller               train rank 0              rollout workers
    ────────────────────────────────────────────────────────────────────────────
    InitWeightChannel ─────► join ◄══════════════════► join       if members changed
    ExchangeWeights ───────► broadcast ══════════════► receive
    CancelExchange ────────► drop the channel ───────► drop       if one has died
    ◄── WeightsExchanged, with an error if it failed ──

A process group neither grows nor survives a dead member. So after a death the others drop the
channel, and the version is sent again over a new one. A rollout worker that neither answers nor
dies is killed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Any

from easyrl import events
from easyrl.runtime.supervisor import Worker, WorkerFailure
from easyrl.runtime.workers import Workers

MAX_FAILURES = 3
"""Exchanges in a row that may fail although nobody died."""


class WeightExchange:
    """One exchange at a time. The caller passes every event to `on_event`."""

    def __init__(
        self,
        workers: Workers,
        *,
        ranks_per_engine: int,
        waits_for_all: bool,
        timeout_seconds: float,
    ) -> None:
        """`waits_for_all`: `exchange` waits for the replacements of dead workers. A rollout worker
        whose answer is late by `timeout_seconds` is killed."""
        self._timeout_seconds = timeout_seconds
        self._workers = workers
        self._ranks_per_engine = ranks_per_engine
        self._waits_for_all = waits_for_all
        self._generations = count()
        self._members: list[Worker] = []  # of the full channel
        self._awaited: set[Worker] = set()  # whose answers are missing
        self._errors: list[str] = []  # of those who have answered
        self._admitted: Worker | None = None
        self._newest = -1  # version that was broadcast
        self._holders: set[Worker] = set()  # who have it
        self._num_refused: Counter[Worker] = Counter()

    @property
    def is_busy(self) -> bool:
        return bool(self._awaited)

    def exchange(self, policy_version: int, next_event: Callable[[], Any]) -> None:
        """Broadcast the trainer's weights to all rollout workers that are ready, unless all of them
        have this version (after an evaluation)."""
        num_failures = 0
        while num_failures < MAX_FAILURES:
            while self._admitted is not None or not self._are_ready():
                next_event()
            members = self._ready()
            if policy_version == self._newest and self._holders.issuperset(members):
                return
            self._begin_broadcast(policy_version, members)
            while self._awaited:
                next_event()
            is_living = [worker in self._workers.rollout for worker in members]
            if not self._errors:
                self._newest, self._holders = policy_version, {*members}
                return
            self._members = []
            num_failures += all(is_living)
        raise WorkerFailure(f"weight exchange: {num_failures} attempts failed: {self._errors[0]}")

    def _ready(self) -> list[Worker]:
        return [
            worker
            for worker in self._workers.rollout
            if worker.state in ("ready", "working") and not worker.is_leaving
        ]

    def _are_ready(self) -> bool:
        wanted = [worker for worker in self._workers.rollout if not worker.is_leaving]
        return len(self._ready()) >= (len(wanted) if self._waits_for_all else 1)

    def _begin_broadcast(self, policy_version: int, members: list[Worker]) -> None:
        rank0 = self._workers.rank0
        if members != self._members:
            self._members, generation = members, next(self._generations)
            world_size = 1 + self._ranks_per_engine * len(members)
            rank0.send(events.InitWeightChannel(0, world_size, generation))
            for number, worker in enumerate(members):
                rank = 1 + self._ranks_per_engine * number
                worker.send(events.InitWeightChannel(rank, world_size, generation))
        for worker in (rank0, *members):
            worker.send(events.ExchangeWeights(policy_version))
        self._awaited, self._errors = {*self._workers.train, *members}, []

    def admit(self, policy_version: int) -> None:
        """Send the iteration's policy to the next worker that is ready, if no exchange is going on.
        It is `working` once it has the weights."""
        ready = [worker for worker in self._ready() if worker.state == "ready"]
        if self._awaited or not ready:
            return
        worker, generation = ready[0], next(self._generations)
        world_size = 1 + self._ranks_per_engine
        worker.state = "joining"
        worker.send(events.InitWeightChannel(1, world_size, generation))
        worker.send(events.ExchangeWeights(policy_version))
        self._workers.rank0.send(events.SendWeights(policy_version, world_size, generation))
        self._admitted = worker
        self._awaited, self._errors = {worker, self._workers.rank0}, []

    def on_event(self, worker: Worker, event: events.WorkerEvent) -> None:
        """Record an answer, or cancel the exchange if one of its members has died."""
        match event:
            case events.WeightsExchanged(error=error):
                self._workers.answered(worker)
                self._awaited.discard(worker)
                if error:
                    self._errors.append(f"{worker.name}: {error}")
                    self._cancel()
                elif self._admitted is None and worker in self._workers.rollout:
                    worker.state = "working"
                elif worker is self._workers.rank0:
                    self._limit_answers()
            case events.Lost() if self._awaited:
                is_member = worker in (self._members if self._admitted is None else self._awaited)
                self._awaited.discard(worker)
                if is_member:
                    self._cancel()
        if self._admitted is not None and not self._awaited:
            self._end_admission(self._admitted)

    def _cancel(self) -> None:
        for worker in self._awaited:
            worker.send(events.CancelExchange())
        self._limit_answers()

    def _limit_answers(self) -> None:
        """Kill the rollout workers that do not answer in time: rank 0 has done its part."""
        for worker in self._awaited & {*self._workers.rollout}:
            reason = "was killed: it did not take part in a weight exchange"
            self._workers.kill_unless_answered(worker, self._timeout_seconds, reason)

    def _end_admission(self, worker: Worker) -> None:
        self._admitted = None
        if worker not in self._workers.rollout:
            return
        worker.state = "ready" if self._errors else "working"
        self._num_refused[worker] += bool(self._errors)
        if self._num_refused[worker] == MAX_FAILURES:
            worker.kill(f"was killed: it could not get the weights: {self._errors[0]}")
        self._holders |= set() if self._errors else {worker}
