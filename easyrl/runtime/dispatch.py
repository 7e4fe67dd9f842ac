"""Choose the prompts of an iteration, round by round, and hand them to the rollout workers. Hand
out the problems of an evaluation, and collect the answers.

    round 0    the next N prompts of the stream, one per group 0 … N-1
    round 1    the next prompts, one per rejected group, in ascending group_index
    …          until no group is missing; in the last round no group is rejected

A round ends when all its groups have arrived: taking the first that finish would favour short
completions. So the prompts of an iteration depend on the rewards alone, not on timing. Groups that
are not rejected are trained meanwhile.

In deterministic mode, and where a run has one worker at most, every worker gets its whole list at
the start of a round: what an engine does is then a function of that list and the weights. Otherwise
workers get prompts on demand, a few ahead of what the engine has in flight, so that a faster worker
gets more.

What a dead worker had not delivered returns to the front of the queue. In deterministic mode its
replacement gets the whole list again, with the checksums of what was delivered: it generates all of
it in the same way, and compares and drops what is known.

An evaluation runs between two iterations, and in `easyrl eval`. Workers answer with the weights
that they have. Neither the position in the data nor a random state of the training changes: each
completion's random stream depends on round, problem and sample alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from easyrl import events
from easyrl.config import Config
from easyrl.data.streams import PromptStream
from easyrl.runtime.placement import Placement, max_open_groups
from easyrl.runtime.supervisor import Worker, WorkerFailure
from easyrl.types import IndexedPrompt, Prompt


class Rounds:
    """The rounds of one iteration."""

    def __init__(
        self, prompts: PromptStream, first_index: int, *, num_groups: int, max_replacements: int
    ) -> None:
        """`first_index`: index in the stream of the next prompt. A group is replaced at most
        `max_replacements` times."""
        self._prompts = prompts
        self.next_index = first_index
        self._max_replacements = max_replacements
        self.number = -1
        self._missing = set(range(num_groups))
        self._pending: set[int] = set()
        self.delivered: set[int] = set()
        """Groups in the ring, some without a report: on a cluster that can be lost with a node."""

    @property
    def is_last(self) -> bool:
        return self.number == self._max_replacements

    @property
    def is_over(self) -> bool:
        """Whether all groups of the round have arrived."""
        return not self._pending

    @property
    def is_complete(self) -> bool:
        """Whether no group is missing."""
        return not self._pending and not self._missing

    def start(self) -> list[IndexedPrompt]:
        """Begin the next round; returns its prompts."""
        assert self.is_over and not self.is_complete and not self.is_last
        self.number += 1
        self._pending, self._missing = self._missing, set()
        first = self.next_index
        self.next_index += len(self._pending)
        return [
            (group_index, self._prompts.prompt(first + number))
            for number, group_index in enumerate(sorted(self._pending))
        ]

    def add(self, group: events.GroupScored) -> None:
        """Record a group of this round that has arrived."""
        self._pending.remove(group.group_index)
        if group.is_rejected and group.group_index not in self.delivered:
            assert not self.is_last
            self._missing.add(group.group_index)

    def reopen(self, group_index: int) -> None:
        """Wait again for a group that has been reported, but died with its worker."""
        self._pending.add(group_index)


Command = Callable[[Sequence[Any], Mapping[int, int]], events.Command]
"""Make the command for a worker's prompts and the checksums of those that are known."""


@dataclass(slots=True)
class _Share:
    """Prompts handed out to one worker, by index: in this round in deterministic mode, else in
    this iteration."""

    prompts: dict[int, Any] = field(default_factory=dict)  # in the order of handing out
    open: set[int] = field(default_factory=set)  # not answered
    checksums: dict[int, int] = field(default_factory=dict)  # of answers


class Dispatcher:
    """Hand out prompts to the workers, also to those that come later, and again after a death.

    A replacement has its predecessor's name.
    """

    def __init__(self, workers: Sequence[Worker], config: Config, placement: Placement) -> None:
        """`workers` is the list of living workers: it changes as they come and go. Those that
        `can_work` get prompts."""
        self._workers = workers
        self._is_deterministic = config.runtime.deterministic
        self._is_fixed = self._is_deterministic or placement.max_rollout_workers == 1
        self._max_open_groups = max_open_groups(placement.max_concurrent_groups)
        self._most = 0  # prompts of one worker at a time, in this round
        self._num_generations = config.rollout.num_generations
        self._command: Command
        self._left: deque[Any] = deque()
        self._iteration = -1
        self._shares: dict[str, _Share] = {}
        self._earlier: dict[str, set[int]] = {}  # prompts of earlier rounds, if deterministic

    @property
    def is_idle(self) -> bool:
        """Whether all prompts have been answered, and no worker has any."""
        return not self._left and not any(share.open for share in self._shares.values())

    def num_open(self, worker: Worker) -> int:
        """Number of prompts that the worker has not answered."""
        return len(self._shares[worker.name].open) if worker.name in self._shares else 0

    def start(
        self, iteration: int, prompts: Sequence[IndexedPrompt], *, is_last_round: bool
    ) -> None:
        """Begin a round of an iteration; the one before it is over. Prompts are handed out in this
        order."""
        # A worker may die before it has put a group of an earlier round into the ring.
        if iteration != self._iteration:
            self._shares, self._earlier = {}, {}
        elif self._is_deterministic:
            for name, share in self._shares.items():
                self._earlier.setdefault(name, set()).update(share.prompts)
            self._shares = {}
        self._iteration = iteration
        self._hand_out(
            [(prompt.index, (group_index, prompt)) for group_index, prompt in prompts],
            self._max_open_groups,
            lambda share, known: events.Generate(iteration, share, is_last_round, known),
        )

    def evaluate(
        self,
        round_: int,
        prompts: Sequence[Prompt],
        next_event: Callable[[], tuple[Worker, events.WorkerEvent]],
        *,
        num_samples: int = 1,
        with_texts: bool = False,
    ) -> Iterator[events.PromptEvaluated]:
        """Send problems to whichever worker is free; yield the answers as they arrive."""
        num_sequences = self._max_open_groups * self._num_generations
        self._shares = {}
        self._hand_out(
            [(prompt.index, prompt) for prompt in prompts],
            -(-num_sequences // num_samples),
            lambda share, known: events.Evaluate(round_, share, num_samples, with_texts, known),
        )
        while not self.is_idle:
            worker, event = next_event()
            self.on_event(worker, event)
            if isinstance(event, events.PromptEvaluated):
                assert event.evaluation_round == round_
                yield event

    def _hand_out(self, prompts: Sequence[tuple[int, Any]], most: int, command: Command) -> None:
        """`prompts` with their indices; `most`: how many a worker has at a time."""
        assert self.is_idle
        self._command = command
        self._most = len(prompts) if self._is_fixed else most
        # In deterministic mode, the list of a worker that is not ready waits for it.
        workers = [w for w in self._workers if w.can_work or self._is_deterministic]
        at_once = min(len(prompts), self._most * len(workers))
        self._left = deque(prompts[at_once:])
        for number, worker in enumerate(workers):
            self._give(worker, prompts[number : at_once : len(workers)])

    def _give(self, worker: Worker, prompts: Sequence[tuple[int, Any]]) -> None:
        if prompts:
            share = self._shares.setdefault(worker.name, _Share())
            share.prompts.update(prompts)
            share.open.update(index for index, _ in prompts)
            if worker.can_work:
                worker.send(self._command([prompt for _, prompt in prompts], {}))

    def _fill(self, worker: Worker) -> None:
        """Give the worker as many of the queued prompts as it may have."""
        if self._left and worker.can_work:
            num_more = min(self._most - self.num_open(worker), len(self._left))
            self._give(worker, [self._left.popleft() for _ in range(num_more)])

    def on_event(self, worker: Worker, event: events.WorkerEvent) -> None:
        """Record an answer, or that the worker has died."""
        match event:
            case events.GroupScored() | events.PromptEvaluated():
                self._shares[worker.name].checksums[event.prompt_index] = event.checksum
                self._shares[worker.name].open.discard(event.prompt_index)
                self._fill(worker)
            case events.GroupRecomputed(prompt_index):
                self._shares[worker.name].open.discard(prompt_index)
            case events.Lost():
                self._on_lost(worker)

    def has_answer(self, worker: Worker, prompt_index: int) -> bool:
        share = self._shares.get(worker.name, _Share())
        return prompt_index in share.checksums or prompt_index in self._earlier.get(worker.name, ())

    def reopen(self, worker: Worker, prompt_index: int) -> None:
        """Take back an answer that died with its worker. Call it before that is reported. Raises
        WorkerFailure for a deterministic group of an earlier round, whose list is over."""
        if prompt_index in self._earlier.get(worker.name, ()):
            raise WorkerFailure(f"{worker.name} died before it had delivered an earlier round")
        self._shares[worker.name].open.add(prompt_index)
        del self._shares[worker.name].checksums[prompt_index]

    def _on_lost(self, worker: Worker) -> None:
        share = self._shares.get(worker.name, _Share())
        if self._is_deterministic:
            is_done = share.checksums.keys() == share.prompts.keys()
            share.open = set() if is_done else set(share.prompts)
            return
        self._shares.pop(worker.name, None)
        self._left.extendleft((i, share.prompts[i]) for i in sorted(share.open, reverse=True))
        for other in self._workers:
            self._fill(other)

    def on_joined(self, worker: Worker) -> None:
        """Give prompts to a worker that can work from now on."""
        share = self._shares.get(worker.name)
        if self._is_deterministic and share is not None and share.open:
            worker.send(self._command(list(share.prompts.values()), dict(share.checksums)))
        self._fill(worker)
