"""Compare output with the files in tests/golden.

To write them anew, and to look at what has changed:

    GOLDEN=write .venv/bin/python -m pytest tests/test_screens.py
    git diff tests/golden
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import pytest

FOLDER = Path(__file__).with_name("golden")


def check_golden(name: str, text: str) -> None:
    """Spaces at the ends of lines do not count."""
    lines, file = [line.rstrip() for line in text.splitlines()], FOLDER / f"{name}.txt"
    if os.environ.get("GOLDEN") == "write":
        FOLDER.mkdir(exist_ok=True)
        file.write_text("\n".join(lines) + "\n")
    expected = file.read_text().splitlines()
    if lines != expected:
        changes = difflib.unified_diff(expected, lines, f"tests/golden/{file.name}", "now", "", "")
        pytest.fail("\n".join(changes), pytrace=False)
