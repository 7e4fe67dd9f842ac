"""Calls with tags: <function=f><parameter=x>1</parameter></function>.

A value is written between its tags as it is, so it may contain the tags of the format. It ends at
the first closing tag that shows by what is behind it, or by its place, that it is one.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from easyrl.environments.tool_calls.format import (
    USUAL_THINKING,
    Declared,
    Format,
    Marks,
    Region,
    Thinking,
    Written,
)
from easyrl.environments.tool_calls.values import Unreadable, shown


@dataclass(frozen=True)
class Tags:
    """Tags of a format, as regular expressions."""

    function: str  # with the group `name`
    end_function: str
    parameter: str  # with the group `key`
    end_parameter: str
    begin: str = ""  # around the functions; "": there is nothing
    end: str = ""
    is_block: bool = False  # the template writes each value on lines of its own
    mark: str = ""  # where a function begins, if that is shorter than `function`

    def all(self) -> list[str]:
        """Return all tags that the format has."""
        own = (self.function, self.end_function, self.parameter, self.end_parameter)
        around = (self.begin, self.end)
        return [*own, *(tag for tag in around if tag)]


class _Value(NamedTuple):
    text: str
    end: int  # of its closing tag, or where what ends it instead begins
    is_closed: bool = True  # by its own closing tag


class _Function(NamedTuple):
    arguments: dict[str, str]
    end: int
    is_closed: bool  # each of its values is


class TagReader:
    """The reader of a format. Its patterns of tags skip the space before them."""

    def __init__(self, tags: Tags) -> None:
        self._tags = tags
        self._begin = re.compile(rf"\s*{tags.begin}")
        self._end = re.compile(rf"\s*{tags.end}")
        self._function = re.compile(rf"\s*{tags.function}")
        self._end_function = re.compile(rf"\s*{tags.end_function}")
        self._parameter = re.compile(rf"\s*{tags.parameter}")
        self._end_parameter = re.compile(tags.end_parameter)
        any_tag = "|".join(_without_groups(tag) for tag in tags.all())
        self._any_tag = re.compile(any_tag)
        self._tag_line = re.compile(
            rf"^[ \t]*(?P<tag>{any_tag})(?P<behind>[^\n]*)",
            re.MULTILINE,  # a tag at the beginning of a line, and what is behind it there
        )

    def __call__(self, text: str, start: int, declared: Declared) -> Region:
        tags = self._tags
        begin = self._begin.match(text, start) if tags.begin else None
        position = start if begin is None else begin.end()
        calls: list[Written] = []
        is_closed = True
        while head := self._function.match(text, position):
            function = self._read_function(text, head, declared, has_begin=begin is not None)
            calls.append(Written(head["name"], function.arguments, are_texts=True))
            position = function.end
            is_closed = is_closed and function.is_closed
            if not tags.end:
                break
        if not calls:
            raise Unreadable(f"expected a function, got {shown(text[position:].lstrip())}")
        end = self._end.match(text, position) if tags.end else None
        rest = text[position:].strip()
        if end is not None:
            position = end.end()
        elif begin is not None and rest:
            raise Unreadable(f"expected the end of the calls, got {shown(rest)}")
        elif not is_closed:
            raise Unreadable("expected the closing tag of every argument")
        self._check_rest(text, position)
        return Region(position, calls)

    def _check_rest(self, text: str, position: int) -> None:
        """Raise Unreadable if the next tag behind the calls is not the beginning of another one:
        then what was taken for their end may belong to a value."""
        tag = self._any_tag.search(text, position)
        if tag is None or self._function.match(text, tag.start()):
            return
        if self._tags.begin and self._begin.match(text, tag.start()):
            return
        raise Unreadable(f"expected no {shown(tag[0])} behind the end of a call")

    def _read_function(
        self, text: str, head: re.Match[str], declared: Declared, *, has_begin: bool
    ) -> _Function:
        """Read what is behind the tag of a function. `has_begin`: the tag that is around functions
        was there, so its end may end a function, too."""
        names = declared.get(head["name"])
        arguments: dict[str, str] = {}
        position = head.end()
        is_closed = True
        while parameter := self._parameter.match(text, position):
            key = parameter["key"]
            if key in arguments:
                raise Unreadable(f"expected the argument '{key}' once, got it twice")
            may_follow = None if names is None else names - arguments.keys() - {key}
            value = self._read_value(text, parameter.end(), key, may_follow)
            arguments[key] = value.text
            position = value.end
            is_closed = is_closed and value.is_closed
        end = self._end_function.match(text, position)
        if end is not None:
            return _Function(arguments, end.end(), is_closed)
        if has_begin and self._tags.end and self._end.match(text, position):
            return _Function(arguments, position, is_closed)
        rest = text[position:].strip()
        got = shown(rest) if rest else "the end of the turn"
        raise Unreadable(
            f"expected another argument or the end of '{head['name']}', got {got}; a value ends at "
            "the first closing tag on a line of its own, or that a tag follows"
        )

    # -- values -----------------------------------------------------------------------------------

    def _read_value(
        self, text: str, start: int, key: str, may_follow: frozenset[str] | None
    ) -> _Value:
        """Read the value of an argument. `may_follow`: names of arguments that are not given yet;
        None: any may follow."""
        if not self._tags.is_block:
            return self._read_inline(text, start, key)
        if text.startswith("\n", start):
            return self._read_block(text, start + 1, key, may_follow)
        value = self._read_inline(text, start, key)
        return value._replace(text=value.text.removesuffix("\n"))

    def _read_inline(self, text: str, start: int, key: str) -> _Value:
        """Read a value up to the first closing tag that another argument or the end follows."""
        for close in self._end_parameter.finditer(text, start):
            if not self._continues(text, close.end()):
                continue
            value = text[start : close.start()]
            opened = re.search(_without_groups(self._tags.parameter), value)
            if opened is not None:
                expected = f"expected its closing tag before {shown(opened[0])}"
                raise Unreadable(f"argument '{key}': {expected}")
            return _Value(value, close.end())
        raise Unreadable(f"argument '{key}': expected its closing tag, got {shown(text[start:])}")

    def _continues(self, text: str, position: int) -> bool:
        """Whether another argument or the end of the call follows."""
        patterns = [self._parameter, self._end_function]
        if self._tags.end:
            patterns.append(self._end)
        return any(pattern.match(text, position) for pattern in patterns)

    def _read_block(
        self, text: str, start: int, key: str, may_follow: frozenset[str] | None
    ) -> _Value:
        """Read a value on lines of its own. It ends at a closing tag that is alone on its line. One
        that is missing is replaced by the next argument, or by the end of the function, if these
        are alone on their lines."""
        for line in self._tag_line.finditer(text, start):
            tag = line["tag"]
            behind = line["behind"].strip()
            is_alone = not behind or self._any_tag.match(behind) is not None
            is_close = self._end_parameter.fullmatch(tag) is not None
            parameter = self._parameter.fullmatch(tag)
            if parameter is not None:
                is_known = may_follow is None or parameter["key"] in may_follow
                has_end = self._end_parameter.search(behind) is not None
                is_text = has_end and not is_known  # a whole argument of another name
                replaces_close = is_known and not behind
            else:
                is_text = not is_alone
                replaces_close = self._end_function.fullmatch(tag) is not None
            if is_text:
                continue
            written = text[start : line.start()].removesuffix("\n")
            if is_close:
                return _Value(written, line.end("tag"))
            value = self._without_close(written)
            if replaces_close and value.strip():
                return _Value(value, line.start(), is_closed=value != written)
            raise Unreadable(
                f"argument '{key}': expected its closing tag on a line of its own before "
                f"{shown(tag)}, or a value without such a line"
            )
        return self._read_inline(text, start, key)

    def _without_close(self, value: str) -> str:
        """Remove a closing tag at the end of a value, where it is not on a line of its own."""
        closes = list(self._end_parameter.finditer(value))
        if closes and not value[closes[-1].end() :].strip():
            return value[: closes[-1].start()]
        return value


def _without_groups(pattern: str) -> str:
    return re.sub(r"\(\?P<\w+>", "(?:", pattern)


def _format(tags: Tags, signs: Iterable[str], thinking: Thinking = USUAL_THINKING) -> Format:
    marks: list[Marks] = []
    if tags.begin:
        marks.append(Marks(tags.begin, tags.end))
    function = _without_groups(tags.mark or tags.function)
    marks.append(Marks(function, tags.end_function))
    return Format(TagReader(tags), tuple(marks), tuple(signs), thinking)


# -- the formats -----------------------------------------------------------------------------------

_qwen3_coder = Tags(
    function=r"<function=(?P<name>[^>\s]+)>",
    end_function=r"</function>",
    parameter=r"<parameter=(?P<key>[^>\s]+)>",
    end_parameter=r"</parameter>",
    begin=r"<tool_call>",
    end=r"</tool_call>",
    is_block=True,
)
QWEN3_CODER = _format(_qwen3_coder, ["<function="])
SEED_OSS = _format(
    replace(_qwen3_coder, begin=r"<seed:tool_call>", end=r"</seed:tool_call>", is_block=False),
    ["<seed:tool_call>"],
    Thinking("<seed:think>", "</seed:think>"),
)
_minimax_m2 = Tags(
    function=r'<invoke name="(?P<name>[^"<>]+)">',
    end_function=r"</invoke>",
    parameter=r'<parameter name="(?P<key>[^"<>]+)">',
    end_parameter=r"</parameter>",
    begin=r"<minimax:tool_call>",
    end=r"</minimax:tool_call>",
)
MINIMAX_M2 = _format(_minimax_m2, ["<minimax:tool_call>"])
MUSE_GLIMMER = replace(
    _format(
        Tags(
            function=r'<atem:invoke name="(?P<name>[^"<>]+)">',
            end_function=r"</atem:invoke>",
            parameter=r'<atem:parameter name="(?P<key>[^"<>]+)">',
            end_parameter=r"</atem:parameter>",
            # The call is a message to the tool. One to `self` is a thought.
            begin=r"(?:(?:<\|start\|>assistant)? ?to=(?!self<)[^\s<]{1,200}<\|message\|>\s*)?"
            r"<atem:function_calls>",
            end=r"</atem:function_calls>",
        ),
        ["<atem:function_calls>"],
        Thinking("to=self<|message|>", "<|eom|>"),
    ),
    may_think_at_once=False,
)
# A name without spaces around it, in linear time.
_KEY = r"(?P<key>[^<>\s](?:[^<>]*[^<>\s])?)"
GLM = _format(
    Tags(
        function=r"<tool_call>\s*(?P<name>[^\s<>{}\[\]]+)",
        end_function=r"</tool_call>",
        parameter=rf"<arg_key>\s*{_KEY}\s*</arg_key>\s*<arg_value>",
        end_parameter=r"</arg_value>",
        mark=r"<tool_call>",
    ),
    ["<arg_key>"],
)
# Some checkpoints have a suffix in each tag: <tool_call:opensource>.
HY3 = _format(
    Tags(
        function=r"<tool_call(?::\w+)?>\s*(?P<name>[^\s<>{}\[\]]+)\s*<tool_sep(?::\w+)?>",
        end_function=r"</tool_call(?::\w+)?>",
        parameter=rf"<arg_key(?::\w+)?>\s*{_KEY}\s*</arg_key(?::\w+)?>\s*<arg_value(?::\w+)?>",
        end_parameter=r"</arg_value(?::\w+)?>",
        begin=r"<tool_calls(?::\w+)?>",
        end=r"</tool_calls(?::\w+)?>",
        mark=r"<tool_call(?::\w+)?>",
    ),
    ["<tool_sep>"],
)
