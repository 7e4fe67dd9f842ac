#!/usr/bin/env bash
# peft gives fused experts twice the rank that was asked for, and says that it ignored that.
#
# Versions: Python 3.11, torch 2.13.0 (CPU), transformers 5.24.0, peft 0.21.2.
# Behaviour: transformers 5 keeps gate_proj and up_proj of all experts in one tensor, gate_up_proj.
# Where `target_modules` names both, peft adapts that tensor with rank 2 r: it writes patterns of
# rank and alpha into the config, which its user did not give. They hold, and alpha / r stays the
# same. But a warning says that they matched nothing and were ignored, because it compares them with
# adapted modules only, and the tensor is a parameter. The same warning comes when the adapter is
# loaded. So r in adapter_config.json is not the rank of these weights, and the number of trained
# weights is not what r suggests.
#
# Output seen (Qwen3-MoE with 4 experts, r=4, alpha=8):
#   gate_up_proj: rank 8 of each expert; down_proj: rank 4
#   patterns in the config: rank {'.*\\.gate_up_proj': 8}, alpha {'.*\\.gate_up_proj': 16}
#   said to be ignored when it is made: True; when it is loaded: True
#   alpha / rank by which the output changes: 2.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 peft==0.21.2 numpy
"$folder/venv/bin/python" - "$folder/adapter" <<'PYTHON'
import sys
import warnings

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

NUM_EXPERTS = 4
RANK = 4
ALPHA = 8
folder = sys.argv[1]
config = Qwen3MoeConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=24,
    num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, head_dim=8,
    num_experts=NUM_EXPERTS, num_experts_per_tok=2, pad_token_id=0,
)


def messages_of(make):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = make()
    return made, any("rank_pattern" in str(each.message) for each in caught)


def new_model():
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config)


lora = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["gate_proj", "up_proj", "down_proj"])
adapted, is_said = messages_of(lambda: get_peft_model(new_model(), lora))
weights = {name: each for name, each in adapted.named_parameters() if "lora_" in name}
(gate_up,) = (each for name, each in weights.items() if ".base_layer.lora_A" in name)
(down,) = (each for name, each in weights.items() if ".experts.lora_A" in name)
ranks = (len(gate_up) // NUM_EXPERTS, len(down) // NUM_EXPERTS)
print(f"gate_up_proj: rank {ranks[0]} of each expert; down_proj: rank {ranks[1]}")
used = adapted.peft_config["default"]
print(f"patterns in the config: rank {used.rank_pattern}, alpha {used.alpha_pattern}")
adapted.save_pretrained(folder)
_, is_said_again = messages_of(lambda: PeftModel.from_pretrained(new_model(), folder))
print(f"said to be ignored when it is made: {is_said}; when it is loaded: {is_said_again}")

# What is added to gate_up_proj: B A, times a factor, which is measured.
ones = {name: torch.ones_like(each) for name, each in weights.items()}
before = new_model().model.layers[0].mlp.experts.gate_up_proj.detach()
with torch.no_grad():
    for name, each in weights.items():
        each.copy_(ones[name])
merged = adapted.merge_and_unload().model.layers[0].mlp.experts.gate_up_proj.detach()
factor = float((merged - before).mean()) / ranks[0]
print(f"alpha / rank by which the output changes: {factor:.1f}")
assert ranks == (2 * RANK, RANK)
assert list(used.rank_pattern.values()) == [2 * RANK]
assert is_said and is_said_again
assert abs(factor - ALPHA / RANK) < 1e-3
PYTHON
