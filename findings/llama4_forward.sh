#!/usr/bin/env bash
# Llama4ForConditionalGeneration cannot run: its forward ends in an AttributeError.
#
# Versions: Python 3.11, torch 2.13.0 (CPU), transformers 5.24.0.
# Behaviour: the forward ends with `image_outputs=outputs.image_outputs`, where `outputs` is that of
# the causal language model inside, which has no such field. So every call fails, of text alone too.
# Llama4ForCausalLM, and the causal language model inside, work.
#
# Output seen:
#   Llama4ForConditionalGeneration: AttributeError: 'MoeCausalLMOutputWithPast' object has no
#   attribute 'image_outputs'
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 numpy
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

TEXT = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, intermediate_size_mlp=48,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    num_local_experts=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)
VISION = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
    image_size=28, patch_size=14, projector_input_dim=32, projector_output_dim=32,
    vision_output_dim=32,
)
config = AutoConfig.for_model("llama4", text_config=TEXT, vision_config=VISION)
model = AutoModelForImageTextToText.from_config(config).eval()
tokens = torch.arange(3, 12)[None]
try:
    model(input_ids=tokens, use_cache=False)
except AttributeError as error:
    print(f"{type(model).__name__}: AttributeError: {error}")
else:
    sys.exit("it runs")
assert model.language_model(input_ids=tokens, use_cache=False).logits.shape == (1, 9, 64)
PYTHON
