"""Takes torch_npu's place: NPUs that compute, on memory of the host (`device.cpp`).

PRETENDED_NPUS is their number. PRETENDED_COUNTERS names a folder where each worker keeps its
current and peak bytes, in a file of its name.
"""

import os
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pretended_device as device
import torch
import torch.distributed as dist

MEMORY_BYTES = 8 * 2**30


def _visible():
    seen = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    every = range(int(os.environ.get("PRETENDED_NPUS", "4")))
    return list(every) if seen is None else [int(n) for n in seen.split(",") if int(n) in every]


def _counters_file():
    """Workers write to RUN/logs/NAME.log."""
    folder = os.environ.get("PRETENDED_COUNTERS", "")
    return folder and str(Path(folder, Path("/proc/self/fd/1").readlink().stem))


class Stream:
    """Work is done when it is queued."""

    def __init__(self, device=None, priority=0):
        self.device, self.stream_id = torch.device("npu", 0), 0

    def wait_stream(self, other):
        pass

    def wait_event(self, event):
        pass

    def record_event(self, event=None):
        return event or Event()

    def synchronize(self):
        pass


class Event:
    def __init__(self, enable_timing=False):
        pass

    def record(self, stream=None):
        return self

    def wait(self, stream=None):
        pass

    def query(self):
        return True

    def synchronize(self):
        pass


npu_fusion_attention = None  # transformers imports it

npu = ModuleType("torch.npu")
npu.Stream, npu.Event = Stream, Event
npu.is_available = npu.is_initialized = lambda: bool(_visible())
npu.device_count = lambda: len(_visible())
npu.current_device = lambda: 0
npu.set_device = torch.accelerator.set_device_index
npu.device = npu.stream = lambda *_: nullcontext()
npu.current_stream = npu.default_stream = lambda device=None: Stream()
npu.synchronize = npu.empty_cache = npu.manual_seed_all = lambda *_: None
npu._is_in_bad_fork = lambda: False
npu.get_device_name = lambda device=None: "Ascend pretended"
npu.get_device_properties = lambda device=None: SimpleNamespace(total_memory=MEMORY_BYTES)
npu.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
npu.mem_get_info = torch.accelerator.get_memory_info
for name in ("memory_allocated", "memory_reserved"):
    setattr(npu, name, getattr(torch.accelerator, name))
    setattr(npu, f"max_{name}", getattr(torch.accelerator, f"max_{name}"))
npu.reset_peak_memory_stats = torch.accelerator.reset_peak_memory_stats
npu.set_per_process_memory_fraction = lambda fraction, _: device.limit(int(fraction * MEMORY_BYTES))


def _share(storage):
    """The parts of a handle as torch's: index, handle, bytes, offset, file of the counter, …"""
    shared = torch.empty(0, dtype=torch.uint8, device="npu").set_(
        storage, 0, (storage.nbytes(),), (1,)
    )
    path = f"/proc/{os.getpid()}/fd/{device.share(shared)}"
    return 0, path.encode(), storage.nbytes(), 0, b"/torch_pretended", 0, b"", True


torch.utils.rename_privateuse1_backend("npu")
torch._register_device_module("npu", npu)
torch.utils.generate_methods_for_privateuse1_backend()
torch.UntypedStorage._share_npu_ = _share
torch.UntypedStorage._new_shared_npu = lambda _, path, num_bytes, *__: device.open_shared(
    path.decode(), num_bytes
).untyped_storage()
device.initialize(len(_visible()), MEMORY_BYTES, _counters_file())
dist.Backend.register_backend(
    "hccl",
    lambda store, rank, size, timeout: device.over_host(
        dist.ProcessGroupGloo(store, rank, size, timeout)
    ),
    devices=["npu"],
)
