"""Compare the arguments of a tool call with the JSON schema of the tool.

Formats write arguments in two ways:

    typed    values have types (JSON, Python literals); `check_arguments` compares them with the
             schema
    texts    a string is written as it is, and so are `3`, `True`, `{"k": 1}`: the schema decides
             what a text means (`read_arguments`)

Both return what the tool gets, and raise `Unreadable` for everything else: an argument is never
dropped, cut or replaced. The only values that change are those that stay equal (3.0 for an integer
becomes 3).
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from easyrl.environments.tool_calls.values import (
    Unreadable,
    finite_number,
    parse_python,
    python_value,
    read_whole_json,
    shown,
    whole_number,
)

Schema = Mapping[str, Any]

MAX_REFERENCES = 20  # that a schema follows before a value is reached
MAX_EXACT_FLOAT = 2**53  # whole floats below it are exact integers
NULL_TEXTS = ("null", "None")
INTEGER = re.compile(r"[+-]?[0-9]+")
NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}
NAMES = {
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "null": "null",
    "array": "an array",
    "object": "an object",
}


@dataclass(frozen=True, slots=True)
class Slot:
    """A value that a schema asks for."""

    schema: Schema
    root: Schema  # the schema of all arguments, in which references point
    name: str  # in messages, as in "argument 'points'[0].x"

    def item(self, schema: Schema, number: int) -> "Slot":
        return Slot(schema, self.root, f"{self.name}[{number}]")

    def member(self, schema: Schema, key: str) -> "Slot":
        return Slot(schema, self.root, f"{self.name}.{key}")

    def choices(self) -> list["Slot"]:
        """Return the alternatives of the schema, with at most one type each."""
        return [replace(self, schema=choice) for choice in _choices(self.schema, self.root)]

    @property
    def kind(self) -> str | None:
        """The type of a choice. None: it takes every type."""
        kind = self.schema.get("type")
        return None if kind is None else str(kind)

    @property
    def allowed(self) -> list[Any] | None:
        """The only values that a choice takes. None: it does not list them."""
        if self.schema.get("enum") is not None:
            return list(self.schema["enum"])
        return [self.schema["const"]] if "const" in self.schema else None

    @property
    def takes_any_string(self) -> bool:
        return self.kind in ("string", None) and self.allowed is None


def check_arguments(values: Mapping[str, Any], function: Schema) -> dict[str, Any]:
    """Return typed arguments as the schema of a tool has them. Raises Unreadable."""
    return _all_arguments(values, function, _check_value)


def read_arguments(texts: Mapping[str, str], function: Schema) -> dict[str, Any]:
    """Return arguments that are written as texts. Raises Unreadable."""
    return _all_arguments(texts, function, _read_text)


def declared_names(function: Schema) -> frozenset[str] | None:
    """Return the names of a tool's arguments. None: it takes others, too."""
    parameters = _parameters_of(function)
    if "properties" not in parameters or parameters.get("additionalProperties"):
        return None
    return frozenset(parameters["properties"] or ())


def _all_arguments(
    given: Mapping[str, Any], function: Schema, read: Callable[[Any, Slot], Any]
) -> dict[str, Any]:
    parameters = _parameters_of(function)
    properties = parameters.get("properties") or {}
    _check_names(list(given), function)
    found: dict[str, Any] = {}
    for name, value in given.items():
        schema = properties.get(name, parameters.get("additionalProperties"))
        if not isinstance(schema, Mapping):
            schema = {}
        found[name] = read(value, Slot(schema, parameters, f"argument '{name}'"))
    return found


def _parameters_of(function: Schema) -> Schema:
    parameters = function.get("parameters")
    return parameters if isinstance(parameters, Mapping) else {}


def _check_names(given: list[str], function: Schema) -> None:
    declared = declared_names(function)
    parameters = _parameters_of(function)
    if declared is not None:
        unknown = [name for name in given if name not in declared]
        if unknown:
            expected = f"expected {_quoted(parameters['properties'] or ())}"
            raise Unreadable(f"unknown arguments: {expected}, got {_quoted(unknown)}")
    missing = [name for name in parameters.get("required") or () if name not in given]
    if missing:
        expected = f"expected {_quoted(missing)} too"
        raise Unreadable(f"missing arguments: {expected}, got {_quoted(given)}")


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "no argument"


# -- schemas ---------------------------------------------------------------------------------------


def _choices(schema: Schema, root: Schema, depth: int = 0) -> list[dict[str, Any]]:
    """Split a schema into alternatives with at most one type each, as
    {"type": ["integer", "null"]} into {"type": "integer"} and {"type": "null"}."""
    if depth > MAX_REFERENCES:
        return [{}]
    own = dict(schema)
    reference = own.pop("$ref", None)
    if reference is not None:
        return _choices({**_target(str(reference), root), **own}, root, depth + 1)
    parts = own.pop("allOf", None)
    if parts:
        for part in parts:
            own = {**part, **own}
        return _choices(own, root, depth + 1)  # a part may be a reference
    is_nullable = own.pop("nullable", False)
    any_of = own.pop("anyOf", None) or []
    one_of = own.pop("oneOf", None) or []
    alternatives = [*any_of, *one_of]
    found: list[dict[str, Any]] = []
    if alternatives:
        for alternative in alternatives:
            if isinstance(alternative, Mapping):
                found += _choices({**own, **alternative}, root, depth + 1)
    else:
        types = own.get("type")
        for each in types if isinstance(types, list) else [types]:
            found.append({**own, "type": each})
    if is_nullable:
        found.append({"type": "null"})
    return found


def _target(reference: str, root: Schema) -> Schema:
    """Return the schema that a reference names, as "#/$defs/Point"."""
    target: Any = root
    for name in reference.removeprefix("#").strip("/").split("/"):
        if name:
            target = target.get(name, {}) if isinstance(target, Mapping) else {}
    return target if isinstance(target, Mapping) else {}


def _describe(choices: Iterable[Slot]) -> str:
    """Return what is expected, as in "an integer or null"."""
    words: list[str] = []
    for choice in choices:
        if choice.allowed is None:
            words.append(NAMES.get(choice.kind or "", "any value"))
        else:
            values = ", ".join(shown(value) for value in choice.allowed)
            words.append(f"one of {values}" if len(choice.allowed) > 1 else values)
    return " or ".join(dict.fromkeys(words))


# -- typed values ----------------------------------------------------------------------------------


def _check_value(value: Any, slot: Slot) -> Any:
    """Return a typed value as the schema has it. Raises Unreadable, which gives its name."""
    choices = slot.choices()
    reasons: list[Unreadable] = []
    for choice in choices:
        try:
            return _check_choice(value, choice)
        except Unreadable as error:
            reasons.append(error)
    if len(choices) == 1:
        raise reasons[0]
    raise Unreadable(f"{slot.name}: expected {_describe(choices)}, got {_typed(value)}")


def _check_choice(value: Any, choice: Slot) -> Any:
    if choice.kind == "integer" and _is_exact_integer(value):
        value = int(value)
    is_allowed = choice.allowed is None or any(_is_same(value, each) for each in choice.allowed)
    if not is_allowed or not _has_type(value, choice.kind):
        raise Unreadable(f"{choice.name}: expected {_describe([choice])}, got {_typed(value)}")
    if isinstance(value, list):
        return _check_array(value, choice)
    if isinstance(value, dict):
        return _check_object(value, choice)
    return value


def _is_exact_integer(value: Any) -> bool:
    return isinstance(value, float) and value.is_integer() and abs(value) < MAX_EXACT_FLOAT


def _typed(value: Any) -> str:
    return f"the string {shown(value)}" if isinstance(value, str) else shown(value)


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values are equal in JSON, where 1 and true differ."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    return bool(one == other)


def _has_type(value: object, kind: str | None) -> bool:
    if kind not in TYPES:
        return True  # no type, or one of a later schema language
    if isinstance(value, bool):
        return kind == "boolean"  # in Python it is an integer, too
    return isinstance(value, TYPES[kind])


def _check_array(values: list[Any], slot: Slot) -> list[Any]:
    first = slot.schema.get("prefixItems") or []
    others = slot.schema.get("items")
    found: list[Any] = []
    for number, value in enumerate(values):
        schema = first[number] if number < len(first) else others
        if isinstance(schema, Mapping):
            found.append(_check_value(value, slot.item(schema, number)))
        else:
            found.append(value)
    return found


def _check_object(values: dict[str, Any], slot: Slot) -> dict[str, Any]:
    properties = slot.schema.get("properties") or {}
    others = slot.schema.get("additionalProperties")
    missing = [name for name in slot.schema.get("required") or () if name not in values]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise Unreadable(f"{slot.name}: expected {_quoted(missing)}, which {verb} missing")
    found: dict[str, Any] = {}
    for key, value in values.items():
        if key not in properties and others is False:
            raise Unreadable(f"{slot.name}: expected {_quoted(properties)}, got '{key}'")
        schema = properties.get(key, others)
        if isinstance(schema, Mapping):
            found[key] = _check_value(value, slot.member(schema, key))
        else:
            found[key] = value
    return found


# -- texts -----------------------------------------------------------------------------------------


def _read_text(text: str, slot: Slot) -> Any:
    """Read a text by its schema. A string keeps its text exactly. Where a string and another type
    are allowed, both are written alike; then it is the other if that is written in the same way."""
    choices = slot.choices()
    may_be_string = any(choice.kind in ("string", None) for choice in choices)
    reasons: list[Unreadable] = []
    for choice in choices:
        try:
            if choice.allowed is not None:
                return _read_allowed(text, choice)
            if choice.kind == "string":
                continue
            value = _convert(text, choice)
            if not may_be_string or _is_written_as(value, text):
                return _check_value(value, choice)
        except Unreadable as error:
            reasons.append(error)
    if any(choice.takes_any_string for choice in choices):
        return text
    if len(reasons) == 1:
        raise reasons[0]
    raise Unreadable(f"{slot.name}: expected {_describe(choices)}, got {shown(text)}")


def _read_allowed(text: str, choice: Slot) -> Any:
    """Return the value of a list of values that a text means."""
    allowed = choice.allowed or []
    for value in allowed:
        if value in (text, text.strip()):
            return value
    for value in allowed:
        is_string = isinstance(value, str)
        if not is_string and text.strip() in (str(value), json.dumps(value)):
            return value
    raise Unreadable(f"{choice.name}: expected {_describe([choice])}, got {shown(text)}")


def _is_written_as(value: Any, text: str) -> bool:
    """Whether templates write this value in this way."""
    if isinstance(value, str):
        return False  # a string is written without quotes
    if isinstance(value, dict | list):
        return True
    return text in (str(value), json.dumps(value))


def _convert(text: str, choice: Slot) -> Any:
    """Read a text as a value of the choice's type; without one as any but a string. Raises
    Unreadable."""
    word = text.strip()
    match choice.kind:
        case "boolean" if word.lower() in ("true", "false"):
            return word.lower() == "true"
        case "null" if word in NULL_TEXTS:
            return None
        case "integer" | "number" if INTEGER.fullmatch(word):
            return whole_number(word)
        case "integer" | "number" if NUMBER.fullmatch(word):
            return finite_number(word)
        case "array" | "object" | None:
            return _structure(word, choice)
    expected = NAMES.get(choice.kind, choice.kind)
    raise Unreadable(f"{choice.name}: expected {expected}, got {shown(text)}")


def _structure(text: str, choice: Slot) -> Any:
    """Read JSON, or a Python literal, which some templates write."""
    try:
        return read_whole_json(text)
    except Unreadable as error:
        try:
            return python_value(parse_python(text))
        except Unreadable:
            expected = "JSON" if choice.kind is None else f"{NAMES[choice.kind]} as JSON"
            raise Unreadable(f"{choice.name}: expected {expected}: {error}") from None
