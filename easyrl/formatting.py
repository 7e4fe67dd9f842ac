"""Messages to users: the error for their mistakes, numbers, and text of any origin."""

import importlib.util

from easyrl import DISTRIBUTION

EXTRAS = {
    "agents": "uvicorn",
    "datasets": "datasets",
    "judge": "httpx2",
    "lora": "peft",
    "math": "math_verify",
    "peer": "trl",
    "ray": "ray",
    "reasoning-gym": "reasoning_gym",
    "report": "matplotlib",
    "tensorboard": "tensorboard",
    "trackio": "trackio",
    "vision": "PIL",
    "vllm": "vllm",
    "wandb": "wandb",
}
"""Optional dependency of pyproject.toml -> a module that it installs."""


class ConfigError(ValueError):
    """An error in a user's settings: one line per problem, with the key, what was expected, got."""


def counted(count: int, noun: str) -> str:
    """Return `1 group`, `2 groups`."""
    plural = "" if count == 1 else "s"
    return f"{count} {noun}{plural}"


def install_command(extra: str) -> str:
    """Return the command that installs an optional dependency, by its name in pyproject.toml."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def require(extra: str, what: str) -> None:
    """Raise ConfigError unless the optional dependency that `what` needs is installed."""
    module = EXTRAS[extra]
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"{what} needs {module}, which is missing: {install_command(extra)}")


def shorten(text: str, limit: int, cut: str = "…") -> str:
    """Replace the middle of a text that is longer than `limit` characters by `cut`."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}{cut}{text[-half:]}"


def printable(text: str, keep: str = "") -> str:
    """Replace characters that control a terminal (cursor, colours, direction of writing), except
    those in `keep`."""
    if text.isprintable():
        return text
    shown = []
    for character in text:
        is_shown = character.isprintable() or character in keep
        shown.append(character if is_shown else "\N{REPLACEMENT CHARACTER}")
    return "".join(shown)
