"""Calls with literals of their own: Gemma 4's, and Python's of LFM2."""

import ast
import re
from typing import Any

from easyrl.environments.tool_calls.format import (
    Declared,
    Format,
    Marks,
    Region,
    Thinking,
    Written,
    expect,
)
from easyrl.environments.tool_calls.values import (
    Unreadable,
    parse_python,
    python_value,
    read_whole_json,
    shown,
    skip_space,
    unique_names,
)

# -- Gemma 4: <|tool_call>call:f{x:1,s:<|"|>text<|"|>}<tool_call|> ---------------------------------

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


class _Gemma4Reader:
    """Reads values: JSON with plain names, and strings between quotes of their own. `position` is
    where the rest of the text begins."""

    def __init__(self, text: str, position: int) -> None:
        self.text = text
        self.position = position

    def value(self) -> Any:
        self.position = skip_space(self.text, self.position)
        if self._skips(GEMMA4_QUOTE):
            return self._string()
        if self._skips("{"):
            return self._object()
        if self._skips("["):
            return self._list()
        return self._word()

    def _word(self) -> Any:
        """Read a number, or a word as true."""
        match = GEMMA4_WORD.match(self.text, self.position)
        if match is None:
            raise self._unexpected("a value")
        word = match[0]
        if word in GEMMA4_WORDS:
            value = GEMMA4_WORDS[word]
        else:
            value = read_whole_json(word)
            if isinstance(value, str):
                raise self._unexpected(f"a string between {GEMMA4_QUOTE}")
        self.position = match.end()
        return value

    def _string(self) -> str:
        end = self.text.find(GEMMA4_QUOTE, self.position)
        if end < 0:
            raise self._unexpected(f"the closing {GEMMA4_QUOTE}")
        value = self.text[self.position : end]
        self.position = end + len(GEMMA4_QUOTE)
        return value

    def _name(self) -> str:
        """Read a name and the colon behind it."""
        self.position = skip_space(self.text, self.position)
        if self._skips(GEMMA4_QUOTE):
            name = self._string()
            self.position = expect(self.text, self.position, ":")
            return name
        match = GEMMA4_KEY.match(self.text, self.position)
        if match is None:
            raise self._unexpected("a name and ':'")
        self.position = match.end()
        return match[1]

    def _object(self) -> dict[str, Any]:
        pairs: list[tuple[str, Any]] = []
        while not self._ends("}", has_items=bool(pairs)):
            name = self._name()
            pairs.append((name, self.value()))
        return unique_names(pairs)

    def _list(self) -> list[Any]:
        items: list[Any] = []
        while not self._ends("]", has_items=bool(items)):
            items.append(self.value())
        return items

    def _ends(self, close: str, *, has_items: bool) -> bool:
        """Skip the closing bracket, or the comma before another item."""
        self.position = skip_space(self.text, self.position)
        if self._skips(close):
            return True
        if has_items:
            self.position = expect(self.text, self.position, ",")
        return False

    def _skips(self, mark: str) -> bool:
        """Skip a mark; return whether it was there."""
        is_there = self.text.startswith(mark, self.position)
        if is_there:
            self.position += len(mark)
        return is_there

    def _unexpected(self, expected: str) -> Unreadable:
        return Unreadable(f"expected {expected}, got {shown(self.text[self.position :])}")


def _read_gemma4(text: str, start: int, _: Declared) -> Region:
    head = GEMMA4_HEAD.match(text, start)
    if head is None:
        raise Unreadable(f"expected call:NAME{{…}}, got {shown(text[start:])}")
    reader = _Gemma4Reader(text, head.end())
    try:
        arguments = reader.value()
    except RecursionError:
        raise Unreadable("expected arguments, got values nested too deeply") from None
    end = skip_space(text, reader.position)
    if end < len(text):
        end = expect(text, end, "<tool_call|>")
    return Region(end, [Written(head["name"], arguments)])


GEMMA4 = Format(
    _read_gemma4,
    (Marks(r"<\|tool_call>", r"<tool_call\|>"),),
    signs=("<|tool_call>",),
    thinking=Thinking("<|channel>thought", "<channel|>"),
    has_text_last=True,
)

# -- LFM2: <|tool_call_start|>[f(x=1, s='text')]<|tool_call_end|> ----------------------------------

LFM2_BEGIN = "<|tool_call_start|>"
LFM2_END = "<|tool_call_end|>"
MAX_ENDS = 16  # closing marks that are tried as the end of a call
NO_ESCAPE = re.compile(r"\\\n|\b[rR]['\"]")
"""What would change the meaning of a line break that is written as `\\n`."""


def _read_lfm2(text: str, start: int, _: Declared) -> Region:
    """Read a list of Python calls. A string may contain the closing mark: the call ends at the
    first one before which the text is an expression."""
    begin = start + len(LFM2_BEGIN)
    position = begin
    error = Unreadable("expected calls")
    for _try in range(MAX_ENDS):
        end = text.find(LFM2_END, position)
        is_open = end < 0
        try:
            node = _parse_lfm2(text[begin:] if is_open else text[begin:end])
        except Unreadable as reason:
            error = reason
        else:
            region_end = len(text) if is_open else end + len(LFM2_END)
            return Region(region_end, _python_calls(node))
        if is_open:
            break
        position = end + len(LFM2_END)
    raise error


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
    return [_python_call(each) for each in nodes]


def _python_call(node: ast.expr) -> Written:
    if not isinstance(node, ast.Call):
        raise Unreadable("expected [NAME(argument=value, …)]")
    if node.args:
        raise Unreadable("expected every argument as name=value")
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:  # `**` before a dictionary
            raise Unreadable("expected every argument as name=value")
        if keyword.arg in arguments:
            raise Unreadable("expected every argument once")
        arguments[keyword.arg] = python_value(keyword.value)
    return Written(_dotted_name(node.func), arguments)


def _dotted_name(node: ast.expr) -> str:
    """Return the name of a function, which may have dots."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted_name(node.value)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    raise Unreadable("expected [NAME(argument=value, …)]")


LFM2 = Format(
    _read_lfm2,
    (Marks(re.escape(LFM2_BEGIN), re.escape(LFM2_END)),),
    signs=(LFM2_BEGIN,),
)
