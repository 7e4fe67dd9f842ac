"""Messages to users: the error for their mistakes, numbers, and text of any origin."""

import importlib.util

from easyrl import DISTRIBUTION

EXTRAS = {"judge": "httpx2", "lora": "peft", "math": "math_verify", "peer": "trl"}
EXTRAS |= {"agents": "uvicorn", "reasoning-gym": "reasoning_gym", "report": "matplotlib"}
EXTRAS |= {name: name for name in ("datasets", "ray", "tensorboard", "trackio", "vllm", "wandb")}
"""Optional dependencies of pyproject.toml, and a module that each installs."""


class ConfigError(ValueError):
    """An error in a user's settings: one line per problem, with the key, what was expected, got."""


def counted(count: int, noun: str) -> str:
    """`1 group`, `2 groups`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def install_command(extra: str) -> str:
    """The command that installs an optional dependency, by its extra in pyproject.toml."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def require(extra: str, what: str) -> None:
    """Raise ConfigError unless the optional dependency that `what` needs is installed."""
    if importlib.util.find_spec(module := EXTRAS[extra]) is None:
        raise ConfigError(f"{what} needs {module}, which is missing: {install_command(extra)}")


def shorten(text: str, limit: int, cut: str = "…") -> str:
    """Replace the middle of a text that is longer than `limit` characters by `cut`."""
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]}{cut}{text[-half:]}"


def printable(text: str, keep: str = "") -> str:
    """Replace characters that a terminal obeys (cursor, colours, direction) but those to `keep`."""
    return "".join(c if c.isprintable() or c in keep else "\N{REPLACEMENT CHARACTER}" for c in text)
