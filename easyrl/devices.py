"""The only file that spells cuda, npu, nccl, hccl and visible-devices variables.

Floor 0: names and counts of devices, the communication backend between them, CPU cores.
torch is imported only inside functions.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

LOOPBACK_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "HCCL_SOCKET_IFNAME": "lo",
}
"""Set in every worker before torch is imported: nothing listens beyond loopback."""

DETERMINISTIC_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Also set where a run must give the same bits every time."""


CPU_QUOTAS = (
    ("/sys/fs/cgroup/cpu.max",),  # version 2: "quota period", or "max period"
    ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)
"""Where a container's share of the CPU time stands."""


def num_cores() -> int:
    """CPU cores this process may use; a container's quota counts, rounded up."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    for files in CPU_QUOTAS:
        try:
            quota, period = " ".join(Path(file).read_text() for file in files).split()
            if int(quota) > 0:  # -1 and "max": none
                cores = min(cores, -(-int(quota) // int(period)))
        except (OSError, ValueError):
            continue
    return max(1, cores)


def mkl_misses_avx512() -> bool:
    """Whether torch multiplies with MKL on a CPU of another maker, for which MKL has AVX2 at most,
    although the CPU has AVX-512."""
    import torch

    return (
        torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and not _made_by_intel()
    )


def _made_by_intel() -> bool:
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return True  # not known: torch's own way


def accelerator() -> tuple[str, int]:
    """Kind and number of the accelerators that torch sees: ("cpu", 0) where there is none."""
    import torch

    if not torch.accelerator.is_available():
        return "cpu", 0
    current = torch.accelerator.current_accelerator()
    assert current is not None
    return current.type, torch.accelerator.device_count()


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was asked of it."""
    import torch

    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def trains_flex_attention(device: torch.device) -> bool:
    """Whether FlexAttention has a backward on the device (it has none on CPUs and NPUs)."""
    return device.type == "cuda"


def make_process_group(device: str, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A process group of its own, beside torch's default world, for buffers on `device`."""
    import torch
    import torch.distributed as dist

    kind = torch.device(device).type
    if kind == "cpu":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    if kind == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    if kind == "npu":
        from torch_npu._C._distributed_c10d import ProcessGroupHCCL  # type: ignore[import-not-found]

        return ProcessGroupHCCL(store, rank, size, timeout)
    raise ValueError(f"devices: no communication backend for device '{device}'")


def join_train_world(
    device: torch.device, store_path: str, rank: int, size: int, timeout: timedelta
) -> None:
    """Make torch's default world of the train ranks: the device's own backend for weights and
    gradients, Gloo for small numbers on the CPU.

    It meets over the file `store_path`: torch's TCP store would listen on every address.
    """
    import torch
    import torch.distributed as dist

    backends = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)
    store = dist.PrefixStore("train", dist.FileStore(store_path, -1))  # type: ignore[attr-defined]
    store.set_timeout(timeout)
    dist.init_process_group(
        backends[device.type], store=store, rank=rank, world_size=size, timeout=timeout
    )
