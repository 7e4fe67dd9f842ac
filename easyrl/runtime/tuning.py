"""Choose the order of an iteration's prompts and the number of groups in flight by simulation.

    earlier iterations ──► rates, lengths by prompt ──► simulate each choice ──► the fastest

If engines are the slower side, long groups should start first, and an engine whose steps take
hardly longer with more rows should have more of them. If the trainer is the slower side, it should
get its first groups early. Neither changes what is generated or trained, only when.

Nothing is changed in deterministic runs, with environments, whose time is not simulated, and where
workers lend each other cores, because rates change within an iteration then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from easyrl import events
from easyrl.config import Config, change_config
from easyrl.events import Observer
from easyrl.runtime.memory import ModelSize, fits
from easyrl.runtime.placement import Placement
from easyrl.runtime.rates import Group, MeasuredIteration, fit, group_of
from easyrl.runtime.simulation import simulate
from easyrl.types import IndexedPrompt

MIN_GAIN = 0.03
"""Change to another choice if its iterations are predicted to be shorter by this part."""
MIN_SECONDS = 0.5
"""Shorter iterations are left as they are: the choice takes some hundredths of a second."""
NUM_DRAWS = 2  # of the groups, the same for each choice
RECENT = 4  # iterations that rates are fitted to
TUNED = 8
"""The number of groups in flight is chosen in as many iterations."""
MOST_PROMPTS = 50_000  # whose lengths are kept
MOST_COMPLETIONS = 10_000
"""Iterations with more are not simulated: it would take seconds."""


class Tuner:
    """The choices for each iteration of a run."""

    def __init__(
        self,
        config: Config,
        placement: Placement,
        size: ModelSize | None,
        measured: Sequence[MeasuredIteration],
    ) -> None:
        """`measured`: iterations so far; it grows with the run."""
        self.max_concurrent_groups = placement.max_concurrent_groups
        """Groups in flight per rollout worker."""
        self._config, self._measured = config, measured
        train, rollout = config.train, config.rollout
        self._is_on = (
            not config.runtime.deterministic
            and not rollout.has_environments
            and not placement.lends_cores
            and train.prompts_per_iteration * rollout.num_generations <= MOST_COMPLETIONS
        )
        self._seen: dict[int, Group] = {}  # the newest group of each prompt
        self._current: dict[int, int] = {}  # this iteration's prompts: index -> key in `_seen`
        # vLLM gets the number at its start; the memory of a Ray cluster's nodes is not known.
        is_given = rollout.max_concurrent_groups is not None
        is_resizable = placement.engine.name == "embedded" and not placement.is_ray
        self._num_tuned, self._most_groups = TUNED, self.max_concurrent_groups
        if self._is_on and is_resizable and not is_given and size is not None and size.is_batched:
            self._num_tuned, self._most_groups = 0, _most_groups(config, placement, size)

    def add(self, event: events.GroupScored) -> None:
        """Record the lengths of a group."""
        if (key := self._current.pop(event.prompt_index, None)) is not None:
            self._seen.pop(key, None)  # to the end: the first ones are the oldest
            self._seen[key] = group_of(event, self._config)
            if len(self._seen) > MOST_PROMPTS:
                del self._seen[next(iter(self._seen))]

    def arrange(
        self, prompts: Sequence[IndexedPrompt], notify: Observer
    ) -> Sequence[IndexedPrompt]:
        """Return an iteration's prompts in the order in which to hand them out, and set
        `max_concurrent_groups`; a change is reported. Prompts of replacements keep their order."""
        if not self._is_on or len(prompts) < self._config.train.prompts_per_iteration:
            return prompts
        keys = [hash(repr(prompt.content)) for _, prompt in prompts]
        self._current = {prompt.index: key for key, (_, prompt) in zip(keys, prompts, strict=True)}
        if not self._measured or self._measured[-1].seconds < MIN_SECONDS:
            return prompts
        before = self.max_concurrent_groups
        order, self.max_concurrent_groups, gain = self._choose([*map(self._seen.get, keys)])
        if self.max_concurrent_groups != before:
            text = (
                f"groups in flight per rollout worker: {self.max_concurrent_groups} instead of "
                f"{before}; by simulation this makes iterations {gain:.0%} shorter "
                "(rollout.max_concurrent_groups)"
            )
            notify(events.Note(text))
        return [prompts[n] for n in order]

    def _choose(self, seen: Sequence[Group | None]) -> tuple[Sequence[int], int, float]:
        """Return the best order, the best number of groups in flight, and how much shorter they
        make an iteration. `seen`: each prompt's newest group."""
        now = self.max_concurrent_groups
        numbers = [now]
        if self._num_tuned < TUNED:
            self._num_tuned += 1
            numbers += [max(1, now // 2), min(2 * now, self._most_groups)]
        given, *others = self._orders(seen)
        choices = list(dict.fromkeys(product((tuple(given), *map(tuple, others)), numbers)))
        if len(choices) == 1:
            return given, now, 0.0
        rates, newest = fit([*self._measured][-RECENT:]), self._measured[-1]
        rng = np.random.default_rng(0)
        seconds = dict.fromkeys(choices, 0.0)
        for _ in range(NUM_DRAWS):
            groups = [
                rates.groups[int(rng.integers(len(rates.groups)))]
                if group is None
                else group._replace(lengths=rng.choice(group.lengths, len(group.lengths)).tolist())
                for group in seen
            ]
            for order, number in choices:
                config = change_config(self._config, {"rollout.max_concurrent_groups": number})
                ordered = [groups[n] for n in order]
                outcome = simulate(rates, ordered, config, newest.num_engines, newest.num_trainers)
                seconds[order, number] += outcome.seconds
        best = min(choices, key=seconds.__getitem__)
        gain = 1 - seconds[best] / seconds[choices[0]]
        return (*best, gain) if gain >= MIN_GAIN else (given, now, 0.0)

    def _orders(self, seen: Sequence[Group | None]) -> Iterator[Sequence[int]]:
        """Yield orders of the prompts: as they are and, once half of them are known, longest first
        and shortest first, among the prompts of each update."""
        yield range(len(seen))
        known = [float(np.mean(group.lengths)) for group in seen if group is not None]
        if 2 * len(known) < len(seen):
            return
        mean = float(np.mean(known))
        lengths = [mean if group is None else float(np.mean(group.lengths)) for group in seen]
        per_update = len(seen) // self._config.train.updates_per_iteration
        for sign in (-1, 1):
            yield sorted(range(len(seen)), key=lambda n: (n // per_update, sign * lengths[n]))


def _most_groups(config: Config, placement: Placement, size: ModelSize) -> int:
    """Return how many groups may be in flight per rollout worker: its prompts, if their cache fits
    into the memory."""
    number = placement.max_concurrent_groups
    most = -(-config.train.prompts_per_iteration // placement.num_rollout_workers)
    while number < most:
        more = min(2 * number, most)
        if not fits(config, replace(placement, max_concurrent_groups=more), size):
            break
        number = more
    return number
