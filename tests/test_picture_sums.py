"""The task `picture-sums`, the built-in model that reads it, and the recipes with pictures."""

import io
import json
import signal

import numpy as np
import pytest
from PIL import Image
from test_plan import ROOT

from easyrl import formatting
from easyrl.config import ConfigError
from easyrl.data.picture_sums import (
    CELL,
    DIGITS,
    GLYPH_HEIGHT,
    GLYPH_WIDTH,
    NUM_CELLS,
    PICTURE_SUMS,
)
from runs import easyrl, finish_after, succeed, summary_of

DEMO = ("--config", str(ROOT / "configs" / "vision.yaml"), "--no-live")
SHORT = (
    *("runtime.deterministic=true", "data.num_held_out=0"),
    *("train.prompts_per_iteration=2", "rollout.num_generations=2", "train.save_every=1"),
)


def test_without_pillow_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setattr(formatting.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"picture-sums needs PIL.*pip install '.*\[vision\]'"):
        PICTURE_SUMS.train_row(0, 0)


def digits_in(pixels):
    """Read the digits from a picture as a person would: for each row of cells, by their shapes."""
    paper = pixels[0, 0]
    has_ink = (pixels != paper).any(-1)
    shapes = {digit: glyph.replace(" ", "") for digit, glyph in enumerate(DIGITS)}
    rows = []
    for row in range(NUM_CELLS):
        found = ""
        for column in range(NUM_CELLS):
            cell = has_ink[CELL * row : CELL * (row + 1), CELL * column : CELL * (column + 1)]
            for top in range(CELL - GLYPH_HEIGHT + 1):
                for left in range(CELL - GLYPH_WIDTH + 1):
                    part = cell[top : top + GLYPH_HEIGHT, left : left + GLYPH_WIDTH]
                    shape = "".join("#" if ink else "." for ink in part.flat)
                    if part.sum() == cell.sum():
                        found += "".join(str(d) for d in shapes if shapes[d] == shape)
        if found:
            rows.append(int(found))
    return rows


def test_pictures_show_the_numbers_that_are_added():
    rows = [PICTURE_SUMS.train_row(3, index) for index in range(50)]
    counts = set()
    for index, row in enumerate(rows):
        image = Image.open(io.BytesIO(row["image"]["bytes"]))
        assert image.mode == "RGB" and image.size == (40, 40)
        pixels = np.asarray(image)
        numbers = digits_in(pixels)
        assert numbers == list(PICTURE_SUMS.problem(3, index))
        assert row["answer"] == str(sum(numbers))
        counts.add(len(numbers))
        colors = {tuple(color) for color in pixels.reshape(-1, 3).tolist()}
        assert len(colors) == 2
    assert counts == {2, 3, 4}
    assert rows == [PICTURE_SUMS.train_row(3, index) for index in range(50)]
    held_out = {row["image"]["bytes"] for row in PICTURE_SUMS.held_out_rows()}
    assert len(held_out) == 256
    assert held_out.isdisjoint(row["image"]["bytes"] for row in rows)


@pytest.mark.parametrize("recipe", ["vision.yaml", "qwen3_5_vision.yaml"])
def test_recipes_with_pictures_are_planned(recipe):
    """The data of Geometry3K and Qwen3.5-2B are on the hub, so that others are given."""
    words = ["--config", str(ROOT / "configs" / recipe), "--dry-run"]
    if recipe == "qwen3_5_vision.yaml":
        words += ["--model", "tiny-vision", "--dataset", "picture-sums", "--assume", "2x80GiB"]
        words += ["model.dtype=float32", "data.prompt_template=null", "data.max_image_pixels=null"]
        words += ["data.max_prompt_length=64", "rollout.max_completion_length=64"]
    result = easyrl("grpo", *words)
    assert result.exit_code == 0, result.output
    assert "<image>[x25]Sum?" in result.output


def test_the_demo_with_pictures_runs_and_can_be_read(tmp_path):
    run = tmp_path / "run"
    succeed(*DEMO, *SHORT, "--iterations", "1", "output.samples=null", "--output", str(run))
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert len(lines) == 4
    for line in lines:
        assert "<image>" in line["prompt"] and (run / line["pictures"][0]).is_file()
    assert any("#" in line["completion"] for line in lines), "it answers as it was taught"


@pytest.mark.long
def test_the_demo_with_pictures_has_the_same_bits_in_each_way(tmp_path):
    """Under both schedules, and killed and resumed."""
    words = (*DEMO, *SHORT, "--iterations", "4")
    succeed(*words, "--output", str(tmp_path / "periodic"))
    expected = summary_of(tmp_path / "periodic")["weights_sha256"]
    succeed(*words, "--schedule", "sync", "--output", str(tmp_path / "sync"))
    assert summary_of(tmp_path / "sync")["weights_sha256"] == expected
    resumed = tmp_path / "resumed"
    finish_after("iteration 2", kill, *words, "--output", str(resumed))
    succeed("--resume", str(resumed), "--no-live")
    assert summary_of(resumed)["weights_sha256"] == expected


def kill(process):
    process.send_signal(signal.SIGKILL)
