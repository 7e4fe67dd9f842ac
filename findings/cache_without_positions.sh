#!/usr/bin/env bash
# Bamba and MiniMax with a cache need explicit position_ids; without them the results are wrong,
# and nothing is printed.
#
# Versions: Python 3.11, torch 2.13.0 (CPU), transformers 5.24.0.
# Behaviour: the usual loop, `model(input_ids=new_token, cache=cache)`, is right for most families,
# since the model asks its cache how many tokens it holds. BambaModel numbers the new tokens from 0.
# MiniMaxModel asks the cache, whose first layer is a linear one and answers 0. `generate` is right,
# because it passes position_ids. So a loop that agrees with `generate` for Llama does not for these.
#
# Output seen (largest difference of log-probabilities from the whole row's, in nats):
#   llama: without position_ids 4.8e-07, with them 4.8e-07
#   bamba: without position_ids 1.1e-02, with them 4.8e-07
#   minimax: without position_ids 1.1e-02, with them 4.8e-07
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 numpy
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = dict(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)
FAMILIES = {
    "llama": {},
    "bamba": dict(
        attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8,
        mamba_n_groups=1, mamba_chunk_size=8,
    ),
    "minimax": dict(
        head_dim=8, num_local_experts=2, num_experts_per_tok=1, block_size=8,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
}


@torch.no_grad()
def gap(model, ids, with_positions):
    """Largest difference of log-probabilities: token by token with a cache, and the whole row."""
    expected = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)
    cache, rows = None, []
    for start, end in [(0, 12), *((n, n + 1) for n in range(12, 30))]:
        more = {"position_ids": torch.arange(start, end)[None]} if with_positions else {}
        output = model(input_ids=ids[:, start:end], cache=cache, use_cache=True, **more)
        cache = output.cache
        rows.append(output.logits.log_softmax(-1))
    return float((torch.cat(rows, 1) - expected).abs().max())


changed = False
for name, more in FAMILIES.items():
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SIZES, **more)).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.2)
    ids = torch.randint(3, 61, (1, 30))
    without, with_positions = (gap(model, ids, choice) for choice in (False, True))
    print(f"{name}: without position_ids {without:.1e}, with them {with_positions:.1e}")
    is_wrong_without = without > 1e-3
    changed |= is_wrong_without != (name != "llama") or with_positions > 1e-3
sys.exit(changed)
PYTHON
