"""Calls with JSON: {"name": "f", "arguments": {"x": 1}} between marks, or a name before JSON."""

import re
from typing import Any

from easyrl.environments.tool_calls.format import (
    Declared,
    Format,
    Marks,
    Reader,
    Region,
    Thinking,
    Written,
    expect,
    no_such_tool,
)
from easyrl.environments.tool_calls.values import (
    Parsed,
    Unreadable,
    read_json,
    read_whole_json,
    shown,
    skip_space,
)

NAME_KEYS = ("name", "tool_name")
ARGUMENTS_KEYS = ("arguments", "parameters")
OTHER_KEYS = ("id", "tool_call_id", "type")


def _call_of(value: Any) -> Written:
    """Return the call that a JSON object describes. Raises Unreadable."""
    if not isinstance(value, dict):
        raise _no_call(value)
    name_keys = [key for key in NAME_KEYS if key in value]
    arguments_keys = [key for key in ARGUMENTS_KEYS if key in value]
    others = value.keys() - {*NAME_KEYS, *ARGUMENTS_KEYS, *OTHER_KEYS}
    if len(name_keys) != 1 or len(arguments_keys) > 1 or others:
        raise _no_call(value)
    name = value[name_keys[0]]
    if not isinstance(name, str):
        raise _no_call(value)
    arguments = _object_of(value[arguments_keys[0]]) if arguments_keys else {}
    call_id = value.get("id")
    return Written(name, arguments, call_id=call_id if isinstance(call_id, str) else "")


def _no_call(value: Any) -> Unreadable:
    return Unreadable(f'expected {{"name": …, "arguments": {{…}}}}, got {shown(value)}')


def _object_of(value: Any) -> dict[str, Any]:
    """Return arguments, which OpenAI's form writes as a string. Raises Unreadable."""
    if isinstance(value, str):
        value = read_whole_json(value)
    if not isinstance(value, dict):
        raise Unreadable(f"expected an object with the arguments by name, got {shown(value)}")
    return value


# -- calls between marks ---------------------------------------------------------------------------


def _read_between(text: str, start: int, begin: str, end: str) -> Region:
    """Read JSON between two marks: a call, calls one after another, or a list of them. JSON has an
    end of its own, so the second mark may be missing at the end of the turn."""
    calls: list[Written] = []
    position = start + len(begin)
    while True:
        value, position = read_json(text, position)
        values = value if isinstance(value, list) else [value]
        calls += [_call_of(each) for each in values]
        position = skip_space(text, position)
        if position == len(text):
            return Region(position, calls)
        if not text.startswith("{", position):
            break
    if end:
        position = expect(text, position, end)
    return Region(position, calls)


def _between(*pairs: tuple[str, str]) -> Format:
    """Make a format of the marks around calls: any of these pairs."""

    def read(text: str, start: int, _: Declared) -> Region:
        for begin, end in pairs:
            if text.startswith(begin, start):
                return _read_between(text, start, begin, end)
        raise AssertionError("a reader is called where a call begins")

    marks = tuple(Marks(re.escape(begin), re.escape(end)) for begin, end in pairs)
    signs = tuple(begin for begin, _ in pairs)
    return Format(read, marks, signs)


HERMES = _between(("<tool_call>", "</tool_call>"))
HUNYUAN = _between(("<tool_calls>", "</tool_calls>"))
JSON_LIST = _between(
    ("<TOOLCALL>", "</TOOLCALL>"),
    ("<|tool_call|>", "<|/tool_call|>"),
    ("<|START_ACTION|>", "<|END_ACTION|>"),
)


# -- turns that are calls --------------------------------------------------------------------------


def _read_llama3(text: str, start: int, _: Declared) -> Region:
    """Read calls with `;` between them, up to the end of the turn."""
    calls: list[Written] = []
    position = skip_space(text, start)
    if text.startswith(PYTHON_TAG, position):
        position += len(PYTHON_TAG)
    while True:
        value, position = read_json(text, position)
        calls.append(_call_of(value))
        position = skip_space(text, position)
        if position == len(text):
            return Region(position, calls)
        position = expect(text, position, ";")


PYTHON_TAG = "<|python_tag|>"
LLAMA3 = Format(
    _read_llama3,
    # A JSON object without a name is an answer.
    (Marks(r'\A\s*(?:<\|python_tag\|>\s*\{|\{(?=(?s:.*)"name"))'),),
    signs=('"parameters": ',),
)


# -- calls whose name is before the JSON -----------------------------------------------------------


def _named(form: str, head: str, tail: str) -> Reader:
    """Make a reader of calls whose name and JSON are apart. `form`: how they look, for messages;
    `head`: regular expression of what is before the JSON, with the groups `name` and perhaps `id`;
    `tail`: of what is behind it."""
    before = re.compile(head)
    behind = re.compile(rf"\s*(?:{tail}|\Z)")

    def read(text: str, start: int, declared: Declared) -> Region:
        match = before.match(text, start)
        if match is None:
            raise Unreadable(f"expected {form}, got {shown(text[start:])}")
        name = match["name"]
        arguments, position = _arguments_of(name, text, match.end(), declared)
        end = behind.match(text, position)
        if end is None:
            raise Unreadable(f"expected the end of the call, got {shown(text[position:])}")
        call_id = match.groupdict().get("id") or ""
        call = Written(name, _object_of(arguments), call_id=call_id)
        return Region(end.end(), [call])

    return read


def _arguments_of(name: str, text: str, start: int, declared: Declared) -> Parsed:
    """Read the JSON of a call. Raises Unreadable. If there is no tool of this name, it says so: a
    model knows tools that take something else than JSON, as gpt-oss's `python`."""
    try:
        return read_json(text, start)
    except Unreadable as error:
        if name not in declared:
            raise Unreadable(no_such_tool(name, declared)) from None
        raise Unreadable(f"the arguments of '{name}': {error}") from None


GPT_OSS = Format(
    _named(
        "to=functions.NAME <|constrain|>json<|message|>{…}",
        r"(?:<\|start\|>assistant)?\s*(?:<\|channel\|>\s*\w+)?\s*to=(?:functions\.)?"
        r"(?P<name>[^\s<]+)\s*(?:<\|channel\|>\s*\w+)?\s*"
        # The model sometimes writes `code` before the same JSON.
        r"(?:<\|constrain\|>)?\s*(?:json|code)?\s*<\|message\|>",
        r"<\|call\|>|<\|end\|>",
    ),
    (
        Marks(
            r"(?:<\|start\|>assistant)?(?: ?<\|channel\|>\w+)? ?\bto=[^\s<]{1,200}(?=[\s<])"
            r"(?=[^<]{0,40}(?:<\|(?:channel|constrain)\|>[^<]{0,40}){0,2}<\|message\|>)",
            r"<\|call\|>|<\|end\|>",
        ),
    ),
    signs=("<|channel|>",),
    thinking=Thinking("<|channel|>analysis<|message|>", "<|end|>"),
    may_think_at_once=False,
)
DEEPSEEK_V3 = Format(
    _named(
        "NAME<｜tool▁sep｜>{…}",
        r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>\s*(?:function<｜tool▁sep｜>)?"
        r"(?P<name>[^\s<{]+)\s*(?:<｜tool▁sep｜>|```json)\s*",
        r"(?:```)?\s*<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?",
    ),
    (Marks(r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>", r"<｜tool▁call▁end｜>"),),
    signs=("<｜tool▁call▁begin｜>",),
)
KIMI_K2 = Format(
    _named(
        "functions.NAME:NUMBER<|tool_call_argument_begin|>{…}",
        r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*"
        r"(?P<id>(?:functions\.)?(?P<name>[^\s<:]+)(?::\d+)?)\s*<\|tool_call_argument_begin\|>",
        r"<\|tool_call_end\|>(?:\s*<\|tool_calls_section_end\|>)?",
    ),
    (
        Marks(
            r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>",
            r"<\|tool_call_end\|>",
        ),
    ),
    signs=("<|tool_call_begin|>",),
    has_ids=True,
)


# -- Mistral's two forms ---------------------------------------------------------------------------

TOOL_CALLS = "[TOOL_CALLS]"
_read_mistral_name = _named(
    "[TOOL_CALLS]NAME[ARGS]{…}",
    r"\[TOOL_CALLS\]\s*(?P<name>[^\[\]{}\s]+)\s*"
    r"(?:\[CALL_ID\](?P<id>\w+)\s*)?(?:\[ARGS\]\s*)?(?=\{)",
    r"(?=\[TOOL_CALLS\])",
)


def _read_mistral(text: str, start: int, declared: Declared) -> Region:
    behind_mark = skip_space(text, start + len(TOOL_CALLS))
    is_json = text.startswith(("[", "{"), behind_mark)
    if not is_json:
        return _read_mistral_name(text, start, declared)
    region = _read_between(text, start, TOOL_CALLS, "")
    is_at_end = region.end >= len(text)
    if not is_at_end and not text.startswith(TOOL_CALLS, region.end):
        rest = shown(text[region.end :])
        raise Unreadable(f"expected the end of the calls, got {rest}")
    return region


MISTRAL = Format(
    _read_mistral,
    (Marks(r"\[TOOL_CALLS\]"),),
    signs=(TOOL_CALLS,),
    thinking=Thinking("[THINK]", "[/THINK]"),
    has_ids=True,
)
