"""Accelerators: kinds, visibility, memory, and communication backends.

The only file that spells cuda, npu, nccl, hccl and the visible-devices variables. torch is imported
only inside functions; torch_npu only if an NPU is requested or present.

The user's device numbers count the devices that the command itself can see. A worker sees only its
own device, as number 0 (a tensor-parallel engine sees its devices as 0, 1, …).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib
import importlib.util
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from easyrl.formatting import ConfigError
from easyrl.processes import MemoryNeed

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")

ASCEND = "npu"  # torch's name for Ascend's accelerators

VISIBLE_DEVICES = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
"""Kind of accelerator -> variable that restricts which ones a process sees."""
RAY_RESOURCES = {"cuda": "GPU", "npu": "NPU"}
"""Kind of accelerator -> Ray's name of it."""
NO_AUTOLOAD = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
"""Set before torch is imported, which otherwise fails where torch_npu is installed without Ascend's
libraries. `load_backend` loads the backend that is needed."""
AUTOLOAD = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}  # for programs that do not call `load_backend`

LOOPBACK = "127.0.0.1"
SHARED_DEVICE_ENVIRONMENT = {"HCCL_HOST_SOCKET_PORT_RANGE": "auto"}
"""For two processes on one device: HCCL's default ports are fixed per device, and may collide."""
SURVIVE_BACKEND_ERRORS = {f"{name}_ASYNC_ERROR_HANDLING": "0" for name in ("TORCH_NCCL", "HCCL")}
"""Set before the weight channel's group is made: else torch ends the process of a lost member."""
NO_DUMPS = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0"}
"""Set before any group is made: by default torch ends every process minutes after a broadcast has
failed, to write a dump, and dropping its group blocks for a minute."""
NO_PEER_ACCESS = "NCCL_P2P_DISABLE=1"  # variable: GPUs copy to each other through the host's memory
DETERMINISTIC_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Without it, cuBLAS may give other bits in each run."""

KNOWN_GIB = {
    "a100": 79.0,
    "h100": 79.0,
    "h200": 139.0,
    "b200": 178.0,
    "l4": 22.0,
    "l40s": 44.0,
    "t4": 14.0,
    "3090": 23.5,
    "4090": 23.5,
    "5090": 31.0,
    "910b": 60.0,
}
"""Product -> memory in GiB that torch finds on it, rounded down."""
TORCH_BYTES = 375 * 2**20
"""A process on the CPU that has imported torch and a model's class. Measured on x86 Linux with
torch 2.13 for the CPU and transformers 5.23."""
CONTEXT_BYTES = 2**29  # driver, kernels and libraries of a process on an accelerator
COMMUNICATOR_BYTES = {ASCEND: 400 * 2**20}
"""Buffers of one process group on a device: two of HCCL_BUFFSIZE, by default. NCCL's are small."""

SIOCGIFADDR = 0x8915  # of Linux's sockios.h: asks for the address of a network interface
ADDRESS_IN_IFREQ = slice(20, 24)  # where the answer has it

DEVICE_NODES = Path("/dev")
NODES = {"cuda": "nvidia[0-9]*", "npu": "davinci[0-9]*"}
"""Kind of accelerator -> pattern of its device nodes. NVIDIA's may appear only at first use."""
CUDA_DRIVER = "libcuda.so.1"
AMD_NODE = "kfd"
"""torch needs NVIDIA's driver, or this device node, for a GPU."""


@dataclass(frozen=True, slots=True)
class AssumedDevices:
    """Accelerators that a run is planned for, instead of those of this machine."""

    kind: str
    count: int
    num_bytes: int  # memory of each

    def __str__(self) -> str:
        return f"{self.count} x {self.num_bytes / 2**30:g} GiB ({self.kind})"


def parse_assumed(text: str) -> AssumedDevices:
    """Parse `8x80GiB`, `24GiB` (one device), `h100x8` or `8xh100`. Raises ConfigError."""
    first, _, second = text.strip().lower().partition("x")
    for count, size in ((first, second), (second or "1", first)):
        given = re.fullmatch(r"([0-9]{1,4}(?:\.[0-9]+)?)gi?b?", size)
        gib = float(given[1]) if given else KNOWN_GIB.get(size, 0.0)
        if gib and re.fullmatch(r"[1-9][0-9]{0,3}", count):
            kind = ASCEND if size == "910b" else "cuda"
            return AssumedDevices(kind, int(count), int(gib * 2**30))
    raise ConfigError(
        "--assume: expected the number of accelerators and the memory of each, as in 8x80GiB, "
        f"24GiB (one) or h100x8 (one of {', '.join(KNOWN_GIB)}), got '{text}'"
    )


def network_environment(address: str) -> dict[str, str]:
    """Return variables with which process groups listen on the network interface of `address`
    alone. They are set before torch is imported. Raises ConfigError if it is not the first IPv4
    address of any interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                request = struct.pack("256s", name.encode())
                reply = fcntl.ioctl(any_socket.fileno(), SIOCGIFADDR, request)
                if socket.inet_ntoa(reply[ADDRESS_IN_IFREQ]) == address:
                    return {f"{kind}_SOCKET_IFNAME": name for kind in ("GLOO", "NCCL", "HCCL")}
    raise ConfigError(
        f"expected the first IPv4 address of a network interface, got {address} (ray start "
        "--node-ip-address=ADDRESS)"
    )


def num_device_nodes(kind: str) -> int:
    """Return the number of accelerators that the driver shows; torch may be unable to use them."""
    return len(list(DEVICE_NODES.glob(NODES[kind])))


def accelerator(*, is_asked: bool = False) -> tuple[str, int]:
    """Return kind and number of the accelerators that torch can use; ("cpu", 0) if there are none.

    `is_asked`: the user has named accelerators. Raises ConfigError without Ascend's libraries.
    """
    # Without a driver torch, which takes seconds to import, is not needed.
    if has_driver("cuda"):
        import torch

        if torch.cuda.is_available():
            return "cuda", torch.cuda.device_count()
    if (is_asked or has_driver("npu")) and importlib.util.find_spec("torch_npu"):
        load_backend("npu")
        if device_module("npu").is_available():
            return "npu", device_module("npu").device_count()
    return "cpu", 0


def has_driver(kind: str) -> bool:
    """Return whether the system has a driver for this kind of device. Does not load torch."""
    if num_device_nodes(kind):
        return True
    if kind != "cuda":
        return False
    if (DEVICE_NODES / AMD_NODE).exists():
        return True
    try:
        ctypes.CDLL(CUDA_DRIVER)
    except OSError:
        return False
    return True


def unusable_reason() -> str:
    """Return why torch cannot use this machine's GPUs; empty if it can, or there are none."""
    if has_driver("cuda"):
        import torch

        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except (AssertionError, RuntimeError) as error:
            return " ".join(str(error).split())
    return ""


def has_c_compiler() -> bool:
    """Return whether Triton finds a compiler, with which it makes a GPU's kernels callable."""
    names = ["gcc", "clang"]
    if "CC" in os.environ:
        names = [os.environ["CC"]]
    return any(shutil.which(name) for name in names)


def has_peer_access(kind: str, first: int, second: int) -> bool:
    """Return whether these devices can read each other's memory (assumed of NPUs)."""
    return kind == ASCEND or bool(device_module(kind).can_device_access_peer(first, second))


def process_need(kind: str, num_devices: int = 1) -> MemoryNeed:
    """Return what a worker takes before it has a model, on so many devices of a kind."""
    if kind == "cpu":
        return MemoryNeed("Python and torch", TORCH_BYTES)
    communicators = 2 * COMMUNICATOR_BYTES.get(kind, 0)  # of the weights, and of train ranks
    return MemoryNeed("driver, communication", num_devices * (CONTEXT_BYTES + communicators))


@cache
def memory_in_use(kind: str, index: int) -> tuple[int, str]:
    """Return how many bytes of a GPU other programs hold (0: unknown), and which programs. Call it
    before workers start; `cache_clear` before each run."""
    try:
        gpu = f"GPU-{device_module(kind).get_device_properties(index).uuid}"
        ((used_mib,),) = _query_nvidia(gpu, "--query-gpu=memory.used")
        programs = []
        for pid, name, mib in _query_nvidia(
            gpu, "--query-compute-apps=pid,process_name,used_memory"
        ):
            programs.append(f"{name} (pid {pid}, {mib} MiB)")
        return int(used_mib) * 2**20, ", ".join(programs)
    except Exception:  # any: of an installation without the program, or of another make
        return 0, ""


def _query_nvidia(gpu: str, query: str) -> list[list[str]]:
    """Return the lines of nvidia-smi's answer, each as its values."""
    command = ["nvidia-smi", f"--id={gpu}", "--format=csv,noheader,nounits", query]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    return [line.split(", ") for line in done.stdout.splitlines()]


def load_backend(kind: str) -> None:
    """Add this kind of device to torch. Raises ConfigError if its libraries are missing."""
    if kind == "npu":
        try:
            importlib.import_module("torch_npu")
        except (ImportError, OSError, RuntimeError) as error:
            raise ConfigError(
                f"devices: torch_npu cannot load Ascend's libraries (CANN): {error}; source their "
                "set_env.sh, or run on the CPU: --infer-devices cpu --train-devices cpu"
            ) from error


def device_module(kind: str) -> Any:
    import torch

    return torch.get_device_module(kind)


def visible_environment(kind: str, indices: Sequence[int]) -> dict[str, str]:
    """Return the environment that shows a process only these of the devices that this process sees.
    If the user has set the variable, its entries are device numbers or names."""
    variable = VISIBLE_DEVICES[kind]
    names = [str(index) for index in indices]
    if variable in os.environ:
        visible = os.environ[variable].split(",")
        names = [visible[index].strip() for index in indices]
    return {variable: ",".join(names)}


def allocator_environment(kind: str) -> dict[str, str]:
    """Return the environment with which torch's memory on a GPU has fewer holes; empty if the user
    configures it. Not for memory that is passed to `share_memory`."""
    is_set = "PYTORCH_ALLOC_CONF" in os.environ or "PYTORCH_CUDA_ALLOC_CONF" in os.environ
    if kind != "cuda" or is_set:
        return {}
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def num_usable(kind: str) -> int:
    """Return the number of devices that this process can use. `torch.cuda.device_count` may count
    by the environment, which has no effect after their first use."""
    import torch

    if kind == "cuda":
        return int(torch._C._cuda_getDeviceCount())
    return int(device_module(kind).device_count())


def total_memory_bytes(kind: str, index: int) -> int:
    """Return the total memory of a device. Does not create a context on it."""
    return int(device_module(kind).get_device_properties(index).total_memory)


def device_label(kind: str, index: int) -> str:
    return str(device_module(kind).get_device_name(index))


def limit_memory(device: torch.device, fraction: float) -> None:
    """Limit this process's tensors, not its other memory, to this fraction of the device's."""
    device_module(device.type).set_per_process_memory_fraction(fraction, 0)


def share_memory(buffer: Tensor) -> str:
    """Return a handle (JSON) with which one other process can open `buffer` [bytes] on the same
    device. The buffer must outlive that process's use of it."""
    storage = buffer.untyped_storage()
    share = getattr(storage, f"_share_{buffer.device.type}_")
    parts = share()
    # torch counts readers in a named segment, which would be left behind after a kill.
    segment = parts[4].decode().lstrip("/")
    Path("/dev/shm", segment).unlink(missing_ok=True)
    as_json = [part.hex() if isinstance(part, bytes) else part for part in parts]
    return json.dumps(as_json)


def open_memory(handle: str, device: torch.device) -> Tensor:
    """Open the bytes that another process shared with `share_memory`."""
    import torch

    buffer = torch.empty(0, dtype=torch.uint8, device=device)  # initializes the device
    as_json = json.loads(handle)
    parts = [bytes.fromhex(part) if isinstance(part, str) else part for part in as_json]
    parts[0] = buffer.device.index  # the device's number in this process
    open_shared = getattr(torch.UntypedStorage, f"_new_shared_{device.type}")
    storage = open_shared(*parts)
    num_bytes = storage.nbytes()
    return buffer.set_(storage, 0, (num_bytes,), (1,))


def synchronize(device: torch.device) -> None:
    import torch

    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def adds_integers(device: torch.device) -> bool:
    """Return whether the device can sum integers of every width (unknown for NPUs)."""
    return device.type in ("cpu", "cuda")


def trains_flex_attention(device: torch.device) -> bool:
    """Return whether FlexAttention has a backward on the device (it has none on CPUs and NPUs)."""
    return device.type == "cuda"


def widens_products(device: torch.device) -> bool:
    """Return whether products of matrices in half precision can be float32 (`out_dtype`)."""
    return device.type == "cuda"


def shared_memory_bytes(device: torch.device) -> int:
    """Return the shared memory that a block of threads can use on a GPU."""
    return int(device_module("cuda").get_device_properties(device).shared_memory_per_block_optin)


def has_graphs(device: torch.device) -> bool:
    return device.type == "cuda"


def graph_pool() -> Any:
    """Return memory for graphs that are never replayed at the same time."""
    return device_module("cuda").graph_pool_handle()


@contextlib.contextmanager
def refuse_waits() -> Iterator[None]:
    """Raise RuntimeError where the process waits for its GPU: errors in `capture` leak memory."""
    module = device_module("cuda")
    before = module.get_sync_debug_mode()
    try:
        with warnings.catch_warnings(action="ignore"):  # the mode is a prototype
            module.set_sync_debug_mode("error")
        yield
    finally:
        module.set_sync_debug_mode(before)


def capture(function: Callable[[], T], pool: Any) -> tuple[Callable[[], None], T]:
    """Capture the kernels that `function` launches, without running them, as a CUDA graph. Return a
    function that replays them, and the result, which each replay overwrites."""
    import torch

    graph = torch.cuda.CUDAGraph()
    # The outer context restores the stream after an error. Other threads may use the device.
    with (
        torch.cuda.stream(torch.cuda.current_stream()),
        torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
    ):
        result = function()
    return graph.replay, result


_served: list[Any] = []  # stores live as long as the process


def serve_store(listener: socket.socket) -> None:
    """Serve the store of `open_store`. torch's own server would listen on every address."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, port = listener.getsockname()
    store = TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    _served.append(store)


def open_store(store: str, timeout: timedelta) -> Any:
    """Open the store over which process groups are made: a file that all members can open, or
    `tcp://HOST:PORT`, which one of them serves."""
    from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]

    if store.startswith("tcp://"):
        host, _, port = store.removeprefix("tcp://").rpartition(":")
        return TCPStore(host, int(port), is_master=False, timeout=timeout)
    opened = FileStore(store, -1)
    opened.set_timeout(timeout)
    return opened


def make_process_group(
    device: str, store: Any, rank: int, size: int, timeout: timedelta
) -> tuple[Any, Callable[[], None]]:
    """Create a process group for buffers on `device`, separate from torch's default group. Return
    it and a function to call before it is dropped, which otherwise waits for broadcasts."""
    import torch
    import torch.distributed as dist

    kind = torch.device(device).type
    os.environ |= SURVIVE_BACKEND_ERRORS
    if kind == "cpu":
        before = _sockets()
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        return gloo, partial(_shut_down, _sockets() - before)  # its own `abort` does nothing
    if kind == "cuda":
        backend: Any = dist.ProcessGroupNCCL
    else:
        backend = importlib.import_module("torch_npu._C._distributed_c10d").ProcessGroupHCCL
    options = backend.Options()
    options._timeout = timeout
    group = backend(store, rank, size, options)
    if kind == "cuda":
        return group, group.abort
    return group, lambda: group.abort_hccl_comm("a member is lost")


def _sockets() -> set[tuple[int, str]]:
    """Return this process's sockets: descriptor, and a name such as `socket:[4711]`."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            name = str(path.readlink())
            if name.startswith("socket:"):
                found.add((int(path.name), name))
    return found


def _shut_down(sockets: set[tuple[int, str]]) -> None:
    """Shut down the connections among these sockets that are still open."""
    still_open = sockets & _sockets()
    for fd, _ in still_open:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
            if connection.family != socket.AF_UNIX:  # another thread's
                connection.getpeername()  # fails for a listening socket, which is left alone
                connection.shutdown(socket.SHUT_RDWR)


def join_train_world(
    device: torch.device, store: str, rank: int, size: int, timeout: timedelta
) -> None:
    """Create torch's default process group, of the train ranks: the device's backend for weights
    and gradients, Gloo for small tensors on the CPU. `store`: see `open_store`."""
    import torch
    import torch.distributed as dist

    backends = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)
    opened = dist.PrefixStore("train", open_store(store, timeout))  # type: ignore[attr-defined]
    opened.set_timeout(timeout)
    dist.init_process_group(
        backends[device.type], store=opened, rank=rank, world_size=size, timeout=timeout
    )
