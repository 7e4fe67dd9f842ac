"""The commands of README.md, docs/*.md and the tutorials run, made small, and so does the notebook;
every file in configs/ is a run that would start.

Blocks of commands: see `pages.py`. Benchmarks and commands for numbered devices are not run.
"""

import json
import re
import shutil
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest
import yaml

from easyrl.config import load_config
from easyrl.data.hub import BUILT_IN_MODELS
from easyrl.rewards import sandbox
from easyrl.runtime.resume import with_absolute_paths
from hub_rows import put_in_place_of_the_hub
from judges import judge_server
from mistakes import TINY, change_json
from multimodal_models import DELTA_RULE, ROTARY, TEXT, multimodal_folder
from pages import blocks, make_tools, run_block
from real_models import real_model
from runs import easyrl, write_rows
from vision_processors import write_model_with_processor

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHORT_RUNS = {
    "grpo*--dry-run*|grpo*--help*": "",
    "grpo*--resume*": "--iterations 2 --no-live",
    "grpo*|--debug*": "--iterations 2 --no-live train.prompts_per_iteration=2 "
    "rollout.num_generations=2 rollout.max_completion_length=8 data.num_held_out=2 "
    "data.max_prompt_length=32",
    "eval*": "--no-live data.num_held_out=2 eval.max_completion_length=8",
    "watch*": "--no-live",
}
TRAINED = {
    "grpo*|--debug*": "--iterations 2 --no-live train.prompts_per_iteration=8 "
    "rollout.num_generations=8 rollout.max_completion_length=200 data.num_held_out=2",
}
"""Runs of a few seconds in which a reward that can move is above BY_ACCIDENT at least once."""
BY_ACCIDENT = 0.05  # a mean reward; partial credit for text that has nothing to do with the problem
NOT_TRAINED = re.compile(r"--assume|--resume|--help|RUN|configs/")
REWARDS = """
def score(prompts, completions, completion_ids, answer, **columns):
    return [float(right in text) for text, right in zip(completions, answer)]
"""
SKIPPED = re.compile(
    r"pip install|bench|devices [0-9]|log_to|docker|\[--|STUDENT|MODEL|SUITE|--install"
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
    if page.parent.name != "tutorials"
]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder with what the pages take for granted: a run, data and a reward."""
    folder = tmp_path_factory.mktemp("pages")
    make_tools(folder / "bin", SHORT_RUNS)
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
def test_commands_of_a_page_run(page, commands, prepared, tmp_path):
    shutil.copytree(prepared / "RUN", tmp_path / "RUN")
    for name in ("data.jsonl", "my_rewards.py"):
        shutil.copy(prepared / name, tmp_path / name)
    for command in commands:
        run_block(command, tmp_path, prepared / "bin")


EXAMPLES = [
    (page, commands)
    for page, commands in COMMANDS
    if any("grpo" in each and not NOT_TRAINED.search(each) for each in commands)
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("page", "commands"),
    EXAMPLES,
    ids=lambda value: value.name if isinstance(value, Path) else "",
)
def test_an_example_that_trains_has_a_reward_that_moves(page, commands, prepared, tmp_path):
    """A page must not teach a reward that is always 0. A dry run is run as it would train."""
    tools = make_tools(tmp_path / "bin", TRAINED)
    for name in ("data.jsonl", "my_rewards.py"):
        shutil.copy(prepared / name, tmp_path / name)
    for command in commands:
        makes_files = "<<'END'" in command
        if makes_files or ("grpo" in command and not NOT_TRAINED.search(command)):
            run_block(command.replace(" --dry-run", ""), tmp_path, tools, timeout=600)
    files = sorted(tmp_path.rglob("metrics.jsonl"))
    assert files
    for file in files:
        settings = file.with_name("config.yaml").read_text()
        rewards = [json.loads(line)["reward"] for line in file.open()]
        summary = json.loads(file.with_name("summary.json").read_text())
        assert max(rewards) > BY_ACCIDENT, settings
        assert summary["nothing_learned"] is None, settings  # a group with rewards that differ


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


TUTORIALS = ROOT / "docs" / "tutorials"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
SHORT_TUTORIALS = {
    "grpo*--dry-run*": "",
    "grpo*": "--no-live --iterations 2 train.prompts_per_iteration=2 rollout.num_generations=4 "
    "data.num_held_out=4",
    "eval*--config*": "--no-live data.num_held_out=4",
    "eval*": "--no-live",  # the problems of the run
}


@pytest.fixture(scope="module")
def smollm2():
    pytest.importorskip("gguf", reason="pip install 'easyrl-train[real]'")
    pytest.importorskip("reasoning_gym")
    return str(real_model("smollm2"))


@pytest.mark.long
def test_smollm2_from_nothing_to_an_exported_model(smollm2, tmp_path):
    tools, folder = make_tools(tmp_path / "bin", SHORT_TUTORIALS), tmp_path / "work"
    folder.mkdir()
    printed = [
        run_block(block.replace(HUB_ID, smollm2), folder, tools, timeout=900)
        for block in blocks(TUTORIALS / "smollm2.md")
    ]
    assert "<|im_start|>user" in printed[1] and printed[-1].strip()
    settings = yaml.safe_load((folder / "smollm2.yaml").read_text().replace(smollm2, HUB_ID))
    shipped = yaml.safe_load((ROOT / "configs" / "smollm2.yaml").read_text())
    assert shipped["train"].pop("keep_checkpoints") == 0
    assert settings == shipped
    assert (folder / "smollm2-run" / "report.html").stat().st_size > 10_000
    compared = json.loads((folder / "after" / "eval.json").read_text())
    assert compared["num_problems"] == 4


@pytest.mark.long
def test_the_notebook_runs(smollm2, tmp_path):
    notebook = json.loads((ROOT / "examples" / "smollm2.ipynb").read_text())
    cells = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    code = "\n".join(re.sub(r"^%.*", "", cell, flags=re.MULTILINE) for cell in cells)
    changes = {
        HUB_ID: smollm2,
        "ITERATIONS = 60": "ITERATIONS = 1",
        "HELD_OUT = 256": "HELD_OUT = 2",
    }
    for old, new in {**changes, "PROMPTS = 16": "PROMPTS = 2"}.items():
        assert old in code
        code = code.replace(old, new)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert (tmp_path / "my-model" / "config.json").is_file()


@pytest.mark.long
def test_a_model_learns_to_use_a_tool(tmp_path):
    tools, folder = make_tools(tmp_path / "bin", {"grpo*|eval*": "--no-live"}), tmp_path / "work"
    folder.mkdir()
    for block in blocks(TUTORIALS / "tool.md"):
        run_block(block, folder, tools, timeout=900)
    lines = [json.loads(line) for line in (folder / "drawers" / "metrics.jsonl").open()]
    assert lines[0]["reward"] < 0.5
    assert lines[-1]["reward"] > 0.8
    assert json.loads((folder / "after" / "eval.json").read_text())["accuracy"] > 0.7


def test_the_tutorial_for_a_gpu_says_that_it_has_not_run_and_its_settings_are_read(tmp_path):
    page = TUTORIALS / "one_gpu.md"
    assert '!!! warning "Not run yet"' in page.read_text()
    (block,) = blocks(page)
    tools = make_tools(tmp_path / "bin", {})
    run_block(block + "\neasyrl config --config gsm8k.yaml", tmp_path, tools)


RECIPES = sorted((ROOT / "configs").glob("*.yaml"))
CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory):
    """Models with a chat template, and with the positions of those that recipes name: one that
    reads text, a Qwen3.5 whose tower is kept as it is, and one that reads pictures."""
    folder = tmp_path_factory.mktemp("models")
    text = folder / "text"
    shutil.copytree(TINY, text)
    change_json("config.json", max_position_embeddings=32768)(text)
    longer = TEXT | DELTA_RULE | {"rope_parameters": ROTARY, "max_position_embeddings": 32768}
    tower = multimodal_folder(folder / "tower", "qwen3_5", text_config=longer)
    for made in (text, tower):
        change_json("tokenizer_config.json", chat_template=CHAT)(made)
    pictures = folder / "pictures"
    write_model_with_processor(pictures, "qwen3_5", max_position_embeddings=4096)
    return {"text": text, "tower": tower, "pictures": pictures}


@pytest.fixture
def _user_files(tmp_path, monkeypatch):
    """Make the user's files that recipes name, and the hub's rows."""
    monkeypatch.chdir(tmp_path)
    put_in_place_of_the_hub(monkeypatch)
    monkeypatch.setattr(sandbox, "find_variant", lambda kind: kind)  # the machine's matter
    shutil.copytree(TINY, tmp_path / "demo" / "model")  # a teacher
    write_rows(tmp_path / "data.jsonl", [{"prompt": "What is 17+58?", "answer": "75"}])
    row = {"question": "Write add(a, b).", "tests": ["assert add(1, 2) == 3"]}
    write_rows(tmp_path / "problems.jsonl", [row])
    (tmp_path / "my_rewards.py").write_text(REWARDS)


@pytest.mark.usefixtures("_user_files")
@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_would_start_and_runs_dry(file, stand_ins):
    """On a stand-in for its model, of the same kind, and rows as its data set has them."""
    flags = {"devices.infer": "cpu", "devices.train": "cpu"}
    if load_config(file).model.path not in BUILT_IN_MODELS:
        kinds = {"qwen3_5": "tower", "qwen3_5_vision": "pictures"}
        flags["model.path"] = str(stand_ins[kinds.get(file.stem, "text")])
    with judge_server() as server:
        if file.stem == "judge":
            flags["reward.judge.url"] = server.url
        words = [f"{key}={value}" for key, value in flags.items()]
        result = easyrl("grpo", "--config", file, "--dry-run", *words)
    assert result.exit_code == 0, result.output
    assert ("LoRA of rank" in result.output) == (load_config(file).model.lora.rank is not None)
    shown = Path("shown.yaml")
    shown.write_text(result.output)
    assert load_config(shown) == with_absolute_paths(load_config(file, flags))  # as in config.yaml
