"""The weight channel on an accelerator's backend, and the handle of shared device memory.

Needs no accelerator: the channel is on torch's `meta` device, with a stand-in for its backend.
"""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from easyrl import devices
from easyrl.channels.weights import WeightChannel, WeightEndpoint
from easyrl.types import Weight

pytestmark = pytest.mark.alone

TIMEOUT_SECONDS = 0.4


class Backend:
    """Stub of a process group on an accelerator, and of its broadcasts."""

    num_aborts, is_stuck = 0, False

    def __init__(self):
        self.log, self.number, self.connect = [], 0, lambda: None

    def abort(self):
        self.num_aborts += 1

    def broadcast(self, tensors, options=None):
        if options is None:  # the first one, which connects
            return SimpleNamespace(wait=self.connect)
        number, polls = self.number, 3
        self.number += 1

        def is_completed():
            nonlocal polls
            polls -= not self.is_stuck
            if polls < 0:
                self.log.append(f"{number} done")
            return polls < 0

        def wait():  # with a timeout, a backend would rest a millisecond between two polls
            self.log.append(f"{number} waited")

        self.log.append(f"{number} begun")
        return SimpleNamespace(is_completed=is_completed, wait=wait)


@pytest.fixture
def backend(monkeypatch):
    backend = Backend()
    monkeypatch.setattr(devices, "make_process_group", lambda *arguments: (backend, backend.abort))
    return backend


def join(folder, bucket_bytes=2**21, is_cancelled=lambda: False):
    where = (str(folder / "store"), 0, 1, "worker-0", "meta", TIMEOUT_SECONDS)
    return WeightChannel(WeightEndpoint(*where, bucket_bytes=bucket_bytes), is_cancelled)


def weights(number, num_elements=2**19):
    values = torch.empty(num_elements, device="meta")
    return [Weight(f"w{n}", values, lambda: values, is_trained=True) for n in range(number)]


def test_a_bucket_is_done_on_the_device_before_it_is_filled_again(tmp_path, backend):
    """The device's next work is ordered after each broadcast (`wait`)."""
    channel = join(tmp_path, bucket_bytes=2**20)
    backend.log.clear()
    channel.send(0, weights(8, num_elements=2**17))  # two per bucket
    numbers = {line: index for index, line in enumerate(backend.log)}  # 0, 1: version and names
    for bucket in (4, 5):
        assert numbers[f"{bucket - 2} waited"] < numbers[f"{bucket} begun"]
        assert numbers[f"{bucket} begun"] < numbers[f"{bucket - 1} done"], "two are in progress"
    assert backend.log[-2:] == ["5 done", "5 waited"]


@pytest.mark.parametrize(
    ("cancelled", "kind", "bounds"),
    [
        (False, TimeoutError, (TIMEOUT_SECONDS, TIMEOUT_SECONDS + 2.0)),
        (True, ConnectionError, (0.0, TIMEOUT_SECONDS)),
    ],
)
def test_a_broadcast_that_never_ends_is_named_within_the_bound_or_cancelled(
    cancelled, kind, bounds, tmp_path, backend
):
    channel = join(tmp_path, is_cancelled=lambda: cancelled)
    channel.send(0, weights(1))
    backend.is_stuck, started = True, time.monotonic()
    with pytest.raises(kind, match=r"worker-0 \(rank 0 of 1\), announcing a version"):
        channel.send(1, weights(1))
    assert bounds[0] <= time.monotonic() - started <= bounds[1]
    assert backend.num_aborts == 1, "its group is not awaited"


def test_a_backend_that_hangs_when_it_connects_is_left_behind(tmp_path, backend):
    connected = threading.Event()
    backend.connect = connected.wait
    with pytest.raises(TimeoutError, match="making the process group"):
        join(tmp_path)
    connected.set()
