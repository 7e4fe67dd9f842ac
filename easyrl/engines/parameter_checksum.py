"""Verify that an engine holds the weights that it was sent, by checksums of its parameters.

An engine that acknowledges an update without loading it would sample from an old policy under the
new version. So after every update each tensor-parallel rank reports two sums for each parameter:
over the weights that were sent for it, and over what it holds now.

    one rank          the two are equal
    several ranks     each holds a shard, or all of it, or (few key/value heads) part of it: the
                      sums over the ranks are equal, or change whenever what is sent changes

A vector may be stored as something computed from it (e.g. a decay rate). If it differs at the first
update, it has to change from then on whenever what is sent changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class ParameterChecksum:
    """The checksums of one parameter on one rank."""

    parameter: str
    bucket: int
    """The number of the bucket that its first weight arrived in."""
    names: list[str] = field(default_factory=list)
    """The weights that were sent for it."""
    is_matrix: bool = False
    """Whether one of them has more than one dimension."""
    sent: int = 0
    held: int = 0


class ChecksumVerifier:
    """Compares sent with held checksums, update after update."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[int, int]] = {}
        self._transformed: set[str] = set()
        """Parameters that are not equal to what is sent, but change with it."""

    def check(self, policy_version: int, ranks: Sequence[Sequence[ParameterChecksum]]) -> None:
        """Raise RuntimeError if a parameter is not what was sent. `ranks`: the checksums of each
        tensor-parallel rank, in the same order."""
        stale = [parts[0] for parts in zip(*ranks, strict=True) if not self._is_current(parts)]
        if not stale:
            return
        first = min(stale, key=lambda checksum: checksum.bucket)
        buckets = sorted({checksum.bucket + 1 for checksum in stale})
        raise RuntimeError(
            f"weights {policy_version} were acknowledged, but the engine does not hold them: "
            f"{len(stale)} of {len(ranks[0])} parameters are not what was sent in bucket "
            f"{', '.join(map(str, buckets))} (the first: {first.parameter}, from "
            f"{', '.join(first.names)})"
        )

    def _is_current(self, parts: Sequence[ParameterChecksum]) -> bool:
        name, sent = parts[0].parameter, parts[0].sent
        held = sum(part.held for part in parts)
        before, self._before[name] = self._before.get(name), (sent, held)
        is_equal = held == sent or all(part.held == sent for part in parts)
        if is_equal and name not in self._transformed:
            return True
        if before is None:
            may_differ = len(parts) > 1 or not parts[0].is_matrix
            if may_differ:
                self._transformed.add(name)
            return may_differ
        if name not in self._transformed:
            return False
        return (sent != before[0]) == (held != before[1])
