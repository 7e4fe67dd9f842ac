"""Anthropic's Messages: contents are lists of blocks, and what the model thinks is a block."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from easyrl.agents.protocols.base import (
    Answer,
    Choice,
    Protocol,
    Request,
    check_count,
    check_list,
    check_mapping,
    event,
    function_tool,
    model_of,
    new_id,
    pieces,
    read_conversation,
)
from easyrl.agents.protocols.fields import (
    CHOICE_NOTE,
    UNCONSTRAINED_NOTE,
    FieldRules,
    output_form,
)
from easyrl.types import Messages

READ = {
    "max_tokens",
    "messages",
    "output_config",
    "output_format",
    "stream",
    "system",
    "thinking",
    "tool_choice",
    "tools",
}
SIGNATURE = "easyrl"
"""Clients send the signature of a thought back, as it is."""
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class AnthropicMessages(Protocol):
    """POST /v1/messages, and /v1/messages/count_tokens with `counts_only`."""

    def __init__(self, rules: FieldRules, *, counts_only: bool = False) -> None:
        self._rules = rules
        self._counts_only = counts_only

    def read(self, key: str, body: Mapping[str, Any]) -> Request:
        notes = self._rules.check(body, READ)
        messages: Messages = []
        system = body.get("system")
        if system:
            messages.append({"role": "system", "content": system})
        for number, message in enumerate(check_list("messages", body.get("messages"))):
            messages += _chat_messages(number, check_mapping("messages", message))
        output = check_mapping("output_config", body.get("output_config"))
        form = output_form("output_format", output.get("format") or body.get("output_format"))
        if form:
            notes.add(UNCONSTRAINED_NOTE.format(name="output_format"))
        tools = _read_tools(body.get("tools"))
        reads_calls = _read_tool_choice(body.get("tool_choice"), tools, notes)
        max_tokens = body.get("max_tokens")
        if max_tokens is not None:
            check_count("max_tokens", max_tokens)
        elif not self._counts_only:
            raise ValueError("max_tokens: expected a whole number from 1, got none")
        check_mapping("thinking", body.get("thinking"))
        conversation = read_conversation(messages, reader=self._rules.picture_reader)
        return Request(
            key,
            conversation.messages,
            conversation.pictures,
            tools=tools,
            reads_calls=reads_calls,
            max_tokens=max_tokens,
            output_form=form,
            counts_only=self._counts_only,
            notes=notes,
        )

    def write(self, request: Request, body: Mapping[str, Any], answer: Answer) -> dict[str, Any]:
        if self._counts_only:
            return {"input_tokens": answer.num_prompt_tokens}
        (choice,) = answer.choices
        return _message(
            body,
            content=_blocks(choice, shows_thought=_shows_thought(body)),
            stop_reason=STOP_REASONS[choice.finish_reason],
            num_prompt_tokens=answer.num_prompt_tokens,
            num_sampled_tokens=answer.num_sampled_tokens,
        )

    def stream(self, request: Request, body: Mapping[str, Any], answer: Answer) -> Iterator[str]:
        message = self.write(request, body, answer)
        usage = message["usage"]
        started = message | {
            "content": [],
            "stop_reason": None,
            "usage": usage | {"output_tokens": 0},
        }
        yield _event("message_start", message=started)
        for index, block in enumerate(message["content"]):
            yield from _block_events(index, block)
        delta = {"stop_reason": message["stop_reason"], "stop_sequence": None}
        yield _event("message_delta", delta=delta, usage=usage)
        yield _event("message_stop")

    def refusal(self, error: Exception, status: int) -> dict[str, Any]:
        kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
        kind = "api_error" if status >= 500 else kinds.get(status, "invalid_request_error")
        message = str(error) or type(error).__name__
        return {"type": "error", "error": {"type": kind, "message": message}}


def _event(kind: str, **data: Any) -> str:
    return event({"type": kind, **data}, kind)


def _message(
    body: Mapping[str, Any],
    content: list[dict[str, Any]],
    stop_reason: str,
    num_prompt_tokens: int,
    num_sampled_tokens: int,
) -> dict[str, Any]:
    return {
        "id": new_id("msg"),
        "type": "message",
        "role": "assistant",
        "model": model_of(body),
        "content": content,
        "stop_reason": stop_reason,
        "stop_sequence": None,
        "usage": {
            "input_tokens": num_prompt_tokens,
            "output_tokens": num_sampled_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        },
    }


def _shows_thought(body: Mapping[str, Any]) -> bool:
    """Return whether the client expects blocks with what the model thinks."""
    thinking = body.get("thinking") or {}
    return bool(thinking.get("type", "disabled") != "disabled")


def _blocks(choice: Choice, *, shows_thought: bool) -> list[dict[str, Any]]:
    """Return an answer as blocks: what the model thought, its text, its calls."""
    blocks: list[dict[str, Any]] = []
    if choice.thought and shows_thought:
        thought = {"type": "thinking", "thinking": choice.thought, "signature": SIGNATURE}
        blocks.append(thought)
    if choice.visible or not choice.calls:
        blocks.append({"type": "text", "text": choice.visible})
    for call in choice.calls:
        blocks.append(
            {"type": "tool_use", "id": call.call_id, "name": call.name, "input": call.arguments}
        )
    return blocks


def _block_events(index: int, block: dict[str, Any]) -> Iterator[str]:
    """Yield the events of a block: its beginning, its content in pieces, its end."""
    deltas: list[dict[str, Any]] = []
    if block["type"] == "text":
        begun = block | {"text": ""}
        for piece in pieces(block["text"]):
            deltas.append({"type": "text_delta", "text": piece})
    elif block["type"] == "thinking":
        begun = block | {"thinking": "", "signature": ""}
        for piece in pieces(block["thinking"]):
            deltas.append({"type": "thinking_delta", "thinking": piece})
        deltas.append({"type": "signature_delta", "signature": block["signature"]})
    else:
        begun = block | {"input": {}}
        for piece in pieces(json.dumps(block["input"])):
            deltas.append({"type": "input_json_delta", "partial_json": piece})
    yield _event("content_block_start", index=index, content_block=begun)
    for delta in deltas:
        yield _event("content_block_delta", index=index, delta=delta)
    yield _event("content_block_stop", index=index)


# -- what is read ----------------------------------------------------------------------------------


def _chat_messages(number: int, message: dict[str, Any]) -> Messages:
    """Return a message as chat messages: results of tools are messages of their own. Raises
    ValueError."""
    role = message.get("role")
    content = message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = check_list(f"messages: message {number}: content", content)
    results: Messages = []
    texts: list[Any] = []
    calls: list[dict[str, Any]] = []
    thought = ""
    for each in blocks:
        block = check_mapping(f"messages: message {number}: content", each)
        kind = block.get("type")
        if kind == "tool_result":
            results.append(_result(block))
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking":
            thought += str(block.get("thinking") or "")
        elif kind == "image":
            texts.append(_picture(block))
        elif kind == "document":
            texts.append({"type": "text", "text": _text_of_document(block)})
        elif kind != "redacted_thinking":
            texts.append(block)  # of another type than text: `read_conversation` names it
    if role != "assistant":
        if calls:
            name = f"messages: message {number}"
            raise ValueError(f"{name}: expected tool_use from the assistant, got role {role!r:.80}")
        own = [{"role": role, "content": texts}] if texts or not results else []
        return [*results, *own]
    answer: dict[str, Any] = {"role": role, "content": texts}
    if thought:
        answer["reasoning_content"] = thought
    if calls:
        answer["tool_calls"] = calls
    return [answer]


def _text_of_document(block: dict[str, Any]) -> str:
    source = check_mapping("messages: document", block.get("source"))
    if source.get("type") != "text" or not isinstance(source.get("data"), str):
        kind = source.get("type")
        raise ValueError(f"messages: expected documents of text, got one of type {kind!r:.80}")
    return str(source["data"])


def _is_picture(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "image"


def _picture(block: dict[str, Any]) -> dict[str, Any]:
    """Return a picture as a part of a chat message. `read_conversation` refuses what is none."""
    source = check_mapping("messages: image: source", block.get("source"))
    address = source.get("url")
    if source.get("type") == "base64":
        address = f"data:{source.get('media_type')};base64,{source.get('data')}"
    return {"type": "image", "url": address}


def _result(block: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a tool as a chat message."""
    content = block.get("content")
    if content is None:
        content = ""
    if isinstance(content, list):
        if any(isinstance(part, dict) and part.get("type") == "tool_reference" for part in content):
            raise ValueError(
                "messages: expected text in the result of a tool, got tool_reference: all tools "
                "are shown from the start, so switch the search for tools off "
                "(ENABLE_TOOL_SEARCH=false for Claude's SDK)"
            )
        content = [_picture(part) if _is_picture(part) else part for part in content]
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}


def _read_tools(given: Any) -> list[dict[str, Any]]:
    tools: list[dict[str, Any]] = []
    for each in check_list("tools", given):
        tool = check_mapping("tools", each)
        kind = tool.get("type")
        if kind not in (None, "custom"):
            raise ValueError(f"tools: expected functions, got a tool of the type {kind!r:.80}")
        function = {"name": tool.get("name")}
        if tool.get("description") is not None:
            function["description"] = tool["description"]
        if tool.get("input_schema") is not None:
            function["parameters"] = tool["input_schema"]
        tools.append(function_tool("tools", function))
    return tools


def _read_tool_choice(given: Any, tools: list[dict[str, Any]], notes: set[str]) -> bool:
    """Return whether the client takes calls. Raises ValueError for an unknown choice."""
    kind = check_mapping("tool_choice", given).get("type", "auto")
    if kind == "none":
        return False
    if kind == "auto":
        return True
    names = [tool["function"]["name"] for tool in tools]
    if kind == "any" or (kind == "tool" and given.get("name") in names):
        notes.add(CHOICE_NOTE)
        return True
    expected = "expected the type auto, any, none, or tool with the name of one"
    raise ValueError(f"tool_choice: {expected}, got {given!r:.80}")
