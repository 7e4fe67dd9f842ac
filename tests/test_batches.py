"""Micro-batches from the ring: every group is checked, every rollout is in one, in any order.

Episodes that are trees of token sequences train, packed, what each branch alone does.

Shapes: P prompt tokens of a group, ΣR its completion tokens.
"""

import dataclasses
from collections import Counter
from itertools import chain, combinations_with_replacement, pairwise
from multiprocessing import Pipe
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError

from easyrl.algorithm.losses import LossInputs, loss_denominator, policy_loss
from easyrl.channels.messages import MAX_UNACKNOWLEDGED, RemoteRing, decode_group, encode_group
from easyrl.channels.ring_buffer import ARRAYS
from easyrl.config import load_config
from easyrl.layout import row as row_module
from easyrl.layout.row import EMPTY, pack, split_group
from easyrl.layout.tree import TokenTree
from easyrl.model.mixers.attention import ATTENTION_NAME, register_attention
from easyrl.model.policy import Policy
from easyrl.runtime.resolve import resolve
from easyrl.types import MicroBatch, Picture, PlacedPictures
from easyrl.workers import batches as batches_module
from easyrl.workers.batches import GroupReader, Origin, UpdateEnd, micro_steps
from own_workers import (
    FIRST,
    ITERATION,
    NUM_GENERATIONS,
    VERSION,
    VOCABULARY,
    assert_same,
    loss_options,
    make_group,
    make_ring,
    num_free,
    zeroed,
)
from tiny_models import SPREAD, UNSHARED, dense_mask, largest_gradient_gap, tiny_model

register_attention()
CPU = torch.device("cpu")

GROUPS = st.lists(
    st.tuples(st.integers(0, 10**6), st.sets(st.integers(0, NUM_GENERATIONS - 1))),
    min_size=1,
    max_size=7,
).map(
    lambda drawn: [
        dataclasses.replace(
            zeroed(make_group(seed), sorted(zeros)), group_index=index, prompt_index=FIRST + index
        )
        for index, (seed, zeros) in enumerate(drawn)
    ]
)


def config_of(num_groups, *, max_tokens=10**6, **flags):
    """`flags`: deterministic, sync, num_updates, mask_truncated."""
    settings = {
        "train.prompts_per_iteration": num_groups,
        "rollout.num_generations": NUM_GENERATIONS,
        "runtime.schedule": "sync" if flags.get("sync") else "periodic",
        "runtime.deterministic": flags.get("deterministic", False),
        "train.updates_per_iteration": flags.get("num_updates", 1),
        "algorithm.mask_truncated_completions": flags.get("mask_truncated", False),
    }
    batches = resolve(load_config(None, settings)).batches
    # A budget smaller than a config may have: rollouts longer than it.
    return dataclasses.replace(batches, max_tokens=max_tokens)


class Feed:
    """A ring in this process, filled with `arrivals` one by one as the reader waits."""

    def __init__(self, arrivals, num_slots=None):
        self.ring = make_ring(num_slots or max(1, len(arrivals)))
        self.producer, self.consumer = self.ring.attach(0), self.ring.attach(1)
        self.arrivals = list(arrivals)
        self.num_waits = 0

    def arrive(self):
        assert self.arrivals, "waits for a group that never arrives"
        self.num_waits += 1
        assert self.producer.put(self.arrivals.pop(0)), "the ring is full: slots were kept"

    def reader(self, num_groups, **config):
        own = config_of(num_groups, **config)
        return GroupReader(own, self.consumer, Origin(ITERATION, VERSION), self.arrive)

    def steps(self, num_groups, **how):
        """What `num_ranks` ranks get, one rank's after the other's."""
        num_ranks, shares = how.pop("num_ranks", 1), how.pop("shares_prompts", True)
        self.last_reader, config = self.reader(num_groups, **how), config_of(num_groups, **how)
        for step in micro_steps(
            config, self.last_reader, num_ranks=num_ranks, shares_prompts=shares
        ):
            assert len(step) == num_ranks
            first, *others = step
            is_end = isinstance(first, UpdateEnd)
            assert not is_end or others == [first] * len(others)
            yield first
            yield from (each for each in others if not is_end and each is not EMPTY)

    def batches(self, num_groups, **how):
        return (step for step in self.steps(num_groups, **how) if isinstance(step, MicroBatch))

    @property
    def num_free(self):
        return num_free(self.ring)


@pytest.fixture
def feed():
    feeds = []

    def make(*arguments, **options):
        feeds.append(Feed(*arguments, **options))
        return feeds[-1]

    yield make
    for each in feeds:
        each.ring.close()


def batches_of(groups, max_tokens, *, order=None, **how):
    source = Feed([groups[i] for i in order or range(len(groups))])
    try:
        *found, end = source.steps(len(groups), max_tokens=max_tokens, **how)
        mask_truncated = how.get("mask_truncated", False)
        masks = (group.trained_mask(mask_truncated=mask_truncated) for group in groups)
        assert end == UpdateEnd(num_loss_tokens=sum(mask.sum() for mask in masks))
        assert source.last_reader.num_read == len(groups)
        assert source.last_reader.completion_tokens == sum(g.loss_mask.sum() for g in groups)
        assert source.last_reader.inserted_tokens == sum((~g.loss_mask).sum() for g in groups)
        assert source.num_free == len(groups)  # every slot was freed
        assert all(isinstance(batch, MicroBatch) for batch in found)
        for name, _, _ in ARRAYS:  # a batch is still trained when its slots are written again
            source.ring.slots[name][:] = 0
        return found
    finally:
        source.ring.close()


def sequences_of(batch):
    """Return what each sequence of a micro-batch is trained on, as the trainer reads it."""
    found, end = [], 0
    for length, parent in zip(batch.tree.lengths, batch.tree.parents, strict=True):
        node = np.arange(end, end + length)
        end += length
        if parent < 0:
            prompt = node
        else:
            completion = node
            mine = batch.completion_of_token == len(found)
            tokens = np.concatenate([prompt, completion])
            np.testing.assert_array_equal(batch.tree.positions[tokens], np.arange(len(tokens)))
            # A token is predicted at the position before it: the first one at the prompt's last.
            np.testing.assert_array_equal(batch.logits_at[mine], tokens[-length - 1 : -1])
            np.testing.assert_array_equal(batch.input_ids[completion], batch.targets[mine])
            values = batch.rollout_logprobs[mine].tolist(), batch.loss_mask[mine].tolist()
            advantages = {*batch.advantages[mine].tolist()}
            found.append((batch.input_ids[tokens].tolist(), length, *values, advantages))
    assert end == len(batch.input_ids)
    assert len(found) == batch.num_completions
    return found


def expected_sequences(groups):
    return [
        (
            [*group.prompt_ids.tolist(), *group.completion_ids[where].tolist()],
            where.stop - where.start,
            group.rollout_logprobs[where].tolist(),
            group.loss_mask[where].tolist(),
            {float(advantage)},
        )
        for group in groups
        for where, advantage in zip(group.completion_slices(), group.advantages, strict=True)
        if advantage != 0 and group.loss_mask[where].any()
    ]


@settings(max_examples=60)
@given(
    GROUPS, st.integers(1, 150), st.integers(1, 3), st.tuples(*[st.booleans()] * 2), st.randoms()
)
def test_every_rollout_is_packed_once_and_within_the_budget(groups, budget, num_ranks, how, random):
    is_exact, sync = how
    order = random.sample(range(len(groups)), len(groups))
    how = {"order": order, "deterministic": is_exact, "sync": sync, "num_ranks": num_ranks}
    batches = batches_of(groups, budget, **how)
    found = [sequence for batch in batches for sequence in sequences_of(batch)]
    trained = range(len(groups)) if is_exact else order
    assert found == expected_sequences([groups[i] for i in trained])
    longest = max((len(ids) for ids, *_ in found), default=0)
    for batch in [*batches, *batches_of(groups, budget, shares_prompts=False, **how)]:
        # Where the longest rollout is over the budget, its length is the bound.
        assert len(batch.input_ids) <= max(budget, longest)
        assert num_ranks > 1 or len(batch.input_ids) <= budget or batch.num_completions == 1


@settings(max_examples=60)
@given(GROUPS, st.integers(1, 120), st.integers(1, 3), st.booleans(), st.randoms())
def test_deterministic_batches_follow_from_the_groups_alone(
    groups, budget, num_ranks, sync, random
):
    order = random.sample(range(len(groups)), len(groups))
    how = {"deterministic": True, "num_ranks": num_ranks}
    plain = batches_of(groups, budget, **how)
    for one, other in zip(
        plain, batches_of(groups, budget, order=order, sync=sync, **how), strict=True
    ):
        found = dataclasses.asdict(other)
        pairs = [(found[name], value) for name, value in dataclasses.asdict(one).items()]
        pairs += [(value, getattr(one.tree, name)) for name, value in found["tree"].items()]
        for got, value in pairs:
            np.testing.assert_equal(got, value)
            assert getattr(got, "dtype", None) == getattr(value, "dtype", None)


@given(GROUPS, st.integers(1, 4), st.booleans())
def test_shares_are_in_order_within_the_budget_and_as_even_as_possible(
    groups, num_ranks, shares_prompts
):
    rows = batches_module.Rows(40, shares_prompts=shares_prompts)
    for rollout in chain(*map(split_group, groups)):
        rows.add(rollout, max_rows=num_ranks)
    rollouts = [*chain(*rows.rows)]
    assume(rollouts)
    shares, number = batches_module.share_out(rows, num_ranks), len(rollouts)
    assert [*map(id, chain(*shares))] == [*map(id, rollouts)] and len(shares) == num_ranks

    def largest(parts):
        packed = (pack(part, shares_prompts=shares_prompts) for part in parts if part)
        return max(len(batch.input_ids) for batch in packed)

    cuts = combinations_with_replacement(range(number + 1), num_ranks - 1)
    parts = ([rollouts[a:b] for a, b in pairwise((0, *each, number))] for each in cuts)
    assert largest(shares) == min(map(largest, parts)) <= rows.max_tokens


def drain(reader, num_groups):
    indices = []
    for _ in range(num_groups):
        lease = reader.next(0, wait=True)
        indices.append(lease.group.prompt_index)
        lease.release()
    return indices


PREVIOUS = {"iteration": ITERATION - 1, "policy_version": VERSION - 1}
IN_ORDER = pytest.mark.parametrize("deterministic", [False, True])
SYNC = pytest.mark.parametrize("sync", [False, True])


@pytest.mark.parametrize("wrong", [
    pytest.param(make_group(FIRST + 1, policy_version=VERSION - 1), id="old policy"),
    pytest.param(make_group(FIRST + 1, policy_version=VERSION + 1), id="newer policy"),
    pytest.param(make_group(FIRST + 1, iteration=ITERATION - 1), id="previous iteration"),
    pytest.param(make_group(FIRST, **PREVIOUS), id="of the previous iteration, never taken"),
    pytest.param(make_group(FIRST + 2, group_index=0), id="replacement of a group that is in"),
    pytest.param(make_group(FIRST + 2), id="above the last index"),
])  # fmt: skip
@IN_ORDER
@SYNC
def test_an_off_policy_group_or_one_that_is_not_due_stops_the_run(feed, wrong, deterministic, sync):
    """The run stops at once, even if delivery in order would never reach the group."""
    source = feed([make_group(FIRST), wrong, make_group(FIRST + 1)])
    is_off_policy = (wrong.iteration, wrong.policy_version) != (ITERATION, VERSION)
    match = rf"{'off-policy.*' if is_off_policy else ''}prompt {wrong.prompt_index}\b"
    with pytest.raises(RuntimeError, match=match):
        drain(source.reader(2, deterministic=deterministic, sync=sync), 2)


@IN_ORDER
@SYNC
def test_late_duplicates_of_this_and_the_previous_iteration_are_dropped_and_counted(
    feed, deterministic, sync
):
    previous = make_group(FIRST + 1, **PREVIOUS)
    first, second = make_group(FIRST), make_group(FIRST + 1)
    source = feed([previous, first, first, second], num_slots=2)
    source.ring.taken[previous.group_index] = previous.iteration
    reader = source.reader(2, deterministic=deterministic, sync=sync)
    assert drain(reader, 2) == [FIRST, FIRST + 1] and reader.num_duplicates == 2
    assert source.num_free == 2
    reader.finish_update(0)
    assert source.ring.delivered(ITERATION) == {0, 1}


def test_an_update_ends_only_when_each_of_its_groups_was_handed_out(feed):
    reader = feed([make_group(FIRST + index) for index in range(4)]).reader(4, num_updates=2)
    drain(reader, 2)
    reader.finish_update(0)
    with pytest.raises(RuntimeError, match="once"):
        reader.finish_update(1)


@IN_ORDER
def test_sync_hands_nothing_out_before_all_have_arrived(feed, deterministic):
    source = feed([make_group(FIRST + index) for index in (2, 1, 3, 0)])
    reader = source.reader(4, deterministic=deterministic, sync=True)
    lease = reader.next(0, wait=True)
    assert lease is not None and source.num_waits == 4
    assert sorted([lease.group.prompt_index, *drain(reader, 3)]) == [40, 41, 42, 43]


def test_the_first_update_does_not_wait_for_groups_of_the_second(feed):
    source = feed([make_group(FIRST + index) for index in (4, 0, 2, 1, 3, 5)])
    steps, sizes = source.steps(6, num_updates=2, max_tokens=1), []
    while isinstance(step := next(steps), MicroBatch):
        sizes.append(step.num_completions)
    assert len(sizes) == 3 * NUM_GENERATIONS and source.num_waits == 4
    next(steps)  # of group 4
    assert source.num_waits == 4


def test_periodic_trains_what_has_arrived(feed, monkeypatch):
    source = feed([make_group(FIRST + index) for index in range(3)])
    monkeypatch.setattr(batches_module, "MIN_FILL", 0.0)
    batches = source.batches(3)
    assert next(batches).num_completions == NUM_GENERATIONS and source.num_waits == 1
    source.arrive()
    source.arrive()
    assert next(batches).num_completions == 2 * NUM_GENERATIONS  # both that arrived meanwhile
    assert list(batches) == [] and source.num_waits == 3


def test_periodic_never_waits_while_it_holds_every_slot(feed):
    source = feed([make_group(FIRST + index) for index in range(5)], num_slots=2)
    sizes = [batch.num_completions // NUM_GENERATIONS for batch in source.batches(5)]
    assert sizes == [2, 2, 1]


@IN_ORDER
def test_groups_without_a_gradient_free_their_slots(feed, deterministic):
    source = feed([zeroed(make_group(FIRST + n), [0, 1, 2]) for n in range(3)], num_slots=1)
    assert not [*source.batches(3, max_tokens=50, deterministic=deterministic, num_ranks=2)]
    assert source.num_free == 1


@pytest.mark.parametrize(
    ("num_groups", "max_tokens", "num_free_slots"),
    # Taken by the next group while this one is trained; kept by a group that is cut.
    [(4, 10**6, [1] * 4), (1, 1, [0, 0, 1])],
)
def test_a_slot_is_free_before_its_last_micro_batch_is_trained(
    feed, num_groups, max_tokens, num_free_slots
):
    source = feed([make_group(FIRST + index) for index in range(num_groups)], num_slots=1)
    batches = source.batches(num_groups, max_tokens=max_tokens)
    assert [source.num_free for _ in batches] == num_free_slots
    assert source.num_waits == num_groups


# -- groups as messages ----------------------------------------------------------------------------

WHOLE = encode_group(make_group(FIRST))


def test_a_group_that_was_sent_goes_through_the_ring_and_a_message_is_a_copy():
    ring, group = make_ring(1), make_group(FIRST)
    assert ring.attach(0).put(decode_group(WHOLE))
    lease = ring.attach(1).get()
    assert_same(group, lease.group)
    message = encode_group(lease.group)
    lease.release()
    ring.slots["completion_ids"][:] = -1
    assert_same(group, decode_group(message))
    ring.close()


@pytest.mark.parametrize("foreign", [b"", b"\xff" * len(WHOLE), bytes(48), WHOLE[:-1]])
def test_foreign_bytes_are_refused(foreign):
    with pytest.raises(SafetensorError):
        decode_group(foreign)


def test_a_worker_waits_for_tokens_while_its_groups_are_not_acknowledged():
    host, worker = Pipe()
    layout = make_ring(1).layout
    port = RemoteRing(layout, worker).attach(0)
    for _ in range(MAX_UNACKNOWLEDGED):
        host.send_bytes(b"\x01")
    group = make_group(FIRST)
    assert all(port.put(group) for _ in range(MAX_UNACKNOWLEDGED))
    assert not port.put(group)
    host.send_bytes(b"\x01")
    assert port.pipe.poll(1.0) and port.put(group)
    too_long = dataclasses.replace(group, prompt_ids=np.zeros(10**4, np.int32))
    with pytest.raises(ValueError):
        port.put(too_long)


# -- trees -----------------------------------------------------------------------------------------


def group_of(index, num_prompt, episodes, num_ids=VOCABULARY - 3, **changes):
    """A group of random tokens, of `num_ids` kinds. `episodes`: of each the segments, (length, the
    token of [P | own R] that it continues, -1 for none). Only the first token of a context is
    certainly masked."""
    rng = np.random.default_rng(index)
    lengths = [sum(length for length, _ in segments) for segments in episodes]
    num_tokens, before = sum(lengths), [*range(-1, num_prompt - 1)]
    for segments in episodes:
        start = len(before)
        for length, other in segments:
            first = len(before)
            before.append(other if other < num_prompt else other + start - num_prompt)
            before += range(first, first + length - 1)
    mask = rng.random(num_tokens) < 0.8
    mask[np.array(before[num_prompt:]) < 0] = False
    tree = TokenTree.of_predecessors(np.array(before), cuts=[num_prompt])
    fields = {
        "prompt_ids": rng.integers(3, 3 + num_ids, num_prompt, dtype=np.int32),
        "completion_lengths": np.array(lengths, np.int32),
        "completion_ids": rng.integers(3, 3 + num_ids, num_tokens, dtype=np.int32),
        "rollout_logprobs": -rng.random(num_tokens, dtype=np.float32),
        "loss_mask": mask,
        "truncated": rng.random(len(lengths)) < 0.3,
        "node_lengths": tree.lengths.astype(np.int32),
        "node_parents": tree.parents.astype(np.int32),
        "rewards": np.zeros(len(lengths), np.float32),
        "advantages": rng.standard_normal(len(lengths), dtype=np.float32),
    }
    return make_group(index, **(fields | changes))


def paths_of(group):
    """The indices in [P | ΣR] that lead to each completion token, itself included."""
    nodes, paths = [], []
    for length, parent in zip(group.node_lengths, group.node_parents, strict=True):
        above = nodes[parent] if parent >= 0 else []
        tokens = [*range(len(paths), len(paths) + length)]
        paths += ([*above, *tokens[: number + 1]] for number in range(length))
        nodes.append([*above, *tokens])
    yield from paths[len(group.prompt_ids) :]


@st.composite
def drawn_episode(draw, num_prompt):
    segments, num_tokens = [], num_prompt
    for _ in range(draw(st.integers(1, 5))):
        length = draw(st.integers(1, min(4, num_prompt + 12 - num_tokens)))
        any_token = st.integers(-1, num_tokens - 1)
        after = draw(st.just(num_prompt - 1) | st.just(num_tokens - 1) | any_token)
        segments.append((length, after))
        num_tokens += length
        if num_tokens == num_prompt + 12:  # `own_workers.LONGEST_COMPLETION`
            break
    return segments


@st.composite
def drawn_groups(draw):
    groups = []
    num_ids = draw(st.sampled_from([1, 2, VOCABULARY - 3]))  # of few kinds: prompts begin alike
    for number in range(draw(st.integers(1, 4))):
        num_prompt = draw(st.integers(1, 6))
        episodes = draw(st.lists(drawn_episode(num_prompt), min_size=1, max_size=3))
        groups.append(group_of(FIRST + number, num_prompt, episodes, num_ids, group_index=number))
    return groups


PACKINGS = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 60),
        "num_ranks": st.integers(1, 3),
        "shares_prompts": st.booleans(),
        "mask_truncated": st.booleans(),
    }
)


@settings(max_examples=60, deadline=None)
@given(drawn_groups(), PACKINGS, st.integers(1, 3))
def test_every_sampled_token_is_trained_once_after_its_own_path(groups, packing, fewest_shared):
    with (
        patch.object(row_module, "MIN_SHARED_TOKENS", fewest_shared),
        patch.object(row_module, "MIN_SHARED_PART", 0.0),
    ):
        check_that_every_token_is_trained_once(groups, **packing)


def check_that_every_token_is_trained_once(
    groups, *, max_tokens, num_ranks, shares_prompts, mask_truncated
):
    found, expected, num_prompt = Counter(), Counter(), {}
    for group in groups:
        ids = np.concatenate([group.prompt_ids, group.completion_ids])
        mask = group.trained_mask(mask_truncated=mask_truncated)
        values = group.rollout_logprobs, np.repeat(group.advantages, group.completion_lengths)
        for path, is_trained, *of_token in zip(paths_of(group), mask, *values, strict=True):
            expected[(*ids[path], *of_token)] += is_trained
        num_prompt |= dict.fromkeys(group.advantages, len(group.prompt_ids))
    rollouts = [*chain(*map(split_group, groups))]
    for each in (rollouts, *([rollout] for rollout in rollouts)):
        row = row_module.OpenRow(shares_prompts=shares_prompts)
        for rollout in each:
            row.add(rollout)
        if each:  # the budget counts what the row will hold
            assert row.num_tokens == len(pack(each, shares_prompts=shares_prompts).input_ids)
    how = {"num_ranks": num_ranks, "shares_prompts": shares_prompts, "deterministic": True}
    for batch in batches_of(groups, max_tokens, mask_truncated=mask_truncated, **how):
        sees, num_tokens = dense_mask(batch.tree).numpy(), len(batch.input_ids)
        positions = batch.tree.positions
        values = batch.loss_mask, batch.targets, batch.rollout_logprobs, batch.advantages
        for at, is_trained, *of_token in zip(batch.logits_at, *values, strict=True):
            path = np.flatnonzero(sees[at])
            path = path[np.argsort(positions[path])]
            np.testing.assert_array_equal(positions[path], np.arange(len(path)))
            found[(*batch.input_ids[path], *of_token)] += is_trained
        assert num_ranks > 1 or num_tokens <= max_tokens or batch.num_completions == 1
        if shares_prompts:  # every token is stored once
            prompts = {advantages: num_prompt[advantages] for advantages in batch.advantages}
            assert num_tokens <= len(batch.targets) + sum(prompts.values())
    assert +found == +expected


def rollout_of(index, prompt, *files):
    prompt = np.array(prompt, np.int32)
    logprobs, mask = np.zeros(2, np.float32), np.ones(2, np.bool_)
    shown = ()
    if files:
        shown = (PlacedPictures(tuple(map(Picture, files)), 0, len(prompt)),)
    return row_module.Rollout(index, prompt, prompt[:2], logprobs, mask, 1.0, pictures=shown)


def test_prompts_share_enough_tokens_that_are_enough_of_their_group_or_none():
    common = [*range(3, 23)]
    for num_common, is_shared in ((15, False), (16, True)):
        prompts = [[*common[:num_common], 30, 31], [*common[:num_common], 40]]
        batch = pack([rollout_of(index, prompt) for index, prompt in enumerate(prompts)])
        num_saved = sum(map(len, prompts)) + 4 - batch.tree.num_tokens
        assert num_saved == (num_common if is_shared else 0)
    long_group = [
        dataclasses.replace(rollout_of(n, [*common, n]), num_group_tokens=500) for n in (30, 31)
    ]
    assert pack(long_group).tree.num_tokens == 2 * (21 + 2)


def test_prompts_with_pictures_share_nothing_and_stay_together_where_others_move():
    prompt = [*range(3, 23)]
    rollouts = [
        rollout_of(0, prompt),
        rollout_of(1, prompt, b"one"),
        rollout_of(2, prompt, b"other"),
        rollout_of(3, [*prompt, 40]),
    ]
    batch = pack(rollouts)
    assert batch.tree.num_tokens == 3 * (20 + 2) + 1 + 2
    row = row_module.OpenRow()
    for rollout in rollouts:
        row.add(rollout)
    assert row.num_tokens == batch.tree.num_tokens
    for pictures in batch.pictures:
        assert batch.input_ids[pictures.start : pictures.stop].tolist() == prompt
        assert batch.tree.positions[pictures.start] == 0
        assert batch.tree.positions[pictures.end - 1] == 21
    for shown, rollout in zip(batch.pictures, rollouts[1:], strict=False):
        assert shown.pictures == rollout.pictures[0].pictures
    assert batch.pictures[0].start == 20 + 2 + 1 + 2  # the last group stands before it


@pytest.mark.parametrize("shares_prompts", [True, False])
def test_turns_that_continue_each_other_are_packed_as_one_completion(shares_prompts):
    group = make_group(FIRST)
    lengths, parents = [len(group.prompt_ids)], [-1]
    for length in group.completion_lengths.tolist():
        turns = [1, length - 1] if length > 1 else [1]
        parents += [0, len(lengths)][: len(turns)]
        lengths += turns
    nodes = {"node_lengths": np.int32(lengths), "node_parents": np.int32(parents)}
    turns = split_group(dataclasses.replace(group, **nodes))
    plain = dataclasses.asdict(pack(split_group(group), shares_prompts=shares_prompts))
    for name, value in dataclasses.asdict(pack(turns, shares_prompts=shares_prompts)).items():
        np.testing.assert_equal(value, plain[name])
    assert len(lengths) > len(group.node_lengths)


# Three turns, of which the first two are edited later; a sub-agent with a context of its own, which
# branches, and after which both go on; a compaction in the middle of the prompt, which branches.
EPISODE = [(5, 6), (4, 11), (3, 9), (6, -1), (4, 22), (4, 15), (5, 2), (3, 35), (2, 24), (2, 11)]
EPISODES = [EPISODE, [(6, 6)], [(4, 3), (2, 8)]]
FAMILY_NAMES = ("qwen3", "mistral", "gemma2", "deepseek_v3", "gpt_neox", "gemma3n_text")


def sums_of_logprobs(logits, targets, weights):
    return (torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0] * weights).sum()


def each_branch_alone(model, group):
    """The gradients of transformers' own model: every node is trained behind its path."""
    model.zero_grad()
    ids = torch.from_numpy(np.concatenate([group.prompt_ids, group.completion_ids])).long()
    weights = np.repeat(group.advantages, group.completion_lengths) * group.loss_mask
    weights, paths = torch.from_numpy(weights).double(), [*paths_of(group)]
    ends = np.cumsum(group.node_lengths) - len(group.prompt_ids)
    for start, end in zip(ends - group.node_lengths, ends, strict=True):
        if end <= 0:  # of the prompt
            continue
        path = ids[paths[end - 1]]
        logits = model(input_ids=path[None], use_cache=False).logits[0, :-1]
        targets, of_targets = path[1:], torch.zeros(len(path) - 1, dtype=torch.float64)
        num_trained = min(end - start, len(targets))  # nothing predicts a context's first token
        of_targets[-num_trained:] = weights[end - num_trained : end]
        sums_of_logprobs(logits, targets, of_targets).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def as_packed(policy, batch):
    policy.model.zero_grad()
    logits = policy.forward(policy.inputs_of(batch))
    targets = torch.from_numpy(batch.targets)
    weights = torch.from_numpy(batch.advantages * batch.loss_mask).double()
    sums_of_logprobs(logits, targets, weights).backward()
    return {name: parameter.grad for name, parameter in policy.model.named_parameters()}


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_packed_tree_has_the_gradients_of_each_branch_alone(family):
    group = group_of(FIRST, 7, EPISODES)
    batch = pack(split_group(group))
    assert len(batch.input_ids) == len(group.prompt_ids) + len(group.completion_ids)
    model = tiny_model(family).double()
    expected = each_branch_alone(model, group)
    got = as_packed(Policy(tiny_model(family, ATTENTION_NAME).double(), CPU), batch)
    assert largest_gradient_gap(got, expected) <= 1e-5


@pytest.mark.parametrize("family", ["qwen3", "mamba"])
def test_paths_have_these_gradients_too_where_prompts_are_not_shared(family):
    group, changes = group_of(FIRST, 7, EPISODES), UNSHARED.get(family, [{}])[0]
    batch = pack(split_group(group), shares_prompts=False)
    paths = [*paths_of(group)]
    continued = {token for path in paths for token in path[:-1]}
    leaves = sorted(len(path) for path in paths if path[-1] not in continued)
    assert sorted(batch.tree.lengths) == leaves and (batch.tree.parents < 0).all()
    expected = each_branch_alone(tiny_model(family, None, SPREAD, **changes).double(), group)
    model = tiny_model(family, None, SPREAD, **changes).double()
    got = as_packed(Policy(model, CPU, no_packing_reason="asked for"), batch)
    assert largest_gradient_gap(got, expected) <= 1e-5


RATIOS = {0: 1.1, 1: 1.2, 3: 1.0, 5: 0.9, 6: 1.0, 7: 1.0}
"""Ratios of the sampled tokens: five in the first episode's three branches, one in the second."""
OF_FIRST = 1.1 + 1.2 + 1.0 + 0.9 + 1.0
AS_SEQUENCE = (1.1 * 1.2 * 0.9) ** (1 / 5)


@pytest.mark.parametrize(("loss_type", "level", "loss", "denominator"), [
    ("grpo", "token", -OF_FIRST / 5 + 2.0, 2),
    ("dapo", "token", -OF_FIRST + 2.0, 6),
    ("dr_grpo", "token", -OF_FIRST + 2.0, 2 * 8),
    ("cispo", "token", OF_FIRST * 0.5 - 2.0 * 0.5, 6),  # all log-probabilities are -0.5
    ("grpo", "sequence", -AS_SEQUENCE + 2.0, 2),
    ("dapo", "sequence", -5 * AS_SEQUENCE + 2.0, 6),
    ("dr_grpo", "sequence", -5 * AS_SEQUENCE + 2.0, 2 * 8),
    ("cispo", "sequence", 5 * AS_SEQUENCE * 0.5 - 2.0 * 0.5, 6),
])  # fmt: skip
def test_an_episode_is_one_completion_whatever_its_branches(loss_type, level, loss, denominator):
    mask = np.isin(np.arange(8), [*RATIOS])
    episodes, advantages = [[(2, 1), (2, 2), (3, -1)], [(1, 1)]], np.float32([1.0, -2.0])
    group = group_of(FIRST, 2, episodes, loss_mask=mask, advantages=advantages)
    batch = pack(split_group(group))
    options = loss_options(loss_type=loss_type, importance_sampling_level=level)
    logprobs = torch.where(torch.from_numpy(mask), -0.5, torch.nan).double()
    ratios = torch.tensor([RATIOS.get(token, 9.0) for token in range(8)]).double()
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=logprobs - ratios.log(),
        rollout_logprobs=logprobs,
        ref_logprobs=None,
        entropy=logprobs,
        advantages=torch.from_numpy(batch.advantages),
        loss_mask=torch.from_numpy(batch.loss_mask),
        completion_of_token=torch.from_numpy(batch.completion_of_token),
        num_completions=batch.num_completions,
    )
    assert policy_loss(inputs, options).loss.item() == pytest.approx(loss)
    counts = {"num_completions": len(group.rewards), "num_tokens": int(mask.sum())}
    assert loss_denominator(options, **counts) == denominator
