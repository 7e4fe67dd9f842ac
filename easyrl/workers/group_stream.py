"""One iteration's groups, off the ring and checked.

    ring ──► GroupStream.next ──► Lease, Lease, …

`sync` is `periodic` with one wait: until all groups are in, none is handed on. In deterministic
mode groups come in order of places. Of several train ranks the first alone has a stream.

An iteration of several updates hands out one update's groups at a time. Which update a group
belongs to follows from its place in the iteration, never from arrival: else short completions
would be trained first. Groups of later updates wait in their slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from easyrl.channels.ring_buffer import InOrderReader, Lease, RingPort
from easyrl.types import RolloutGroup


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
        num_updates: int = 1,
        mask_truncated: bool = False,
    ) -> None:
        """`wait_for_group` returns when the ring may hold another group. `num_updates` divides
        `num_groups`. With `mask_truncated` truncated completions are not trained."""
        arrivals = _CheckedPort(port, self._check)
        self._reader: _Reader = InOrderReader(arrivals) if in_order else arrivals
        self.num_slots = len(port.ring.slots["prompt_index"])
        self._wait_for_group = wait_for_group
        self._iteration = iteration
        self._policy_version = policy_version
        self._due = set(range(num_groups))  # places
        self._num_awaited = num_groups  # not here yet
        self._waits_for_all = wait_for_all
        self._groups_per_update = num_groups // num_updates
        self._update = 0
        self._num_left = self._groups_per_update  # of this update, not handed out yet
        self._arrived: list[deque[Lease]] = [deque() for _ in range(num_updates)]
        self.mask_truncated = mask_truncated
        self.num_trained = 0
        self.completion_tokens = 0
        self.num_loss_tokens = 0
        """Of this update's groups so far, those of rollouts without a gradient included."""

    @property
    def is_exhausted(self) -> bool:
        """All groups of this update are handed out."""
        return not self._num_left

    def begin_next_update(self) -> None:
        assert self.is_exhausted
        self._update += 1
        self._num_left = self._groups_per_update
        self.num_loss_tokens = 0

    def next(self, *, wait: bool) -> Lease | None:
        """The lease of this update's next group; None when there is none (yet: only with
        `wait=False`)."""
        if self.is_exhausted:
            return None
        arrived = self._arrived[self._update]
        while self._num_awaited and (self._waits_for_all or not arrived):
            lease = self._reader.get(0.0)
            if lease is not None:
                self._num_awaited -= 1
                self._arrived[lease.group.place // self._groups_per_update].append(lease)
            elif wait or self._waits_for_all:
                self._wait_for_group()
            else:
                return None
        lease = arrived.popleft()
        self._num_left -= 1
        self.num_trained += 1
        self.completion_tokens += lease.group.num_completion_tokens
        mask = lease.group.trained_mask(mask_truncated=self.mask_truncated)
        self.num_loss_tokens += int(mask.sum())
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
