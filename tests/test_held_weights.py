"""What an engine holds after an update is compared with what it was sent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from easyrl.engines.held_weights import Held, HeldWeights

MATRIX = Held("model.qkv.weight", 2, ["q", "k", "v"], is_matrix=True)
VECTOR = Held("model.decay", 0, ["decay"])


def check(held: HeldWeights, version: int, *ranks: Held) -> None:
    held.check(version, [[rank] for rank in ranks])


def told(of: Held, sent: int, held: int) -> Held:
    return replace(of, sent=sent, held=held)


def test_a_skipped_load_is_told_with_its_bucket_and_weights() -> None:
    held = HeldWeights()
    check(held, 0, told(MATRIX, 10, 10))
    message = r"weights 1 .* 1 of 1 .* bucket 3 \(the first: model.qkv.weight, from q, k, v\)"
    with pytest.raises(RuntimeError, match=message):
        check(held, 1, told(MATRIX, 11, 10))


def test_a_matrix_must_be_right_from_the_first_update_on() -> None:
    with pytest.raises(RuntimeError, match="weights 0"):
        check(HeldWeights(), 0, told(MATRIX, 10, 9))


def test_a_vector_that_is_kept_in_another_form_must_change_with_what_is_sent() -> None:
    held = HeldWeights()
    check(held, 0, told(VECTOR, 10, -77))
    check(held, 1, told(VECTOR, 11, -78))
    check(held, 2, told(VECTOR, 11, -78))
    with pytest.raises(RuntimeError, match=r"weights 3 .* model.decay"):
        check(held, 3, told(VECTOR, 12, -78))


@pytest.mark.parametrize("shares", [(4, 6), (10, 10)], ids=["cut", "whole on each"])
def test_several_ranks_hold_shares_or_the_whole(shares: tuple[int, int]) -> None:
    held = HeldWeights()
    check(held, 0, *(told(MATRIX, 10, share) for share in shares))
    with pytest.raises(RuntimeError, match="weights 1"):
        check(held, 1, *(told(MATRIX, 11, share) for share in shares))


def test_ranks_that_share_some_heads_must_change_with_what_is_sent() -> None:
    held = HeldWeights()
    check(held, 0, told(MATRIX, 10, 7), told(MATRIX, 10, 8))
    check(held, 1, told(MATRIX, 12, 8), told(MATRIX, 12, 9))
    with pytest.raises(RuntimeError, match="weights 2"):
        check(held, 2, told(MATRIX, 13, 8), told(MATRIX, 13, 9))
