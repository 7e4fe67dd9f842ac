"""Weights from the trainer to the rollout workers: bucketed, versioned, bounded.

    train rank 0:  announce(version) ─► bucket 0 ─► bucket 1 ─► … ─► last bucket
    rollout i:     receive ───────────► pieces ───► pieces ──► … ──► load as they come

Every arrow is a broadcast in which sender and receivers wait for each other, for at most
`timeout_seconds` each. The process group is the channel's own, not torch's default world: it is
made over a shared store when the membership changes, and thrown away with it.

A weight travels under its parameter name, cut into pieces where it crosses a bucket's end, so
that no more than one bucket is held beside the model.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore, PrefixStore  # type: ignore[attr-defined]

from easyrl import devices
from easyrl.types import WeightPiece

BUCKET_BYTES = 64 * 2**20
ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where a piece stands in its bucket."""

    name: str
    start: int  # element of the flattened weight
    count: int  # elements
    dtype: torch.dtype
    offset: int  # byte of the bucket

    def view(self, bucket: Tensor) -> Tensor:
        size = self.count * self.dtype.itemsize
        return bucket[self.offset : self.offset + size].view(self.dtype)


class WeightChannel:
    """One member of the channel. Made anew whenever a worker joins or leaves."""

    def __init__(
        self,
        store_path: str,
        *,
        membership: int,
        rank: int,
        size: int,
        device: str,
        timeout_seconds: float,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Join membership number `membership` as `rank` of `size`; rank 0 is the sender.

        `store_path` is a file that all members can open. Raises TimeoutError when the others do
        not come within `timeout_seconds`.
        """
        self.rank = rank
        self._size = size
        self._device = torch.device(device)
        self._timeout = timedelta(seconds=timeout_seconds)
        self._bucket = torch.empty(bucket_bytes, dtype=torch.uint8, device=self._device)
        self._plan: list[list[_Slot]] | None = None
        store = PrefixStore(f"weights-{membership}", FileStore(store_path, -1))
        store.set_timeout(self._timeout)
        self._group = self._bounded(
            "making the process group",
            lambda: devices.make_process_group(device, store, rank, size, self._timeout),
        )

    def send(
        self,
        policy_version: int,
        weights: Iterable[tuple[str, Tensor]],
        *,
        dtype: torch.dtype | None = None,
        gather: Callable[[Tensor, torch.dtype], Tensor] = lambda weight, dtype: weight.to(dtype),
    ) -> int:
        """Broadcast the weights (rank 0). Names, shapes and types must be the same every time.

        `gather(weight, dtype)` makes a weight whole and of the `dtype` that is sent (None: its
        own) when its turn comes, in the order of `weights`: one is held at a time.

        Returns the bytes sent. Raises TimeoutError when a receiver does not take part in time.
        """
        assert self.rank == 0
        handles = dict(weights)
        if self._plan is None:
            manifest = [
                (name, t.numel(), str(dtype or t.dtype).removeprefix("torch."))
                for name, t in handles.items()
            ]
            self._send_manifest(json.dumps(manifest).encode())
            self._plan = _plan(manifest, len(self._bucket))
        self._broadcast(torch.tensor([policy_version], device=self._device), "announcing a version")
        name, flat = "", torch.empty(0)
        for number, slots in enumerate(self._plan):
            for slot in slots:
                if slot.name != name:
                    weight = handles[slot.name]
                    name = slot.name
                    flat = gather(weight.detach(), dtype or weight.dtype).reshape(-1)
                slot.view(self._bucket).copy_(flat[slot.start : slot.start + slot.count])
            self._broadcast_bucket(number, slots)
        return sum(slot.count * slot.dtype.itemsize for slots in self._plan for slot in slots)

    def receive(self, policy_version: int) -> Iterator[WeightPiece]:
        """The pieces of the weights, in the sender's order (ranks above 0).

        Raises TimeoutError when the sender does not come in time, RuntimeError when it sends
        another version than `policy_version`.
        """
        assert self.rank > 0
        if self._plan is None:
            self._plan = _plan(json.loads(self._receive_manifest()), len(self._bucket))
        announced = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._broadcast(announced, "waiting for a version")
        if int(announced) != policy_version:
            raise RuntimeError(
                f"weight channel: version {policy_version} was due, {int(announced)} was sent"
            )
        for number, slots in enumerate(self._plan):
            self._broadcast_bucket(number, slots)
            for slot in slots:
                yield WeightPiece(slot.name, slot.start, slot.view(self._bucket))

    def _send_manifest(self, manifest: bytes) -> None:
        self._broadcast(torch.tensor([len(manifest)], device=self._device), "sending names")
        text = torch.frombuffer(bytearray(manifest), dtype=torch.uint8).to(self._device)
        self._broadcast(text, "sending names")

    def _receive_manifest(self) -> bytes:
        length = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._broadcast(length, "waiting for names")
        text = torch.empty(int(length), dtype=torch.uint8, device=self._device)
        self._broadcast(text, "waiting for names")
        return text.cpu().numpy().tobytes()

    def _broadcast_bucket(self, number: int, slots: Sequence[_Slot]) -> None:
        last = slots[-1]
        used = last.offset + last.count * last.dtype.itemsize
        assert self._plan is not None
        self._broadcast(self._bucket[:used], f"bucket {number + 1} of {len(self._plan)}")

    def _broadcast(self, tensor: Tensor, what: str) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = self._timeout
        self._bounded(what, lambda: self._group.broadcast([tensor], options).wait(self._timeout))

    def _bounded(self, what: str, action: Callable[[], Any]) -> Any:
        started = time.monotonic()
        try:
            return action()
        except (RuntimeError, ValueError) as error:
            waited = time.monotonic() - started
            member = "the trainer" if self.rank == 0 else f"rollout member {self.rank}"
            text = f"weight channel, {member} of {self._size} members, {what}: {error}"
            if waited < 0.9 * self._timeout.total_seconds():
                raise ConnectionError(text) from error
            raise TimeoutError(
                f"{text} (waited {waited:.1f} s; runtime.timeout_seconds bounds this wait)"
            ) from error


def _plan(manifest: Sequence[Sequence[Any]], bucket_bytes: int) -> list[list[_Slot]]:
    """Cut weights (name, elements, dtype) into buckets: the same on every member."""
    buckets: list[list[_Slot]] = [[]]
    offset = 0
    for name, count, dtype_name in manifest:
        dtype = getattr(torch, dtype_name)
        start = 0
        while start < count:
            offset = -(-offset // ALIGNMENT) * ALIGNMENT
            if bucket_bytes < dtype.itemsize:
                raise ValueError(f"a bucket of {bucket_bytes} bytes cannot hold a {dtype}")
            room = (bucket_bytes - offset) // dtype.itemsize
            if room <= 0:
                buckets.append([])
                offset = 0
                continue
            taken = min(room, count - start)
            buckets[-1].append(_Slot(name, start, taken, dtype, offset))
            offset += taken * dtype.itemsize
            start += taken
    return [bucket for bucket in buckets if bucket]
