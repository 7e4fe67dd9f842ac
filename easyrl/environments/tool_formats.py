"""How chat templates write tool calls.

Calls with JSON:

    hermes       <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>
    llama3       {"name": "f", "parameters": {"x": 1}}, the whole turn
    hunyuan      <tool_calls>[{"name": "f", "arguments": {"x": 1}}]</tool_calls>
    json_list    the same between other marks: <TOOLCALL>, <|tool_call|>, <|START_ACTION|>
    mistral      [TOOL_CALLS]f[ARGS]{"x": 1}, or [TOOL_CALLS][{"name": "f", …}]
    kimi_k2      <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": 1}<|tool_call_…
    deepseek_v3  <｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>
    gpt_oss      <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>

Calls with tags; a string is written between them as it is:

    qwen3_coder  <tool_call><function=f><parameter=x>1</parameter></function></tool_call>
    seed_oss     the same between <seed:tool_call> and </seed:tool_call>
    minimax_m2   <minimax:tool_call><invoke name="f"><parameter name="x">1</parameter></invoke>…
    glm          <tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>
    hy3          <tool_call>f<tool_sep><arg_key>x</arg_key><arg_value>1</arg_value></tool_call>

Calls with literals:

    gemma4       <|tool_call>call:f{x:1,s:<|"|>text<|"|>}<tool_call|>
    lfm2         <|tool_call_start|>[f(x=1, s='text')]<|tool_call_end|>

A reader returns what is written, or raises `Unreadable`. It accounts for every character between
the beginning and the end of a call. Text that can be read in two ways is not read.
"""

import ast
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from easyrl.environments.tool_arguments import (
    Unreadable,
    parse_python,
    python_value,
    read_json,
    read_whole_json,
    shown,
    skip_space,
)

Declared = Mapping[str, frozenset[str] | None]
"""Names of the arguments by tool; None: a tool that takes others, too."""
MAX_ENDS = 16  # closing marks that are tried as the end of a call


class Written(NamedTuple):
    """A call as it is written. `are_texts`: its arguments have no types yet."""

    name: str
    arguments: dict[str, Any]
    are_texts: bool = False
    call_id: str = ""


class Region(NamedTuple):
    """Calls that are written together, and where their text ends."""

    end: int
    calls: list[Written]


Reader = Callable[[str, int, Declared], Region]  # text, where a call begins, tools


@dataclass(frozen=True)
class Format:
    """`marks`: regular expressions of the beginning of calls and of their end, "" for the end of
    the turn. `signs`: words of which a template that only describes such calls has one."""

    read: Reader
    marks: tuple[tuple[str, str], ...]
    signs: tuple[str, ...] = ()
    thinking: tuple[str, str] = ("<think>", "</think>")
    is_opened_by_prompt: bool = True  # thinking may begin in the prompt
    has_ids: bool = False  # the model writes ids of calls, which their results repeat
    has_text_last: bool = False  # templates write the text of an answer behind its calls

    def opening(self) -> re.Pattern[str]:
        return re.compile("|".join(begin for begin, _ in self.marks))

    def end_of_unreadable(self, text: str, start: int) -> int:
        """Return where a call ends that cannot be read. Where beginnings and ends do not alternate,
        some may belong to a value: then all that follows belongs to the call."""
        for begin, end in self.marks:
            if not end or re.compile(begin).match(text, start) is None:
                continue
            if _last_repeated_mark(begin, end, text) >= start:
                return len(text)
            first = re.compile(end).search(text, start)
            return len(text) if first is None else first.end()
        return len(text)


@functools.lru_cache(maxsize=4)  # a turn may have thousands of calls that cannot be read
def _last_repeated_mark(begin: str, end: str, text: str) -> int:
    """Return where the last mark is that another one of its kind follows, -1 for none."""
    found, previous = -1, None
    for mark in re.compile(f"(?P<begin>{begin})|{end}").finditer(text):
        is_begin = mark["begin"] is not None
        if previous is not None and previous[1] == is_begin:
            found = previous[0]
        previous = (mark.start(), is_begin)
    return found


def _expect(text: str, start: int, word: str) -> int:
    """Return where a word ends that follows after spaces. Raises Unreadable."""
    begin = skip_space(text, start)
    if not text.startswith(word, begin):
        got = shown(text[begin : begin + 40]) if begin < len(text) else "the end of the turn"
        raise Unreadable(f"expected {shown(word)}, got {got}")
    return begin + len(word)


# -- calls with JSON -------------------------------------------------------------------------------

NAME_KEYS = ("name", "tool_name")
ARGUMENTS_KEYS = ("arguments", "parameters")
OTHER_KEYS = ("id", "tool_call_id", "type")
ONE_CALL = 'expected {"name": …, "arguments": {…}}'


def _call_of(value: Any) -> Written:
    """Return the call that a JSON object describes. Raises Unreadable."""
    if not isinstance(value, dict):
        raise Unreadable(f"{ONE_CALL}, got {shown(value)}")
    names = [key for key in NAME_KEYS if key in value]
    given = [key for key in ARGUMENTS_KEYS if key in value]
    others = value.keys() - {*NAME_KEYS, *ARGUMENTS_KEYS, *OTHER_KEYS}
    if len(names) != 1 or len(given) > 1 or others or not isinstance(value[names[0]], str):
        raise Unreadable(f"{ONE_CALL}, got {shown(value)}")
    call_id = value.get("id")
    arguments = _object_of(value[given[0]]) if given else {}
    return Written(value[names[0]], arguments, call_id=call_id if isinstance(call_id, str) else "")


def _object_of(value: Any) -> dict[str, Any]:
    """Return arguments, which OpenAI's form writes as a string. Raises Unreadable."""
    if isinstance(value, str):
        value = read_whole_json(value)
    if not isinstance(value, dict):
        raise Unreadable(f"expected an object with the arguments by name, got {shown(value)}")
    return value


def _between(begin: str, end: str) -> Callable[[str, int], Region]:
    """Read JSON between two marks: a call, calls one after another, or a list of them. JSON has an
    end of its own, so the second mark may be missing at the end of the turn."""

    def read(text: str, start: int) -> Region:
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
                return Region(_expect(text, position, end) if end else position, calls)

    return read


def _json_between(*marks: tuple[str, str], signs: tuple[str, ...] = ()) -> Format:
    readers = {begin: _between(begin, end) for begin, end in marks}

    def read(text: str, start: int, _: Declared) -> Region:
        begin = next(each for each in readers if text.startswith(each, start))
        return readers[begin](text, start)

    escaped = tuple((re.escape(begin), re.escape(end)) for begin, end in marks)
    return Format(read, escaped, signs)


def _read_llama3(text: str, start: int, _: Declared) -> Region:
    body = text[start:].strip().removeprefix("<|python_tag|>")
    return Region(len(text), [_call_of(read_whole_json(body))])


def _named(head: str, tail: str) -> Reader:
    """Read a call whose name and JSON are apart: regular expressions of what is before the JSON,
    with the groups `name` and `id`, and of what is behind it."""
    before, behind = re.compile(head), re.compile(rf"\s*(?:{tail}|\Z)")

    def read(text: str, start: int, _: Declared) -> Region:
        match = before.match(text, start)
        if match is None:
            raise Unreadable(f"expected a name and its arguments, got {shown(text[start:])}")
        arguments, position = read_json(text, match.end())
        end = behind.match(text, position)
        if end is None:
            raise Unreadable(f"expected the end of the call, got {shown(text[position:])}")
        call_id = match.groupdict().get("id") or ""
        call = Written(match["name"], _object_of(arguments), call_id=call_id)
        return Region(end.end(), [call])

    return read


MISTRAL = "[TOOL_CALLS]"
_mistral_list = _between(MISTRAL, "")
_mistral_named = _named(
    r"\[TOOL_CALLS\]\s*(?P<name>[^\[\]{}\s]+)\s*(?:\[CALL_ID\](?P<id>\w+)\s*)?(?:\[ARGS\]\s*)?(?=\{)",
    r"(?=\[TOOL_CALLS\])",
)


def _read_mistral(text: str, start: int, declared: Declared) -> Region:
    is_list = text.startswith(("[", "{"), skip_space(text, start + len(MISTRAL)))
    if not is_list:
        return _mistral_named(text, start, declared)
    region = _mistral_list(text, start)
    if region.end < len(text) and not text.startswith(MISTRAL, region.end):
        raise Unreadable(f"expected the end of the calls, got {shown(text[region.end :])}")
    return region


# -- calls with tags -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tags:
    """Tags of a format, as regular expressions, with the groups `name` (of the function) and `key`.
    `is_block`: the template writes each value on lines of its own."""

    function: str
    end_function: str
    parameter: str
    end_parameter: str
    begin: str = ""  # around the functions, "" where there is nothing
    end: str = ""
    is_block: bool = False
    mark: str = ""  # where a function begins, if that is shorter than `function`


class _Value(NamedTuple):
    text: str
    end: int  # of its closing tag, or where what ends it instead begins
    is_closed: bool = True


class _Function(NamedTuple):
    arguments: dict[str, str]
    end: int
    is_closed: bool  # no closing tag of a value is missing


class _TagReader:
    def __init__(self, tags: Tags) -> None:
        self._tags = tags
        self._function = re.compile(rf"\s*{tags.function}")
        self._parameter = re.compile(rf"\s*{tags.parameter}")
        self._end_parameter = re.compile(tags.end_parameter)
        self._end_function = re.compile(rf"\s*{tags.end_function}")
        self._end = re.compile(rf"\s*{tags.end}")
        self._begin = re.compile(rf"\s*{tags.begin}")
        self._any = re.compile("|".join(_without_groups(each) for each in self._all(tags)))
        self._line = re.compile(  # a tag at the beginning of a line, and what is behind it there
            rf"^[ \t]*(?P<tag>{self._any.pattern})(?P<rest>[^\n]*)", re.MULTILINE
        )

    @staticmethod
    def _all(tags: Tags) -> list[str]:
        words = (tags.function, tags.end_function, tags.parameter, tags.end_parameter)
        return [each for each in (*words, tags.begin, tags.end) if each]

    def __call__(self, text: str, start: int, declared: Declared) -> Region:
        tags, position, calls = self._tags, start, list[Written]()
        begin = self._begin.match(text, start) if tags.begin else None
        if begin is not None:
            position = begin.end()
        is_closed = True
        while (head := self._function.match(text, position)) is not None:
            function = self._read_function(text, head, declared, begin is not None)
            calls.append(Written(head["name"], function.arguments, are_texts=True))
            position = function.end
            is_closed = is_closed and function.is_closed
            if not tags.end:
                break
        if not calls:
            raise Unreadable(f"expected a function, got {shown(text[position:].lstrip())}")
        end = self._end.match(text, position) if tags.end else None
        if end is not None:
            position = end.end()
        elif begin is not None and text[position:].strip():
            raise Unreadable(f"expected the end of the calls, got {shown(text[position:].strip())}")
        elif not is_closed:
            raise Unreadable("expected the closing tag of every argument")
        self._check_rest(text, position)
        return Region(position, calls)

    def _check_rest(self, text: str, position: int) -> None:
        """Raise Unreadable if the next tag behind the calls is not the beginning of another one:
        then what was taken for their end may belong to a value."""
        tag = self._any.search(text, position)
        if tag is None:
            return
        begins = [self._begin] if self._tags.begin else []
        if not any(each.match(text, tag.start()) for each in (*begins, self._function)):
            raise Unreadable(f"expected no {shown(tag[0])} behind the end of a call")

    def _read_function(
        self, text: str, head: re.Match[str], declared: Declared, is_inside: bool
    ) -> _Function:
        """`is_inside`: of the marks around functions."""
        position, arguments = head.end(), dict[str, str]()
        is_closed = True
        while (parameter := self._parameter.match(text, position)) is not None:
            key = parameter["key"]
            if key in arguments:
                raise Unreadable(f"expected the argument '{key}' once, got it twice")
            names = declared.get(head["name"])
            open_names = None if names is None else names - arguments.keys() - {key}
            value = self._read_value(text, parameter.end(), key, open_names)
            arguments[key] = value.text
            position = value.end
            is_closed = is_closed and value.is_closed
        end = self._end_function.match(text, position)
        if end is not None:
            return _Function(arguments, end.end(), is_closed)
        if is_inside and self._tags.end and self._end.match(text, position):
            # The end of all calls ends the function, too.
            return _Function(arguments, position, is_closed)
        got = shown(text[position:].strip()) if text[position:].strip() else "the end of the turn"
        raise Unreadable(
            f"expected another argument or the end of '{head['name']}', got {got}; a value ends at "
            "the first closing tag on a line of its own, or that a tag follows"
        )

    def _read_value(
        self, text: str, start: int, key: str, open_names: frozenset[str] | None
    ) -> _Value:
        if not self._tags.is_block:
            return self._read_inline(text, start, key)
        if text.startswith("\n", start):
            return self._read_block(text, start + 1, key, open_names)
        value = self._read_inline(text, start, key)
        return value._replace(text=_without_last_newline(value.text))

    def _read_inline(self, text: str, start: int, key: str) -> _Value:
        """Read a value up to the first closing tag that another argument or the end follows."""
        for close in self._end_parameter.finditer(text, start):
            is_end = any(
                each.match(text, close.end()) for each in (self._parameter, self._end_function)
            ) or bool(self._tags.end and self._end.match(text, close.end()))
            if is_end:
                value = text[start : close.start()]
                opened = re.search(_without_groups(self._tags.parameter), value)
                if opened is not None:
                    raise Unreadable(
                        f"argument '{key}': expected its closing tag before {shown(opened[0])}"
                    )
                return _Value(value, close.end())
        raise Unreadable(f"argument '{key}': expected its closing tag, got {shown(text[start:])}")

    def _read_block(
        self, text: str, start: int, key: str, open_names: frozenset[str] | None
    ) -> _Value:
        """Read a value on lines of its own. It ends at a closing tag that is alone on its line. One
        that is missing is replaced by the next argument, or by the end of the function, if these
        are alone on their lines. `open_names`: arguments that may follow; None: any."""
        for line in self._line.finditer(text, start):
            tag, rest = line["tag"], line["rest"]
            is_alone = not rest.strip() or self._any.match(rest.strip()) is not None
            if self._end_parameter.fullmatch(tag):
                if is_alone:
                    return _Value(
                        _without_last_newline(text[start : line.start()]), line.end("tag")
                    )
                continue  # text of the value
            parameter = self._parameter.fullmatch(tag)
            if parameter is None and not is_alone:
                continue
            is_end = self._end_function.fullmatch(tag) is not None
            if parameter is not None:
                is_closed = self._end_parameter.search(rest) is not None
                is_known = open_names is None or parameter["key"] in open_names
                if is_closed and not is_known:
                    continue  # a whole argument of another name, inside the value
                is_end = is_known and not rest.strip()
            written = _without_last_newline(text[start : line.start()])
            value = self._without_closing_tag(written)
            if is_end and value.strip():
                return _Value(value, line.start(), is_closed=value != written)
            raise Unreadable(
                f"argument '{key}': expected its closing tag on a line of its own before "
                f"{shown(tag)}, or a value without such a line"
            )
        return self._read_inline(text, start, key)

    def _without_closing_tag(self, value: str) -> str:
        """Remove a closing tag at the end of a value, where it is not on a line of its own."""
        closes = list(self._end_parameter.finditer(value))
        if closes and not value[closes[-1].end() :].strip():
            return value[: closes[-1].start()]
        return value


def _without_groups(pattern: str) -> str:
    return re.sub(r"\(\?P<\w+>", "(?:", pattern)


def _without_last_newline(text: str) -> str:
    return text[:-1] if text.endswith("\n") else text


def _tagged(tags: Tags, *signs: str, thinking: tuple[str, str] = ("<think>", "</think>")) -> Format:
    marks = [(tags.begin, tags.end)] if tags.begin else []
    marks.append((tags.mark or tags.function, tags.end_function))
    found = tuple((_without_groups(begin), end) for begin, end in marks)
    return Format(_TagReader(tags), found, signs, thinking)


QWEN3_CODER = Tags(
    function=r"<function=(?P<name>[^>\s]+)>",
    end_function=r"</function>",
    parameter=r"<parameter=(?P<key>[^>\s]+)>",
    end_parameter=r"</parameter>",
    begin=r"<tool_call>",
    end=r"</tool_call>",
    is_block=True,
)
SEED_OSS = Tags(
    function=QWEN3_CODER.function,
    end_function=QWEN3_CODER.end_function,
    parameter=QWEN3_CODER.parameter,
    end_parameter=QWEN3_CODER.end_parameter,
    begin=r"<seed:tool_call>",
    end=r"</seed:tool_call>",
)
MINIMAX_M2 = Tags(
    function=r'<invoke name="(?P<name>[^"<>]+)">',
    end_function=r"</invoke>",
    parameter=r'<parameter name="(?P<key>[^"<>]+)">',
    end_parameter=r"</parameter>",
    begin=r"<minimax:tool_call>",
    end=r"</minimax:tool_call>",
)
ARG_KEY = r"(?P<key>[^<>\s](?:[^<>]*[^<>\s])?)"  # without spaces around it, in linear time
GLM = Tags(
    function=r"<tool_call>\s*(?P<name>[^\s<>{}\[\]]+)",
    end_function=r"</tool_call>",
    parameter=rf"<arg_key>\s*{ARG_KEY}\s*</arg_key>\s*<arg_value>",
    end_parameter=r"</arg_value>",
    mark=r"<tool_call>",
)
HY3 = Tags(  # some checkpoints have a suffix in each tag: <tool_call:opensource>
    function=r"<tool_call(?::\w+)?>\s*(?P<name>[^\s<>{}\[\]]+)\s*<tool_sep(?::\w+)?>",
    end_function=r"</tool_call(?::\w+)?>",
    parameter=rf"<arg_key(?::\w+)?>\s*{ARG_KEY}\s*</arg_key(?::\w+)?>\s*<arg_value(?::\w+)?>",
    end_parameter=r"</arg_value(?::\w+)?>",
    begin=r"<tool_calls(?::\w+)?>",
    end=r"</tool_calls(?::\w+)?>",
    mark=r"<tool_call(?::\w+)?>",
)


# -- calls with literals ---------------------------------------------------------------------------

GEMMA4_HEAD = re.compile(r"<\|tool_call>\s*call:(?P<name>[^\s{}<>]+)\s*(?=\{)")
GEMMA4_QUOTE = '<|"|>'
GEMMA4_KEY = re.compile(r"\s*([^\s:,{}\[\]<>|\"']+)\s*:")
GEMMA4_WORD = re.compile(r"[^\s,{}\[\]<>]+")
GEMMA4_WORDS = {
    "true": True,
    "false": False,
    "null": None,
    "None": None,
    "True": True,
    "False": False,
}


class _Gemma4:
    """A reader of values: JSON with plain keys, and strings between quotes of their own."""

    def __init__(self, text: str, position: int) -> None:
        self.text, self.position = text, position

    def value(self) -> Any:
        self.position = skip_space(self.text, self.position)
        if self._skips(GEMMA4_QUOTE):
            return self._string()
        if self._skips("{"):
            return self._object()
        if self._skips("["):
            return self._list()
        word = GEMMA4_WORD.match(self.text, self.position)
        if word is None:
            raise self._unexpected("a value")
        if word[0] in GEMMA4_WORDS:
            value = GEMMA4_WORDS[word[0]]
        else:
            value = read_whole_json(word[0])  # a number
            if isinstance(value, str):
                raise self._unexpected(f"a string between {GEMMA4_QUOTE}")
        self.position = word.end()
        return value

    def _skips(self, mark: str) -> bool:
        is_there = self.text.startswith(mark, self.position)
        if is_there:
            self.position += len(mark)
        return is_there

    def _string(self) -> str:
        end = self.text.find(GEMMA4_QUOTE, self.position)
        if end < 0:
            raise self._unexpected(f"the closing {GEMMA4_QUOTE}")
        value = self.text[self.position : end]
        self.position = end + len(GEMMA4_QUOTE)
        return value

    def _key(self) -> str:
        self.position = skip_space(self.text, self.position)
        if self._skips(GEMMA4_QUOTE):
            key = self._string()
            self.position = _expect(self.text, self.position, ":")
            return key
        match = GEMMA4_KEY.match(self.text, self.position)
        if match is None:
            raise self._unexpected("a name and ':'")
        self.position = match.end()
        return match[1]

    def _object(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not self._ends("}", bool(found)):
            key = self._key()
            if key in found:
                raise Unreadable(f"expected every name once, got '{key}' more than once")
            found[key] = self.value()
        return found

    def _list(self) -> list[Any]:
        found: list[Any] = []
        while not self._ends("]", bool(found)):
            found.append(self.value())
        return found

    def _ends(self, close: str, has_items: bool) -> bool:
        """Skip the closing bracket, or the comma before another item."""
        self.position = skip_space(self.text, self.position)
        if self._skips(close):
            return True
        if has_items:
            self.position = _expect(self.text, self.position, ",")
        return False

    def _unexpected(self, expected: str) -> Unreadable:
        return Unreadable(f"expected {expected}, got {shown(self.text[self.position :])}")


def _read_gemma4(text: str, start: int, _: Declared) -> Region:
    head = GEMMA4_HEAD.match(text, start)
    if head is None:
        raise Unreadable(f"expected call:NAME{{…}}, got {shown(text[start:])}")
    reader = _Gemma4(text, head.end())
    try:
        arguments = reader.value()
    except RecursionError:
        raise Unreadable("expected arguments, got values nested too deeply") from None
    end = skip_space(text, reader.position)
    if end < len(text):
        end = _expect(text, end, "<tool_call|>")
    return Region(end, [Written(head["name"], arguments)])


LFM2 = ("<|tool_call_start|>", "<|tool_call_end|>")


def _read_lfm2(text: str, start: int, _: Declared) -> Region:
    """Read a list of Python calls. A string may contain the closing mark: the call ends at the
    first one before which the text is an expression."""
    begin, mark = start + len(LFM2[0]), LFM2[1]
    error = Unreadable("expected calls")
    position = begin
    for _try in range(MAX_ENDS):
        end = text.find(mark, position)
        body = text[begin:end] if end >= 0 else text[begin:]
        try:
            node = _parse_lfm2(body)
        except Unreadable as reason:
            error = reason
        else:
            return Region(end + len(mark) if end >= 0 else len(text), _python_calls(node))
        if end < 0:
            break
        position = end + len(mark)
    raise error


NO_ESCAPE = re.compile(r"\\\n|\b[rR]['\"]")  # behind it, `\n` would be no line break


def _parse_lfm2(body: str) -> ast.expr:
    """Parse Python in which a string in single quotes may have several lines, as LFM2.5's template
    writes it. Raises Unreadable."""
    try:
        return parse_python(body)
    except Unreadable:
        if "\n" not in body.strip() or NO_ESCAPE.search(body):
            raise
    # A line break outside of strings becomes an error here, so no other text is changed.
    return parse_python(body.strip().replace("\n", "\\n"))


def _python_calls(node: ast.expr) -> list[Written]:
    nodes = node.elts if isinstance(node, ast.List) else [node]
    calls = []
    for each in nodes:
        if not isinstance(each, ast.Call):
            raise Unreadable("expected [NAME(argument=value, …)]")
        names = [keyword.arg for keyword in each.keywords]
        given = [name for name in names if name is not None]
        if each.args or len(given) < len(names):
            raise Unreadable("expected every argument as name=value")
        if len({*given}) < len(given):
            raise Unreadable("expected every argument once")
        values = [python_value(keyword.value) for keyword in each.keywords]
        calls.append(Written(_dotted(each.func), dict(zip(given, values, strict=True))))
    return calls


def _dotted(node: ast.expr) -> str:
    """Return the name of a function, which may have dots."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    raise Unreadable("expected [NAME(argument=value, …)]")


# -- the formats -----------------------------------------------------------------------------------

_gpt_oss_call = _named(
    r"(?:<\|start\|>assistant)?\s*(?:<\|channel\|>\s*\w+)?\s*to=(?:functions\.)?(?P<name>[^\s<]+)"
    r"\s*(?:<\|channel\|>\s*\w+)?\s*(?:<\|constrain\|>)?\s*(?:json)?\s*<\|message\|>",
    r"<\|call\|>|<\|end\|>",
)
_deepseek_v3_call = _named(
    r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>\s*(?:function<｜tool▁sep｜>)?"
    r"(?P<name>[^\s<{]+)\s*(?:<｜tool▁sep｜>|```json)\s*",
    r"(?:```)?\s*<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?",
)
_kimi_k2_call = _named(
    r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*"
    r"(?P<id>(?:functions\.)?(?P<name>[^\s<:]+)(?::\d+)?)\s*<\|tool_call_argument_begin\|>",
    r"<\|tool_call_end\|>(?:\s*<\|tool_calls_section_end\|>)?",
)

FORMATS = {
    "seed_oss": _tagged(SEED_OSS, "<seed:tool_call>", thinking=("<seed:think>", "</seed:think>")),
    "qwen3_coder": _tagged(QWEN3_CODER, "<function="),
    "glm": _tagged(GLM, "<arg_key>"),
    "minimax_m2": _tagged(MINIMAX_M2, "<minimax:tool_call>"),
    "hy3": _tagged(HY3, "<tool_sep>"),
    "gemma4": Format(
        _read_gemma4,
        ((r"<\|tool_call>", r"<tool_call\|>"),),
        ("<|tool_call>",),
        thinking=("<|channel>thought", "<channel|>"),
        has_text_last=True,
    ),
    "lfm2": Format(_read_lfm2, (tuple(map(re.escape, LFM2)),), LFM2[:1]),  # type: ignore[arg-type]
    "gpt_oss": Format(
        _gpt_oss_call,
        (
            (
                r"(?:<\|start\|>assistant)?(?: ?<\|channel\|>\w+)? ?\bto=[^\s<]{1,200}(?=[\s<])"
                r"(?=[^<]{0,40}(?:<\|(?:channel|constrain)\|>[^<]{0,40}){0,2}<\|message\|>)",
                r"<\|call\|>|<\|end\|>",
            ),
        ),
        ("<|channel|>",),
        thinking=("<|channel|>analysis<|message|>", "<|end|>"),
        is_opened_by_prompt=False,
    ),
    "kimi_k2": Format(
        _kimi_k2_call,
        (
            (
                r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>",
                r"<\|tool_call_end\|>",
            ),
        ),
        ("<|tool_call_begin|>",),
        has_ids=True,
    ),
    "deepseek_v3": Format(
        _deepseek_v3_call,
        ((r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>", r"<｜tool▁call▁end｜>"),),
        ("<｜tool▁call▁begin｜>",),
    ),
    "mistral": Format(
        _read_mistral,
        ((r"\[TOOL_CALLS\]", ""),),
        (MISTRAL,),
        thinking=("[THINK]", "[/THINK]"),
        has_ids=True,
    ),
    "hunyuan": _json_between(("<tool_calls>", "</tool_calls>"), signs=("<tool_calls>",)),
    "json_list": _json_between(
        ("<TOOLCALL>", "</TOOLCALL>"),
        ("<|tool_call|>", "<|/tool_call|>"),
        ("<|START_ACTION|>", "<|END_ACTION|>"),
        signs=("<TOOLCALL>", "<|tool_call|>", "<|START_ACTION|>"),
    ),
    "hermes": _json_between(("<tool_call>", "</tool_call>"), signs=("<tool_call>",)),
    "llama3": Format(
        # A JSON object without a name is an answer.
        _read_llama3,
        ((r'\A\s*(?:<\|python_tag\|>\s*\{|\{(?=(?s:.*)"name"))', ""),),
        ('"parameters": ',),
    ),
}
"""By name. A template has the first format that reads its own call: later ones are more general."""
