"""Which types of models are loaded, and which have a text model inside. No torch here.

    config.json ─► text model inside? ─► no:  transformers' causal language model
                                     └─► yes: the class that has it, without its towers (`towers`)

No family is named here: transformers' mappings say which class a configuration has.
"""

from collections.abc import Mapping
from typing import Any


def text_config_of(config: Any) -> Any:
    """Return the configuration of the text model inside of a model, or None."""
    try:
        text_config = config.get_text_config(decoder=True)
    except ValueError:  # it has several
        return None
    return None if text_config is config else text_config


def may_have_text_part(content: Mapping[str, Any]) -> bool:
    """Return whether a model may have a text model inside, by the content of its config.json: it
    has configurations of several parts. (transformers knows.)"""
    return any(key.endswith("_config") and value for key, value in content.items())


def has_own_code(config: Any) -> bool:
    """Return whether the model's files bring the code of a causal language model."""
    return "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})


def whole_class(config: Any, *, trust_remote_code: bool = False) -> Any:
    """Return transformers' class of a model with a text model inside, which has all its towers;
    None: models of this configuration are loaded whole."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING

    if text_config_of(config) is None or (trust_remote_code and has_own_code(config)):
        return None
    for mapping in (MODEL_FOR_MULTIMODAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        if type(config) in mapping:
            return mapping[type(config)]
    return None


def picture_class(config: Any) -> Any:
    """Return transformers' class of a model that reads pictures and writes text, with its tower;
    None: models of this configuration read no pictures."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    whole = whole_class(config)
    is_known = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    has_encoder = whole is not None and hasattr(whole, "get_image_features")
    has_placeholder = getattr(config, "image_token_id", None) is not None
    return whole if is_known and has_encoder and has_placeholder else None


def unsupported_type_reason(config: Any) -> str | None:
    """Return a clause why models of this type cannot be trained, as far as its configuration says;
    None: they can."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING

    is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    text_config = text_config_of(config)
    if text_config is None:
        return None if is_causal else "which is not a causal language model in transformers"
    if not is_causal and type(config) not in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        return "for which transformers has no class that writes text"
    if config.is_encoder_decoder or text_config.is_encoder_decoder:
        return "whose text model has an encoder and a decoder, so it is no causal language model"
    return None
