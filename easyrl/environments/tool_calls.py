"""Read the tool calls of a model's turn.

    text of a turn ─► format: what is written ─► schema of the tool ─► ToolCall or BadCall

Nothing is executed with arguments that are lost or changed. What cannot be read, or does not fit
the schema of the tool, is a `BadCall`: the model gets the reason as its result. What the model only
thinks (`<think>`) is no call.

The format of a template is found by a probe: the template writes a call, and the format is the one
that reads it back exactly.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from easyrl.config import ConfigError
from easyrl.environments.tool_arguments import (
    Unreadable,
    check_arguments,
    declared_names,
    read_arguments,
    shown,
)
from easyrl.environments.tool_formats import FORMATS, Format, Region, Written

KEY = "rollout.tool_format"
NAME = re.compile(r"[\w.-]{1,64}")  # of a tool, as APIs allow it
UNKNOWN = "unknown"  # name of a tool whose call cannot be read


class ToolCall(NamedTuple):
    name: str
    arguments: dict[str, Any]
    call_id: str = ""  # that the model has written


class BadCall(NamedTuple):
    """A call that is not executed. `arguments`: exactly those that are written, where only the
    schema of the tool refuses them; None: they cannot be read."""

    reason: str
    name: str = UNKNOWN
    arguments: dict[str, Any] | None = None
    call_id: str = ""


Calls = list[ToolCall | BadCall]


class Turn(NamedTuple):
    """`around`: the text without the calls that are read."""

    calls: Calls
    around: str


class _Found(NamedTuple):
    start: int
    end: int
    calls: Calls


def read_calls(text: str, tool_format: str, schemas: Sequence[dict[str, Any]]) -> Calls:
    """Return the calls of a turn, in order. `schemas`: of the tools."""
    return read_turn(text, tool_format, schemas).calls


def read_turn(text: str, tool_format: str, schemas: Sequence[dict[str, Any]]) -> Turn:
    """Return the calls of a turn, in order, and the text around them."""
    functions = {schema["function"]["name"]: schema["function"] for schema in schemas}
    calls: Calls = []
    around, position = "", 0
    for found in _find(text, FORMATS[tool_format], tool_format, functions):
        calls += found.calls
        around += text[position : found.start]
        if any(call.arguments is None for call in found.calls):
            around += text[found.start : found.end]
        position = found.end
    return Turn(calls, (around + text[position:]).strip())


def _find(
    text: str, form: Format, name: str, functions: Mapping[str, Mapping[str, Any]]
) -> list[_Found]:
    declared = {tool: declared_names(function) for tool, function in functions.items()}
    begin_thinking, end_thinking = form.thinking
    may_have_begun = form.is_opened_by_prompt
    opening, position, found = form.opening(), 0, list[_Found]()
    while (call := opening.search(text, position)) is not None:
        thinking = text.find(begin_thinking, position, call.start())
        before = thinking if thinking >= 0 else call.start()
        thought = text.find(end_thinking, position, before) if may_have_begun else -1
        if thought >= 0:  # the prompt has begun it: all before its end is thinking
            found.clear()
            may_have_begun = False
            position = thought + len(end_thinking)
            continue
        if thinking >= 0:
            thought = text.find(end_thinking, thinking + len(begin_thinking))
            if thought < 0:
                return found
            may_have_begun = False
            position = thought + len(end_thinking)
            continue
        try:
            region = form.read(text, call.start(), declared)
            calls = [_by_schema(each, functions) for each in region.calls]
        except Unreadable as error:
            end = form.end_of_unreadable(text, call.start())
            thought = text.find(end_thinking, call.start(), end) if may_have_begun else -1
            if thought >= 0:
                found.clear()
                may_have_begun = False
                position = thought + len(end_thinking)
                continue
            calls = [BadCall(f"the tool call cannot be read ({name}): {error}")]
            region = Region(end, [])
        found.append(_Found(call.start(), region.end, calls))
        position = region.end
    if may_have_begun and begin_thinking not in text[position:] and end_thinking in text[position:]:
        found.clear()
    return found


def _by_schema(written: Written, functions: Mapping[str, Mapping[str, Any]]) -> ToolCall | BadCall:
    function = functions.get(written.name)
    exact = None if written.are_texts else written.arguments
    name = written.name if NAME.fullmatch(written.name) else UNKNOWN
    if function is None:
        reason = f"there is no tool {shown(written.name)}; the tools are {', '.join(functions)}"
        return BadCall(reason, name, exact, written.call_id)
    read = read_arguments if written.are_texts else check_arguments
    try:
        arguments = read(written.arguments, function)
    except (Unreadable, RecursionError) as error:
        why = "its arguments are nested too deeply" if isinstance(error, RecursionError) else error
        reason = f"the tool '{written.name}' is not called: {why}"
        return BadCall(reason, name, exact, written.call_id)
    return ToolCall(written.name, arguments, written.call_id)


PROBE_NAME = "zqx_probe"
PROBE_TEXT = "zqx probe"
PROBE_ARGUMENTS = {
    "text": PROBE_TEXT,
    "flag": False,
    "count": 3,
    "ratio": 1.5,
    "options": {"names": ["a", "b"], "deep": {"on": True}},
}
_PROBE_TYPES = {
    "text": "string",
    "flag": "boolean",
    "count": "integer",
    "ratio": "number",
    "options": "object",
}
PROBE_SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": PROBE_NAME,
        "description": "A tool.",
        "parameters": {
            "type": "object",
            "properties": {
                name: {"type": kind, "description": "An argument."}
                for name, kind in _PROBE_TYPES.items()
            },
            "required": list(PROBE_ARGUMENTS),
        },
    },
}
"""A tool whose call shows how a template writes each type."""


def is_probe(calls: Calls) -> bool:
    """Whether exactly the probe was read."""
    if len(calls) != 1 or not isinstance(calls[0], ToolCall):
        return False
    given, expected = (
        json.dumps(each, sort_keys=True) for each in (calls[0].arguments, PROBE_ARGUMENTS)
    )
    return calls[0].name == PROBE_NAME and given == expected


def detect_format(
    answers: Sequence[str],
    template: str,
    own: Callable[[str], Calls] | None = None,
    refusal: str = "",
) -> str:
    """Return the format of a template; "auto": that of the tokenizer's own parser, `own`.

    `answers`: the probe as the template writes it, up to the end of the turn; none: it writes no
    calls, or raises an error with the text `refusal`. Raises ConfigError."""
    for answer in answers:
        for name in FORMATS:
            if is_probe(read_calls(answer, name, [PROBE_SCHEMA])):
                return name
        if own is not None and is_probe(own(answer)):
            return "auto"
    expected = (
        f"{KEY}: expected one of {', '.join(sorted(FORMATS))}, got auto, but the chat template"
    )
    where = "(data.chat_template, or that of model.path)"
    if answers:
        raise ConfigError(
            f"{expected} {where} writes tool calls in another format: {answers[0].strip()!r:.300}"
        )
    hint = ""
    for name, form in FORMATS.items():
        mentioned = [sign for sign in form.signs if sign in template]
        if mentioned and not hint:
            hint = f" (perhaps {name}: the template mentions {mentioned[0]})"
    shows = f"refuses them: {refusal}" if refusal else "does not write them"
    raise ConfigError(
        f"{expected} {where} does not show the format of the tool calls in an answer: it {shows}; "
        f"set {KEY} to the format of the model{hint}"
    )


def check_calls(calls: Sequence[Written], schemas: Sequence[dict[str, Any]]) -> Calls:
    """Return calls that another parser has read, by the schemas of the tools."""
    functions = {schema["function"]["name"]: schema["function"] for schema in schemas}
    return [_by_schema(call, functions) for call in calls]
