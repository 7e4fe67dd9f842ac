"""Groups and rollouts as bytes, and the rollout worker's port where there is no shared ring.

    rollout worker ──group──► its host ──Ray──► host of train rank 0 ──RingPort.put──► ring
        ▲                        │                                                      │
        └── token, as of a free slot ◄──────────── acknowledged ◄──────────────────────┘

A worker starts with MAX_UNACKNOWLEDGED tokens. It spends one for each group that it sends, and gets
it back once the group is in the ring. So a full ring stops the engines here as it does on one
machine.
"""

from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Self

import numpy as np
from safetensors.numpy import load, save

from easyrl.channels.ring_buffer import ARRAYS, FIELDS, RingLayout
from easyrl.types import RolloutGroup

MAX_UNACKNOWLEDGED = 4  # groups of one worker that are on their way; more do not speed it up
TOKEN = b"\x01"  # as a message


def encode_group(group: RolloutGroup) -> bytes:
    """Encode a group in safetensors' format; its numbers are arrays without a dimension."""
    arrays = {}
    for name in FIELDS:
        arrays[name] = np.asarray(getattr(group, name))
    for array in ARRAYS:
        arrays[array.name] = getattr(group, array.name)
    return save(arrays)


def decode_group(message: bytes) -> RolloutGroup:
    """Decode a group. Raises SafetensorError if the message is not whole."""
    fields: dict[str, Any] = load(message)
    for name in FIELDS:
        fields[name] = int(fields[name])
    return RolloutGroup(**fields)


@dataclass(frozen=True, slots=True)
class RemoteRing:
    """A rollout worker's access to the ring on another machine: a `RingBuffer` and a `RingPort`."""

    layout: RingLayout
    pipe: Connection

    def attach(self, owner_id: int) -> Self:
        return self

    @property
    def writable_fd(self) -> int:
        return self.pipe.fileno()

    def put(self, group: RolloutGroup) -> bool:
        """Send a group; return False if the worker has no token. Raises ValueError if the group
        does not fit a slot."""
        self.layout.lengths(group)
        if not self.pipe.poll():
            return False
        self.pipe.recv_bytes()  # spend a token
        self.pipe.send_bytes(encode_group(group))
        return True
