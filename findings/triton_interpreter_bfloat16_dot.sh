#!/usr/bin/env bash
# Triton's interpreter (TRITON_INTERPRET=1) multiplies the bits of bfloat16 matrices, and truncates
# where it converts to bfloat16; nothing is printed.
#
# Versions: Python 3.11, torch 2.13.0 (CPU), triton 3.7.1, numpy 2.4.6.
# Behaviour: the interpreter keeps a bfloat16 number as its bits in a uint16. `tl.dot` of two such
# matrices is the product of these integers. A conversion of float32 to bfloat16 drops the lower
# bits, where GPUs round to the nearest number: errors are up to twice as large, and all towards zero.
# Triton's documentation says that its interpreter does not support operations on bfloat16, and to
# cast to float32 first (triton issues 4972, 11584). Products of float32 and float16 are right.
#
# Output seen (relative to the norm of the product in float64; the share of rounded numbers):
#   tl.dot of float32: error 6.6e-08
#   tl.dot of float16: error 5.3e-08
#   tl.dot of bfloat16: error 3.9e+09, the product of the bits: yes
#   float32 to bfloat16: 100% truncated, 51% as rounded to the nearest
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 triton==3.7.1 numpy==2.4.6
cat > "$folder/interpret.py" <<'PYTHON'
import sys

import torch
import triton
import triton.language as tl

SIZE = 16


@triton.jit
def multiply(left, right, product, SIZE: tl.constexpr):
    rows = tl.arange(0, SIZE)[:, None]
    columns = tl.arange(0, SIZE)[None, :]
    places = rows * SIZE + columns
    result = tl.dot(tl.load(left + places), tl.load(right + places))
    tl.store(product + places, result)


@triton.jit
def convert(source, target, COUNT: tl.constexpr):
    places = tl.arange(0, COUNT)
    tl.store(target + places, tl.load(source + places).to(tl.bfloat16))


def relative_error(got, expected):
    return float((got - expected).norm() / expected.norm())


def bits(matrix):
    """The bits of bfloat16 numbers, as integers from 0 to 65535, in float64."""
    return matrix.view(torch.uint16).double()


torch.manual_seed(0)
changed = False
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    left = torch.randn(SIZE, SIZE).to(dtype)
    right = torch.randn(SIZE, SIZE).to(dtype)
    product = torch.empty(SIZE, SIZE)
    multiply[(1,)](left, right, product, SIZE)
    error = relative_error(product, left.double() @ right.double())
    text = f"tl.dot of {str(dtype).removeprefix('torch.')}: error {error:.1e}"
    if dtype is torch.bfloat16:
        is_of_bits = relative_error(product, bits(left) @ bits(right)) < 1e-5
        text += f", the product of the bits: {'yes' if is_of_bits else 'no'}"
        changed |= not is_of_bits
    else:
        changed |= error > 1e-6
    print(text)

numbers = torch.randn(1024)
converted = torch.empty(1024, dtype=torch.bfloat16)
convert[(1,)](numbers, converted, 1024)
lower_bits_dropped = (numbers.view(torch.int32) & -(1 << 16)).view(torch.float32)
truncated = float((converted.float() == lower_bits_dropped).float().mean())
nearest = float((converted == numbers.bfloat16()).float().mean())
print(f"float32 to bfloat16: {truncated:.0%} truncated, {nearest:.0%} as rounded to the nearest")
changed |= truncated != 1 or nearest == 1
sys.exit(changed)
PYTHON
TRITON_INTERPRET=1 "$folder/venv/bin/python" "$folder/interpret.py"
