"""Values in tool calls: JSON and Python literals, read strictly.

What is not sure raises `Unreadable`: a name that is given twice, a number that is not finite or is
longer than Python writes, half of a surrogate pair.
"""

import ast
import json
import math
import warnings
from typing import Any, NamedTuple

MAX_SHOWN = 80  # characters of a value in a message
MAX_DIGITS = 4000  # of an integer: Python writes and reads up to 4,300
LARGEST_INTEGER: int = 10**MAX_DIGITS
JSON_WORDS = {"true": True, "false": False, "null": None}
"""Names in Python calls that are no constants of Python: templates write JSON in them."""


class Unreadable(ValueError):
    """Why a call cannot be read, in words for the model."""


class Parsed(NamedTuple):
    value: Any
    end: int  # of its text


def shown(value: Any) -> str:
    """Return a value as messages to the model show it."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(text) > MAX_SHOWN:
        text = f"{text[:MAX_SHOWN]}…"
    return f"'{text}'" if isinstance(value, str) else text


def skip_space(text: str, start: int) -> int:
    """Return where the next character is that is no space."""
    while start < len(text) and text[start].isspace():
        start += 1
    return start


# -- JSON ------------------------------------------------------------------------------------------


def read_json(text: str, start: int = 0) -> Parsed:
    """Read the JSON value behind `start`. Raises Unreadable."""
    begin = skip_space(text, start)
    try:
        value, end = _DECODER.raw_decode(text, begin)
    except json.JSONDecodeError as error:
        got = shown(text[begin : begin + MAX_SHOWN])
        reason = f"expected JSON, got {got}: {error.msg} at {error.pos - begin}"
        raise Unreadable(reason) from None
    except RecursionError:
        raise Unreadable("expected JSON, got values nested too deeply") from None
    _check_text(value)
    return Parsed(value, end)


def read_whole_json(text: str) -> Any:
    """Read a text that is one JSON value. Raises Unreadable."""
    value, end = read_json(text)
    if text[end:].strip():
        raise Unreadable(f"expected one JSON value, got {shown(text[end:])} behind it")
    return value


def unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of its members. Raises Unreadable if two have the same name."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise Unreadable(f"expected every name once, got '{name}' more than once")
        found[name] = value
    return found


def finite_number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise Unreadable(f"expected a finite number, got {shown(text)}")
    return number


def whole_number(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise Unreadable(f"expected an integer of at most {MAX_DIGITS} digits, got {shown(text)}")
    return int(text)


_DECODER = json.JSONDecoder(
    object_pairs_hook=unique_names,
    parse_float=finite_number,
    parse_int=whole_number,
    parse_constant=finite_number,  # NaN, Infinity, -Infinity
)


def _check_text(value: Any) -> None:
    """Raise Unreadable if a string in the value cannot be written as UTF-8."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Unreadable("expected text, got half of a surrogate pair") from None
    except RecursionError:
        raise Unreadable("expected JSON, got values nested too deeply") from None


# -- Python literals -------------------------------------------------------------------------------


def parse_python(text: str) -> ast.expr:
    """Parse an expression; it is not evaluated. Raises Unreadable."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about backslashes in strings
            return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise Unreadable(f"expected a Python expression, got {shown(text)}: {error}") from None


def python_value(node: ast.expr) -> Any:
    """Return the value of a literal that JSON has, too: a string, a number, True, False, None, a
    list, or a dictionary with names. Raises Unreadable."""
    if isinstance(node, ast.Constant) and _is_in_json(node.value):
        return node.value
    if isinstance(node, ast.Name) and node.id in JSON_WORDS:
        return JSON_WORDS[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = python_value(node.operand) if isinstance(node.operand, ast.Constant) else None
        if isinstance(number, int | float) and not isinstance(number, bool):
            return -number
    if isinstance(node, ast.List):
        return [python_value(element) for element in node.elts]
    if isinstance(node, ast.Dict):
        return _python_dictionary(node)
    raise _no_literal(node)


def _is_in_json(value: object) -> bool:
    """Whether JSON has a constant of Python. Raises Unreadable for a string that is no text."""
    if isinstance(value, str):
        _check_text(value)
        return True
    if isinstance(value, int):  # also a bool
        return -LARGEST_INTEGER < value < LARGEST_INTEGER
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None


def _python_dictionary(node: ast.Dict) -> dict[str, Any]:
    pairs = []
    for key, value in zip(node.keys, node.values, strict=True):
        name = None if key is None else python_value(key)  # None: `**` before a dictionary
        if not isinstance(name, str):
            raise _no_literal(node)
        pairs.append((name, python_value(value)))
    return unique_names(pairs)


def _no_literal(node: ast.expr) -> Unreadable:
    return Unreadable(f"expected a literal, got an expression ({type(node).__name__})")
