"""The Dockerfile as text; no image is built."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
TEXT = (ROOT / "Dockerfile").read_text().replace("\\\n", "")
INSTRUCTIONS = [line.split(maxsplit=1) for line in TEXT.splitlines() if line[:1] not in ("", "#")]


def of(instruction: str, containing: str = "") -> list[str]:
    """Arguments of the instructions, in order."""
    return [rest for word, rest in INSTRUCTIONS if word == instruction and containing in rest]


def copied() -> list[str]:
    """The files of the repository that are copied, the dependencies' first."""
    sources = [rest.split()[:-1] for rest in of("COPY") if not rest.startswith("--from")]
    return [name for names in sources for name in names]


def test_copied_files_exist_and_are_not_ignored() -> None:
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] != "#"]
    assert rules[0] == "*" and {rule[1:] for rule in rules if rule[0] == "!"} == set(copied())
    assert all((ROOT / source).exists() for source in copied())
    assert {PROJECT["readme"], *PROJECT["license-files"]} <= set(copied())  # to build the package


def test_container_runs_easyrl_without_root_and_checks_it_with_the_doctor() -> None:
    assert of("USER") == ["${USER_ID}"]
    assert int(of("ARG", "USER_ID=")[0].partition("=")[2]) > 0
    assert of("HEALTHCHECK")[0].endswith('CMD ["easyrl", "doctor"]')
    assert of("ENTRYPOINT") == ['["easyrl"]']


@pytest.mark.parametrize("extras", ["", "lora,vllm"])
def test_requirements_are_those_of_pyproject(extras: str, tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (command,) = of("RUN", "tomllib")
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "EXTRAS": extras}
    subprocess.run(["bash", "-c", command], check=True, cwd=tmp_path, env=environment)
    wanted = [line for name in extras.split(",") if name for line in EXTRAS[name]]
    got = (tmp_path / "requirements.txt").read_text().splitlines()
    assert got == [*PROJECT["dependencies"], *wanted]


def test_hadolint_finds_nothing() -> None:
    linter = Path(sys.executable).parent / "hadolint"
    if not linter.exists():
        pytest.skip("hadolint is not installed: pip install 'easyrl-train[test]'")
    command = [linter, ROOT / "Dockerfile"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
