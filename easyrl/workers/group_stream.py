"""One iteration's groups, off the ring, checked, cut into micro-batches.

    ring ──► GroupStream.next ──► micro_batches ──► MicroBatch, MicroBatch, …

`sync` is `periodic` with one wait: until all groups are in, none is handed on. In deterministic
mode groups come in order of places and a micro-batch is filled before it is trained, so that its
boundaries are a function of the groups alone; otherwise whatever is there is trained at once,
unless it is very little (MIN_SHARE).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from easyrl.channels.ring_buffer import InOrderReader, Lease, RingPort
from easyrl.data.packing import MicroBatch, Rollout, pack, split_group
from easyrl.types import RolloutGroup

MIN_SHARE = 0.25
"""How full a micro-batch is at least while more groups are to come: small ones cost more a token
(27 % more at 600 tokens than at 4096, tiny on one core)."""


class _Reader(Protocol):
    def get(self, timeout_seconds: float) -> Lease | None: ...


class _CheckedPort(RingPort):
    """The ring's end of this process, with every group checked as it arrives."""

    def __init__(self, port: RingPort, check: Callable[[RolloutGroup], None]) -> None:
        super().__init__(port.ring, port.owner_id)
        self._check = check

    def get(self, timeout_seconds: float) -> Lease | None:
        lease = super().get(timeout_seconds)
        if lease is not None:
            self._check(lease.group)
        return lease


class GroupStream:
    """The groups of one iteration, each exactly once and all of one policy."""

    def __init__(
        self,
        port: RingPort,
        *,
        iteration: int,
        policy_version: int,
        num_groups: int,
        in_order: bool,
        wait_for_all: bool,
        wait_for_group: Callable[[], None],
    ) -> None:
        """`wait_for_group` returns when the ring may hold another group."""
        arrivals = _CheckedPort(port, self._check)
        self._reader: _Reader = InOrderReader(arrivals) if in_order else arrivals
        self.num_slots = len(port.ring.slots["prompt_index"])
        self._wait_for_group = wait_for_group
        self._iteration = iteration
        self._policy_version = policy_version
        self._due = set(range(num_groups))  # places
        self._num_awaited = num_groups
        self._arrived: deque[Lease] = deque()
        self._num_to_hold_back = num_groups if wait_for_all else 0
        self.num_trained = 0
        self.completion_tokens = 0

    @property
    def is_exhausted(self) -> bool:
        return not self._num_awaited and not self._arrived

    def next(self, *, wait: bool) -> Lease | None:
        """The next group's lease; None when there is none (yet: only with `wait=False`)."""
        while self._num_awaited and (wait or self._num_to_hold_back or not self._arrived):
            lease = self._reader.get(0.0)
            if lease is not None:
                self._num_awaited -= 1
                self._arrived.append(lease)
                if len(self._arrived) >= max(1, self._num_to_hold_back):
                    self._num_to_hold_back = 0
                    break
            elif wait or self._num_to_hold_back:
                self._wait_for_group()
            else:
                break
        if not self._arrived:
            return None
        lease = self._arrived.popleft()
        self.num_trained += 1
        self.completion_tokens += lease.group.num_completion_tokens
        return lease

    def _check(self, group: RolloutGroup) -> None:
        if group.policy_version != self._policy_version or group.iteration != self._iteration:
            raise RuntimeError(
                f"off-policy group: prompt {group.prompt_index} was rolled out in iteration "
                f"{group.iteration} by policy {group.policy_version}, but iteration "
                f"{self._iteration} trains policy {self._policy_version}"
            )
        if group.place not in self._due:
            raise RuntimeError(
                f"place {group.place} of iteration {self._iteration} has its group already, or is "
                f"none of its places: the group of prompt {group.prompt_index}"
            )
        self._due.remove(group.place)


def micro_batches(stream: GroupStream, *, max_tokens: int, fill: bool) -> Iterator[MicroBatch]:
    """Pack the stream to at most `max_tokens` each, and while more is to come to at least
    MIN_SHARE of that; with `fill`, wait for more rather than pack less.

    A group's slot is given back as soon as its last rollout is packed.
    """
    pending: list[Rollout] = []
    leases: list[Lease] = []  # of the groups in `pending`
    num_tokens = 0
    while not stream.is_exhausted:
        # Never with every slot in our hands: nothing could come.
        is_small = num_tokens < MIN_SHARE * max_tokens and len(leases) < stream.num_slots
        lease = stream.next(wait=fill or not pending or is_small)
        if lease is not None:
            leases.append(lease)
            for rollout in split_group(lease.group):
                added = rollout.num_tokens_behind(pending[-1] if pending else None)
                if pending and num_tokens + added > max_tokens:
                    batch, pending, num_tokens = pack(pending), [], 0
                    added = rollout.num_tokens_behind(None)
                    _release(leases[:-1])
                    leases = [lease]
                    yield batch
                pending.append(rollout)
                num_tokens += added
        if lease is None or stream.is_exhausted or not pending:
            batches = [pack(pending)] if pending else []
            pending, num_tokens = [], 0
            _release(leases)
            leases = []
            yield from batches


def _release(leases: list[Lease]) -> None:
    for lease in leases:
        lease.release()
