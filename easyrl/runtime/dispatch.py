"""Which rollout worker gets which prompt, and when.

With one worker, or in deterministic mode, every worker has its whole list at the round's start:
what an engine does is then a function of that list and the weights alone. Otherwise prompts are
handed out on demand, a few ahead of what an engine has in flight, so that a faster worker gets
more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from easyrl import events
from easyrl.config import Config
from easyrl.runtime.placement import Placement
from easyrl.runtime.supervisor import Worker
from easyrl.types import PlacedPrompt


class Dispatcher:
    def __init__(self, workers: Sequence[Worker], config: Config, placement: Placement) -> None:
        self._workers = workers
        self._is_fixed = config.runtime.deterministic or len(workers) == 1
        self._in_flight = placement.max_concurrent_groups
        self._ahead = self._in_flight + max(1, self._in_flight // 2)
        self._iteration = 0
        self._is_last_round = False
        self._left: deque[PlacedPrompt] = deque()

    def start(
        self, iteration: int, prompts: Sequence[PlacedPrompt], *, is_last_round: bool
    ) -> None:
        """Begin a round of an iteration; the one before it is over."""
        assert not self._left
        self._iteration, self._is_last_round = iteration, is_last_round
        num_workers = len(self._workers)
        if self._is_fixed:
            shares = [prompts[number::num_workers] for number in range(num_workers)]
        else:
            at_once = min(len(prompts), self._ahead * num_workers)
            shares = [prompts[number:at_once:num_workers] for number in range(num_workers)]
            self._left = deque(prompts[at_once:])
        for worker, share in zip(self._workers, shares, strict=True):
            if share:
                self._send(worker, share)

    def on_group(self, worker: Worker) -> None:
        """`worker` has finished a group: it gets the next prompt, if any is left."""
        if self._left:
            self._send(worker, [self._left.popleft()])

    def _send(self, worker: Worker, prompts: Sequence[PlacedPrompt]) -> None:
        worker.send(events.Generate(self._iteration, prompts, self._is_last_round))
