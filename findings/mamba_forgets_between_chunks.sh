#!/usr/bin/env bash
# Several new tokens onto a cache: Mamba, Falcon-Mamba and Jamba forget the state of what came before,
# and nothing is printed.
#
# Versions: Python 3.11, torch 2.13.0 (CPU, without Mamba's own kernels), transformers 5.24.0.
# Behaviour: with a cache, one new token continues from the stored state, as in `generate`. Several
# new tokens at once (a prompt in chunks, the next turn of a chat, tokens to verify) are computed as
# if nothing stood before them: the scan begins with zeros. Mamba-2 and Falcon-H1, which store the
# same kind of state, are right in both cases. So a loop that is tested token by token is wrong for
# chunks in three of these families.
#
# Output seen (largest difference of log-probabilities from the whole row's, in nats):
#   mamba: one token 4e-06, four tokens 6e+00
#   falcon_mamba: one token 6e-06, four tokens 7e+00
#   jamba: one token 5e-07, four tokens 2e-02
#   mamba2: one token 3e-06, four tokens 2e-05
#   falcon_h1: one token 1e-06, four tokens 5e-07
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 numpy
"$folder/venv/bin/python" - <<'PYTHON' 2>/dev/null
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = dict(
    vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, pad_token_id=0,
)
FORGETFUL = {
    "mamba": dict(state_size=8),
    "falcon_mamba": dict(state_size=8),
    "jamba": dict(
        num_experts=2, mamba_d_state=8, attn_layer_period=2, attn_layer_offset=1,
        use_mamba_kernels=False,
    ),
}
RIGHT = {
    "mamba2": dict(state_size=8, num_heads=8, head_dim=8, n_groups=1),
    "falcon_h1": dict(mamba_d_state=8, mamba_n_heads=4, mamba_d_head=16, mamba_d_ssm=64),
}
LENGTH = 24


@torch.no_grad()
def gap(model, ids, num_new):
    """Difference of the last tokens' log-probabilities: behind a cache, and in the whole row."""
    expected = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)[:, -num_new:]
    cache = model(input_ids=ids[:, :-num_new], use_cache=True).cache
    continued = model(input_ids=ids[:, -num_new:], cache=cache, use_cache=True)
    return float((continued.logits.log_softmax(-1) - expected).abs().max())


changed = False
for name, more in {**FORGETFUL, **RIGHT}.items():
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SIZES, **more)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(5.0)
    ids = torch.randint(1, 61, (1, LENGTH))
    one, four = (gap(model, ids, num_new) for num_new in (1, 4))
    print(f"{name}: one token {one:.0e}, four tokens {four:.0e}")
    changed |= one > 1e-3 or (four > 1e-3) != (name in FORGETFUL)
sys.exit(changed)
PYTHON
