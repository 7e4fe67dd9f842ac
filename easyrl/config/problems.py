"""Explain wrong settings: what was expected, what was given, and which setting may be meant."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from easyrl.config.hints import names_of_others, similar_names, word_for
from easyrl.config.printing import on_one_line
from easyrl.config.schema import KEYS, SECTIONS
from easyrl.formatting import ConfigError


def problems_of(error: ValidationError) -> list[str]:
    """Return a line for each problem that pydantic has found."""
    return [_problem(details) for details in error.errors(include_url=False)]


def _problem(details: Mapping[str, Any]) -> str:
    """Return the line for a problem, which pydantic describes by `details`."""
    name = ".".join(map(str, details["loc"]))
    message = str(details["msg"]).removeprefix("Value error, ")
    kind = details["type"]
    if kind == "extra_forbidden":
        return _unknown(name, details["input"])
    if kind == "value_error" and name in ("", *SECTIONS):
        return message  # the check is of several keys, and its message names them
    if kind == "model_type":
        first_key = next(key for key in KEYS if key.startswith(f"{name}."))
        message = f"expected keys of this section, as in {first_key}=..."
    value = details["input"]
    given = json.dumps(value, ensure_ascii=False, default=str)
    instead = word_for(name, value)
    advice = f"; use {instead}" if instead else ""
    return f"{name}: {message}, got {given}{advice}"


def _unknown(name: str, value: Any) -> str:
    """Explain an unknown key or section `name` that has this value in the settings."""
    is_known = name in KEYS or name in SECTIONS
    if is_known:  # but a file has the full name outside of the section, as `train.seed: 1`
        opened = name.replace(".", ": {")
        closing = "}" * name.count(".")
        return f"{name}: expected in its section, as in {opened}: ...{closing}"
    while isinstance(value, dict) and len(value) == 1:  # name the key in an unknown section
        ((key, value),) = value.items()
        name += f".{key}"
    instead = word_for(name.rpartition(".")[2], value)
    if instead:
        return f"{name}: unknown setting; in EasyRL: {instead}"
    return f"{name}: unknown setting; {key_hint(name)}"


def key_hint(name: str, suffix: str = "") -> str:
    """Return which setting an unknown one may mean, or where to look. `suffix` is written behind
    each key that may be meant, as "=VALUE" behind those meant by an option."""
    last_part = name.rpartition(".")[2]
    last_part = last_part.replace("-", "_")  # an option has hyphens
    is_ours = any(key.endswith(f".{last_part}") for key in KEYS)
    instead = names_of_others().get(last_part)
    if instead is not None and not is_ours:
        return f"in EasyRL: {instead}"
    candidates = list(KEYS)
    if not suffix:
        candidates = [*_sections_as_deep_as(name), *KEYS]
    similar = similar_names(name, candidates)
    if similar:
        meant = " or ".join(f"{each}{suffix}" for each in similar)
        return f"did you mean {meant}?"
    return (
        "`easyrl config` prints every key, `easyrl config --search WORD` finds some; "
        "docs/trl_and_verl.md has the names that other trainers use"
    )


def _sections_as_deep_as(name: str) -> list[str]:
    """Return the sections whose names have as many parts as this name."""
    depth = name.count(".")
    return [section for section in SECTIONS if section.count(".") == depth]


def find_keys(names: Sequence[str], search: str | None) -> list[str]:
    """Return these keys and sections, and the keys that `search` finds in names and meanings.
    Raises ConfigError for an unknown name, and if nothing is found."""
    for name in names:
        if name not in KEYS and name not in SECTIONS:
            raise ConfigError(f"{name}: unknown setting; {key_hint(name)}")
    if search is None:
        return [*names]
    found = []
    for key, field in KEYS.items():
        text = f"{key} {on_one_line(field.description)}"
        if search.lower() in text.lower():
            found.append(key)
    if not found:
        here = names_of_others().get(search)
        advice = f"; in EasyRL: {here}" if here else ""
        raise ConfigError(f"--search: no setting has '{search}' in its name or meaning{advice}")
    return [*names, *found]
