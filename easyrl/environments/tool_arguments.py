"""Read the arguments of a tool call by the JSON schema of the tool.

Formats write arguments in two ways:

    typed    values have types (JSON, Python literals); `check_arguments` compares them with the
             schema
    texts    a string is written as it is, and so are `3`, `True`, `{"k": 1}`: the schema decides
             what a text means (`read_arguments`)

Both return what the tool gets, and raise `Unreadable` for everything else: an argument is never
dropped, cut or replaced. The only values that change are those that stay equal (3.0 for an integer
becomes 3).
"""

import ast
import json
import math
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

Schema = Mapping[str, Any]

MAX_REFERENCES = 20  # that a schema follows before a value is reached
MAX_SHOWN = 80  # characters of a value in a message
MAX_EXACT_FLOAT = 2**53  # whole floats below it are exact integers
MAX_DIGITS = 4000  # of an integer: Python writes and reads up to 4,300
NULL_TEXTS = ("null", "None")
INTEGER = re.compile(r"[+-]?[0-9]+")
NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
NAMES = {
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "null": "null",
    "array": "an array",
    "object": "an object",
}
PYTHON_NAMES = {"true": True, "false": False, "null": None}  # templates write JSON in Python calls


class Unreadable(ValueError):
    """Why a call cannot be read, in words for the model."""


# -- JSON ------------------------------------------------------------------------------------------


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise Unreadable(f"expected every name once, got '{twice}' more than once")
    return found


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise Unreadable(f"expected a finite number, got {shown(text)}")
    return number


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise Unreadable(f"expected an integer of at most {MAX_DIGITS} digits, got {shown(text)}")
    return int(text)


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_float=_finite, parse_int=_integer, parse_constant=_finite
)


def read_json(text: str, start: int = 0) -> tuple[Any, int]:
    """Read the JSON value behind `start`; return it and where it ends. Raises Unreadable."""
    begin = skip_space(text, start)
    try:
        value, end = _DECODER.raw_decode(text, begin)
        _check_text(value)
    except json.JSONDecodeError as error:
        place = shown(text[begin : begin + MAX_SHOWN])
        raise Unreadable(
            f"expected JSON, got {place}: {error.msg} at {error.pos - begin}"
        ) from None
    except RecursionError:
        raise Unreadable("expected JSON, got values nested too deeply") from None
    return value, end


def _check_text(value: Any) -> None:
    """Raise Unreadable if a string in the value is no text that can be written."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Unreadable("expected text, got half of a surrogate pair") from None


def read_whole_json(text: str) -> Any:
    value, end = read_json(text)
    if text[end:].strip():
        raise Unreadable(f"expected one JSON value, got {shown(text[end:])} behind it")
    return value


def skip_space(text: str, start: int) -> int:
    while start < len(text) and text[start].isspace():
        start += 1
    return start


def shown(value: Any) -> str:
    """A value in a message to the model."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(text) > MAX_SHOWN:
        text = f"{text[:MAX_SHOWN]}…"
    return f"'{text}'" if isinstance(value, str) else text


# -- Python literals -------------------------------------------------------------------------------


def parse_python(text: str) -> ast.expr:
    """Parse an expression; it is not evaluated. Raises Unreadable."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about backslashes in strings
            return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise Unreadable(f"expected a Python expression, got {shown(text)}: {error}") from None


def _is_plain(value: object) -> bool:
    """Whether JSON has a constant of Python, in a length that is read. Raises Unreadable."""
    if isinstance(value, str):
        _check_text(value)
        return True
    if isinstance(value, int):
        return bool(abs(value) < 10**MAX_DIGITS)
    return value is None or (isinstance(value, float) and math.isfinite(value))


def python_value(node: ast.expr) -> Any:
    """Return the value of a literal: a string, number, True, False, None, list or dictionary.
    Raises Unreadable."""
    match node:
        case ast.Constant(value=value) if _is_plain(value):
            return value
        case ast.Name(id=name) if name in PYTHON_NAMES:
            return PYTHON_NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float()) as operand):
            if not isinstance(operand.value, bool):
                return -python_value(operand)
        case ast.List(elts=elements):
            return [python_value(each) for each in elements]
        case ast.Dict(keys=keys, values=values):
            names = [python_value(key) for key in keys if key is not None]
            if len(names) == len(values) and all(isinstance(name, str) for name in names):
                given = [python_value(value) for value in values]
                return _unique(list(zip(names, given, strict=True)))
    raise Unreadable(f"expected a literal, got an expression ({type(node).__name__})")


# -- schemas ---------------------------------------------------------------------------------------


def _choices(schema: Schema, root: Schema, depth: int = 0) -> list[dict[str, Any]]:
    """Split a schema into alternatives with at most one type each. One without a type fits all."""
    schema = dict(schema)
    if depth > MAX_REFERENCES:
        return [{}]
    reference = schema.pop("$ref", None)
    if reference is not None:
        target: Any = root
        for name in str(reference).removeprefix("#").strip("/").split("/"):
            if name:
                target = target.get(name, {}) if isinstance(target, Mapping) else {}
        return _choices(
            {**(target if isinstance(target, Mapping) else {}), **schema}, root, depth + 1
        )
    parts = schema.pop("allOf", None) or ()
    if parts:
        for part in parts:
            schema = {**part, **schema}
        return _choices(schema, root, depth + 1)  # a part may be a reference
    found: list[dict[str, Any]] = []
    alternatives = [*(schema.pop("anyOf", None) or ()), *(schema.pop("oneOf", None) or ())]
    is_nullable = schema.pop("nullable", False)
    types = schema.get("type")
    for alternative in alternatives:
        if isinstance(alternative, Mapping):
            found += _choices({**schema, **alternative}, root, depth + 1)
    if not alternatives:
        for each in types if isinstance(types, list) else [types]:
            found.append({**schema, "type": each})
    if is_nullable:
        found.append({"type": "null"})
    return found


def _describe(choices: Iterable[Schema]) -> str:
    words: list[str] = []
    for choice in choices:
        if "enum" in choice or "const" in choice:
            values = [shown(value) for value in _allowed(choice)]
            words.append(f"one of {', '.join(values)}" if len(values) > 1 else "".join(values))
        else:
            words.append(NAMES.get(str(choice.get("type")), "any value"))
    return " or ".join(dict.fromkeys(words))


def _allowed(choice: Schema) -> list[Any]:
    return list(choice["enum"]) if "enum" in choice else [choice["const"]]


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values are equal in JSON, where 1 and true differ."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    return bool(one == other)


def check_value(value: Any, schema: Schema, root: Schema, name: str) -> Any:
    """Return a typed value as the schema has it. Raises Unreadable, which gives its name."""
    choices = _choices(schema, root)
    reasons: list[Unreadable] = []
    for choice in choices:
        try:
            return _check_choice(value, choice, root, name)
        except Unreadable as error:
            reasons.append(error)
    if len(choices) == 1:
        raise reasons[0]
    raise Unreadable(f"{name}: expected {_describe(choices)}, got {_typed(value)}")


def _typed(value: Any) -> str:
    return f"the string {shown(value)}" if isinstance(value, str) else shown(value)


def _check_choice(value: Any, choice: Schema, root: Schema, name: str) -> Any:
    kind = choice.get("type")
    is_whole = isinstance(value, float) and value.is_integer()
    if kind == "integer" and is_whole and abs(value) < MAX_EXACT_FLOAT:
        value = int(value)
    is_allowed = True
    if "enum" in choice or "const" in choice:
        is_allowed = any(_is_same(value, allowed) for allowed in _allowed(choice))
    if not is_allowed or not _has_type(value, kind):
        raise Unreadable(f"{name}: expected {_describe([choice])}, got {_typed(value)}")
    if isinstance(value, list):
        return _check_array(value, choice, root, name)
    if isinstance(value, dict):
        return _check_object(value, choice, root, name)
    return value


TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}


def _has_type(value: object, kind: Any) -> bool:
    if kind not in TYPES:
        return True  # no type, or one of a later schema language
    if isinstance(value, bool):
        return bool(kind == "boolean")  # in Python it is an integer, too
    return isinstance(value, TYPES[kind])


def _check_array(values: list[Any], schema: Schema, root: Schema, name: str) -> list[Any]:
    first, rest = schema.get("prefixItems") or [], schema.get("items")
    found = []
    for number, value in enumerate(values):
        of_item = first[number] if number < len(first) else rest
        if isinstance(of_item, Mapping):
            found.append(check_value(value, of_item, root, f"{name}[{number}]"))
        else:
            found.append(value)
    return found


def _check_object(
    values: dict[str, Any], schema: Schema, root: Schema, name: str
) -> dict[str, Any]:
    properties, rest = schema.get("properties") or {}, schema.get("additionalProperties")
    missing = [each for each in schema.get("required") or () if each not in values]
    if missing:
        raise Unreadable(f"{name}: expected {_quoted(missing)}, which {_is_are(missing)} missing")
    found = {}
    for key, value in values.items():
        if key not in properties and rest is False:
            raise Unreadable(f"{name}: expected {_quoted(properties)}, got '{key}'")
        of_value = properties.get(key, rest)
        if isinstance(of_value, Mapping):
            found[key] = check_value(value, of_value, root, f"{name}.{key}")
        else:
            found[key] = value
    return found


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "no argument"


def _is_are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


# -- arguments -------------------------------------------------------------------------------------


def parameters_of(function: Schema) -> Schema:
    parameters = function.get("parameters")
    return parameters if isinstance(parameters, Mapping) else {}


def declared_names(function: Schema) -> frozenset[str] | None:
    """Names of a tool's arguments; None: it takes others, too."""
    parameters = parameters_of(function)
    if "properties" not in parameters or parameters.get("additionalProperties"):
        return None
    return frozenset(parameters["properties"] or ())


def _check_names(given: Iterable[str], function: Schema) -> None:
    declared, names = declared_names(function), list(given)
    unknown = [name for name in names if declared is not None and name not in declared]
    properties = parameters_of(function).get("properties") or {}
    if unknown:
        expected = f"expected {_quoted(properties)}"
        raise Unreadable(f"unknown arguments: {expected}, got {_quoted(unknown)}")
    required = parameters_of(function).get("required") or ()
    missing = [name for name in required if name not in names]
    if missing:
        got = f"got {_quoted(names)}"
        raise Unreadable(f"missing arguments: expected {_quoted(missing)} too, {got}")


def _schema_of(name: str, function: Schema) -> Schema:
    parameters = parameters_of(function)
    rest = parameters.get("additionalProperties")
    schema = (parameters.get("properties") or {}).get(name, rest)
    return schema if isinstance(schema, Mapping) else {}


def check_arguments(values: Mapping[str, Any], function: Schema) -> dict[str, Any]:
    """Return typed arguments as the schema of a tool has them. Raises Unreadable."""
    _check_names(values, function)
    root = parameters_of(function)
    found = {}
    for name, value in values.items():
        found[name] = check_value(value, _schema_of(name, function), root, f"argument '{name}'")
    return found


def read_arguments(texts: Mapping[str, str], function: Schema) -> dict[str, Any]:
    """Return arguments that are written as texts. Raises Unreadable."""
    _check_names(texts, function)
    root = parameters_of(function)
    found = {}
    for name, text in texts.items():
        found[name] = _read_text(text, _schema_of(name, function), root, f"argument '{name}'")
    return found


def _read_text(text: str, schema: Schema, root: Schema, name: str) -> Any:
    """Read a text by its schema. A string keeps its text exactly. Where a string and another type
    are allowed, both are written alike; then it is the other if that is written in the same way."""
    choices = _choices(schema, root)
    takes_strings = any(each.get("type") in ("string", None) for each in choices)
    reasons: list[Unreadable] = []
    for choice in choices:
        kind = choice.get("type")
        try:
            if "enum" in choice or "const" in choice:
                return _read_enum(text, choice, name)
            if kind == "string":
                continue
            value = _convert(text, None if kind is None else str(kind), name)
            if not takes_strings or _is_written_as(value, text):
                return check_value(value, choice, root, name)
        except Unreadable as error:
            reasons.append(error)
    if any(each.get("type") in ("string", None) and "enum" not in each for each in choices):
        return text
    if len(reasons) == 1:
        raise reasons[0]
    raise Unreadable(f"{name}: expected {_describe(choices)}, got {shown(text)}")


def _read_enum(text: str, choice: Schema, name: str) -> Any:
    for allowed in _allowed(choice):
        if text == allowed or text.strip() == allowed:
            return allowed
    for allowed in _allowed(choice):
        if not isinstance(allowed, str) and text.strip() in (str(allowed), json.dumps(allowed)):
            return allowed
    raise Unreadable(f"{name}: expected {_describe([choice])}, got {shown(text)}")


def _is_written_as(value: Any, text: str) -> bool:
    """Whether templates write this value in this way."""
    if isinstance(value, str):
        return False  # a string is written without quotes
    if isinstance(value, dict | list):
        return True
    return text in (str(value), json.dumps(value))


def _convert(text: str, kind: str | None, name: str) -> Any:
    """Read a text as a value of one type; None: as any but a string. Raises Unreadable."""
    word = text.strip()
    match kind:
        case "boolean" if word.lower() in ("true", "false"):
            return word.lower() == "true"
        case "null" if word in NULL_TEXTS:
            return None
        case "integer" | "number" if INTEGER.fullmatch(word):
            return _integer(word)
        case "integer" | "number" if NUMBER.fullmatch(word):
            return _finite(word)
        case "array" | "object" | None:
            return _structure(word, kind, name)
    raise Unreadable(f"{name}: expected {NAMES.get(str(kind), kind)}, got {shown(text)}")


def _structure(text: str, kind: str | None, name: str) -> Any:
    """Read JSON, or a Python literal, which some templates write."""
    try:
        return read_whole_json(text)
    except Unreadable as error:
        try:
            return python_value(parse_python(text))
        except Unreadable:
            expected = NAMES[kind] if kind else "JSON"
            raise Unreadable(f"{name}: expected {expected} as JSON: {error}") from None
