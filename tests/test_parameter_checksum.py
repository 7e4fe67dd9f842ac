"""Parameter checksums: the weights an engine holds are compared with those it was sent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from easyrl.engines.parameter_checksum import ChecksumVerifier, ParameterChecksum

MATRIX = ParameterChecksum("model.qkv.weight", is_matrix=True)
VECTOR = ParameterChecksum("model.decay")


def check(verifier: ChecksumVerifier, version: int, *ranks: ParameterChecksum) -> None:
    verifier.check(version, [[rank] for rank in ranks])


def reported(of: ParameterChecksum, sent: int, held: int) -> ParameterChecksum:
    return replace(of, sent=sent, held=held)


def test_a_skipped_load_is_reported() -> None:
    verifier = ChecksumVerifier()
    check(verifier, 0, reported(MATRIX, 10, 10))
    with pytest.raises(RuntimeError, match=r"weights 1 .* 1 of 1 .*model.qkv.weight"):
        check(verifier, 1, reported(MATRIX, 11, 10))


def test_a_matrix_must_be_right_from_the_first_update_on() -> None:
    with pytest.raises(RuntimeError, match="weights 0"):
        check(ChecksumVerifier(), 0, reported(MATRIX, 10, 9))


def test_a_vector_that_is_kept_in_another_form_must_change_with_what_is_sent() -> None:
    verifier = ChecksumVerifier()
    check(verifier, 0, reported(VECTOR, 10, -77))
    check(verifier, 1, reported(VECTOR, 11, -78))
    check(verifier, 2, reported(VECTOR, 11, -78))
    with pytest.raises(RuntimeError, match=r"weights 3 .*model.decay"):
        check(verifier, 3, reported(VECTOR, 12, -78))


@pytest.mark.parametrize("shares", [(4, 6), (10, 10)], ids=["cut", "whole on each"])
def test_several_ranks_hold_shares_or_the_whole(shares: tuple[int, int]) -> None:
    verifier = ChecksumVerifier()
    check(verifier, 0, *(reported(MATRIX, 10, share) for share in shares))
    with pytest.raises(RuntimeError, match="weights 1"):
        check(verifier, 1, *(reported(MATRIX, 11, share) for share in shares))


def test_ranks_that_share_some_heads_must_change_with_what_is_sent() -> None:
    verifier = ChecksumVerifier()
    check(verifier, 0, reported(MATRIX, 10, 7), reported(MATRIX, 10, 8))
    check(verifier, 1, reported(MATRIX, 12, 8), reported(MATRIX, 12, 9))
    with pytest.raises(RuntimeError, match="weights 2"):
        check(verifier, 2, reported(MATRIX, 13, 8), reported(MATRIX, 13, 9))
