"""Weights from the trainer to the rollout workers: bucketed, versioned, bounded.

    train rank 0:  announce(version) ─► [names] ─► bucket 0 ─► bucket 1 ─► … ─► last bucket
    rollout i:     receive ───────────► [names] ─► pieces ───► pieces ──► … ──► load as they come

Every arrow is a broadcast in which sender and receivers wait for each other, for at most
`timeout_seconds` each. The process group is the channel's own, not torch's default world: it is
made over a shared store when the membership changes, and thrown away with it.

A weight travels under its parameter name, cut into pieces where it crosses a bucket's end, so
that no more than one bucket is held beside the model, and of weights that are made to be sent one.
Names are sent when they are others than the last time: it may be only some that have changed.
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
from easyrl.types import Weight, WeightPiece

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
        self._manifest: list[tuple[str, int, str]] = []
        self._plan: list[list[_Slot]] | None = None
        store = PrefixStore(f"weights-{membership}", FileStore(store_path, -1))
        store.set_timeout(self._timeout)
        self._group = self._bounded(
            "making the process group",
            lambda: devices.make_process_group(device, store, rank, size, self._timeout),
        )

    @property
    def has_sent(self) -> bool:
        """Whether this membership's receivers have had weights already (rank 0)."""
        return bool(self._manifest)

    def send(self, policy_version: int, weights: Iterable[Weight]) -> int:
        """Broadcast the weights (rank 0), each made when its turn comes. Receivers keep those that
        are not among them.

        Returns the bytes sent. Raises TimeoutError when a receiver does not take part in time.
        """
        assert self.rank == 0
        by_name = {weight.name: weight for weight in weights}
        self._announce(policy_version, [_entry(weight) for weight in by_name.values()])
        assert self._plan is not None
        values = torch.empty(0)
        for number, slots in enumerate(self._plan):
            for slot in slots:
                if slot.start == 0:
                    values = by_name[slot.name].make().detach().reshape(-1)
                slot.view(self._bucket).copy_(values[slot.start : slot.start + slot.count])
            self._broadcast_bucket(number, slots)
        return sum(weight.like.numel() * weight.like.element_size() for weight in by_name.values())

    def receive(self, policy_version: int) -> Iterator[WeightPiece]:
        """The pieces of the weights, in the sender's order (ranks above 0).

        Raises TimeoutError when the sender does not come in time, RuntimeError when it sends
        another version than `policy_version`.
        """
        assert self.rank > 0
        announced = torch.zeros(2, dtype=torch.int64, device=self._device)
        is_first = self._plan is None
        self._broadcast(announced, "waiting for names" if is_first else "waiting for a version")
        version, num_bytes = announced.tolist()
        if version != policy_version:
            raise RuntimeError(
                f"weight channel: version {policy_version} was due, {version} was sent"
            )
        if num_bytes:
            text = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            self._broadcast(text, "waiting for names")
            self._plan = _plan(json.loads(text.cpu().numpy().tobytes()), len(self._bucket))
        assert self._plan is not None
        for number, slots in enumerate(self._plan):
            self._broadcast_bucket(number, slots)
            for slot in slots:
                yield WeightPiece(slot.name, slot.start, slot.view(self._bucket))

    def _announce(self, policy_version: int, manifest: list[tuple[str, int, str]]) -> None:
        """The version, with the names where they are others than the last time."""
        is_new = manifest != self._manifest
        text = json.dumps(manifest).encode() if is_new else b""
        announced = torch.tensor([policy_version, len(text)], device=self._device)
        self._broadcast(announced, "sending names" if is_new else "announcing a version")
        if is_new:
            names = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self._device)
            self._broadcast(names, "sending names")
            self._manifest, self._plan = manifest, _plan(manifest, len(self._bucket))

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


def _entry(weight: Weight) -> tuple[str, int, str]:
    """Name, elements, type: a weight's line in the manifest."""
    like = weight.like
    return weight.name, like.numel(), str(like.dtype).removeprefix("torch.")


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
