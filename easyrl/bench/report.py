"""Run a benchmark suite, print its table, and write JSON that describes the machine."""

from __future__ import annotations

import importlib
import json
import os
import platform
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from easyrl.processes import num_cores
from easyrl.runtime.supervisor import SIGNALLED, Interrupted, WorkerFailure

Row = Mapping[str, Any]


def run_suite(name: str, json_file: Path | None, **options: Any) -> int:
    """Run the suite with `options` and return the exit code. Raises ValueError if `json_file`
    cannot be written, before anything is measured."""
    if json_file is not None:
        _check_writable(json_file)
    suite = importlib.import_module(f"easyrl.bench.{name}")
    try:
        rows = suite.run(**options)
    except Interrupted as interrupted:
        return SIGNALLED + interrupted.signum
    except KeyboardInterrupt:
        return SIGNALLED + signal.SIGINT
    except WorkerFailure as failure:
        print(f"easyrl: {failure}", file=sys.stderr)
        return 1
    print_table(name, rows, suite.COLUMNS)
    if json_file is not None:
        write_json(json_file, name, rows)
    return 0


def progress(text: str) -> None:
    """Print a line to standard error while a long suite runs."""
    print(text, file=sys.stderr, flush=True)


def machine() -> dict[str, Any]:
    """What the figures depend on besides the code."""
    return {
        "cpu": _cpu_model(),
        "cores": num_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "transformers": metadata.version("transformers"),
    }


def print_table(suite: str, rows: Sequence[Row], columns: Mapping[str, str]) -> None:
    """Print a row per result. `columns`: the keys to show, and their headings."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    about = machine()
    table = Table(
        title=f"easyrl bench {suite}",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        caption=f"{about['cpu']}, {about['cores']} cores, torch {about['torch']}",
    )
    for key, heading in columns.items():
        cells = [_cell(row.get(key)) for row in rows]
        is_number = any(isinstance(row.get(key), (int, float)) for row in rows)
        table.add_column(
            heading,
            justify="right" if is_number else "left",
            overflow="fold",
            # A narrow terminal breaks headings, not figures.
            min_width=max((len(word) for cell in cells for word in cell.split()), default=0),
        )
    for row in rows:
        table.add_row(*(_cell(row.get(key)) for key in columns))
    Console().print(table)


def write_json(file: Path, suite: str, rows: Sequence[Row]) -> None:
    report = {"suite": suite, "machine": machine(), "results": [dict(row) for row in rows]}
    file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _check_writable(file: Path) -> None:
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ValueError(f"--json: expected a file in an existing folder, got '{file}'")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cpu_model() -> str:
    found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(errors="replace"))
    return found[1] if found is not None else platform.machine()
