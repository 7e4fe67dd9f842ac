"""FlexAttention's kernels compile for NVIDIA cards, forward and backward, fit their shared memory,
and compute attention (`make test-gpu-compile`). No GPU is needed: see `gpu_compiler` and
`gpu_interpreter`."""

import json
import os
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.gpu_compile,
    pytest.mark.skipif(
        "GUARD" not in os.environ, reason="make test-gpu-compile; needs a C++ compiler"
    ),
]

CASES = [  # card, tokens, query heads for each key head, head size, window, whether it has sinks
    ("H100", 70, 2, 128, 0, 0),  # Qwen3: torch's other kernel for short rows has no configuration
    ("4090", 100, 4, 64, 0, 0),  # Llama 3.2
    ("4090", 4096, 4, 256, 40, 0),  # Gemma 3: too much shared memory with torch's block sizes
    ("A100", 128, 7, 64, 0, 0),  # Qwen2.5
    ("5090", 70, 1, 256, 0, 0),
    ("H100", 4096, 8, 128, 40, 0),
    ("H100", 4096, 8, 64, 128, 1),  # gpt-oss
]
CARDS, TOKENS, HEAD_SIZES = ("A100", "4090", "H100", "5090"), (70, 100, 128, 4096), (64, 128, 256)


def pairwise_cases():
    """Cases among which every pair of values of two parameters occurs: greedily, the case with most
    pairs that are missing."""
    every = [*product(CARDS, TOKENS, (1, 2, 4, 7, 8), HEAD_SIZES, (0, 40), (0, 1))]
    pairs = {case: {*combinations(enumerate(case), 2)} for case in every}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        chosen.append(max(every, key=lambda case: len(pairs[case] & missing)))
        missing -= pairs[chosen[-1]]
    return chosen


EVERY_PAIR = (pytest.param(case, marks=pytest.mark.long) for case in pairwise_cases())


@pytest.mark.parametrize("case", [*CASES, *EVERY_PAIR], ids=str)
def test_the_attention_of_a_packed_row_compiles(case):
    card, tokens, ratio, head_size, window, has_sinks = case
    script = Path(__file__).with_name("gpu_compiler.py")
    sizes = (tokens, 2 * ratio, 2, head_size, window, has_sinks)
    command = [sys.executable, str(script), card, *map(str, sizes)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    names = " ".join(name for name, _ in json.loads(done.stdout))
    assert "flex_attention_0" in names and "backward" in names, names


MAX_ERROR = 2**-8
"""Of a result of a packed row in bfloat16, relative to its norm in float64. Inputs are the same.
Rounding to bfloat16 changes random numbers by 0.17 % of their norm. A result is behind at most four
such roundings (output, its gradient, gradients of scores, result), whose errors are independent:
0.17 % times the square root of 4. Sums are in float32."""
ROWS = [  # row, window, whether the heads have sinks
    ("group", 0, 0),
    pytest.param("tree", 0, 0, marks=pytest.mark.long),
    pytest.param("tree", 40, 1, marks=pytest.mark.long),
]


@pytest.mark.parametrize("row, window, has_sinks", ROWS)
def test_the_kernels_of_a_packed_row_compute_its_attention(row, window, has_sinks):
    script = Path(__file__).with_name("gpu_interpreter.py")
    command = [sys.executable, str(script), row, str(window), str(has_sinks)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    errors = json.loads(done.stdout)
    num_inputs = 4 if has_sinks else 3
    assert len(errors) == 1 + num_inputs  # of the output, and of each input's gradient
    assert all(error <= MAX_ERROR for error in errors.values()), errors  # not of NaN either
