#!/usr/bin/env bash
# A linear layer in oneDNN's format keeps memory for every number of rows that it has seen.
#
# Versions: Python 3.11, torch 2.13.0 (CPU; oneDNN is a part of it), numpy 2.3.5.
# Behaviour: `torch.utils.mkldnn.to_mkldnn(layer)` gives a linear layer whose weights are in oneDNN's
# blocked layout. For each new number of rows of its input oneDNN makes a kernel and keeps it: here
# 0.6 MB each, twice the layer's own weights (0.25 MB). An engine that decodes a changing number of
# sequences, or sequences of many lengths, grows by that for each number and shape of weights. Freed
# memory was returned to the system before each measurement, so it is not fragmentation. The same
# rows again, or torch's own layer, cost nothing, and padding the rows to a few numbers bounds it.
# (With AVX2; with other instructions the sizes differ: 12 MiB instead of 117 with
# ONEDNN_MAX_CPU_ISA=AVX.)
#
# Output seen:
#   torch's own layer:  200 calls of 8 rows + 0 MiB, 200 numbers of rows + 1 MiB, again + 0 MiB
#   in oneDNN's format: 200 calls of 8 rows + 0 MiB, 200 numbers of rows + 117 MiB, again + 0 MiB
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PYTHON'
import ctypes
import resource

import torch
from torch.utils.mkldnn import to_mkldnn

WIDTH = 256
PAGE = resource.getpagesize()
libc = ctypes.CDLL(None)


def resident_mib():
    libc.malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE / 2**20


def grown(layer, numbers, in_format):
    """Return by how many MiB the process grows in calls with these numbers of rows."""
    before = resident_mib()
    for number in numbers:
        rows = torch.ones(number, WIDTH)
        layer(rows.to_mkldnn() if in_format else rows)
    return resident_mib() - before


torch.set_grad_enabled(False)
torch.set_num_threads(1)
own = torch.nn.Linear(WIDTH, WIDTH)
cases = {
    "torch's own layer": (own, False),
    "in oneDNN's format": (to_mkldnn(torch.nn.Linear(WIDTH, WIDTH)), True),
}
seen = {}
for name, (layer, in_format) in cases.items():
    grown(layer, [8] * 20, in_format)  # what the first calls allocate
    seen[name] = [
        grown(layer, numbers, in_format)
        for numbers in ([8] * 200, range(100, 300), range(100, 300))
    ]
    same, different, again = seen[name]
    print(
        f"{name}: 200 calls of 8 rows + {same:.0f} MiB, "
        f"200 numbers of rows + {different:.0f} MiB, again + {again:.0f} MiB"
    )

weights = 4 * WIDTH * WIDTH / 2**20
same, different, again = seen["torch's own layer"]
assert max(same, different, again) < 4
same, different, again = seen["in oneDNN's format"]
assert same < 2 and again < 2
assert different > 20 * weights, "it keeps less now"
PYTHON
