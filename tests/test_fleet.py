"""Who gets weights and groups, who is replaced and who leaves: without processes."""

import contextlib
import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from easyrl import events
from easyrl.config import ConfigError, load_config
from easyrl.config.devices import parse_device_set
from easyrl.runtime.fleet import Fleet
from easyrl.runtime.placement import resolve_placement
from easyrl.runtime.resolve import resolve
from easyrl.runtime.supervisor import Worker, WorkerFailure

DONE, FAILED = events.WeightsExchanged(7), events.WeightsExchanged(7, "connection lost")
LOST, READY = events.Lost("was killed by SIGKILL"), events.Ready()
FIRST = ["InitWeightChannel", "ExchangeWeights"]
SPARE = ("devices.max_rollout_workers=4",)


class StubWorker:
    remote_device, is_placed, local_pid, become = "", True, 0, Worker.become
    role = Worker.role

    def __init__(self, name):
        self.name, self.number, self.state = name, int(name[-1]), "starting"
        self.commands, self.killed = [], []
        self.kill = self.killed.append

    def send(self, command):
        self.commands.append(command)

    def taken(self):
        names = [type(command).__name__ for command in self.commands]
        self.commands.clear()
        return names


class Stubs:
    """Supervisor and launcher of a fleet without processes."""

    store = ""

    def __init__(self):
        self.steps = []
        self.most = 99  # processes that can be started
        self.newest = {}
        self.in_ring, self.reclaimed = set(), []
        self.reclaim, self.delivered = self.reclaimed.append, lambda iteration: self.in_ring

    def start_rollout(self, supervisor, settings):
        if self.most == 0:
            raise OSError(errno.EMFILE, "Too many open files")
        self.most -= 1
        self.newest[settings.name] = StubWorker(settings.name)
        return self.newest[settings.name]

    def start_train(self, supervisor, settings):
        return [self.start_rollout(supervisor, each) for each in settings]

    def wait(self, *_, **__):
        """The next step: the event of a worker, those of several at once, or a function to call."""
        step = self.steps.pop(0)
        if isinstance(step, Callable):
            step()
            return []
        step = step if isinstance(step, list) else [step]
        return [(self.newest[name], event) for name, event in step]


class StubFleet(Fleet):
    def __init__(self, infer, train="cpu", *words, is_ready=True):
        words = (f"devices.infer={infer}", f"devices.train={train}", *words)
        spec = resolve(load_config(words=words))
        self.stubs, self.notes = Stubs(), list[events.Event]()
        placement = replace(resolve_placement(spec), lends_cores=False)
        stubs = self.stubs
        super().__init__(spec, placement, stubs, stubs, log_of=Path, notify=self.notes.append)
        self.workers = self.stubs.newest
        if is_ready:
            self.follow(*[(name, READY) for name in self.workers])

    def follow(self, *steps):
        self.stubs.steps += steps
        num_events = len([step for step in steps if not callable(step)])
        for _ in range(num_events):
            self.next_event()

    def go(self, version, *steps):
        """Exchange weights, while these events happen. By default all is well."""
        done = [(name, DONE) for name in self.workers]
        self.stubs.steps = [*(steps or done)]
        self.exchange(version)
        assert self.stubs.steps == []

    def states(self):
        return {worker.name: worker.state for worker in self.rollout}

    def taken(self):
        return {name: worker.taken() for name, worker in self.workers.items()}

    def at_work(self):
        """Exchange weights and let an iteration go on: groups without end."""
        self.go(7)
        ledger = SimpleNamespace(is_complete=False, iteration=3, open={}, lost_with=[])
        ledger.take, ledger.on_event = lambda workers: {}, lambda worker, event: None
        ledger.num_open = lambda worker: ledger.open.get(worker, 0)
        ledger.on_worker_lost = lambda *lost: ledger.lost_with.append(lost)
        self.ledger = ledger
        return ledger


def test_channel_is_made_once_and_again_when_its_members_change():
    fleet = StubFleet("cpu:2", "cpu:2")
    fleet.go(7)
    assert fleet.states() == {"rollout-0": "working", "rollout-1": "working"}
    assert fleet.workers["rollout-0"].commands[0] == events.InitWeightChannel(1, 3, 0)
    taken = fleet.taken()
    assert taken.pop("train-1") == [], "it takes part through rank 0"
    assert all(each == FIRST for each in taken.values())
    fleet.go(8)
    assert fleet.taken()["rollout-0"] == ["ExchangeWeights"]
    fleet.follow(("rollout-1", LOST), ("rollout-1", READY))
    fleet.go(9)
    assert fleet.workers["train-0"].commands[0] == events.InitWeightChannel(0, 3, 1)
    assert fleet.taken()["rollout-0"] == FIRST


def test_death_of_a_member_cancels_the_exchange_and_it_is_repeated_without_it():
    fleet = StubFleet("cpu:3")
    repeated = [(name, DONE) for name in ("train-0", "rollout-0", "rollout-2")]
    failed = [("train-0", FAILED), ("rollout-2", FAILED)]
    fleet.go(7, ("rollout-0", DONE), ("rollout-1", LOST), *failed, *repeated)
    taken = fleet.taken()
    assert taken["train-0"] == [*FIRST, "CancelExchange", *FIRST]
    assert taken["rollout-0"] == [*FIRST, *FIRST], "it had answered"
    assert "CancelExchange" in taken["rollout-2"]
    assert [*fleet.states().values()] == ["working", "starting", "working"]
    assert fleet._limits == {}


def test_once_the_trainer_is_done_a_silent_member_has_limited_time():
    fleet, seen = StubFleet("cpu:2"), []

    def look():
        seen.append([worker.name for worker in fleet._limits])

    fleet.go(7, ("rollout-0", DONE), look, ("train-0", DONE), look, ("rollout-1", DONE))
    assert seen == [[], ["rollout-1"]] and fleet._limits == {}
    fleet.go(8, ("train-0", DONE), ("rollout-0", DONE), ("rollout-1", LOST))
    assert fleet.taken()["train-0"] == [*FIRST, "ExchangeWeights"]  # the others have the weights


def test_exchange_that_fails_again_and_again_though_nobody_died_ends_the_run():
    fleet = StubFleet("cpu")
    with pytest.raises(WorkerFailure, match="connection lost"):
        fleet.go(7, *[("train-0", FAILED), ("rollout-0", FAILED)] * 3)


def test_newcomers_are_admitted_one_by_one_over_a_channel_with_rank_0():
    fleet = StubFleet("cpu:3")
    fleet.at_work()
    fleet.taken()
    fleet.follow(*[(name, event) for event in (LOST, READY) for name in ("rollout-1", "rollout-2")])
    fleet.follow(("train-0", DONE))
    assert fleet.workers["train-0"].commands == [events.SendWeights(7, 2, 1)]
    taken = fleet.taken()
    assert (taken["rollout-0"], taken["rollout-1"], taken["rollout-2"]) == ([], FIRST, [])
    assert [*fleet.states().values()] == ["working", "joining", "ready"]
    fleet.follow(("rollout-1", DONE), ("train-0", DONE))
    assert fleet.taken()["rollout-2"] == FIRST
    assert [*fleet.states().values()] == ["working", "working", "joining"]


def test_newcomer_that_cannot_get_the_weights_is_killed():
    fleet = StubFleet("cpu:2")
    fleet.at_work()
    fleet.follow(("rollout-1", LOST), ("rollout-1", READY))
    fleet.follow(*[("train-0", FAILED), ("rollout-1", FAILED)] * 3)
    assert "connection lost" in fleet.workers["rollout-1"].killed[0]


def test_of_workers_that_die_together_the_slots_are_reclaimed_together():
    fleet = StubFleet("cpu:2")
    ledger = fleet.at_work()
    fleet.stubs.in_ring = {1, 4}
    fleet.stubs.steps = [[("rollout-1", LOST), ("rollout-0", LOST)]]
    old = [*fleet.rollout]
    for _ in old:
        fleet.next_event()
    assert fleet.stubs.reclaimed == [[1, 0], [0]]
    assert ledger.lost_with == [("rollout-1", {1, 4}), ("rollout-0", {1, 4})]
    assert [worker.state for worker in old] == ["lost", "lost"]
    assert [*fleet.states().values()] == ["starting", "starting"]
    assert fleet.num_restarts == {"rollout-0": 1, "rollout-1": 1}


def test_too_many_deaths_end_the_run():
    fleet = StubFleet("cpu", "cpu", "runtime.max_restarts=1")
    fleet.follow(("rollout-0", LOST))
    with pytest.raises(WorkerFailure, match=r"rollout-0 .*SIGKILL.*max_restarts=1"):
        fleet.follow(("rollout-0", LOST))


@pytest.mark.parametrize("last", [READY, events.Lost("failed: no such device")])
def test_workers_leave_once_new_ones_are_ready_or_stay(last):
    fleet = StubFleet("cpu:2", "cpu", *SPARE)
    ledger = fleet.at_work()
    ledger.open = {"rollout-1": 1}
    fleet.scale(replace(fleet.infer_devices, indices=(2, 3)))
    old = fleet.rollout[:2]
    assert set(fleet.changing) == {f"rollout-{number}" for number in range(4)}
    fleet.follow(("rollout-2", last))
    assert all(worker.state == "working" for worker in old)
    fleet.follow(("rollout-3", last))
    fleet._let_leave()
    has_started = last == READY
    assert all((worker.state == "leaving") == has_started for worker in old)
    assert fleet.infer_devices.indices == ((2, 3) if has_started else (0, 1))
    assert fleet.num_refused == (0 if has_started else 2)
    if has_started:
        fleet.follow(("train-0", DONE), ("rollout-2", DONE))  # its admission
        fleet._let_leave()
        assert "Stop" in fleet.workers["rollout-0"].taken()
        assert "Stop" not in fleet.workers["rollout-1"].taken(), "it has a group"
        fleet.follow(("rollout-0", LOST))
        assert "rollout-0" not in fleet.states() and fleet.num_restarts.total() == 0
        ledger.open = {}
        fleet.follow(("train-0", DONE), ("rollout-3", DONE))
        fleet._let_leave()
        assert fleet.workers["rollout-1"].taken() == ["Stop"]


@pytest.mark.parametrize(("wanted", "staying"), [
    ("cpu:3", "cpu:3"),
    ("cpu:1", "cpu:1"),
    ("cpu:4", "cpu:2"),  # one more process can be started
])  # fmt: skip
def test_all_workers_of_a_change_start_or_nothing_changes(wanted, staying):
    fleet = StubFleet("cpu:2", "cpu", *SPARE)
    fleet.stubs.most = 1
    is_refused = wanted != staying
    with pytest.raises(ConfigError, match="Too many") if is_refused else contextlib.nullcontext():
        fleet.scale(parse_device_set(wanted))
    assert fleet.infer_devices == parse_device_set(staying)
