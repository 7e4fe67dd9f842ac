"""Commands of pages, and how they are run.

A block is fenced as bash, or indented and begins with `easyrl`. A block under a line
`<!-- not run: reason -->` is left out.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from own_processes import WAIT_SECONDS

ROOT = Path(__file__).parent.parent
TOOLS = {
    "python": '#!/bin/bash\nexec "$PYTHON" "$@"\n',
    # `easyrl` with the words that SHORTER has for the command
    "easyrl": '#!/bin/bash\nwords=("$@")\ncase "$1 $*" in\n%s\nesac\n'
    'exec "$PYTHON" -m easyrl "${words[@]}"\n',
}


def blocks(page: Path) -> Iterator[str]:
    left_out = r"<!-- not run:.*?-->\n(?:```bash\n.*?```|(?:    [^\n]*\n)+)"
    text = re.sub(left_out, "", page.read_text(), flags=re.DOTALL)
    block = r"^```bash\n(.*?)^```|((?:^    easyrl [^\n]*\n(?:^     [^\n]*\n)*)+)"
    for fenced, indented in re.findall(block, text, flags=re.DOTALL | re.MULTILINE):
        if fenced:
            yield fenced
            continue
        for command in indented.replace("\\\n", " ").splitlines():
            yield re.sub(r"\s+#.*", "", command).strip()


def make_tools(folder: Path, shorter: Mapping[str, str]) -> Path:
    """Write `easyrl` and `python` into a folder. `shorter`: words that are added to commands, by
    Bash's pattern of `COMMAND COMMAND WORDS`; the first that matches."""
    folder.mkdir()
    cases = "\n".join(f"{pattern}) words+=({words}) ;;" for pattern, words in shorter.items())
    for name, program in TOOLS.items():
        (folder / name).write_text(program % cases if "%s" in program else program)
        (folder / name).chmod(0o755)
    return folder


def run_block(code: str, folder: Path, tools: Path, timeout: float = WAIT_SECONDS) -> str:
    """Run a block in a folder; return what it prints. Fails with its output where it does."""
    environment = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"{code}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout
