"""Packing and the group stream: every rollout once, within the budget, whatever the order."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from easyrl.algorithm.losses import LossInputs, policy_loss
from easyrl.channels.ring_buffer import RingBuffer
from easyrl.channels.ring_layout import RingLayout
from easyrl.config import Config
from easyrl.data.packing import pack, split_group
from easyrl.model.attention import ATTENTION_NAME, PackedGroups, register_attention
from easyrl.model.logprobs import token_logprobs
from easyrl.model.policy import Policy
from easyrl.types import RolloutGroup
from easyrl.workers import micro_steps
from easyrl.workers.assignment import Followers, Leading
from easyrl.workers.group_stream import GroupStream
from easyrl.workers.learner import loss_settings
from easyrl.workers.micro_steps import MIN_SHARE, Packing

torch.set_num_threads(1)

ITERATION, VERSION, FIRST = 4, 9, 40
VOCABULARY = 31
NUM_GENERATIONS = 3
LONGEST_PROMPT, LONGEST_COMPLETION = 9, 12


def make_group(index, **changes):
    """A group whose every element follows from its prompt's index; some have masked tokens."""
    rng = np.random.default_rng(index)
    lengths = rng.integers(1, LONGEST_COMPLETION + 1, NUM_GENERATIONS)
    tokens = int(lengths.sum())
    group = RolloutGroup(
        iteration=ITERATION,
        policy_version=VERSION,
        place=index - FIRST,
        prompt_index=index,
        prompt_ids=rng.integers(3, VOCABULARY, rng.integers(1, LONGEST_PROMPT + 1), dtype=np.int32),
        completion_lengths=lengths.astype(np.int32),
        completion_ids=rng.integers(3, VOCABULARY, tokens, dtype=np.int32),
        rollout_logprobs=-rng.random(tokens, dtype=np.float32),
        loss_mask=rng.random(tokens) < 0.8,
        rewards=rng.random(NUM_GENERATIONS, dtype=np.float32),
        advantages=rng.standard_normal(NUM_GENERATIONS, dtype=np.float32),
        truncated=np.zeros(NUM_GENERATIONS, dtype=np.bool_),
    )
    return dataclasses.replace(group, **changes)


def zeroed(group, which):
    advantages = group.advantages.copy()
    advantages[which] = 0.0
    return dataclasses.replace(group, advantages=advantages)


def micro_batches(stream, **packing):
    """Of a single train rank."""
    return Leading(stream, Packing(**packing), Followers((), 1.0)).micro_batches()


class Feed:
    """A ring in this process, filled by `arrivals` one by one as the stream waits."""

    def __init__(self, arrivals, num_slots=None):
        self.ring = RingBuffer(
            RingLayout(
                num_slots=num_slots or max(1, len(arrivals)),
                num_generations=NUM_GENERATIONS,
                max_prompt_length=LONGEST_PROMPT,
                max_completion_length=LONGEST_COMPLETION,
                num_owners=2,
            )
        )
        self.producer, self.consumer = self.ring.attach(0), self.ring.attach(1)
        self.arrivals = list(arrivals)
        self.num_waits = 0

    def arrive(self):
        assert self.arrivals, "waits for a group that never comes"
        self.num_waits += 1
        assert self.producer.put(self.arrivals.pop(0), 0.0), "the ring is full: slots were kept"

    def stream(self, num_groups, *, in_order=False, wait_for_all=False, mask_truncated=False):
        return GroupStream(
            self.consumer,
            iteration=ITERATION,
            policy_version=VERSION,
            num_groups=num_groups,
            in_order=in_order,
            wait_for_all=wait_for_all,
            wait_for_group=self.arrive,
            mask_truncated=mask_truncated,
        )

    @property
    def num_free(self):
        free = self.ring.free.drain()
        for slot in free:
            self.ring.free.send(slot)
        return len(free)


@pytest.fixture
def feed():
    feeds = []

    def make(*arguments, **options):
        feeds.append(Feed(*arguments, **options))
        return feeds[-1]

    yield make
    for each in feeds:
        each.ring.close()


def batches_of(
    groups,
    max_tokens,
    *,
    order=None,
    fill=True,
    in_order=False,
    wait_for_all=False,
    shares_prompts=True,
):
    """The micro-batches of these groups, which arrive in this order."""
    arrivals = groups if order is None else [groups[i] for i in order]
    source = Feed(arrivals)
    try:
        stream = source.stream(len(groups), in_order=in_order, wait_for_all=wait_for_all)
        batches = list(
            micro_batches(stream, max_tokens=max_tokens, fill=fill, shares_prompts=shares_prompts)
        )
        assert stream.is_exhausted and stream.num_trained == len(groups)
        assert stream.completion_tokens == sum(g.num_completion_tokens for g in groups)
        assert source.num_free == len(groups)  # every slot was given back
        return batches
    finally:
        source.ring.close()


def sequences_of(batch):
    """What each sequence of a micro-batch is trained on, read the way the trainer reads it."""
    found = []
    place = 0
    for prompt_length, completion_lengths in batch.groups:
        prompt = np.arange(place, place + prompt_length)
        place += prompt_length
        for length in completion_lengths:
            completion = np.arange(place, place + length)
            place += length
            mine = batch.completion_of_token == len(found)
            tokens = np.concatenate([prompt, completion])
            np.testing.assert_array_equal(batch.position_ids[tokens], np.arange(len(tokens)))
            # A token is predicted from the place before it: the first from the prompt's last.
            np.testing.assert_array_equal(batch.logits_at[mine], tokens[-length - 1 : -1])
            np.testing.assert_array_equal(batch.input_ids[completion], batch.targets[mine])
            found.append(
                (
                    tuple(batch.input_ids[tokens].tolist()),
                    length,
                    tuple(batch.rollout_logprobs[mine].tolist()),
                    tuple(batch.loss_mask[mine].tolist()),
                    tuple(set(batch.advantages[mine].tolist())),
                )
            )
    assert place == len(batch.input_ids) == len(batch.position_ids)
    assert len(found) == batch.num_completions
    return found


def expected_sequences(groups):
    return [
        (
            (*group.prompt_ids.tolist(), *group.completion_ids[where].tolist()),
            where.stop - where.start,
            tuple(group.rollout_logprobs[where].tolist()),
            tuple(group.loss_mask[where].tolist()),
            (float(advantage),),
        )
        for group in groups
        for where, advantage in zip(group.completion_slices(), group.advantages, strict=True)
        if advantage != 0 and group.loss_mask[where].any()
    ]


GROUPS = st.lists(
    st.tuples(st.integers(0, 10**6), st.sets(st.integers(0, NUM_GENERATIONS - 1))),
    min_size=1,
    max_size=7,
).map(
    lambda drawn: [
        dataclasses.replace(
            zeroed(make_group(seed), sorted(zeros)), place=place, prompt_index=FIRST + place
        )
        for place, (seed, zeros) in enumerate(drawn)
    ]
)


# -- packing --------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(GROUPS, st.integers(1, 120), st.booleans(), st.booleans(), st.randoms())
def test_every_rollout_is_packed_once_and_within_the_budget(groups, budget, fill, wait, random):
    order = random.sample(range(len(groups)), len(groups))
    batches = batches_of(groups, budget, order=order, fill=fill, wait_for_all=wait)
    found = [sequence for batch in batches for sequence in sequences_of(batch)]
    assert found == expected_sequences([groups[i] for i in order])
    for batch in batches:
        # A rollout that is over the budget by itself stands alone.
        assert len(batch.input_ids) <= budget or batch.num_completions == 1


def last_prompt_of(batch):
    prompt_length, completion_lengths = batch.groups[-1]
    start = len(batch.input_ids) - sum(completion_lengths) - prompt_length
    return batch.input_ids[start : start + prompt_length].tolist()


def test_the_rollouts_of_a_group_share_their_prompt():
    groups = [make_group(FIRST), make_group(FIRST + 1)]
    (batch,) = batches_of(groups, 10**6)
    assert [length for length, _ in batch.groups] == [len(g.prompt_ids) for g in groups]
    expected = sum(
        len(g.prompt_ids)
        + sum(n for n, a in zip(g.completion_lengths, g.advantages, strict=True) if a != 0)
        for g in groups
    )
    assert len(batch.input_ids) == expected


@settings(max_examples=60, deadline=None)
@given(GROUPS, st.integers(1, 120))
def test_no_micro_batch_is_smaller_than_it_must_be(groups, budget):
    # The prompts tell below which group a rollout is of.
    assume(len({tuple(group.prompt_ids.tolist()) for group in groups}) == len(groups))
    batches = batches_of(groups, budget)
    for batch, following in pairwise(batches):
        prompt_length, completion_lengths = following.groups[0]
        shared = following.input_ids[:prompt_length].tolist() == last_prompt_of(batch)
        added = completion_lengths[0] + (0 if shared else prompt_length)
        assert len(batch.input_ids) + added > budget


@settings(max_examples=60, deadline=None)
@given(GROUPS, st.integers(1, 120), st.booleans(), st.randoms())
def test_boundaries_follow_from_the_groups_alone(groups, budget, wait_for_all, random):
    """In deterministic mode: neither arrival nor schedule shows in any array."""
    order = random.sample(range(len(groups)), len(groups))
    plain = batches_of(groups, budget)
    shuffled = batches_of(groups, budget, order=order, in_order=True, wait_for_all=wait_for_all)
    assert len(plain) == len(shuffled)
    for one, other in zip(plain, shuffled, strict=True):
        for field in dataclasses.fields(one):
            a, b = getattr(one, field.name), getattr(other, field.name)
            if field.name == "groups":
                assert a == b
                continue
            np.testing.assert_array_equal(a, b)
            assert a.dtype == b.dtype


def test_boundaries_do_not_depend_on_what_the_tokens_are():
    groups = [make_group(FIRST + place) for place in range(5)]
    others = [
        dataclasses.replace(
            group, completion_ids=group.completion_ids[::-1].copy(), rewards=-group.rewards
        )
        for group in groups
    ]
    assert [b.groups for b in batches_of(groups, 40)] == [b.groups for b in batches_of(others, 40)]


def test_a_micro_batch_has_its_own_memory():
    """The slots it was packed from are given back and written over."""
    group = make_group(FIRST)
    batch = pack(split_group(group))
    for field in dataclasses.fields(batch):
        array = getattr(batch, field.name)
        if isinstance(array, np.ndarray):
            for mine in dataclasses.fields(group):
                theirs = getattr(group, mine.name)
                assert not isinstance(theirs, np.ndarray) or not np.shares_memory(array, theirs)


def test_one_rollout_alone_has_its_own_memory_too():
    group = zeroed(make_group(FIRST), [1, 2])
    (rollout,) = split_group(group)
    batch = pack([rollout])
    for name in ("rollout_logprobs", "loss_mask"):
        assert not np.shares_memory(getattr(batch, name), getattr(group, name))


# -- rollouts without a gradient ------------------------------------------------------------------


def group_to_split():
    """Three rollouts: one of advantage 0, one truncated, one with neither; the masks are whole."""
    group = make_group(FIRST)
    return dataclasses.replace(
        group,
        loss_mask=np.ones_like(group.loss_mask),
        advantages=np.array([0.0, 1.0, -1.0], dtype=np.float32),
        truncated=np.array([False, True, False]),
    )


@pytest.mark.parametrize(
    ("keywords", "kept"),
    [
        ({}, [1, 2]),
        ({"mask_truncated": True}, [2]),
        ({"keep_zero_advantages": True}, [0, 1, 2]),
        ({"mask_truncated": True, "keep_zero_advantages": True}, [0, 2]),
    ],
)
def test_only_rollouts_with_a_gradient_are_trained(keywords, kept):
    group = group_to_split()
    slices = group.completion_slices()
    got = [rollout.completion_ids.tolist() for rollout in split_group(group, **keywords)]
    assert got == [group.completion_ids[slices[place]].tolist() for place in kept]


def test_a_rollout_whose_tokens_are_all_masked_is_not_trained():
    group = group_to_split()
    mask = group.loss_mask.copy()
    mask[group.completion_slices()[2]] = False
    (rollout,) = split_group(dataclasses.replace(group, loss_mask=mask))
    assert rollout.advantage == 1.0


def test_a_truncated_completion_is_masked_as_a_whole():
    group = make_group(FIRST, truncated=np.array([False, True, False]))
    before = group.loss_mask.copy()
    np.testing.assert_array_equal(group.trained_mask(mask_truncated=False), before)
    masked = group.trained_mask(mask_truncated=True)
    first, second, third = group.completion_slices()
    assert not masked[second].any()
    for where in (first, third):
        np.testing.assert_array_equal(masked[where], before[where])
    np.testing.assert_array_equal(group.loss_mask, before)  # the ring's own stays as it is


def test_tokens_of_the_loss_are_counted_whether_they_are_computed_or_not(feed):
    """Those of truncated completions only where they are trained."""
    groups = [group_to_split(), make_group(FIRST + 1)]
    for mask_truncated in (False, True):
        stream = feed(groups).stream(2, mask_truncated=mask_truncated)
        drain(stream)
        unmasked = [group.trained_mask(mask_truncated=mask_truncated) for group in groups]
        assert stream.num_loss_tokens == sum(int(mask.sum()) for mask in unmasked)
        assert stream.completion_tokens == sum(g.num_completion_tokens for g in groups)
    assert len(groups[0].loss_mask) > groups[0].trained_mask(mask_truncated=True).sum()


def test_dtypes_are_what_torch_indexes_with():
    batch = pack(split_group(make_group(FIRST)))
    for name in ("input_ids", "position_ids", "logits_at", "targets", "completion_of_token"):
        assert getattr(batch, name).dtype == np.int64
    assert batch.advantages.dtype == batch.rollout_logprobs.dtype == np.float32


# -- the gradient ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def policy():
    register_attention()
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
    )
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    return Policy(model.eval(), torch.device("cpu"))


def accumulated_gradient(policy, batches, num_completions):
    """As the trainer does it: one backward per micro-batch, divided by the iteration's count."""
    policy.model.zero_grad()
    for batch in batches:
        logits = policy.forward(
            torch.from_numpy(batch.input_ids),
            torch.from_numpy(batch.position_ids),
            PackedGroups(batch.groups),
            logits_at=torch.from_numpy(batch.logits_at),
        )
        logprobs, entropy = token_logprobs(logits, torch.from_numpy(batch.targets), 0.9)
        outputs = policy_loss(
            LossInputs(
                logprobs=logprobs,
                old_logprobs=logprobs.detach(),
                rollout_logprobs=torch.from_numpy(batch.rollout_logprobs),
                ref_logprobs=None,
                entropy=entropy,
                advantages=torch.from_numpy(batch.advantages),
                loss_mask=torch.from_numpy(batch.loss_mask),
                completion_of_token=torch.from_numpy(batch.completion_of_token),
                num_completions=batch.num_completions,
            ),
            loss_settings(Config()),
        )
        (outputs.loss / num_completions).backward()
    return {name: p.grad.clone() for name, p in policy.model.named_parameters()}


def gradient_by_definition(policy, groups):
    """Sequence by sequence, straight from the formula, zero advantages included."""
    policy.model.zero_grad()
    total = 0.0
    for group in groups:
        prompt = group.prompt_ids.tolist()
        for where, advantage in zip(group.completion_slices(), group.advantages, strict=True):
            ids = torch.tensor(prompt + group.completion_ids[where].tolist())
            length = where.stop - where.start
            logits = policy.forward(
                ids,
                torch.arange(len(ids)),
                PackedGroups.of_sequences([len(ids)]),
                torch.arange(len(ids)),
            )
            logprobs = torch.log_softmax(logits / 0.9, -1)[-length - 1 : -1]
            chosen = logprobs[torch.arange(length), ids[-length:]]
            mask = torch.from_numpy(group.loss_mask[where])
            ratio = torch.exp(chosen - chosen.detach())
            per_token = torch.where(mask, -ratio * float(advantage), 0.0)
            total = total + per_token.sum() / max(1, int(mask.sum()))
    (total / sum(group.num_generations for group in groups)).backward()
    return {name: p.grad.clone() for name, p in policy.model.named_parameters()}


def largest_gap(got, expected):
    """DESIGN.md, invariant 4."""
    norm = torch.stack([g.norm() for g in expected.values()]).norm()
    return max(
        float((got[name] - g).norm() / max(g.norm(), 1e-4 * norm)) for name, g in expected.items()
    )


@settings(max_examples=12, deadline=None)
@given(GROUPS, st.integers(1, 150), st.tuples(st.booleans(), st.booleans()), st.randoms())
def test_the_gradient_is_the_same_in_any_order_and_any_micro_batch(
    policy, groups, budget, how, random
):
    """Prompts shared or not. Rollouts of advantage zero are not computed, and stay in the
    denominator."""
    fill, shares_prompts = how
    order = random.sample(range(len(groups)), len(groups))
    batches = batches_of(groups, budget, order=order, fill=fill, shares_prompts=shares_prompts)
    if not batches:
        return
    got = accumulated_gradient(policy, batches, len(groups) * NUM_GENERATIONS)
    assert largest_gap(got, gradient_by_definition(policy, groups)) <= 1e-5


def test_repeated_prompts_make_a_row_of_whole_sequences():
    group = make_group(FIRST)
    shared, repeated = (pack(split_group(group), shares_prompts=shares) for shares in (True, False))
    num_prompt = len(group.prompt_ids)
    (_, lengths), *_ = shared.groups
    assert repeated.groups == [(num_prompt + length, []) for length in lengths]
    assert len(repeated.input_ids) == len(shared.input_ids) + num_prompt * (len(lengths) - 1)
    assert repeated.num_completions == shared.num_completions == len(lengths)
    for name in ("targets", "completion_of_token", "advantages", "loss_mask", "rollout_logprobs"):
        np.testing.assert_array_equal(getattr(repeated, name), getattr(shared, name))
    starts = np.flatnonzero(repeated.position_ids == 0)
    for start, (length, _) in zip(starts, repeated.groups, strict=True):
        assert repeated.position_ids[start : start + length].tolist() == list(range(length))
        ids = repeated.input_ids[start : start + num_prompt]
        np.testing.assert_array_equal(ids, group.prompt_ids)
    np.testing.assert_array_equal(repeated.input_ids[repeated.logits_at + 1], repeated.targets)


@settings(max_examples=30, deadline=None)
@given(GROUPS, st.integers(1, 150))
def test_repeated_prompts_count_in_the_budget(groups, budget):
    for batch in batches_of(groups, budget, shares_prompts=False):
        assert batch.num_completions == 1 or len(batch.input_ids) <= budget


def test_a_rollout_of_advantage_zero_costs_nothing_and_halves_the_rest(policy):
    groups = [make_group(FIRST), zeroed(make_group(FIRST + 1), [0, 1, 2])]
    batches = batches_of(groups, 10**6)
    assert sum(batch.num_completions for batch in batches) == NUM_GENERATIONS
    alone = accumulated_gradient(policy, batches_of(groups[:1], 10**6), NUM_GENERATIONS)
    both = accumulated_gradient(policy, batches, 2 * NUM_GENERATIONS)
    assert largest_gap({name: 2 * g for name, g in both.items()}, alone) <= 1e-6


def test_an_iteration_without_a_gradient_has_no_micro_batch():
    groups = [zeroed(make_group(FIRST + place), [0, 1, 2]) for place in range(4)]
    for fill in (True, False):
        assert batches_of(groups, 50, fill=fill) == []


# -- the stream -----------------------------------------------------------------------------------


def drain(stream):
    indexes = []
    while (lease := stream.next(wait=True)) is not None:
        with lease as group:
            indexes.append(group.prompt_index)
    return indexes


@pytest.mark.parametrize(
    "stale",
    [
        {"policy_version": VERSION - 1},
        {"policy_version": VERSION + 1},
        {"iteration": ITERATION - 1},
    ],
)
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("wait_for_all", [False, True])
def test_an_off_policy_group_stops_the_run(feed, stale, in_order, wait_for_all):
    source = feed([make_group(FIRST), make_group(FIRST + 1, **stale)])
    stream = source.stream(2, in_order=in_order, wait_for_all=wait_for_all)
    with pytest.raises(RuntimeError, match=r"off-policy group: prompt 41 .* trains policy 9"):
        drain(stream)


@pytest.mark.parametrize("in_order", [False, True])
def test_a_group_that_comes_twice_stops_the_run(feed, in_order):
    source = feed([make_group(FIRST), make_group(FIRST), make_group(FIRST + 1)])
    with pytest.raises(RuntimeError, match="place 0 of iteration 4 has its group already"):
        drain(source.stream(2, in_order=in_order))


@pytest.mark.parametrize("in_order", [False, True])
def test_a_group_and_its_replacement_are_not_both_trained(feed, in_order):
    fresh = make_group(FIRST + 2, place=0)
    source = feed([make_group(FIRST), fresh, make_group(FIRST + 1)])
    with pytest.raises(RuntimeError, match=r"place 0 .* already.*: the group of prompt 42"):
        drain(source.stream(2, in_order=in_order))


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("index", [FIRST - 1, FIRST + 2])
def test_a_group_of_another_iterations_place_stops_the_run(feed, in_order, index):
    """At once, also where delivery in order would have it wait for its turn for ever."""
    source = feed([make_group(index), make_group(FIRST), make_group(FIRST + 1)])
    with pytest.raises(RuntimeError, match=f"prompt {index}"):
        drain(source.stream(2, in_order=in_order))


def test_groups_come_in_order_of_arrival_by_default(feed):
    source = feed([make_group(FIRST + place) for place in (2, 0, 1)])
    assert drain(source.stream(3)) == [FIRST + 2, FIRST, FIRST + 1]


@pytest.mark.parametrize("wait_for_all", [False, True])
def test_groups_come_in_order_of_their_places_if_asked(feed, wait_for_all):
    """A fresh prompt comes at the place of the one whose group it replaces."""
    fresh = make_group(FIRST + 4, place=1)
    source = feed([make_group(FIRST + 3), make_group(FIRST + 2), make_group(FIRST), fresh])
    stream = source.stream(4, in_order=True, wait_for_all=wait_for_all)
    assert drain(stream) == [FIRST, FIRST + 4, FIRST + 2, FIRST + 3]


@pytest.mark.parametrize("in_order", [False, True])
def test_sync_hands_nothing_out_before_all_are_in(feed, in_order):
    source = feed([make_group(FIRST + place) for place in (2, 1, 3, 0)])
    stream = source.stream(4, in_order=in_order, wait_for_all=True)
    lease = stream.next(wait=True)
    assert lease is not None and source.num_waits == 4
    assert sorted([lease.group.prompt_index, *drain(stream)]) == [40, 41, 42, 43]


def test_periodic_hands_the_first_group_out_before_the_second_is_there(feed):
    source = feed([make_group(FIRST + place) for place in (1, 0)])
    stream = source.stream(2)
    assert stream.next(wait=True).group.prompt_index == FIRST + 1 and source.num_waits == 1
    assert stream.next(wait=False) is None and not stream.is_exhausted
    assert stream.next(wait=True).group.prompt_index == FIRST and stream.is_exhausted
    assert stream.next(wait=True) is None and source.num_waits == 2


def test_periodic_trains_what_is_there_rather_than_wait(feed, monkeypatch):
    source = feed([make_group(FIRST + place) for place in range(3)])
    monkeypatch.setattr(micro_steps, "MIN_SHARE", 0.0)
    batches = micro_batches(source.stream(3), max_tokens=10**6, fill=False)
    assert next(batches).num_completions == NUM_GENERATIONS and source.num_waits == 1
    source.arrive()
    source.arrive()
    assert next(batches).num_completions == 2 * NUM_GENERATIONS  # both that came meanwhile
    assert list(batches) == [] and source.num_waits == 3


def test_periodic_waits_while_a_micro_batch_is_small_and_more_is_to_come(feed):
    groups = [make_group(FIRST + place) for place in range(4)]
    tokens = [len(group.prompt_ids) + group.num_completion_tokens for group in groups]
    enough = tokens[0] + tokens[1]
    source = feed(groups)
    batches = micro_batches(source.stream(4), max_tokens=round(enough / MIN_SHARE), fill=False)
    assert next(batches).num_completions == 2 * NUM_GENERATIONS and source.num_waits == 2
    rest = list(batches)
    assert sum(batch.num_completions for batch in rest) == 2 * NUM_GENERATIONS


def test_periodic_never_waits_with_every_slot_in_its_hands(feed):
    source = feed([make_group(FIRST + place) for place in range(5)], num_slots=2)
    batches = list(micro_batches(source.stream(5), max_tokens=10**6, fill=False))
    assert [batch.num_completions // NUM_GENERATIONS for batch in batches] == [2, 2, 1]


def test_a_slot_is_free_before_its_micro_batch_is_trained(feed):
    """With a ring of one slot the next group can be written while this one is trained."""
    source = feed([make_group(FIRST + place) for place in range(4)], num_slots=1)
    for _ in micro_batches(source.stream(4), max_tokens=10**6, fill=False):
        assert source.num_free == 1
    assert source.num_waits == 4


def test_a_group_cut_by_the_budget_keeps_its_slot_until_its_last_rollout_is_packed(feed):
    source = feed([make_group(FIRST)])
    num_free = [source.num_free for _ in micro_batches(source.stream(1), max_tokens=1, fill=False)]
    assert num_free == [0] * (NUM_GENERATIONS - 1) + [1]


def test_groups_without_a_gradient_give_their_slots_back(feed):
    groups = [zeroed(make_group(FIRST + place), [0, 1, 2]) for place in range(3)]
    source = feed(groups, num_slots=1)
    assert list(micro_batches(source.stream(3), max_tokens=50, fill=False)) == []
    assert source.num_free == 1
