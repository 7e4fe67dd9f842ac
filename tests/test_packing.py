"""Packing: which rollouts of a group are trained, and the layout of a row."""

import dataclasses

import numpy as np
import pytest
from hypothesis import strategies as st

from easyrl.types import RolloutGroup
from easyrl.workers.packing import pack, split_group

ITERATION, VERSION, FIRST = 4, 9, 40
VOCABULARY = 31
NUM_GENERATIONS = 3
LONGEST_PROMPT, LONGEST_COMPLETION = 9, 12


def make_group(index, **changes):
    """A group that depends on its prompt's index alone, with masked tokens."""
    rng = np.random.default_rng(index)
    lengths = rng.integers(1, LONGEST_COMPLETION + 1, NUM_GENERATIONS)
    tokens = int(lengths.sum())
    group = RolloutGroup(
        iteration=ITERATION,
        policy_version=VERSION,
        group_index=index - FIRST,
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


def sequences_of(batch):
    """Return what each sequence of a micro-batch is trained on, as the trainer reads it."""
    found = []
    end = 0
    for prompt_length, completion_lengths in batch.groups:
        prompt = np.arange(end, end + prompt_length)
        end += prompt_length
        for length in completion_lengths:
            completion = np.arange(end, end + length)
            end += length
            mine = batch.completion_of_token == len(found)
            tokens = np.concatenate([prompt, completion])
            np.testing.assert_array_equal(batch.position_ids[tokens], np.arange(len(tokens)))
            # A token is predicted at the position before it: the first one at the prompt's last.
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
    assert end == len(batch.input_ids) == len(batch.position_ids)
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
            zeroed(make_group(seed), sorted(zeros)), group_index=index, prompt_index=FIRST + index
        )
        for index, (seed, zeros) in enumerate(drawn)
    ]
)


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


@pytest.mark.parametrize("zeros", [[], [1, 2]], ids=["three rollouts", "one rollout"])
def test_micro_batch_has_its_own_memory(zeros):
    """The ring slots of its rollouts are released and overwritten."""
    group = zeroed(make_group(FIRST), zeros)
    batch = pack(split_group(group))
    for field in dataclasses.fields(batch):
        array = getattr(batch, field.name)
        if isinstance(array, np.ndarray):
            for mine in dataclasses.fields(group):
                theirs = getattr(group, mine.name)
                assert not isinstance(theirs, np.ndarray) or not np.shares_memory(array, theirs)


# -- rollouts without a gradient ------------------------------------------------------------------


def group_to_split():
    """Three rollouts without masked tokens: one of advantage 0, one truncated, one neither."""
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
    assert got == [group.completion_ids[slices[number]].tolist() for number in kept]


def test_masked_completions_are_not_trained():
    group = group_to_split()
    first, truncated, third = group.completion_slices()
    masked = group.trained_mask(mask_truncated=True)
    assert not masked[truncated].any() and masked[first].all() and masked[third].all()
    assert group.loss_mask.all()  # the mask in the ring is unchanged
    group.loss_mask[third] = False
    (rollout,) = split_group(group)
    assert rollout.advantage == 1.0
