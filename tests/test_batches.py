"""Micro-batches from the ring: every group is checked, every rollout is in one, in any order."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement
from multiprocessing import Pipe
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_packing import (
    FIRST,
    GROUPS,
    ITERATION,
    NUM_GENERATIONS,
    VERSION,
    expected_sequences,
    make_group,
    sequences_of,
    zeroed,
)

from easyrl.config import Config, load_config
from easyrl.model.policy import Policy
from easyrl.types import MicroBatch, RolloutGroup
from easyrl.workers import batches as batches_module
from easyrl.workers.batches import (
    MIN_FILL,
    PACKED,
    GroupReader,
    MicroBatches,
    RankPipes,
    Rows,
    UpdateEnd,
    share_out,
)
from easyrl.workers.learner import Learner
from easyrl.workers.packing import Rollout, pack, split_group
from own_workers import make_ring, num_free
from tiny_models import largest_gradient_gap

torch.set_num_threads(1)

_, NO_CONTROL = Pipe()
ALONE = RankPipes(0, (), NO_CONTROL, timeout_seconds=1.0)


def config_of(num_groups: int, *, max_tokens: int = 10**6, **flags: Any) -> Config:
    """`flags`: deterministic, sync, mask_truncated, num_updates."""
    names = {
        "deterministic": "runtime.deterministic",
        "mask_truncated": "algorithm.mask_truncated_completions",
        "num_updates": "train.updates_per_iteration",
    }
    settings = {names[name]: value for name, value in flags.items() if name in names}
    schedule = "sync" if flags.get("sync") else "periodic"
    numbers = {
        "train.prompts_per_iteration": num_groups,
        "rollout.num_generations": NUM_GENERATIONS,
    }
    config = load_config(None, {**settings, **numbers, "runtime.schedule": schedule})
    # A budget smaller than a config may have: rollouts longer than it.
    train = config.train.model_copy(update={"max_tokens_per_micro_batch": max_tokens})
    return config.model_copy(update={"train": train})


class Feed:
    """A ring in this process, filled with `arrivals` one by one as the reader waits."""

    def __init__(self, arrivals: Sequence[RolloutGroup], num_slots: int | None = None) -> None:
        self.ring = make_ring(num_slots or max(1, len(arrivals)))
        self.producer, self.consumer = self.ring.attach(0), self.ring.attach(1)
        self.arrivals = list(arrivals)
        self.num_waits = 0

    def arrive(self) -> None:
        assert self.arrivals, "waits for a group that never arrives"
        self.num_waits += 1
        assert self.producer.put(self.arrivals.pop(0), 0.0), "the ring is full: slots were kept"

    def reader(self, num_groups: int, **config: Any) -> GroupReader:
        own = config_of(num_groups, **config)
        return GroupReader(own, self.consumer, (ITERATION, VERSION), self.arrive)

    def batches(
        self, num_groups: int, *, shares_prompts: bool = True, **config: Any
    ) -> MicroBatches:
        reader = self.reader(num_groups, **config)
        own = config_of(num_groups, **config)
        return MicroBatches(own, reader, ALONE, shares_prompts=shares_prompts)

    @property
    def num_free(self) -> int:
        return num_free(self.ring)


@pytest.fixture
def feed() -> Iterator[Any]:
    feeds = []

    def make(*arguments: Any, **options: Any) -> Feed:
        feeds.append(Feed(*arguments, **options))
        return feeds[-1]

    yield make
    for each in feeds:
        each.ring.close()


def micro_batches(batches: MicroBatches) -> Iterator[MicroBatch]:
    return (each for each in batches if isinstance(each, MicroBatch))


def batches_of(
    groups: Sequence[RolloutGroup],
    max_tokens: int,
    *,
    order: Sequence[int] | None = None,
    **how: Any,
) -> list[MicroBatch]:
    """The micro-batches of these groups, which arrive in this order."""
    source = Feed([groups[i] for i in order or range(len(groups))])
    try:
        batches = source.batches(len(groups), max_tokens=max_tokens, **how)
        *found, end = batches
        masks = [group.loss_mask.sum() for group in groups]
        assert end == UpdateEnd(num_loss_tokens=sum(masks))
        assert batches._reader.num_read == len(groups)
        tokens = sum(g.num_completion_tokens for g in groups)
        assert batches._reader.completion_tokens == tokens
        assert source.num_free == len(groups)  # every slot was freed
        assert all(isinstance(batch, MicroBatch) for batch in found)
        return found  # type: ignore[return-value]
    finally:
        source.ring.close()


# -- boundaries of micro-batches -------------------------------------------------------------------


@settings(max_examples=60)
@given(GROUPS, st.integers(1, 150), st.booleans(), st.booleans(), st.randoms())
def test_every_rollout_is_packed_once_and_within_the_budget(groups, budget, is_exact, sync, random):
    order = random.sample(range(len(groups)), len(groups))
    how = {"order": order, "deterministic": is_exact, "sync": sync}
    batches = batches_of(groups, budget, **how)
    found = [sequence for batch in batches for sequence in sequences_of(batch)]
    trained = range(len(groups)) if is_exact else order
    assert found == expected_sequences([groups[i] for i in trained])
    for batch in [*batches, *batches_of(groups, budget, shares_prompts=False, **how)]:
        # A rollout over the budget is alone.
        assert len(batch.input_ids) <= budget or batch.num_completions == 1


@given(GROUPS)
def test_a_micro_batch_is_filled_up_to_the_budget(groups):
    num_tokens = sum(len(batch.input_ids) for batch in batches_of(groups, 10**6))
    assert len(batches_of(groups, max(1, num_tokens), deterministic=True)) == (num_tokens > 0)


@settings(max_examples=60)
@given(GROUPS, st.integers(1, 120), st.booleans(), st.randoms())
def test_deterministic_batches_follow_from_the_groups_alone(groups, budget, sync, random):
    """Neither order of arrival nor schedule shows in any array."""
    order = random.sample(range(len(groups)), len(groups))
    plain = batches_of(groups, budget, deterministic=True)
    shuffled = batches_of(groups, budget, order=order, deterministic=True, sync=sync)
    for one, other in zip(plain, shuffled, strict=True):
        for field in dataclasses.fields(one):
            a, b = getattr(one, field.name), getattr(other, field.name)
            if field.name == "groups":
                assert a == b
                continue
            np.testing.assert_array_equal(a, b)
            assert a.dtype == b.dtype


@pytest.mark.parametrize("deterministic", [False, True])
def test_groups_without_a_gradient_free_their_slots(feed: Any, deterministic: bool) -> None:
    groups = [zeroed(make_group(FIRST + index), [0, 1, 2]) for index in range(3)]
    source = feed(groups, num_slots=1)
    batches = source.batches(3, max_tokens=50, deterministic=deterministic)
    assert list(micro_batches(batches)) == [] and source.num_free == 1


@pytest.mark.parametrize("mask_truncated", [False, True])
def test_loss_tokens_count_whether_they_are_computed_or_not(
    feed: Any, mask_truncated: bool
) -> None:
    """Tokens of truncated completions count only where they are trained."""
    truncated = make_group(FIRST, truncated=np.array([False, True, False]))
    groups = [zeroed(truncated, [0]), make_group(FIRST + 1)]
    *_, end = feed(groups).batches(2, mask_truncated=mask_truncated)
    masks = [group.trained_mask(mask_truncated=mask_truncated) for group in groups]
    assert end == UpdateEnd(sum(int(mask.sum()) for mask in masks))


# -- reading and checking --------------------------------------------------------------------------


def drain(reader: GroupReader, num_groups: int) -> list[int]:
    """Prompt indices in the order in which groups are handed out."""
    indices = []
    for _ in range(num_groups):
        with reader.next(0, wait=True) as group:  # type: ignore[union-attr]
            indices.append(group.prompt_index)
    return indices


PREVIOUS = {"iteration": ITERATION - 1, "policy_version": VERSION - 1}
IN_ORDER = pytest.mark.parametrize("deterministic", [False, True])
SYNC = pytest.mark.parametrize("sync", [False, True])


@pytest.mark.parametrize(
    "stale",
    [
        {"policy_version": VERSION - 1},
        {"policy_version": VERSION + 1},
        {"iteration": ITERATION - 1},
    ],
)
@IN_ORDER
@SYNC
def test_an_off_policy_group_stops_the_run(
    feed: Any, stale: dict[str, int], deterministic: bool, sync: bool
) -> None:
    source = feed([make_group(FIRST), make_group(FIRST + 1, **stale)])
    with pytest.raises(RuntimeError, match="off-policy"):
        drain(source.reader(2, deterministic=deterministic, sync=sync), 2)


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(make_group(FIRST + 2, group_index=0), id="its replacement"),
        pytest.param(make_group(FIRST, **PREVIOUS), id="of the previous iteration, never taken"),
        pytest.param(make_group(FIRST + 2), id="above the last index"),
    ],
)
@IN_ORDER
def test_a_group_that_is_not_due_stops_the_run(
    feed: Any, wrong: RolloutGroup, deterministic: bool
) -> None:
    """The run stops at once, even if delivery in order would never reach the group."""
    source = feed([make_group(FIRST), wrong, make_group(FIRST + 1)])
    with pytest.raises(RuntimeError, match=rf"prompt {wrong.prompt_index}\b"):
        drain(source.reader(2, deterministic=deterministic), 2)


@IN_ORDER
@SYNC
def test_late_duplicates_of_this_and_the_previous_iteration_are_dropped_and_counted(
    feed: Any, deterministic: bool, sync: bool
) -> None:
    previous = make_group(FIRST + 1, **PREVIOUS)
    first, second = make_group(FIRST), make_group(FIRST + 1)
    source = feed([previous, first, first, second], num_slots=2)
    source.ring.taken[previous.group_index] = previous.iteration
    reader = source.reader(2, deterministic=deterministic, sync=sync)
    assert drain(reader, 2) == [FIRST, FIRST + 1] and reader.num_duplicates == 2
    assert source.num_free == 2
    reader.finish_update(0)
    assert source.ring.delivered(ITERATION) == {0, 1}


def test_an_update_ends_only_when_each_of_its_groups_was_handed_out_once(feed: Any) -> None:
    reader = feed([make_group(FIRST + index) for index in range(4)]).reader(4, num_updates=2)
    drain(reader, 2)
    reader.finish_update(0)
    with pytest.raises(RuntimeError, match="once"):
        reader.finish_update(1)


@IN_ORDER
def test_sync_hands_nothing_out_before_all_have_arrived(feed: Any, deterministic: bool) -> None:
    source = feed([make_group(FIRST + index) for index in (2, 1, 3, 0)])
    reader = source.reader(4, deterministic=deterministic, sync=True)
    lease = reader.next(0, wait=True)
    assert lease is not None and source.num_waits == 4
    assert sorted([lease.group.prompt_index, *drain(reader, 3)]) == [40, 41, 42, 43]


def test_the_first_update_does_not_wait_for_groups_of_the_second(feed: Any) -> None:
    """Half of the groups are enough for the first step; groups of the second wait."""
    source = feed([make_group(FIRST + index) for index in (4, 0, 2, 1, 3, 5)])
    batches = iter(source.batches(6, num_updates=2, max_tokens=1))
    sizes = []
    for batch in batches:
        if isinstance(batch, UpdateEnd):
            break
        sizes.append(batch.num_completions)
    assert len(sizes) == 3 * NUM_GENERATIONS and source.num_waits == 4
    next(batches)  # of group 4
    assert source.num_waits == 4


# -- periodic schedule -----------------------------------------------------------------------------


def test_periodic_trains_what_has_arrived(feed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = feed([make_group(FIRST + index) for index in range(3)])
    monkeypatch.setattr(batches_module, "MIN_FILL", 0.0)
    batches = micro_batches(source.batches(3))
    assert next(batches).num_completions == NUM_GENERATIONS and source.num_waits == 1
    source.arrive()
    source.arrive()
    assert next(batches).num_completions == 2 * NUM_GENERATIONS  # both that arrived meanwhile
    assert list(batches) == [] and source.num_waits == 3


def test_periodic_waits_while_a_micro_batch_is_small(feed: Any) -> None:
    groups = [make_group(FIRST + index) for index in range(4)]
    tokens = [len(group.prompt_ids) + group.num_completion_tokens for group in groups]
    source = feed(groups)
    budget = round((tokens[0] + tokens[1]) / MIN_FILL)
    batches = micro_batches(source.batches(4, max_tokens=budget))
    assert next(batches).num_completions == 2 * NUM_GENERATIONS and source.num_waits == 2
    assert sum(batch.num_completions for batch in batches) == 2 * NUM_GENERATIONS


def test_periodic_never_waits_while_it_holds_every_slot(feed: Any) -> None:
    source = feed([make_group(FIRST + index) for index in range(5)], num_slots=2)
    batches = micro_batches(source.batches(5))
    assert [batch.num_completions // NUM_GENERATIONS for batch in batches] == [2, 2, 1]


def test_a_slot_is_free_before_its_micro_batch_is_trained(feed: Any) -> None:
    """A ring of one slot then takes the next group while this one is trained."""
    source = feed([make_group(FIRST + index) for index in range(4)], num_slots=1)
    for _ in source.batches(4):
        assert source.num_free == 1
    assert source.num_waits == 4


def test_a_group_cut_by_the_budget_keeps_its_slot_until_its_last_rollout(feed: Any) -> None:
    source = feed([make_group(FIRST)])
    num_free = [source.num_free for _ in micro_batches(source.batches(1, max_tokens=1))]
    assert num_free == [0] * (NUM_GENERATIONS - 1) + [1]


# -- the gradient ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def learner() -> Learner:
    """A float64 learner: float32 rounding exceeds the bound below in 1 of 1,000 draws."""
    policy = Policy.load("tiny")
    policy.model.double()
    return Learner(policy, Config())


def gradient_of(learner: Learner, batches: Sequence[MicroBatch], num_completions: int) -> Any:
    """One backward per micro-batch, divided by the iteration's count."""
    learner._zero_gradients()
    for batch in batches:
        learner.accumulate(batch)
    named = learner.policy.model.named_parameters()
    return {name: parameter.grad / num_completions for name, parameter in named}


def gradient_one_by_one(learner: Learner, groups: Sequence[RolloutGroup]) -> Any:
    """Each rollout a sequence of its own, those of advantage 0 included. (`test_updates` compares
    this with the formula.)"""
    rollouts = [each for group in groups for each in split_group(group, keep_zero_advantages=True)]
    batches = [pack([rollout], shares_prompts=False) for rollout in rollouts]
    return gradient_of(learner, batches, len(groups) * NUM_GENERATIONS)


@settings(max_examples=12)
@given(GROUPS, st.integers(1, 150), st.tuples(st.booleans(), st.booleans()), st.randoms())
def test_the_gradient_is_the_same_in_any_order_and_any_micro_batch(
    learner, groups, budget, how, random
):
    """Prompts shared or not. Rollouts of advantage 0 are not computed, but count in the
    denominator."""
    deterministic, shares_prompts = how
    order = random.sample(range(len(groups)), len(groups))
    batches = batches_of(
        groups, budget, order=order, deterministic=deterministic, shares_prompts=shares_prompts
    )
    if not batches:
        return
    got = gradient_of(learner, batches, len(groups) * NUM_GENERATIONS)
    assert largest_gradient_gap(got, gradient_one_by_one(learner, groups)) <= 1e-5


# -- shares of the train ranks ---------------------------------------------------------------------

MAX_TOKENS = 40


def rollout(slot: int, number: int, num_prompt: int, num_completion: int) -> Rollout:
    return Rollout(
        prompt_index=slot,
        prompt_ids=np.zeros(num_prompt, dtype=np.int32),
        completion_ids=np.zeros(num_completion, dtype=np.int32),
        rollout_logprobs=np.zeros(num_completion, dtype=np.float32),
        loss_mask=np.ones(num_completion, dtype=np.bool_),
        advantage=1.0,
        slot=slot,
        number=number,
    )


LENGTHS = st.lists(
    st.tuples(st.integers(1, 15), st.lists(st.integers(1, 20), min_size=1, max_size=4)),
    min_size=1,
    max_size=3,
)
"""Of each group its prompt's length and its completions'."""


@given(LENGTHS, st.integers(1, 4), st.booleans())
def test_shares_are_in_order_within_the_budget_and_as_even_as_possible(
    lengths: list[tuple[int, list[int]]], num_ranks: int, shares_prompts: bool
) -> None:
    rows = Rows(MAX_TOKENS, shares_prompts=shares_prompts)
    for slot, (prompt, completions) in enumerate(lengths):
        for number, completion in enumerate(completions):
            each = rollout(slot, number, prompt, completion)
            if len(rows.rows) < num_ranks or rows.fits(each):
                rows.add(each)
    rollouts = [each for row in rows.rows for each in row]
    shares = share_out(rows, num_ranks)
    assert len(shares) == num_ranks
    assert [(each.slot, each.number) for share in shares for each in share] == [
        (each.slot, each.number) for each in rollouts
    ]

    def largest(parts: Sequence[Sequence[Rollout]]) -> int:
        packed = (pack(part, shares_prompts=shares_prompts) for part in parts if part)
        return max(len(batch.input_ids) for batch in packed)

    assert largest(shares) <= MAX_TOKENS
    best = min(
        largest([rollouts[a:b] for a, b in zip((0, *cuts), (*cuts, len(rollouts)), strict=True)])
        for cuts in combinations_with_replacement(range(len(rollouts) + 1), num_ranks - 1)
    )
    assert largest(shares) == best


def test_rank_0_waits_for_each_micro_step() -> None:
    """Otherwise slots are freed, and overwritten, while another rank still reads them."""
    pipe, rank_1 = Pipe()
    ranks = RankPipes(0, [pipe], NO_CONTROL, timeout_seconds=0.2)
    rank_1.send(PACKED)
    ranks.finish_packing()
    with pytest.raises(TimeoutError):
        ranks.finish_packing()
