"""How an update's rollouts are shared out over the train ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations_with_replacement

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from easyrl.data.packing import Rollout
from easyrl.workers.micro_steps import NOTHING, Packing, PlacedRollout, _Rows, share_out

MAX_TOKENS = 40


def rollout(group: int, num_prompt: int, num_completion: int) -> Rollout:
    return Rollout(
        prompt_index=group,
        prompt_ids=np.zeros(num_prompt, dtype=np.int32),
        completion_ids=np.zeros(num_completion, dtype=np.int32),
        rollout_logprobs=np.zeros(num_completion, dtype=np.float32),
        loss_mask=np.ones(num_completion, dtype=np.bool_),
        advantage=1.0,
    )


def num_tokens(rollouts: Sequence[Rollout], *, shares_prompts: bool) -> int:
    """Of a row, as it is packed."""
    if not rollouts:
        return 0
    packing = Packing(MAX_TOKENS, fill=True, shares_prompts=shares_prompts)
    return len(packing.pack(rollouts).input_ids)


def groups() -> st.SearchStrategy[list[tuple[int, list[int]]]]:
    """Of each its prompt's length and its completions'."""
    group = st.tuples(st.integers(1, 15), st.lists(st.integers(1, 20), min_size=1, max_size=4))
    return st.lists(group, min_size=1, max_size=3)


@given(groups(), st.integers(1, 4), st.booleans())
def test_shares_are_in_order_within_the_budget_and_as_even_as_can_be(
    lengths: list[tuple[int, list[int]]], num_ranks: int, shares_prompts: bool
) -> None:
    rows = _Rows(Packing(MAX_TOKENS, fill=True, shares_prompts=shares_prompts))
    for slot, (prompt, completions) in enumerate(lengths):
        for number, completion in enumerate(completions):
            each = rollout(slot, prompt, completion)
            if len(rows.rows) < num_ranks or rows.has_room_for(each):
                rows.add(PlacedRollout(slot, number, each))
    placed = [each for row in rows.rows for each in row]
    shares = share_out(rows, num_ranks)
    assert len(shares) == num_ranks
    assert [each for share in shares for each in share] == placed

    def largest(parts: Sequence[Sequence[PlacedRollout]]) -> int:
        rollouts = [[each.rollout for each in part] for part in parts]
        return max(num_tokens(part, shares_prompts=shares_prompts) for part in rollouts)

    assert largest(shares) <= MAX_TOKENS
    best = min(
        largest([placed[a:b] for a, b in zip((0, *cuts), (*cuts, len(placed)), strict=True)])
        for cuts in combinations_with_replacement(range(len(placed) + 1), num_ranks - 1)
    )
    assert largest(shares) == best


def test_a_prompt_that_is_long_stays_on_one_rank_where_that_is_no_slower() -> None:
    rows = _Rows(Packing(1000, fill=True))
    for slot in range(2):
        for number in range(3):
            rows.add(PlacedRollout(slot, number, rollout(slot, 100, 2)))
    shares = share_out(rows, 2)
    assert [[each.slot for each in share] for share in shares] == [[0, 0, 0], [1, 1, 1]]


@pytest.mark.parametrize("shares_prompts", [True, False])
def test_no_rollouts_are_packed_as_nothing(shares_prompts: bool) -> None:
    batch = Packing(MAX_TOKENS, fill=True, shares_prompts=shares_prompts).pack([])
    assert batch is NOTHING and not batch.loss_mask.any() and not batch.advantages.any()
