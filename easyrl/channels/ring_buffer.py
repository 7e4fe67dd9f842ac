"""The ring buffer: finished groups from rollout workers to train workers, in shared memory.

    rollout worker (put)                                             train worker (get)
      waits for a free slot  ◄───── free pipe: slot numbers ◄─────  Lease.release
      writes the group into it
      publishes the slot     ─────► ready pipe: slot numbers ─────► waits for a ready slot
                                                                    reads the group in place

The process that reads a slot's number (8 bytes) from a pipe owns the slot alone. There is no lock
that a killed process could leave held. Reads and writes of 8 bytes are atomic, and the system call
orders memory on Arm as well. Groups are delivered in the order of their arrival.

A slot is always in one of three situations:

    waiting    its number is on one of the pipes
    owned      a process writes or reads it, and the slot's status word names that process
    moving     a process has taken the number and not yet written the status, or has written the
               status and not yet sent the number; meanwhile this process's move counter is odd

`RingBuffer.reclaim` finds the slots of a killed process by exclusion. It takes all numbers off the
pipes and waits until no living process is moving a slot. A slot whose number was on no pipe, and
that no living process owns, belonged to a dead process.

Before the trainer frees the slot of a group that it has accepted, it writes the iteration into
`taken` at the group's index. `RingBuffer.delivered` reads the slots first and then `taken`, so that
a group that moves from the one to the other meanwhile is not missed. A group that is in neither has
to be generated again.

Pictures cross as the files that the data has, or that a tool or an agent shows, with the tokens
that stand for each: the trainer's processor makes the model's arrays again, which are the same, and
ten to a hundred times larger.

Shapes: P prompt tokens, G completions of one prompt, ΣR completion tokens of a group.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing import reduction
from multiprocessing.context import assert_spawning
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from easyrl.channels.shared_memory import anonymous_memory
from easyrl.config import ConfigError
from easyrl.processes import available_memory_bytes
from easyrl.types import RolloutGroup

FREE, WRITING, READY, READING = range(4)  # states of a slot
STATE_BITS = 2
"""A status word is `owner << STATE_BITS | state`: state and owner change in one store."""
STATE_MASK = (1 << STATE_BITS) - 1

SETTLE_SECONDS = 0.001  # after this every core sees a plain store, on Arm too


class GroupArray(NamedTuple):
    """One of a group's arrays, as it lies in a slot."""

    name: str  # field of RolloutGroup
    element: type[np.generic]
    dimension: str  # header field with the length of the array, which has one dimension


ARRAYS = (
    GroupArray("prompt_ids", np.int32, "num_prompt_tokens"),
    GroupArray("completion_lengths", np.int32, "num_generations"),
    GroupArray("completion_ids", np.int32, "num_completion_tokens"),
    GroupArray("rollout_logprobs", np.float32, "num_completion_tokens"),
    GroupArray("loss_mask", np.bool_, "num_completion_tokens"),
    GroupArray("rewards", np.float32, "num_generations"),
    GroupArray("advantages", np.float32, "num_generations"),
    GroupArray("truncated", np.bool_, "num_generations"),
    GroupArray("node_lengths", np.int32, "num_nodes"),
    GroupArray("node_parents", np.int32, "num_nodes"),
    GroupArray("teacher_prompt_ids", np.int32, "num_teacher_prompt_tokens"),
    GroupArray("picture_bytes", np.uint8, "num_picture_bytes"),
    GroupArray("picture_lengths", np.int32, "num_pictures"),
    GroupArray("shown_files", np.int32, "num_shown"),
    GroupArray("shown_starts", np.int32, "num_shown"),
    GroupArray("shown_stops", np.int32, "num_shown"),
)
DIMENSIONS = tuple(dict.fromkeys(array.dimension for array in ARRAYS))  # each once, in order
FIELDS = ("iteration", "policy_version", "group_index", "prompt_index")
HEADER = ("status", *FIELDS, *DIMENSIONS)  # a slot's integers

NEVER = -1  # in `taken`: no group of this index has been taken
TOKEN_BYTES = 8  # a slot's number on a pipe
ALIGNMENT_BYTES = 64  # of arrays in the shared memory: a cache line


class SharedArray(NamedTuple):
    """Name, element type and shape of an array in the ring's memory."""

    name: str
    element: Any
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size in memory. The next array starts at a multiple of ALIGNMENT_BYTES."""
        num_bytes: int = np.dtype(self.element).itemsize * math.prod(self.shape)
        return math.ceil(num_bytes / ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class RingLayout:
    """Limits of the ring, and the arrays in its memory that follow from them."""

    num_slots: int  # maximum number of groups in the ring, those being written or read included
    num_generations: int
    max_prompt_length: int  # in tokens
    max_completion_length: int  # in tokens, tool and environment tokens included
    num_owners: int  # owner ids of workers are 0 … num_owners − 1
    num_groups: int  # of an iteration: group indices are 0 … num_groups − 1
    nodes_per_completion: int = 1  # of the group's tree, on average over its completions
    max_teacher_prompt_length: int = 0  # in tokens
    max_picture_bytes: int = 0  # of all image files of a group; 0: there are no pictures
    max_shown: int = 0  # places of a group where a picture is shown

    @property
    def capacities(self) -> dict[str, int]:
        """Maximum length of a slot's arrays, by their dimension."""
        return {
            "num_prompt_tokens": self.max_prompt_length,
            "num_generations": self.num_generations,
            "num_completion_tokens": self.num_generations * self.max_completion_length,
            "num_nodes": 1 + self.num_generations * self.nodes_per_completion,  # 1: the prompt
            "num_teacher_prompt_tokens": self.max_teacher_prompt_length,
            "num_picture_bytes": self.max_picture_bytes,
            "num_pictures": self.max_shown,
            "num_shown": self.max_shown,
        }

    def arrays(self) -> Iterator[SharedArray]:
        """Yield the arrays in the order in which they lie in memory."""
        yield SharedArray("moves", np.int64, (self.num_owners,))
        yield SharedArray("taken", np.int64, (self.num_groups,))
        for name in HEADER:
            yield SharedArray(name, np.int64, (self.num_slots,))
        capacities = self.capacities
        for array in ARRAYS:
            shape = (self.num_slots, capacities[array.dimension])
            yield SharedArray(array.name, array.element, shape)

    @property
    def total_bytes(self) -> int:
        """Size of the ring's memory. It never grows."""
        return sum(array.num_bytes for array in self.arrays())

    def lengths(self, group: RolloutGroup) -> dict[str, int]:
        """Return the lengths for the slot's header, by dimension. Raises ValueError if the group
        does not fit a slot, or if arrays of one dimension differ in length."""
        capacities = self.capacities
        lengths: dict[str, int] = {}
        for name, element, dimension in ARRAYS:
            array = getattr(group, name)
            capacity = capacities[dimension]
            length = lengths.setdefault(dimension, len(array))
            if array.shape != (length,) or array.dtype != element or length > capacity:
                raise ValueError(
                    f"group of prompt {group.prompt_index}: expected {name} to be "
                    f"{np.dtype(element)} of shape ({length},) and at most {capacity} long, "
                    f"got {array.dtype} of shape {array.shape}"
                )
        return lengths


class TokenPipe:
    """A pipe of slot numbers, 8 bytes each. Several processes read and write it."""

    def __init__(self, fds: tuple[int, int] | None = None) -> None:
        """`fds`: descriptors of an open pipe, to read and to write; None: open a new one."""
        self.read_fd, self.write_fd = os.pipe() if fds is None else fds
        for fd in self.fds:  # a process that comes too late for a number must not block
            os.set_blocking(fd, False)

    @property
    def fds(self) -> tuple[int, int]:
        return self.read_fd, self.write_fd

    def reserve(self, num_slots: int) -> None:
        """Give the pipe capacity for `num_slots` numbers, so that `send` never blocks. Raises
        ConfigError if the system does not allow it."""
        # One page more than the numbers need: a write may begin a new page.
        num_bytes = num_slots * TOKEN_BYTES + mmap.PAGESIZE
        try:
            fcntl.fcntl(self.write_fd, fcntl.F_SETPIPE_SZ, num_bytes)
        except PermissionError:
            raise ConfigError(
                f"rollout.ring_slots: expected fewer, because the system does not allow a pipe "
                f"of {num_bytes} bytes, got {num_slots}"
            ) from None

    def receive(self) -> int | None:
        """Return a slot number, or None if there is none."""
        try:
            return int.from_bytes(os.read(self.read_fd, TOKEN_BYTES), sys.byteorder)
        except BlockingIOError:
            return None

    def send(self, slot: int) -> None:
        """Send a slot number. Never blocks: the pipe has capacity for every slot."""
        os.write(self.write_fd, slot.to_bytes(TOKEN_BYTES, sys.byteorder))

    def drain(self) -> list[int]:
        """Take all slot numbers off the pipe, in order."""
        return list(iter(self.receive, None))


class RingBuffer:
    """The shared memory and its two pipes, without a name. Spawned workers call `attach`."""

    def __init__(self, layout: RingLayout) -> None:
        """Raises ConfigError if the memory is too small."""
        available_bytes = available_memory_bytes()
        if layout.total_bytes > available_bytes:
            raise ConfigError(
                f"the ring buffer needs {layout.total_bytes / 2**20:,.0f} MiB, but this machine "
                f"and its cgroup have {available_bytes / 2**20:,.0f} MiB left: lower "
                f"rollout.ring_slots ({layout.num_slots}), "
                f"rollout.num_generations ({layout.num_generations}), "
                f"rollout.max_completion_length ({layout.max_completion_length}), "
                f"data.max_prompt_length ({layout.max_prompt_length}) or, with pictures, "
                f"data.max_image_bytes ({layout.max_picture_bytes})"
            )
        self._map(layout, anonymous_memory(layout.total_bytes))
        self.taken[:] = NEVER
        self.free_pipe = TokenPipe()
        self.ready_pipe = TokenPipe()
        self.free_pipe.reserve(layout.num_slots)
        self.ready_pipe.reserve(layout.num_slots)
        for slot in range(layout.num_slots):
            self.free_pipe.send(slot)

    def _map(self, layout: RingLayout, memory_fd: int) -> None:
        self.layout = layout
        self._memory_fd = memory_fd
        memory = mmap.mmap(memory_fd, layout.total_bytes)  # unmapped with the last view of it
        self.slots: dict[str, npt.NDArray[Any]] = {}
        """Arrays whose first dimension is the slot: header fields and arrays of the groups."""
        offset = 0
        for array in layout.arrays():
            self.slots[array.name] = np.ndarray(array.shape, array.element, memory, offset)
            offset += array.num_bytes
        self.moves = self.slots.pop("moves")
        """[num_owners] Move counters: odd while this owner moves a slot."""
        self.taken = self.slots.pop("taken")
        """[num_groups] The last iteration in which the group of this index was taken."""

    @property
    def statuses(self) -> npt.NDArray[Any]:
        """[num_slots] The status words."""
        return self.slots["status"]

    @property
    def _fds(self) -> tuple[int, ...]:
        return (self._memory_fd, *self.free_pipe.fds, *self.ready_pipe.fds)

    def __getstate__(self) -> tuple[Any, ...]:
        assert_spawning(self)
        return (self.layout, *(reduction.DupFd(fd) for fd in self._fds))

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        layout, *handles = state
        fds = [handle.detach() for handle in handles]
        memory_fd, free_reader, free_writer, ready_reader, ready_writer = fds
        self._map(layout, memory_fd)
        self.free_pipe = TokenPipe((free_reader, free_writer))
        self.ready_pipe = TokenPipe((ready_reader, ready_writer))

    def attach(self, owner_id: int) -> RingPort:
        """Return this process's port. Only one living worker, and one thread, may use an owner id.
        Raises ValueError if the id's last owner died during a move and was not reclaimed."""
        assert 0 <= owner_id < self.layout.num_owners
        if self.moves[owner_id] % 2:
            raise ValueError(f"owner {owner_id} died during a move: reclaim it first")
        return RingPort(self, owner_id)

    def reclaim(self, *dead_owners: int, timeout_seconds: float = 5.0) -> None:
        """Recover the slots of dead owners: those being written become free, those being read (or
        finished but not published) become ready. Call from one process at a time. Raises
        TimeoutError, with the ring unchanged, if another owner stays in a move: call again with all
        dead owners."""
        assert all(0 <= owner < self.layout.num_owners for owner in dead_owners)
        deadline = time.monotonic() + timeout_seconds
        living = [owner for owner in range(self.layout.num_owners) if owner not in dead_owners]
        free: list[int] = []
        ready: list[int] = []
        try:
            while True:
                moves = self.moves[living]
                free += self.free_pipe.drain()
                ready += self.ready_pipe.drain()
                time.sleep(SETTLE_SECONDS)
                statuses = self.statuses.tolist()
                time.sleep(SETTLE_SECONDS)
                is_at_rest = moves % 2 == 0
                has_not_moved = moves == self.moves[living]
                if is_at_rest.all() and has_not_moved.all():
                    break  # nobody moved meanwhile: the statuses are one consistent state
                if time.monotonic() > deadline:
                    moving = np.array(living)[~is_at_rest].tolist()
                    raise TimeoutError(
                        f"owners {moving or living} still move slots after {timeout_seconds} s; "
                        "reclaim dead ones in the same call"
                    )
            on_pipes = {*free, *ready}
            redelivered = []
            for slot, status in enumerate(statuses):
                state = status & STATE_MASK
                owner = status >> STATE_BITS
                is_owned = state in (WRITING, READING) and owner in living
                if slot in on_pipes or is_owned:
                    continue
                if state in (READY, READING):
                    self.statuses[slot] = READY
                    redelivered.append(slot)
                else:
                    self.statuses[slot] = FREE
                    free.append(slot)
            ready = redelivered + ready  # they arrived before those on the pipe
            self.moves[list(dead_owners)] = 0
        finally:
            for slot in free:
                self.free_pipe.send(slot)
            for slot in ready:
                self.ready_pipe.send(slot)

    def delivered(self, iteration: int) -> set[int]:
        """Return the indices of this iteration's groups that are published in a slot, or taken by
        the trainer. For a dead owner, the answer is exact once its slots are reclaimed."""
        # An index belongs to a published group if the slot was published before and after it was
        # read: only then has no other group been written there meanwhile.
        is_published = self._is_published(iteration)
        time.sleep(SETTLE_SECONDS)
        group_indices = self.slots["group_index"].copy()
        time.sleep(SETTLE_SECONDS)
        is_published &= self._is_published(iteration)
        time.sleep(SETTLE_SECONDS)
        in_slots: list[int] = group_indices[is_published].tolist()
        taken: list[int] = np.flatnonzero(self.taken == iteration).tolist()
        return set(in_slots) | set(taken)

    def _is_published(self, iteration: int) -> npt.NDArray[np.bool_]:
        """[num_slots] Whether the slot has a finished group of this iteration."""
        states = self.statuses & STATE_MASK
        of_iteration: npt.NDArray[np.bool_] = self.slots["iteration"] == iteration
        return np.isin(states, (READY, READING)) & of_iteration

    def group(self, slot: int) -> RolloutGroup:
        """Return the group in a leased slot, as views. Raises RuntimeError if it is damaged."""
        lengths = {dimension: int(self.slots[dimension][slot]) for dimension in DIMENSIONS}
        fields: dict[str, Any] = {name: int(self.slots[name][slot]) for name in FIELDS}
        for name, _, dimension in ARRAYS:
            array = self.slots[name][slot, : lengths[dimension]]
            array.flags.writeable = False
            fields[name] = array
        completion_lengths: list[int] = fields["completion_lengths"].tolist()
        picture_lengths: list[int] = fields["picture_lengths"].tolist()
        if not self._is_consistent(lengths, completion_lengths, picture_lengths):
            raise RuntimeError(
                f"ring slot {slot} is damaged: {lengths}, completions of {completion_lengths}, "
                f"pictures of {picture_lengths}"
            )
        return RolloutGroup(**fields)

    def _is_consistent(
        self,
        lengths: Mapping[str, int],
        completion_lengths: list[int],
        picture_lengths: list[int],
    ) -> bool:
        """Whether a header's lengths fit the slot and each other."""
        for dimension, capacity in self.layout.capacities.items():
            if not 0 <= lengths[dimension] <= capacity:
                return False
        if not completion_lengths or min(completion_lengths) < 0:
            return False
        if min(picture_lengths, default=0) < 0:
            return False
        if sum(picture_lengths) != lengths["num_picture_bytes"]:
            return False
        num_completion_tokens = sum(completion_lengths)
        return num_completion_tokens == lengths["num_completion_tokens"]

    def close(self) -> None:
        """Close this process's descriptors. The memory is freed with the last view of it."""
        for fd in self._fds:
            os.close(fd)


@dataclass(frozen=True, slots=True)
class Lease:
    """A group to read in place until its release."""

    group: RolloutGroup
    release: Callable[[], None]  # frees the slot; call it once


class RingPort:
    """One worker's access to the ring. `multiprocessing.connection.wait` returns `writable_fd` when
    a slot is free and `readable_fd` when a group is ready. Another worker may still be faster."""

    def __init__(self, ring: RingBuffer, owner_id: int) -> None:
        self.ring = ring
        self.owner_id = owner_id
        self.writable_fd = ring.free_pipe.read_fd
        self.readable_fd = ring.ready_pipe.read_fd

    def put(self, group: RolloutGroup) -> bool:
        """Publish a copy of a group; return False if no slot is free. Raises ValueError if the
        group does not fit a slot."""
        slots = self.ring.slots
        lengths = self.ring.layout.lengths(group)
        slot = self._take(self.ring.free_pipe, WRITING)
        if slot is None:
            return False
        for name in FIELDS:
            slots[name][slot] = getattr(group, name)
        for dimension, length in lengths.items():
            slots[dimension][slot] = length
        for name, _, dimension in ARRAYS:
            slots[name][slot, : lengths[dimension]] = getattr(group, name)
        with self._move():
            self.ring.statuses[slot] = READY
            self.ring.ready_pipe.send(slot)
        return True

    def get(self) -> Lease | None:
        """Lease the next ready group, in order of arrival; return None if there is none."""
        slot = self._take(self.ring.ready_pipe, READING)
        if slot is None:
            return None
        return Lease(self.ring.group(slot), release=partial(self.free_slot, slot))

    def free_slot(self, slot: int) -> None:
        """Free a slot that this worker owns (`Lease.release`)."""
        with self._move():
            self.ring.statuses[slot] = FREE
            self.ring.free_pipe.send(slot)

    def _take(self, pipe: TokenPipe, state: int) -> int | None:
        """Take a slot off a pipe and own it in this state; return None if the pipe is empty."""
        with self._move():
            slot = pipe.receive()
            if slot is not None:
                self.ring.statuses[slot] = self.owner_id << STATE_BITS | state
        return slot

    @contextlib.contextmanager
    def _move(self) -> Iterator[None]:
        """Keep this owner's move counter odd: the slot may be neither on a pipe nor owned."""
        moves = self.ring.moves
        owner_id = self.owner_id
        # It is odd already if an exception ended this owner's last move.
        odd = int(moves[owner_id]) | 1
        moves[owner_id] = odd
        yield
        # No `finally`: an interrupted move leaves a slot to reclaim.
        moves[owner_id] = odd + 1
