"""The wheel: it contains all files that the demo needs."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from runs import SMALL, summary_of

ROOT = Path(__file__).parent.parent


@pytest.mark.long
def test_demo_runs_from_the_wheel_outside_the_checkout(tmp_path: Path) -> None:
    """The environment has EasyRL's dependencies, but not EasyRL."""

    def run(*command: str | Path, cwd: Path = tmp_path) -> str:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        done = subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    sources = tmp_path / "sources"  # setuptools writes beside them
    run("git", "clone", "--quiet", ROOT, sources)
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, sources)
    (wheel,) = tmp_path.glob("easyrl-*.whl")
    run(sys.executable, "-m", "venv", "venv")
    python = tmp_path / "venv/bin/python"
    run(python, "-m", "pip", "install", "--no-deps", wheel)
    # Packages there are found, but the .pth file of an editable EasyRL is not read.
    packages = Path(
        run(python, "-c", "import sysconfig as s; print(s.get_path('purelib'))").strip()
    )
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    assert str(packages) in run(python, "-c", "import easyrl; print(easyrl.__file__)")
    run(python.parent / "easyrl", "grpo", "--output", "run", "--iterations", "2", *SMALL)
    assert summary_of(tmp_path / "run")["policy_version"] == 2
