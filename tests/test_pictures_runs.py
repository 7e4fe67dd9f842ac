"""Whole runs on pictures, with a tiny random model and its own processor."""

import json
import os
import signal

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText

from easyrl.model.checkpoint_files import checkpoints_in
from runs import finish_after, succeed, summary_of
from vision_processors import processor_folder

NUM_ROWS = 6
SETTINGS = (
    *("--no-live", "--reward", "mine.py:mean_id", "runtime.deterministic=true"),
    *("train.prompts_per_iteration=4", "rollout.num_generations=3", "data.num_held_out=0"),
    *("rollout.max_completion_length=8", "data.max_prompt_length=64", "data.chat=true"),
    *("train.learning_rate=0.01", "train.max_tokens_per_micro_batch=100"),
)
REWARD = """
def mean_id(prompts, completions, completion_ids, **columns):
    return [sum(ids) / len(ids) / 100 for ids in completion_ids]
"""


def write_model(folder, family="qwen2_5_vl", **vision):
    """Write a model with random weights into a folder, with tokenizer and processor."""
    processor_folder(folder, family)
    config = AutoConfig.from_pretrained(folder)
    for name, value in vision.items():
        setattr(config.vision_config, name, value)
    torch.manual_seed(1)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(1.0 if "norm" in name and "bias" not in name else 0.0, 0.1)
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A folder with a model, pictures, rows and a reward."""
    folder = tmp_path_factory.mktemp("inputs")
    write_model(folder / "model")
    (folder / "mine.py").write_text(REWARD)
    rows = []
    for number in range(NUM_ROWS):
        pixels = np.random.default_rng(number).integers(0, 256, (50, 70, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        rows.append({"prompt": f"What is {number}?", "image": f"{number}.png"})
    del rows[-1]["image"]  # a row of text alone
    rows[-1]["image"] = None
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def words_for(inputs, output, *words):
    places = ("--model", str(inputs / "model"), "--dataset", str(inputs / "rows.jsonl"))
    return (*places, "--output", str(output), *SETTINGS, *words)


@pytest.fixture(scope="module")
def run(inputs, tmp_path_factory):
    output = tmp_path_factory.mktemp("run") / "periodic"
    os.chdir(inputs)
    succeed(*words_for(inputs, output, "--iterations", "3", "train.save_every=1"))
    return output


def test_both_schedules_and_a_resumed_run_end_in_the_same_bits(inputs, run, tmp_path):
    expected = summary_of(run)["weights_sha256"]
    sync = words_for(inputs, tmp_path / "sync", "--iterations", "3", "--schedule", "sync")
    succeed(*sync)
    assert summary_of(tmp_path / "sync")["weights_sha256"] == expected
    words = words_for(inputs, tmp_path / "resumed", "--iterations", "3", "train.save_every=1")
    finish_after("iteration 2", lambda process: process.send_signal(signal.SIGKILL), *words)
    assert checkpoints_in(tmp_path / "resumed" / "checkpoints")
    succeed("--resume", str(tmp_path / "resumed"), "--no-live")
    assert summary_of(tmp_path / "resumed")["weights_sha256"] == expected
