"""Micro-batches of the train ranks: groups are read from the ring, checked, packed and shared out.

    ring ──groups──► GroupReader: on-policy, each group once
                          │
                          ▼
                     micro_steps: a micro-batch for each rank; frees the slots
                       │     │
                rank 0 ◄     └─ pipes ─► rank 1, rank 2, …
                all ranks run forward and backward; after UpdateEnd they step the optimizer

A micro-step is one forward and backward of all train ranks. Every rank has one micro-batch in every
micro-step (EMPTY if there are fewer rollouts than ranks), so that all ranks reach the same
collectives.

`sync` is `periodic` with one wait: no group is trained before all have arrived. In deterministic
mode groups are trained in order of their group index, and a micro-step is filled before it is
trained. Otherwise whatever has arrived is trained at once, unless it is very little (MIN_FILL).

With several updates per iteration, the group index decides which update a group belongs to. If
arrival decided, short completions would be trained first.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from easyrl.channels.ring_buffer import Lease, RingPort
from easyrl.config.spec import BatchSpec
from easyrl.layout.row import EMPTY, OpenRow, Rollout, pack, split_group
from easyrl.types import MicroBatch, RolloutGroup

MIN_FILL = 0.05
"""Smallest part of the token budget that is trained while more groups are to come. With 0.01 or
0.1, iterations of 16 prompts took 2 to 3 % longer (tiny model on one core)."""


@dataclass(frozen=True, slots=True)
class UpdateEnd:
    """All groups of the update are trained: step the optimizer."""

    num_loss_tokens: int  # unmasked tokens of these groups, rollouts without a gradient included


class Origin(NamedTuple):
    """What a group was generated for."""

    iteration: int
    policy_version: int


class GroupReader:
    """Reader of one iteration's groups from the ring, all of one policy. A worker that dies can
    leave a group twice: the late duplicate is dropped and counted."""

    def __init__(
        self, spec: BatchSpec, port: RingPort, expected: Origin, wait: Callable[[], None]
    ) -> None:
        """`expected`: the iteration, and the policy version that was broadcast at its start.
        `wait` returns when the ring may hold another group."""
        self.groups_per_update = spec.groups_per_update
        self.num_slots = port.ring.layout.num_slots
        self.num_duplicates = 0  # groups dropped
        self.completion_tokens = 0  # sampled ones of the groups handed out
        self.inserted_tokens = 0  # in the completions of these groups
        self._spec = spec
        self._port = port
        self._expected = expected
        self._previous = Origin(
            expected.iteration - 1, expected.policy_version - spec.updates_per_iteration
        )
        was_taken = port.ring.taken == self._previous.iteration  # [groups]
        self._previously_taken = set(np.flatnonzero(was_taken).tolist())
        self._wait_for_group = wait
        self._prompts: dict[int, int] = {}  # of the groups that have arrived, by group index
        self._arrived: dict[int, Lease] = {}  # those not handed out, in order of arrival

    def next(self, update: int, *, wait: bool) -> Lease | None:
        """Return the update's next group; None, with `wait=False`, if it has not arrived yet."""
        while True:
            index = self._available(update)
            if index is not None:
                return self._hand_out(index)
            lease = self._port.get()
            if lease is None:
                if not wait and not self._spec.waits_for_all:
                    return None
                self._wait_for_group()
            elif self._accept(lease.group):
                self._arrived[lease.group.group_index] = lease
            else:
                self.num_duplicates += 1
                lease.release()

    def _hand_out(self, index: int) -> Lease:
        lease = self._arrived.pop(index)
        num_sampled = int(lease.group.loss_mask.sum())
        self.completion_tokens += num_sampled
        self.inserted_tokens += len(lease.group.completion_ids) - num_sampled
        return lease

    @property
    def num_read(self) -> int:
        """Number of groups handed out so far."""
        return len(self._prompts) - len(self._arrived)

    def finish_update(self, update: int) -> None:
        """Check that the groups up to this update, and no others, were handed out."""
        num_groups = (update + 1) * self.groups_per_update
        got = sorted(self._prompts.keys() - self._arrived.keys())
        if got != list(range(num_groups)):
            raise RuntimeError(f"expected groups 0 to {num_groups - 1} once each, got {got}")

    def _available(self, update: int) -> int | None:
        """Return the index of the update's next group, if that has arrived."""
        has_all = len(self._prompts) == self._spec.prompts_per_iteration
        if self._spec.waits_for_all and not has_all:
            return None
        if self._spec.is_deterministic:
            return self.num_read if self.num_read in self._arrived else None
        for index in self._arrived:
            if index // self.groups_per_update == update:
                return index
        return None

    def _accept(self, group: RolloutGroup) -> bool:
        """Return whether the group is new. Raises RuntimeError if it is off-policy or not due."""
        got = Origin(group.iteration, group.policy_version)
        index = group.group_index
        if got == self._previous and index in self._previously_taken:
            return False
        if got != self._expected:
            expected = self._expected
            raise RuntimeError(
                f"off-policy group of prompt {group.prompt_index}: expected iteration "
                f"{expected.iteration + 1} and policy version {expected.policy_version}, got "
                f"{got.iteration + 1} and {got.policy_version}"
            )
        if self._prompts.get(index) == group.prompt_index:
            return False
        if index in self._prompts or not 0 <= index < self._spec.prompts_per_iteration:
            raise RuntimeError(
                f"group {index} (prompt {group.prompt_index}) has arrived with another "
                f"prompt in iteration {group.iteration + 1}, or is not one of its groups"
            )
        self._prompts[index] = group.prompt_index
        self._port.ring.taken[index] = group.iteration
        return True


def micro_steps(
    spec: BatchSpec, reader: GroupReader, *, num_ranks: int, shares_prompts: bool
) -> Iterator[Sequence[MicroBatch | UpdateEnd]]:
    """Yield what each rank gets: for each update the micro-batches of its micro-steps, then its
    UpdateEnd. Raises RuntimeError for a group that is off-policy or not due."""
    for update in range(spec.updates_per_iteration):
        steps = _UpdateSteps(spec, reader, update, num_ranks, shares_prompts=shares_prompts)
        yield from steps.micro_batches()
        reader.finish_update(update)
        yield [UpdateEnd(steps.num_loss_tokens)] * num_ranks


class _UpdateSteps:
    """The micro-steps of one update: a step is filled until it is full, or nothing else has
    arrived."""

    def __init__(
        self,
        spec: BatchSpec,
        reader: GroupReader,
        update: int,
        num_ranks: int,
        *,
        shares_prompts: bool,
    ) -> None:
        self.num_loss_tokens = 0
        self._spec = spec
        self._reader = reader
        self._update = update
        self._num_ranks = num_ranks
        self._shares_prompts = shares_prompts
        self._num_left = reader.groups_per_update  # groups that are not read
        self._begin_step()

    def _begin_step(self) -> None:
        self._rows = Rows(self._spec.max_tokens, shares_prompts=self._shares_prompts)
        self._leases: list[Lease] = []  # of the groups with rollouts in this step

    def micro_batches(self) -> Iterator[list[MicroBatch]]:
        """Yield a micro-batch for each rank, step after step."""
        while self._num_left:
            lease = self._reader.next(self._update, wait=self._must_wait())
            if lease is not None:
                yield from self._add_group(lease)
            if not self._rows.open_rows:  # no rollout of these groups has a gradient
                while self._leases:
                    self._leases.pop().release()
            elif lease is None or not self._num_left:
                yield self._packed(self._leases)
                self._begin_step()

    def _must_wait(self) -> bool:
        """Whether the step is too small to be trained before another group has arrived."""
        if self._spec.is_deterministic or not self._rows.open_rows:
            return True
        smallest = MIN_FILL * self._spec.max_tokens * self._num_ranks
        is_little = self._rows.num_tokens < smallest
        # Do not wait while this process holds every slot: no group could arrive.
        return is_little and len(self._leases) < self._reader.num_slots

    def _add_group(self, lease: Lease) -> Iterator[list[MicroBatch]]:
        """Add the rollouts of a group, and yield each step that is full meanwhile."""
        self._num_left -= 1
        self._leases.append(lease)
        mask_truncated = self._spec.mask_truncated_completions
        mask = lease.group.trained_mask(mask_truncated=mask_truncated)
        self.num_loss_tokens += int(mask.sum())
        rollouts = split_group(
            lease.group,
            mask_truncated=mask_truncated,
            keep_zero_advantages=self._spec.keeps_zero_advantages,
        )
        for rollout in rollouts:
            if not self._rows.add(rollout, max_rows=self._num_ranks):
                yield self._packed(self._leases[:-1])
                self._begin_step()
                self._leases.append(lease)
                self._rows.add(rollout)

    def _packed(self, complete: list[Lease]) -> list[MicroBatch]:
        """Copy the rollouts, then free the slots of the groups that are complete."""
        step: list[MicroBatch] = []
        for share in share_out(self._rows, self._num_ranks):
            step.append(pack(share, shares_prompts=self._shares_prompts) if share else EMPTY)
        for lease in complete:
            lease.release()
        return step


class Rows:
    """Rollouts in order, filled into rows of at most `max_tokens`, and of one rollout at least."""

    def __init__(self, max_tokens: int, *, shares_prompts: bool) -> None:
        self.max_tokens = max_tokens
        self.shares_prompts = shares_prompts
        self.open_rows: list[OpenRow] = []

    @property
    def rows(self) -> list[list[Rollout]]:
        return [row.rollouts for row in self.open_rows]

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.open_rows)

    def add(self, rollout: Rollout, max_rows: int | None = None) -> bool:
        """Add a rollout to the last row, or to a new one unless there are `max_rows`."""
        if not self._has_room(rollout):
            if len(self.open_rows) == max_rows:
                return False
            self.open_rows.append(OpenRow(shares_prompts=self.shares_prompts))
        self.open_rows[-1].add(rollout)
        return True

    def _has_room(self, rollout: Rollout) -> bool:
        """Whether the last row has room for the rollout."""
        if not self.open_rows:
            return False
        last = self.open_rows[-1]
        return last.num_tokens + last.num_more(rollout) <= self.max_tokens


def share_out(rows: Rows, num_ranks: int) -> list[list[Rollout]]:
    """Divide the rollouts, in order, so that the largest share is minimal (binary search)."""
    if num_ranks == 1:
        return rows.rows
    rollouts = [rollout for row in rows.rows for rollout in row]

    def filled(max_tokens: int) -> list[list[Rollout]]:
        refilled = Rows(max_tokens, shares_prompts=rows.shares_prompts)
        for rollout in rollouts:
            refilled.add(rollout)
        return refilled.rows

    longest = 0  # tokens of a rollout that is alone in its row
    for rollout in rollouts:
        alone = OpenRow(shares_prompts=rows.shares_prompts)
        longest = max(longest, alone.num_more(rollout))
    budgets = range(longest, max(longest, rows.max_tokens) + 1)  # the last one suffices
    best = bisect_left(budgets, True, key=lambda budget: len(filled(budget)) <= num_ranks)
    shares = filled(budgets[best])
    while len(shares) < num_ranks:
        shares.append([])
    return shares
