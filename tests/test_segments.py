"""Segments of a row share a bucket if padding is cheaper than another bucket."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from easyrl.model.shared_prompt import BUCKET_SCORES, LANES, make_buckets, padded_length

CPU = torch.device("cpu")
lengths_of_segments = st.lists(st.integers(1, 200), min_size=1, max_size=12)


def as_segments(lengths: list[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.stack([np.cumsum([0, *lengths[:-1]]), lengths], axis=1).astype(np.int64)


def cost(widths: list[int]) -> int:
    """Cost of one bucket of segments with these widths, the longest first."""
    return len(widths) * widths[0] ** 2 + BUCKET_SCORES


@given(lengths_of_segments)
def test_every_token_is_in_one_cell_and_returns_to_its_index(lengths: list[int]) -> None:
    tokens = torch.arange(sum(lengths), dtype=torch.float32).view(-1, 1, 1, 1)
    back = torch.full_like(tokens, -1.0)
    num_segments = 0
    for bucket in make_buckets(as_segments(lengths), CPU):
        cells = bucket.take(tokens, padding=-2.0)
        assert cells.shape[:2] == (bucket.num_segments, bucket.longest)
        num_segments += bucket.num_segments
        bucket.put(back, cells.permute(0, 2, 3, 1, 4).flatten(0, 1))
    assert num_segments == len(lengths)
    assert torch.equal(back, tokens)


@given(lengths_of_segments)
def test_no_cut_into_buckets_costs_less(lengths: list[int]) -> None:
    buckets = make_buckets(as_segments(lengths), CPU)
    got = sum(b.num_segments * b.longest**2 + BUCKET_SCORES for b in buckets)
    widths = sorted((padded_length(length) for length in lengths), reverse=True)
    inner = range(1, len(widths))
    all_cuts = (
        (0, *cut, len(widths)) for size in range(len(widths)) for cut in combinations(inner, size)
    )
    least = min(sum(cost(widths[i:j]) for i, j in pairwise(cut)) for cut in all_cuts)
    assert got == least


def test_adjacent_segments_of_equal_length_are_not_copied() -> None:
    tokens = torch.randn(96, 1, 1, 4)
    [bucket] = make_buckets(as_segments([32, 32, 32]), CPU)
    assert bucket.take(tokens).data_ptr() == tokens.data_ptr()


@pytest.mark.parametrize(
    ("length", "width"), [(1, 1), (8, 8), (9, 16), (15, 16), (16, 16), (24, 24), (25, 32)]
)
def test_width_is_rounded_up_if_more_than_half_of_the_lanes_are_full(
    length: int, width: int
) -> None:
    assert LANES == 16 and padded_length(length) == width
    assert padded_length(np.array([length])).tolist() == [width]
