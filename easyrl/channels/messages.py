"""Groups and rollouts as bytes, and the rollout worker's port where there is no shared ring.

    rollout worker ──group──► its host ──Ray──► host of train rank 0 ──RingPort.put──► ring
        ▲                        │                                                      │
        └── token, as of a free slot ◄──────────── acknowledged ◄──────────────────────┘

A worker has MAX_UNACKNOWLEDGED tokens. It gives one for each group, and gets it back when the group
is in the ring. So a full ring stops the engines here as it does on one machine.

Nothing is pickled: a message is a line of JSON with numbers, element types and lengths, and then
the arrays' bytes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from easyrl.channels.ring_buffer import ARRAYS, FIELDS, RingLayout
from easyrl.types import RolloutGroup

MAX_UNACKNOWLEDGED = 4
"""Groups of one worker that are on their way. More do not speed up a worker whose groups take
longer than a message does."""
TOKEN = b"\x01"

Array = npt.NDArray[Any]


def encode(numbers: Sequence[int], arrays: Sequence[Array]) -> bytes:
    """Encode numbers and one-dimensional arrays."""
    shapes = [(array.dtype.str, len(array)) for array in arrays]
    header = json.dumps([list(numbers), shapes]).encode() + b"\n"
    return b"".join([header, *(np.ascontiguousarray(array).tobytes() for array in arrays)])


def decode(message: bytes) -> tuple[list[int], list[Array]]:
    """Return the numbers, and the arrays as read-only views of the message. Raises ValueError if
    the message is not whole."""
    offset, arrays = message.index(b"\n") + 1, []
    try:
        numbers, shapes = json.loads(message[:offset])
        for dtype, length in shapes:
            arrays.append(np.frombuffer(message, np.dtype(dtype), length, offset))
            offset += arrays[-1].nbytes
    except (TypeError, RecursionError) as error:
        raise ValueError(f"expected the header of a message, got {message[:80]!r}") from error
    if offset != len(message):
        raise ValueError(f"expected a message of {offset} bytes, got {len(message)}")
    return numbers, arrays


def encode_group(group: RolloutGroup) -> bytes:
    numbers = [getattr(group, name) for name in FIELDS]
    return encode(numbers, [getattr(group, name) for name, _, _ in ARRAYS])


def decode_group(message: bytes) -> RolloutGroup:
    numbers, arrays = decode(message)
    names = [name for name, _, _ in ARRAYS]
    fields: dict[str, Any] = dict(zip((*FIELDS, *names), (*numbers, *arrays), strict=True))
    return RolloutGroup(**fields)


@dataclass(frozen=True, slots=True)
class RemoteRing:
    """The pipe to its host, which a rollout worker has in place of the ring."""

    layout: RingLayout
    pipe: Connection

    def attach(self, owner_id: int) -> RemotePort:
        return RemotePort(self)


class RemotePort:
    """A rollout worker's access to the ring on another machine; see `RingPort`."""

    def __init__(self, ring: RemoteRing) -> None:
        self._ring = ring
        self.writable_fd = ring.pipe.fileno()

    def put(self, group: RolloutGroup, timeout_seconds: float) -> bool:
        """Send a group; return False if no token came in time. Raises ValueError if the group does
        not fit a slot of the ring."""
        self._ring.layout.lengths(group)
        if not self._ring.pipe.poll(timeout_seconds):
            return False
        self._ring.pipe.recv_bytes()
        self._ring.pipe.send_bytes(encode_group(group))
        return True
