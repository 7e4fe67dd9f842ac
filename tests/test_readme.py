"""The commands of README.md and docs/*.md run, made small (`pages.py`). Left out are also
benchmarks and commands for numbered devices.
"""

import re
import shutil
from itertools import combinations
from pathlib import Path

import pytest

from pages import ROOT, blocks, make_tools, run_block

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHORTER = {
    "grpo*--dry-run*|grpo*--help*": "",
    "grpo*--resume*": "--iterations 2 --no-live",
    "grpo*": "--iterations 2 --no-live train.prompts_per_iteration=2 rollout.num_generations=2 "
    "rollout.max_completion_length=8 data.num_held_out=2 data.max_prompt_length=32",
    "eval*": "--no-live data.num_held_out=2 eval.max_completion_length=8",
    "watch*": "--no-live",
}
"""Runs of two short iterations."""
REWARDS = """
def score(prompts, completions, completion_ids, answer, **columns):
    return [float(right in text) for text, right in zip(completions, answer)]
"""
SKIPPED = re.compile(
    r"pip install|bench|devices [0-9]|log_to|docker|\[--|SUITE|--install-completion"
)
FEATURES = (
    *("Ray", "several train ranks", "LoRA", "vLLM", "dynamic sampling"),
    *("several updates", "deterministic mode", "scaling", "resume", "environments"),
)
PAIRS = re.findall(
    r"^\| ([^|]+), ([^|]+) \| (.+) \|$", (ROOT / "docs/compatibility.md").read_text(), re.MULTILINE
)


COMMANDS = [
    (page, [block for block in blocks(page) if not SKIPPED.search(block)])
    for page in PAGES
    if page.parent.name != "tutorials"  # test_tutorials.py runs these
]


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """A folder with what the pages take for granted: a run, data and a reward."""
    folder = tmp_path_factory.mktemp("pages")
    make_tools(folder / "bin", SHORTER)
    (folder / "data.jsonl").write_text('{"prompt": "17+58=", "answer": "75"}\n')
    (folder / "my_rewards.py").write_text(REWARDS)
    run_block("easyrl grpo --output RUN", folder, folder / "bin")
    return folder


@pytest.mark.long
@pytest.mark.parametrize(
    ("page", "commands"),
    [each for each in COMMANDS if each[1]],
    ids=lambda value: value.name if isinstance(value, Path) else "",
)
def test_commands_of_a_page_run(page, commands, finished_run, tmp_path):
    shutil.copytree(finished_run / "RUN", tmp_path / "RUN")
    for name in ("data.jsonl", "my_rewards.py"):
        shutil.copy(finished_run / name, tmp_path / name)
    for command in commands:
        run_block(command, tmp_path, finished_run / "bin")


def test_links_lead_somewhere_and_files_that_the_design_names_exist():
    for page in PAGES:
        text = page.read_text()
        headings = re.findall(r"^#+ (.*)", text, flags=re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
        text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
            file, _, anchor = target.partition("#")
            assert (page.parent / file).exists() if file else anchor in anchors, target
    for name in re.findall(
        r"`([a-z_/]+\.(?:py|md|toml))[`,]", (ROOT / "docs/design.md").read_text()
    ):
        assert any((folder / name).exists() for folder in (ROOT, ROOT / "easyrl")), name


def test_every_pair_has_a_row():
    pairs = list(dict.fromkeys((one, other) for one, other, _ in PAIRS))
    assert pairs == list(combinations(FEATURES, 2))


def test_the_tests_and_messages_exist():
    sources = "\n".join(path.read_text() for path in (ROOT / "easyrl").rglob("*.py"))
    for one, other, text in PAIRS:
        named = re.search(r"`(test_\w+\.py)::(test_\w+)`(?: \((.+)\))?$", text)
        assert named, (one, other)
        file, test, case = named.groups()
        code = (ROOT / "tests" / file).read_text()
        assert f"def {test}(" in code, test
        assert case is None or f'"{case}"' in code, case
        if "refused" in text:
            message = re.search('refused, "(.+?)"', text)
            assert message and message[1] in sources, text
