"""Read configs from YAML and `section.key=value` words, and print them as YAML or Markdown.

Sections and keys are the fields of pydantic models; a section may hold another one (`model.lora`).
A YAML scalar without quotes keeps its text until the type of its key is known: `data.dataset: 007`
is a string, `train.iterations: 7` a number.
"""

from __future__ import annotations

import difflib
import json
import re
import textwrap
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, field_validator
from pydantic.fields import FieldInfo


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
        if plain(value) is None and _is_section(annotation):
            return {}  # a section whose keys are all commented out
        if plain(value) is None and NoneType in _kinds(annotation):
            return None
        return plain(value) if annotation == dict[str, Any] else value


class Plain(str):
    """The text of a YAML scalar without quotes."""

    __slots__ = ()

    @property
    def value(self) -> Any:
        """What it means: null, true, false or a decimal number as in JSON, else a string (no dates,
        no octal numbers, no `yes`)."""
        text = str(self)
        if text in ("", "~", "null"):
            return None
        if text in ("true", "false"):
            return text == "true"
        if re.fullmatch(r"[-+]?(0|[1-9](_?[0-9])*)", text):
            return int(text)
        number = r"[-+]?(?!0[0-9])([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?"  # also 1e-6
        return float(text) if re.fullmatch(number, text) else text


def plain(value: Any) -> Any:
    """Replace the plain scalars in a value by what they mean."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value.value if isinstance(value, Plain) else value


class _Loader(yaml.SafeLoader):
    """YAML whose scalars without quotes are Plain. A key given twice is an error."""

    yaml_implicit_resolvers = {}  # type: ignore[misc]  # noqa: RUF012

    def construct_scalar(self, node: Any) -> Any:
        value = super().construct_scalar(node)
        return Plain(value) if node.style is None else value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value in mapping:
                problem = f"expected each key once, as a word, got '{key.value}'"
                raise yaml.MarkedYAMLError(None, None, problem, key.start_mark)
            mapping[key.value] = self.construct_object(value, deep=True)
        return mapping


def _parse_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or error
        raise ConfigError(f"{source}{line}: not readable as YAML: {reason}") from None


def read_file(path: Path) -> dict[str, Any]:
    """Read a config file: sections with their keys."""
    try:
        content = _parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config, --diff: '{path}' cannot be read: {error}") from None
    if not isinstance(content, dict | None):
        raise ConfigError(f"{path}: expected sections with keys in them, got {content!r}")
    return content or {}


def read_word(schema: type[BaseModel], word: str) -> tuple[str, Any]:
    """Read `train.learning_rate=1e-6`: the key's name and its value.

    The value is YAML, but a key that takes a string also takes text that YAML cannot read or reads
    as something else: `reward.pattern=[0-4]$`, `data.dataset={a}.jsonl`.
    """
    name, equals, text = (part.strip() for part in word.partition("="))
    if not equals or "." not in name:
        near = nearest(schema, name)
        hint = f" (did you mean {near}=...?)" if near else ""
        raise ConfigError(f"'{word}': expected section.key=value{hint}")
    field = keys(schema).get(name)
    kinds = _kinds(field.annotation) if field else ()
    try:
        value = _parse_yaml(text, name)
    except ConfigError:
        if str not in kinds:
            raise
        value = None
    fits = type(value) in (str, *map(get_origin, kinds))  # a quoted string, a list, a mapping
    return name, Plain(text) if value is None or (str in kinds and not fits) else value


def put(settings: dict[str, Any], name: str, value: Any) -> None:
    """Set a key, by its full name, in sections with their keys."""
    *sections, key = name.split(".")
    for section in sections:
        if not isinstance(settings.get(section), dict):
            settings[section] = {}
        settings = settings[section]
    settings[key] = value


def _kinds(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)


def nearest(schema: type[BaseModel], name: str) -> str | None:
    """The key that was probably meant: by its whole name, else by its last word."""
    names = list(keys(schema))
    if near := difflib.get_close_matches(name, names, n=1, cutoff=0.7):
        return near[0]
    by_word = {known.rpartition(".")[2]: known for known in names}
    near = difflib.get_close_matches(name.rpartition(".")[2], by_word, n=1, cutoff=0.8)
    return by_word[near[0]] if near else None


def problems(schema: type[BaseModel], error: ValidationError) -> list[str]:
    """pydantic's findings, one line each."""
    found = []
    for details in error.errors(include_url=False):
        name, value = ".".join(map(str, details["loc"])), details["input"]
        key = next((key for key in keys(schema) if f"{name}.".startswith(f"{key}.")), None)
        got = json.dumps(plain(value), ensure_ascii=False, default=str)
        if details["type"] == "extra_forbidden":
            found.append(_unknown(schema, name, value))
        elif key is not None:
            expected = re.sub(r"^\w+ should (be|have) |^Value error, expected ", "", details["msg"])
            found.append(f"{key}: expected {re.sub(', (got|unable) .*', '', expected)}, got {got}")
        elif details["type"] == "value_error":  # a check of several keys, with a whole message
            found.append(details["msg"].removeprefix("Value error, "))
        else:
            inside = ", ".join(key for key in keys(schema) if key.startswith(f"{name}."))
            found.append(f"{name}: expected a section with keys ({inside}), got {got}")
    return found


def _unknown(schema: type[BaseModel], name: str, value: Any) -> str:
    while isinstance(value, dict) and value:  # an unknown section: by its first key
        key, value = next(iter(value.items()))
        name = f"{name}.{key}"
    section, _, key = name.rpartition(".")
    what = "key" if section in sections(schema) else "section"
    if name in keys(schema):
        return f"{name}: expected as a key in its section, as in {section}: {{{key}: ...}}"
    if near := nearest(schema, name):
        return f"{name}: unknown {what}; did you mean {near}?"
    expected = [key for key in keys(schema) if key.rpartition(".")[0] == section]
    return f"{name}: unknown {what}; expected one of {', '.join(expected or sections(schema))}"


def commented_yaml(config: BaseModel, defaults: BaseModel | None = None, indent: str = "") -> str:
    """Print every key under its docstring as a comment; `read_file` reads the same values back.

    With `defaults`, print only keys that differ from them.
    """
    blocks = []
    for key, field in type(config).model_fields.items():
        value, default = getattr(config, key), getattr(defaults, key, None)
        if isinstance(value, BaseModel):
            inner = commented_yaml(value, default, indent + "  ")
            if inner:
                heading = _comment(type(value).__doc__, indent)
                blocks.append(f"{heading}{indent}{key}:\n{inner}")
        elif defaults is None or value != default:
            comment = _comment(field.description, indent)
            if defaults is not None:
                comment += _comment(f"Default: {_yaml_value(default)}", indent)
            blocks.append(f"{comment}{indent}{key}: {_yaml_value(value)}\n")
    return ("" if indent else "\n").join(blocks)


def _comment(text: str | None, indent: str) -> str:
    words = " ".join((text or "").split())
    lines = textwrap.wrap(words, 96 - len(indent), break_on_hyphens=False)
    return "".join(f"{indent}# {line}\n" for line in lines)


def _yaml_value(value: Any) -> str:
    if isinstance(value, dict):  # as JSON, which shows what is a string and what a number
        return json.dumps(value, ensure_ascii=False)
    # In double quotes an end of line is written as an escape and stays on its line.
    style = '"' if re.search(r"\\[nxu]", repr(value)) else None
    text = yaml.safe_dump(
        value, default_flow_style=True, default_style=style, width=2**31, allow_unicode=True
    )
    return re.sub(r"\n?\.\.\.\n$|\n$", "", text)


def markdown(defaults: BaseModel) -> str:
    """Print a table of keys, defaults and meanings for each section."""
    lines: list[str] = []
    for name, model in sections(type(defaults)).items():
        lines += ["", f"## {name}", "", " ".join((model.__doc__ or "").split()), ""]
        lines += ["| key | default | meaning |", "| --- | --- | --- |"]
        for key, field in model.model_fields.items():
            if not _is_section(field.annotation):
                default = _yaml_value(field.get_default(call_default_factory=True))
                meaning = " ".join((field.description or "").split()).replace("|", "\\|")
                lines.append(f"| `{name}.{key}` | `{default}` | {meaning} |")
    return "\n".join(lines) + "\n"


def sections(schema: type[BaseModel], within: str = "") -> dict[str, type[BaseModel]]:
    """All sections by their names, each before those inside it."""
    found: dict[str, type[BaseModel]] = {}
    for name, field in schema.model_fields.items():
        if _is_section(model := field.annotation):
            found[within + name] = model  # type: ignore[assignment]
            found |= sections(model, f"{within}{name}.")  # type: ignore[arg-type]
    return found


def keys(schema: type[BaseModel]) -> dict[str, FieldInfo]:
    """All keys by their full names, as `model.lora.rank`."""
    return {
        f"{name}.{key}": field
        for name, model in sections(schema).items()
        for key, field in model.model_fields.items()
        if not _is_section(field.annotation)
    }


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _check_each_once(value: Any) -> Any:
    if isinstance(value, list) and (len(set(value)) < len(value) or "" in value):
        raise ValueError("expected each name once, and none empty")
    return value


EACH_ONCE = AfterValidator(_check_each_once)
"""Refuses a list that has a string twice, or an empty one."""
