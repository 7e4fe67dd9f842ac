"""Compare output with the files in tests/golden.

To write them anew, and to look at what has changed:

GOLDEN=write .venv/bin/python -m pytest tests/test_screens.py
git diff tests/golden
"""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).with_name("golden")


def check_golden(name: str, text: str) -> None:
    """Spaces at the ends of lines do not count."""
    text = "".join(line.rstrip() + "\n" for line in text.splitlines())
    file = FOLDER / f"{name}.txt"
    if os.environ.get("GOLDEN") == "write":
        FOLDER.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text()
