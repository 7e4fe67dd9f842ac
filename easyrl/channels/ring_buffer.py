"""The ring buffer: finished groups from rollout workers to train workers, in shared memory.

    rollout worker (put)                                             train worker (get)
      waits for a free slot  ◄───── free pipe: slot numbers ◄─────  Lease.release
      writes the group into it
      publishes the slot     ─────► ready pipe: slot numbers ─────► waits for a ready slot
                                                                    reads the group in place

The process that reads a slot number (8 bytes) from a pipe owns the slot alone. There is no lock
that a killed process could leave held. Reads and writes of 8 bytes are atomic, and the system call
orders memory on Arm as well. Groups are delivered in order of arrival.

`RingBuffer.reclaim` finds the slots of a killed process. While a process writes or reads a slot,
the slot's status word names it. While the slot waits, its number is on a pipe. Only during a move
is neither true, and then the mover's counter is odd. `reclaim` takes all numbers off the pipes and
waits until no living process is in a move. A slot that is then neither on a pipe nor owned by a
living process belonged to a dead one.

Before the trainer frees the slot of a group that it has accepted, it records the iteration in
`taken`. `RingBuffer.delivered` reads the slots, then `taken`: a group in neither of them has to be
generated again.

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing import reduction
from multiprocessing.context import assert_spawning
from typing import Any

import numpy as np
import numpy.typing as npt

from easyrl.channels.shared_memory import anonymous_memory
from easyrl.config import ConfigError
from easyrl.processes import available_memory_bytes
from easyrl.types import RolloutGroup

FREE, WRITING, READY, READING = range(4)
STATE_BITS = 2  # status word: owner << STATE_BITS | state

SETTLE_SECONDS = 0.001  # after this every core sees a plain store, on Arm too
ARRAYS = (  # field of RolloutGroup, element type, its one dimension
    ("prompt_ids", np.int32, "num_prompt_tokens"),
    ("completion_lengths", np.int32, "num_generations"),
    ("completion_ids", np.int32, "num_completion_tokens"),
    ("rollout_logprobs", np.float32, "num_completion_tokens"),
    ("loss_mask", np.bool_, "num_completion_tokens"),
    ("rewards", np.float32, "num_generations"),
    ("advantages", np.float32, "num_generations"),
    ("truncated", np.bool_, "num_generations"),
    ("node_lengths", np.int32, "num_nodes"),
    ("node_parents", np.int32, "num_nodes"),
    ("teacher_prompt_ids", np.int32, "num_teacher_prompt_tokens"),
)
DIMENSIONS = tuple(dict.fromkeys(dimension for *_, dimension in ARRAYS))
FIELDS = ("iteration", "policy_version", "group_index", "prompt_index")
# The status is state and owner in one word: both change in one store.
HEADER = ("status", *FIELDS, *DIMENSIONS)

NEVER = -1
TOKEN_BYTES = 8
ALIGNMENT_BYTES = 64


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

    @property
    def capacities(self) -> dict[str, int]:
        """Maximum length of arrays by their dimension."""
        return {
            "num_prompt_tokens": self.max_prompt_length,
            "num_generations": self.num_generations,
            "num_completion_tokens": self.num_generations * self.max_completion_length,
            "num_nodes": 1 + self.num_generations * self.nodes_per_completion,  # 1: the prompt
            "num_teacher_prompt_tokens": self.max_teacher_prompt_length,
        }

    def arrays(self) -> Iterator[tuple[str, Any, tuple[int, ...]]]:
        """Yield name, element type and shape of each array: `moves` [num_owners], `taken`
        [num_groups], header fields [num_slots], arrays of the groups [num_slots, capacity]."""
        yield "moves", np.int64, (self.num_owners,)
        yield "taken", np.int64, (self.num_groups,)
        for name in HEADER:
            yield name, np.int64, (self.num_slots,)
        for name, element, dimension in ARRAYS:
            yield name, element, (self.num_slots, self.capacities[dimension])

    @property
    def total_bytes(self) -> int:
        """Size of the ring's memory. It never grows."""
        return sum(_num_bytes(element, shape) for _, element, shape in self.arrays())

    def lengths(self, group: RolloutGroup) -> dict[str, int]:
        """Return the header's lengths. Raises ValueError if the group does not fit a slot."""
        lengths: dict[str, int] = {}
        for name, element, dimension in ARRAYS:
            array, most = getattr(group, name), self.capacities[dimension]
            length = lengths.setdefault(dimension, len(array))
            if array.shape != (length,) or array.dtype != element or length > most:
                raise ValueError(
                    f"group of prompt {group.prompt_index}: expected {name} to be "
                    f"{np.dtype(element)} of shape ({length},) and at most {most} long, "
                    f"got {array.dtype} of shape {array.shape}"
                )
        return lengths


def _num_bytes(element: Any, shape: tuple[int, ...]) -> int:
    """Return the size of an array; the next one starts at a multiple of ALIGNMENT_BYTES."""
    num_bytes: int = np.dtype(element).itemsize * math.prod(shape)
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class TokenPipe:
    """A pipe of slot numbers, 8 bytes each. Several processes read and write it."""

    def __init__(self, *fds: int) -> None:
        """`fds`: both ends; none: a new pipe."""
        self.fds = fds or os.pipe()
        for fd in self.fds:  # a reader that is too late must not block
            os.set_blocking(fd, False)

    def receive(self) -> int | None:
        """Return a slot number, or None if there is none."""
        try:
            return int.from_bytes(os.read(self.fds[0], TOKEN_BYTES), sys.byteorder)
        except BlockingIOError:
            return None

    def send(self, slot: int) -> None:
        """Send a slot number. Never blocks: the pipe has capacity for every slot."""
        os.write(self.fds[1], slot.to_bytes(TOKEN_BYTES, sys.byteorder))

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
                f"rollout.max_completion_length ({layout.max_completion_length}) or "
                f"data.max_prompt_length ({layout.max_prompt_length})"
            )
        self._map(layout, anonymous_memory(layout.total_bytes))
        self.taken[:] = NEVER
        self.free_pipe, self.ready_pipe = TokenPipe(), TokenPipe()
        for pipe in (self.free_pipe, self.ready_pipe):
            # A number for every slot fits. One page is left: a write may begin a new one.
            num_bytes = layout.num_slots * TOKEN_BYTES + mmap.PAGESIZE
            try:
                fcntl.fcntl(pipe.fds[1], fcntl.F_SETPIPE_SZ, num_bytes)
            except PermissionError:
                raise ConfigError(
                    f"rollout.ring_slots: expected fewer, because the system does not allow a pipe "
                    f"of {num_bytes} bytes, got {layout.num_slots}"
                ) from None
        for slot in range(layout.num_slots):
            self.free_pipe.send(slot)

    def _map(self, layout: RingLayout, memory_fd: int) -> None:
        self.layout = layout
        self._memory_fd = memory_fd
        memory = mmap.mmap(memory_fd, layout.total_bytes)  # unmapped with the last view of it
        self.slots: dict[str, npt.NDArray[Any]] = {}
        offset = 0
        for name, element, shape in layout.arrays():
            self.slots[name] = np.ndarray(shape, element, memory, offset)
            offset += _num_bytes(element, shape)
        self.moves = self.slots.pop("moves")
        self.taken = self.slots.pop("taken")  # last iteration in which this index was taken

    def __getstate__(self) -> tuple[Any, ...]:
        assert_spawning(self)
        fds = (self._memory_fd, *self.free_pipe.fds, *self.ready_pipe.fds)
        return (self.layout, *(reduction.DupFd(fd) for fd in fds))

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        layout, *handles = state
        memory_fd, *pipe_fds = (handle.detach() for handle in handles)
        self._map(layout, memory_fd)
        self.free_pipe, self.ready_pipe = TokenPipe(*pipe_fds[:2]), TokenPipe(*pipe_fds[2:])

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
        living = [i for i in range(self.layout.num_owners) if i not in dead_owners]
        free: list[int] = []
        ready: list[int] = []
        try:
            while True:
                moves = self.moves[living]
                free += self.free_pipe.drain()
                ready += self.ready_pipe.drain()
                time.sleep(SETTLE_SECONDS)
                statuses = self.slots["status"].tolist()
                time.sleep(SETTLE_SECONDS)
                at_rest = moves % 2 == 0
                if at_rest.all() and (moves == self.moves[living]).all():
                    break  # nobody moved meanwhile: the statuses are one consistent state
                if time.monotonic() > deadline:
                    moving = [i for i, rests in zip(living, at_rest, strict=True) if not rests]
                    raise TimeoutError(
                        f"owners {moving or living} still move slots after {timeout_seconds} s; "
                        "reclaim dead ones in the same call"
                    )
            on_pipes, redelivered = {*free, *ready}, []
            for slot, status in enumerate(statuses):
                state, owner = status & (1 << STATE_BITS) - 1, status >> STATE_BITS
                is_held = state in (WRITING, READING) and owner in living
                if slot in on_pipes or is_held:
                    continue
                if state in (READY, READING):
                    self.slots["status"][slot] = READY
                    redelivered.append(slot)
                else:
                    self.slots["status"][slot] = FREE
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
        the trainer. Of a dead owner, the answer is exact once its slots are reclaimed."""

        def are_published() -> npt.NDArray[np.bool_]:
            states = self.slots["status"] & (1 << STATE_BITS) - 1
            of_iteration: npt.NDArray[np.bool_] = self.slots["iteration"] == iteration
            return np.isin(states, (READY, READING)) & of_iteration

        is_published = are_published()
        time.sleep(SETTLE_SECONDS)
        indices = self.slots["group_index"].copy()
        time.sleep(SETTLE_SECONDS)
        is_published &= are_published()
        time.sleep(SETTLE_SECONDS)
        return {*indices[is_published].tolist(), *np.flatnonzero(self.taken == iteration).tolist()}

    def group(self, slot: int) -> RolloutGroup:
        """Return the group in a leased slot, as views. Raises RuntimeError if it is damaged."""
        fields: dict[str, Any] = {name: int(self.slots[name][slot]) for name in HEADER[1:]}
        lengths = {dimension: fields.pop(dimension) for dimension in DIMENSIONS}
        for name, _, dimension in ARRAYS:
            fields[name] = array = self.slots[name][slot, : lengths[dimension]]
            array.flags.writeable = False
        capacities, sizes = self.layout.capacities, fields["completion_lengths"].tolist()
        fits = all(0 <= lengths[dimension] <= capacities[dimension] for dimension in DIMENSIONS)
        if not fits or min(sizes, default=-1) < 0 or sum(sizes) != lengths["num_completion_tokens"]:
            raise RuntimeError(f"ring slot {slot} is damaged: {lengths}, completions of {sizes}")
        return RolloutGroup(**fields)

    def close(self) -> None:
        """Close this process's descriptors. The memory is freed with the last view of it."""
        for fd in (self._memory_fd, *self.free_pipe.fds, *self.ready_pipe.fds):
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
        self.writable_fd = ring.free_pipe.fds[0]
        self.readable_fd = ring.ready_pipe.fds[0]

    def put(self, group: RolloutGroup) -> bool:
        """Publish a copy of a group; return False if no slot is free. Raises ValueError."""
        ring, slots = self.ring, self.ring.slots
        lengths = ring.layout.lengths(group)
        slot = self._take(ring.free_pipe, WRITING)
        if slot is None:
            return False
        for name in FIELDS:
            slots[name][slot] = getattr(group, name)
        for dimension, length in lengths.items():
            slots[dimension][slot] = length
        for name, _, dimension in ARRAYS:
            slots[name][slot, : lengths[dimension]] = getattr(group, name)
        with self._move():
            slots["status"][slot] = READY
            ring.ready_pipe.send(slot)
        return True

    def get(self) -> Lease | None:
        """Lease the next ready group, in order of arrival; return None if there is none."""
        slot = self._take(self.ring.ready_pipe, READING)
        return None if slot is None else Lease(self.ring.group(slot), partial(self.free_slot, slot))

    def free_slot(self, slot: int) -> None:
        """Free a slot that this worker owns (`Lease.release`)."""
        with self._move():
            self.ring.slots["status"][slot] = FREE
            self.ring.free_pipe.send(slot)

    def _take(self, pipe: TokenPipe, state: int) -> int | None:
        with self._move():
            slot = pipe.receive()
            if slot is not None:
                self.ring.slots["status"][slot] = self.owner_id << STATE_BITS | state
        return slot

    @contextlib.contextmanager
    def _move(self) -> Iterator[None]:
        """Keep the owner's move counter odd: a slot may be neither on a pipe nor owned."""
        moves, owner_id = self.ring.moves, self.owner_id
        odd = int(moves[owner_id]) | 1
        moves[owner_id] = odd
        yield
        moves[owner_id] = odd + 1  # no `finally`: an interrupted move leaves a slot to reclaim
