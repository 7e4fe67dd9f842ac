"""Numbers in messages."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """`1 group`, `2 groups`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
