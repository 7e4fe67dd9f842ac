"""Who takes part in a weight exchange, and what happens when one dies: without processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from easyrl import events
from easyrl.runtime.exchange import WeightExchange
from easyrl.runtime.supervisor import WorkerFailure


class StubWorker:
    def __init__(self, name: str, state: str = "ready") -> None:
        self.name, self.state, self.is_leaving = name, state, False
        self.commands: list[events.Command] = []
        self.killed = ""

    def send(self, command: events.Command) -> None:
        self.commands.append(command)

    def kill(self, reason: str) -> None:
        self.killed = reason

    def taken(self) -> list[str]:
        """Names of the commands since the last call."""
        names = [type(command).__name__ for command in self.commands]
        self.commands.clear()
        return names


class StubWorkers:
    """Workers whose answers a test gives."""

    def __init__(self, num_rollout: int, num_train: int = 1) -> None:
        self.rollout = [StubWorker(f"rollout-{n}") for n in range(num_rollout)]
        self.train = [StubWorker(f"train-{n}") for n in range(num_train)]
        self.limited: set[StubWorker] = set()

    @property
    def rank0(self) -> StubWorker:
        return self.train[0]

    def kill_unless_answered(self, worker: StubWorker, seconds: float, reason: str) -> None:
        self.limited.add(worker)

    def answered(self, worker: StubWorker) -> None:
        self.limited.discard(worker)


def exchange_of(workers: StubWorkers, *, waits_for_all: bool = False) -> WeightExchange:
    return WeightExchange(
        workers,  # type: ignore[arg-type]
        ranks_per_engine=1,
        waits_for_all=waits_for_all,
        timeout_seconds=5.0,
    )


class Script:
    """Events of workers in order; a callable changes something first."""

    def __init__(self, exchange: WeightExchange, steps: list[Any]) -> None:
        self.exchange, self.steps = exchange, steps

    def __call__(self) -> None:
        step = self.steps.pop(0)
        if isinstance(step, Callable):  # type: ignore[arg-type]
            step()
        else:
            self.exchange.on_event(*step)


DONE, FAILED = events.WeightsExchanged(7), events.WeightsExchanged(7, "connection lost")
LOST = events.Lost("was killed by SIGKILL")
FIRST = ["InitWeightChannel", "ExchangeWeights"]


def test_channel_is_made_once_and_again_when_its_members_change() -> None:
    workers = StubWorkers(2, num_train=2)
    exchange, (one, two) = exchange_of(workers), workers.rollout

    def go(version: int) -> None:
        members = [*workers.train, *workers.rollout]
        exchange.exchange(version, Script(exchange, [(worker, DONE) for worker in members]))

    go(7)
    assert one.commands[0] == events.InitWeightChannel(1, 3, 0)
    assert one.taken() == two.taken() == workers.rank0.taken() == FIRST
    assert workers.train[1].taken() == [], "it takes part through rank 0"
    assert one.state == two.state == "working"
    go(8)
    assert one.taken() == workers.rank0.taken() == ["ExchangeWeights"]
    workers.rollout[1] = StubWorker("rollout-1")
    go(9)
    assert workers.rank0.commands[0] == events.InitWeightChannel(0, 3, 1)
    assert one.taken() == FIRST


def test_version_that_all_have_is_not_sent_again() -> None:
    workers = StubWorkers(2)
    exchange, (one, two) = exchange_of(workers), workers.rollout
    exchange.exchange(7, Script(exchange, [(worker, DONE) for worker in (workers.rank0, one, two)]))
    newcomer = StubWorker("rollout-2")
    workers.rollout.append(newcomer)
    exchange.admit(7)
    for worker in (workers.rank0, newcomer):
        exchange.on_event(worker, DONE)
    for worker in (workers.rank0, one, two, newcomer):
        worker.taken()
    exchange.exchange(7, Script(exchange, []))
    assert not any(worker.commands for worker in (workers.rank0, one, two, newcomer))
    workers.rollout[1] = StubWorker("rollout-1")  # a replacement has nothing
    members = [workers.rank0, *workers.rollout]
    exchange.exchange(7, Script(exchange, [(worker, DONE) for worker in members]))
    assert all(worker.taken() == FIRST for worker in members)


def test_death_of_a_member_cancels_the_exchange_and_it_is_repeated_without_it() -> None:
    workers = StubWorkers(3)
    exchange, (one, two, three) = exchange_of(workers), workers.rollout
    rank0 = workers.rank0
    steps = [
        (one, DONE),
        lambda: workers.rollout.remove(two),
        (two, LOST),
        (rank0, FAILED),
        (three, FAILED),
        *[(worker, DONE) for worker in (rank0, one, three)],
    ]
    exchange.exchange(7, Script(exchange, steps))
    assert steps == []
    assert rank0.taken() == [*FIRST, "CancelExchange", *FIRST]
    assert one.taken() == [*FIRST, *FIRST], "it had answered"
    assert "CancelExchange" in three.taken()
    assert one.state == three.state == "working" and workers.limited == set()


def test_death_after_all_others_have_the_weights_costs_nothing() -> None:
    workers = StubWorkers(2)
    exchange, (one, two) = exchange_of(workers), workers.rollout
    steps = [
        (workers.rank0, DONE),
        (one, DONE),
        lambda: workers.rollout.remove(two),
        (two, LOST),
    ]
    exchange.exchange(7, Script(exchange, steps))
    assert steps == [] and workers.rank0.taken() == FIRST


def test_once_the_trainer_is_done_a_silent_member_has_limited_time() -> None:
    workers = StubWorkers(2)
    exchange, (one, two) = exchange_of(workers), workers.rollout
    seen: list[set[StubWorker]] = []
    steps = [
        (one, DONE),
        lambda: seen.append({*workers.limited}),
        (workers.rank0, DONE),
        lambda: seen.append({*workers.limited}),
        (two, DONE),
    ]
    exchange.exchange(7, Script(exchange, steps))
    assert seen == [set(), {two}] and workers.limited == set()


def test_exchange_that_fails_again_and_again_though_nobody_died_ends_the_run() -> None:
    workers = StubWorkers(1)
    exchange = exchange_of(workers)
    attempt = [(workers.rank0, FAILED), (workers.rollout[0], FAILED)]
    with pytest.raises(WorkerFailure, match="connection lost"):
        exchange.exchange(7, Script(exchange, attempt * 5))


@pytest.mark.parametrize("waits_for_all", [False, True])
def test_replacement_is_awaited_by_a_deterministic_run_alone(waits_for_all: bool) -> None:
    workers = StubWorkers(2)
    exchange, (one, two) = exchange_of(workers, waits_for_all=waits_for_all), workers.rollout
    two.state = "starting"
    steps = [(workers.rank0, DONE), (one, DONE)]
    if waits_for_all:
        steps = [lambda: setattr(two, "state", "ready"), *steps, (two, DONE)]  # type: ignore[list-item]
    exchange.exchange(7, Script(exchange, steps))
    assert steps == [] and bool(two.commands) == waits_for_all


def test_newcomer_is_admitted_alone_over_a_channel_with_rank_0() -> None:
    workers = StubWorkers(3)
    exchange, (one, two, three) = exchange_of(workers), workers.rollout
    one.state = "working"
    exchange.admit(7)
    exchange.admit(7)  # the third one's turn comes later
    assert two.taken() == FIRST and three.commands == [] and one.commands == []
    assert workers.rank0.commands == [events.SendWeights(7, 2, 0)]
    exchange.on_event(workers.rank0, DONE)
    assert two.state == "joining"
    exchange.on_event(two, DONE)
    assert two.state == "working"
    exchange.admit(7)
    assert three.taken() == FIRST


def test_newcomer_that_is_too_late_waits_for_the_next_exchange() -> None:
    workers = StubWorkers(1)
    exchange, (one,) = exchange_of(workers), workers.rollout
    exchange.admit(7)
    exchange.on_event(workers.rank0, FAILED)
    assert one.taken() == [*FIRST, "CancelExchange"] and workers.limited == {one}
    exchange.on_event(one, FAILED)
    assert one.state == "ready"
    exchange.exchange(8, Script(exchange, [(workers.rank0, DONE), (one, DONE)]))
    assert one.state == "working"


def test_admission_ends_with_the_newcomer_and_not_with_another_worker() -> None:
    workers = StubWorkers(2)
    exchange, (one, two) = exchange_of(workers), workers.rollout
    exchange.exchange(7, Script(exchange, [(worker, DONE) for worker in (workers.rank0, one, two)]))
    workers.rollout[:] = [one, StubWorker("rollout-1"), StubWorker("rollout-2")]
    workers.rank0.taken()
    exchange.admit(7)
    exchange.on_event(one, LOST)
    assert workers.rank0.taken() == ["SendWeights"]
    newcomer = workers.rollout.pop(1)
    exchange.on_event(newcomer, LOST)
    assert workers.rank0.taken() == ["CancelExchange"]
    exchange.on_event(workers.rank0, FAILED)
    exchange.admit(7)
    assert workers.rollout[1].taken() == FIRST
