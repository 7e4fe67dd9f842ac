"""Pictures in prompts of the vLLM engine, on vLLM's CPU build (make test-vllm).

vLLM's classes with towers import torchvision, which `make test-vllm` puts beside its environment.
"""

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from test_vllm import SAMPLING, TOLERANCE, Trained

from easyrl.config import ConfigError
from easyrl.engines.base import GroupRequest
from easyrl.engines.vllm.platforms import PICTURE_TYPES
from easyrl.model.processor import load_processor
from easyrl.types import Picture
from multimodal_models import same_bits, stored
from runs import assert_on_policy, easyrl, succeed, summary_of, write_rows
from vision_processors import FAMILIES, write_model_with_processor

pytest.importorskip("vllm", reason="needs vLLM: `make test-vllm` installs it and runs these")
pytest.importorskip("torchvision", reason="needs torchvision: `make test-vllm` sets its path")
pytestmark = pytest.mark.vllm

HEADS = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
"""The smallest that vLLM's attention has on CPUs."""
ROTARY = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4]}
TEXT = {
    "qwen2_5_vl": HEADS | {"rope_parameters": ROTARY},
    "qwen3_vl": HEADS | {"rope_parameters": ROTARY | {"mrope_interleaved": True}},
    "idefics3": HEADS,
    "internvl": HEADS,
    # The epsilon that vLLM's projector has, whatever config.json says.
    "mistral3": HEADS | {"rms_norm_eps": 1e-5},
}
MARKS = {family: pytest.mark.long for family in TEXT if family != "qwen2_5_vl"}
CASES = [pytest.param(family, marks=MARKS.get(family, ())) for family in TEXT]
LONGER = replace(SAMPLING, max_prompt_length=160, max_completion_length=16)
CAP = 56 * 56  # pixels


def drawn(number, height=50, width=70):
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return Picture(file.getvalue())


def model_folder(folder, family, monkeypatch):
    vision = FAMILIES[family]["config"]["vision_config"]
    if "out_hidden_size" in vision:
        monkeypatch.setitem(vision, "out_hidden_size", HEADS["hidden_size"])
    write_model_with_processor(folder, family, **TEXT[family])
    return str(folder)


def requests_for(processor):
    """A group with a picture, one with two of which one is the same, and one of text."""
    first, second = drawn(0), drawn(1, 90, 60)
    contents = [(("image", "What is 3?"), (first,))]
    contents.append((("image", "and", "image", "12?"), (first, second)))
    contents.append((("What is 5?",), ()))
    requests = []
    for number, (parts, pictures) in enumerate(contents):
        content = []
        for part in parts:
            shows = part == "image"
            content.append({"type": "image"} if shows else {"type": "text", "text": part})
        rendered = processor.render([{"role": "user", "content": content}], pictures)
        requests.append(GroupRequest((0, number), rendered.token_ids, 4, media=rendered.media))
    return requests


def num_encoded(trained):
    engine = trained.engine
    (counted,) = engine._call(engine._engine.collective_rpc("easyrl_num_encoded"))
    return counted


def check(trained, requests):
    """Update, and compare the log-probabilities with the trainer's. Return the tokens."""
    trained.update()
    groups = trained.answers(requests)
    assert [len(completions) for _, completions in groups] == [4, 4, 4]
    assert trained.largest_gap(groups) <= TOLERANCE
    return [token for _, group in groups for each in group for token in each.token_ids.tolist()]


def test_every_type_that_runs_may_use_is_tested():
    assert set(TEXT) == set(PICTURE_TYPES)


@pytest.mark.parametrize("family", CASES)
def test_a_frozen_tower_encodes_a_picture_once(tmp_path, family, monkeypatch):
    folder = model_folder(tmp_path / "model", family, monkeypatch)
    trained = Trained(folder, tmp_path, LONGER, has_pictures=True)
    try:
        trained.engine._call_workers("easyrl_count_pictures")
        processor = load_processor(folder)
        requests = requests_for(processor)
        check(trained, requests)
        assert num_encoded(trained) == 2, "12 sequences show two pictures"
        trained.change()
        check(trained, requests)
        assert num_encoded(trained) == 2, "an update of the text model does not change them"

        # Placeholders have no probability, even if the model gives them nearly all of it.
        (placeholder,) = processor.placeholder_ids
        with torch.no_grad():
            head = trained.policy.model.get_output_embeddings().weight
            head[placeholder] = 50 * head[5]
        assert placeholder not in check(trained, requests)

        first, *_ = requests
        other = GroupRequest((0, 9), first.prompt_ids[1:], 4, media=first.media)
        with pytest.raises(ConfigError, match=r"rollout\.engine: expected embedded"):
            trained.answers([other])
    finally:
        trained.engine.close()


@pytest.mark.parametrize("family", CASES)
def test_a_trained_tower_is_updated(tmp_path, family, monkeypatch):
    folder = model_folder(tmp_path / "model", family, monkeypatch)
    changes = {"has_pictures": True, "vision": "trained", "max_image_pixels": CAP}
    trained = Trained(folder, tmp_path, LONGER, **changes)
    try:
        trained.engine._call_workers("easyrl_count_pictures")
        processor = load_processor(folder, max_image_pixels=CAP)
        requests = requests_for(processor)
        check(trained, requests)
        trained.change()
        check(trained, requests)
        assert num_encoded(trained) == 4, "pictures are encoded again with the new tower"
    finally:
        trained.engine.close()


REWARD = """
def mean_id(prompts, completions, completion_ids, **columns):
    return [sum(ids) / len(ids) / 100 for ids in completion_ids]
"""
SETTINGS = (
    *("--no-live", "rollout.engine=vllm", "runtime.deterministic=true", "data.num_held_out=0"),
    *("train.prompts_per_iteration=4", "rollout.num_generations=3", "data.chat=true"),
    *("rollout.max_completion_length=8", "data.max_prompt_length=64", "--iterations", "2"),
    *("train.learning_rate=0.01", "model.vision=trained"),
)


def words_for(tmp_path, folder):
    """Words of a run on six pictures."""
    (tmp_path / "mine.py").write_text(REWARD)
    rows = []
    for number in range(6):
        (tmp_path / f"{number}.png").write_bytes(drawn(number).data)
        rows.append({"prompt": f"What is {number}?", "image": f"{number}.png"})
    data = write_rows(tmp_path / "rows.jsonl", rows)
    return ("--model", folder, "--dataset", data, "--reward", f"{tmp_path / 'mine.py'}:mean_id")


def test_vllm_loads_an_exported_model(tmp_path, monkeypatch):
    """vLLM refuses to start if the files do not have every weight of its model."""
    folder = model_folder(tmp_path / "model", "qwen2_5_vl", monkeypatch)
    run, exported = tmp_path / "run", tmp_path / "exported"
    words = (*words_for(tmp_path, folder), *SETTINGS, "rollout.engine=embedded")
    succeed(*words, "train.save_every=1", "--output", str(run))
    assert easyrl("export", run, exported).exit_code == 0
    before, after = stored(tmp_path / "model"), stored(exported)
    changed = [name for name, weight in before.items() if not same_bits(weight, after[name])]
    assert {"visual" in name for name in changed} == {True, False}
    trained = Trained(str(exported), tmp_path, LONGER, has_pictures=True)
    try:
        groups = trained.answers(requests_for(load_processor(str(exported))))
        assert [len(completions) for _, completions in groups] == [4, 4, 4]
        assert trained.largest_gap(groups) <= TOLERANCE
    finally:
        trained.engine.close()


@pytest.mark.long
def test_both_schedules_of_a_run_end_in_the_same_bits(tmp_path, monkeypatch):
    folder = model_folder(tmp_path / "model", "qwen2_5_vl", monkeypatch)
    words = (*words_for(tmp_path, folder), *SETTINGS)
    ends = set()
    for schedule in ("periodic", "sync"):
        output = tmp_path / schedule
        out = succeed(*words, "--schedule", schedule, "--output", str(output), timeout=300)
        assert "engine of the rollout workers: vllm" in out
        assert_on_policy(output)
        ends.add(summary_of(output)["weights_sha256"])
    assert len(ends) == 1
