"""A model's small files, read before any weights are loaded.

The first half reads `config.json` and the headers of the weight files, with neither torch nor
transformers. The second half loads configuration and tokenizer by transformers, for the checks of
the controller and for the workers. Every failure is a ConfigError that names `model.path`.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from easyrl.config import ConfigError
from easyrl.config.spec import ModelSpec, TokenLimits
from easyrl.data.hub import (
    FORMS,
    KEY,
    download_small_files,
    loadable_model,
    model_config_from_hub,
    model_folder,
    resolve_model,
)
from easyrl.model.mixers import (
    count_layers,
    elements_of_states,
    elements_per_token,
    num_attention_layers,
    unsupported_layer,
)
from easyrl.model.text_part import (
    has_own_code,
    may_have_text_part,
    text_config_of,
    unsupported_type_reason,
    whole_class,
)
from easyrl.model.weight_files import (
    SAFETENSORS,
    dtype_of,
    main_dtype_of,
    read_headers,
    read_json,
)

BOUNDED_ROPES = {"default", "llama3", "dynamic", "mrope"}
"""RoPE types with which `max_position_embeddings` bounds the sequence length."""
NUM_SAMPLES = 32
SAMPLE_BYTES = 4096
"""A fingerprint hashes this many samples of each weights file, of this length."""
FLOAT_BYTES = 4
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
OTHER_NAMES_IN_VLLM = ("mixtral",)
"""Types of models whose weights have other names in vLLM than in transformers: seen with 0.32."""
TOKENIZERS = ("token*", "vocab*", "*.tiktoken", "*.model", "tekken.json")
"""Patterns of a tokenizer's files."""
WEIGHTS = ("*.safetensors", "*.bin")
QUANTIZED = ("quantization_config", "compression_config", "quantization")
"""Keys of config.json that say that weights are quantized. The last is MLX's."""


class KeptSize(NamedTuple):
    """The weights of a model that are not loaded (`towers`): a run writes them as they are."""

    num_weights: int
    num_bytes: int
    modules: tuple[str, ...]  # that they are of, such as `model.visual`


NOTHING_KEPT = KeptSize(0, 0, ())


@dataclass(frozen=True, slots=True)
class ModelFiles:
    path: str
    config: dict[str, Any]  # the content of `config.json`
    num_weights: int | None  # elements of all weights, tied ones once; None if unknown
    stored_dtype: str  # torch's name of all weights' dtype; float32 if they differ or it is unknown
    kept: KeptSize = NOTHING_KEPT  # what `num_weights` does not count
    main_dtype: str = "float32"
    """The dtype of most elements. A model in bfloat16 may have a few small tensors in float32."""


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
        folder = model_config_from_hub(path).parent
        is_whole = False  # the rest is downloaded later
    config = read_json(folder / "config.json")
    if _is_quantized(folder, config):
        raise ConfigError(
            f"{KEY}: '{path}' has quantized weights, which can be neither trained nor evaluated; "
            "use the model that it was made from, in float32, bfloat16 or float16"
        )
    weights = _read_weights(folder, config, is_whole=is_whole)
    if is_whole:
        missing = None
        if not _has_any(folder, (f"{SAFETENSORS}*", "pytorch_model.bin*")):
            missing = f"weights ({SAFETENSORS})"
        elif not _has_any(folder, TOKENIZERS):  # transformers would make an empty one
            missing = "tokenizer (tokenizer.json)"
        if missing is not None:
            raise ConfigError(f"{KEY}: the folder '{path}' has no {missing}; {FORMS}")
    return ModelFiles(path, config, weights.number, weights.dtype, main_dtype=weights.main_dtype)


def _is_quantized(folder: Path, config: dict[str, Any]) -> bool:
    parts = [config, config.get("text_config") or {}]
    if any(part.get(key) for part in parts for key in QUANTIZED):
        return True
    return _has_any(folder, ["*quant*_config.json"])


def _has_any(folder: Path, patterns: Iterable[str]) -> bool:
    """Return whether the folder has a file whose name matches one of the patterns."""
    return any(any(folder.glob(pattern)) for pattern in patterns)


def fingerprint(path: str) -> str:
    """Return an identity of the content: a hub revision, or a digest. Reads a few MB."""
    folder = Path(resolve_model(path))
    if not folder.is_dir():
        return model_config_from_hub(path).parent.name
    digest = hashlib.sha256((folder / "config.json").read_bytes() + tokenizer_content(folder))
    for file in sorted(file for pattern in WEIGHTS for file in folder.glob(pattern)):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as content:
            for number in range(NUM_SAMPLES):
                content.seek(size * number // NUM_SAMPLES)
                digest.update(content.read(SAMPLE_BYTES))
    return digest.hexdigest()


def has_fingerprint(path: str, before: str) -> bool:
    """Return whether a model has the content that it had with the fingerprint `before`. For a hub
    id another revision has it too, if the commits between them have changed other files alone."""
    if fingerprint(path) == before:
        return True
    if Path(resolve_model(path)).is_dir():
        return False
    old = model_folder(path).parent / before  # in the hub's cache
    if not _has_any(old, WEIGHTS):
        return False
    # What has not changed is in the cache already.
    download_small_files(path, [file.name for file in old.iterdir()])
    return fingerprint(str(old)) == fingerprint(str(model_folder(path)))


def tokenizer_content(folder: Path) -> bytes:
    """Return the names and contents of the tokenizer's files; empty if the folder has none."""
    patterns = (*TOKENIZERS, "chat_template*")
    files = sorted({file for pattern in patterns for file in folder.glob(pattern)})
    return b"".join(file.name.encode() + file.read_bytes() for file in files if file.is_file())


class _StoredWeights(NamedTuple):
    number: int | None  # elements of all weights, tied ones once; None if unknown
    dtype: str  # torch's name of all weights' dtype; float32 if they differ or it is unknown
    main_dtype: str  # that most elements have


def _read_weights(folder: Path, config: dict[str, Any], *, is_whole: bool) -> _StoredWeights:
    """Read the headers of the weight files. Unless `is_whole`, files may be missing."""
    weights = read_headers(folder, is_whole=is_whole)
    if not weights:
        return _StoredWeights(None, "float32", "float32")
    dtype = dtype_of(weights.values())
    main_dtype = main_dtype_of(weights.values())
    if config.get("tie_word_embeddings"):
        weights.pop("lm_head.weight", None)
    number = sum(weight.num_elements for weight in weights.values())
    return _StoredWeights(number, dtype, main_dtype)


def max_positions(model_config: dict[str, Any]) -> int | None:
    """Return the longest sequence for which `config.json` makes the model exact; None if it sets no
    bound. Up to this length the factors of `longrope` and `dynamic` RoPE are constant."""
    config = model_config.get("text_config") or model_config
    longest = config.get("max_position_embeddings") or config.get("n_positions")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    # A model may have several, by kinds of layers: {"full_attention": {"rope_type": …}, …}.
    settings = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    for each in settings:
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
    num_attention_layers: int  # that store keys and values
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
    is_in_vllm: bool = True  # under the same names, and with the pictures of a run that has some
    state_elements: int = 0  # of a sequence's states, in all layers that have one
    num_frozen_weights: int = 0  # of a tower that is loaded and not trained, beside `num_weights`

    @property
    def outer_weights(self) -> int:  # elements outside of the layers
        return self.vocabulary_size * self.width * (1 if self.is_tied else 2) + self.width

    @property
    def layer_weights(self) -> int:  # elements of all layers
        return self.num_weights - self.outer_weights

    @property
    def kv_elements(self) -> int:  # of a token's keys and values in all layers
        return elements_per_token(
            self.num_attention_layers, self.num_key_value_heads, self.head_size
        )


def model_size(
    model_config: Mapping[str, Any], num_weights: int, num_trained: int | None = None
) -> ModelSize | None:
    """Read the sizes from a `config.json`. Returns None if they do not have the usual names."""
    stored_dtype = str(model_config.get("dtype") or model_config.get("torch_dtype") or "float32")
    config = model_config.get("text_config") or model_config
    config = {key: value for key, value in config.items() if value is not None}
    # What a multimodal model's own config says holds, not what that of its text model does.
    is_tied = model_config.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    try:
        num_layers = count_layers(config)
        width = config["hidden_size"]
        num_heads = config["num_attention_heads"]
        vocabulary_size = config["vocab_size"]
    except KeyError:
        return None
    usual_head_size = config.get("head_dim", width // num_heads)
    head_size = config.get("attention_head_dim", usual_head_size)
    layer_types = config.get("layer_types", ())
    if "v_head_dim" in config:  # latent attention: keys and values differ
        key_size = config.get("qk_nope_head_dim", 0) + config.get("qk_rope_head_dim", 0)
        head_size = (key_size + config["v_head_dim"]) // 2
    return ModelSize(
        num_layers=num_layers,
        num_attention_layers=num_attention_layers(config),
        width=width,
        mlp_width=_mlp_width(config, width),
        num_heads=num_heads,
        num_key_value_heads=config.get("num_key_value_heads", num_heads),
        head_size=head_size,
        vocabulary_size=vocabulary_size,
        is_tied=is_tied,
        is_batched=unsupported_layer(layer_types) is None,
        num_weights=num_weights,
        num_trained=num_trained,
        stored_dtype=stored_dtype.removeprefix("torch."),
        is_in_vllm=config.get("model_type") not in OTHER_NAMES_IN_VLLM,
        state_elements=elements_of_states(config),
    )


def _mlp_width(config: Mapping[str, Any], width: int) -> int:
    """Return the width of the widest MLP: of all experts together that process one token."""
    expert_width: int = config.get("moe_intermediate_size", 0)
    if expert_width:
        num_experts: int = config.get("num_experts_per_tok", 1)
        shared: int = config.get("shared_expert_intermediate_size", 0)
        return expert_width * num_experts + shared
    mlp_width: int | list[int] = config.get("intermediate_size", 4 * width)
    if isinstance(mlp_width, list):  # one for each layer (Gemma 3n)
        return max(mlp_width)
    return mlp_width


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
    from transformers import AutoConfig

    config = load_part(AutoConfig, "configuration", path, trust_remote_code=trust_remote_code)
    reason = unsupported_type_reason(config)
    if reason is None or (trust_remote_code and has_own_code(config)):
        return config
    advice = "use another one"
    if has_own_code(config):
        advice += ", or set model.trust_remote_code=true to use its own code"
    raise ConfigError(f"{KEY}: '{path}' is of type '{config.model_type}', {reason}; {advice}")


def read_loaded_files(
    path: str, key: str = KEY, *, is_whole: bool = True, trust_remote_code: bool = False
) -> ModelFiles:
    """Read the model of `path` (`files.read_model_files`), and count what is loaded of it. Its
    configuration has that of the text model inside in full, as `text_config`. Raises ConfigError
    also if weights of towers are missing."""
    files = read_model_files(path, key, is_whole=is_whole)
    if not may_have_text_part(files.config):
        return files
    config = load_model_config(path, trust_remote_code=trust_remote_code)
    if whole_class(config, trust_remote_code=trust_remote_code) is None:
        return files
    described = replace(
        files, config=files.config | {"text_config": text_config_of(config).to_dict()}
    )
    folder = model_folder(path)
    headers = read_headers(folder, is_whole=is_whole)
    if not headers:
        if is_whole and Path(resolve_model(path)).is_dir():
            raise ConfigError(
                f"{key}: expected the weights of '{path}' in safetensors files, from which those "
                "that are not trained can be kept, got files of another kind; save the model again"
            )
        return described
    from easyrl.model.towers import find_parts

    parts = find_parts(config, headers)
    if parts.missing and is_whole:
        raise ConfigError(
            f"{key}: '{path}' lacks weights that its config.json names, which a run would keep: "
            f"{parts.missing[0]} ({len(parts.missing)} such weights); download or save the model "
            "again"
        )
    kept = [headers[name] for name in sorted(parts.kept)]
    loaded = [headers[name] for name in sorted(parts.loaded)]
    return replace(
        described,
        num_weights=parts.num_loaded,
        stored_dtype=dtype_of(loaded),
        main_dtype=main_dtype_of(loaded),
        kept=KeptSize(
            num_weights=sum(weight.num_elements for weight in kept),
            num_bytes=sum(weight.num_bytes for weight in kept),
            modules=_modules_of(parts.kept, parts.loaded),
        ),
    )


def _modules_of(kept: Iterable[str], loaded: Iterable[str]) -> tuple[str, ...]:
    """Return the shortest beginnings of the names of kept weights that no loaded weight has."""
    shared = set[str]()
    for name in loaded:
        shared.update(_beginnings(name))
    modules = set[str]()
    for name in kept:
        own = [each for each in _beginnings(name) if each not in shared]
        modules.add(own[0] if own else name)
    return tuple(sorted(modules))


def _beginnings(name: str) -> list[str]:
    """Return the modules that a weight is in, from the outermost."""
    words = name.split(".")
    return [".".join(words[:count]) for count in range(1, len(words))]


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
        eos = getattr(model_config.get_text_config(), "eos_token_id", None)
    if eos is None:
        return []
    return list(eos) if isinstance(eos, (list, tuple)) else [int(eos)]


def quieten_transformers() -> None:
    """Turn off its warnings and progress bars: EasyRL raises errors for what matters."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
