"""The table of docs/compatibility.md has every pair of features, and the tests that it names."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).parent.parent
FEATURES = (
    *("Ray", "several train ranks", "LoRA", "vLLM", "dynamic sampling"),
    *("several updates", "deterministic mode", "scaling", "resume", "environments"),
)
ROWS = re.findall(
    r"^\| ([^|]+), ([^|]+) \| (.+) \|$", (ROOT / "docs/compatibility.md").read_text(), re.MULTILINE
)


def test_every_pair_has_a_row() -> None:
    pairs = list(dict.fromkeys((one, other) for one, other, _ in ROWS))
    assert pairs == list(combinations(FEATURES, 2))


def test_the_tests_and_messages_exist() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "easyrl").rglob("*.py"))
    for one, other, text in ROWS:
        named = re.search(r"`(test_\w+\.py)::(test_\w+)`(?: \((.+)\))?$", text)
        assert named, (one, other)
        file, test, case = named.groups()
        code = (ROOT / "tests" / file).read_text()
        assert f"def {test}(" in code, test
        assert case is None or f'"{case}"' in code, case
        if "refused" in text:
            message = re.search('refused, "(.+?)"', text)
            assert message and message[1] in sources, text
