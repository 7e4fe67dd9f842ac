"""Say in words which values each key takes, by its type and bounds."""

from collections.abc import Mapping, Sequence
from typing import Any

from easyrl.config.schema import KEYS, SECTIONS

BOUNDS = {  # of JSON Schema
    "minimum": "≥",
    "exclusiveMinimum": ">",
    "maximum": "≤",
    "exclusiveMaximum": "<",
}
IN_WORDS = {
    "string": "text",
    "object": "mapping",
    "integer": "integer",
    "number": "number",
    "null": "null",
}
WITH_PLURAL = {"text", "mapping", "integer", "number"}


def allowed_values() -> dict[str, str]:
    """Return which values each key takes: "number > 0 and ≤ 1", "list of texts or null". A key's
    meaning may restrict them further."""
    allowed = {}
    for section, model in SECTIONS.items():
        properties = model.model_json_schema()["properties"]
        for last_part, schema in properties.items():
            key = f"{section}.{last_part}"
            if key in KEYS:
                allowed[key] = _joined(_choices(schema))
    return allowed


def _choices(schema: Mapping[str, Any]) -> list[str]:
    """Return the alternatives of a JSON Schema."""
    if "anyOf" in schema:
        choices = []
        for each in schema["anyOf"]:
            choices += _choices(each)
        return choices
    if "enum" in schema:
        return [str(value) for value in schema["enum"]]
    if "const" in schema:
        return [str(schema["const"])]
    kind = schema["type"]
    if kind == "boolean":
        return ["true", "false"]
    if kind == "array":
        return [_list(schema)]
    return [_with_bounds(IN_WORDS[kind], schema)]


def _list(schema: Mapping[str, Any]) -> str:
    if "prefixItems" in schema:
        entries = [_joined(_choices(each)) for each in schema["prefixItems"]]
        listed = ", ".join(entries)
        return f"[{listed}]"
    choices = _choices(schema["items"])
    plurals = [_plural(each) for each in choices]
    return f"list of {_joined(plurals)}"


def _plural(choice: str) -> str:
    """Number > 0 -> numbers > 0; other choices are values as they are."""
    word, space, bounds = choice.partition(" ")
    if word not in WITH_PLURAL:
        return choice
    return f"{word}s{space}{bounds}"


def _with_bounds(word: str, schema: Mapping[str, Any]) -> str:
    bounds = []
    for name, sign in BOUNDS.items():
        if name in schema:
            bound = schema[name]
            written = f"{bound:g}" if isinstance(bound, float) else str(bound)
            bounds.append(f"{sign} {written}")
    if not bounds:
        return word
    return f"{word} {' and '.join(bounds)}"


def _joined(choices: Sequence[str]) -> str:
    """Join alternatives: "a, b or c"."""
    *others, last = choices
    if not others:
        return last
    return f"{', '.join(others)} or {last}"
