"""Find the program in a completion, which models write in a Markdown code block.

A parser of CommonMark finds too little in what models write: a block that opens behind words
(`Program: ```python`), one whose lines lack the indentation of their list, an end behind the last
line of code. So fences are read here, line by line, by CommonMark's rules (section 4.5) otherwise:

- A block ends at a fence of the same character that is at least as long as the one that opened it.
- The indentation of the opening fence is taken off every line of the block.
- A block without an end reaches to the end of the text.
"""

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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
"""What programs have, and outputs, sample inputs and explanations in blocks of their own lack."""


class Fence(NamedTuple):
    """A line with marks that open or end a block."""

    margin: str  # indentation of the line
    before: str  # text between the margin and the marks
    marks: str  # "```", or more of them
    label: str  # what follows

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
        is_introduced = INTRODUCTION.search(self.before.strip()) is not None
        return self.is_python or (is_introduced and not self.label)

    def ends(self, opening: "Fence") -> bool:
        """Whether the block of `opening` ends here: at a fence of its own, behind the last line of
        code, or where the next block begins."""
        if not self.marks.startswith(opening.marks):
            return False
        if not self.before or self.is_python:
            return True
        return opening.marks not in self.before and self.label[:1] in ("", "<")


@dataclass(slots=True)
class Block:
    fence: Fence  # that opened it
    lines: list[str] = field(default_factory=list)
    is_closed: bool = False

    @property
    def is_certain(self) -> bool:
        """False for what follows a sentence like "I wrote it in ```python"."""
        return self.is_closed or not self.fence.before

    @property
    def source(self) -> str:
        """The content without the block's indentation."""
        lines = [_without_margin(line, self.fence.margin) for line in self.lines]
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
    if there is none, the last block that looks like a program, rather one without a label."""
    blocks = [block for block in _blocks_within(text) if block.source.strip()]
    python = [block for block in blocks if block.fence.is_python]
    if python:
        certain = [block for block in python if block.is_certain]
        return (certain or python)[-1].source
    unlabelled = [block.source for block in blocks if not block.fence.label]
    labelled = [block.source for block in blocks if block.fence.label]
    for sources in (unlabelled, labelled):
        programs = [source for source in sources if ACTION.search(source)]
        if programs:
            return programs[-1]
    statements = [source for source in unlabelled if "=" in source or "(" in source]
    return statements[-1] if statements else None


def _blocks_within(text: str) -> list[Block]:
    """Return all blocks; instead of one that contains blocks, such as a whole answer in Markdown,
    those."""
    found: list[Block] = []
    for block in read_blocks(text):
        inner: Sequence[Block] = ()
        if not block.fence.is_python:
            inner = read_blocks(block.source)
        found.extend(inner or [block])
    return found


def read_blocks(text: str) -> list[Block]:
    """Return the code blocks of a text, in their order."""
    blocks: list[Block] = []
    current: Block | None = None
    for line_with_return in text.split("\n"):
        line = line_with_return.removesuffix("\r")
        fence = read_fence(line)
        if current is not None:
            if fence is None or not fence.ends(current.fence):
                current.lines.append(line)
                continue
            if fence.before and not fence.is_python:  # it is the last line of code
                current.lines.append(fence.margin + fence.before)
            current.is_closed = True
            current = None
            if not fence.is_python:
                continue
        if fence is not None and fence.opens_block:
            current = Block(fence)
            blocks.append(current)
    return blocks


def read_fence(line: str) -> Fence | None:
    """Split a line at its marks. A line of tildes begins with them; backticks can stand behind
    words, and no further one follows. (No regular expression: lines of many thousand marks do
    occur, and need linear time.)"""
    content = line.lstrip(MARGIN)
    margin = line[: len(line) - len(content)]
    if content.startswith(MIN_MARKS * "~"):
        label = content.lstrip("~")
        return Fence(margin, "", content[: len(content) - len(label)], label.strip())
    until, _, label = content.rpartition("`")
    before = until.rstrip("`")
    num_marks = len(content) - len(before) - len(label)
    if num_marks < MIN_MARKS:
        return None
    return Fence(margin, before, num_marks * "`", label.strip())
