"""Choose the prompts of an iteration, round by round, and hand them to the rollout workers. Hand
out the problems of an evaluation, and collect the answers.

    round 0    the next N prompts of the stream, one per group 0 … N-1
    round 1    the next prompts, one per rejected group, in ascending group_index
    …          until no group is missing; in the last round no group is rejected

A round ends when all its groups have arrived: taking the first that finish would favour short
completions. So the prompts of an iteration depend on the rewards alone, not on timing. Groups that
are not rejected are trained meanwhile.

With one worker, or in deterministic mode, every worker gets its whole list at the start of a round:
what an engine does is then a function of that list and the weights. Otherwise workers get prompts
on demand, a few ahead of what the engine has in flight, so that a faster worker gets more.

An evaluation runs between two iterations, and in `easyrl eval`. Workers answer with the weights
that they have. Neither the position in the data nor a random state of the training changes: each
completion's random stream depends on round, problem and sample alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from easyrl import events
from easyrl.config import Config
from easyrl.data.streams import PromptStream
from easyrl.runtime.placement import Placement
from easyrl.runtime.supervisor import Worker
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
        if group.is_rejected:
            assert not self.is_last
            self._missing.add(group.group_index)


class Dispatcher:
    def __init__(self, workers: Sequence[Worker], config: Config, placement: Placement) -> None:
        self._workers = workers
        self._is_fixed = config.runtime.deterministic or len(workers) == 1
        in_flight = placement.max_concurrent_groups
        self._ahead = in_flight + max(1, in_flight // 2)
        self._num_generations = config.rollout.num_generations
        self._command: Callable[[Sequence[Any]], events.Command]
        self._left: deque[Any] = deque()

    def start(
        self, iteration: int, prompts: Sequence[IndexedPrompt], *, is_last_round: bool
    ) -> None:
        """Begin a round of an iteration; the one before it is over."""
        self._hand_out(
            prompts, self._ahead, lambda share: events.Generate(iteration, share, is_last_round)
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
        num_sequences = self._ahead * self._num_generations
        self._hand_out(
            prompts,
            -(-num_sequences // num_samples),
            lambda share: events.Evaluate(round_, share, num_samples, with_texts),
        )
        for _ in prompts:
            worker, event = next_event()
            assert isinstance(event, events.PromptEvaluated) and event.evaluation_round == round_
            self.on_group(worker)
            yield event

    def _hand_out(
        self, prompts: Sequence[Any], ahead: int, command: Callable[[Sequence[Any]], events.Command]
    ) -> None:
        """`ahead`: prompts for each worker before it has finished one."""
        assert not self._left
        self._command = command
        num_workers = len(self._workers)
        at_once = len(prompts) if self._is_fixed else min(len(prompts), ahead * num_workers)
        self._left = deque(prompts[at_once:])
        for number, worker in enumerate(self._workers):
            if share := prompts[number:at_once:num_workers]:
                worker.send(command(share))

    def on_group(self, worker: Worker) -> None:
        """Send the next prompt to `worker`, which has finished one."""
        if self._left:
            worker.send(self._command([self._left.popleft()]))
