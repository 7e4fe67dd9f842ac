"""The weight channel between spawned processes: complete, equal, versioned, bounded in time."""

import hashlib
import ipaddress
import json
import math
import multiprocessing
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from easyrl import devices
from easyrl.channels import ALONE_BYTES
from easyrl.channels import weights as weights_module
from easyrl.channels.weights import ALIGNMENT_BYTES, WeightChannel, make_plan
from easyrl.config import Config
from easyrl.runtime import launch
from easyrl.types import Weight
from easyrl.workers.settings import WorkerSettings

pytestmark = pytest.mark.alone

SPAWN = multiprocessing.get_context("spawn")
TIMEOUT_SECONDS = 2.0
PATIENCE_SECONDS = TIMEOUT_SECONDS + 4.0  # a bounded wait, seen from outside on a busy machine
START_SECONDS = 60.0
SHAPES = {
    "embedding.weight": ((37, 19), torch.float32),
    "half": ((301,), torch.bfloat16),
    "empty": ((0, 4), torch.float32),
    "scalar": ((), torch.float32),
    "counts": ((7,), torch.int64),
    "last.bias": ((5,), torch.float32),
}


def make_weights(version):
    """Other values for every version."""
    generator = torch.Generator().manual_seed(version)
    return {
        name: torch.randint(-1000, 1000, shape, generator=generator).to(dtype)
        for name, (shape, dtype) in SHAPES.items()
    }


def digests(weights):
    return {
        name: hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in weights.items()
    }


def share_cpu_memory(buffer):
    """Stands for a device's: the bytes move into an anonymous file."""
    fd, size = buffer.untyped_storage()._share_fd_cpu_()
    return json.dumps([f"/proc/{os.getpid()}/fd/{os.dup(fd)}", size])


def open_cpu_memory(handle, device):
    path, size = json.loads(handle)
    fd = os.open(path, os.O_RDWR)
    return torch.tensor([], dtype=torch.uint8).set_(
        torch.UntypedStorage._new_shared_fd_cpu(fd, size), 0, (size,), (1,)
    )


def refuse(*arguments):
    raise RuntimeError("invalid device context")


class Member:
    """One end of the channel, in a process that obeys the test."""

    def __init__(self, store_path):
        self.channel = None
        self.settings = WorkerSettings(
            name="rollout-0",
            owner_id=0,
            config=Config.model_validate({"runtime": {"timeout_seconds": TIMEOUT_SECONDS}}),
            device="cpu",
            weights_cross_on_cpu=True,
            num_threads=1,
            max_concurrent_groups=1,
            store_path=store_path,
            log_file=None,
        )
        launch._set_up_environment(self.settings)

    def join(self, generation, rank, world_size, bucket_bytes=1024, alone_bytes=ALONE_BYTES):
        weights_module.ALONE_BYTES = alone_bytes
        endpoint = self.settings.weight_endpoint(generation, rank, world_size)
        self.channel = WeightChannel(replace(endpoint, bucket_bytes=bucket_bytes))

    def join_on_one_device(self, generation, rank, share=share_cpu_memory, open_=open_cpu_memory):
        """The bucket is memory that both ranks see; `share` and `open_` stand for a device's."""
        devices.share_memory, devices.open_memory = share, open_
        endpoint = self.settings.weight_endpoint(generation, rank, 2)
        self.channel = WeightChannel(replace(endpoint, shared_device="cpu", bucket_bytes=512))
        return self.channel.unsupported_reason

    def bucket_address(self):
        """Inode of the file that is mapped at the bucket's address."""
        address = self.channel._buckets[0].data_ptr()
        for line in Path("/proc/self/maps").read_text().splitlines():
            first, last = (int(end, 16) for end in line.split()[0].split("-"))
            if first <= address < last:
                return line.split()[4]  # the file's inode
        raise AssertionError("no memory there")

    def leave(self):
        self.channel = None

    def send(self, version):
        weights = make_weights(version)
        return self.channel.send(
            version, [Weight.kept(*w, is_trained=True) for w in weights.items()]
        )

    def send_some(self, version, names):
        weights = make_weights(version)
        some = [Weight.kept(name, weights[name], is_trained=True) for name in names]
        return self.channel.send(version, some)

    def receive_some(self, version):
        """Digests of the weights that are received."""
        got = {}
        for piece in self.channel.receive(version):
            got.setdefault(piece.name, []).append(piece.values.clone())
        return digests({name: torch.cat(pieces) for name, pieces in got.items()})

    def send_halved(self, version):
        """Send as bfloat16; also return in what order weights are gathered."""
        gathered = []

        def gather(weight, dtype):
            gathered.append(weight.numel())
            return weight.to(dtype)

        weights = [Weight.kept(*each, is_trained=True) for each in make_weights(version).items()]
        sent = self.channel.send(version, weights, dtype=torch.bfloat16, gather=gather)
        return sent, gathered

    def receive(self, version, pause_seconds=0.0):
        """Digests of the weights, put together from pieces."""
        got = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in SHAPES.items()}
        ends = dict.fromkeys(SHAPES, 0)
        for piece in self.channel.receive(version):
            assert piece.start == ends[piece.name], "pieces of a weight come in order, no gaps"
            ends[piece.name] += len(piece.values)
            got[piece.name].view(-1)[piece.start : ends[piece.name]] = piece.values
            time.sleep(pause_seconds)
        assert ends == {name: tensor.numel() for name, tensor in got.items()}
        return digests(got)

    def receive_into(self, version, names):
        """Digests of the weights, and for each of `names` whether all its pieces were received
        directly into its own memory."""
        own = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in SHAPES.items()}
        landed = dict.fromkeys(names, True)
        for piece in self.channel.receive(
            version, lambda name: own[name].view(-1) if name in names else None
        ):
            part = own[piece.name].view(-1)[piece.start : piece.start + len(piece.values)]
            if piece.name in names:
                landed[piece.name] &= part.data_ptr() == piece.values.data_ptr()
            part.copy_(piece.values)
        return digests(own), landed

    def send_from_scratch(self, version, num_weights):
        """Make all weights in the same memory, one after another."""
        scratch = torch.empty(2**20)

        def make(number):
            return lambda: scratch.fill_(number)

        weights = [
            Weight(f"w{number}", torch.empty(2**20, device="meta"), make(number), is_trained=True)
            for number in range(num_weights)
        ]
        self.channel.send(version, weights, gather=lambda weight, dtype: weight)

    def send_and_stall(self, version, seconds):
        """Take this long to make the second of two weights."""
        values = torch.zeros(2**20)
        weights = [
            Weight("first", values, lambda: values, is_trained=True),
            Weight("second", values, lambda: time.sleep(seconds) or values, is_trained=True),
        ]
        self.channel.send(version, weights)

    def receive_numbers(self, version, pause_seconds):
        """Minimum and maximum of each weight."""
        found = []
        for piece in self.channel.receive(version):
            time.sleep(pause_seconds)
            found.append([float(end) for end in torch.aminmax(piece.values)])
        return found

    def environment(self):
        return {name: os.environ.get(name) for name in devices.LOOPBACK_ENVIRONMENT}


def member_main(store_path, control):
    member = Member(store_path)
    control.send("ready")
    while (command := control.recv()) is not None:
        method, arguments = command
        started = time.monotonic()
        try:
            answer = getattr(member, method)(*arguments)
        except Exception as error:
            answer = error
        control.send((answer, time.monotonic() - started))
    os._exit(0)


class Members:
    """Processes that stay from test to test: importing torch is the slow part."""

    def __init__(self):
        self.store_fd = os.memfd_create("test-store")
        self.generation = -1
        self.processes = {}
        self.controls = {}

    def start(self, number):
        """Start those of the first `number` members that do not live."""
        fresh = []
        for n in range(number):
            if n not in self.processes or not self.processes[n].is_alive():
                ours, theirs = SPAWN.Pipe()
                store_path = f"/proc/{os.getpid()}/fd/{self.store_fd}"
                self.processes[n] = SPAWN.Process(target=member_main, args=(store_path, theirs))
                self.processes[n].start()
                theirs.close()
                self.controls[n] = ours
                fresh.append(ours)
        for control in fresh:
            assert control.poll(START_SECONDS) and control.recv() == "ready"

    def command(self, number, method, *arguments):
        self.controls[number].send((method, arguments))

    def answer(self, number):
        """A member's answer (an exception is returned) and the seconds it took."""
        assert self.controls[number].poll(PATIENCE_SECONDS), f"member {number} hangs"
        return self.controls[number].recv()

    def all(self, *commands):
        """One command for each of the first members, at the same time; their answers."""
        for number, command in enumerate(commands):
            self.command(number, *command)
        answers = [self.answer(number)[0] for number in range(len(commands))]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def join(self, size, bucket_bytes=1024, alone_bytes=ALONE_BYTES):
        """A new process group of the first `size` members."""
        self.start(size)
        self.generation += 1
        how = (size, bucket_bytes, alone_bytes)
        self.all(*[("join", self.generation, rank, *how) for rank in range(size)])

    def close(self):
        for process in self.processes.values():
            process.kill()
            process.join()
        os.close(self.store_fd)


@pytest.fixture(scope="module")
def processes():
    members = Members()
    yield members
    members.close()


@pytest.fixture
def members(processes):
    """Three living members that are in no channel."""
    processes.start(3)
    yield processes
    for number, process in processes.processes.items():
        if process.is_alive():
            processes.command(number, "leave")
            answer, seconds = processes.answer(number)
            assert answer is None and seconds < 1.0  # a channel, even a broken one, goes at once


def assert_bounded(outcome, kinds, *words):
    error, seconds = outcome
    assert isinstance(error, kinds), error
    assert seconds <= PATIENCE_SECONDS
    for word in words:
        assert re.search(word, str(error)), error


# -- what arrives ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bucket_bytes", "alone_bytes"),
    [(16, 2**20), (48, 40), (1024, 600), (37 * 19 * 4, 2**20), (2**20, 1), (2**20, 2**20)],
)
def test_all_receivers_get_the_senders_bytes(members, bucket_bytes, alone_bytes):
    """Weights larger than a bucket, as large, several in one, and one without a bucket."""
    members.join(3, bucket_bytes, alone_bytes)
    for version in (0, 1, 7):
        sent, *received = members.all(("send", version), ("receive", version), ("receive", version))
        weights = make_weights(version)
        assert received == [digests(weights)] * 2
        assert sent == sum(t.numel() * t.element_size() for t in weights.values())


def test_weights_are_sent_in_the_engines_precision_and_gathered_once_in_order(members):
    members.join(2, 48)
    (sent, gathered), received = members.all(("send_halved", 3), ("receive_some", 3))
    weights = {name: t for name, t in make_weights(3).items() if t.numel()}
    assert sent == 2 * sum(tensor.numel() for tensor in weights.values())
    assert gathered == [tensor.numel() for tensor in weights.values()]
    assert received == digests({name: t.to(torch.bfloat16) for name, t in weights.items()})


def test_pieces_stay_whole_when_a_receiver_is_slow(members):
    """The sender fills its bucket again while a receiver still reads its own."""
    members.join(3, 512)
    _, *received = members.all(("send", 3), ("receive", 3, 0.03), ("receive", 3))
    assert received == [digests(make_weights(3))] * 2


def test_a_large_weight_is_received_into_its_own_memory(members):
    """Neither end copies it through a bucket."""
    members.join(2, 512, 600)
    _, (received, landed) = members.all(
        ("send", 3), ("receive_into", 3, ["embedding.weight", "half", "counts"])
    )
    assert received == digests(make_weights(3))
    assert landed == {"embedding.weight": True, "half": True, "counts": False}


def test_a_gathered_weight_is_kept_until_it_is_sent(members):
    members.join(2, 2**21)
    _, received = members.all(("send_from_scratch", 0, 4), ("receive_numbers", 0, 0.05))
    assert received == [[number, number] for number in range(4) for _ in range(2)]


def test_some_weights_may_be_sent_then_others_then_all(members):
    """Only changed weights are sent; the receivers keep the rest."""
    members.join(3, 512)
    every = members.all(("send", 0), ("receive", 0), ("receive", 0))[0]
    for version, names in enumerate([["half", "scalar"], ["half", "scalar"], ["counts"]], 1):
        receive = ("receive_some", version)
        sent, *received = members.all(("send_some", version, names), receive, receive)
        weights = {name: make_weights(version)[name] for name in names}
        assert received == [digests(weights)] * 2
        assert 0 < sent < every
    assert members.all(("send", 4), ("receive", 4), ("receive", 4))[0] == every


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 12), max_size=3),
            st.sampled_from(["float32", "bfloat16", "int64", "uint8"]),
        ),
        max_size=8,
    ),
    st.integers(8, 300),
    st.none() | st.integers(1, 300),
)
def test_a_plan_places_every_element_once_and_nothing_overlaps(weights, bucket_bytes, alone_bytes):
    manifest = [(f"w{i}", shape, dtype) for i, (shape, dtype) in enumerate(weights)]
    plan = make_plan(manifest, bucket_bytes, alone_bytes)
    placed = {name: 0 for name, _, _ in manifest}
    for bucket in plan:
        end = 0
        assert bucket
        sizes = [math.prod(slot.shape) * slot.dtype.itemsize for slot in bucket]
        assert len(bucket) == 1 or alone_bytes is None or max(sizes) < alone_bytes
        for slot in bucket:
            assert slot.offset >= end and slot.offset % ALIGNMENT_BYTES == 0 and slot.count > 0
            assert slot.start == placed[slot.name]
            placed[slot.name] += slot.count
            end = slot.offset + slot.count * slot.dtype.itemsize
        assert end <= bucket_bytes
    assert placed == {name: math.prod(shape) for name, shape, _ in manifest}


def test_a_bucket_too_small_for_one_element_is_an_error():
    """The planner does not loop forever."""
    with pytest.raises(ValueError, match="bucket"):
        make_plan([("w", [3], "int64")], 7)


# -- what goes wrong ------------------------------------------------------------------------------


def test_an_unexpected_version_is_an_error(members):
    members.join(3)
    members.command(1, "receive", 2)
    members.command(2, "receive", 2)
    members.command(0, "send", 1)
    for receiver in (1, 2):
        assert_bounded(members.answer(receiver), RuntimeError, "version 2.* 1")
    members.answer(0)  # the sender is left alone with its buckets: bounded, either way


def test_the_wait_for_a_rank_that_never_joins_is_bounded(members):
    members.generation += 1
    for rank in (0, 1):
        members.command(rank, "join", members.generation, rank, 3)
    assert_bounded(
        members.answer(0),
        TimeoutError,
        "the trainer of 3 ranks, making the process group",
        r"waited [23]\.\d s.*runtime\.timeout_seconds bounds this wait",
    )
    assert_bounded(members.answer(1), TimeoutError, "rollout rank 1 of 3 ranks, making")


def test_the_wait_for_a_silent_sender_is_bounded(members):
    """In the first exchange, and in a later one, when the names are known."""
    for waiting in ("waiting for names", "waiting for a version"):
        members.join(3)
        if waiting == "waiting for a version":
            members.all(("send", 0), ("receive", 0), ("receive", 0))
        for receiver in (1, 2):
            members.command(receiver, "receive", 1)
        for receiver in (1, 2):
            words = f"rollout rank {receiver} of 3 ranks, {waiting}"
            assert_bounded(members.answer(receiver), TimeoutError, words, "runtime.timeout_seconds")


def test_the_wait_for_an_absent_receiver_is_bounded(members):
    members.join(3)
    members.command(0, "send", 0)
    members.command(1, "receive", 0)
    assert_bounded(
        members.answer(0), TimeoutError, "the trainer of 3 ranks, sending names", "waited 2"
    )
    members.answer(1)


def test_the_wait_for_a_receiver_that_stops_half_way_is_bounded(members):
    members.join(3, 256)
    members.command(0, "send", 0)
    members.command(1, "receive", 0)
    members.command(2, "receive", 0, 3 * TIMEOUT_SECONDS)
    assert_bounded(members.answer(0), (TimeoutError, ConnectionError), r"bucket \d+ of \d+")
    members.answer(1)
    members.processes[2].kill()
    members.processes[2].join()


def test_a_sender_that_stops_while_a_receiver_loads_is_a_timeout(members):
    """The broadcast began before the receiver waited for it."""
    members.join(2, 2**21)
    members.command(1, "receive_numbers", 0, 0.6 * TIMEOUT_SECONDS)
    members.command(0, "send_and_stall", 0, 2 * TIMEOUT_SECONDS)
    words = r"rollout rank 1 of 2 ranks, bucket 3 of 4: .*for the trainer.*bounds this wait"
    assert_bounded(members.answer(1), TimeoutError, words)
    members.answer(0)


@pytest.mark.parametrize("killed", [0, 2])
def test_a_killed_rank_is_noticed_and_the_others_make_a_channel_without_it(members, killed):
    members.join(3)
    os.kill(members.processes[killed].pid, signal.SIGKILL)
    members.processes[killed].join()
    left = [number for number in range(3) if number != killed]
    for number in left:
        members.command(number, *(("send", 0) if number == 0 else ("receive", 0)))
    for number in left:
        # The two left may still reach each other for a while; nobody waits past the bound.
        assert_bounded(members.answer(number), (ConnectionError, TimeoutError), "of 3 ranks")
    members.generation += 1
    for rank, number in enumerate(left):
        members.command(number, "join", members.generation, rank, 2)
    assert [members.answer(number)[0] for number in left] == [None, None]
    members.command(left[0], "send", 4)
    members.command(left[1], "receive", 4)
    members.answer(left[0])
    assert members.answer(left[1])[0] == digests(make_weights(4))


# -- one device for both groups --------------------------------------------------------------------


def join_on_one_device(members, *how):
    members.generation += 1
    return members.all(
        *[("join_on_one_device", members.generation, rank, *how) for rank in range(2)]
    )


def test_weights_cross_in_memory_that_both_ranks_see(members):
    assert join_on_one_device(members) == [None, None]
    inodes = members.all(("bucket_address",), ("bucket_address",))
    assert inodes[0] == inodes[1] != "0", "one bucket, not two"
    for version in (0, 1, 7):
        assert members.all(("send", version), ("receive", version))[1] == digests(
            make_weights(version)
        )


def test_a_bucket_is_not_filled_before_it_is_read(members):
    join_on_one_device(members)
    members.command(1, "receive", 3, 0.05)
    members.command(0, "send", 3)
    _, seconds = members.answer(0)
    assert members.answer(1)[0] == digests(make_weights(3))
    assert seconds >= 0.05 * len(SHAPES), "the sender waited for the reader"


@pytest.mark.parametrize("how", [(refuse, open_cpu_memory), (share_cpu_memory, refuse)])
def test_memory_that_cannot_be_shared_is_reported_and_weights_are_broadcast(members, how):
    assert join_on_one_device(members, *how)[0] == "invalid device context"
    assert members.all(("send", 4), ("receive", 4))[1] == digests(make_weights(4))


def test_on_one_device_every_wait_is_bounded_too(members):
    join_on_one_device(members)
    members.all(("send", 0), ("receive", 0))
    members.command(0, "send", 1)
    assert_bounded(members.answer(0), TimeoutError, "the trainer of 2 ranks, announcing")
    join_on_one_device(members)
    members.all(("send", 0), ("receive", 0))
    members.command(1, "receive", 1, TIMEOUT_SECONDS + 1.0)  # it reads for too long
    members.command(0, "send", 1)
    words = r"until bucket 1 of \d+ is read: .*waited 2\.\d s"
    assert_bounded(members.answer(0), TimeoutError, words)
    members.processes[1].kill()
    members.processes[1].join()


# -- what listens ---------------------------------------------------------------------------------


def test_ranks_listen_on_loopback_only(members):
    """Joined the way a worker joins. Where the host's own name resolves to loopback the sockets
    alone could not fail, so the variables that make it so are looked at too."""
    members.generation += 1
    members.all(*[("join", members.generation, rank, 3) for rank in range(3)])
    members.all(("send", 0), ("receive", 0), ("receive", 0))
    for number in range(3):
        process = psutil.Process(members.processes[number].pid)
        listening = [
            ipaddress.ip_address(connection.laddr.ip)
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ]
        assert listening and all(address.is_loopback for address in listening)
    environments = members.all(*[("environment",)] * 3)
    assert (
        environments
        == [{"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "HCCL_SOCKET_IFNAME": "lo"}]
        * 3
    )
