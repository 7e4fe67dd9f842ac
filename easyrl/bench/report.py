"""What a benchmark shows: a table on the screen, and JSON that says which machine it was."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from easyrl.cores import num_cores

Row = Mapping[str, Any]
CPUINFO_NAMES = ("model name", "Model", "Hardware")


def machine() -> dict[str, Any]:
    """What a figure depends on, besides the code."""
    return {
        "cpu": _cpu_model(),
        "cores": num_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "transformers": metadata.version("transformers"),
    }


def print_table(suite: str, results: Sequence[Row], columns: Mapping[str, str]) -> None:
    """One row per result; `columns`: the keys that are shown, and their headings."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    about = machine()
    table = Table(
        title=f"easyrl bench {suite}",
        box=SIMPLE_HEAD,  # leaves room for figures at 80 columns
        pad_edge=False,
        collapse_padding=True,
        caption=f"{about['cpu']}, {about['cores']} cores, torch {about['torch']}",
    )
    numeric = {key for row in results for key, value in row.items() if _is_number(value)}
    for key, heading in columns.items():
        words = [word for row in results for word in _shown(row.get(key)).split()]
        table.add_column(
            heading,
            justify="right" if key in numeric else "left",
            overflow="fold",
            min_width=max(map(len, words), default=0),  # a heading breaks before a figure does
        )
    for row in results:
        table.add_row(*(_shown(row.get(key)) for key in columns))
    Console().print(table)


def check_writable(file: Path) -> None:
    """Raise ValueError where `write_json` could not write."""
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ValueError(
            f"--json: '{file}' cannot be written; accepted: a file in a folder there is"
        )


def write_json(file: Path, suite: str, results: Sequence[Row]) -> None:
    report = {"suite": suite, "machine": machine(), "results": [dict(row) for row in results]}
    file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in CPUINFO_NAMES:
                return value.strip()
    return platform.processor() or platform.machine()
