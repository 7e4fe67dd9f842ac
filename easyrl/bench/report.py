"""Run a benchmark suite, print its table, and write JSON that describes the machine."""

from __future__ import annotations

import importlib
import json
import os
import platform
import re
import signal
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from easyrl.bench.measure import Row
from easyrl.processes import num_cores
from easyrl.runtime.supervisor import SIGNALLED, WorkerFailure


def run_suite(name: str, json_file: Path | None, **options: Any) -> int:
    """Run the suite with `options` and return the exit code. Raises ValueError if `json_file`
    cannot be written, before anything is measured."""
    if json_file is not None:
        existing = json_file if json_file.exists() else json_file.parent
        if json_file.is_dir() or not os.access(existing, os.W_OK):
            raise ValueError(f"--json: expected a file in an existing folder, got '{json_file}'")
    try:
        rows = list(importlib.import_module(f"easyrl.bench.{name}").run(**options))
    except KeyboardInterrupt as error:
        return SIGNALLED + int(getattr(error, "signum", signal.SIGINT))
    except WorkerFailure as failure:
        print(f"easyrl: {failure}", file=sys.stderr)
        return 1
    about = machine()
    print(f"easyrl bench {name}: {about['cpu']}, {about['cores']} cores, torch {about['torch']}")
    print_table(rows)
    if json_file is not None:
        report = {"suite": name, "machine": about, "results": rows}
        json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


def machine() -> dict[str, Any]:
    """Return the machine and the library versions."""
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


def print_table(rows: Sequence[Row]) -> None:
    """Print a line per figure, and in it a column per row."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = [[_cell(row.get(name)) for name in names] for row in rows]
    widths = [max(map(len, column)) for column in columns]
    for name, *cells in zip(names, *columns, strict=True):
        padded = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        print(name.ljust(max(map(len, names))), *padded)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
    return "" if value is None else str(value)
