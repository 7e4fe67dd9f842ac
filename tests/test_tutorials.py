"""The tutorials and the notebook run to their ends; the one that needs a GPU is planned."""

import json
import re
import subprocess
import sys

import pytest
import yaml

from pages import ROOT, blocks, make_tools, run_block
from real_models import real_model

TUTORIALS = ROOT / "docs" / "tutorials"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
SHORTER = {
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
    tools, folder = make_tools(tmp_path / "bin", SHORTER), tmp_path / "work"
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
