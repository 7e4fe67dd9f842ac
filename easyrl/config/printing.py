"""Print a config: as YAML with comments, and as the arguments that make it of another one."""

import json
import re
import textwrap
from collections.abc import Collection, Iterable, Sequence
from operator import attrgetter
from typing import Any

import yaml

from easyrl.config.schema import KEYS, OPTIONS, SECTIONS, Config
from easyrl.config.values import allowed_values

MAX_COLUMNS = 96  # of a comment, with its indentation
BARE_NAME = re.compile(r"[A-Za-z_~/.][\w~/.:@+-]*", re.ASCII)
"""Texts that are written without quotes, unless YAML reads another value in them."""


def to_commented_yaml(
    config: Config, *, only_changes: bool = False, only: Collection[str] = ()
) -> str:
    """Print the config as YAML with comments.

    `only_changes`: print only keys whose value is not the default. `only`: print only these keys
    and sections, with a comment that gives the allowed values. With either, a comment gives the
    default.
    """
    shown = _changed_keys(config, Config()) if only_changes else list(KEYS)
    if only:
        shown = [key for key in shown if _is_in(key, only)]
    has_defaults = only_changes or bool(only)
    allowed = allowed_values() if only else {}
    text = ""
    for name, section in SECTIONS.items():
        if not any(_is_in(key, [name]) for key in shown):
            continue
        *outer, last_part = name.split(".")
        indent = "  " * len(outer)
        if text and not outer:
            text += "\n"
        text += _comment(section.__doc__, indent)
        text += f"{indent}{last_part}:\n"
        for key in shown:
            if key.rpartition(".")[0] == name:
                facts = []
                if key in allowed:
                    facts.append(f"Values: {allowed[key]}")
                if has_defaults:
                    facts.append(f"Default: {yaml_value(attrgetter(key)(Config()))}")
                text += _setting(key, config, facts, f"{indent}  ")
    return text


def _is_in(key: str, names: Iterable[str]) -> bool:
    """Return whether the key is one of these, or in one of these sections."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _setting(key: str, config: Config, facts: Sequence[str], indent: str) -> str:
    """Print a key with its value, behind a comment with its meaning and these facts."""
    text = _comment(KEYS[key].description, indent)
    for fact in facts:
        text += _comment(fact, indent)
    last_part = key.rpartition(".")[2]
    value = yaml_value(attrgetter(key)(config))
    return f"{text}{indent}{last_part}: {value}\n"


def _changed_keys(config: Config, base: Config) -> list[str]:
    """Return the keys whose values differ in the two configs."""
    changed: list[str] = []
    for key in KEYS:
        value_of = attrgetter(key)
        if value_of(config) != value_of(base):
            changed.append(key)
    return changed


def to_arguments(config: Config, base: Config) -> list[str]:
    """Return the arguments of `easyrl grpo` that make `config` of `base`: first options, then
    words, as ["--seed", "3", "train.save_every=5"]."""
    name_of_option = {key: name.replace("_", "-") for name, key in OPTIONS.items()}
    options: list[str] = []
    words: list[str] = []
    for key in _changed_keys(config, base):
        value = attrgetter(key)(config)
        is_text = not isinstance(value, dict | None)  # else an option cannot have it
        if key in name_of_option and is_text:
            option = f"--{name_of_option[key]}"
            values = value if isinstance(value, list) else [value]
            for each in values:
                options += [option, str(each)]
        else:
            words.append(f"{key}={yaml_value(value)}")
    return options + words


def yaml_value(value: Any) -> str:
    """Write a value as JSON, which is YAML, but names without quotes."""
    if isinstance(value, list):
        entries = ", ".join(map(yaml_value, value))
        return f"[{entries}]"
    has_escapes = re.search(r"\\[xuU]", repr(value)) is not None
    is_printable = not has_escapes
    if not isinstance(value, str):
        return json.dumps(value, ensure_ascii=has_escapes)
    is_bare_name = BARE_NAME.fullmatch(value) is not None
    if is_bare_name and yaml.safe_load(value) == value:
        return value
    quoted = yaml.safe_dump(value, default_style='"', width=2**31, allow_unicode=is_printable)
    return quoted.rstrip("\n")


def on_one_line(text: str | None) -> str:
    """Join a text's lines, with one space between words."""
    words = (text or "").split()
    return " ".join(words)


def _comment(text: str | None, indent: str) -> str:
    """Return a text as lines of a YAML comment."""
    width = MAX_COLUMNS - len(indent)
    lines = textwrap.wrap(on_one_line(text), width, break_on_hyphens=False)
    comment = ""
    for line in lines:
        comment += f"{indent}# {line}\n"
    return comment
