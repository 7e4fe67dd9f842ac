"""Installed: as a wheel, with the core's dependencies alone, and as a clone by its path."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import easyrl
from runs import SMALL, summary_of

ROOT = Path(__file__).parent.parent
PIP = sys.executable, "-m", "pip"


def call(*command, cwd):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def install(folder, *words, has_dependencies=False):
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(venv)}))
    if has_dependencies:  # those of this environment
        (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
        words = "--no-deps", "--no-index", *words
    done = call(*PIP, "--python", venv, "install", *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return packages


@pytest.mark.long
def test_clone_is_installed_by_its_path_and_works_from_the_folder_above(tmp_path):
    pytest.importorskip("setuptools", "77")
    clone = tmp_path / "easyrl"
    ignored = shutil.ignore_patterns(".*", "tests", "docs", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, clone, ignore=ignored)
    words = "--no-build-isolation", "--editable", clone
    packages = install(tmp_path, *words, has_dependencies=True)
    bin_ = tmp_path / "venv" / "bin"
    found = call(bin_ / "python", "-c", "import easyrl as e; print(e.__file__)", cwd=tmp_path)
    assert found.stdout.strip() == str(clone / "easyrl" / "__init__.py"), found.stderr
    assert call(bin_ / "easyrl", "--version", cwd=tmp_path).returncode == 0
    (packages / "easyrl").mkdir()  # another package of that name
    (packages / "easyrl" / "__init__.py").write_text("# coding=utf-8\n# Copyright (c) 2019\n")
    refused = call(bin_ / "easyrl", "--version", cwd=tmp_path)
    assert refused.returncode == 1 and "easyrl-train" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_install_commands_name_our_distribution():
    assert f'name = "{easyrl.DISTRIBUTION}"' in (ROOT / "pyproject.toml").read_text()
    found = call("git", "grep", "-nE", r"(^|[^-_a-z])easyrl\[", "--", ":!tests", cwd=ROOT)
    assert (found.returncode, found.stdout) == (1, ""), found.stderr


@pytest.mark.long
def test_commands_run_from_the_wheel_with_the_dependencies_of_the_core(tmp_path):
    sources = tmp_path / "sources"  # setuptools writes beside them
    subprocess.run(["git", "clone", "--quiet", ROOT, sources], check=True)
    done = call(*PIP, "wheel", "--no-deps", "--wheel-dir", tmp_path, sources, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("easyrl_train-*.whl")
    assert wheel.name.startswith(f"easyrl_train-{easyrl.__version__}-")
    packages = install(tmp_path, "--constraint", ROOT / "constraints.txt", wheel)
    assert not (packages / "matplotlib").exists() and not (packages / "datasets").exists()
    metadata = next(packages.glob("easyrl_train-*.dist-info")) / "METADATA"
    assert "Classifier: Operating System :: POSIX :: Linux" in metadata.read_text()
    bin_ = tmp_path / "venv" / "bin"
    found = call(bin_ / "python", "-c", "import easyrl; print(easyrl.__file__)", cwd=tmp_path)
    assert str(packages) in found.stdout, found.stderr
    assert not (packages / "benchmarks").exists()
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 8)
    data = "--dataset", "rows.jsonl", "--reward", "exact_match"
    for command in (
        ("grpo", "--output", "run", "--iterations", "3", *SMALL),
        ("plan", "run", "--devices", "8"),
        ("grpo", "--resume", "run", "--iterations", "4"),
        ("grpo", "--model", "run/model", *data, "--output", "own", "--iterations", "1", *SMALL),
        ("eval", "--model", "own", "--output", "eval", "data.num_held_out=4"),
        ("samples", "run"),
        ("doctor",),
    ):
        done = call(bin_ / "easyrl", *command, cwd=tmp_path)
        assert done.returncode == 0, (command, done.stderr)
    assert summary_of(tmp_path / "run")["policy_version"] == 4
    assert "missing: " in done.stdout and "report" in done.stdout


def test_hadolint_finds_nothing():
    linter = Path(sys.executable).parent / "hadolint"
    if not linter.exists():
        pytest.skip("hadolint is not installed: pip install 'easyrl-train[test]'")
    done = call(linter, ROOT / "Dockerfile", cwd=ROOT)
    assert done.returncode == 0, done.stdout
