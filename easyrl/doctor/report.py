"""`easyrl doctor`: the lines on the screen or as JSON; returns the exit code."""

from __future__ import annotations

import dataclasses
import json
import textwrap

from easyrl.doctor.checks import Line, can_run, check
from easyrl.doctor.facts import Facts, gather

CAN_RUN, CANNOT_RUN = 0, 1
MAX_WIDTH = 80
MARKS = {"ok": "ok", "warning": "warn", "failed": "FAIL"}
STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red"}


def run_doctor(*, as_json: bool) -> int:
    """1 where a run could not start."""
    facts = gather()
    lines = check(facts)
    if as_json:
        print(to_json(facts, lines))
    else:
        _print(lines)
    return CAN_RUN if can_run(lines) else CANNOT_RUN


def to_json(facts: Facts, lines: list[Line]) -> str:
    report = {
        "can_run": can_run(lines),
        "lines": [dataclasses.asdict(line) for line in lines],
        "facts": dataclasses.asdict(facts),
    }
    return json.dumps(report, indent=2)


def _print(lines: list[Line]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for line in lines:
        text = Text("\n".join(to_text(line, min(console.width, MAX_WIDTH))))
        text.stylize(STYLES[line.status], 0, len(MARKS[line.status]))
        console.print(text, soft_wrap=True)
    failed = sum(line.status == "failed" for line in lines)
    warned = sum(line.status == "warning" for line in lines)
    end = f"no run can start before what FAILs is mended ({failed})" if failed else "runs can start"
    console.print(end + (f"; {warned} warning(s)" if warned else ""))


def to_text(line: Line, width: int) -> list[str]:
    """A line of the report, folded to `width` columns."""
    mark = MARKS[line.status]
    return [
        *_folded(line.text, width, first=f"{mark:4}  {line.name:13}  "),
        *(_folded(line.remedy, width, first=" " * 21 + "-> ") if line.remedy else ()),
    ]


def _folded(text: str, width: int, first: str) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_on_hyphens=False,
    )
