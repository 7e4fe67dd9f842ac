"""An update's groups, cut into micro-steps: one forward and backward of all train ranks.

    GroupStream ──► groups ──► rollouts in order ──► MicroStep: rank 0's, rank 1's, …

All ranks have nearly the same number of tokens in a step, for they wait for each other layer by
layer. With `Packing.fill` a step is as large as it may be, so that its boundaries and who trains
what are functions of the groups' order and lengths alone; otherwise whatever is there is trained at
once, unless it is very little (MIN_SHARE).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from easyrl.channels.ring_buffer import Lease
from easyrl.data.packing import MicroBatch, Rollout, pack, split_group
from easyrl.types import RolloutGroup
from easyrl.workers.group_stream import GroupStream

MIN_SHARE = 0.1
"""How full a micro-batch is at least while more groups are to come: small ones cost more a token
(27 % more at 600 tokens than at 4096, tiny on one core)."""


NOTHING = pack(
    [
        Rollout(
            prompt_index=-1,
            prompt_ids=np.zeros(1, dtype=np.int32),
            completion_ids=np.zeros(1, dtype=np.int32),
            rollout_logprobs=np.zeros(1, dtype=np.float32),
            loss_mask=np.zeros(1, dtype=np.bool_),
            advantage=0.0,
        )
    ]
)
"""Of a rank without a rollout. Its one completion token is masked: a loss of 0, a gradient of 0,
and no token in any metric."""


@dataclass(frozen=True, slots=True)
class Packing:
    """What of a group is trained, and how it is laid out: the same on every rank."""

    max_tokens: int
    """Of a rank's micro-batch, at the most."""
    fill: bool
    """Wait for more groups rather than pack less than that."""
    shares_prompts: bool = True
    mask_truncated: bool = False
    keep_zero_advantages: bool = False

    def rollouts(self, group: RolloutGroup) -> list[Rollout]:
        """The group's rollouts that carry a gradient."""
        return split_group(
            group,
            mask_truncated=self.mask_truncated,
            keep_zero_advantages=self.keep_zero_advantages,
        )

    def pack(self, rollouts: Sequence[Rollout]) -> MicroBatch:
        return pack(rollouts, shares_prompts=self.shares_prompts) if rollouts else NOTHING


@dataclass(frozen=True, slots=True)
class PlacedRollout:
    """A rollout, and where another rank finds it: in `Packing.rollouts` of the group in a slot."""

    slot: int
    number: int
    rollout: Rollout


@dataclass(frozen=True, slots=True)
class MicroStep:
    shares: list[list[PlacedRollout]]
    """Of each rank; empty where there are fewer rollouts than ranks."""
    leases: list[Lease]
    """Of the groups that are done with once the shares are packed."""


def micro_steps(stream: GroupStream, packing: Packing, num_ranks: int) -> Iterator[MicroStep]:
    """The stream's update. Whoever takes a step releases its leases."""
    rows = _Rows(packing)
    leases: list[Lease] = []  # of the groups in `rows`
    enough = MIN_SHARE * packing.max_tokens * num_ranks
    while not stream.is_exhausted:
        # Never with every slot in our hands: nothing could come.
        is_small = rows.num_tokens < enough and len(leases) < stream.num_slots
        lease = stream.next(wait=packing.fill or not rows.rows or is_small)
        if lease is not None:
            leases.append(lease)
            for number, rollout in enumerate(packing.rollouts(lease.group)):
                if len(rows.rows) == num_ranks and not rows.has_room_for(rollout):
                    yield MicroStep(share_out(rows, num_ranks), leases[:-1])
                    rows, leases = _Rows(packing), [lease]
                rows.add(PlacedRollout(lease.slot, number, rollout))
        if rows.rows and (lease is None or stream.is_exhausted):
            yield MicroStep(share_out(rows, num_ranks), leases)
            rows, leases = _Rows(packing), []
        elif not rows.rows:  # no rollout of these groups has a gradient
            for lease in leases:
                lease.release()
            leases = []


def share_out(rows: _Rows, num_ranks: int) -> list[list[PlacedRollout]]:
    """The rollouts in order, a part for each rank, the largest as small as can be: the least budget
    is searched for with which filling rows one after another needs no more of them than ranks."""
    if num_ranks == 1:
        return rows.rows
    placed = [each for row in rows.rows for each in row]
    least = max(each.rollout.num_tokens_behind(None) for each in placed)
    most = max(least, rows.packing.max_tokens)
    while least < most:
        middle = (least + most) // 2
        if len(rows.refilled(placed, middle).rows) <= num_ranks:
            most = middle
        else:
            least = middle + 1
    shares = rows.refilled(placed, most).rows
    return shares + [[] for _ in range(num_ranks - len(shares))]


class _Rows:
    """Rollouts in order, filled one after another into rows of at most `packing.max_tokens`."""

    def __init__(self, packing: Packing) -> None:
        self.packing = packing
        self.rows: list[list[PlacedRollout]] = []
        self.num_tokens = 0
        self._num_in_last = 0

    def has_room_for(self, rollout: Rollout) -> bool:
        """In the last row. (A row takes at least one rollout, however long.)"""
        if not self.rows:
            return False
        return self._num_in_last + self._added_by(rollout) <= self.packing.max_tokens

    def add(self, placed: PlacedRollout) -> None:
        if not self.has_room_for(placed.rollout):
            self.rows.append([])
            self._num_in_last = 0
        added = self._added_by(placed.rollout)
        self.rows[-1].append(placed)
        self._num_in_last += added
        self.num_tokens += added

    def _added_by(self, rollout: Rollout) -> int:
        previous = self.rows[-1][-1].rollout if self.rows[-1] else None
        return rollout.num_tokens_behind(previous, shares_prompts=self.packing.shares_prompts)

    def refilled(self, placed: Sequence[PlacedRollout], max_tokens: int) -> _Rows:
        rows = _Rows(replace(self.packing, max_tokens=max_tokens))
        for each in placed:
            rows.add(each)
        return rows
