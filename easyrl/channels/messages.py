"""Groups and rollouts as bytes, and the rollout worker's port where there is no shared ring.

    rollout worker ──group──► its host ──Ray──► host of train rank 0 ──RingPort.put──► ring
        ▲                        │                                                      │
        └── token, as of a free slot ◄──────────── acknowledged ◄──────────────────────┘

A worker has MAX_UNACKNOWLEDGED tokens. It gives one for each group, and gets it back when the group
is in the ring. So a full ring stops the engines here as it does on one machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from easyrl.channels.ring_buffer import ARRAYS, DIMENSIONS, FIELDS, RingLayout
from easyrl.types import RolloutGroup

MAX_UNACKNOWLEDGED = 4
"""Groups of one worker that are on their way. More do not speed it up."""
TOKEN = b"\x01"


def encode_group(group: RolloutGroup) -> bytes:
    """Encode a group whose arrays have the element types of a slot (`RingLayout.lengths`)."""
    lengths = len(group.prompt_ids), group.num_generations, group.num_completion_tokens
    header = np.array([*(getattr(group, name) for name in FIELDS), *lengths], np.int64)
    return b"".join(each.tobytes() for each in (header, *(getattr(group, a) for a, _, _ in ARRAYS)))


def decode_group(message: bytes) -> RolloutGroup:
    """Return the group, as read-only views. Raises ValueError if the message is not whole."""
    names = *FIELDS, *DIMENSIONS
    header = np.frombuffer(message, np.int64, len(names))
    fields: dict[str, Any] = dict(zip(names, header.tolist(), strict=True))
    lengths, offset = {name: fields.pop(name) for name in DIMENSIONS}, header.nbytes
    sizes = [np.dtype(element).itemsize * lengths[name] for _, element, name in ARRAYS]
    if min(lengths.values()) < 0 or offset + sum(sizes) != len(message):
        raise ValueError(f"expected a message with arrays of {lengths}, got {len(message)} bytes")
    for (name, element, dimension), size in zip(ARRAYS, sizes, strict=True):
        fields[name] = np.frombuffer(message, element, lengths[dimension], offset)
        offset += size
    return RolloutGroup(**fields)


@dataclass(frozen=True, slots=True)
class RemoteRing:
    """A rollout worker's access to the ring on another machine, over the pipe to its host. It has
    the methods of `RingBuffer` and `RingPort` that such a worker calls."""

    layout: RingLayout
    pipe: Connection

    def attach(self, owner_id: int) -> RemoteRing:
        return self

    @property
    def writable_fd(self) -> int:
        return self.pipe.fileno()

    def put(self, group: RolloutGroup, timeout_seconds: float) -> bool:
        """Send a group; return False if no token came in time. Raises ValueError if the group does
        not fit a slot of the ring."""
        self.layout.lengths(group)
        if not self.pipe.poll(timeout_seconds):
            return False
        self.pipe.recv_bytes()
        self.pipe.send_bytes(encode_group(group))
        return True
