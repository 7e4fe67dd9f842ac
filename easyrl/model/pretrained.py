"""What transformers makes of a model's small files: its configuration and its tokenizer.

No torch and no weights: the controller asks here before it starts a process, and the workers
load by the same functions. Whatever does not work is a ConfigError that names `model.path`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from easyrl.config import ConfigError
from easyrl.hub import KEY, resolve_model

OTHER_MODEL = "choose another model"


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a folder, a hub id or a built-in model."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            resolve_model(path), trust_remote_code=trust_remote_code
        )
    except Exception as error:  # each kind of file fails in its own way
        raise ConfigError(
            f"{KEY}: the tokenizer of '{path}' cannot be loaded: {_reason(error)}; save it again "
            "beside the model (tokenizer.save_pretrained)"
        ) from error


def load_model_config(path: str, *, trust_remote_code: bool = False) -> Any:
    """transformers' configuration of a causal language model.

    Raises ConfigError for a model that transformers does not know, that generates no text, or
    that EasyRL could not serve exactly.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            resolve_model(path), trust_remote_code=trust_remote_code
        )
    except Exception as error:  # of a check of its own, or of what the values do to its code
        raise ConfigError(_unknown_model(path, error)) from error
    _check_class(path, config, trust_remote_code=trust_remote_code)
    _check_servable(path, config)
    return config


def _unknown_model(path: str, error: Exception) -> str:
    import transformers
    from transformers import CONFIG_MAPPING

    file = Path(resolve_model(path)) / "config.json"
    raw = json.loads(file.read_text()) if file.is_file() else {}
    kind = raw.get("model_type")
    if "AutoConfig" in raw.get("auto_map", {}) and kind not in CONFIG_MAPPING:
        return (
            f"{KEY}: '{path}' comes with Python code of its own; accepted: "
            "model.trust_remote_code=true, if you trust its source"
        )
    if file.is_file() and kind is None:
        return f"{KEY}: '{file}' has no model_type, so transformers cannot tell what model it is"
    if kind is not None and kind not in CONFIG_MAPPING:
        return (
            f"{KEY}: transformers {transformers.__version__} does not know the model type "
            f"'{kind}' of '{path}'; {OTHER_MODEL}, or a transformers that knows it"
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
            f"{KEY}: '{path}' comes with Python code of its own; accepted: "
            "model.trust_remote_code=true, if you trust its source"
        )
    raise ConfigError(
        f"{KEY}: '{path}' is of type '{config.model_type}', which is no causal language model in "
        f"transformers, so it completes no prompts; {OTHER_MODEL}"
    )


def _check_servable(path: str, config: Any) -> None:
    text = config.get_text_config()
    for index, kind in enumerate(getattr(text, "layer_types", None) or []):
        if kind not in ("full_attention", "sliding_attention"):
            raise ConfigError(
                f"model.path: layer {index} of {path} is of type {kind}; EasyRL serves full and "
                f"sliding-window attention exactly, and nothing approximately; {OTHER_MODEL}"
            )
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = {rope.get("rope_type")} | {
        value.get("rope_type") for value in rope.values() if isinstance(value, dict)
    }
    if changing := kinds & {"dynamic", "longrope"}:
        raise ConfigError(
            f"model.path: {path} uses {changing.pop()} RoPE, whose factors depend on the longest "
            f"sequence beside a token, so packed rows would be wrong; {OTHER_MODEL}, or set "
            "rope_type to 'default' in its config.json if your sequences stay short"
        )


def _reason(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
