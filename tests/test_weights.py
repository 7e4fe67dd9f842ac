"""The weight channel between processes: complete, equal, versioned, bounded in time."""

import hashlib
import json
import mmap
import os
import re
import signal
import threading
import time
import weakref
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from easyrl import devices
from easyrl.channels import weights
from easyrl.channels.shared_memory import anonymous_memory, mark_memory, open_memory
from easyrl.channels.weights import WeightChannel, WeightEndpoint
from easyrl.config import Config
from easyrl.runtime import worker_process
from easyrl.types import Weight
from own_processes import WAIT_SECONDS
from own_workers import fork_server, settings_on_cpu

pytestmark = pytest.mark.alone

TIMEOUT_SECONDS = 10.0
REACHED_SECONDS = 2.0
"""The timeout of the channel where a test waits for its end."""
BOUND_SECONDS = REACHED_SECONDS + 30.0
"""A bounded wait, seen from outside on a busy machine."""
SHAPES = {
    "embedding.weight": ((37, 19), torch.float32),
    "half": ((301,), torch.bfloat16),
    "empty": ((0, 4), torch.float32),
    "scalar": ((), torch.float32),
    "counts": ((7,), torch.int64),
    "last.bias": ((5,), torch.float32),
}
AT_ONCE_SECONDS = 0.75 * TIMEOUT_SECONDS
"""Less than the timeout: what ends by then, also on a busy machine, did not wait for it."""


def make_weights(version):
    generator = torch.Generator().manual_seed(version)
    return {
        name: torch.randint(-1000, 1000, shape, generator=generator).to(dtype)
        for name, (shape, dtype) in SHAPES.items()
    }


def digests(weights):
    return {
        name: hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in weights.items()
        if tensor.numel()
    }


def share_cpu_memory(buffer):
    """Stub of `devices.share_memory`: move the bytes into an anonymous file."""
    fd, size = buffer.untyped_storage()._share_fd_cpu_()
    return json.dumps([f"/proc/{os.getpid()}/fd/{os.dup(fd)}", size])


def open_cpu_memory(handle, device):
    path, size = json.loads(handle)
    fd = os.open(path, os.O_RDWR)
    return torch.tensor([], dtype=torch.uint8).set_(
        torch.UntypedStorage._new_shared_fd_cpu(fd, size), 0, (size,), (1,)
    )


MEMORY = (share_cpu_memory, open_cpu_memory)
"""They stand for a device's. What crosses otherwise only says whose turn it is."""


def refuse(*arguments):
    raise RuntimeError("invalid device context")


class Peer:
    """One end of the channel, in a process that obeys the test."""

    def __init__(self):
        self.channel = self.full = None
        self.gathered = []  # sizes of the weights, in the order in which they were gathered
        self.is_cancelled = False
        signal.signal(signal.SIGUSR1, lambda *_: setattr(self, "is_cancelled", True))
        config = Config.model_validate({"runtime": {"timeout_seconds": TIMEOUT_SECONDS}})
        self.settings = settings_on_cpu("rollout-0", config)
        worker_process.set_up_process(worker_process.with_environment(self.settings))

    def end_at(self, what, signum):
        """Send this process a signal when it waits for `what`."""
        bounded = WeightChannel._bounded

        def end(channel, name, action):
            if re.fullmatch(what, name):
                os.kill(os.getpid(), signum)
            return bounded(channel, name, action)

        WeightChannel._bounded = end

    def join(self, store, rank, size, *, generation=0, memory=(), is_near=True, **changes):
        """`memory`: functions that share and open the memory of the device of both ends. Unless
        the sender `is_near`, its memory cannot be opened, as on another machine."""
        weights.open_memory = open_memory if is_near else refuse
        if memory:
            devices.share_memory, devices.open_memory = memory
            changes["shared_device"] = "cpu"
        settings = replace(self.settings, name=f"worker-{rank}", store=store)
        endpoint = settings.weight_endpoint(rank, size, generation)
        endpoint = replace(endpoint, **({"bucket_bytes": 512} | changes))
        self.is_cancelled, self.full = False, self.channel
        self.channel = WeightChannel(endpoint, lambda: self.is_cancelled)
        assert self.channel._is_shared == (is_near and refuse not in memory)
        return self.channel.not_shared_reason

    def leave_temporary(self):
        self.channel.close()
        self.channel = self.full

    def leave(self):
        self.channel = self.full = None

    def send(self, version, names=SHAPES, dtype=None):
        self.gathered = []
        alive = [lambda: None]  # the weight that was gathered last

        def gather(weight, dtype):
            is_freed = alive.pop()() is None
            # After a failure its traceback keeps the one that was being sent.
            assert is_freed or self.channel._group is None, "two whole weights at a time"
            self.gathered.append(weight.numel())
            whole = weight.to(dtype, copy=True)
            alive.append(weakref.ref(whole))
            return whole

        values = make_weights(version)
        weights = [Weight.stored(name, values[name], is_trained=True) for name in names]
        return self.channel.send(version, weights, dtype=dtype, gather=gather), self.gathered

    def sizes_gathered(self):
        return self.gathered

    def receive(self, version, pause_seconds=0.0):
        got = {}
        for piece in self.channel.receive(version):
            pieces = got.setdefault(piece.name, [])
            assert piece.start == sum(map(len, pieces)), "pieces come in order, without gaps"
            pieces.append(piece.values.clone())
            time.sleep(pause_seconds)
        return digests({name: torch.cat(pieces) for name, pieces in got.items()})


def peer_main(control):
    peer = Peer()
    control.send("ready")
    while True:
        method, arguments, named = control.recv()
        started = time.monotonic()
        try:
            answer = getattr(peer, method)(*arguments, **named)
        except Exception as error:
            answer = error
        control.send((answer, time.monotonic() - started))


class Peers:
    """Processes that stay from test to test: importing torch is the slow part."""

    def __init__(self, folder, context):
        self.context = context
        self.stores = (str(folder / f"store-{number}") for number in count())
        self.processes, self.controls = {}, {}

    def start(self, number):
        """Start those of the first `number` peers that do not live."""
        fresh = {*range(number)} - {*self.living()}
        for n in fresh:
            self.controls[n], theirs = self.context.Pipe()
            self.processes[n] = self.context.Process(target=peer_main, args=(theirs,))
            self.processes[n].start()
            theirs.close()
        for n in fresh:
            assert self.controls[n].poll(WAIT_SECONDS) and self.controls[n].recv() == "ready"

    def living(self):
        return [number for number, process in self.processes.items() if process.is_alive()]

    def kill(self, number):
        self.processes[number].kill()
        self.processes[number].join()

    def command(self, number, method, *arguments, **named):
        self.controls[number].send((method, arguments, named))

    def answer(self, number):
        """A peer's answer (an exception is returned) and the seconds it took."""
        assert self.controls[number].poll(WAIT_SECONDS), f"peer {number} hangs"
        return self.controls[number].recv()

    def outcomes(self, *commands):
        """One command (None: none) for each of the first peers, at the same time; their answers."""
        called = [number for number, command in enumerate(commands) if command is not None]
        for number in called:
            self.command(number, *commands[number])
        return [self.answer(number) for number in called]

    def all(self, *commands):
        """`outcomes` without the seconds; raises the first exception."""
        answers = [answer for answer, _ in self.outcomes(*commands)]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def exchange(self, version, size, names=SHAPES, pause_seconds=0.0, dead=None):
        """Let the first `size` peers exchange weights, which must arrive; the bytes sent."""
        commands = [("receive", version, pause_seconds)] * size
        commands[1 if dead == 0 else 0] = ("send", version, names)
        if dead is not None:
            commands[dead] = None
        (sent, _), *received = self.all(*commands)
        weights = make_weights(version)
        expected = digests({name: weights[name] for name in names})
        assert received and all(got == expected for got in received)
        return sent

    def join(self, size, store=None, dead=None, reason=None, **how):
        """Make a process group of the first `size` peers, in a store that was used before or in a
        new one. `reason`: why they share no memory, as the sender reports it."""
        self.start(size if dead is None else 0)
        store = store or next(self.stores)
        living = [number for number in range(size) if number != dead]
        for rank, number in enumerate(living):
            self.command(number, "join", store, rank, len(living), **how)
        sender, *receivers = (self.answer(number)[0] for number in living)
        assert sender == reason and {*receivers} <= {reason, reason and ""}
        return store


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    with fork_server() as context:
        peers = Peers(tmp_path_factory.mktemp("stores"), context)
        try:
            yield peers
        finally:
            for number in peers.processes:
                peers.kill(number)


@pytest.fixture
def peers(processes):
    processes.start(3)
    yield processes
    for number in processes.living():
        processes.command(number, "leave")
        answer, seconds = processes.answer(number)
        assert answer is None
        assert seconds < AT_ONCE_SECONDS  # a channel, even a broken one, goes at once


def assert_bounded(outcome, kinds, *words):
    error, seconds = outcome
    assert isinstance(error, kinds), error
    assert seconds <= BOUND_SECONDS
    for word in words:
        assert re.search(word, str(error)), error


@pytest.mark.parametrize("is_near", [True, False])
@pytest.mark.parametrize("bucket_bytes", [48, 37 * 19 * 4, 2**20])
def test_all_receivers_get_the_senders_bytes(peers, bucket_bytes, is_near):
    peers.join(3, bucket_bytes=bucket_bytes, is_near=is_near)
    some = ["half", "scalar"]  # if only they have changed
    for version, names in enumerate((SHAPES, SHAPES, some, some, ["counts"], SHAPES)):
        num_bytes = sum(make_weights(version)[name].nbytes for name in names)
        pause_seconds = 0.02 * (version == 1)  # of a slow receiver
        assert peers.exchange(version, 3, names, pause_seconds) == num_bytes


def test_weights_are_sent_in_the_engines_precision_and_gathered_once_in_order(peers):
    peers.join(2, bucket_bytes=48)
    (sent, gathered), received = peers.all(("send", 3, SHAPES, torch.bfloat16), ("receive", 3))
    sizes = [tensor.numel() for tensor in make_weights(3).values() if tensor.numel()]
    assert sent == 2 * sum(sizes) and gathered == sizes
    halves = {name: tensor.to(torch.bfloat16) for name, tensor in make_weights(3).items()}
    assert received == digests(halves)


def test_an_unexpected_version_is_an_error(peers):
    peers.join(3)  # the sender is left alone with its buckets: bounded, either way
    for outcome in peers.outcomes(("send", 1), ("receive", 2), ("receive", 2))[1:]:
        assert_bounded(outcome, RuntimeError, "version 2.* 1")


@pytest.mark.parametrize(
    ("commands", "what"),
    [
        ([("join", 0), ("join", 1)], "making the process group"),
        ([None, ("receive", 1), ("receive", 1)], "waiting for a version"),
        ([("send", 0), ("receive", 0)], ".*"),
    ],
    ids=["never joins", "silent sender", "absent receiver"],
)
def test_the_wait_for_a_missing_rank_is_bounded(peers, commands, what):
    if "making" in what:
        store = next(peers.stores)
        for _, rank in commands:
            peers.command(rank, "join", store, rank, 3, timeout_seconds=REACHED_SECONDS)
        outcomes = [peers.answer(rank) for _, rank in commands]
    else:
        peers.join(3, timeout_seconds=REACHED_SECONDS)
        outcomes = peers.outcomes(*commands)[: 1 if what == ".*" else None]
    first = commands.index(next(filter(None, commands)))
    for rank, outcome in enumerate(outcomes, start=first):
        words = rf"worker-{rank} \(rank {rank} of 3\), {what}.*waited [1-9]\d*\.\d s"
        assert_bounded(outcome, TimeoutError, words, "runtime.timeout_seconds")


def test_the_wait_for_a_receiver_that_stops_half_way_is_bounded(peers):
    peers.join(3, bucket_bytes=256, timeout_seconds=REACHED_SECONDS)
    peers.command(0, "send", 0)
    peers.command(1, "receive", 0)
    peers.command(2, "receive", 0, 3 * REACHED_SECONDS)
    assert_bounded(peers.answer(0), (TimeoutError, ConnectionError), r"bucket \d+ of \d+")
    peers.answer(1)
    peers.kill(2)


@pytest.mark.parametrize("is_near", [True, False])
@pytest.mark.parametrize(("dead", "what", "size"), [
    (0, "bucket 7 of .*", 3),
    (1, "waiting for a version", 3),
    (1, "bucket 7 of .*", 4),
    (1, r"bucket (\d+) of \1", 3),
])  # fmt: skip
def test_a_death_ends_all_others_at_once_and_the_next_generation_delivers(
    peers, dead, what, size, is_near
):
    """Also of those that do not wait for the dead one. The sender gathers every weight once."""
    store = peers.join(size, bucket_bytes=256, is_near=is_near)
    peers.command(dead, "end_at", what, signal.SIGKILL)
    peers.answer(dead)
    for number in range(size):
        peers.command(number, *[("receive" if number else "send"), 0])
    for number in {*range(size)} - {dead}:
        error, seconds = peers.answer(number)
        is_late_death = what.endswith("1") and not isinstance(error, Exception)  # all was sent
        assert is_late_death or isinstance(error, ConnectionError), error
        assert seconds < AT_ONCE_SECONDS
    peers.processes[dead].join()
    if dead:
        peers.command(0, "sizes_gathered")
        sizes = [tensor.numel() for tensor in make_weights(0).values() if tensor.numel()]
        assert peers.answer(0)[0] == sizes
    peers.join(size, store, dead, generation=1, is_near=is_near)
    for version in (0, 1):
        peers.exchange(version, size, dead=dead)


@pytest.mark.parametrize("what", ["making the process group", "bucket 7 of .*"])
def test_a_wait_for_a_stopped_rank_can_be_cancelled(peers, what):
    is_joining = what.startswith("making")
    store = next(peers.stores) if is_joining else peers.join(3, bucket_bytes=256)
    peers.command(2, "end_at", what, signal.SIGSTOP)
    peers.answer(2)
    for rank in range(3):
        exchange = ("receive" if rank else "send", 0)
        peers.command(rank, *(("join", store, rank, 3) if is_joining else exchange))
    time.sleep(0.4)
    for number in (0, 1):
        os.kill(peers.processes[number].pid, signal.SIGUSR1)
    for number in (0, 1):
        error, seconds = peers.answer(number)
        assert isinstance(error, ConnectionError) and seconds < AT_ONCE_SECONDS
    peers.kill(2)
    peers.join(2, store, generation=1)
    peers.exchange(0, 2)


def test_a_temporary_channel_of_two_leaves_the_full_one_as_it_is(peers):
    store = peers.join(3)
    peers.exchange(0, 3)
    for generation in (1, 2):
        peers.join(2, store, generation=generation)
        peers.exchange(0, 2)
        peers.all(("leave_temporary",), ("leave_temporary",))
        assert peers.exchange(generation, 3) > 0


def test_weights_cross_in_memory_that_both_ranks_see(peers):
    for version in (0, 1, 7):
        peers.join(2, memory=MEMORY)
        peers.exchange(version, 2)
        peers.exchange(version + 1, 2, pause_seconds=0.02)  # not filled before it is read


@pytest.mark.parametrize("memory", [(refuse, open_cpu_memory), (share_cpu_memory, refuse)])
def test_memory_that_cannot_be_shared_is_reported_and_weights_are_broadcast(peers, memory):
    peers.join(2, memory=memory, reason="invalid device context")
    peers.exchange(4, 2)


def test_on_one_device_every_wait_is_bounded_too(peers):
    peers.join(2, memory=MEMORY, timeout_seconds=REACHED_SECONDS)
    peers.exchange(0, 2)
    peers.command(1, "receive", 1, REACHED_SECONDS + 60.0)  # it reads for too long
    peers.command(0, "send", 1)
    words = r"until bucket 1 of \d+ is read: .*waited [1-9]\d*\.\d s"
    assert_bounded(peers.answer(0), TimeoutError, words)
    peers.kill(1)


def test_memory_is_opened_by_a_handle_of_this_machine_alone():
    memory = mmap.mmap(fd := anonymous_memory(4096), 4096)
    handle = mark_memory(memoryview(memory), fd)
    opened = open_memory(handle)
    memory[100] = 7
    assert opened[100] == 7
    mark_memory(memoryview(memory), fd)
    for wrong in (handle, f"/proc/{os.getpid()}/fd/0 00", f"/proc/{2**30}/fd/1 00"):
        with pytest.raises(RuntimeError):
            open_memory(wrong)
    os.close(fd)


SHORT_SECONDS = 0.4


class Backend:
    """Stub of a process group on an accelerator, and of its broadcasts of `meta` tensors."""

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


def join_on_meta(
    folder, bucket_bytes=2**21, is_cancelled=lambda: False, timeout_seconds=TIMEOUT_SECONDS
):
    where = (str(folder / "store"), 0, 1, "worker-0", "meta", timeout_seconds)
    return WeightChannel(WeightEndpoint(*where, bucket_bytes=bucket_bytes), is_cancelled)


def on_meta(number, num_elements=2**19):
    values = torch.empty(num_elements, device="meta")
    return [Weight(f"w{n}", values, lambda: values, is_trained=True) for n in range(number)]


def test_a_bucket_is_done_on_the_device_before_it_is_filled_again(tmp_path, backend):
    """The device's next work is ordered after each broadcast (`wait`)."""
    channel = join_on_meta(tmp_path, bucket_bytes=2**20)
    backend.log.clear()
    channel.send(0, on_meta(8, num_elements=2**17))  # two per bucket
    numbers = {line: index for index, line in enumerate(backend.log)}  # 0, 1: version and names
    for bucket in (4, 5):
        assert numbers[f"{bucket - 2} waited"] < numbers[f"{bucket} begun"]
        assert numbers[f"{bucket} begun"] < numbers[f"{bucket - 1} done"], "two are in progress"
    assert backend.log[-2:] == ["5 done", "5 waited"]


@pytest.mark.parametrize(
    ("kind", "timeout_seconds", "bounds"),
    [
        (TimeoutError, SHORT_SECONDS, (SHORT_SECONDS, BOUND_SECONDS)),
        (ConnectionError, TIMEOUT_SECONDS, (0.0, AT_ONCE_SECONDS)),
    ],
    ids=["timeout", "cancelled"],
)
def test_a_broadcast_that_never_ends_is_named_within_the_bound_or_cancelled(
    kind, timeout_seconds, bounds, tmp_path, backend
):
    def is_cancelled():
        return kind is ConnectionError

    channel = join_on_meta(tmp_path, is_cancelled=is_cancelled, timeout_seconds=timeout_seconds)
    channel.send(0, on_meta(1))
    backend.is_stuck, started = True, time.monotonic()
    with pytest.raises(kind, match=r"worker-0 \(rank 0 of 1\), announcing a version"):
        channel.send(1, on_meta(1))
    assert bounds[0] <= time.monotonic() - started <= bounds[1]
    assert backend.num_aborts == 1, "its group is not awaited"


def test_a_backend_that_hangs_when_it_connects_is_left_behind(tmp_path, backend):
    connected = threading.Event()
    backend.connect = connected.wait
    with pytest.raises(TimeoutError, match="making the process group"):
        join_on_meta(tmp_path, timeout_seconds=SHORT_SECONDS)
    connected.set()
