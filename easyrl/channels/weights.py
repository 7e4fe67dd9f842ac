"""Weights from the trainer to the rollout workers: in buckets, with a version, bounded in time.

    train rank 0:  announce(version) ─► names ──► bucket 0 ─► bucket 1 ─► … ─► last bucket
    rollout i:     receive ───────────► names ──► pieces ───► pieces ──► … ──► load on arrival

Every arrow is a broadcast in which sender and receivers wait for each other, each for at most
`timeout_seconds`. "names" are the names, shapes and dtypes of all weights. From them every rank
computes in the same way how the weights are cut into buckets, so nothing else has to be sent. A
rank has two buckets: one is broadcast while the other is filled or loaded.

Buckets are shared instead of sent where all members of the channel can open the same memory: on the
CPU of one machine, and on an accelerator that rollout and train worker share (there is one bucket
then, in that device's memory). The process group, on the CPU, then only signals whose turn it is:

    train rank 0:  fill ─► "bucket n is filled" ──────────────────────────► fill …
    rollout i:             ──────────────────────► load ─► "bucket n is read"

Where a member cannot open the sender's memory (on another machine, in some containers), buckets are
broadcast on the CPU.

A process group does not survive the death of a member. A failure closes the channel; what waits for
this end then fails too, until all ends are closed. The living members then make a channel of the
next generation, and the version is sent again.
"""

import contextlib
import functools
import json
import math
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from easyrl import devices
from easyrl.channels import BUCKET_BYTES, NUM_BUCKETS
from easyrl.channels.shared_memory import anonymous_memory, mark_memory, open_memory
from easyrl.types import Weight, WeightPiece

BUSY_SECONDS = 0.05
REST_SECONDS = 0.001
"""Busy-poll for BUSY_SECONDS, then sleep for REST_SECONDS between polls."""
ALIGNMENT_BYTES = 16  # of pieces in a bucket, and of buckets in shared memory


class WeightEntry(NamedTuple):
    """Description of a weight, sent to the receivers before its elements."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # as sent: "bfloat16"


@dataclass(frozen=True, slots=True)
class PlannedPiece:
    """Position of a piece of a weight in its bucket."""

    name: str
    shape: tuple[int, ...]  # of the whole weight
    start: int  # element of the flattened weight
    count: int  # elements
    dtype: torch.dtype
    offset: int  # byte of the bucket

    @property
    def num_bytes(self) -> int:
        return self.count * self.dtype.itemsize

    def view(self, bucket: Tensor) -> Tensor:
        return bucket[self.offset : self.offset + self.num_bytes].view(self.dtype)


def cut_into_buckets(entries: Sequence[WeightEntry], bucket_bytes: int) -> list[list[PlannedPiece]]:
    """Cut weights into buckets, in order. A weight that does not fit into the rest of a bucket
    continues in the next one."""
    buckets: list[list[PlannedPiece]] = [[]]
    offset = 0
    for name, shape, dtype_name in entries:
        dtype: torch.dtype = getattr(torch, dtype_name)
        assert bucket_bytes >= dtype.itemsize
        num_elements = math.prod(shape)
        start = 0
        while start < num_elements:
            offset = _aligned(offset)
            num_free = (bucket_bytes - offset) // dtype.itemsize
            if num_free <= 0:
                buckets.append([])
                offset = 0
                continue
            count = min(num_free, num_elements - start)
            buckets[-1].append(PlannedPiece(name, shape, start, count, dtype, offset))
            offset += count * dtype.itemsize
            start += count
    return [bucket for bucket in buckets if bucket]


def _aligned(num_bytes: int) -> int:
    return math.ceil(num_bytes / ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class _TimedOut(RuntimeError):
    """A wait in `_poll` has reached the channel's timeout."""


@dataclass(frozen=True, slots=True)
class WeightEndpoint:
    """Settings with which a process opens its end of the channel."""

    store: str  # over which the process group is made (`devices.open_store`)
    rank: int  # 0 sends, the others receive
    world_size: int
    worker: str  # its name, for error messages
    device: str  # of the process group
    timeout_seconds: float
    shared_device: str | None = None  # on which one sender and one receiver both compute
    bucket_bytes: int = BUCKET_BYTES
    generation: int = 0  # of the process group: each is made once, in its own part of the store


class WeightChannel:
    """One rank's end of the channel. Every method may raise ConnectionError, if another member is
    lost or `is_cancelled` becomes true, or TimeoutError; it closes the channel first."""

    def __init__(
        self, endpoint: WeightEndpoint, is_cancelled: Callable[[], bool] = lambda: False
    ) -> None:
        """Join the process group, once all of its ranks are there."""
        self.rank = endpoint.rank
        self._name = f"{endpoint.worker} (rank {endpoint.rank} of {endpoint.world_size})"
        self._world_size = endpoint.world_size
        self._device = torch.device(endpoint.device)
        self._timeout = timedelta(seconds=endpoint.timeout_seconds)
        self._plan: list[list[PlannedPiece]] = []
        """The pieces of each bucket of the version that is being exchanged."""
        self.not_shared_reason: str | None = None
        """Why no bucket is shared on the device; None: one is, or no device is shared."""
        self._is_cancelled = is_cancelled
        self._group: Any = None
        self._abort: Callable[[], None] = lambda: None
        self._pending: list[tuple[int, Any]] = []
        """Broadcasts that have been started, oldest first: bucket number and torch's handle."""
        self._bucket_bytes = endpoint.bucket_bytes
        self._buckets: list[Tensor] = []
        """Bucket n of a version is `_buckets[n % len(_buckets)]`."""
        opened = devices.open_store(endpoint.store, self._timeout)
        store = PrefixStore(f"weights-{endpoint.generation}", opened)
        store.set_timeout(self._timeout)
        self._bounded("making the process group", lambda: self._join(store))
        if endpoint.shared_device is not None:
            assert endpoint.world_size == 2, "one sender and one receiver share a device"
            self._buckets = self._share_buckets(store, torch.device(endpoint.shared_device))
        elif self._device.type == "cpu":
            self._buckets = self._share_buckets(store, None)
        self._is_shared = bool(self._buckets)
        if not self._is_shared:
            for _ in range(NUM_BUCKETS):
                bucket = torch.empty(self._bucket_bytes, dtype=torch.uint8, device=self._device)
                self._buckets.append(bucket)

    def close(self) -> None:
        """Leave the process group without waiting, and free the buckets. The other members' waits
        for this one fail. Call it on all ends, but not before all have succeeded."""
        self._abort()
        self._group = None
        self._abort = lambda: None
        self._pending.clear()
        self._buckets.clear()

    def send(
        self,
        policy_version: int,
        weights: Iterable[Weight],
        *,
        dtype: torch.dtype | None = None,
        gather: Callable[[Tensor, torch.dtype], Tensor] = lambda weight, dtype: weight.to(dtype),
    ) -> int:
        """Broadcast the weights (rank 0); return the bytes sent.

        `gather(weight, dtype)` makes a weight whole, in the order of `weights`, one at a time. All
        that have elements are gathered, even if a receiver is lost: other train ranks gather them
        too. `dtype`: sent dtype (None: the weight's own); what `gather` returns in another is cast.
        """
        assert self.rank == 0
        weights = list(weights)
        entries = []
        for weight in weights:
            dtype_name = str(dtype or weight.reference.dtype).removeprefix("torch.")
            entries.append(WeightEntry(weight.name, tuple(weight.reference.shape), dtype_name))

        def gather_each() -> Iterator[Tensor]:
            for weight in weights:
                if weight.reference.numel() > 0:
                    yield gather(weight.materialize().detach(), dtype or weight.reference.dtype)

        gathered = gather_each()
        try:
            return self._send(policy_version, entries, gathered)
        except OSError:
            deque(gathered, maxlen=0)  # gather the rest, and keep nothing of it
            raise

    def _send(
        self, policy_version: int, entries: list[WeightEntry], gathered: Iterator[Tensor]
    ) -> int:
        self._announce(policy_version, entries)
        self._plan = cut_into_buckets(entries, self._bucket_bytes)
        values = torch.empty(0)
        for number, pieces in enumerate(self._plan):
            self._wait_for_all_but(1)  # then the bucket before the last one is free
            self._signal_read(number - len(self._buckets))
            for piece in pieces:
                if piece.start == 0:
                    # Free this weight before the next is gathered: no name may refer to a part.
                    values = torch.empty(0)
                    values = next(gathered).reshape(-1)
                place = piece.view(self._bucket(number))
                place.copy_(values[piece.start : piece.start + piece.count])
            self._start(number)
        self._wait_for_all_but(0)
        num_buckets = len(self._plan)
        for number in range(num_buckets - len(self._buckets), num_buckets):  # the last ones
            self._signal_read(number)
        num_bytes = 0
        for pieces in self._plan:
            num_bytes += sum(piece.num_bytes for piece in pieces)
        return num_bytes

    def _announce(self, policy_version: int, entries: list[WeightEntry]) -> None:
        """Send the version and what the receivers have to know of its weights, as JSON."""
        text = json.dumps(entries).encode()
        announced = torch.tensor([policy_version, len(text)], device=self._device)
        self.broadcast(announced, "announcing a version")
        names = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        names = names.to(self._device)
        self.broadcast(names, "sending names")

    def _receive_entries(self, policy_version: int) -> list[WeightEntry]:
        """Receive what `_announce` sends. Raises RuntimeError for another version."""
        announced = torch.zeros(2, dtype=torch.int64, device=self._device)
        self.broadcast(announced, "waiting for a version")
        version, num_bytes = announced.tolist()
        if version != policy_version:
            raise RuntimeError(
                f"weight channel: expected policy version {policy_version}, got {version}"
            )
        names = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        self.broadcast(names, "waiting for names")
        text = names.cpu().numpy().tobytes()
        entries = []
        for name, shape, dtype in json.loads(text):
            entries.append(WeightEntry(name, tuple(shape), dtype))
        return entries

    def receive(self, policy_version: int) -> Iterator[WeightPiece]:
        """Yield the weights' pieces (ranks above 0). Raises RuntimeError for another version."""
        assert self.rank > 0
        entries = self._receive_entries(policy_version)
        self._plan = cut_into_buckets(entries, self._bucket_bytes)
        num_started = 0
        for number, pieces in enumerate(self._plan):
            # The next bucket is received while this one is loaded.
            num_wanted = min(number + len(self._buckets), len(self._plan))
            while num_started < num_wanted:
                self._start(num_started)
                num_started += 1
            self._wait_for_all_but(num_started - number - 1)
            for piece in pieces:
                values = piece.view(self._bucket(number))
                yield WeightPiece(piece.name, piece.start, values, piece.shape)
            self._signal_read(number)

    def _join(self, store: Any) -> None:
        """Wait until all ranks are there, then make the process group with them."""
        store.set(f"rank-{self.rank}", "ready")
        all_ranks = [f"rank-{rank}" for rank in range(self._world_size)]
        self._poll(lambda: store.check(all_ranks))
        made: Future[tuple[Any, Callable[[], None]]] = Future()

        def make() -> None:
            try:
                group, abort = devices.make_process_group(
                    str(self._device), store, self.rank, self._world_size, self._timeout
                )
                if self._device.type != "cpu":  # these backends connect at the first broadcast
                    group.broadcast([torch.zeros(1, device=self._device)]).wait()
                made.set_result((group, abort))
            except BaseException as error:
                made.set_exception(error)

        # Making the group waits for all ranks and cannot be interrupted. In a thread this process
        # stays able to give up; the thread may be left behind.
        threading.Thread(target=make, daemon=True, name="weight-channel").start()
        self._poll(made.done)
        self._group, self._abort = made.result()

    def _share_buckets(self, store: Any, device: torch.device | None) -> list[Tensor]:
        """Return buckets in memory that all members open: on the CPU (`device` is None), or one on
        a device. Return an empty list where that is impossible, and set `not_shared_reason` in the
        case of a device.

        Rank 0 publishes a handle of its memory, or an empty text. Then each other rank in turn
        publishes why it cannot open the memory, or an empty text."""
        memory = torch.empty(0)
        handle = ""
        reason = ""
        if self.rank == 0:
            try:
                memory, handle = self._make_shared_memory(device)
            except (OSError, RuntimeError) as error:
                reason = str(error)
        handle = self._bounded("sharing a bucket", lambda: self._exchange_text(store, 0, handle))
        if self.rank > 0 and handle:
            try:
                memory = _open_shared_memory(handle, device)
            except RuntimeError as error:
                reason = str(error)
        for rank in range(1, self._world_size):
            exchange = partial(self._exchange_text, store, rank, reason)
            reason = self._bounded("opening a bucket", exchange) or reason
        if handle and not reason:
            return list(torch.split(memory, _aligned(self._bucket_bytes)))
        if device is not None:
            self.not_shared_reason = " ".join(reason.split())
        return []

    def _make_shared_memory(self, device: torch.device | None) -> tuple[Tensor, str]:
        """Return memory [bytes] for the buckets, and the handle with which others open it."""
        if device is None:
            num_bytes = NUM_BUCKETS * _aligned(self._bucket_bytes)
            memory, fd = _host_memory(num_bytes)
            handle = mark_memory(memory.numpy().data, fd)
        else:
            memory = _shared_bucket(self._bucket_bytes, device)
            handle = devices.share_memory(memory)
        return memory, handle

    def _exchange_text(self, store: Any, sender: int, text: str) -> str:
        """Return the text of the rank `sender`; the others' `text` is not used."""
        key = f"bucket-{sender}"
        if self.rank == sender:
            store.set(key, text)
        self._poll(lambda: store.check([key]))
        received: bytes = store.get(key)
        return received.decode()

    def _bucket(self, number: int) -> Tensor:
        return self._buckets[number % len(self._buckets)]

    def _signal_read(self, number: int) -> None:
        """Exchange the signal that a shared bucket is read: each receiver sends it, and all ranks
        wait for it. A bucket that is broadcast needs no such signal."""
        if not self._is_shared or number < 0:
            return
        devices.synchronize(self._buckets[0].device)
        for rank in range(1, self._world_size):
            what = f"until {self._name_of(number)} is read"
            self.broadcast(_signal(), what, root=rank)

    def _name_of(self, number: int) -> str:
        return f"bucket {number + 1} of {len(self._plan)}"

    def broadcast(self, tensor: Tensor, what: str, root: int = 0) -> None:
        """Broadcast `tensor` from `root` and wait for the end; `what` names it in errors."""
        self._bounded(what, lambda: self._await(self._begin(tensor, root)))

    def _start(self, number: int) -> None:
        """Start to broadcast a bucket: its content, or one byte that says that it is filled, if
        the bucket is shared."""
        last_piece = self._plan[number][-1]
        num_bytes = last_piece.offset + last_piece.num_bytes
        content = self._bucket(number)[:num_bytes]
        if self._is_shared:
            devices.synchronize(content.device)
            content = _signal()
        work = self._bounded(self._name_of(number), lambda: self._begin(content, root=0))
        self._pending.append((number, work))

    def _begin(self, tensor: Tensor, root: int) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.timeout = self._timeout
        return self._group.broadcast([tensor], options)

    def _wait_for_all_but(self, num_newest: int) -> None:
        """Wait until at most the newest `num_newest` broadcasts are pending."""
        while len(self._pending) > num_newest:
            number, work = self._pending.pop(0)
            self._bounded(self._name_of(number), partial(self._await, work))

    def _await(self, work: Any) -> None:
        """Wait for the end of a broadcast, for a bounded time. torch's own wait on accelerators is
        unbounded, or polls only once per millisecond."""

        def is_completed() -> bool:
            if self._device.type == "cpu":
                with contextlib.suppress(RuntimeError):  # not yet; an error is raised below again
                    work.wait(timedelta(seconds=0.05))
            return bool(work.is_completed())

        self._poll(is_completed)
        work.wait()  # orders the device's next work after it, or raises its error

    def _poll(self, is_done: Callable[[], bool]) -> None:
        """Wait for at most `timeout_seconds`. Raises RuntimeError, which `_bounded` explains."""
        started = time.monotonic()
        while not is_done():
            waited = time.monotonic() - started
            if waited > self._timeout.total_seconds():
                raise _TimedOut("Timed out")
            if waited > BUSY_SECONDS and self._is_cancelled():
                raise RuntimeError("cancelled, since another member is lost")
            time.sleep(0.0 if waited < BUSY_SECONDS else REST_SECONDS)

    def _bounded(self, what: str, action: Callable[[], Any]) -> Any:
        """Return `action()`. If it fails, close the channel and raise TimeoutError or
        ConnectionError, which say what this rank was doing (`what`) and for whom it waited."""
        started = time.monotonic()
        try:
            return action()
        except (RuntimeError, ValueError) as error:
            self.close()
            waited = time.monotonic() - started
            text = f"weight channel, {self._name}, {what}"
            reason = str(error).partition("\n")[0]
            if not self._is_timeout(error, waited):
                raise ConnectionError(f"{text}: {reason}") from error
            raise TimeoutError(
                f"{text}: waited {waited:.1f} s for {self._awaited_rank} "
                f"(runtime.timeout_seconds): {reason}"
            ) from error

    def _is_timeout(self, error: Exception, waited_seconds: float) -> bool:
        # A broadcast may have started, and so time out, before this wait.
        if isinstance(error, _TimedOut) or waited_seconds >= 0.9 * self._timeout.total_seconds():
            return True
        # torch has one exception, RuntimeError, for timeouts and for lost connections: only the
        # text tells them apart.
        return "Timed out" in str(error) or "timing out" in str(error)

    @property
    def _awaited_rank(self) -> str:
        """For whom this rank waits. Gloo passes a broadcast from one receiver to the next."""
        if self.rank == 0:
            return "a rollout worker"
        return "train-0" if self.rank == 1 else "train-0 or a lower rank"


def _signal() -> Tensor:
    """Return a message without content: that it arrives says whose turn it is."""
    return torch.zeros(1, dtype=torch.uint8)


def _open_shared_memory(handle: str, device: torch.device | None) -> Tensor:
    """Open the memory [bytes] of rank 0. Raises RuntimeError if that is impossible."""
    if device is None:
        return torch.frombuffer(open_memory(handle), dtype=torch.uint8)
    return devices.open_memory(handle, device)


@functools.cache
def _shared_bucket(num_bytes: int, device: torch.device) -> Tensor:
    """Return the bucket on a shared device. All generations of the channel use the same one, as
    torch does not free memory that it has shared."""
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


@functools.cache
def _host_memory(num_bytes: int) -> tuple[Tensor, int]:
    """Return memory [bytes] for the buckets on the CPU, and its descriptor. All generations of the
    channel use the same memory."""
    fd = anonymous_memory(num_bytes)
    return torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8), fd
