#!/usr/bin/env bash
# peft adapts the routed experts in the place of a dense layer that was named in full.
#
# Versions: Python 3.11, torch 2.13.0 (CPU), transformers 5.24.0, peft 0.21.2.
# Behaviour: for model types whose experts transformers 5 fuses into one tensor, peft rewrites every
# entry of `target_modules` that ends in gate_proj, up_proj or down_proj into a parameter of the
# routed experts, whatever stands before. So on GLM-4 MoE or DeepSeek-V3 the full name of a dense
# layer's projection, or of a shared expert's, adapts all routed experts and not that projection,
# without a warning, and "all-linear" leaves out every dense and shared projection. Qwen2-MoE has
# the same layers and fused experts, but is not in the list of types: there the names mean what they
# say.
#
# Output seen (layer 0 is dense, layer 1 has routed experts and a shared one):
#   glm4_moe, model.layers.0.mlp.down_proj: adapted ['1.mlp.experts']
#   glm4_moe, model.layers.1.mlp.shared_experts.down_proj: adapted ['1.mlp.experts']
#   glm4_moe, all-linear: dense or shared projections adapted: 0 of 6
#   qwen2_moe, model.layers.0.mlp.down_proj: adapted ['0.mlp.down_proj']
#   qwen2_moe, model.layers.1.mlp.shared_expert.down_proj: adapted ['1.mlp.shared_expert.down_proj']
#   qwen2_moe, all-linear: dense or shared projections adapted: 6 of 6
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 peft==0.21.2 numpy
"$folder/venv/bin/python" - <<'PYTHON'
import warnings

from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

BEGINNING = "base_model.model.model.layers."
SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=24,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, num_experts_per_tok=2,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)
GLM = dict(
    n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1,
    head_dim=8,
)
QWEN = dict(num_experts=4, shared_expert_intermediate_size=40, mlp_only_layers=[0])


def adapted(kind, sizes, targets):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **sizes))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=targets))
    if targets != "all-linear":  # of that it warns that a pattern of its own matches nothing
        assert not any("target" in str(each.message) for each in caught)
    names = [name for name, _ in wrapped.named_parameters() if "lora_" in name]
    return sorted({name.split(".lora_")[0].removeprefix(BEGINNING) for name in names})


seen = {}
for kind, sizes, shared in (("glm4_moe", GLM, "shared_experts"), ("qwen2_moe", QWEN, "shared_expert")):
    dense = "0.mlp.down_proj"
    of_shared = f"1.mlp.{shared}.down_proj"
    for name in (dense, of_shared):
        seen[kind, name] = adapted(kind, sizes, [f"model.layers.{name}"])
        print(f"{kind}, model.layers.{name}: adapted {seen[kind, name]}")
    plain = [name for name in adapted(kind, sizes, "all-linear") if name.endswith("_proj") and "mlp" in name]
    print(f"{kind}, all-linear: dense or shared projections adapted: {len(plain)} of 6")
    seen[kind, "all"] = len(plain)
    expected = ["1.mlp.experts"] if kind == "glm4_moe" else None
    assert seen[kind, dense] == (expected or [dense])
    assert seen[kind, of_shared] == (expected or [of_shared])
    assert seen[kind, "all"] == (0 if kind == "glm4_moe" else 6)
PYTHON
