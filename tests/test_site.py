"""The site is built without a warning, and what a public repository has is consistent."""

import os
import re
import runpy
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

import easyrl
from easyrl.cli import NAMES, PANELS, app
from easyrl.config import load_config

ROOT = Path(__file__).parent.parent
DOCS, GITHUB = ROOT / "docs", ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def site():
    """The site of `make docs`, made again if a source is newer."""
    pytest.importorskip("mkdocs", reason="pip install 'easyrl-train[docs]'")
    pytest.importorskip("mkdocstrings")
    folder = ROOT / "build" / "site"
    sources = [ROOT / "mkdocs.yml", *DOCS.rglob("*"), *(ROOT / "easyrl").rglob("*.py")]
    newest = max(file.stat().st_mtime for file in sources)
    if not folder.is_dir() or (folder / "index.html").stat().st_mtime < newest:
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_has_every_command_setting_and_public_name(site):
    commands, api = (site / "commands.html").read_text(), (site / "api.html").read_text()
    assert sum(map(len, PANELS.values())) == len(app.registered_commands)
    for functions in PANELS.values():
        for each in functions:
            assert f'id="easyrl-{NAMES.get(each, each.__name__)}"' in commands
    assert "--dry-run" in commands and "model.lora.rank" in (site / "settings.html").read_text()
    for name in {*easyrl.__all__} - {"Config", "__version__"}:
        assert re.search(rf'id="easyrl\.[\w.]*{name}"', api), name


def test_every_page_is_in_the_navigation_and_nothing_is_loaded_from_elsewhere(site):
    shown = (ROOT / "mkdocs.yml").read_text()
    for page in DOCS.rglob("*.md"):
        assert f": {page.relative_to(DOCS)}\n" in shown, page
    loads = re.compile(r'<(?:script|link rel="stylesheet"|img)[^>]*(?:src|href)="(https?:[^"]+)')
    for page in site.rglob("*.html"):
        assert not loads.findall(page.read_text()), page


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_workflows_run_what_is_there_and_may_only_read(file):
    workflow = yaml.safe_load(file.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow[True]  # the key `on`, as YAML reads it
    for name, job in workflow["jobs"].items():
        assert job["runs-on"] and job["timeout-minutes"], name
        assert set(job.get("needs", "").split()) <= workflow["jobs"].keys()
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step), step
            words = shlex.split(step.get("run", ""))
            assert words[:1] != ["make"] or set(words[1:]) <= set(TARGETS), step
            assert re.fullmatch(r"[\w-]+/[\w-]+@[\w./]+", step.get("uses", "a/b@v1")), step


def test_converted_commands_of_other_trainers_are_read():
    text = (DOCS / "migrating.md").read_text()
    commands = re.findall(r"^```bash\n(easyrl grpo .*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(commands) == 2
    for command in commands:
        words = shlex.split(command.replace("\\\n", " "))
        settings = [word for word in words if re.match(r"\w+\.\w+=", word)]
        assert len(settings) >= 8
        load_config(words=settings)


def test_the_images_health_check_finds_a_run_without_events(tmp_path):
    dockerfile = (ROOT / "Dockerfile").read_text()
    found = re.search(r"RUN (printf [^>]*) > /usr/local/bin/easyrl-healthy", dockerfile)
    script = subprocess.check_output(["bash", "-c", found[1].replace("\\\n", " ")], text=True)
    script = script.replace("/proc/[0-9]*", "/proc/self")
    trace = tmp_path / "trace.json"

    def check():  # while a process holds the folder open, as a run's controller does
        command = ["bash", "-c", 'exec 9<"$1"; eval "$2"', "check", tmp_path, script]
        return subprocess.run(command, capture_output=True, check=False).returncode

    assert check() == 0  # no run
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "control.sock"))
        trace.touch()
        assert check() == 0
        os.utime(trace, (time.time() - 3600,) * 2)
        assert check() == 1


@pytest.mark.long
def test_the_page_of_sizes_is_what_its_script_prints():
    command = [sys.executable, DOCS / "sizing.py"]
    assert subprocess.check_output(command, text=True) == (DOCS / "sizing.md").read_text()


@pytest.fixture(scope="module")
def families():
    """The script of the page of families, on the release of transformers that the page names."""
    transformers = pytest.importorskip("transformers")
    if not transformers.__version__.startswith("5.24."):
        pytest.skip("the page is of transformers 5.24")
    return runpy.run_path(str(DOCS / "families.py"))


@pytest.mark.parametrize("model_type", ["qwen3", "lfm2", "mamba"])
def test_a_row_of_the_page_of_families_is_what_loading_decides(model_type, families):
    rows = (DOCS / "families.md").read_text().splitlines()
    assert families["decide"](model_type).row() in rows


@pytest.mark.long
def test_the_page_of_families_is_what_its_script_prints(families):
    assert families["families_markdown"]() == (DOCS / "families.md").read_text()
