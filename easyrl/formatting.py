"""Parts of messages."""

from __future__ import annotations

from easyrl import DISTRIBUTION


def counted(count: int, noun: str) -> str:
    """`1 group`, `2 groups`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def install_command(extra: str) -> str:
    """The command that installs an optional dependency, by its extra in pyproject.toml."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def shorten(text: str, limit: int) -> str:
    """Cut the middle out of a text that is longer than `limit` characters."""
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]}…{text[-half:]}"
