"""A whole run of a model that cannot share prompts: reported, on-policy and exact."""

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from mistakes import TINY
from runs import SMALL, finish, lines_of, summary_of
from tiny_models import SPREAD, UNSHARED, tiny_model

REWARD = (
    "def score(completion_ids, **columns):\n    return [float(ids[0]) for ids in completion_ids]\n"
)


def flags_of_run(folder, family):
    tokens = {"vocab_size": 99, "eos_token_id": 1, "bos_token_id": None}
    model = tiny_model(family, None, SPREAD, **UNSHARED[family][0], **tokens)
    model.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder / "model")
    (folder / "r.py").write_text(REWARD)
    flags = ("--model", f"{folder}/model", "--output", f"{folder}/run", "--iterations", "2")
    return (*flags, "--reward", f"{folder}/r.py:score", *SMALL, "data.num_held_out=2")


@pytest.mark.long
def test_a_run_says_which_layer_and_engine_and_trainer_agree(tmp_path):
    code, out, err = finish(
        *flags_of_run(tmp_path, "qwen3_next"), "rollout.max_completion_length=12"
    )
    assert code == 0, err
    (note,) = [line for line in out.splitlines() if line.startswith("model.attention: ")]
    assert UNSHARED["qwen3_next"][1] in note
    folder = tmp_path / "run"
    assert note in (folder / "logs" / "easyrl.log").read_text()
    summary = summary_of(folder)
    assert summary["groups_trained"] == 8
    assert 0 < summary["sampling_logp_difference_max"] <= 1e-4
    assert all(line["grad_norm"] > 0 for line in lines_of(folder / "metrics.jsonl"))
    saved = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert saved.config.model_type == "qwen3_next"
