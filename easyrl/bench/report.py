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


def run_suite(name: str, json_file: Path | None, **options: Any) -> int:
    """Run the suite with `options` and return the exit code. Raises ValueError if `json_file`
    cannot be written, before anything is measured."""
    if json_file is not None:
        existing = json_file if json_file.exists() else json_file.parent
        if json_file.is_dir() or not os.access(existing, os.W_OK):
            raise ValueError(f"--json: expected a file in an existing folder, got '{json_file}'")
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
    about = machine()
    caption = f"{about['cpu']}, {about['cores']} cores, torch {about['torch']}"
    print_table(rows, suite.COLUMNS, title=f"easyrl bench {name}", caption=caption)
    if json_file is not None:
        report = {"suite": name, "machine": about, "results": rows}
        json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


def machine() -> dict[str, Any]:
    """What the figures depend on besides the code."""
    cpu = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(errors="replace"))
    return {
        "cpu": cpu[1] if cpu is not None else platform.machine(),
        "cores": num_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "transformers": metadata.version("transformers"),
    }


def print_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], **titles: str) -> None:
    """Print a row per result. `columns`: the keys to show."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, **titles)  # type: ignore[arg-type]
    for key in columns:
        is_number = any(isinstance(row.get(key), int | float) for row in rows)
        # A narrow terminal breaks headings, not figures.
        width = max(len(_cell(row.get(key))) for row in rows)
        table.add_column(
            key.replace("_", " "),
            justify="right" if is_number else "left",
            overflow="fold",
            min_width=width,
        )
    for row in rows:
        table.add_row(*(_cell(row.get(key)) for key in columns))
    Console().print(table)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
