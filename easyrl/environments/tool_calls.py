"""Read the tool calls of a model's turn.

    response_template   the tokenizer's own description of its format, by transformers
    hermes              <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call> (Qwen, Hermes)
    qwen3_coder         <tool_call><function=f><parameter=x>1</parameter></function></tool_call>
    llama3              {"name": "f", "parameters": {"x": 1}}, the whole turn
    mistral             [TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}], or
                        [TOOL_CALLS]f[ARGS]{"x": 1}

A call that cannot be read is a `BadCall`: the model gets the reason as its result. What the model
only thinks (`<think>`, Mistral's `[THINK]`) is no call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from easyrl.config import ConfigError

KEY = "rollout.tool_format"
HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|$)", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
MISTRAL = "[TOOL_CALLS]"
CALLS_OR_THINKING = re.compile(
    r"\A(?:(?!<think>|\[THINK\]).)*?(?:</think>|\[/THINK\])"  # the prompt opened it
    r"|(<tool_call>.*?(?:</tool_call>|\Z)|<function=.*?(?:</function>|\Z)|\[TOOL_CALLS\].*"
    r"|\A\s*(?:<\|python_tag\|>\s*)?\{.*)"  # arguments may contain such tags
    r"|(?:<think>|\[THINK\]).*?(?:</think>|\[/THINK\]|\Z)",
    re.DOTALL,
)
"""Calls are group 1."""
SIGNS = {
    "<function=": "qwen3_coder",
    "<tool_call>": "hermes",
    MISTRAL: "mistral",
    '"parameters": ': "llama3",
}
"""Text of a chat template that shows the format; the first one that is found."""


class ToolCall(NamedTuple):
    name: str
    arguments: dict[str, Any]


class BadCall(NamedTuple):
    """A call that cannot be read."""

    reason: str


Calls = list[ToolCall | BadCall]


def detect_format(template: str) -> str:
    """Return the format of the calls that a chat template writes. Raises ConfigError."""
    for sign, name in SIGNS.items():
        if sign in template:
            return name
    raise ConfigError(
        f"{KEY}: expected {', '.join(sorted(FORMATS))}, got auto, but the chat template "
        "(data.chat_template, or that of model.path) shows no format of tool calls"
    )


def read_calls(text: str, tool_format: str, schemas: Sequence[dict[str, Any]]) -> Calls:
    """Return the calls of a turn, in order. `schemas`: of the tools."""
    split, read = FORMATS[tool_format]
    calls: Calls = []
    for body in split(CALLS_OR_THINKING.sub(lambda match: match[1] or "", text)):
        try:
            calls.append(read(body, schemas))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"the tool call cannot be read ({tool_format}): {error!r:.200}"
            calls.append(BadCall(reason))
    return calls


def _json_call(text: str, _: Sequence[dict[str, Any]]) -> ToolCall:
    call = json.loads(text)
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return ToolCall(str(call["name"]), dict(arguments))


def _split_llama3(text: str) -> list[str]:
    body = text.strip().removeprefix("<|python_tag|>").strip()
    return [body] if body.startswith("{") and '"name"' in body else []


def _split_mistral(text: str) -> list[str]:
    """Return calls as JSON; a list of calls that cannot be read, as it is."""
    bodies = []
    for part in text.split(MISTRAL)[1:]:
        name, has_arguments, arguments = part.partition("[ARGS]")
        try:
            if has_arguments:
                name = name.partition("[CALL_ID]")[0].strip()
                calls = [{"name": name, "arguments": json.loads(arguments)}]
            else:
                calls = json.loads(part)
            bodies += [json.dumps(call) for call in calls]
        except (ValueError, TypeError):
            bodies.append(part)
    return bodies


def _split_qwen3_coder(text: str) -> list[str]:
    return [match[0] for match in FUNCTION.finditer(text)]


def _read_qwen3_coder(body: str, schemas: Sequence[dict[str, Any]]) -> ToolCall:
    match = FUNCTION.match(body)
    assert match is not None
    types = {}
    for schema in schemas:
        if schema["function"]["name"] == match[1]:
            types = schema["function"]["parameters"].get("properties", {})
    arguments = {
        key: value if types.get(key, {}).get("type") == "string" else _literal(value)
        for key, value in PARAMETER.findall(match[2])
    }
    return ToolCall(match[1], arguments)


def _literal(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


Split = Callable[[str], list[str]]
Read = Callable[[str, Sequence[dict[str, Any]]], ToolCall]
FORMATS: dict[str, tuple[Split, Read]] = {
    "hermes": (HERMES.findall, _json_call),
    "llama3": (_split_llama3, _json_call),
    "mistral": (_split_mistral, _json_call),
    "qwen3_coder": (_split_qwen3_coder, _read_qwen3_coder),
}
"""How a turn is divided into calls, and how a call is read."""
