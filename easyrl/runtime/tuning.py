"""Choose the order of an iteration's prompts and the number of groups in flight by simulation.

    earlier iterations ──► rates, lengths by prompt ──► simulate each choice ──► the fastest

If engines are the slower side, long groups should start first, and an engine whose steps take
hardly longer with more rows should have more of them. If the trainer is the slower side, it should
get its first groups early. Neither changes what is generated or trained, only when.

Nothing is changed in deterministic runs, with environments, whose time is not simulated, and where
both sides share an accelerator or lend each other cores: rates change within an iteration then.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from easyrl import events
from easyrl.config import Config, change_config
from easyrl.events import Observer
from easyrl.runtime.memory import ModelSize, fits
from easyrl.runtime.placement import Placement
from easyrl.runtime.rates import Group, MeasuredIteration, Rates, fit, group_of
from easyrl.runtime.simulation import simulate
from easyrl.types import IndexedPrompt, Prompt

Choice = TypeVar("Choice")

MIN_GAIN = 0.03
"""Change the order, or the number, if this alone makes the simulated iteration shorter by this
part."""
MIN_SECONDS = 0.5
"""The order of shorter iterations is left as it is: each choice takes hundredths of a second."""
NUM_DRAWS = 2  # of the groups, the same for each choice
NUM_RECENT = 4  # iterations that rates are fitted to
NUM_TUNED = 8
"""The number of groups in flight is chosen in as many iterations."""
MAX_PROMPTS = 50_000  # whose lengths are kept
MAX_COMPLETIONS = 10_000
"""Iterations with more are not simulated: each choice would take longer than a quarter second."""


class Tuner:
    """The choices for each iteration of a run."""

    def __init__(
        self,
        config: Config,
        placement: Placement,
        size: ModelSize | None,
        prompt: Callable[[int], Prompt],
        measured: Sequence[MeasuredIteration],
    ) -> None:
        """`prompt(i)`: of the stream; `measured`: iterations so far, which grow with the run."""
        self.max_concurrent_groups = placement.max_concurrent_groups
        """Groups in flight per rollout worker."""
        self._config, self._prompt, self._measured = config, prompt, measured
        train, rollout = config.train, config.rollout
        self._is_on = (
            not config.runtime.deterministic
            and not rollout.has_environments
            and not placement.lends_cores
            and not placement.shares_device
            and train.prompts_per_iteration * rollout.num_generations <= MAX_COMPLETIONS
        )
        # vLLM gets the number at its start; the memory of a Ray cluster's nodes is not known.
        is_given = rollout.max_concurrent_groups is not None
        is_resizable = placement.engine.name == "embedded" and not placement.is_ray
        self._num_left = 0  # iterations in which the number is chosen
        if self._is_on and is_resizable and not is_given and size is not None and size.is_batched:
            self._num_left = NUM_TUNED
            self._most_groups = _most_groups(config, placement, size)
        self._seen: dict[int, Group] = {}  # the newest group of each prompt

    def add(self, event: events.GroupScored) -> None:
        """Record the lengths of a group."""
        if self._is_on:
            key = _key(self._prompt(event.prompt_index))
            self._seen.pop(key, None)  # to the end: the first ones are the oldest
            group = group_of(event, self._config)
            self._seen[key] = group._replace(lengths=array("i", group.lengths))
            if len(self._seen) > MAX_PROMPTS:
                del self._seen[next(iter(self._seen))]

    def arrange(
        self, prompts: Sequence[IndexedPrompt], notify: Observer
    ) -> Sequence[IndexedPrompt]:
        """Return an iteration's prompts in the order in which to hand them out, and set
        `max_concurrent_groups`; a change of this is reported."""
        if not self._is_on:
            return prompts
        if not self._measured:
            import scipy.optimize  # noqa: F401  # for `fit`: in the iteration that warms up

            return prompts
        seen = [self._seen.get(_key(prompt)) for _, prompt in prompts]
        before = self.max_concurrent_groups
        order, self.max_concurrent_groups, gain = self._choose(seen)
        if self.max_concurrent_groups != before:
            text = (
                f"groups in flight per rollout worker: {self.max_concurrent_groups} instead of "
                f"{before}; by simulation this makes iterations {gain:.0%} shorter "
                "(rollout.max_concurrent_groups)"
            )
            notify(events.Note(text))
        return [prompts[n] for n in order]

    def _choose(self, seen: Sequence[Group | None]) -> tuple[Sequence[int], int, float]:
        """Return the best order, the best number of groups in flight, and how much shorter this
        number makes an iteration. `seen`: each prompt's newest group."""
        newest, now = self._measured[-1], self.max_concurrent_groups
        orders: list[Sequence[int]] = [range(len(seen))]
        numbers = [now]
        if newest.seconds >= MIN_SECONDS:
            orders += self._orders(seen)
        if self._num_left:
            self._num_left -= 1
            most = min(self._most_groups, -(-len(seen) // newest.num_engines))
            numbers += [max(1, now // 2), min(2 * now, max(now, most))]
        if len(orders) == 1 and {*numbers} == {now}:
            return orders[0], now, 0.0
        rates = fit([*self._measured][-NUM_RECENT:])
        rng = np.random.default_rng(0)
        draws = [[_draw(group, rates, rng) for group in seen] for _ in range(NUM_DRAWS)]
        sizes = newest.num_engines, newest.num_trainers

        def seconds(order: Sequence[int], number: int) -> float:
            config = change_config(self._config, {"rollout.max_concurrent_groups": number})
            in_order = ([groups[n] for n in order] for groups in draws)
            return sum(simulate(rates, groups, config, *sizes).seconds for groups in in_order)

        order, _ = _best(orders, lambda order: seconds(order, now))
        return order, *_best(numbers, lambda number: seconds(order, number))

    def _orders(self, seen: Sequence[Group | None]) -> list[Sequence[int]]:
        """Return other orders of the prompts, once half of them are known: longest first and
        shortest first, among the prompts of each update."""
        known = [float(np.mean(group.lengths)) for group in seen if group is not None]
        if 2 * len(known) < len(seen):
            return []
        mean = float(np.mean(known))
        lengths = [mean if group is None else float(np.mean(group.lengths)) for group in seen]
        per_update = len(seen) // self._config.train.updates_per_iteration
        numbers = range(len(seen))
        return [
            sorted(numbers, key=lambda n: (n // per_update, sign * lengths[n])) for sign in (-1, 1)
        ]


def _key(prompt: Prompt) -> int:
    return hash(repr(prompt.content))


def _draw(group: Group | None, rates: Rates, rng: np.random.Generator) -> Group:
    """Draw a prompt's next group: any one if it is unknown, else with lengths of its newest."""
    if group is None:
        return rates.groups[int(rng.integers(len(rates.groups)))]
    return group._replace(lengths=rng.choice(group.lengths, len(group.lengths)).tolist())


def _best(choices: Sequence[Choice], seconds: Callable[[Choice], float]) -> tuple[Choice, float]:
    """Return the best choice and its gain over the first one, which wins below MIN_GAIN."""
    of_each = [seconds(choice) for choice in choices]
    gain = 1 - min(of_each) / of_each[0]
    return (choices[of_each.index(min(of_each))], gain) if gain >= MIN_GAIN else (choices[0], 0.0)


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
