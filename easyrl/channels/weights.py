"""Weights from the trainer to the rollout workers: in buckets, with a version, bounded in time.

    train rank 0:  announce(version) ─► names ──► bucket 0 ─► bucket 1 ─► … ─► last bucket
    rollout i:     receive ───────────► names ──► pieces ───► pieces ──► … ──► load on arrival

Every arrow is a broadcast in which sender and receivers wait for each other, each for at most
`timeout_seconds`. From names, shapes and dtypes every rank computes how weights are cut into
buckets. Of a rank's two buckets one is broadcast while the other is filled or loaded.

On the CPU of one machine the buckets are memory that all processes open, and where rollout and
train worker share an accelerator there is one bucket, memory of that device. The process group, on
the CPU, then only signals whose turn it is:

    train rank 0:  fill ─► "bucket n is filled" ──────────────────────────► fill …
    rollout i:             ──────────────────────► load ─► "bucket n is read"

Where another process cannot open this memory (on other machines, in some containers), buckets are
broadcast on the CPU.

A process group does not survive the death of a member. A failure closes the channel; what waits for
this end then fails too, until all have ended. The living members then make a channel of the next
generation, and the version is sent again.
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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from easyrl import devices
from easyrl.channels import BUCKET_BYTES, NUM_BUCKETS
from easyrl.channels.shared_memory import anonymous_memory, mark_memory, open_memory
from easyrl.types import Weight, WeightPiece

BUSY_SECONDS, REST_SECONDS = 0.05, 0.001  # busy-poll for this long, then sleep between polls
ALIGNMENT_BYTES = 16


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


def cut_into_buckets(entries: Sequence[Any], bucket_bytes: int) -> list[list[PlannedPiece]]:
    """Cut weights (name, shape, dtype) into buckets, in order."""
    buckets: list[list[PlannedPiece]] = [[]]
    offset = 0
    for name, shape, dtype_name in entries:
        dtype, count = getattr(torch, dtype_name), math.prod(shape)
        assert bucket_bytes >= dtype.itemsize
        start = 0
        while start < count:
            offset = -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            num_free = (bucket_bytes - offset) // dtype.itemsize
            if num_free <= 0:
                buckets.append([])
                offset = 0
                continue
            taken = min(num_free, count - start)
            buckets[-1].append(PlannedPiece(name, tuple(shape), start, taken, dtype, offset))
            offset += taken * dtype.itemsize
            start += taken
    return [bucket for bucket in buckets if bucket]


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
        self.not_shared_reason: str | None = None
        """Reason why no bucket is shared on the device; None: it is, or no device is shared."""
        self._is_cancelled = is_cancelled
        self._group: Any = None
        self._abort: Callable[[], None] = lambda: None
        self._pending: list[tuple[int, Any]] = []  # bucket number and its broadcast
        self._bucket_bytes = endpoint.bucket_bytes
        self._buckets: list[Tensor] = []
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
            self._buckets = [
                torch.empty(self._bucket_bytes, dtype=torch.uint8, device=self._device)
                for _ in range(NUM_BUCKETS)
            ]

    def close(self) -> None:
        """Leave the process group without waiting, and free the buckets. The other members' waits
        for this one fail. Call it on all ends, but not before all have succeeded."""
        self._abort()
        self._group, self._abort = None, lambda: None
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
        weights, entries = list(weights), []
        for weight in weights:
            sent_as = str(dtype or weight.reference.dtype).removeprefix("torch.")
            entries.append((weight.name, tuple(weight.reference.shape), sent_as))
        gathered = (
            gather(weight.materialize().detach(), dtype or weight.reference.dtype)
            for weight in weights
            if weight.reference.numel()
        )
        try:
            return self._send(policy_version, entries, gathered)
        except OSError:
            deque(gathered, maxlen=0)
            raise

    def _send(self, policy_version: int, entries: list[Any], gathered: Iterator[Tensor]) -> int:
        text = json.dumps(entries).encode()
        announced = torch.tensor([policy_version, len(text)], device=self._device)
        self.broadcast(announced, "announcing a version")
        names = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self._device)
        self.broadcast(names, "sending names")
        self._plan = cut_into_buckets(entries, self._bucket_bytes)
        values = torch.empty(0)
        for number, pieces in enumerate(self._plan):
            self._wait_for_all_but(1)  # then the bucket before the last one is free
            self._signal_read(number - len(self._buckets))
            for piece in pieces:
                if piece.start == 0:
                    values = torch.empty(0)  # free this weight before the next is gathered
                    values = next(gathered).reshape(-1)
                part = values[piece.start : piece.start + piece.count]
                piece.view(self._bucket(number)).copy_(part)
            self._start(number)
        self._wait_for_all_but(0)
        for number in range(-len(self._buckets), 0):
            self._signal_read(len(self._plan) + number)
        return sum(piece.num_bytes for pieces in self._plan for piece in pieces)

    def receive(self, policy_version: int) -> Iterator[WeightPiece]:
        """Yield the weights' pieces (ranks above 0). Raises RuntimeError for another version."""
        assert self.rank > 0
        announced = torch.zeros(2, dtype=torch.int64, device=self._device)
        self.broadcast(announced, "waiting for a version")
        version, num_bytes = announced.tolist()
        if version != policy_version:
            raise RuntimeError(
                f"weight channel: expected policy version {policy_version}, got {version}"
            )
        names = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        self.broadcast(names, "waiting for names")
        entries = json.loads(names.cpu().numpy().tobytes())
        self._plan = cut_into_buckets(entries, self._bucket_bytes)
        num_started = 0
        for number, pieces in enumerate(self._plan):
            # The next bucket is received while this one is loaded.
            while num_started < min(number + len(self._buckets), len(self._plan)):
                self._start(num_started)
                num_started += 1
            self._wait_for_all_but(num_started - number - 1)
            for piece in pieces:
                values = piece.view(self._bucket(number))
                yield WeightPiece(piece.name, piece.start, values, piece.shape)
            self._signal_read(number)

    def _join(self, store: Any) -> None:
        store.set(f"rank-{self.rank}", "ready")
        keys = [f"rank-{rank}" for rank in range(self._world_size)]
        self._poll(lambda: store.check(keys))
        made: Future[tuple[Any, Callable[[], None]]] = Future()

        def make() -> None:
            try:
                how = str(self._device), store, self.rank, self._world_size, self._timeout
                group, abort = devices.make_process_group(*how)
                if self._device.type != "cpu":  # these backends connect at the first broadcast
                    group.broadcast([torch.zeros(1, device=self._device)]).wait()
                made.set_result((group, abort))
            except BaseException as error:
                made.set_exception(error)

        # This wait for all ranks cannot be interrupted: the thread may be left behind.
        threading.Thread(target=make, daemon=True, name="weight-channel").start()
        self._poll(made.done)
        self._group, self._abort = made.result()

    def _share_buckets(self, store: Any, device: torch.device | None) -> list[Tensor]:
        """Return the buckets that all processes open, on the CPU (None) or one on a device; or none
        and, of a device, set `not_shared_reason`."""
        memory, handle, reason = torch.empty(0), "", ""
        size = -(-self._bucket_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

        def exchange(text: str, sender: int) -> str:
            key = f"bucket-{sender}"
            if self.rank == sender:
                store.set(key, text)
            self._poll(lambda: store.check([key]))
            return str(store.get(key).decode())

        try:
            if self.rank == 0 and device is None:
                memory, fd = _host_memory(NUM_BUCKETS * size)
                handle = mark_memory(memory.numpy().data, fd)
            elif device is not None and self.rank == 0:
                memory = _shared_bucket(self._bucket_bytes, device)
                handle = devices.share_memory(memory)
        except (OSError, RuntimeError) as error:
            reason = str(error)
        handle = self._bounded("sharing a bucket", lambda: exchange(handle, 0))
        try:
            if self.rank > 0 and handle and device is None:
                memory = torch.frombuffer(open_memory(handle), dtype=torch.uint8)
            elif device is not None and self.rank > 0 and handle:
                memory = devices.open_memory(handle, device)
        except RuntimeError as error:
            reason = str(error)
        for rank in range(1, self._world_size):
            own = partial(exchange, reason, rank)
            reason = self._bounded("opening a bucket", own) or reason
        if handle and not reason:
            return list(torch.split(memory, size))
        self.not_shared_reason = None if device is None else " ".join(reason.split())
        return []

    def _bucket(self, number: int) -> Tensor:
        return self._buckets[number % len(self._buckets)]

    def _signal_read(self, number: int) -> None:
        """Signal from all receivers that a shared bucket is read. A broadcast needs no reply."""
        if self._is_shared and number >= 0:
            devices.synchronize(self._buckets[0].device)
            for rank in range(1, self._world_size):
                what = f"until {self._name_of(number)} is read"
                self.broadcast(torch.zeros(1, dtype=torch.uint8), what, rank)

    def _name_of(self, number: int) -> str:
        return f"bucket {number + 1} of {len(self._plan)}"

    def broadcast(self, tensor: Tensor, what: str, root: int = 0) -> None:
        """Broadcast `tensor` from `root` and wait for the end; `what` names it in errors."""
        self._bounded(what, lambda: self._await(self._begin(tensor, root)))

    def _start(self, number: int) -> None:
        """Start to broadcast the content of a bucket, or that a shared one is filled."""
        last = self._plan[number][-1]
        content = self._bucket(number)[: last.offset + last.num_bytes]
        if self._is_shared:
            devices.synchronize(content.device)
            content = torch.zeros(1, dtype=torch.uint8)
        work = self._bounded(self._name_of(number), lambda: self._begin(content, root=0))
        self._pending.append((number, work))

    def _begin(self, tensor: Tensor, root: int) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.timeout = self._timeout
        return self._group.broadcast([tensor], options)

    def _wait_for_all_but(self, num_newest: int) -> None:
        while len(self._pending) > num_newest:
            number, work = self._pending.pop(0)
            self._bounded(self._name_of(number), partial(self._await, work))

    def _await(self, work: Any) -> None:
        def is_completed() -> bool:
            if self._device.type == "cpu":
                with contextlib.suppress(RuntimeError):  # not yet; an error is raised below again
                    work.wait(timedelta(seconds=0.05))
            return bool(work.is_completed())

        # torch's wait on accelerators is unbounded, or polls only once per millisecond.
        self._poll(is_completed)
        work.wait()  # orders the device's next work after it, or raises its error

    def _poll(self, is_done: Callable[[], bool]) -> None:
        """Wait for at most `timeout_seconds`."""
        started = time.monotonic()
        while not is_done():
            waited = time.monotonic() - started
            if waited > self._timeout.total_seconds():
                raise RuntimeError("Timed out")
            if waited > BUSY_SECONDS and self._is_cancelled():
                raise RuntimeError("cancelled, since another member is lost")
            time.sleep(0.0 if waited < BUSY_SECONDS else REST_SECONDS)

    def _bounded(self, what: str, action: Callable[[], Any]) -> Any:
        started = time.monotonic()
        try:
            return action()
        except (RuntimeError, ValueError) as error:
            self.close()
            waited = time.monotonic() - started
            text, reason = f"weight channel, {self._name}, {what}", str(error).partition("\n")[0]
            # A broadcast may have started, and so time out, before this wait.
            is_late = waited >= 0.9 * self._timeout.total_seconds()
            if not (is_late or "Timed out" in str(error) or "timing out" in str(error)):
                raise ConnectionError(f"{text}: {reason}") from error
            # Gloo passes a broadcast from one receiver to the next.
            by_rank = {0: "a rollout worker", 1: "train-0"}
            awaited = by_rank.get(self.rank, "train-0 or a lower rank")
            raise TimeoutError(
                f"{text}: waited {waited:.1f} s for {awaited} (runtime.timeout_seconds): {reason}"
            ) from error


@functools.cache
def _shared_bucket(num_bytes: int, device: torch.device) -> Tensor:
    """Return the bucket of all generations: torch does not free memory that it has shared."""
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


@functools.cache
def _host_memory(num_bytes: int) -> tuple[Tensor, int]:
    """Return the buckets of all generations on the CPU, and their descriptor."""
    fd = anonymous_memory(num_bytes)
    return torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8), fd
