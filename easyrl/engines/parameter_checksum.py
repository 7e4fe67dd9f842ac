"""Verify that an engine holds the weights that it was sent, by checksums of its parameters.

After every update each tensor-parallel rank reports two sums for each parameter: over the weights
that were sent for it, and over what it holds now.

    one rank          the two sums must be equal
    several ranks     the sum over the ranks (shards), or that of each rank (copies), must be equal

Two kinds of parameters may differ at the first update: those that several ranks hold in part (few
key/value heads), and vectors that are stored as something computed from them (a decay rate). These
must change from then on exactly when what is sent changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(slots=True)
class ParameterChecksum:
    """The checksums of one parameter on one rank."""

    parameter: str
    is_matrix: bool = False  # whether a weight that was sent for it has more than one dimension
    sent: int = 0
    held: int = 0


class _Sums(NamedTuple):
    """The last sums of a parameter."""

    sent: int
    held: int
    differ_from_start: bool  # whether they differed at the first update


class ChecksumVerifier:
    def __init__(self) -> None:
        self._before: dict[str, _Sums] = {}  # by parameter

    def check(self, policy_version: int, ranks: Sequence[Sequence[ParameterChecksum]]) -> None:
        """Raise RuntimeError if a parameter is not what was sent. `ranks`: checksums of each."""
        stale = []
        for parts in zip(*ranks, strict=True):
            if not self._is_current(parts):
                stale.append(parts[0].parameter)
        if stale:
            raise RuntimeError(
                f"weights {policy_version} are not what the engine holds: {len(stale)} of "
                f"{len(ranks[0])} parameters differ ({', '.join(stale[:3])})"
            )

    def _is_current(self, parts: Sequence[ParameterChecksum]) -> bool:
        """Compare the checksums of one parameter on all ranks."""
        name = parts[0].parameter
        sent = parts[0].sent
        held = sum(part.held for part in parts)
        is_equal = held == sent or all(part.held == sent for part in parts)
        before = self._before.get(name)
        if before is None:
            self._before[name] = _Sums(sent, held, differ_from_start=not is_equal)
            may_differ = len(parts) > 1 or not parts[0].is_matrix
            return is_equal or may_differ
        self._before[name] = _Sums(sent, held, before.differ_from_start)
        if before.differ_from_start:
            return (sent != before.sent) == (held != before.held)
        return is_equal
