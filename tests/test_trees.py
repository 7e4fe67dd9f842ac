"""Episodes that are trees of token sequences: packed, they train what each branch alone does.

Shapes: P prompt tokens of a group, ΣR its completion tokens.
"""

import dataclasses
from collections import Counter
from contextlib import closing

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_batches import config_of, vars_of
from test_losses import config_of as loss_config

from easyrl.algorithm.losses import LossInputs, loss_denominator, policy_loss
from easyrl.model.attention import ATTENTION_NAME, PackedGroups, register_attention
from easyrl.model.flex_shared_prompt import FlexSharedPrompt
from easyrl.model.policy import Policy
from easyrl.types import MicroBatch
from easyrl.workers.batches import GroupReader, UpdateEnd, micro_steps
from easyrl.workers.packing import EMPTY, pack, split_group
from own_workers import FIRST, ITERATION, VERSION, VOCABULARY, make_group, make_ring
from tiny_models import SPREAD, UNSHARED, largest_gradient_gap, tiny_model

torch.set_num_threads(1)
register_attention()
CPU = torch.device("cpu")


def group_of(index, num_prompt, episodes, **changes):
    """A group of random tokens. `episodes`: of each the segments, (length, the token of
    [P | own R] that it continues, -1 for none). Only the first token of a context is certainly
    masked."""
    rng = np.random.default_rng(index)
    lengths = [sum(length for length, _ in segments) for segments in episodes]
    num_tokens, start, after, firsts = sum(lengths), 0, [], []
    for segments, total in zip(episodes, lengths, strict=True):
        after += [other if other < num_prompt else other + start for _, other in segments]
        firsts += (start + np.cumsum([0, *(length for length, _ in segments[:-1])])).tolist()
        start += total
    mask = rng.random(num_tokens) < 0.8
    mask[[first for first, other in zip(firsts, after, strict=True) if other < 0]] = False
    fields = {
        "prompt_ids": rng.integers(3, VOCABULARY, num_prompt, dtype=np.int32),
        "completion_lengths": np.array(lengths, np.int32),
        "completion_ids": rng.integers(3, VOCABULARY, num_tokens, dtype=np.int32),
        "rollout_logprobs": -rng.random(num_tokens, dtype=np.float32),
        "loss_mask": mask,
        "truncated": rng.random(len(lengths)) < 0.3,
        "segment_lengths": np.array([n for each in episodes for n, _ in each], np.int32),
        "segment_after": np.array(after, np.int32),
        "rewards": np.zeros(len(lengths), np.float32),
        "advantages": rng.standard_normal(len(lengths), dtype=np.float32),
    }
    return make_group(index, **(fields | changes))


def paths_of(group):
    """The indices in [P | ΣR] that lead to each completion token, itself included."""
    num_prompt = len(group.prompt_ids)
    before = np.arange(-1, num_prompt + group.num_completion_tokens - 1)
    starts = num_prompt + np.cumsum(group.segment_lengths) - group.segment_lengths
    before[starts] = group.segment_after
    for token in range(num_prompt, len(before)):
        path = [token]
        while (other := before[path[-1]]) >= 0:
            path.append(int(other))
        yield path[::-1]


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
    for number in range(draw(st.integers(1, 4))):
        num_prompt = draw(st.integers(1, 6))
        episodes = draw(st.lists(drawn_episode(num_prompt), min_size=1, max_size=3))
        groups.append(group_of(FIRST + number, num_prompt, episodes, group_index=number))
    return groups


def visible(batch):
    """Which tokens of the row each of them sees: FlexAttention's mask for every pair [T, T]."""
    places = torch.arange(len(batch.input_ids))
    mask = FlexSharedPrompt(batch.groups, CPU).visible(None)
    return mask(None, None, places[:, None], places).numpy()


def batches_of(groups, config, *, num_ranks, shares_prompts):
    """The micro-batches of all ranks, from the ring."""
    with closing(make_ring(len(groups))) as ring:
        port = ring.attach(0)
        for group in groups:
            assert port.put(group, 0.0)
        reader = GroupReader(config, port, (ITERATION, VERSION), wait=lambda: pytest.fail("waits"))
        how = {"num_ranks": num_ranks, "shares_prompts": shares_prompts}
        for step in micro_steps(config, reader, **how):
            if isinstance(step[0], UpdateEnd):
                mask_truncated = config.algorithm.mask_truncated_completions
                masks = (each.trained_mask(mask_truncated=mask_truncated) for each in groups)
                assert step[0].num_loss_tokens == sum(mask.sum() for mask in masks)
            yield from (each for each in step if isinstance(each, MicroBatch) and each is not EMPTY)


@settings(max_examples=60, deadline=None)
@given(drawn_groups(), st.integers(1, 60), st.integers(1, 3), st.booleans(), st.booleans())
def test_every_sampled_token_is_trained_once_after_its_own_path(
    groups, max_tokens, num_ranks, shares_prompts, mask_truncated
):
    config = config_of(len(groups), max_tokens=max_tokens, deterministic=True)
    changes = {"mask_truncated_completions": mask_truncated}
    config = config.model_copy(update={"algorithm": config.algorithm.model_copy(update=changes)})
    found, expected, num_prompt = Counter(), Counter(), {}
    for group in groups:
        ids = np.concatenate([group.prompt_ids, group.completion_ids])
        mask = group.trained_mask(mask_truncated=mask_truncated)
        values = group.rollout_logprobs, np.repeat(group.advantages, group.completion_lengths)
        for path, is_trained, *of_token in zip(paths_of(group), mask, *values, strict=True):
            expected[(*ids[path], *of_token)] += is_trained
        num_prompt |= dict.fromkeys(group.advantages, len(group.prompt_ids))
        for rollout in split_group(group):  # the budget counts what the row will hold
            alone = pack([rollout], shares_prompts=shares_prompts)
            num_tokens = rollout.num_tokens_behind(None, shares_prompts=shares_prompts)
            assert num_tokens == len(alone.input_ids)
    for batch in batches_of(groups, config, num_ranks=num_ranks, shares_prompts=shares_prompts):
        sees, num_tokens = visible(batch), len(batch.input_ids)
        values = batch.loss_mask, batch.targets, batch.rollout_logprobs, batch.advantages
        for at, is_trained, *of_token in zip(batch.logits_at, *values, strict=True):
            path = np.flatnonzero(sees[at])
            path = path[np.argsort(batch.position_ids[path])]
            np.testing.assert_array_equal(batch.position_ids[path], np.arange(len(path)))
            found[(*batch.input_ids[path], *of_token)] += is_trained
        assert num_ranks > 1 or num_tokens <= max_tokens or batch.num_completions == 1
        if shares_prompts:  # every token is stored once
            prompts = {advantages: num_prompt[advantages] for advantages in batch.advantages}
            assert num_tokens <= len(batch.targets) + sum(prompts.values())
    assert +found == +expected


@pytest.mark.parametrize("shares_prompts", [True, False])
def test_turns_that_continue_each_other_are_packed_as_one_completion(shares_prompts):
    group = make_group(FIRST)
    num_prompt, ends = len(group.prompt_ids), np.cumsum(group.completion_lengths)
    cuts = np.unique([*ends, *(ends - group.completion_lengths + 1)])
    starts = np.array([0, *cuts[:-1]])
    is_first = np.isin(starts, [0, *ends])
    segments = {
        "segment_lengths": np.diff(cuts, prepend=0).astype(np.int32),
        "segment_after": (num_prompt + np.where(is_first, 0, starts) - 1).astype(np.int32),
    }
    turns = split_group(dataclasses.replace(group, **segments))
    plain = vars_of(pack(split_group(group), shares_prompts=shares_prompts))
    for name, value in vars_of(pack(turns, shares_prompts=shares_prompts)).items():
        np.testing.assert_equal(value, plain[name])
    assert len(cuts) > len(ends)


# Three turns, of which the first two are edited later; a sub-agent with a context of its own, which
# branches, and after which both go on; a compaction in the middle of the prompt, which branches.
EPISODE = [(5, 6), (4, 11), (3, 9), (6, -1), (4, 22), (4, 15), (5, 2), (3, 35), (2, 24), (2, 11)]
EPISODES = [EPISODE, [(6, 6)], [(4, 3), (2, 8)]]
FAMILY_NAMES = ("qwen3", "mistral", "gemma2", "deepseek_v3", "gpt_neox", "gemma3n_text")


def sums_of_logprobs(logits, targets, weights):
    return (torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0] * weights).sum()


def each_branch_alone(model, group):
    """The gradients of transformers' own model: every segment is trained behind its path."""
    model.zero_grad()
    ids = torch.from_numpy(np.concatenate([group.prompt_ids, group.completion_ids])).long()
    weights = np.repeat(group.advantages, group.completion_lengths) * group.loss_mask
    weights, paths = torch.from_numpy(weights).double(), [*paths_of(group)]
    ends = np.cumsum(group.segment_lengths)
    for start, end in zip(ends - group.segment_lengths, ends, strict=True):
        path = ids[paths[end - 1]]
        logits = model(input_ids=path[None], use_cache=False).logits[0, :-1]
        targets, of_targets = path[1:], torch.zeros(len(path) - 1, dtype=torch.float64)
        num_trained = min(end - start, len(targets))  # nothing predicts a context's first token
        of_targets[-num_trained:] = weights[end - num_trained : end]
        sums_of_logprobs(logits, targets, of_targets).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def as_packed(policy, batch):
    policy.model.zero_grad()
    arrays = batch.input_ids, batch.position_ids, batch.logits_at, batch.targets
    ids, positions, logits_at, targets = map(torch.from_numpy, arrays)
    logits = policy.forward(ids, positions, PackedGroups(batch.groups), logits_at)
    weights = torch.from_numpy(batch.advantages * batch.loss_mask).double()
    sums_of_logprobs(logits, targets, weights).backward()
    return {name: parameter.grad for name, parameter in policy.model.named_parameters()}


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_packed_tree_has_the_gradients_of_each_branch_alone(family):
    group = group_of(FIRST, 7, EPISODES)
    batch = pack(split_group(group))
    assert len(batch.input_ids) == len(group.prompt_ids) + group.num_completion_tokens
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
    assert sorted(batch.groups) == [(length, []) for length in leaves]
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
    config = loss_config(loss_type=loss_type, importance_sampling_level=level)
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
    assert policy_loss(inputs, config).loss.item() == pytest.approx(loss)
    counts = {"num_completions": group.num_generations, "num_tokens": int(mask.sum())}
    assert loss_denominator(config, **counts) == denominator
