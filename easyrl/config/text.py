"""Read configs from YAML and `section.key=value` words, and print them as YAML or Markdown.

Knows sections and keys only as fields of a pydantic model. A section may hold another one
(`model.lora`); its keys then have two dots in their names. A plain YAML scalar keeps its text until
the type of its key is known, so that `data.dataset: 007` is a string and `train.iterations: 7` a
number.
"""

from __future__ import annotations

import difflib
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, NamedTuple, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails


class ConfigError(ValueError):
    """An error in a user's settings. The message has one line per problem: the key, what was
    expected, and what it got."""


class Section(BaseModel):
    """Strict and frozen: a value of another type is an error, never converted."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class Scalar(NamedTuple):
    """A YAML scalar without quotes: its text, and the value that YAML reads in it."""

    text: str
    value: Any


class _Loader(yaml.SafeLoader):
    """YAML with the scalars of JSON: null, true, false and decimal numbers; all else is a string
    (no dates, no octal numbers, no `yes`). A key given twice is an error."""

    yaml_implicit_resolvers: ClassVar[Any] = {}  # type: ignore[misc]

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        value = super().construct_object(node, deep=True)
        is_plain = isinstance(node, yaml.ScalarNode) and node.style is None
        return Scalar(node.value, value) if is_plain else value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(None, None, "a key must be a word", key.start_mark)
            if key.value in mapping:
                problem = f"'{key.value}' is given twice"
                raise yaml.MarkedYAMLError(None, None, problem, key.start_mark)
            mapping[key.value] = self.construct_object(value)
        return mapping


for tag, pattern, first in (
    ("null", r"~|null|", ["~", "n", ""]),
    ("bool", r"true|false", ["t", "f"]),
    ("int", r"[-+]?(0|[1-9][0-9_]*)", list("-+0123456789")),
    ("float", r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?[0-9]+[eE][-+]?[0-9]+", list("-+0123456789")),  # 1e-6
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"^(?:{pattern})$"), first)


def _parse_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        what = error.problem or error.context
        raise ConfigError(f"{source}{line}: not readable as YAML: {what}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{source}: not readable as YAML: {error}") from None


def read_file(schema: type[BaseModel], path: Path) -> list[tuple[str, Any]]:
    """Read the keys of a config file, by their full names, and their values."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"--config, --diff: there is no file '{path}'") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config, --diff: '{path}' cannot be read: {error}") from None
    return list(_keys_in(_parse_yaml(text, str(path)), "", sections(schema), path))


def _keys_in(
    value: Any, name: str, known: dict[str, type[BaseModel]], path: Path
) -> Iterator[tuple[str, Any]]:
    if value is None or (isinstance(value, Scalar) and value.value is None):
        return  # a section whose keys are all commented out
    if not isinstance(value, dict):
        where = f"{path}: {name}" if name else str(path)
        raise ConfigError(f"{where}: expected a section with keys in it, got {plain(value)!r}")
    for key, inner in value.items():
        full_name = f"{name}.{key}" if name else key
        if full_name in known or not name:
            yield from _keys_in(inner, full_name, known, path)
        else:
            yield full_name, inner


def read_word(schema: type[BaseModel], word: str) -> tuple[str, Any]:
    """Read `train.learning_rate=1e-6`: the key's name and its value.

    The value is YAML, but a key that takes a string also takes text that YAML cannot read or reads
    as something else: `reward.pattern=[0-4]$`, `data.dataset={a}.jsonl`.
    """
    name, equals, text = word.partition("=")
    name, text = name.strip(), text.strip()
    if not equals or "." not in name:
        near = nearest(schema, name)
        hint = f" (did you mean {near}=...?)" if near else ""
        raise ConfigError(f"'{word}': expected section.key=value{hint}")
    field = keys(schema).get(name)
    kinds = _kinds(field.annotation) if field else ()
    takes_text = any(kind is str or get_origin(kind) is Literal for kind in kinds)
    try:
        value = _parse_yaml(text, name)
    except ConfigError:
        if not takes_text:
            raise
        return name, Scalar(text, text)
    if value is None:
        value = Scalar("", None)
    is_quoted = isinstance(value, str)
    containers = [get_origin(kind) for kind in kinds]
    if takes_text and not is_quoted and type(value) not in containers:
        value = Scalar(text, value.value if isinstance(value, Scalar) else text)
    return name, value


def convert(schema: type[BaseModel], name: str, value: Any) -> Any:
    """Convert the scalars in a value to the type of its key. Raises ConfigError for an unknown
    key; a value that does not fit is left for pydantic to refuse."""
    field = keys(schema).get(name)
    if field is None:
        raise ConfigError(_unknown(schema, name))
    return _fit(value, field.annotation)


def _fit(value: Any, annotation: Any) -> Any:
    kinds = _kinds(annotation)
    if isinstance(value, Scalar):
        if value.value is None and NoneType in kinds:
            return None
        takes_text = any(kind is str or get_origin(kind) is Literal for kind in kinds)
        return value.text if takes_text else value.value
    items = {get_origin(kind): get_args(kind)[-1] for kind in kinds if get_args(kind)}
    if isinstance(value, list):
        return [_fit(item, items.get(list, Any)) for item in value]
    if isinstance(value, dict):
        return {key: _fit(item, items.get(dict, Any)) for key, item in value.items()}
    return value


def _kinds(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)


def plain(value: Any) -> Any:
    """The value as YAML reads it, whatever the type of its key."""
    return _fit(value, Any)


def _unknown(schema: type[BaseModel], name: str) -> str:
    section, _, _ = name.rpartition(".")
    known = sections(schema)
    if name in known:
        return f"{name}: expected one of its keys, {_keys_of(known[name], name)}"
    what = "key" if section in known else "section"
    if near := nearest(schema, name):
        return f"{name}: unknown {what}; did you mean {near}?"
    expected = _keys_of(known[section], section) if section in known else ", ".join(known)
    return f"{name}: unknown {what}; expected one of {expected}"


def nearest(schema: type[BaseModel], name: str) -> str | None:
    """The key that was probably meant: by its whole name, else by its last word."""
    names = list(keys(schema))
    if near := difflib.get_close_matches(name, names, n=1, cutoff=0.7):
        return near[0]
    by_word = {known.rpartition(".")[2]: known for known in names}
    near = difflib.get_close_matches(name.rpartition(".")[2], by_word, n=1, cutoff=0.8)
    return by_word[near[0]] if near else None


def problems(error: ValidationError) -> list[str]:
    """pydantic's findings, one line each."""
    return [_problem(details) for details in error.errors(include_url=False)]


def _problem(details: ErrorDetails) -> str:
    own = details.get("ctx", {}).get("error")
    if isinstance(own, ValueError):  # a check of the section itself, with a whole message
        return str(own)
    expected = re.sub(r"^\w+ should (be|have) ", "", details["msg"]).split(", got")[0]
    key = ".".join(map(str, details["loc"]))
    got = json.dumps(details["input"], ensure_ascii=False, default=str)
    return f"{key}: expected {expected}, got {got}"


def commented_yaml(config: BaseModel, defaults: BaseModel | None = None) -> str:
    """Print every key under its docstring as a comment; `read_file` reads the same values back.

    With `defaults`, print only keys that differ from them.
    """
    blocks = []
    for name in type(config).model_fields:
        lines = _commented_section(name, getattr(config, name), getattr(defaults, name, None), "")
        if lines:
            blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def _commented_section(
    name: str, section: BaseModel, defaults: BaseModel | None, indent: str
) -> list[str]:
    lines: list[str] = []
    inner = f"{indent}  "
    for key, field in type(section).model_fields.items():
        value, default = getattr(section, key), getattr(defaults, key, None)
        if isinstance(value, BaseModel):
            lines += _commented_section(key, value, default, inner)
            continue
        comment = _comment(field.description or "", inner)
        if defaults is not None:
            if value == default:
                continue
            comment += _comment(f"Default: {_yaml_value(default)}", inner)
        lines += [*comment, f"{inner}{key}: {_yaml_value(value)}"]
    if not lines:
        return []
    return [*_comment(type(section).__doc__ or "", indent), f"{indent}{name}:", *lines]


def _comment(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()),
        width=98,
        initial_indent=f"{indent}# ",
        subsequent_indent=f"{indent}# ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _yaml_value(value: Any) -> str:
    if isinstance(value, dict):  # as JSON, which shows what is a string and what a number
        return json.dumps(value, ensure_ascii=False)
    texts = value if isinstance(value, list) else [value]
    has_line_ends = any(isinstance(t, str) and t.splitlines() not in ([], [t]) for t in texts)
    # In double quotes an end of line is written as an escape and stays on its line.
    style = '"' if has_line_ends else None
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


def _keys_of(model: type[BaseModel], section: str) -> str:
    return ", ".join(f"{section}.{key}" for key in model.model_fields)


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def each_once(key: str, value: list[str]) -> list[str]:
    """Raise ValueError where a list of names has one twice."""
    if len(set(value)) < len(value):
        raise ValueError(f"{key}: expected each name once, got {value}")
    return value
