"""Parts of a run on a Ray cluster, without one: the host of a worker, the placement, the checks."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from easyrl.channels.messages import encode_group
from easyrl.config import ConfigError, load_config
from easyrl.config.devices import parse_device_set
from easyrl.runtime.placement import Machine, check_scale, numbered, resolve_placement
from easyrl.runtime.ray import cluster as cluster_module
from easyrl.runtime.ray.cluster import connect, versions
from easyrl.runtime.resolve import resolve
from own_workers import FIRST, make_group, make_ring

ray_host = pytest.importorskip("easyrl.runtime.ray.host", reason="needs Ray: pip install ray")

CPUS = Machine("cpu", 0, (8, 4, 4), "a cluster")
GPUS = Machine("cuda", 8, (32, 32), "a cluster")


def test_ray_devices_are_counted_and_others_refused():
    for text, kind, count in (("ray:8", "accelerator", 8), ("ray:cpu:4", "cpu", 4)):
        parsed = parse_device_set(text)
        assert (parsed.kind, parsed.count, parsed.is_ray, str(parsed)) == (kind, count, True, text)
    for text in ("ray", "ray:", "ray:0", "ray:cpu", "ray:cpu:0", "ray:0-3", "ray:gpu:1"):
        with pytest.raises(ValueError, match="expected"):
            parse_device_set(text)


@pytest.fixture
def place(monkeypatch):
    def place(*words, resources=GPUS):
        monkeypatch.setattr(cluster_module, "connect", lambda address, num_workers: resources)
        return resolve_placement(resolve(load_config(words=words)))

    return place


@pytest.mark.parametrize(("words", "named"), [
    (("devices.infer=ray:cpu:2", "devices.train=cpu"), "^devices "),
    (("devices.infer=ray:2", "devices.train=ray:2", "devices.spare=4-5"), "^devices "),
    (("devices.ray_address=127.0.0.1:1",), r"^devices\.ray_address "),
    (("devices.infer=ray:1",), "ray:cpu:N"),  # there is no accelerator
])  # fmt: skip
def test_ray_devices_that_do_not_fit_are_refused(place, words, named):
    resources = CPUS if words == ("devices.infer=ray:1",) else GPUS
    with pytest.raises(ConfigError, match=f"{named}.*got"):
        place(*words, resources=resources)


def test_equal_numbers_of_ray_devices_are_no_shared_device(place):
    placement = place("devices.infer=ray:1", "devices.train=ray:1", "devices.spare=ray:2")
    assert not placement.shares_device and placement.max_rollout_workers == 3
    for wanted in ("ray:3", "ray:1"):
        devices = numbered(parse_device_set(wanted), placement)
        check_scale(resolve(load_config()), placement, placement.infer, devices)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1", "no.such.host.invalid:6379"])
def test_an_address_without_a_cluster_is_named(address):
    started = time.monotonic()
    with pytest.raises(ConfigError, match=rf"devices\.ray_address.*expected.*'{address}'"):
        connect(address, 1)
    assert time.monotonic() - started < cluster_module.CONNECT_SECONDS + 60.0


@pytest.mark.parametrize(("changes", "named"), [
    *[({"expected": versions() | {name: "0.1"}}, rf"{name} 0\.1, .*got") for name in versions()],
    ({"paths": ["/models/m"]}, "/models/m.*--model"),
    ({"probe": "/no/such/run/config.yaml"}, "/no/such/run.*--output"),
    ({"address": "192.0.2.1"}, "address of a network interface, got 192.0.2.1"),
])  # fmt: skip
def test_a_node_that_cannot_run_a_worker_is_named(changes, named, monkeypatch):
    facts = {"expected": versions(), "paths": [], "probe": __file__} | changes
    address = facts.pop("address", "127.0.0.1")
    monkeypatch.setattr(ray_host, "_accelerators", dict)
    monkeypatch.setattr(ray_host, "get_node_ip_address", lambda: address)
    with pytest.raises(ConfigError, match=rf"^node .* \({address}\): expected .*{named}"):
        ray_host.WorkerHost().describe(**facts, needs_folder=True)
    if "probe" in changes:  # only train workers need the run folder
        facts = ray_host.WorkerHost().describe(**facts, needs_folder=False)
        assert facts == ("127.0.0.1", (), False)


@pytest.fixture
def host():
    """The host of train rank 0, with a ring of two slots."""
    host = ray_host.WorkerHost()
    host._ring = make_ring(2)
    host._port = host._ring.attach(0)
    yield host
    host._ring.close()


def group(number):
    return encode_group(make_group(FIRST + number))


def test_a_group_waits_for_a_slot_unless_its_worker_is_fenced(host, monkeypatch):
    monkeypatch.setattr(ray_host, "RETRY_SECONDS", 0.05)
    assert host.put("rollout-0 a", group(0)) and host.put("rollout-1 b", group(1))
    threads = ThreadPoolExecutor(2)
    fenced = threads.submit(host.put, "rollout-0 a", group(2))
    waiting = threads.submit(host.put, "rollout-1 b", group(3))
    time.sleep(0.2)
    assert not fenced.done() and not waiting.done(), "the ring is full"
    host.fence(["rollout-0 a"])
    assert not fenced.result(10.0) and not host.put("rollout-0 a", group(2))
    host._ring.attach(1).get().release()
    assert waiting.result(10.0)
    assert host.delivered(make_group(FIRST).iteration) == {1, 3}
    host._ring.attach(1).get().release()
    assert host.put("rollout-0 c", group(2)), "its replacement"
