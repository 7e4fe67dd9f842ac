"""A model's small files, read before any weights are loaded.

The first half reads `config.json` and the headers of the weight files, with neither torch nor
transformers, so that mistakes are reported at once. The second half is what transformers makes of
the configuration and the tokenizer. The controller checks with it before it starts a process, and
the workers load by the same functions. Every failure is a ConfigError that names `model.path`.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from easyrl.config import ConfigError
from easyrl.data.hub import FORMS, KEY, is_hub_id, model_config_from_hub, resolve_model
from easyrl.formatting import counted

SAFETENSORS = "model.safetensors"
OTHER_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json")
PACKED_LAYERS = ("full_attention", "sliding_attention")
"""Layer types that EasyRL's attention supports."""
BOUNDED_ROPES = {"default", "llama3", "longrope", "su", "mrope"}
"""RoPE types with which `max_position_embeddings` bounds the sequence length."""
NUM_SAMPLES, SAMPLE_BYTES = 32, 4096
"""The samples of a weights file that its fingerprint hashes."""
TEMPLATE = "chat_template*"
FLOAT_BYTES = 4
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
TOKENIZERS = ("token*", "vocab*", "*.tiktoken", "*.model", "tekken.json")
OTHER_MODEL = "use another model"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's configuration and size, from its files."""

    path: str
    config: dict[str, Any]
    """The content of `config.json`."""
    num_weights: int | None
    """Elements of all weights, tied ones once; None if unknown (not downloaded yet, or not in
    safetensors)."""


def read_model_files(path: str, *, is_whole: bool = True) -> ModelFiles:
    """Read the model of `path` (a folder, a hub id or a built-in model).

    Raises ConfigError if a folder has no config.json or, with `is_whole`, lacks weights or a
    tokenizer.
    """
    folder = Path(resolve_model(path))
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{KEY}: the folder '{path}' has no config.json; {FORMS}")
        config = _read_config(folder / "config.json")
        num_weights = _num_weights(folder, config, is_whole=is_whole)
        if is_whole and not any(next(folder.glob(pattern), None) for pattern in TOKENIZERS):
            raise ConfigError(
                f"{KEY}: the folder '{path}' has no tokenizer (tokenizer.json); save the "
                f"tokenizer beside the model; {FORMS}"
            )
        return ModelFiles(path, config, num_weights)
    if not is_hub_id(path):
        raise ConfigError(f"{KEY}: expected a model, got '{path}', which does not exist; {FORMS}")
    cached = model_config_from_hub(path)
    config = _read_config(cached)
    return ModelFiles(path, config, _num_weights(cached.parent, config, is_whole=False))


def fingerprint(path: str) -> str:
    """Return an identity of the model's content: a hub revision, or a digest of configuration,
    tokenizer and samples of the weights. Downloads only the configuration; reads a few MB."""
    folder = Path(resolve_model(path))
    if not folder.is_dir():
        return model_config_from_hub(path).parent.name
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted({file for name in (*TOKENIZERS, TEMPLATE) for file in folder.glob(name)}):
        if file.is_file():
            digest.update(file.name.encode() + file.read_bytes())
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as content:
            for number in range(NUM_SAMPLES):
                content.seek(size * number // NUM_SAMPLES)
                digest.update(content.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # encoding or syntax
        raise ConfigError(f"{KEY}: '{file}' is not valid JSON: {error}; {FORMS}") from None
    except OSError as error:
        raise ConfigError(f"{KEY}: '{file}' cannot be read: {error.strerror}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{KEY}: '{file}' is not a model configuration; {FORMS}")
    return config


def _num_weights(folder: Path, config: dict[str, Any], *, is_whole: bool) -> int | None:
    """Count the elements of all weights. Unless `is_whole`, files may be missing."""
    files = _safetensors_files(folder, is_whole=is_whole)
    if files is None:
        if any((folder / name).exists() for name in OTHER_WEIGHTS) or not is_whole:
            return None
        raise ConfigError(f"{KEY}: the folder '{folder}' has no weights ({SAFETENSORS}); {FORMS}")
    sizes: dict[str, int] = {}
    for file in files:
        sizes |= _tensor_sizes(file)
    if config.get("tie_word_embeddings"):
        sizes.pop("lm_head.weight", None)
    return sum(sizes.values())


def _safetensors_files(folder: Path, *, is_whole: bool) -> list[Path] | None:
    """Return the files that hold the weights; None if there are none."""
    if (folder / SAFETENSORS).is_file():
        return [folder / SAFETENSORS]
    index = folder / f"{SAFETENSORS}.index.json"
    if not index.is_file():
        return None
    weight_map = _read_config(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ConfigError(f"{KEY}: '{index}' has no weight_map; {FORMS}")
    names = sorted(map(str, set(weight_map.values())))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing and not is_whole:
        return None
    if missing:
        raise ConfigError(
            f"{KEY}: expected {counted(len(names), 'weight file')} in '{folder}', but "
            f"{', '.join(missing[:3])}{' and more' if len(missing) > 3 else ''} is missing; "
            "download the model again"
        )
    return [folder / name for name in names]


def _tensor_sizes(file: Path) -> dict[str, int]:
    """Return the elements of each tensor in a safetensors file. Opening it checks its length."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as tensors:
            return {name: math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        raise ConfigError(
            f"{KEY}: '{file}' ({file.stat().st_size:,} bytes) is not a complete safetensors "
            f"file: {reason}; download or save the model again"
        ) from None


def max_positions(model_config: dict[str, Any]) -> int | None:
    """Return the longest sequence that `config.json` allows; None if it sets no fixed bound."""
    config = model_config.get("text_config") or model_config
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    per_layer_type = [rope, *(r for r in rope.values() if isinstance(r, dict))]
    kinds = {r.get("rope_type") or r.get("type") or "default" for r in per_layer_type}
    if not kinds <= BOUNDED_ROPES:
        return None
    return config.get("max_position_embeddings") or config.get("n_positions")


def kv_bytes_per_token(model_config: dict[str, Any]) -> int:
    """Return the bytes of one token's keys and values in all layers, in float32; 0 if the sizes
    are missing from `config.json`."""
    config = model_config.get("text_config") or model_config
    layers, heads = config.get("num_hidden_layers"), config.get("num_attention_heads")
    if not layers or not heads:
        return 0
    size = config.get("head_dim") or config.get("hidden_size", 0) // heads
    return int(2 * layers * (config.get("num_key_value_heads") or heads) * size * FLOAT_BYTES)


# -- by transformers -------------------------------------------------------------------------------


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a folder, a hub id or a built-in model."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            resolve_model(path), trust_remote_code=trust_remote_code
        )
    except Exception as error:  # any, depending on the file
        raise ConfigError(
            f"{KEY}: the tokenizer of '{path}' cannot be loaded: {_reason(error)}; save it again "
            "beside the model (tokenizer.save_pretrained)"
        ) from error


def load_model_config(path: str, *, trust_remote_code: bool = False) -> Any:
    """Load transformers' configuration of a causal language model.

    Raises ConfigError if transformers does not support the model, or it generates no text.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            resolve_model(path), trust_remote_code=trust_remote_code
        )
    except Exception as error:  # any, depending on the values
        raise ConfigError(_unknown_model(path, error)) from error
    _check_class(path, config, trust_remote_code=trust_remote_code)
    return config


def load_eos_token_ids(path: str, model_config: Any) -> list[int]:
    """Return the tokens that end a completion, without loading the model."""
    from transformers import GenerationConfig

    try:
        generation_config = GenerationConfig.from_pretrained(resolve_model(path))
    except OSError:  # there is none
        generation_config = None
    return eos_token_ids(generation_config, model_config)


def eos_token_ids(generation_config: Any, model_config: Any) -> list[int]:
    """Return the tokens that end a completion: the generation config's, or else the model's."""
    eos = getattr(generation_config, "eos_token_id", None)
    if eos is None:
        eos = model_config.get_text_config().eos_token_id
    if eos is None:
        return []
    return list(eos) if isinstance(eos, (list, tuple)) else [int(eos)]


def _unknown_model(path: str, error: Exception) -> str:
    import transformers
    from transformers import CONFIG_MAPPING

    file = Path(resolve_model(path)) / "config.json"
    raw = json.loads(file.read_text()) if file.is_file() else {}
    kind = raw.get("model_type")
    if "AutoConfig" in raw.get("auto_map", {}) and kind not in CONFIG_MAPPING:
        return (
            f"{KEY}: '{path}' needs its own Python code; set "
            "model.trust_remote_code=true if you trust its source"
        )
    if file.is_file() and kind is None:
        return f"{KEY}: '{file}' has no model_type"
    if kind is not None and kind not in CONFIG_MAPPING:
        return (
            f"{KEY}: transformers {transformers.__version__} does not support the model type "
            f"'{kind}' of '{path}'; {OTHER_MODEL}, or another version of transformers"
        )
    return f"{KEY}: the config.json of '{path}' cannot be used: {_reason(error)}"


def _check_class(path: str, config: Any, *, trust_remote_code: bool) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return
    if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        if trust_remote_code:
            return
        raise ConfigError(
            f"{KEY}: '{path}' needs its own Python code; set "
            "model.trust_remote_code=true if you trust its source"
        )
    raise ConfigError(
        f"{KEY}: '{path}' is of type '{config.model_type}', which is not a causal language model "
        f"in transformers; {OTHER_MODEL}"
    )


def unsupported_layer(config: Any) -> str | None:
    """Name the first layer that is neither full nor sliding-window attention, if any."""
    kinds = getattr(config.get_text_config(), "layer_types", None) or ()
    for layer, kind in enumerate(kinds):
        if kind not in PACKED_LAYERS:
            return f"layer {layer} is of type {kind}"
    return None


def unsupported_class(model_class: Any) -> str | None:
    """Say why no model of this class can use EasyRL's attention, if so."""
    if getattr(model_class, "_supports_attention_backend", False):
        return None
    return f"no layer of {model_class.__name__} uses transformers' attention interface"


def refuse_shared_prompt(path: str, config: Any) -> None:
    """Raise ConfigError if configuration or class rule out `model.attention=shared_prompt`."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    reason = unsupported_layer(config)
    if reason is None and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        reason = unsupported_class(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    if reason is not None:
        raise cannot_share(path, reason)


def cannot_share(path: str, reason: str) -> ConfigError:
    return ConfigError(
        f"model.attention: prompts cannot be shared exactly, because {reason} ({path}); expected "
        "auto or repeated, got shared_prompt"
    )


def longest_exact(config: Any) -> tuple[int, str] | None:
    """Return the longest sequence whose RoPE is independent of the batch, and the RoPE's type.

    `longrope` and `dynamic` RoPE choose the factors of a whole batch by its longest position; up
    to this length they are constant. None: the model has no such RoPE.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    per_layer_type = [rope, *(r for r in rope.values() if isinstance(r, dict))]
    limits = [
        (r["original_max_position_embeddings"], "longrope")
        for r in per_layer_type
        if r.get("rope_type") == "longrope"
    ]
    if any("dynamic" in (r.get("rope_type") or "") for r in per_layer_type):
        limits.append((text.max_position_embeddings, "dynamic"))
    return min(limits, default=None)


def check_rope(
    path: str,
    config: Any,
    *,
    max_prompt_length: int,
    max_completion_length: int,
) -> None:
    """Raise ConfigError if sequences may be too long for the model's RoPE to be exact."""
    limit, longest = longest_exact(config), max_prompt_length + max_completion_length
    if limit is None or longest <= limit[0]:
        return
    length, kind = limit
    raise ConfigError(
        f"data.max_prompt_length + rollout.max_completion_length: expected at most {length}, got "
        f"{max_prompt_length} + {max_completion_length}: beyond, the {kind} RoPE of {path} ({KEY}) "
        "depends on the longest sequence in the batch and would not be exact; lower them"
    )


def meta_model(config: Any, *, trust_remote_code: bool = False) -> Any:
    """Make the causal language model of a configuration on torch's `meta` device: no memory."""
    import torch
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(config, trust_remote_code=trust_remote_code)


def count_weights(config: Any, *, trust_remote_code: bool = False) -> int:
    """Count the elements of all weights, tied ones once."""
    model = meta_model(config, trust_remote_code=trust_remote_code)
    return sum(weight.numel() for weight in model.parameters())


def _reason(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
