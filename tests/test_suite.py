"""The suite itself: whatever a test does, `make test` ends and names it."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import psutil

from own_processes import WAIT_SECONDS

ROOT = Path(__file__).parent.parent
HANGS = """
from pathlib import Path
from own_processes import popen

def test_hangs():
    process = popen(["sleep", "100000"])
    Path("pid").write_text(str(process.pid))
    process.wait()
"""
DIES = """
import os

def test_dies():
    os.kill(os.getpid(), 9)
"""
PASSES = """
def test_passes():
    pass
"""


def test_a_test_that_hangs_and_one_that_kills_its_process_end_the_suite_by_name(tmp_path):
    """With the options of `make test`, and more files than processes: pytest-xdist waits for ever
    where it replaces a process."""
    for name, text in {"a": HANGS, "b": DIES, "c": PASSES, "d": PASSES, "e": PASSES}.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    options = shlex.split(re.findall("^TESTS := (.*)$", makefile, re.MULTILINE)[0])
    environment = {name: os.environ[name] for name in os.environ if not name.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, *options, "-o", "timeout=2", "-o", "testpaths=."],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(ROOT / "tests")},
        timeout=WAIT_SECONDS,
        capture_output=True,
        text=True,
        check=False,
    )
    failed = re.findall(r"^FAILED \S+::(\w+)", done.stdout, re.MULTILINE)
    assert done.returncode == 1 and {*failed} == {"test_dies", "test_hangs"}, done.stdout
    assert "process.wait()" in done.stdout  # the stack
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))
