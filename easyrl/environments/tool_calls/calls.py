"""Read the tool calls of a model's turn.

Nothing is executed with arguments that are lost or changed. What cannot be read, or does not fit
the schema of the tool, is a `BadCall`: the model gets the reason as its result. What the model only
thinks (`<think>`) is no call.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from easyrl.environments.tool_calls.arguments import (
    check_arguments,
    declared_names,
    read_arguments,
)
from easyrl.environments.tool_calls.format import Region, Written, no_such_tool
from easyrl.environments.tool_calls.formats import FORMATS
from easyrl.environments.tool_calls.values import Unreadable

NAME = re.compile(r"[\w.-]{1,64}")  # of a tool, as APIs allow it
UNKNOWN = "unknown"  # name of a tool whose call cannot be read


class ToolCall(NamedTuple):
    name: str
    arguments: dict[str, Any]
    call_id: str = ""  # that the model has written


class BadCall(NamedTuple):
    """A call that is not executed."""

    reason: str
    name: str = UNKNOWN
    arguments: dict[str, Any] | None = None
    """Exactly those that are written, where only the schema of the tool refuses them. None: they
    cannot be read."""
    call_id: str = ""


Calls = list[ToolCall | BadCall]
Schemas = Sequence[dict[str, Any]]
"""Of tools, as chat templates take them: {"type": "function", "function": {"name": …}}."""
Functions = Mapping[str, Mapping[str, Any]]  # the descriptions of tools, by name


class Turn(NamedTuple):
    calls: Calls
    around: str  # the text without the calls that are read


class _Found(NamedTuple):
    """Calls that are written together."""

    start: int
    end: int
    calls: Calls


def read_calls(text: str, tool_format: str, schemas: Schemas) -> Calls:
    """Return the calls of a turn, in order."""
    return read_turn(text, tool_format, schemas).calls


def read_turn(text: str, tool_format: str, schemas: Schemas) -> Turn:
    """Return the calls of a turn, in order, and the text around them."""
    calls: Calls = []
    around = ""
    position = 0
    for found in _TurnReader(text, tool_format, _functions(schemas)).read():
        calls += found.calls
        around += text[position : found.start]
        if any(call.arguments is None for call in found.calls):
            around += text[found.start : found.end]
        position = found.end
    around += text[position:]
    return Turn(calls, around.strip())


def check_calls(calls: Sequence[Written], schemas: Schemas) -> Calls:
    """Return calls that another parser has read, by the schemas of the tools."""
    functions = _functions(schemas)
    return [_by_schema(call, functions) for call in calls]


def _functions(schemas: Schemas) -> Functions:
    return {schema["function"]["name"]: schema["function"] for schema in schemas}


class _TurnReader:
    """Finds the calls of a turn, from left to right."""

    def __init__(self, text: str, tool_format: str, functions: Functions) -> None:
        self._text = text
        self._tool_format = tool_format
        self._form = FORMATS[tool_format]
        self._functions = functions
        self._declared = {name: declared_names(each) for name, each in functions.items()}
        self._position = 0  # all before it is read
        self._found: list[_Found] = []
        self._may_be_thought = self._form.may_think_at_once
        """Whether all so far may belong to a thought that the prompt has begun."""

    def read(self) -> list[_Found]:
        opening = self._form.opening()
        while call := opening.search(self._text, self._position):
            if not self._skip_thought(call.start()):
                self._read_call(call.start())
        if self._may_be_thought:
            opened = self._find(self._form.thinking.begin, self._position)
            closed = self._find(self._form.thinking.end, self._position)
            if closed is not None and opened is None:
                self._end_first_thought(closed)
        return self._found

    def _find(self, mark: str, start: int, end: int | None = None) -> int | None:
        """Return where a mark of thinking is."""
        found = self._text.find(mark, start, len(self._text) if end is None else end)
        return None if found < 0 else found

    def _end_first_thought(self, closed: int) -> None:
        """A thought that the prompt has begun ends here: what was found in it is no call."""
        self._found.clear()
        self._end_thought(closed)

    def _end_thought(self, closed: int) -> None:
        self._may_be_thought = False
        self._position = closed + len(self._form.thinking.end)

    def _skip_thought(self, call: int) -> bool:
        """Skip a thought that begins before a call; return False if there is none."""
        begin, end = self._form.thinking
        opened = self._find(begin, self._position, call)
        if self._may_be_thought:
            closed = self._find(end, self._position, call if opened is None else opened)
            if closed is not None:
                self._end_first_thought(closed)
                return True
        if opened is None:
            return False
        closed = self._find(end, opened + len(begin))
        if closed is not None:
            self._end_thought(closed)
            return True
        if self._text[:opened].strip():
            # In a text it may also be a mention: whether the call is meant is not sure.
            reason = f"expected '{end}' before it, as '{begin}' may begin a thought"
            self._add_bad_call(call, len(self._text), reason)
        self._position = len(self._text)
        return True

    def _read_call(self, start: int) -> None:
        """Read the calls that begin here."""
        try:
            region: Region = self._form.read(self._text, start, self._declared)
            calls = [_by_schema(written, self._functions) for written in region.calls]
        except Unreadable as error:
            end = self._form.end_of_unreadable(self._text, start)
            if self._may_be_thought:
                closed = self._find(self._form.thinking.end, start, end)
                if closed is not None:
                    self._end_first_thought(closed)
                    return
            self._add_bad_call(start, end, str(error))
            return
        self._found.append(_Found(start, region.end, calls))
        self._position = region.end

    def _add_bad_call(self, start: int, end: int, reason: str) -> None:
        bad = BadCall(f"the tool call cannot be read ({self._tool_format}): {reason}")
        self._found.append(_Found(start, end, [bad]))
        self._position = end


def _by_schema(written: Written, functions: Functions) -> ToolCall | BadCall:
    function = functions.get(written.name)
    exact = None if written.are_texts else written.arguments
    name = written.name if NAME.fullmatch(written.name) else UNKNOWN
    if function is None:
        reason = no_such_tool(written.name, functions)
        return BadCall(reason, name, exact, written.call_id)
    read = read_arguments if written.are_texts else check_arguments
    try:
        arguments = read(written.arguments, function)
    except Unreadable as error:
        reason = f"the tool '{written.name}' is not called: {error}"
        return BadCall(reason, name, exact, written.call_id)
    except RecursionError:
        reason = f"the tool '{written.name}' is not called: its arguments are nested too deeply"
        return BadCall(reason, name, exact, written.call_id)
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        reason = f"the tool '{written.name}' is not called: its schema cannot be read: {error!r}"
        return BadCall(reason, name, exact, written.call_id)
    return ToolCall(written.name, arguments, written.call_id)
