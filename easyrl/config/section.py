"""Base class of the config's sections.

A YAML scalar without quotes keeps its text until the type of its key is known: `data.dataset: 007`
is a string, `train.iterations: 7` a number.
"""

from __future__ import annotations

import re
from types import NoneType, UnionType
from typing import Any, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, field_validator


class ConfigError(ValueError):
    """An error in a user's settings. The message has one line per problem: the key, what was
    expected, and what it got."""


class Section(BaseModel):
    """Frozen, and without unknown keys. Text is converted where a number or a bool is expected."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _read_plain_scalars(cls, value: Any, info: Any) -> Any:
        annotation = cls.model_fields[info.field_name].annotation
        if plain(value) is None and is_section(annotation):
            return {}  # a section whose keys are all commented out
        if plain(value) is None and NoneType in kinds(annotation):
            return None
        return plain(value) if annotation == dict[str, Any] else value


def kinds(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)


def is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


class Plain(str):
    """The text of a YAML scalar without quotes."""

    __slots__ = ()


WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}


def plain(value: Any) -> Any:
    """Replace the plain scalars in a value by what they mean: null, true, false or a decimal number
    as in JSON, else a string (no dates, no octal numbers, no `yes`)."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if not isinstance(value, Plain):
        return value
    text = str(value)
    if text in WORDS:
        return WORDS[text]
    if re.fullmatch(r"[-+]?(0|[1-9](_?[0-9])*)", text):
        return int(text)
    number = r"[-+]?(?!0[0-9])([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?"  # also 1e-6
    return float(text) if re.fullmatch(number, text) else text


def put(settings: dict[str, Any], name: str, value: Any) -> None:
    """Set a key, by its full name, in sections with their keys."""
    *sections, key = name.split(".")
    for section in sections:
        if not isinstance(settings.get(section), dict):
            settings[section] = {}
        settings = settings[section]
    settings[key] = value


def _check_each_once(value: Any) -> Any:
    if isinstance(value, list) and (len(set(value)) < len(value) or "" in value):
        raise ValueError("expected each name once, and none empty")
    return value


EACH_ONCE = AfterValidator(_check_each_once)
"""Refuses a list that has a string twice, or an empty one."""
