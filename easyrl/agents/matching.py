"""When a message that a client sends again is the answer that it got.

Libraries change answers without changing what they say: they trim texts, leave out ids of calls,
add default arguments, move or drop what the model thought, write calls as text. Such an answer
keeps its tokens. What a client has really changed is a difference, which has a name.
"""

import ast
import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from easyrl.agents.protocols.base import IssuedCall
from easyrl.environments.tool_calls.format import Thinking

Difference = Literal["text", "thinking", "calls", "not_sampled"]
"""What is different in a message that is not the recorded answer; `not_sampled`: the model has
answered nothing in its place."""
PLACEHOLDERS = ("[blank text]", "(empty)", "(no content)")
"""Texts that clients send for an empty answer."""
FIRST_BRACKET = re.compile(r"[\[{].*", re.DOTALL)
"""A text from its first bracket on, with which a list or an object begins."""
Schemas = Mapping[str, Mapping[str, Any]]
"""Schemas of the arguments of tools, by the tools' names."""


class Thought(NamedTuple):
    """A text, and what the model thought before it."""

    thought: str
    visible: str


class Recorded(NamedTuple):
    """An answer as it was sent."""

    text: str  # with what the model thought, without the calls
    sampled: str  # all that was sampled, also a stop string and the calls
    calls: Sequence[IssuedCall]
    schemas: Schemas = MappingProxyType({})  # of the tools that it was offered


class Likeness(IntEnum):
    """How sure it is that a message is a recorded answer: the larger the surer."""

    EXTENDED = 1  # it has more text behind it
    SIMILAR = 2  # it says the same
    IDS = 3  # it has the ids of its calls
    EXACT = 4


class Resent(NamedTuple):
    """What a message says of a recorded answer."""

    difference: Difference | None  # None: it is the answer
    likeness: Likeness = Likeness.SIMILAR
    added: str = ""  # text that the client has written behind the answer


def split_thought(text: str, marks: Thinking) -> Thought:
    """Split a text into what is between the marks of a thought and the rest. A thought may have
    begun in the prompt, and its end may have been cut off."""
    begin, end = marks
    before, has_begin, behind = text.partition(begin)
    if has_begin and before.strip():  # in the middle of a text it may be a mention
        return Thought("", text)
    inner = behind if has_begin else text
    thought, has_end, visible = inner.partition(end)
    if has_end:
        return Thought(thought.strip(), visible.lstrip())
    if has_begin:
        return Thought(inner.strip(), "")
    return Thought("", text)


def compare(message: Mapping[str, Any], answer: Recorded, marks: Thinking) -> Resent:
    """Compare an assistant's message with a recorded answer."""
    content = str(message.get("content") or "")
    sent_calls = _calls_of(message)
    if content == answer.text and sent_calls == list(answer.calls):
        return Resent(None, Likeness.EXACT)
    if content.strip() in PLACEHOLDERS:
        content = ""
    own = split_thought(answer.text, marks)
    sent = split_thought(content, marks)
    reasoning = str(message.get("reasoning_content") or message.get("reasoning") or "")
    if reasoning and _normal(content) == _normal(own.visible):
        sent = Thought(reasoning, content)  # a second thought is a part of the visible text
    if answer.calls and not sent_calls:
        return _compare_calls_as_text(sent.visible, own.visible, answer)
    if not _have_same_calls(sent_calls, answer.calls, answer.schemas):
        return Resent("calls")
    if sent_calls and _carry_ids(sent_calls, answer.calls):
        return Resent(None, Likeness.IDS)
    if sent_calls and not sent.visible.strip():  # the text beside calls was left out
        return Resent(None)
    thought = reasoning or sent.thought
    return _compare_texts(content, Thought(thought, sent.visible), answer, marks)


def _compare_texts(content: str, sent: Thought, answer: Recorded, marks: Thinking) -> Resent:
    """Compare the text of a message, and what it says of the thoughts."""
    if _normal(content) == _normal(answer.text):
        return Resent(None)
    own = split_thought(answer.text, marks)
    if _normal(sent.thought) not in _normal(own.thought):
        return Resent("thinking")
    if _normal(sent.visible) == _normal(own.visible):
        return Resent(None)
    return _compare_longer(sent.visible, own.visible, answer.sampled)


def _normal(text: str) -> str:
    """Return a text whose runs of white space are single spaces."""
    return " ".join(text.split())


def _compare_longer(sent: str, visible: str, sampled: str) -> Resent:
    """Compare a text that may only have more behind it. The client may have added the stop string,
    which was sampled but not sent."""
    trimmed = visible.strip()
    text = sent.strip()
    if not trimmed or not text.startswith(trimmed):
        return Resent("text")
    added = text[len(trimmed) :]
    if sampled.rstrip().endswith(text):
        return Resent(None)
    return Resent(None, Likeness.EXTENDED, added)


def _compare_calls_as_text(sent: str, visible: str, answer: Recorded) -> Resent:
    """Compare a message in which calls are a list at the end of the text, as JSON or in Python."""
    trimmed = visible.strip()
    text = sent.strip()
    if not text.startswith(trimmed):
        return Resent("calls")
    written = FIRST_BRACKET.search(text[len(trimmed) :])
    written_calls = [] if written is None else _written_calls(written.group())
    calls = _calls_of({"tool_calls": written_calls})
    if not _have_same_calls(calls, answer.calls, answer.schemas):
        return Resent("calls")
    if _carry_ids(calls, answer.calls):
        return Resent(None, Likeness.IDS)
    return Resent(None, Likeness.SIMILAR)


def _written_calls(text: str) -> list[dict[str, Any]]:
    """Return calls that are written as JSON or as values of Python, [] for other text."""
    written: Any = None
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            written = read(text)
            break
    calls: list[dict[str, Any]] = []
    for each in written if isinstance(written, list) else [written]:
        if _is_call(each):
            calls.append(each if "function" in each else {"function": each})
    return calls


def _is_call(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    function = value.get("function", value)
    return isinstance(function, dict) and isinstance(function.get("name"), str)


# -- calls -----------------------------------------------------------------------------------------


def _calls_of(message: Mapping[str, Any]) -> list[IssuedCall]:
    calls: list[IssuedCall] = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError, RecursionError):  # it is no JSON
                arguments = json.loads(arguments or "{}")
        calls.append(IssuedCall(str(call.get("id") or ""), function["name"], arguments))
    return calls


def _carry_ids(sent: Sequence[IssuedCall], issued: Sequence[IssuedCall]) -> bool:
    """Whether each call has the id of an issued one. Some clients write more around it."""
    ids = [call.call_id for call in issued]
    return all(any(each in call.call_id for each in ids) for call in sent)


def _have_same_calls(
    sent: Sequence[IssuedCall], issued: Sequence[IssuedCall], schemas: Schemas
) -> bool:
    """Whether calls are the same ones, in any order."""
    rest = list(issued)
    for call in sent:
        schema = schemas.get(call.name, {})
        for index, each in enumerate(rest):
            has_name = call.name == each.name
            if has_name and _have_same_arguments(call.arguments, each.arguments, schema):
                del rest[index]
                break
        else:
            return False
    return not rest


def _have_same_arguments(sent: Any, issued: Any, schema: Mapping[str, Any]) -> bool:
    """Whether arguments are the same but for the defaults that a client has added."""
    if not (isinstance(sent, Mapping) and isinstance(issued, Mapping)):
        return _are_equal(sent, issued)
    for name, value in issued.items():
        if name in sent:
            if not _are_equal(sent[name], value):
                return False
        elif value is not None:  # None may be left out
            return False
    properties = schema.get("properties") or {}
    for name in sent.keys() - issued.keys():
        value = sent[name]
        if value is not None and not _is_default(value, properties.get(name)):
            return False
    return True


def _is_default(value: Any, schema: Any) -> bool:
    has_default = isinstance(schema, Mapping) and "default" in schema
    return has_default and _are_equal(value, schema["default"])


def _are_equal(one: Any, other: Any) -> bool:
    """Compare values of JSON; 2 and 2.0 are equal, 1 and true are not."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        has_same_names = one.keys() == other.keys()
        return has_same_names and all(_are_equal(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        has_same_length = len(one) == len(other)
        return has_same_length and all(map(_are_equal, one, other))
    return bool(one == other)
