"""Whether an engine holds the weights that it was sent: parameter by parameter, told by sums.

An engine that acknowledges an update without having loaded it would sample from an old policy and
say that it is the new one. So after every update each of its tensor-parallel ranks tells, of each
parameter, the sum over the weights that came for it and the sum over what it holds now.

    one rank          the two are equal
    several ranks     each holds a share, or all of it, or (keys and values of few heads) some of
                      it: the sums over the ranks are equal, or change when what is sent changes

A vector may be kept as something computed from it (a decay rate, for one). Where that is so with
the first update, it has to change from then on when what is sent changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import Any


@dataclass(slots=True)
class Held:
    """Of one parameter of one rank."""

    parameter: str
    bucket: int
    """The number of the bucket that its first weight came in."""
    names: list[str] = field(default_factory=list)
    """Of the weights that were sent for it."""
    is_matrix: bool = False
    """Whether one of them has more than one dimension."""
    sent: int = 0
    held: int = 0

    def as_row(self) -> list[Any]:
        """What crosses between processes."""
        return list(astuple(self))


class HeldWeights:
    """Compares what came with what is held, update after update."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[int, int]] = {}
        self._follows: set[str] = set()
        """Parameters that are not equal to what is sent, but change with it."""

    def check(self, policy_version: int, ranks: Sequence[Sequence[Held]]) -> None:
        """`ranks`: of each tensor-parallel rank what it tells, in the same order. Raises
        RuntimeError where a parameter is not what was sent."""
        stale = [parts[0] for parts in zip(*ranks, strict=True) if not self._is_new(parts)]
        if not stale:
            return
        first = min(stale, key=lambda held: held.bucket)
        buckets = sorted({held.bucket + 1 for held in stale})
        raise RuntimeError(
            f"weights {policy_version} were acknowledged, but the engine does not hold them: "
            f"{len(stale)} of {len(ranks[0])} parameters are not what was sent in bucket "
            f"{', '.join(map(str, buckets))} (the first: {first.parameter}, from "
            f"{', '.join(first.names)})"
        )

    def _is_new(self, parts: Sequence[Held]) -> bool:
        name, sent = parts[0].parameter, parts[0].sent
        held = sum(part.held for part in parts)
        before, self._before[name] = self._before.get(name), (sent, held)
        is_equal = held == sent or all(part.held == sent for part in parts)
        if is_equal and name not in self._follows:
            return True
        if before is None:
            may_differ = len(parts) > 1 or not parts[0].is_matrix
            if may_differ:
                self._follows.add(name)
            return may_differ
        if name not in self._follows:
            return False
        return (sent != before[0]) == (held != before[1])
