"""OpenAI's Responses: items instead of messages, and conversations that the server keeps."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from easyrl.agents.protocols.base import (
    Answer,
    ApiError,
    Choice,
    Conversation,
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
from easyrl.types import Messages, Picture

READ = {
    "input",
    "instructions",
    "max_output_tokens",
    "previous_response_id",
    "reasoning",
    "stream",
    "stream_options",
    "text",
    "tool_choice",
    "tools",
}
MAX_KEPT = 4096
"""Responses of all episodes that requests may name; the oldest are dropped."""


@dataclass(slots=True)
class _Stored:
    """A response that requests may name, until its episode ends."""

    caller: str  # the key of its client
    conversation: Messages  # up to its answer, without the instructions
    pictures: Mapping[str, Picture]  # that it shows, by digest
    items: list[dict[str, Any]]  # of its output


class Responses(Protocol):
    """POST /v1/responses."""

    def __init__(self, rules: FieldRules) -> None:
        self._rules = rules
        self._stored: dict[str, _Stored] = {}  # by their ids, the oldest first

    def read(self, key: str, body: Mapping[str, Any]) -> Request:
        notes = self._rules.check(body, READ)
        messages: Messages = []
        instructions = body.get("instructions")
        if instructions:
            messages.append({"role": "system", "content": instructions})
        earlier = self._earlier(key, body.get("previous_response_id"))
        messages += earlier.messages
        messages += _messages_of(self._resolved(key, body.get("input")))
        text = check_mapping("text", body.get("text"))
        form = output_form("text.format", text.get("format"))
        if form:
            notes.add(UNCONSTRAINED_NOTE.format(name="text.format"))
        tools = _read_tools(body.get("tools"))
        reads_calls = _read_tool_choice(body.get("tool_choice"), tools, notes)
        max_tokens = body.get("max_output_tokens")
        if max_tokens is not None:
            check_count("max_output_tokens", max_tokens)
        conversation = read_conversation(
            messages,
            "input",
            reader=self._rules.picture_reader,
            known=earlier.pictures,
        )
        return Request(
            key,
            conversation.messages,
            conversation.pictures,
            tools=tools,
            reads_calls=reads_calls,
            max_tokens=max_tokens,
            output_form=form,
            notes=notes,
        )

    def _earlier(self, key: str, previous: Any) -> Conversation:
        """Return the conversation that a response has ended, an empty one for none. Raises
        ApiError."""
        if previous is None:
            return Conversation([], {})
        stored = self._stored.get(previous) if isinstance(previous, str) else None
        if stored is None or stored.caller != key:
            text = f"expected the id of a stored response of this episode, got {previous!r:.80}"
            name = "previous_response_id"
            raise ApiError(f"{name}: {text}", "previous_response_not_found", 404)
        return Conversation(list(stored.conversation), stored.pictures)

    def _resolved(self, key: str, given: Any) -> Any:
        """Return the input of a request with the stored items in the place of references to them.
        Raises ApiError for an unknown one."""
        if not isinstance(given, list):
            return given
        resolved: list[Any] = []
        for item in given:
            is_reference = isinstance(item, dict) and (
                item.get("type") == "item_reference" or item.keys() == {"id"}
            )
            resolved.append(self._item(key, item.get("id")) if is_reference else item)
        return resolved

    def _item(self, key: str, item_id: Any) -> dict[str, Any]:
        for stored in reversed(self._stored.copy().values()):
            for item in stored.items:
                if stored.caller == key and item["id"] == item_id:
                    return item
        text = f"expected the id of a stored item of this episode, got {item_id!r:.80}"
        raise ApiError(f"input: {text}", "item_not_found", 404)

    def forget(self, key: str) -> None:
        for response_id, stored in self._stored.copy().items():
            if stored.caller == key:
                self._stored.pop(response_id, None)

    def write(self, request: Request, body: Mapping[str, Any], answer: Answer) -> dict[str, Any]:
        response = self._empty(body)
        return response | self._completed(request, body, response["id"], answer)

    def _empty(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return a response before anything is sampled."""
        return {
            "id": new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "metadata": body.get("metadata") or {},
            "model": model_of(body),
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": body.get("previous_response_id"),
            "reasoning": {"effort": None, "summary": None},
            "store": body.get("store") is not False,
            "temperature": body.get("temperature"),
            "text": body.get("text") or {"format": {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "top_p": body.get("top_p"),
            "truncation": "disabled",
            "usage": None,
        }

    def _completed(
        self, request: Request, body: Mapping[str, Any], response_id: str, answer: Answer
    ) -> dict[str, Any]:
        """Return the fields of a response that its answer changes, and keep its conversation."""
        (choice,) = answer.choices
        is_cut = choice.finish_reason == "length"
        items = _items_of(choice)
        if body.get("store") is not False:
            self._store(request, body, response_id, choice, items)
        return {
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": items,
            "usage": {
                "input_tokens": answer.num_prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": answer.num_sampled_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": answer.num_prompt_tokens + answer.num_sampled_tokens,
            },
        }

    def _store(
        self,
        request: Request,
        body: Mapping[str, Any],
        response_id: str,
        choice: Choice,
        items: list[dict[str, Any]],
    ) -> None:
        messages = list(request.messages)
        if body.get("instructions"):  # of one response only
            del messages[0]
        message: dict[str, Any] = {"role": "assistant", "content": choice.text}
        if choice.calls:
            message["tool_calls"] = [call.as_chat() for call in choice.calls]
        self._stored[response_id] = _Stored(
            request.caller, [*messages, message], request.pictures, items
        )
        if len(self._stored) > MAX_KEPT:
            oldest = next(iter(self._stored))
            self._stored.pop(oldest, None)

    def stream(self, request: Request, body: Mapping[str, Any], answer: Answer) -> Iterator[str]:
        started = self._empty(body)
        completed = started | self._completed(request, body, started["id"], answer)
        numbered = _Numbered()
        yield numbered.event("response.created", response=started)
        yield numbered.event("response.in_progress", response=started)
        for index, item in enumerate(completed["output"]):
            yield from _item_events(numbered, index, item)
        kind = "response.incomplete" if completed["incomplete_details"] else "response.completed"
        yield numbered.event(kind, response=completed)


class _Numbered:
    """Writes the events of a stream, each with its number."""

    def __init__(self) -> None:
        self._next = 0

    def event(self, kind: str, **data: Any) -> str:
        number = self._next
        self._next += 1
        return event({"type": kind, "sequence_number": number, **data}, kind)


def _item_events(numbered: _Numbered, index: int, item: dict[str, Any]) -> Iterator[str]:
    """Yield the events of an item of the output."""
    place = {"item_id": item["id"], "output_index": index}
    kind = item["type"]
    if kind == "function_call":
        begun = item | {"arguments": "", "status": "in_progress"}
        yield numbered.event("response.output_item.added", output_index=index, item=begun)
        name = "response.function_call_arguments"
        for piece in pieces(item["arguments"]):
            yield numbered.event(f"{name}.delta", **place, delta=piece)
        arguments = item["arguments"]
        yield numbered.event(f"{name}.done", **place, name=item["name"], arguments=arguments)
    else:
        begun = item | {"content": []}
        if kind == "message":
            begun["status"] = "in_progress"
        yield numbered.event("response.output_item.added", output_index=index, item=begun)
        (part,) = item["content"]
        place["content_index"] = 0
        name = "response.output_text" if kind == "message" else "response.reasoning_text"
        extra: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        empty = part | {"text": ""}
        yield numbered.event("response.content_part.added", **place, part=empty)
        for piece in pieces(part["text"]):
            yield numbered.event(f"{name}.delta", **place, delta=piece, **extra)
        yield numbered.event(f"{name}.done", **place, text=part["text"], **extra)
        yield numbered.event("response.content_part.done", **place, part=part)
    yield numbered.event("response.output_item.done", output_index=index, item=item)


def _items_of(choice: Choice) -> list[dict[str, Any]]:
    """Return an answer as items: what the model thought, its text, its calls."""
    items: list[dict[str, Any]] = []
    status = "incomplete" if choice.is_cut else "completed"
    if choice.thought:
        content = [{"type": "reasoning_text", "text": choice.thought}]
        items.append({"id": new_id("rs"), "type": "reasoning", "summary": [], "content": content})
    if choice.visible or not choice.calls:
        part = {"type": "output_text", "text": choice.visible, "annotations": [], "logprobs": []}
        items.append(
            {
                "id": new_id("msg"),
                "type": "message",
                "status": status,
                "role": "assistant",
                "content": [part],
            }
        )
    for call in choice.calls:
        function = call.as_chat()["function"]
        items.append(
            {
                "id": new_id("fc"),
                "type": "function_call",
                "status": "completed",
                "call_id": call.call_id,
                **function,
            }
        )
    return items


# -- what is read ----------------------------------------------------------------------------------


def _messages_of(given: Any) -> Messages:
    """Return the input of a request as chat messages: items of one answer become one message.
    Raises ValueError."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: Messages = []
    answer: dict[str, Any] | None = None  # the newest message, while its items may go on
    for item in check_list("input", given):
        read = _message_of(check_mapping("input", item))
        if read["role"] != "assistant":
            messages.append(read)
            answer = None
        elif answer is None or (answer["content"] and read["content"]):
            messages.append(read)
            answer = read
        else:
            _append_to_answer(answer, read)
    return messages


def _message_of(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item as a chat message. Raises ValueError."""
    kind = item.get("type") or "message"
    if kind == "message":
        return {"role": item.get("role"), "content": item.get("content")}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output":
        content = item.get("output")
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
    if kind == "reasoning":
        parts = check_list("input: content", item.get("content"))
        thought = "".join(str(check_mapping("input", part).get("text") or "") for part in parts)
        return {"role": "assistant", "content": "", "reasoning_content": thought}
    expected = "expected message, function_call, function_call_output or reasoning"
    raise ValueError(f"input: {expected}, got an item of the type {kind!r:.80}")


def _append_to_answer(answer: dict[str, Any], more: dict[str, Any]) -> None:
    """Add another item of the same answer to its message."""
    if more["content"]:
        answer["content"] = more["content"]
    if "reasoning_content" in more:
        answer["reasoning_content"] = more["reasoning_content"]
    if "tool_calls" in more:
        answer["tool_calls"] = [*answer.get("tool_calls", ()), *more["tool_calls"]]


def _read_tools(given: Any) -> list[dict[str, Any]]:
    tools: list[dict[str, Any]] = []
    for each in check_list("tools", given):
        tool = check_mapping("tools", each)
        if tool.get("type") != "function":
            kind = tool.get("type")
            raise ValueError(f"tools: expected functions, got a tool of the type {kind!r:.80}")
        names = ("name", "description", "parameters")
        function = {name: tool[name] for name in names if tool.get(name) is not None}
        tools.append(function_tool("tools", function))
    return tools


def _read_tool_choice(given: Any, tools: list[dict[str, Any]], notes: set[str]) -> bool:
    """Return whether the client takes calls. Raises ValueError for an unknown choice."""
    if given in (None, "auto"):
        return True
    if given == "none":
        return False
    is_allowed_list = isinstance(given, dict) and given.get("type") == "allowed_tools"
    if is_allowed_list:
        return True
    names = [tool["function"]["name"] for tool in tools]
    is_function = isinstance(given, dict) and given.get("type") == "function"
    if given == "required" or (is_function and given.get("name") in names):
        notes.add(CHOICE_NOTE)
        return True
    expected = "expected 'auto', 'none', 'required' or a function of tools"
    raise ValueError(f"tool_choice: {expected}, got {given!r:.80}")
