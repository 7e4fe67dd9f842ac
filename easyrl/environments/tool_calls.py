"""Read the tool calls of a model's turn.

    hermes         <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call> (Qwen, Hermes)
    qwen3_coder    <tool_call><function=f><parameter=x>1</parameter></function></tool_call>
    llama3         {"name": "f", "parameters": {"x": 1}}, the whole turn

Transformers reads the calls of tokenizers that describe their format (`response_template`). These
formats are for the others. A call that cannot be read is a `BadCall`: the model gets the reason as
its result. What the model only thinks (`<think>`) is no call.
"""

import contextlib
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from easyrl.config import ConfigError

KEY = "rollout.tool_format"
HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|$)", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
CALLS_OR_THINKING = re.compile(  # calls are group 1
    r"\A(?:(?><tool_call>.*?</tool_call>|<function=.*?</function>)"
    r"|(?!<think>|<tool_call>|<function=).)*?</think>"  # the prompt opened it
    r"|(<tool_call>.*?(?:</tool_call>|\Z)|<function=.*?(?:</function>|\Z)"
    r"|\A\s*(?:<\|python_tag\|>\s*)?\{.*)"  # arguments may contain such tags
    r"|<think>.*?(?:</think>|\Z)",
    re.DOTALL,
)


class ToolCall(NamedTuple):
    name: str
    arguments: dict[str, Any]


class BadCall(NamedTuple):
    reason: str


Calls = list[ToolCall | BadCall]


class Format(NamedTuple):
    sign: str  # in a chat template that writes such calls
    split: Callable[[str], list[Any]]  # a turn into calls
    read: Callable[[Any, Sequence[dict[str, Any]]], ToolCall]


def detect_format(template: str) -> str:
    """Return the format of the calls that a chat template writes. Raises ConfigError."""
    for name, each in FORMATS.items():
        if each.sign in template:
            return name
    raise ConfigError(
        f"{KEY}: expected {', '.join(sorted(FORMATS))}, got auto, but the chat template "
        "(data.chat_template, or that of model.path) shows no format of tool calls"
    )


def read_calls(text: str, tool_format: str, schemas: Sequence[dict[str, Any]]) -> Calls:
    """Return the calls of a turn, in order. `schemas`: of the tools."""
    _, split, read = FORMATS[tool_format]
    calls: Calls = []
    for call in split(CALLS_OR_THINKING.sub(lambda match: match[1] or "", text)):
        try:
            calls.append(read(call, schemas))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"the tool call cannot be read ({tool_format}): {error!r:.200}"
            calls.append(BadCall(reason))
    return calls


def without_calls(text: str) -> str:
    return CALLS_OR_THINKING.sub(lambda match: "" if match[1] else match[0], text).strip()


def _read_json(text: str, _: Sequence[dict[str, Any]]) -> ToolCall:
    call = json.loads(text)
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return ToolCall(str(call["name"]), dict(arguments))


def _split_llama3(text: str) -> list[str]:
    body = text.strip().removeprefix("<|python_tag|>").strip()
    return [body] if body.startswith("{") and '"name"' in body else []


def _read_qwen3_coder(call: tuple[str, str], schemas: Sequence[dict[str, Any]]) -> ToolCall:
    name, body = call
    tools = {schema["function"]["name"]: schema["function"] for schema in schemas}
    types = tools.get(name, {"parameters": {}})["parameters"].get("properties", {})
    arguments: dict[str, Any] = dict(PARAMETER.findall(body))
    for key, text in arguments.items():
        if types.get(key, {}).get("type") != "string":
            with contextlib.suppress(ValueError):  # text of another type is left as it is
                arguments[key] = json.loads(text)
    return ToolCall(name, arguments)


FORMATS = {  # by name; of a template that shows several signs, the first format
    "qwen3_coder": Format("<function=", FUNCTION.findall, _read_qwen3_coder),
    "hermes": Format("<tool_call>", HERMES.findall, _read_json),
    "llama3": Format('"parameters": ', _split_llama3, _read_json),
}
