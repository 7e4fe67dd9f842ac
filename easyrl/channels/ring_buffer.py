"""The ring buffer: finished groups from rollout workers to train workers, in shared memory.

    rollout worker (put)                                             train worker (get)
      waits for a free slot  ◄───── free pipe: slot numbers ◄─────  Lease.release
      writes the group into it
      publishes the slot     ─────► ready pipe: slot numbers ─────► waits for a ready slot
                                                                    reads the group in place

A slot number on a pipe (8 bytes) is the right to use that slot: whoever reads it has the slot,
alone, and nobody else is held up. There is no lock that a killed process could leave held, reads
and writes of 8 bytes are atomic, and the system call orders memory on Arm as well, so a reader
that has the number sees what was written before it was sent. Every wait has a bound.

What a killed process had is found by the supervisor (`RingBuffer.reclaim`). A slot's status word
names its holder; only while a number is between a pipe and a status word is a slot nobody's. An
owner's move counter is odd for just that moment. So: take all numbers off the pipes, and once no
living owner is in such a moment, a slot that is neither on a pipe nor held by the living was the
dead one's. The living meanwhile see empty pipes, and wait.

Delivery is in order of arrival; `InOrderReader` makes it the order of places.

This room knows RolloutGroup and nothing of models, losses, engines or configs.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.context import assert_spawning
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from easyrl.channels.ring_layout import ARRAYS, DIMENSIONS, NO_PROMPT, RingLayout
from easyrl.channels.ring_resources import TokenPipe, anonymous_memory
from easyrl.types import RolloutGroup

if TYPE_CHECKING:
    import torch

FREE, WRITING, READY, READING = range(4)
STATE_BITS = 2  # status word: owner << STATE_BITS | state

SETTLE_SECONDS = 0.001  # a plain store is seen by every core long before this, on Arm too


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """What dead owners had. Groups are (iteration, prompt_index)."""

    unfinished: list[tuple[int, int]]
    """Being written, so lost; without those whose prompt was not written down yet."""
    returned: list[tuple[int, int]]
    """Finished, and not released by a reader: they are delivered again."""


class RingBuffer:
    """The shared memory and its two pipes: made once, handed to spawned workers as an argument.

    A worker calls `attach`; the supervisor calls `reclaim` for workers that died. Nothing has a
    name, so nothing is left behind, whoever is killed. Pickles only while a process is spawned.
    """

    def __init__(self, layout: RingLayout) -> None:
        """Allocate the ring; its memory never grows.

        Raises ValueError where the layout does not fit the memory available, or has more slots
        than the pipes can carry.
        """
        layout.check_memory()
        self._map(layout, anonymous_memory(layout.total_bytes))
        self.slots["prompt_index"][:] = NO_PROMPT
        self.free = TokenPipe.create()
        self.ready = TokenPipe.create()
        if layout.num_slots > self.free.capacity():
            capacity = self.free.capacity()
            self.close()
            raise ValueError(
                f"rollout.ring_slots: expected at most {capacity} (a pipe's capacity on this "
                f"system), got {layout.num_slots}"
            )
        for slot in range(layout.num_slots):
            self.free.send(slot)

    def _map(self, layout: RingLayout, memory_fd: int) -> None:
        self.layout = layout
        self._memory_fd = memory_fd
        self._is_closed = False
        memory = mmap.mmap(memory_fd, layout.total_bytes)  # unmapped with the last view of it
        self.moves: npt.NDArray[np.int64] = np.frombuffer(memory, np.int64, layout.num_owners)
        records = np.frombuffer(
            memory, layout.slot_dtype(), layout.num_slots, layout.slots_offset_bytes
        )
        # Field name -> [num_slots] for the header, [num_slots, capacity] for the arrays.
        self.slots: dict[str, npt.NDArray[Any]] = {
            name: records[name] for name in records.dtype.names or ()
        }
        self.readable = {name: array.view() for name, array in self.slots.items()}
        for array in self.readable.values():
            array.flags.writeable = False

    def __getstate__(self) -> tuple[Any, ...]:
        assert_spawning(self)
        fds = (self._memory_fd, *self.free.fds, *self.ready.fds)
        return (self.layout, *(reduction.DupFd(fd) for fd in fds))

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        layout, *handles = state
        memory_fd, *pipe_fds = (handle.detach() for handle in handles)
        self._map(layout, memory_fd)
        self.free = TokenPipe(*pipe_fds[:2])
        self.ready = TokenPipe(*pipe_fds[2:])

    def attach(self, owner_id: int) -> RingPort:
        """This process's way in. An owner id is one living worker's, and one thread's, alone;
        it can be used again once a dead holder's slots were reclaimed.

        Raises ValueError for an id outside 0 … num_owners − 1, and where its last holder died in
        the middle of a move and was not reclaimed.
        """
        if not 0 <= owner_id < self.layout.num_owners:
            raise ValueError(f"owner_id: expected 0 … {self.layout.num_owners - 1}, got {owner_id}")
        if self.moves[owner_id] % 2:
            raise ValueError(f"owner {owner_id} died in the middle of a move: reclaim it first")
        return RingPort(self, owner_id)

    def reclaim(self, *dead_owners: int, timeout_seconds: float = 5.0) -> Reclaimed:
        """Give back what these dead owners had: slots they wrote become free, groups they read
        (or had finished but not published) become ready. One caller at a time, and not before
        the processes are dead.

        Raises TimeoutError where another owner stays in the middle of a move: it is stopped, or
        dead as well. The ring is then unchanged; call again with all that died.
        """
        assert all(0 <= owner < self.layout.num_owners for owner in dead_owners)
        deadline = time.monotonic() + timeout_seconds
        living = [i for i in range(self.layout.num_owners) if i not in dead_owners]
        free: list[int] = []
        ready: list[int] = []
        try:
            while True:
                moves = self.moves[living]
                free += self.free.drain()
                ready += self.ready.drain()
                time.sleep(SETTLE_SECONDS)
                statuses = self.slots["status"].tolist()
                time.sleep(SETTLE_SECONDS)
                at_rest = moves % 2 == 0
                if at_rest.all() and (moves == self.moves[living]).all():
                    break  # nobody moved between the two looks: what we saw is one state
                if time.monotonic() > deadline:
                    moving = [i for i, rests in zip(living, at_rest, strict=True) if not rests]
                    raise TimeoutError(
                        f"reclaiming owners {list(dead_owners)}: after {timeout_seconds} s "
                        f"owners {moving or living} are still moving slots; if they are dead too, "
                        f"reclaim them in the same call"
                    )
            unfinished: list[tuple[int, int]] = []
            returned: list[tuple[int, int]] = []
            on_pipes = {*free, *ready}
            for slot, status in enumerate(statuses):
                state, owner = status & (1 << STATE_BITS) - 1, status >> STATE_BITS
                is_held = state in (WRITING, READING) and owner in living
                if slot in on_pipes or is_held:
                    continue
                group = (int(self.slots["iteration"][slot]), int(self.slots["prompt_index"][slot]))
                if state in (READY, READING):
                    self.slots["status"][slot] = READY
                    ready.insert(len(returned), slot)  # it came before those still waiting
                    returned.append(group)
                else:
                    if state == WRITING and group[1] != NO_PROMPT:
                        unfinished.append(group)
                    self.clear(slot)
                    free.append(slot)
            self.moves[list(dead_owners)] = 0
            return Reclaimed(unfinished, returned)
        finally:
            for slot in free:
                self.free.send(slot)
            for slot in ready:
                self.ready.send(slot)

    def group(self, slot: int) -> RolloutGroup:
        """The group in a slot that is leased, to this process or to one that told it the number:
        read-only NumPy views of the shared memory."""
        slots = self.readable
        lengths = {dimension: int(slots[dimension][slot]) for dimension in DIMENSIONS}
        return RolloutGroup(
            iteration=int(slots["iteration"][slot]),
            policy_version=int(slots["policy_version"][slot]),
            place=int(slots["place"][slot]),
            prompt_index=int(slots["prompt_index"][slot]),
            **{name: slots[name][slot, : lengths[dimension]] for name, _, dimension in ARRAYS},
        )

    def clear(self, slot: int) -> None:
        """Make a slot free, by its words; its number is for the caller to send."""
        self.slots["status"][slot] = FREE  # first: until then the group is still whole
        self.slots["prompt_index"][slot] = NO_PROMPT

    def close(self) -> None:
        """Close this process's descriptors; a second call does nothing.

        The memory goes with the last view of it.
        """
        if not self._is_closed:
            self._is_closed = True
            for fd in (self._memory_fd, *self.free.fds, *self.ready.fds):
                os.close(fd)


class RingPort:
    """One worker's end of the ring: `put` and `get`.

    `writable_fd` and `readable_fd` become readable (for `multiprocessing.connection.wait`) when a
    slot is free and when a group is ready; another worker may still be faster, so follow with
    `timeout_seconds=0` and expect False or None.
    """

    def __init__(self, ring: RingBuffer, owner_id: int) -> None:
        self.ring = ring
        self.owner_id = owner_id
        self.writable_fd = ring.free.fds[0]
        self.readable_fd = ring.ready.fds[0]

    def put(self, group: RolloutGroup, timeout_seconds: float) -> bool:
        """Copy a group into a free slot and publish it; False where none came free in time.

        Raises ValueError where the group is too large for a slot or its arrays do not fit
        together.
        """
        ring, slots = self.ring, self.ring.slots
        lengths = ring.layout.lengths(group)
        slot = self._take(ring.free, WRITING, timeout_seconds)
        if slot is None:
            return False
        try:
            slots["iteration"][slot] = group.iteration
            slots["prompt_index"][slot] = group.prompt_index  # from here on reclaim can tell it
            slots["policy_version"][slot] = group.policy_version
            slots["place"][slot] = group.place
            for dimension, length in lengths.items():
                slots[dimension][slot] = length
            for name, _, dimension in ARRAYS:
                slots[name][slot, : lengths[dimension]] = getattr(group, name)
        except BaseException:  # a signal's exception: the worker may live on
            self.give_back(slot)
            raise
        with self._move():
            slots["status"][slot] = READY
            ring.ready.send(slot)
        return True

    def get(self, timeout_seconds: float) -> Lease | None:
        """The next ready group, in order of arrival, or None where none came in time.

        It is this worker's until it releases the lease.
        """
        slot = self._take(self.ring.ready, READING, timeout_seconds)
        return None if slot is None else Lease(self, slot)

    def give_back(self, slot: int) -> None:
        """Make a slot of this worker's free again (a lease does it by `release`)."""
        with self._move():
            self.ring.clear(slot)
            self.ring.free.send(slot)

    def _take(self, pipe: TokenPipe, state: int, timeout_seconds: float) -> int | None:
        deadline = time.monotonic() + timeout_seconds
        while pipe.wait(deadline - time.monotonic()):
            with self._move():
                slot = pipe.receive()
                if slot is not None:
                    self.ring.slots["status"][slot] = self.owner_id << STATE_BITS | state
                    return slot
            if time.monotonic() > deadline:  # others were faster each time
                break
        return None

    @contextlib.contextmanager
    def _move(self) -> Iterator[None]:
        """The owner's move counter is odd meanwhile: a slot may be nobody's just now."""
        moves, owner_id = self.ring.moves, self.owner_id
        odd = int(moves[owner_id]) | 1
        moves[owner_id] = odd
        yield
        moves[owner_id] = odd + 1  # not in a finally: a move broken off leaves a slot to reclaim


class Lease:
    """A finished group, read in place. `with port.get(...) as group:` releases it at the end.

    After `release` the slot is another group's: keep no view of it.
    """

    def __init__(self, port: RingPort, slot: int) -> None:
        self._port = port
        self._is_held = True
        self.slot = slot
        """Whoever is told this number while the lease lasts may read the group in place too
        (`RingBuffer.group`)."""
        self.group = port.ring.group(slot)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The group's arrays by field name, as torch views of the same memory. Read only!

        (torch has no read-only tensors, and warns of a NumPy array that is one.)
        """
        import torch

        assert self._is_held, "released"
        slots = self._port.ring.slots
        return {
            name: torch.from_numpy(slots[name][self.slot, : slots[dimension][self.slot]])
            for name, _, dimension in ARRAYS
        }

    def release(self) -> None:
        """Give the slot back; a second call does nothing."""
        if self._is_held:
            self._is_held = False
            self._port.give_back(self.slot)

    def __enter__(self) -> RolloutGroup:
        return self.group

    def __exit__(self, *exc_info: object) -> None:
        self.release()


class InOrderReader:
    """Delivery in order of `place`, from 0 and without gaps, to the ring's only consumer.

    A group that arrives early stays in its slot until its turn. The ring therefore needs a slot
    for every group of an iteration: if the first one is the last to be finished, all others wait
    in their slots for it, and it needs one too.
    """

    def __init__(self, port: RingPort) -> None:
        self._port = port
        self._next = 0
        self._early: dict[int, Lease] = {}

    def get(self, timeout_seconds: float) -> Lease | None:
        """The group whose turn it is, or None where it did not come in time.

        After `readable_fd` woke a loop, call until None: one arrival can end the wait of several.
        Raises RuntimeError where a place's group comes a second time.
        """
        deadline = time.monotonic() + timeout_seconds
        while self._next not in self._early:
            lease = self._port.get(max(0.0, deadline - time.monotonic()))
            if lease is None:
                return None
            place = lease.group.place
            if place < self._next or place in self._early:
                lease.release()
                raise RuntimeError(f"the group of place {place} came twice")
            self._early[place] = lease
        self._next += 1
        return self._early.pop(self._next - 1)
