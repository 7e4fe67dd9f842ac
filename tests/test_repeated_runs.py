"""A whole run of a model that cannot share prompts: reported, on-policy and exact."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mistakes import TINY
from runs import finish, lines_of, summary_of

REWARD = (
    "def score(completion_ids, **columns):\n    return [float(ids[0]) for ids in completion_ids]\n"
)
HYBRID = {
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "layer_types": ["full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
MODELS = {
    "qwen3_next": (HYBRID, "layer 1 is of type linear_attention"),
    "gpt_oss": (
        {**HYBRID, "layer_types": ["full_attention"] * 2, "num_local_experts": 2},
        "layer 0 has attention sinks",
    ),
}
WORDS = (
    "train.prompts_per_iteration=3",
    "rollout.num_generations=4",
    "rollout.max_completion_length=12",
    "data.max_prompt_length=32",
    "data.num_held_out=2",
)


def make_model(folder: Path, kind: str) -> None:
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder / name)
    config = AutoConfig.for_model(
        kind,
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        **MODELS[kind][0],
    )
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def test_a_run_says_which_layer_and_engine_and_trainer_agree(tmp_path: Path) -> None:
    make_model(tmp_path / "model", "qwen3_next")
    (tmp_path / "r.py").write_text(REWARD)
    folder = tmp_path / "run"
    flags = ["--no-live", "--model", str(tmp_path / "model"), "--output", str(folder)]
    flags += ["--iterations", "2", "--reward", f"{tmp_path / 'r.py'}:score"]
    code, out, err = finish(*flags, *WORDS)
    assert code == 0, err
    (note,) = [line for line in out.splitlines() if line.startswith("model.attention: ")]
    assert MODELS["qwen3_next"][1] in note
    assert note in (folder / "logs" / "easyrl.log").read_text()
    summary = summary_of(folder)
    assert summary["groups_trained"] == 6 and summary["groups_off_policy"] == 0
    assert 0 < summary["sampling_logp_difference_max"] <= 1e-4
    assert all(line["grad_norm"] > 0 for line in lines_of(folder / "metrics.jsonl"))
    saved = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert saved.config.model_type == "qwen3_next"


def test_sharing_that_only_the_loaded_model_refuses_ends_as_a_users_mistake(tmp_path: Path) -> None:
    """Attention sinks are found when the model first asks for them."""
    make_model(tmp_path / "model", "gpt_oss")
    flags = ["--no-live", "--model", str(tmp_path / "model"), "--output", str(tmp_path / "run")]
    code, _, err = finish(*flags, "--iterations", "1", *WORDS, "model.attention=shared_prompt")
    assert code == 2
    assert "model.attention" in err and MODELS["gpt_oss"][1] in err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
