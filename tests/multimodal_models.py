"""Tiny random models with a text model inside, in folders, of any type that transformers has."""

import json

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer

from easyrl.data.hub import resolve_model
from easyrl.model.text_part import whole_class
from easyrl.model.towers import making

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
ROTARY = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
DELTA_RULE = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
BLOCKS = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4}
FAMILIES = {
    "qwen3_5": {
        "text_config": TEXT | DELTA_RULE | {"rope_parameters": ROTARY},
        "vision_config": BLOCKS | {"out_hidden_size": 32, "num_position_embeddings": 16},
    },
    "qwen2_5_vl": {
        "text_config": TEXT | {"rope_parameters": ROTARY},
        "vision_config": BLOCKS | {"out_hidden_size": 32, "fullatt_block_indexes": [1]},
    },
    # A parameter beside its modules, and a text model that is tied.
    "llava_next": {
        "text_config": {"model_type": "qwen2", **TEXT, "tie_word_embeddings": True},
        "vision_config": {"model_type": "clip_vision_model", **VISION},
        "tie_word_embeddings": True,
    },
    "mistral3": {
        "text_config": {"model_type": "mistral", **TEXT, "sliding_window": None},
        "vision_config": {"model_type": "pixtral", **VISION, "head_dim": 8},
    },
    # A whole causal language model inside, with chunks of attention.
    "llama4": {
        "text_config": TEXT
        | {"intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 64},
        "vision_config": VISION
        | {"projector_input_dim": 32, "projector_output_dim": 32, "vision_output_dim": 32},
    },
}


def multimodal_folder(folder, family, **changes):
    """Write a tiny random model to a folder: its text model in float32, its tower in bfloat16, with
    the built-in model's tokenizer and files of a processor."""
    config = AutoConfig.for_model(family, **FAMILIES[family] | changes)
    write_model(folder, config)
    return folder


def write_model(folder, config):
    torch.manual_seed(1)
    whole = whole_class(config)
    with making(whole):
        model = whole._from_config(config)
    text_model = [model.get_decoder(), model.get_output_embeddings()]
    of_text = {id(weight) for part in text_model if part for weight in part.parameters()}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(1.0 if "norm" in name else 0.0, 0.1)
            if id(weight) not in of_text:
                weight.data = weight.data.bfloat16()
    model.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": "float32"}))
    AutoTokenizer.from_pretrained(resolve_model("tiny")).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"size": {"height": 28}}))
    (folder / "video_preprocessor_config.json").write_text("{}")


def stored(folder):
    """All weights in the files of a folder, by their names."""
    weights = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as content:
            for name in content.keys():  # noqa: SIM118
                assert name not in weights, "it is in two files"
                weights[name] = content.get_tensor(name)
    return weights


def same_bits(one, other):
    """Whether two tensors have the same dtype, shape and bits."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    own_bits, other_bits = (each.reshape(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(own_bits, other_bits)
