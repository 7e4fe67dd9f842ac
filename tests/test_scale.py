"""Scaling a live run: which engines, spare devices, and how many would balance both sides."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from easyrl import devices, events
from easyrl.config import ConfigError, load_config
from easyrl.config.devices import parse_device_set
from easyrl.runtime import placement as placing
from easyrl.runtime.balance import Balance
from easyrl.runtime.controller import Controller
from easyrl.runtime.placement import EngineChoice, check_scale, first_engines, resolve_placement
from easyrl.runtime.resolve import resolve

ON_CPU = ("devices.infer=cpu", "devices.train=cpu")
EIGHT = ("devices.infer=0-3", "devices.train=6-7", "devices.max_rollout_workers=5")


@pytest.fixture(autouse=True)
def _eight_gpus(monkeypatch):
    monkeypatch.setattr(devices, "accelerator", lambda *, is_asked: ("cuda", 8))


def place(*words):
    return resolve_placement(resolve(load_config(words=words)))


def scale(wanted, *words, size=1, starting=None):
    """Scale a run with these settings; its engines span `size` devices each."""
    placement = place(*(words or EIGHT))
    placement = replace(placement, engine=EngineChoice("vllm", "", size))
    changing = () if starting is None else (starting,)
    check_scale(
        resolve(load_config(words=words)),
        placement,
        placement.infer,
        parse_device_set(wanted),
        changing,
    )


@pytest.mark.parametrize(("wanted", "named", "options"), [
    ("5-6", "unlike 6", {}),  # it trains
    ("0-5", "devices.max_rollout_workers", {}),
    ("0-3,8", "cuda devices 0-7", {}),
    ("cpu:2", "kind", {}),
    ("0-4", "starting or leaving.*rollout-4", {"starting": "rollout-4"}),  # one change at a time
    ("0-1,3-4", "unlike 3", {"size": 2}),  # an engine keeps its devices
])  # fmt: skip
def test_what_a_run_cannot_be_scaled_to_is_named(wanted, named, options):
    with pytest.raises(ConfigError, match=named):
        scale(wanted, **options)


def test_a_deterministic_run_is_not_scaled_and_large_engines_are():
    with pytest.raises(ConfigError, match=r"runtime\.deterministic"):
        scale("cpu:2", *ON_CPU, "runtime.deterministic=true")
    for wanted in ("0", "0-4", "1,3,5"):  # any free devices
        scale(wanted)
    scale("0-1,4-5", size=2)


def test_spare_devices_are_used_last_and_count_as_workers_a_run_may_have():
    placement = place("devices.spare=6-7")
    assert (str(placement.infer), str(placement.train)) == ("0-4", "5")
    assert str(first_engines(6, placement)) == "0-4,6"
    assert str(first_engines(2, place(*ON_CPU, "devices.spare=cpu:2"))) == "cpu:2"
    both = ("devices.infer=0-3", "devices.train=7")
    every = {(): 4, ("devices.spare=5-6",): 6, ("devices.max_rollout_workers=5",): 5}
    for words, most in every.items():
        assert place(*both, *words).max_rollout_workers == most
    assert place(*ON_CPU, "devices.spare=cpu:2").max_rollout_workers == 3
    config = load_config(words=["devices.infer=cpu:2", "devices.max_rollout_workers=1"])
    assert placing.place_evaluation(resolve(config), 8, 1).max_rollout_workers == 2


@pytest.mark.parametrize(("words", "key"), [
    (("devices.infer=0-3", "devices.train=4", "devices.spare=3-5"), "devices.spare"),
    (("devices.infer=0-3", "devices.train=4", "devices.spare=7-8"), "devices.spare"),
    (("devices.infer=0-3", "devices.max_rollout_workers=3"), "devices.max_rollout_workers"),
    (("runtime.autoscale=true",), "runtime.autoscale"),
])  # fmt: skip
def test_spare_devices_that_cannot_be_used_are_named(words, key):
    with pytest.raises(ConfigError, match=f"^{key}.*: expected .*, got"):
        place(*words)


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
    spec = resolve(load_config(words=[*ON_CPU, "devices.spare=cpu:2", "runtime.autoscale=true"]))
    placement, numbers = resolve_placement(spec), iter([2, 5, 5, 3, None, 1, 1])
    fleet = SimpleNamespace(num_refused=0, infer_devices=placement.infer)
    controller = SimpleNamespace(
        spec=spec,
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
