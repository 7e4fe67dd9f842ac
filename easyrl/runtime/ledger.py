"""The state of each group of an iteration, in one book without processes and without a clock.

                 take              report                  the trainer has it
    WAITING ──────────► GIVEN ──────┬────► REPORTED ─────────────────────────► ACCEPTED
       ▲                  │         │          │
       └────── lost ──────┴─────────│──────────┘ unless it is in the ring
                                    └────► REJECTED, and a fresh prompt waits in the next round

Only ACCEPTED is final: a worker reports a group just before it puts it into the ring. When a worker
is lost, its groups that are not in the ring are WAITING again.

The prompts of an iteration are chosen in rounds:

    round 0    the next N prompts of the stream, one per group 0 … N-1
    round 1    the next prompts, one per rejected group, in ascending group index
    …          until no group is missing; in the last round no group is rejected

A round ends when all its groups have arrived: taking the first that finish would favour short
completions. So the prompts of an iteration depend on the rewards alone, not on timing.

In deterministic mode each round is divided among the workers at its start: what an engine does is a
function of its list and the weights. The replacement of a dead worker gets the list again, with the
checksums of the groups that are known: it generates all of it in the same way, and compares and
drops those. Otherwise a worker gets prompts on demand, a few ahead of what its engine has in
flight, so that a faster worker gets more.

An evaluation is a book too, of one round: an answer is final as soon as it is reported.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from easyrl import events
from easyrl.config import Config
from easyrl.config.algorithm import REPLACEMENT_ROUNDS
from easyrl.data.streams import PromptStream
from easyrl.runtime.placement import Placement
from easyrl.types import IndexedPrompt, Prompt

State = Literal["WAITING", "GIVEN", "REPORTED", "ACCEPTED", "REJECTED"]


@dataclass(slots=True)
class Group:
    """A group index with one of its prompts."""

    index: int
    prompt: Prompt
    round: int
    worker: str = ""  # that has it or, in deterministic mode, must take it
    state: State = "WAITING"
    report: events.GroupScored | events.PromptEvaluated | None = None
    is_recomputed: bool = False  # GIVEN again although it is known, to be compared
    is_in_ring: bool = False  # known so far; on a cluster the report can be lost all the same

    @property
    def is_open(self) -> bool:
        """Whether a worker has it and has not answered."""
        return self.state == "GIVEN" or self.is_recomputed


@dataclass(eq=False)
class Ledger:
    config: Config
    placement: Placement
    prompt_at: Callable[[int], Prompt]  # the stream of prompts
    make_command: Callable[[Sequence[IndexedPrompt], bool, Mapping[int, int]], events.Command]
    """From prompts, and `Generate`'s `is_last_round` and `known`."""
    num_groups: int
    num_samples: int  # completions of a group
    iteration: int | None = None  # None: of an evaluation
    next_index: int = 0  # of the next prompt in the stream
    max_replacements: int = 0  # how many times a group is replaced at most

    def __post_init__(self) -> None:
        placement, rollout = self.placement, self.config.rollout
        numbers = range(self.config.runtime.deterministic * placement.num_rollout_workers)
        self._fixed_workers = [f"rollout-{number}" for number in numbers]
        in_flight = placement.max_concurrent_groups
        num_rows = (in_flight + max(1, in_flight // 2)) * rollout.num_generations
        is_only_worker = placement.max_rollout_workers == 1
        self._max_open = self.num_groups if is_only_worker else -(-num_rows // self.num_samples)
        """Groups that a worker may have at a time: more than its engine has in flight."""
        self.round = -1
        self.trained: events.IterationTrained | None = None
        self.groups: dict[int, Group] = {}  # by prompt index, in ascending order
        self._begin_round(range(self.num_groups))

    def _begin_round(self, indices: Sequence[int]) -> None:
        assert self.round < self.max_replacements
        self.round += 1
        for number, index in enumerate(indices):
            prompt, fixed = self.prompt_at(self.next_index), self._fixed_workers
            worker = fixed[number % len(fixed)] if fixed else ""
            self.groups[prompt.index] = Group(index, prompt, self.round, worker)
            self.next_index += 1

    @property
    def is_complete(self) -> bool:
        every = self.groups.values()
        return not any(group.state == "WAITING" or group.is_open for group in every)

    @property
    def reports(self) -> list[events.GroupScored]:
        """The newest report of each group, also of rejected ones, by prompt index."""
        found = (group.report for group in self.groups.values())
        return [report for report in found if isinstance(report, events.GroupScored)]

    @property
    def engine_seconds(self) -> dict[str, float]:
        """By worker, how long its engine was busy. (Reports may overtake each other.)"""
        seconds: dict[str, float] = {}
        for group in self.groups.values():
            if isinstance(group.report, events.GroupScored):
                busy = group.report.busy_seconds
                seconds[group.worker] = max(busy, seconds.get(group.worker, 0.0))
        return seconds

    def num_open(self, worker: str) -> int:
        return sum(each.is_open and each.worker == worker for each in self.groups.values())

    def take(self, workers: Sequence[str]) -> dict[str, events.Command]:
        """Hand groups that wait to these workers, which can work; return what to send to each."""
        taken = self._next_lists(workers) if self._fixed_workers else self._shares(workers)
        commands = {}
        for worker, groups in taken.items():
            known = {g.prompt.index: g.report.checksum for g in groups if g.report is not None}
            for group in groups:
                group.worker = worker
                if group.state == "WAITING":
                    group.state = "GIVEN"
                else:
                    group.is_recomputed = True
            prompts = [(group.index, group.prompt) for group in groups]
            is_last_round = self.round == self.max_replacements
            commands[worker] = self.make_command(prompts, is_last_round, known)
        return commands

    def _shares(self, workers: Sequence[str]) -> dict[str, list[Group]]:
        """Choose a worker for each group in turn: the one that has the fewest."""
        shares: dict[str, list[Group]] = {}
        waiting = [group for group in self.groups.values() if group.state == "WAITING"]
        num_open = Counter(group.worker for group in self.groups.values() if group.is_open)
        for group in waiting if workers else ():
            worker = min(workers, key=num_open.__getitem__)
            if num_open[worker] >= self._max_open:
                break
            num_open[worker] += 1
            shares.setdefault(worker, []).append(group)
        return shares

    def _next_lists(self, workers: Sequence[str]) -> dict[str, list[Group]]:
        """The list of each idle worker for the first round of which it lacks a group."""
        lists = {}
        for worker in workers:
            own = [group for group in self.groups.values() if group.worker == worker]
            rounds = [group.round for group in own if group.state == "WAITING"]
            if rounds and not any(group.is_open for group in own):
                lists[worker] = [group for group in own if group.round == rounds[0]]
        return lists

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
        else:
            group.state = "REJECTED" if report.is_rejected else "REPORTED"

    def _record_in_ring(self, in_ring: Collection[int]) -> None:
        """Record groups that are in the ring: nothing can happen to them any more."""
        for group in self.groups.values():
            group.is_in_ring |= group.index in in_ring and group.state != "REJECTED"
            if group.is_in_ring and group.state == "REPORTED":
                group.state = "ACCEPTED"

    def _replace_rejected(self) -> None:
        if not self.is_complete:
            return
        newest = {group.index: group.state for group in self.groups.values()}
        missing = [index for index in sorted(newest) if newest[index] == "REJECTED"]
        if missing:
            self._begin_round(missing)

    def lost(self, worker: str, in_ring: Collection[int]) -> None:
        """Let the groups of a dead worker wait again, except those that are in the ring. `in_ring`:
        indices of all groups there or trained; nothing more of the dead worker arrives."""
        self._record_in_ring(in_ring)
        for group in self.groups.values():
            if group.worker != worker:
                continue
            group.is_recomputed = False
            if group.state in ("GIVEN", "REPORTED"):
                group.state, group.report = "WAITING", None
        self._replace_rejected()


def ledger_of_iteration(
    config: Config, placement: Placement, iteration: int, prompts: PromptStream, first_index: int
) -> Ledger:
    """Open the book of an iteration. `first_index`: of its first prompt in the stream."""
    return Ledger(
        config,
        placement,
        prompts.prompt,
        partial(events.Generate, iteration),
        iteration=iteration,
        next_index=first_index,
        num_groups=config.train.prompts_per_iteration,
        num_samples=config.rollout.num_generations,
        max_replacements=REPLACEMENT_ROUNDS,
    )


def ledger_of_evaluation(
    config: Config,
    placement: Placement,
    round_: int,
    problems: Sequence[Prompt],
    *,
    num_samples: int = 1,
) -> Ledger:
    """Open the book of an evaluation, in which each problem is a group. Each completion's random
    stream depends on round, problem and sample alone."""
    return Ledger(
        config,
        placement,
        problems.__getitem__,
        lambda prompts, _, known: events.Evaluate(
            round_, [prompt for _, prompt in prompts], num_samples, known
        ),
        num_groups=len(problems),
        num_samples=num_samples,
    )
