"""Micro-batches of the train ranks: groups are read from the ring, checked, shared out and packed.

    ring ──groups──► rank 0: checks them (GroupReader), fills a micro-step (Rows)
                       │
                       ├─ Share: slots and rollouts ───► rank 1 packs what it reads in these slots
                       │ ◄────────────── PACKED ──────── rank 1
                       │  rank 0 releases the slots; all ranks run forward and backward
                       └─ UpdateEnd ───────────────────► all ranks step the optimizer

A micro-step is one forward and backward of all train ranks. Rank 0 alone holds leases, so that a
group is delivered once and its slot is freed once. The other ranks run the same generator
(`MicroBatches`), fed from a pipe. They wait on pipes, not on the ranks' process group: a wait for
the next group may be long, and `Stop` must get through. Every rank has one micro-batch in every
micro-step (EMPTY if there are fewer rollouts than ranks), so that all ranks reach the same
collectives. If a rank dies, the run ends.

`sync` is `periodic` with one wait: no group is trained before all have arrived. In deterministic
mode groups are trained in order of their group index, and a micro-step is filled before it is
trained: which rank trains a rollout, and when, follows from the groups' order and lengths alone.
Otherwise whatever has arrived is trained at once, unless it is very little (MIN_FILL).

With several updates per iteration, the group index decides which update a group belongs to. If
arrival decided, short completions would be trained first. Groups of later updates wait in their
slots.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from easyrl import events
from easyrl.channels.messages import decode, encode
from easyrl.channels.ring_buffer import Lease, RingPort
from easyrl.config import Config
from easyrl.types import MicroBatch, RolloutGroup
from easyrl.workers.packing import Rollout, pack, split_group

MIN_FILL = 0.05
"""Smallest part of the token budget that is trained while more groups are to come. Small
micro-batches cost more per token (27 % more at 600 tokens than at 4096, tiny model on one core).
With 0.01 or 0.1, iterations of 16 prompts took 2 to 3 % longer."""

_ID = np.zeros(1, np.int32)
EMPTY = pack([Rollout(-1, _ID, _ID, np.zeros(1, np.float32), np.zeros(1, np.bool_), 0.0)])
"""Micro-batch of a rank without a rollout. Its one completion token is masked: the loss and its
gradient are 0, and no metric counts it."""

PACKED = "packed"
"""Message: this rank has packed its share and no longer reads the slots."""

Share = list[tuple[int, int]] | bytes
"""Message: a rank's rollouts in the next micro-step, as (slot of the ring, `Rollout.number`), or
their content (`encode_rollouts`) where the ranks have no ring in common."""


@dataclass(frozen=True, slots=True)
class UpdateEnd:
    """All groups of the update are trained: step the optimizer."""

    num_loss_tokens: int  # unmasked tokens of these groups, rollouts without a gradient included


class Dropped(Exception):
    """The controller has dropped the current iteration."""


class RankPipes:
    """Pipes between train rank 0 (`dispatch`) and the other train ranks (`receive`).

    If one of them dies, the others' pipes raise EOFError or ConnectionError; then the worker ends,
    and the supervisor reports the one that died.
    """

    def __init__(
        self,
        rank: int,
        pipes: Sequence[Connection],
        control: Connection,
        timeout_seconds: float,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`pipes`: of rank 0, one to each other rank; of another rank, the one to rank 0.
        `waiting()` is entered for each wait of `receive`."""
        self.rank = rank
        self.num_ranks = 1 + len(pipes)  # rank 0
        self._pipes = pipes
        self._control = control
        self._timeout_seconds = timeout_seconds
        self._waiting = waiting

    def dispatch(self, message: Any) -> None:
        """Send `message` to all other ranks (rank 0)."""
        self.dispatch_each([message] * len(self._pipes))

    def dispatch_each(self, messages: Sequence[Any]) -> None:
        """Send one message to each other rank (rank 0)."""
        for pipe, message in zip(self._pipes, messages, strict=True):
            pipe.send(message)

    def receive(self) -> Any:
        """Wait for the next message of rank 0, or of the controller, which sends `Stop` to every
        rank."""
        sources = [*self._pipes, self._control]
        ready = wait(sources, timeout=0.0)
        if not ready:
            with self._waiting():
                ready = wait(sources)
        return (self._control if self._control in ready else self._pipes[0]).recv()

    def finish_packing(self) -> None:
        """Report that this rank has packed its share; on rank 0, wait until every rank has.

        Raises TimeoutError if a rank takes too long.
        """
        if self.rank > 0:
            self._pipes[0].send(PACKED)
            return
        for rank, pipe in enumerate(self._pipes, start=1):
            if not pipe.poll(self._timeout_seconds):
                raise TimeoutError(
                    f"train rank {rank} did not pack its share within "
                    f"{self._timeout_seconds:g} s (runtime.timeout_seconds)"
                )
            reply = pipe.recv()
            assert reply == PACKED


class GroupReader:
    """Reader of one iteration's groups from the ring: each exactly once, all of one policy.

    A worker that dies can leave a group twice. The late duplicate is dropped and counted.
    """

    def __init__(
        self,
        config: Config,
        port: RingPort | None,
        expected: tuple[int, int],
        wait_for_group: Callable[[], None],
    ) -> None:
        """`expected`: the iteration, and the policy version that was broadcast at its start.
        `wait_for_group` returns when the ring may hold another group. `port` is None on a rank that
        only receives shares."""
        train = config.train
        self.groups_per_update = train.prompts_per_iteration // train.updates_per_iteration
        self.num_duplicates = 0  # groups dropped
        self.completion_tokens = 0  # of the groups handed out
        self._port = port
        self._expected = expected
        self._previous = expected[0] - 1, expected[1] - train.updates_per_iteration
        taken = () if port is None else np.flatnonzero(port.ring.taken == self._previous[0])
        self._previously_taken = {*map(int, taken)}
        self._wait_for_group = wait_for_group
        self._is_ordered = config.runtime.deterministic
        self._waits_for_all = config.runtime.schedule == "sync"
        self._num_groups = train.prompts_per_iteration
        self._prompts: dict[int, int] = {}  # of the groups that have arrived, by group index
        self._arrived: dict[int, Lease] = {}  # those not handed out, in order of arrival
        self._handed_out: list[int] = []  # group indices

    def next(self, update: int, *, wait: bool) -> Lease | None:
        """Return the next group of an update that has groups left; None, with `wait=False`, if it
        has not arrived yet."""
        while (index := self._available(update)) is None:
            lease = self.port.get(0.0)
            if lease is not None:
                if self._accept(lease.group):
                    self._arrived[lease.group.group_index] = lease
                else:
                    self.num_duplicates += 1
                    lease.release()
            elif wait or self._waits_for_all:
                self._wait_for_group()
            else:
                return None
        lease = self._arrived.pop(index)
        self._handed_out.append(index)
        self.completion_tokens += lease.group.num_completion_tokens
        return lease

    @property
    def num_read(self) -> int:
        """Number of groups handed out so far."""
        return len(self._handed_out)

    def finish_update(self, update: int) -> None:
        """Check that each group up to this update was handed out exactly once."""
        num_groups, got = (update + 1) * self.groups_per_update, sorted(self._handed_out)
        if got != [*range(num_groups)]:
            raise RuntimeError(f"expected groups 0 to {num_groups - 1} once each, got {got}")

    @property
    def port(self) -> RingPort:
        assert self._port is not None
        return self._port

    def _available(self, update: int) -> int | None:
        """Index of the group to hand out now, if it has arrived."""
        if self._waits_for_all and len(self._prompts) < self._num_groups:
            return None
        if self._is_ordered:
            return self.num_read if self.num_read in self._arrived else None
        of_update = (i for i in self._arrived if i // self.groups_per_update == update)
        return next(of_update, None)

    def _accept(self, group: RolloutGroup) -> bool:
        """Return whether the group is new; False if it has been accepted before, in this iteration
        or the previous one. Raises RuntimeError if it is off-policy or not due (docs/design.md,
        Invariants)."""
        got, index = (group.iteration, group.policy_version), group.group_index
        if got == self._previous and index in self._previously_taken:
            return False
        if got != self._expected:
            raise RuntimeError(
                f"off-policy group of prompt {group.prompt_index}: expected iteration "
                f"{self._expected[0] + 1} and policy version {self._expected[1]}, got {got[0] + 1} "
                f"and {got[1]}"
            )
        if self._prompts.get(index) == group.prompt_index:
            return False
        if index in self._prompts or not 0 <= index < self._num_groups:
            raise RuntimeError(
                f"group {index} (prompt {group.prompt_index}) has arrived with another "
                f"prompt in iteration {group.iteration + 1}, or is not one of its groups"
            )
        self._prompts[index] = group.prompt_index
        self.port.ring.taken[index] = group.iteration
        return True


class MicroBatches:
    """One train rank's micro-batches of one iteration.

    Iterate once: for each update its micro-batches, then its UpdateEnd.
    """

    def __init__(
        self,
        config: Config,
        reader: GroupReader,
        pipes: RankPipes,
        *,
        shares_prompts: bool,
        shares_by_message: bool = False,
        check_commands: Callable[[], None] = lambda: None,
        send_weights: Callable[[events.SendWeights], None] = lambda command: None,
    ) -> None:
        """Only rank 0 reads with `reader`. The other ranks call `send_weights`, which gathers the
        weights, when rank 0 does. `shares_by_message`: they cannot read the ring.

        `check_commands` raises Dropped to drop the iteration. It is called while no rank has begun
        the next micro-step or the optimizer's step, so that no rank waits for another one in vain.
        """
        self._config = config
        self._reader = reader
        self._pipes = pipes
        self._shares_prompts = shares_prompts
        self._shares_by_message = shares_by_message
        self._check_commands = check_commands
        self._send_weights = send_weights

    def __iter__(self) -> Iterator[MicroBatch | UpdateEnd]:
        """Yield the micro-batches. Raises RuntimeError for a group that is off-policy or not due,
        and Dropped for a dropped iteration."""
        steps = self._planned() if self._pipes.rank == 0 else self._received()
        for step in steps:
            if isinstance(step, UpdateEnd):
                yield step
                continue
            rollouts, leases = step
            batch = pack(rollouts, shares_prompts=self._shares_prompts) if rollouts else EMPTY
            if not self._shares_by_message:
                self._pipes.finish_packing()
            for lease in leases:
                lease.release()
            yield batch

    def _planned(self) -> Iterator[tuple[list[Rollout], list[Lease]] | UpdateEnd]:
        """Rank 0: read the ring and dispatch the other ranks' shares. Yields its own rollouts, and
        the leases to release once every rank has packed."""
        for update in range(self._config.train.updates_per_iteration):
            self._num_loss_tokens = 0
            for rows, leases in self._micro_steps(update):
                own, *others = share_out(rows, self._pipes.num_ranks)
                self._check_commands()
                self._pipes.dispatch_each([self._message(share) for share in others])
                yield own, leases
            self._check_commands()
            self._reader.finish_update(update)
            end = UpdateEnd(self._num_loss_tokens)
            self._pipes.dispatch(end)
            yield end

    def _message(self, rollouts: list[Rollout]) -> Share:
        if self._shares_by_message:
            return encode_rollouts(rollouts)
        return [(rollout.slot, rollout.number) for rollout in rollouts]

    def _micro_steps(self, update: int) -> Iterator[tuple[Rows, list[Lease]]]:
        """Cut the update's groups into micro-steps: rows of rollouts, one per rank at the most,
        and the leases of the groups that are complete with them."""
        num_ranks, num_slots = self._pipes.num_ranks, self._reader.port.ring.layout.num_slots
        max_tokens = self._config.max_tokens_per_micro_batch
        enough_tokens = MIN_FILL * max_tokens * num_ranks
        waits_until_full = self._config.runtime.deterministic
        mask_truncated = self._config.algorithm.mask_truncated_completions
        num_left = self._reader.groups_per_update
        new_rows = partial(Rows, max_tokens, shares_prompts=self._shares_prompts)
        rows = new_rows()
        leases: list[Lease] = []
        while num_left:
            # Do not wait while this process holds every slot: no group could arrive.
            should_wait = rows.num_tokens < enough_tokens and len(leases) < num_slots
            lease = self._reader.next(update, wait=waits_until_full or not rows.rows or should_wait)
            if lease is not None:
                num_left -= 1
                leases.append(lease)
                mask = lease.group.trained_mask(mask_truncated=mask_truncated)
                self._num_loss_tokens += int(mask.sum())
                for rollout in self._split(lease.group, lease.slot):
                    if len(rows.rows) == num_ranks and not rows.fits(rollout):
                        yield rows, leases[:-1]
                        rows, leases = new_rows(), [lease]
                    rows.add(rollout)
            if rows.rows and (lease is None or not num_left):
                yield rows, leases
                rows, leases = new_rows(), []
            elif not rows.rows:  # no rollout of these groups has a gradient
                for lease in leases:
                    lease.release()
                leases = []

    def _received(self) -> Iterator[tuple[list[Rollout], list[Lease]] | UpdateEnd]:
        """Other ranks: receive shares, and read their rollouts in the slots that rank 0 leases."""
        num_left = self._config.train.updates_per_iteration
        while num_left:
            match self._pipes.receive():
                case list(share):
                    group_of = self._reader.port.ring.group
                    slots = {slot for slot, _ in share}
                    groups = {slot: self._split(group_of(slot), slot) for slot in slots}
                    yield [groups[slot][number] for slot, number in share], []
                case bytes(content):
                    yield decode_rollouts(content), []
                case UpdateEnd() as end:
                    num_left -= 1
                    yield end
                case events.SendWeights() as command:
                    self._send_weights(command)
                case events.Halt():
                    raise Dropped
                case events.Stop():
                    raise SystemExit(0)
                case message:
                    raise RuntimeError(f"expected a share or UpdateEnd, got {message!r}")

    def _split(self, group: RolloutGroup, slot: int) -> list[Rollout]:
        algorithm = self._config.algorithm
        return split_group(
            group,
            slot=slot,
            mask_truncated=algorithm.mask_truncated_completions,
            keep_zero_advantages=algorithm.trains_zero_advantages,
        )


def encode_rollouts(rollouts: Sequence[Rollout]) -> bytes:
    """Encode rollouts for another rank. The prompt of consecutive ones is sent once."""
    numbers: list[int] = []
    arrays: list[Any] = [np.array([rollout.advantage for rollout in rollouts])]
    previous = None
    for rollout in rollouts:
        is_new = previous is None or previous.prompt_index != rollout.prompt_index
        numbers += [rollout.prompt_index, is_new]
        arrays += [rollout.prompt_ids] if is_new else []
        arrays += [rollout.completion_ids, rollout.rollout_logprobs, rollout.loss_mask]
        previous = rollout
    return encode(numbers, arrays)


def decode_rollouts(message: bytes) -> list[Rollout]:
    numbers, (advantages, *rest) = decode(message)
    arrays, rollouts = iter(rest), list[Rollout]()
    for prompt_index, is_new, advantage in zip(
        numbers[::2], numbers[1::2], advantages.tolist(), strict=True
    ):
        prompt_ids = next(arrays) if is_new else rollouts[-1].prompt_ids
        values = next(arrays), next(arrays), next(arrays)
        rollouts.append(Rollout(prompt_index, prompt_ids, *values, advantage))
    return rollouts


class Rows:
    """Rollouts in order, filled one after another into rows of at most `max_tokens`.

    A row takes at least one rollout, however long.
    """

    def __init__(self, max_tokens: int, *, shares_prompts: bool) -> None:
        self.max_tokens = max_tokens
        self.shares_prompts = shares_prompts
        self.rows: list[list[Rollout]] = []
        self.num_tokens = 0
        self._num_free = 0  # tokens of the last row

    def fits(self, rollout: Rollout) -> bool:
        """Return whether the last row has space for it."""
        return bool(self.rows) and self._added_by(rollout, self.rows[-1][-1]) <= self._num_free

    def add(self, rollout: Rollout) -> None:
        previous = None
        if self.fits(rollout):
            previous = self.rows[-1][-1]
        else:
            self.rows.append([])
            self._num_free = self.max_tokens
        num_added = self._added_by(rollout, previous)
        self.rows[-1].append(rollout)
        self._num_free -= num_added
        self.num_tokens += num_added

    def _added_by(self, rollout: Rollout, previous: Rollout | None) -> int:
        return rollout.num_tokens_behind(previous, shares_prompts=self.shares_prompts)


def share_out(rows: Rows, num_ranks: int) -> list[list[Rollout]]:
    """Divide the rollouts, in order, among the ranks so that the largest share is minimal.

    Ranks wait for each other layer by layer, so the largest share decides. A binary search finds
    the smallest budget with which filling rows needs at most `num_ranks` of them.
    """
    if num_ranks == 1:
        return rows.rows
    rollouts = [rollout for row in rows.rows for rollout in row]

    def filled(max_tokens: int) -> list[list[Rollout]]:
        refilled = Rows(max_tokens, shares_prompts=rows.shares_prompts)
        for rollout in rollouts:
            refilled.add(rollout)
        return refilled.rows

    longest = max(rollout.num_tokens_behind(None) for rollout in rollouts)
    budgets = range(longest, max(longest, rows.max_tokens) + 1)  # the last one suffices
    best = bisect_left(budgets, True, key=lambda budget: len(filled(budget)) <= num_ranks)
    shares = filled(budgets[best])
    return shares + [[] for _ in range(num_ranks - len(shares))]
