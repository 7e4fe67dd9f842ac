"""The state of each group of an iteration, in one book without processes and without a clock.

                 take              report                  the trainer has it
    WAITING ──────────► GIVEN ──────┬────► REPORTED ─────────────────────────► ACCEPTED
       ▲                  │         │          │
       └────── lost ──────┴─────────│──────────┘ unless it is in the ring
                                    └────► REJECTED, and a fresh prompt waits in the next round

ACCEPTED and REJECTED are final. REPORTED is not: a worker reports a group just before it puts it
into the ring, and may die in between.

Where is a group when its worker dies (`Ledger.on_worker_lost`)?

    WAITING                      where it was: no worker had it
    GIVEN                        WAITING again (*)
    REPORTED, not in the ring    WAITING again: the report is dropped
    REPORTED, in the ring        ACCEPTED: the trainer gets it, or has it
    ACCEPTED, REJECTED           where it was

    (*) On a cluster it can be in the ring although its report was lost with the worker's node. It
        is generated again all the same, and the trainer drops the second one.

In deterministic mode only the replacement of the dead worker takes what waits again; otherwise any
worker does.

The prompts of an iteration are chosen in rounds:

    round 0    the next N prompts of the stream, one per group 0 … N-1
    round 1    the next prompts, one per rejected group, in ascending group index
    …          until no group is missing; in the last round no group is rejected

A round ends when all its groups have arrived: taking the first that finish would favour short
completions. So the prompts of an iteration depend on the rewards alone, not on timing.

In deterministic mode each round is divided among the workers at its start: what an engine does is a
function of its list and the weights. The replacement of a dead worker gets the list again, with the
checksums of the groups that are known: it generates all of it in the same way, and compares and
drops those. Otherwise a worker gets prompts on demand, a few more than its engine has in flight, so
that a faster worker gets more.

An evaluation is a book too, of one round: an answer is final as soon as it is reported.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from easyrl import events
from easyrl.config.algorithm import REPLACEMENT_ROUNDS
from easyrl.config.spec import ScheduleSpec
from easyrl.data.streams import PromptStream
from easyrl.runtime.placement import Placement
from easyrl.types import IndexedPrompt, Prompt

State = Literal["WAITING", "GIVEN", "REPORTED", "ACCEPTED", "REJECTED"]


@dataclass(slots=True)
class Group:
    """A group of the iteration, with one of its prompts. A group whose prompt was rejected is in
    the book once more, under the same index, with its fresh prompt."""

    index: int
    prompt: Prompt
    round: int
    worker: str = ""
    """The worker that took the group last. In deterministic mode it is fixed from the start, also
    for its replacement, which has the same name."""
    state: State = "WAITING"
    report: events.GroupScored | events.PromptEvaluated | None = None
    is_recomputed: bool = False
    """Whether a replacement generates the group again although its report is known, to compare."""
    is_in_ring: bool = False
    """Whether the group is known to be in the ring or trained. It can be there without a report: on
    a cluster, the report may be lost with the worker's node."""

    @property
    def is_open(self) -> bool:
        """Whether a worker has the group and has not answered."""
        return self.state == "GIVEN" or self.is_recomputed


@dataclass(eq=False)
class Ledger:
    schedule: ScheduleSpec
    placement: Placement
    prompt_at: Callable[[int], Prompt]  # the stream of prompts
    make_command: Callable[[Sequence[IndexedPrompt], bool, Mapping[int, int]], events.Command]
    """Makes the command for a worker from prompts, and `Generate`'s `is_last_round` and `known`."""
    num_groups: int
    num_samples: int  # completions of a group
    iteration: int | None = None  # None: the book of an evaluation
    next_index: int = 0  # of the next prompt in the stream
    max_replacements: int = 0  # how many times a group is replaced at most

    def __post_init__(self) -> None:
        placement = self.placement
        self._fixed_workers: list[str] = []
        """In deterministic mode, the workers among which each round is divided."""
        if self.schedule.is_deterministic:
            for number in range(placement.num_rollout_workers):
                self._fixed_workers.append(f"rollout-{number}")
        self._max_open = self._max_open_groups()
        self.round = -1
        self.trained: events.IterationTrained | None = None
        self.groups: dict[int, Group] = {}
        """By prompt index, in ascending order: also the rejected ones."""
        self._begin_round(range(self.num_groups))

    def _max_open_groups(self) -> int:
        """Return how many groups a worker may have at a time, if prompts are given on demand."""
        if self.placement.max_rollout_workers == 1:
            return self.num_groups
        # Half as many again as the engine has in flight, so that it never waits for a prompt.
        in_flight = self.placement.max_concurrent_groups
        num_groups = in_flight + max(1, in_flight // 2)
        num_completions = num_groups * self.schedule.num_generations
        return math.ceil(num_completions / self.num_samples)

    def _begin_round(self, group_indices: Sequence[int]) -> None:
        """Give each of these groups the next prompt of the stream."""
        assert self.round < self.max_replacements
        self.round += 1
        for number, group_index in enumerate(group_indices):
            prompt = self.prompt_at(self.next_index)
            group = Group(group_index, prompt, self.round)
            if self._fixed_workers:
                group.worker = self._fixed_workers[number % len(self._fixed_workers)]
            self.groups[prompt.index] = group
            self.next_index += 1

    # -- what is known ----------------------------------------------------------------------------

    @property
    def is_complete(self) -> bool:
        """Whether every group has been reported. It may still be on its way to the trainer."""
        for group in self.groups.values():
            if group.state == "WAITING" or group.is_open:
                return False
        return True

    @property
    def reports(self) -> list[events.GroupScored]:
        """The newest report of each group, also of rejected ones, by prompt index."""
        reports = []
        for group in self.groups.values():
            if isinstance(group.report, events.GroupScored):
                reports.append(group.report)
        return reports

    @property
    def engine_seconds(self) -> dict[str, float]:
        """How long each worker's engine was busy, by worker: the largest number that it reported,
        as reports may overtake each other."""
        seconds: dict[str, float] = {}
        for group in self.groups.values():
            if isinstance(group.report, events.GroupScored):
                before = seconds.get(group.worker, 0.0)
                seconds[group.worker] = max(before, group.report.busy_seconds)
        return seconds

    def num_open(self, worker: str) -> int:
        """Return how many groups the worker has and has not answered."""
        return len([each for each in self._groups_of(worker) if each.is_open])

    def _groups_of(self, worker: str) -> list[Group]:
        return [group for group in self.groups.values() if group.worker == worker]

    def _waiting(self) -> list[Group]:
        return [group for group in self.groups.values() if group.state == "WAITING"]

    # -- handing out ------------------------------------------------------------------------------

    def take(self, workers: Sequence[str]) -> dict[str, events.Command]:
        """Hand groups that wait to these workers, which can work; return what to send to each. In
        deterministic mode a list also has groups that are known: the replacement of a dead worker
        generates them again, and drops them."""
        if self._fixed_workers:
            lists = self._fixed_lists(workers)
        else:
            lists = self._lists_on_demand(workers)
        commands = {}
        for worker, groups in lists.items():
            commands[worker] = self._give(worker, groups)
        return commands

    def _give(self, worker: str, groups: Sequence[Group]) -> events.Command:
        prompts = []
        known = {}
        for group in groups:
            if group.report is not None:
                known[group.prompt.index] = group.report.checksum
            if group.state == "WAITING":
                group.state = "GIVEN"
            else:
                group.is_recomputed = True
            group.worker = worker
            prompts.append((group.index, group.prompt))
        is_last_round = self.round == self.max_replacements
        return self.make_command(prompts, is_last_round, known)

    def _lists_on_demand(self, workers: Sequence[str]) -> dict[str, list[Group]]:
        """Choose a worker for each waiting group in turn: the one that has the fewest."""
        lists: dict[str, list[Group]] = {}
        if not workers:
            return lists
        num_open = Counter(group.worker for group in self.groups.values() if group.is_open)
        for group in self._waiting():
            worker = min(workers, key=lambda name: num_open[name])
            if num_open[worker] >= self._max_open:
                break
            num_open[worker] += 1
            lists.setdefault(worker, []).append(group)
        return lists

    def _fixed_lists(self, workers: Sequence[str]) -> dict[str, list[Group]]:
        """Return the next list of each idle worker: all its groups of the first round in which one
        of them waits."""
        lists = {}
        for worker in workers:
            own = self._groups_of(worker)
            waiting_rounds = [group.round for group in own if group.state == "WAITING"]
            is_idle = not any(group.is_open for group in own)
            if waiting_rounds and is_idle:
                lists[worker] = [group for group in own if group.round == waiting_rounds[0]]
        return lists

    # -- what happens -----------------------------------------------------------------------------

    def on_event(self, worker: str, event: events.WorkerEvent) -> None:
        """Record a worker's answer, or that the trainer has all groups."""
        match event:
            case events.GroupScored() | events.PromptEvaluated():
                self._on_report(worker, event)
            case events.GroupRecomputed(prompt_index):
                self.groups[prompt_index].is_recomputed = False
            case events.IterationTrained():
                self.trained = event
                self._record_in_ring({group.index for group in self.groups.values()})
        self._replace_rejected()

    def _on_report(self, worker: str, report: events.GroupScored | events.PromptEvaluated) -> None:
        group = self.groups.get(report.prompt_index)
        if group is None or group.state != "GIVEN" or group.worker != worker:
            return  # a late duplicate
        group.report = report
        if isinstance(report, events.PromptEvaluated) or group.is_in_ring:
            group.state = "ACCEPTED"
        elif report.is_rejected:
            group.state = "REJECTED"
        else:
            group.state = "REPORTED"

    def on_worker_lost(self, worker: str, in_ring: Collection[int]) -> None:
        """Let the groups of a dead worker wait again, except those that are in the ring.

        `in_ring` has the indices of all groups there or trained, of any worker; the dead worker
        puts nothing more into the ring."""
        self._record_in_ring(in_ring)
        for group in self._groups_of(worker):
            group.is_recomputed = False
            if group.state in ("GIVEN", "REPORTED"):
                group.state = "WAITING"
                group.report = None
        self._replace_rejected()

    def _record_in_ring(self, in_ring: Collection[int]) -> None:
        """Record groups that are in the ring: nothing can happen to them any more."""
        for group in self.groups.values():
            if group.index in in_ring and group.state != "REJECTED":
                group.is_in_ring = True
            if group.is_in_ring and group.state == "REPORTED":
                group.state = "ACCEPTED"

    def _replace_rejected(self) -> None:
        """Begin the next round if this one has ended and groups of it were rejected."""
        if not self.is_complete:
            return
        newest_state: dict[int, State] = {}  # by group index: later rounds come last
        for group in self.groups.values():
            newest_state[group.index] = group.state
        missing = [index for index in sorted(newest_state) if newest_state[index] == "REJECTED"]
        if missing:
            self._begin_round(missing)


def ledger_of_iteration(
    schedule: ScheduleSpec,
    placement: Placement,
    iteration: int,
    prompts: PromptStream,
    first_index: int,
) -> Ledger:
    """Open the book of an iteration, whose first prompt in the stream has index `first_index`."""
    return Ledger(
        schedule,
        placement,
        prompts.prompt,
        partial(events.Generate, iteration),
        iteration=iteration,
        next_index=first_index,
        num_groups=schedule.prompts_per_iteration,
        num_samples=schedule.num_generations,
        max_replacements=REPLACEMENT_ROUNDS,
    )


def ledger_of_evaluation(
    schedule: ScheduleSpec,
    placement: Placement,
    round_: int,
    problems: Sequence[Prompt],
    *,
    num_samples: int = 1,
) -> Ledger:
    """Open the book of an evaluation, in which each problem is a group. Each completion's random
    stream depends on round, problem and sample alone."""

    def make_command(
        prompts: Sequence[IndexedPrompt], is_last_round: bool, known: Mapping[int, int]
    ) -> events.Command:
        return events.Evaluate(round_, [prompt for _, prompt in prompts], num_samples, known)

    return Ledger(
        schedule,
        placement,
        problems.__getitem__,
        make_command,
        num_groups=len(problems),
        num_samples=num_samples,
    )
