"""Which side of a run waits, and how many engines would balance both."""

from types import SimpleNamespace

import pytest

from easyrl import events
from easyrl.config import load_config
from easyrl.runtime.controller import Controller
from easyrl.runtime.metrics import Balance
from easyrl.runtime.placement import resolve_placement


def add(balance, *engines, train, seconds=100.0):
    """Add an iteration with the busy seconds of each worker, and 1 s of exchanging weights."""
    trained = events.IterationTrained(0, 1, 4, 100, train, {})
    ledger = SimpleNamespace(engine_seconds=dict(enumerate(engines)), trained=trained)
    took = {"perf/iteration_seconds": seconds, "perf/weights_seconds": 1.0}
    balance.add(ledger, took, len(engines))


def test_shares_of_waiting_of_the_last_iterations():
    balance = Balance(max_engines=9)
    assert balance.waiting() == {"rollout": None, "train": None}
    add(balance, 9.0, 5.0, train=6.0, seconds=10.0)
    shares = {"rollout": pytest.approx(0.2), "train": pytest.approx(0.3)}
    assert balance.waiting() == shares
    balance.clear()
    for engine, expected in ((50.0, 5), (50.0, 5), (20.0, 4), (20.0, 3), (20.0, 2)):
        add(balance, engine, train=10.0)
        assert balance.num_engines() == expected


def test_autoscale_follows_the_balanced_number_once_two_iterations_agree():
    words = ["devices.infer=cpu", "devices.train=cpu", "devices.spare=cpu:2"]
    config = load_config(words=[*words, "runtime.autoscale=true"])
    placement, numbers = resolve_placement(config), iter([2, 5, 5, 3, None, 1, 1])
    fleet = SimpleNamespace(num_refused=0, infer_devices=placement.infer)
    controller = SimpleNamespace(
        config=config,
        checked=SimpleNamespace(placement=placement),
        fleet=fleet,
        _balanced=0,
        balance=SimpleNamespace(num_engines=numbers.__next__),
        _scale=lambda wanted: setattr(fleet, "infer_devices", wanted),
    )
    for expected in ("cpu", "cpu", "cpu:3", "cpu:3", "cpu:3"):
        Controller._autoscale(controller)
        assert str(fleet.infer_devices) == expected
    fleet.num_refused = 1  # one could not be started
    for _ in range(2):
        Controller._autoscale(controller)
    assert str(fleet.infer_devices) == "cpu:3"
