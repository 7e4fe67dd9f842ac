"""A model's small files, read before any weights are loaded.

The first half reads `config.json` and the headers of the weight files, with neither torch nor
transformers. The second half loads configuration and tokenizer by transformers, for the checks of
the controller and for the workers. Every failure is a ConfigError that names `model.path`.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from easyrl.config import ConfigError
from easyrl.config.spec import ModelSpec, TokenLimits
from easyrl.data.hub import FORMS, KEY, loadable_model, model_config_from_hub, resolve_model
from easyrl.model.mixers import elements_per_token, unsupported_layer

SAFETENSORS = "model.safetensors"
BOUNDED_ROPES = {"default", "llama3", "dynamic", "mrope"}
"""RoPE types with which `max_position_embeddings` bounds the sequence length."""
NUM_SAMPLES, SAMPLE_BYTES = 32, 4096  # the samples of a weights file that its fingerprint hashes
FLOAT_BYTES = 4
NARROW_DTYPES = {"BF16": "bfloat16", "F16": "float16"}  # safetensors' names
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
OTHER_NAMES_IN_VLLM = ("mixtral",)
"""Types of models whose weights have other names in vLLM than in transformers: seen with 0.32."""
TOKENIZERS = ("token*", "vocab*", "*.tiktoken", "*.model", "tekken.json")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    path: str
    config: dict[str, Any]  # the content of `config.json`
    num_weights: int | None  # elements of all weights, tied ones once; None if unknown
    stored_dtype: str  # torch's name of all weights' dtype; float32 if they differ or it is unknown


def read_model_files(path: str, key: str = KEY, *, is_whole: bool = True) -> ModelFiles:
    """Read the model of `path`: a folder, a hub id or a built-in model. Raises ConfigError, which
    names the setting `key`, if it is quantized, or a folder lacks config.json or, with `is_whole`,
    weights or a tokenizer."""
    try:
        return _read_model_files(path, is_whole=is_whole)
    except ConfigError as error:
        raise type(error)(str(error).replace(KEY, key)) from None


def _read_model_files(path: str, *, is_whole: bool) -> ModelFiles:
    folder = Path(resolve_model(path))
    if not folder.is_dir():
        folder, is_whole = model_config_from_hub(path).parent, False  # the rest is downloaded later
    config = _read_json(folder / "config.json")
    keys = ("quantization_config", "compression_config", "quantization")  # the last is MLX's
    parts = (config, config.get("text_config"))
    is_quantized = any(part.get(key) for part in parts if part for key in keys)
    if is_quantized or any(folder.glob("*quant*_config.json")):
        raise ConfigError(
            f"{KEY}: '{path}' has quantized weights, which can be neither trained nor evaluated; "
            "use the model that it was made from, in float32, bfloat16 or float16"
        )
    num_weights, stored_dtype = _weights(folder, config, is_whole=is_whole)
    for what, patterns in (
        (f"weights ({SAFETENSORS})", (f"{SAFETENSORS}*", "pytorch_model.bin*")),
        ("tokenizer (tokenizer.json)", TOKENIZERS),  # transformers would make an empty one
    ):
        if is_whole and not any(any(folder.glob(pattern)) for pattern in patterns):
            raise ConfigError(f"{KEY}: the folder '{path}' has no {what}; {FORMS}")
    return ModelFiles(path, config, num_weights, stored_dtype)


def fingerprint(path: str) -> str:
    """Return an identity of the content: a hub revision, or a digest. Reads a few MB."""
    folder = Path(resolve_model(path))
    if not folder.is_dir():
        return model_config_from_hub(path).parent.name
    digest = hashlib.sha256((folder / "config.json").read_bytes() + tokenizer_content(folder))
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as content:
            for number in range(NUM_SAMPLES):
                content.seek(size * number // NUM_SAMPLES)
                digest.update(content.read(SAMPLE_BYTES))
    return digest.hexdigest()


def tokenizer_content(folder: Path) -> bytes:
    """Return the names and contents of the tokenizer's files; empty if the folder has none."""
    patterns = (*TOKENIZERS, "chat_template*")
    files = sorted({file for pattern in patterns for file in folder.glob(pattern)})
    return b"".join(file.name.encode() + file.read_bytes() for file in files if file.is_file())


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{KEY}: '{file}' cannot be read: {error}; {FORMS}") from None


def _weights(folder: Path, config: dict[str, Any], *, is_whole: bool) -> tuple[int | None, str]:
    """Return `num_weights` and `stored_dtype`. Unless `is_whole`, files may be missing."""
    from safetensors import SafetensorError, safe_open

    files, index = [folder / SAFETENSORS], folder / f"{SAFETENSORS}.index.json"
    if not files[0].is_file():
        names = _read_json(index).get("weight_map", {}) if index.is_file() else {}
        files = [folder / name for name in set(names.values())]
    if not files or not (is_whole or all(file.is_file() for file in files)):
        return None, "float32"
    sizes: dict[str, int] = {}
    dtypes: set[str] = set()
    for file in files:
        try:
            with safe_open(file, framework="numpy") as tensors:  # checks the file's length
                for name in tensors.keys():  # noqa: SIM118
                    header = tensors.get_slice(name)
                    sizes[name] = math.prod(header.get_shape())
                    dtypes.add(NARROW_DTYPES.get(header.get_dtype(), "float32"))
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"{KEY}: '{file}' is not a complete safetensors file: {error}; download or save "
                "the model again"
            ) from None
    if config.get("tie_word_embeddings"):
        sizes.pop("lm_head.weight", None)
    return sum(sizes.values()), dtypes.pop() if len(dtypes) == 1 else "float32"


def max_positions(model_config: dict[str, Any]) -> int | None:
    """Return the longest sequence for which `config.json` makes the model exact; None if it sets no
    bound. Up to this length the factors of `longrope` and `dynamic` RoPE are constant."""
    config = model_config.get("text_config") or model_config
    longest = config.get("max_position_embeddings") or config.get("n_positions")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for each in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind = each.get("rope_type") or each.get("type") or "default"
        if kind in ("longrope", "su"):
            original = "original_max_position_embeddings"
            longest = each.get(original) or config.get(original) or longest
        elif kind not in BOUNDED_ROPES:
            return None
    return longest


def check_positions(limits: TokenLimits, model: ModelFiles, *, section: str = "rollout") -> None:
    """Raise ConfigError if sequences may be longer than the model's positions."""
    positions = max_positions(model.config)
    if positions is not None and limits.max_sequence_length > positions:
        raise ConfigError(
            f"data.max_prompt_length + {section}.max_completion_length: expected at most "
            f"{positions} (by the config.json of {model.path}), got "
            f"{limits.max_prompt_length} + {limits.max_completion_length}"
        )


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The sizes of a model that memory follows from."""

    num_layers: int
    width: int
    mlp_width: int  # of the widest layer: all experts together that process one token
    num_heads: int
    num_key_value_heads: int
    head_size: int
    vocabulary_size: int
    is_tied: bool  # embedding and head share one weight
    is_batched: bool  # an engine can process several groups at once (else `engines.generate`)
    num_weights: int
    num_trained: int | None  # elements of LoRA's adapters; None: all weights are trained
    stored_dtype: str = "float32"
    is_in_vllm: bool = True  # under the same names

    @property
    def outer_weights(self) -> int:  # elements outside of the layers
        return self.vocabulary_size * self.width * (1 if self.is_tied else 2) + self.width

    @property
    def layer_weights(self) -> int:  # elements of all layers
        return self.num_weights - self.outer_weights

    @property
    def kv_elements(self) -> int:  # of a token's keys and values in all layers
        return elements_per_token(self.num_layers, self.num_key_value_heads, self.head_size)


def model_size(
    model_config: Mapping[str, Any], num_weights: int, num_trained: int | None = None
) -> ModelSize | None:
    """Read the sizes from a `config.json`. Returns None if they do not have the usual names."""
    stored_dtype = str(model_config.get("dtype") or model_config.get("torch_dtype") or "float32")
    config = model_config.get("text_config") or model_config
    config = {key: value for key, value in config.items() if value is not None}
    try:
        layers, width = config["num_hidden_layers"], config["hidden_size"]
        heads, vocabulary = config["num_attention_heads"], config["vocab_size"]
    except KeyError:
        return None
    mlp_width = config.get("intermediate_size", 4 * width)
    if experts := config.get("moe_intermediate_size"):
        mlp_width = experts * config.get("num_experts_per_tok", 1)
        mlp_width += config.get("shared_expert_intermediate_size", 0)
    head_size = config.get("head_dim", width // heads)
    layer_types = config.get("layer_types", ())
    if "v_head_dim" in config:  # latent attention: keys and values differ
        names = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        head_size = sum(config.get(name, 0) for name in names) // 2
    return ModelSize(
        num_layers=layers,
        width=width,
        mlp_width=max(mlp_width) if isinstance(mlp_width, list) else mlp_width,  # Gemma 3n
        num_heads=heads,
        num_key_value_heads=config.get("num_key_value_heads", heads),
        head_size=head_size,
        vocabulary_size=vocabulary,
        is_tied=config.get("tie_word_embeddings", False),
        is_batched=unsupported_layer(layer_types, may_have_states=False) is None,
        num_weights=num_weights,
        num_trained=num_trained,
        stored_dtype=stored_dtype.removeprefix("torch."),
        is_in_vllm=config.get("model_type") not in OTHER_NAMES_IN_VLLM,
    )


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> Any:
    from transformers import AutoTokenizer

    return load_part(AutoTokenizer, "tokenizer", path, trust_remote_code=trust_remote_code)


def tokenizer_of(model: ModelSpec, path: str = "") -> Any:
    """Load the tokenizer of `path` (by default the model's), with `data.chat_template`."""
    tokenizer = load_tokenizer(path or model.path, trust_remote_code=model.trust_remote_code)
    if model.chat_template is not None:
        tokenizer.chat_template = model.chat_template
    return tokenizer


def load_model_config(path: str, *, trust_remote_code: bool = False) -> Any:
    """Load transformers' configuration of a causal language model. Raises ConfigError."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    config = load_part(AutoConfig, "configuration", path, trust_remote_code=trust_remote_code)
    own_classes = getattr(config, "auto_map", None) or {}
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or (
        trust_remote_code and "AutoModelForCausalLM" in own_classes
    ):
        return config
    raise ConfigError(
        f"{KEY}: '{path}' is of type '{config.model_type}', which is not a causal language model "
        "in transformers; use another one, or set model.trust_remote_code=true to use its own code"
    )


def model_config_of(model: ModelSpec) -> Any:
    return load_model_config(model.path, trust_remote_code=model.trust_remote_code)


def load_part(auto_class: Any, what: str, path: str, key: str = KEY, **options: Any) -> Any:
    """Load a part of the model of `path`. Raises ConfigError, which names the setting `key`."""
    source = loadable_model(path)
    quieten_transformers()
    try:
        return auto_class.from_pretrained(source, **options)
    except Exception as error:  # of many types, depending on the files
        reason = " ".join(str(error).split()) or type(error).__name__
        if "trust_remote_code" in reason:
            reason += " Set model.trust_remote_code=true (--trust-remote-code) if you trust it."
        raise ConfigError(f"{key}: cannot load the {what} of '{path}': {reason}") from error


def load_eos_token_ids(path: str, model_config: Any) -> list[int]:
    from transformers import GenerationConfig

    try:
        generation_config = GenerationConfig.from_pretrained(loadable_model(path))
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


def meta_model(config: Any, *, trust_remote_code: bool = False) -> Any:
    """Make the causal language model of a configuration on torch's `meta` device: no memory."""
    import torch
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(config, trust_remote_code=trust_remote_code)


def quieten_transformers() -> None:
    """Turn off its warnings and progress bars: EasyRL raises errors for what matters."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
