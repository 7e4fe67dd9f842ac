"""Replaces torch_npu in tests: four NPUs that can be counted and described, but not computed on.

`ascend_sources.py` checks that torch_npu has the same names.
"""

import os
from types import ModuleType, SimpleNamespace

import torch

if os.environ.get("STAND_IN_FAILS"):
    raise ImportError("libhccl.so: cannot open shared object file: No such file or directory")

NUM_NPUS, MEMORY_BYTES = 4, 64 * 2**30
limits = {}


def _visible():
    seen = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    return list(range(NUM_NPUS)) if seen is None else [int(n) for n in seen.split(",") if n]


npu = ModuleType("torch.npu")
npu.is_available = lambda: bool(_visible())
npu.device_count = lambda: len(_visible())
npu.get_device_name = lambda device=None: "Ascend stand-in"
npu.get_device_properties = lambda device=None: SimpleNamespace(total_memory=MEMORY_BYTES)


def set_per_process_memory_fraction(fraction, device=None):
    limits[device] = fraction


npu.set_per_process_memory_fraction = set_per_process_memory_fraction
torch.utils.rename_privateuse1_backend("npu")
torch._register_device_module("npu", npu)
