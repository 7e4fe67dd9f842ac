"""OpenAI's chat completions and text completions."""

import time
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

MAX_CHOICES = 64
READ = {
    "max_completion_tokens",
    "max_tokens",
    "messages",
    "n",
    "response_format",
    "stream",
    "stream_options",
    "tool_choice",
    "tools",
}
DONE = "data: [DONE]\n\n"


class ChatCompletions(Protocol):
    """POST /v1/chat/completions."""

    def __init__(self, rules: FieldRules) -> None:
        self._rules = rules

    def read(self, key: str, body: Mapping[str, Any]) -> Request:
        notes = self._rules.check(body, READ)
        form = output_form("response_format", body.get("response_format"))
        if form:
            notes.add(UNCONSTRAINED_NOTE.format(name="response_format"))
        tools = _read_tools(body.get("tools"))
        reads_calls = _read_tool_choice(body.get("tool_choice"), tools, notes)
        check_mapping("stream_options", body.get("stream_options"))
        conversation = read_conversation(
            body.get("messages"),
            reader=self._rules.picture_reader,
        )
        return Request(
            key,
            conversation.messages,
            conversation.pictures,
            tools=tools,
            reads_calls=reads_calls,
            num_choices=_num_choices(body),
            max_tokens=_max_tokens(body),
            output_form=form,
            notes=notes,
        )

    def write(self, request: Request, body: Mapping[str, Any], answer: Answer) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for index, choice in enumerate(answer.choices):
            message: dict[str, Any] = {"role": "assistant", "content": choice.text}
            if choice.calls:
                message["content"] = choice.text or None
                message["tool_calls"] = [call.as_chat() for call in choice.calls]
            content = {"message": message}
            choices.append(_choice(index, content, choice.finish_reason))
        written = _head("chat.completion", body)
        written["choices"] = choices
        written["usage"] = _usage(answer)
        return written

    def stream(self, request: Request, body: Mapping[str, Any], answer: Answer) -> Iterator[str]:
        head = _head("chat.completion.chunk", body)
        for index, choice in enumerate(answer.choices):
            deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
            deltas += [{"content": piece} for piece in pieces(choice.text)]
            deltas += _deltas_of_calls(choice)
            for delta in deltas:
                yield event({**head, "choices": [_choice(index, {"delta": delta}, None)]})
            end = _choice(index, {"delta": {}}, choice.finish_reason)
            yield event({**head, "choices": [end]})
        if _has_usage(body):
            yield event({**head, "choices": [], "usage": _usage(answer)})
        yield DONE


class TextCompletions(Protocol):
    """POST /v1/completions."""

    def __init__(self, rules: FieldRules) -> None:
        self._rules = rules

    def read(self, key: str, body: Mapping[str, Any]) -> Request:
        notes = self._rules.check(body, READ | {"prompt"})
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1:
            (prompt,) = prompt
        if not (prompt and isinstance(prompt, str)):
            raise ValueError(f"prompt: expected a text, got {prompt!r:.80}")
        check_mapping("stream_options", body.get("stream_options"))
        return Request(
            key,
            messages=[],
            prompt=prompt,
            num_choices=_num_choices(body),
            max_tokens=_max_tokens(body),
            notes=notes,
        )

    def write(self, request: Request, body: Mapping[str, Any], answer: Answer) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for index, choice in enumerate(answer.choices):
            choices.append(_choice(index, {"text": choice.text}, choice.finish_reason))
        return {**_head("text_completion", body), "choices": choices, "usage": _usage(answer)}

    def stream(self, request: Request, body: Mapping[str, Any], answer: Answer) -> Iterator[str]:
        head = _head("text_completion", body)
        for index, choice in enumerate(answer.choices):
            for piece in pieces(choice.text):
                yield event({**head, "choices": [_choice(index, {"text": piece}, None)]})
            end = _choice(index, {"text": ""}, choice.finish_reason)
            yield event({**head, "choices": [end]})
        if _has_usage(body):
            yield event({**head, "choices": [], "usage": _usage(answer)})
        yield DONE


def _num_choices(body: Mapping[str, Any]) -> int:
    given = body.get("n")
    if given is None:
        return 1
    check_count("n", given, MAX_CHOICES)
    return int(given)


def _max_tokens(body: Mapping[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        given = body.get(name)
        if given is not None:
            check_count(name, given)
            return int(given)
    return None


def _read_tools(given: Any) -> list[dict[str, Any]]:
    """Return the descriptions of tools as chat templates take them. Raises ValueError."""
    tools: list[dict[str, Any]] = []
    for each in check_list("tools", given):
        tool = check_mapping("tools", each)
        function = check_mapping("tools: function", tool.get("function"))
        tools.append(function_tool("tools", function))
    return tools


def _read_tool_choice(given: Any, tools: list[dict[str, Any]], notes: set[str]) -> bool:
    """Return whether the client takes calls. Raises ValueError for an unknown choice."""
    if given in (None, "auto"):
        return True
    if given == "none":
        return False
    if given == "required":
        notes.add(CHOICE_NOTE)
        return True
    choice = check_mapping("tool_choice", given)
    function = check_mapping("tool_choice: function", choice.get("function"))
    names = [tool["function"]["name"] for tool in tools]
    if choice.get("type") == "function" and function.get("name") in names:
        notes.add(CHOICE_NOTE)
        return True
    if choice.get("type") == "allowed_tools":
        return True
    expected = "expected 'auto', 'none', 'required' or a function of tools"
    raise ValueError(f"tool_choice: {expected}, got {given!r:.80}")


def _head(kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": new_id("chatcmpl"),
        "created": int(time.time()),
        "model": model_of(body),
        "object": kind,
    }


def _choice(index: int, content: Mapping[str, Any], reason: str | None) -> dict[str, Any]:
    return {"index": index, **content, "finish_reason": reason, "logprobs": None}


def _usage(answer: Answer) -> dict[str, int]:
    return {
        "prompt_tokens": answer.num_prompt_tokens,
        "completion_tokens": answer.num_sampled_tokens,
        "total_tokens": answer.num_prompt_tokens + answer.num_sampled_tokens,
    }


def _has_usage(body: Mapping[str, Any]) -> bool:
    options = body.get("stream_options") or {}
    return bool(options.get("include_usage"))


def _deltas_of_calls(choice: Choice) -> list[dict[str, Any]]:
    """Return the parts of a stream that have the calls: first a call's id and name, then its
    arguments in pieces."""
    deltas: list[dict[str, Any]] = []
    for index, call in enumerate(choice.calls):
        written = call.as_chat()
        arguments = written["function"].pop("arguments")
        written["function"]["arguments"] = ""
        deltas.append({"tool_calls": [{"index": index, **written}]})
        for piece in pieces(arguments):
            part = {"index": index, "function": {"arguments": piece}}
            deltas.append({"tool_calls": [part]})
    return deltas
