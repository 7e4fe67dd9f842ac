"""Whole runs on pictures, with tiny random models and their own processors."""

import json
import signal

import numpy as np
import pytest
from PIL import Image
from transformers import AutoModelForImageTextToText

from easyrl.data.pictures import read_picture
from easyrl.model.loading import PictureInput, load_policy
from easyrl.model.processor import load_processor
from multimodal_models import same_bits, stored
from runs import (
    assert_on_policy,
    bits_of,
    easyrl,
    finish,
    finish_after,
    kill_worker,
    lines_of,
    succeed,
    summary_of,
)
from vision_processors import NEEDS_TORCHVISION, has_torchvision, write_model_with_processor

NUM_ROWS = 6
SETTINGS = (
    *("--no-live", "runtime.deterministic=true", "data.num_held_out=0"),
    *("train.prompts_per_iteration=4", "rollout.num_generations=3", "data.chat=true"),
    *("rollout.max_completion_length=8", "data.max_prompt_length=64"),
    *("train.learning_rate=0.01", "train.max_tokens_per_micro_batch=100", "--iterations", "3"),
)
REWARD = """
def mean_id(prompts, completions, completion_ids, image, **columns):
    assert len(image) == len(completions) and (image[0] is None or image[0].mode == "RGB")
    return [sum(ids) / len(ids) / 100 for ids in completion_ids]
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A folder with models, pictures, rows, of which one is of text, and a reward."""
    folder = tmp_path_factory.mktemp("inputs")
    for family in ("qwen2_5_vl", "gemma3", "qwen3_5"):
        write_model_with_processor(folder / family, family)
    (folder / "mine.py").write_text(REWARD)
    rows = []
    for number in range(NUM_ROWS):
        pixels = np.random.default_rng(number).integers(0, 256, (50, 70, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        rows.append({"prompt": f"What is {number}?", "image": f"{number}.png"})
    rows.append({"prompt": "What is this?", "image": None})
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def words_for(inputs, output, *words, family="qwen2_5_vl"):
    places = ("--model", str(inputs / family), "--dataset", str(inputs / "rows.jsonl"))
    reward = ("--reward", f"{inputs / 'mine.py'}:mean_id")
    return (*places, *reward, "--output", str(output), *SETTINGS, *words)


@pytest.fixture(scope="module")
def run(inputs, tmp_path_factory):
    output = tmp_path_factory.mktemp("run") / "periodic"
    succeed(*words_for(inputs, output, "train.save_every=1"))
    return output


def test_both_schedules_and_a_killed_and_resumed_run_end_in_the_same_bits(inputs, run, tmp_path):
    expected = summary_of(run)["weights_sha256"]
    succeed(*words_for(inputs, tmp_path / "sync", "--schedule", "sync"))
    assert summary_of(tmp_path / "sync")["weights_sha256"] == expected
    resumed = tmp_path / "resumed"
    words = words_for(inputs, resumed, "train.save_every=1")
    finish_after("iteration 2", lambda process: process.send_signal(signal.SIGKILL), *words)
    succeed("--resume", str(resumed), "--no-live")
    assert summary_of(resumed)["weights_sha256"] == expected


def test_a_frozen_tower_is_written_as_it_was(inputs, run, tmp_path):
    before = stored(inputs / "qwen2_5_vl")
    after = stored(run / "model")
    assert after.keys() == before.keys()
    for name, weight in before.items():
        assert same_bits(weight, after[name]) == ("visual" in name), name
    _, info = AutoModelForImageTextToText.from_pretrained(run / "model", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert load_processor(str(run / "model")).arrays([read_picture(inputs / "0.png")])
    # The checkpoint of the last iteration gives the same model.
    exported = easyrl("export", str(run), str(tmp_path / "exported"))
    assert exported.exit_code == 0
    again = stored(tmp_path / "exported")
    assert all(same_bits(weight, again[name]) for name, weight in after.items())


@pytest.mark.parametrize("family", ["qwen2_5_vl", pytest.param("gemma3", marks=pytest.mark.long)])
def test_a_trained_tower_learns_and_is_exported(inputs, tmp_path, family):
    output = tmp_path / "run"
    harder = ("model.vision=trained", "algorithm.beta=0.05", "train.updates_per_iteration=2")
    succeed(*words_for(inputs, output, *harder, "train.save_every=1", family=family))
    before = stored(inputs / family)
    after = stored(output / "model")
    assert after.keys() == before.keys()
    tower = {name for name in before if "visual" in name or "vision_tower" in name}
    assert any(not same_bits(before[name], after[name]) for name in tower)
    assert easyrl("export", str(output), str(tmp_path / "exported")).exit_code == 0
    again = stored(tmp_path / "exported")
    assert all(same_bits(weight, again[name]) for name, weight in after.items())
    metrics = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    largest = max(each["sampling/sampling_logp_difference/max"] for each in metrics)
    assert largest <= 1e-4, "the engine and the trainer agree"


@pytest.mark.parametrize("vision", ["frozen", pytest.param("trained", marks=pytest.mark.long)])
def test_two_ranks_end_in_the_weights_of_one(inputs, run, tmp_path, vision):
    one = run
    setting = f"model.vision={vision}"
    if vision == "trained":
        one = tmp_path / "one"
        succeed(*words_for(inputs, one, setting))
    two = tmp_path / "two"
    succeed(*words_for(inputs, two, setting, "--train-devices", "cpu:2"))
    before, expected, got = (
        stored(folder) for folder in (inputs / "qwen2_5_vl", one / "model", two / "model")
    )
    assert got.keys() == expected.keys()
    for name, weight in expected.items():
        if vision == "frozen" and "visual" in name:
            assert same_bits(got[name], weight), name
            continue
        gap = float((got[name] - weight).norm() / weight.norm())
        moved = float((before[name] - weight).norm() / weight.norm())
        assert gap <= 1e-5 and gap < moved / 100, name
    lines = zip(lines_of(two / "metrics.jsonl"), lines_of(one / "metrics.jsonl"), strict=True)
    for metrics, others in lines:
        for name in ("grad_norm", "entropy", "reward"):
            assert metrics[name] == pytest.approx(others[name], rel=1e-4), name


def test_adapters_train_on_pictures(inputs, tmp_path):
    output = tmp_path / "run"
    succeed(*words_for(inputs, output, "model.lora.rank=2", "model.vision=trained"))
    assert summary_of(output)["policy_version"] == 3


@pytest.mark.parametrize("family", ["qwen3_5", pytest.param("lfm2_vl", marks=pytest.mark.long)])
def test_schedules_and_a_lost_worker_change_no_bit_of_a_hybrid(inputs, tmp_path, family):
    """Completions continue recurrent states that have read the picture."""
    if family in NEEDS_TORCHVISION:
        if not has_torchvision():
            pytest.skip("its processor needs torchvision")
        write_model_with_processor(inputs / family, family)
    longer = ("data.max_prompt_length=100", "train.max_tokens_per_micro_batch=150")
    sync, lost = tmp_path / "sync", tmp_path / "lost"
    succeed(*words_for(inputs, sync, *longer, "--schedule", "sync", family=family))
    assert_on_policy(sync)
    words = words_for(inputs, lost, *longer, family=family)
    code, _, error = finish_after("iteration 1/", kill_worker, *words, EASYRL_RANDOM_DELAYS="0.1")
    assert (code, error) == (0, "")
    assert summary_of(lost)["worker_restarts"] == 1
    assert bits_of(lost) == bits_of(sync)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("rollout.engine=vllm",), "rollout.engine"),
        (("train.compile=true",), "train.compile"),
        (("data.max_image_bytes=1000",), "data.max_image_bytes"),
        (("--model", "tiny"), "model.path"),
    ],
)
def test_what_does_not_go_with_pictures_is_refused(inputs, tmp_path, words, named):
    code, _, error = finish(*words_for(inputs, tmp_path / "run", *words))
    assert code != 0 and named in error
    assert not (tmp_path / "run" / "logs").exists()


def test_a_picture_that_the_check_uses_is_read_by_the_processor(inputs):
    """The real arrays, at load and in a forward."""
    processor = load_processor(str(inputs / "gemma3"))
    pictures = PictureInput(processor.arrays, processor.placeholder_ids)
    policy = load_policy(str(inputs / "gemma3"), pictures=pictures)
    assert policy.vision is not None and policy.shares_prompts
