"""Parameter checksums: the weights an engine holds are compared with those it was sent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from easyrl.engines.parameter_checksum import ChecksumVerifier, ParameterChecksum

MATRIX = ParameterChecksum("model.qkv.weight", is_matrix=True)
VECTOR = ParameterChecksum("model.decay")


@pytest.mark.parametrize(
    ("of", "updates"),
    [
        # A load is skipped; a matrix must be right from the first update on.
        (MATRIX, [(10, [10]), (11, [10])]),
        (MATRIX, [(10, [9])]),
        # A vector that is kept in another form must change with what is sent.
        (VECTOR, [(10, [-77]), (11, [-78]), (11, [-78]), (12, [-78])]),
        # Two ranks hold shares, or the whole; or they share some heads.
        (MATRIX, [(10, [4, 6]), (11, [4, 6])]),
        (MATRIX, [(10, [10, 10]), (11, [10, 10])]),
        (MATRIX, [(10, [7, 8]), (12, [8, 9]), (13, [8, 9])]),
    ],
)
def test_the_last_of_these_updates_is_reported(
    of: ParameterChecksum, updates: list[tuple[int, list[int]]]
) -> None:
    verifier = ChecksumVerifier()
    for version, (sent, held) in enumerate(updates):
        ranks = [[replace(of, sent=sent, held=each)] for each in held]
        if version < len(updates) - 1:
            verifier.check(version, ranks)
    with pytest.raises(RuntimeError, match=rf"weights {version} .* 1 of 1 .*{of.parameter}"):
        verifier.check(version, ranks)
