"""Find the program in a completion, which models write in a Markdown code block.

A parser of CommonMark finds too little in what models write: a block that opens behind words
(`Program: ```python`), one whose lines lack the indentation of their list, an end behind the last
line of code. So fences are read here, line by line, by CommonMark's rules (section 4.5) otherwise:

- A block ends at a fence of the same character that is at least as long as the one that opened it.
- The indentation of the opening fence is taken off every line of the block.
- A block without an end reaches to the end of the text.

A fence within a string of the program, such as an example in a docstring, does not end the block.
"""

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from easyrl.rewards.functions import ANSWER

MIN_MARKS = 3  # fewer are no fence
MARGIN = " \t>"  # indentation, and the marks of a quotation
PYTHON = re.compile(r"[{.\s]*(?:i?python|pypy|py)[\d.]*(?![\w+#-])", re.IGNORECASE)
"""Label of a block: `python`, `py`, `Python 3`, `python3.11`, `python title="a"`, `{.python}`."""
INTRODUCTION = re.compile(r"[:>][*_]*$|^[-*+]$|^\d+[.)]$")
"""End of a text behind which a fence without a label opens a block: `Program:`, `<answer>`, `1.`"""
ACTION = re.compile(
    r"^[ \t]*(?:async +def|def|class|import) +\w|^[ \t]*from +[\w.]+ +import\b|\b(?:print|write)\(",
    re.MULTILINE,
)
"""A statement as most programs have one. Blocks with outputs, sample inputs or explanations have
none."""
BEGIN_OF_CODE = re.compile(
    r"[ \t]*(?:@\w|import +\w|from +[\w.]+ +import\b|print\("
    r"|(?:async +def|def|class) +\w+.*[:(]|(?:for|while|with|if|try)\b.*:[ \t]*(?:#.*)?$"
    r"|[A-Za-z_][\w.]*(?:, *\w+)* *[-+*/]?=(?!=))"
)
"""How the first line of a program begins, and sentences do not."""
ONE_LINE = re.compile(
    r"^[ \t>]*```(?!`)(?:python\d?|py)?\b[ \t]*([^`\n]+)```[ \t.]*$", re.MULTILINE | re.IGNORECASE
)
"""A program of one line between backticks: "```def add(a, b): return a + b```"."""
STRING_OR_COMMENT = re.compile(
    r"""\\.|\"{3}|'{3}|"(?:[^"\\]|\\.){0,2000}+"|'(?:[^'\\]|\\.){0,2000}+'|\#.*"""
)
"""In a line of Python: an escape, the begin of a string of several lines, another string, or a
comment."""
END_OF_STRING = {quotes: re.compile(rf"\\.|({quotes})") for quotes in ('"""', "'''")}
MAX_FENCES_IN_STRING = 20
"""How many fences the search for the end of a string passes over. So it takes linear time."""


class Fence(NamedTuple):
    """A line with marks that open or end a block."""

    margin: str  # the line's indentation
    before: str  # the text between the margin and the marks
    marks: str  # "```", or more of them
    label: str  # the text behind the marks, as "python"

    @property
    def position(self) -> int:
        """Index of the marks in the line."""
        return len(self.margin) + len(self.before)

    @property
    def is_python(self) -> bool:
        return PYTHON.match(self.label) is not None

    @property
    def opens_block(self) -> bool:
        """Whether a block begins here, where none is open. Behind words, it has a label or is
        introduced: other sentences only mention the marks."""
        if not self.before:
            return True
        if MIN_MARKS * "`" in self.before:  # code within a line
            return False
        if self.label:
            return self.is_python
        return INTRODUCTION.search(self.before.strip()) is not None

    def ends(self, opening: "Fence") -> bool:
        """Whether the block of `opening` ends here: at a fence of its own, behind the last line of
        code, or where the next block begins."""
        if not self.marks.startswith(opening.marks):
            return False
        if not self.before or self.is_python:
            return True
        if not self.before.strip("# "):  # a comment with nothing but the marks
            return False
        return opening.marks not in self.before and self.label[:1] in ("", "<")


@dataclass(slots=True)
class Block:
    """A block of code."""

    fence: Fence  # the one that opened the block
    lines: list[str] = field(default_factory=list)
    is_closed: bool = False
    has_fence_in_string: bool = False

    @property
    def is_certain(self) -> bool:
        """Whether this must be a block: a sentence such as "I wrote it in ```python" can look like
        the begin of one that has no end."""
        return self.is_closed or not self.fence.before

    @property
    def source(self) -> str:
        """Content without the block's indentation."""
        margin = self.fence.margin
        lines = [_without_margin(line, margin) for line in self.lines]
        text = "\n".join(lines)
        if self.is_closed:
            text += "\n"
        first_line = next(filter(str.strip, lines), "")
        # Behind the number of a list item, the code is indented and the fence is not.
        return textwrap.dedent(text) if first_line.startswith((" ", "\t")) else text


def _without_margin(line: str, margin: str) -> str:
    """Remove what the line has of the margin: a blank line, and code in a list, may have less."""
    num_equal = 0
    while num_equal < min(len(line), len(margin)) and line[num_equal] == margin[num_equal]:
        num_equal += 1
    return line[num_equal:]


def find_program(text: str) -> str | None:
    """Return the source of the program, None without one: the last block with the label of Python;
    if there is none, the last block that looks like a program, rather one without a label. Without
    blocks, a line between backticks, what is in `<answer>` tags, or what is indented as a block."""
    blocks = _blocks_within(text)
    python = [block for block in blocks if block.fence.is_python]
    if python:
        certain = [block for block in python if block.is_certain]
        return (certain or python)[-1].source
    return (
        _last_that_acts(blocks)
        or _last_statement(blocks)
        or _last_match(ONE_LINE, text)
        or _in_answer_tags(text)
        or _find_indented(text)
    )


def _last_that_acts(blocks: Sequence[Block]) -> str | None:
    """Return the last block that looks like a program. Those without a label come first, and those
    that may be none come last."""
    unlabelled = labelled = uncertain = None
    for block in blocks:
        source = block.source
        if not ACTION.search(source):
            continue
        if not block.is_certain:
            uncertain = source
        elif block.fence.label:
            labelled = source
        else:
            unlabelled = source
    return unlabelled or labelled or uncertain


def _last_statement(blocks: Sequence[Block]) -> str | None:
    """Return the last block without a label that has an assignment or a call."""
    found = None
    for block in blocks:
        has_statement = "=" in block.source or "(" in block.source
        if has_statement and block.is_certain and not block.fence.label:
            found = block.source
    return found


def _last_match(pattern: re.Pattern[str], text: str) -> str | None:
    found = pattern.findall(text)
    return str(found[-1]) if found else None


def _in_answer_tags(text: str) -> str | None:
    answer = _last_match(ANSWER, text)
    if answer is None or not ACTION.search(answer):
        return None
    return answer.strip("\n") + "\n"


def _find_indented(text: str) -> str | None:
    """Return the last program that is indented as a whole, as a code block may be (CommonMark 4.4);
    None where the lines that are not indented have code, too: they are the program then."""
    program = None
    block: list[str] = []
    is_behind_blank = True
    for line in [*text.splitlines(), "end"]:
        is_blank = not line.strip()
        is_indented = line.startswith(("    ", "\t"))
        if block and (is_blank or is_indented):
            block.append(line)
        elif is_indented and not is_blank and is_behind_blank:
            block = [line]
        elif not is_blank:
            if BEGIN_OF_CODE.match(line):
                return None
            source = textwrap.dedent("\n".join(block)).strip()
            if ACTION.search(source):
                program = source + "\n"
            block = []
        is_behind_blank = is_blank
    return program


def _blocks_within(text: str) -> list[Block]:
    """Return all blocks with a content; instead of one that contains blocks, such as a whole answer
    in Markdown, those."""
    found: list[Block] = []
    for block in read_blocks(text):
        inner: list[Block] = []
        if not block.fence.is_python and not block.has_fence_in_string:
            inner = read_blocks(block.source)
        for each in inner or [block]:
            if each.source.strip():
                found.append(each)
    return found


def read_blocks(text: str) -> list[Block]:
    """Return the code blocks of a text, in their order."""
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    blocks: list[Block] = []
    index = 0
    while index < len(lines):
        fence = read_fence(lines[index])
        index += 1
        if fence is not None and (fence.opens_block or _opens_behind_words(fence, lines, index)):
            block = Block(fence)
            blocks.append(block)
            index = _read_block(block, lines, index)
    return blocks


def _opens_behind_words(fence: Fence, lines: Sequence[str], index: int) -> bool:
    """Return whether a fence at the end of a sentence opens a block: code follows."""
    if fence.label or "`" in fence.before:
        return False
    return index < len(lines) and BEGIN_OF_CODE.match(lines[index]) is not None


def _read_block(block: Block, lines: Sequence[str], start: int) -> int:
    """Add the lines from `start` to the block; return the index of the line behind it."""
    string = ""  # quotes of the string of several lines that is open
    may_be_python = block.fence.is_python or not block.fence.label
    for index in range(start, len(lines)):
        line = lines[index]
        fence = read_fence(line)
        if fence is not None and fence.ends(block.fence):
            is_in_string = False
            if may_be_python and _is_in_string(line, string, fence.position):
                is_in_string = not string or _is_closed_later(block, string, lines, index)
            if not is_in_string:
                block.is_closed = True
                if fence.is_python:
                    return index  # the next block begins here
                if fence.before:  # it is the last line of code
                    block.lines.append(fence.margin + fence.before)
                return index + 1
            block.has_fence_in_string = True
        block.lines.append(line)
        if may_be_python:
            string = _strings_of(line, string).is_open
    return len(lines)


def _is_closed_later(block: Block, string: str, lines: Sequence[str], start: int) -> bool:
    """Return whether the string that is open before line `start` ends within the block, so that a
    later fence is the block's end. Where a program lacks the end of a string, no later fence is
    outside of strings, and the first one is the block's end."""
    num_fences = 0
    for index in range(start, len(lines)):
        line = lines[index]
        fence = read_fence(line)
        if fence is not None and fence.ends(block.fence):
            if not _is_in_string(line, string, fence.position):
                return True
            num_fences += 1
            if num_fences > MAX_FENCES_IN_STRING:
                return False
        string = _strings_of(line, string).is_open
    return not string


class Strings(NamedTuple):
    """What is quoted in a line of Python."""

    spans: list[tuple[int, int]]  # begin and end of each string
    is_open: str  # quotes of the string that goes on in the next line, else ""


def _strings_of(line: str, open_before: str) -> Strings:
    """Find the strings of a line. `open_before`: quotes of the string that the line continues."""
    spans: list[tuple[int, int]] = []
    quotes = open_before
    start = 0
    position = 0
    while True:
        if quotes:
            end = _end_of_string(line, position, quotes)
            if end is None:
                spans.append((start, len(line) + 1))
                return Strings(spans, quotes)
            spans.append((start, end))
            position = end
            quotes = ""
        match = STRING_OR_COMMENT.search(line, position)
        if match is None:
            return Strings(spans, "")
        start = match.start()
        position = match.end()
        if match[0] in END_OF_STRING:
            quotes = match[0]
        elif match[0][0] in "\"'":
            spans.append((start, position))


def _end_of_string(line: str, position: int, quotes: str) -> int | None:
    """Return the index behind the quotes that end a string; None where the line does not."""
    for match in END_OF_STRING[quotes].finditer(line, position):
        if match[1]:  # else an escape
            return match.end()
    return None


def _is_in_string(line: str, open_before: str, position: int) -> bool:
    """Return whether a position of the line is within a string."""
    spans = _strings_of(line, open_before).spans
    return any(start <= position < end for start, end in spans)


def read_fence(line: str) -> Fence | None:
    """Split a line at its marks; return None if it has none. Tildes must be at the line's begin;
    backticks may stand behind words, but no further backtick may follow. This is no regular
    expression because lines of many thousand marks do occur, and must take linear time."""
    content = line.lstrip(MARGIN)
    margin = line[: len(line) - len(content)]
    if content.startswith(MIN_MARKS * "~"):
        label = content.lstrip("~")
        marks = content.removesuffix(label)
        return Fence(margin, "", marks, label.strip())
    until_last_mark, _, label = content.rpartition("`")
    before = until_last_mark.rstrip("`")
    num_marks = len(content) - len(before) - len(label)
    if num_marks < MIN_MARKS:
        return None
    return Fence(margin, before, num_marks * "`", label.strip())
