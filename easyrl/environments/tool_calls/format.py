"""What the formats of tool calls have in common.

A reader returns what is written, or raises `Unreadable`. It accounts for every character between
the beginning and the end of a call. Text that can be read in two ways is not read.
"""

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from easyrl.environments.tool_calls.values import Unreadable, shown, skip_space

MAX_REST = 40  # characters in a message of what follows
Declared = Mapping[str, frozenset[str] | None]
"""Names of the arguments by tool; None: a tool that takes others, too."""


class Written(NamedTuple):
    """A call as it is written."""

    name: str
    arguments: dict[str, Any]
    are_texts: bool = False  # the arguments have no types yet: `3` may be a text
    call_id: str = ""


class Region(NamedTuple):
    """Calls that are written together."""

    end: int  # of their text
    calls: list[Written]


Reader = Callable[[str, int, Declared], Region]
"""Reads the text of a turn from where a call begins. Raises Unreadable."""


class Marks(NamedTuple):
    """Regular expressions of what is around calls."""

    begin: str
    end: str = ""  # "": the calls end with the turn


class Thinking(NamedTuple):
    """What is around the thoughts of a model."""

    begin: str
    end: str


USUAL_THINKING = Thinking("<think>", "</think>")


@dataclass(frozen=True)
class Format:
    """How templates write calls."""

    read: Reader
    marks: tuple[Marks, ...]
    signs: tuple[str, ...] = ()
    """Words of which a template that only describes such calls has one."""
    thinking: Thinking = USUAL_THINKING
    may_think_at_once: bool = True
    """A prompt may end inside a thought, so that only its end is in the turn."""
    has_ids: bool = False  # the model writes ids of calls, which their results repeat
    has_text_last: bool = False  # templates write the text of an answer behind its calls

    def opening(self) -> re.Pattern[str]:
        """Return a pattern of the beginning of calls."""
        return re.compile("|".join(marks.begin for marks in self.marks))

    def end_of_unreadable(self, text: str, start: int) -> int:
        """Return where a call ends that cannot be read. Where beginnings and ends do not alternate,
        some may belong to a value: then all that follows belongs to the call."""
        for marks in self.marks:
            if not marks.end or re.compile(marks.begin).match(text, start) is None:
                continue
            if _last_repeated_mark(marks, text) >= start:
                return len(text)
            end = re.compile(marks.end).search(text, start)
            return len(text) if end is None else end.end()
        return len(text)


@functools.lru_cache(maxsize=4)  # a turn may have thousands of calls that cannot be read
def _last_repeated_mark(marks: Marks, text: str) -> int:
    """Return where the last mark is that another one of its kind follows, -1 for none."""
    last_repeated = -1
    previous: re.Match[str] | None = None
    for mark in re.compile(f"(?P<begin>{marks.begin})|{marks.end}").finditer(text):
        if previous is not None and (previous["begin"] is None) == (mark["begin"] is None):
            last_repeated = previous.start()
        previous = mark
    return last_repeated


def expect(text: str, start: int, word: str) -> int:
    """Return where a word ends that follows after spaces. Raises Unreadable."""
    begin = skip_space(text, start)
    if text.startswith(word, begin):
        return begin + len(word)
    got = "the end of the turn"
    if begin < len(text):
        got = shown(text[begin : begin + MAX_REST])
    raise Unreadable(f"expected {shown(word)}, got {got}")


def no_such_tool(name: str, names: Iterable[str]) -> str:
    return f"there is no tool {shown(name)}; the tools are {', '.join(names)}"
