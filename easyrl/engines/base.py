"""What every engine offers: groups are submitted whole and come back whole.

    submit(GroupRequest) ──► [waiting] ──► step() · step() · … ──► FinishedGroup

Between two `load_weights` no sequence may be in flight: the caller drains the engine first,
and `load_weights` refuses otherwise (DESIGN.md, invariant 3).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from easyrl.types import Completion, WeightPiece


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """One prompt and the number of completions wanted of it."""

    key: tuple[int, ...]
    """Names the group to the caller, and with `seed` the randomness of its sequences: sample i
    draws from a stream that is a function of (seed, *key, i) alone."""
    prompt_ids: Sequence[int]  # [P]
    num_generations: int
    completion_lengths: Sequence[int] | None = None  # [G]
    """Most tokens of each completion, and just that many where the engine ignores the
    end-of-sequence token (benchmarks); None: the engine's limit."""


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    request: GroupRequest
    completions: list[Completion]  # [G], in sample order


class Engine(Protocol):
    num_prompt_tokens: int
    """Prefilled since it was made."""
    num_completion_tokens: int
    """Sampled since it was made."""

    def submit(self, request: GroupRequest) -> None:
        """Queue a group. First come, first served."""
        ...

    def step(self) -> list[FinishedGroup]:
        """Advance every sequence in flight by one token; returns the groups that ended."""
        ...

    @property
    def has_work(self) -> bool: ...

    def load_weights(self, pieces: Iterable[WeightPiece]) -> None:
        """Overwrite weights piece by piece. Raises RuntimeError while sequences are in flight."""
        ...
