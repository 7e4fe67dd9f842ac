"""Tiny random models that read pictures, of eleven families, and what their processors would make
of a picture: arrays that follow from the file's digest alone."""

import hashlib

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

from easyrl.data.hub import resolve_model
from easyrl.model.loading import PictureInput
from easyrl.types import Picture, PlacedPictures

PLACEHOLDER = 90
VOCABULARY = 99
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
HEAD = {"head_dim": 16}
SLIDING = {
    "sliding_window": 3,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
}
DELTA_RULE = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
CONVOLUTION = {
    "model_type": "lfm2",
    "layer_types": ["conv", "full_attention", "conv"],
    "block_auto_adjust_ff_dim": False,
    "conv_L_cache": 3,
}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
}
SQUARE = TOWER | {"image_size": 16}
BLOCKS = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
GEMMA_TOWER = TOWER | {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "position_embedding_size": 16,
}
PLAIN_IDS = {"image_token_id": PLACEHOLDER}
INDEX_ID = {"image_token_index": PLACEHOLDER}
QWEN_IDS = {
    "image_token_id": PLACEHOLDER,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}
GEMMA_IDS = {
    "image_token_id": PLACEHOLDER,
    "audio_token_id": 91,
    "boi_token_id": 92,
    "eoi_token_id": 93,
    "video_token_id": 94,
    "boa_token_id": 95,
    "eoa_token_id": 96,
}
GEMMA_4 = {
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "use_bidirectional_attention": "vision",
}


def axes(*sections):
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)}
    return {"rope_parameters": rope}


FAMILIES = {
    "smolvlm": ({"model_type": "llama"}, {"vision_config": SQUARE, "scale_factor": 2, **PLAIN_IDS}),
    "idefics3": (
        {"model_type": "llama"},
        {"vision_config": SQUARE, "scale_factor": 2, **PLAIN_IDS},
    ),
    "internvl": (
        {"model_type": "qwen3", **HEAD},
        {"vision_config": TOWER | {"image_size": [16, 16], "patch_size": [4, 4]}, **PLAIN_IDS},
    ),
    "llava": (
        {"model_type": "llama"},
        {
            "vision_config": SQUARE | {"model_type": "clip_vision_model", "projection_dim": 32},
            **INDEX_ID,
        },
    ),
    "mistral3": (
        {"model_type": "ministral3", **HEAD},
        {
            "vision_config": SQUARE | {"model_type": "pixtral", "head_dim": 16},
            "spatial_merge_size": 2,
            **INDEX_ID,
        },
    ),
    "qwen2_5_vl": (axes(2, 3, 3), {"vision_config": BLOCKS, **QWEN_IDS}),
    "qwen3_vl": (HEAD | axes(4, 2, 2), {"vision_config": BLOCKS, **QWEN_IDS}),
    "qwen3_5": (HEAD | DELTA_RULE, {"vision_config": BLOCKS, **QWEN_IDS}),
    "lfm2_vl": (
        CONVOLUTION,
        {
            "vision_config": TOWER | {"model_type": "siglip2_vision_model", "num_patches": 16},
            "downsample_factor": 2,
            "projector_hidden_size": 32,
            **PLAIN_IDS,
        },
    ),
    "gemma3": (
        HEAD | SLIDING,
        {
            "vision_config": SQUARE,
            "mm_tokens_per_image": 4,
            "boi_token_index": 91,
            "eoi_token_index": 92,
            **INDEX_ID,
        },
    ),
    "gemma4": (HEAD | SLIDING | GEMMA_4, {"vision_config": GEMMA_TOWER, **GEMMA_IDS}),
}
"""For each family the settings of its text model, and the others."""
JOINED_AT = {"smolvlm": 1, "idefics3": 1}
"""The axis of `pixel_values` along which a prompt's pictures stand; in other families 0."""


def _qwen_arrays(random, is_wide):
    grid = (1, 4, 8) if is_wide else (1, 4, 4)
    patches = random.standard_normal((grid[1] * grid[2], 3 * 2 * 16))
    return {"pixel_values": patches, "image_grid_thw": np.array([grid])}


def _square_arrays(random, _):
    return {"pixel_values": random.standard_normal((1, 3, 16, 16))}


def _tile_arrays(random, is_wide):
    return {"pixel_values": random.standard_normal((1, 1 + is_wide, 3, 16, 16))}


def _pixtral_arrays(random, is_wide):
    height = 8 if is_wide else 16
    pixels = np.zeros((1, 3, 16, 16))  # padded to a common size
    pixels[:, :, :height] = random.standard_normal((1, 3, height, 16))
    return {"pixel_values": pixels, "image_sizes": np.array([[height, 16]])}


def _gemma_arrays(random, is_wide):
    height = 3 if is_wide else 6
    places = np.full((1, 36, 2), -1)
    rows, columns = np.divmod(np.arange(height * 6), 6)
    places[0, : height * 6] = np.stack([columns, rows], -1)
    pixels = random.random((1, 36, 48)) * (places[..., :1] >= 0)
    return {"pixel_values": pixels, "image_position_ids": places}


def _lfm_arrays(random, is_wide):
    shape = (4, 2) if is_wide else (4, 4)
    mask = (np.arange(16) < shape[0] * shape[1]).astype(np.int32)[None]
    pixels = random.standard_normal((1, 16, 48)) * mask[..., None]
    return {
        "pixel_values": pixels,
        "pixel_attention_mask": mask,
        "spatial_shapes": np.array([shape]),
    }


ARRAYS = {
    "smolvlm": _tile_arrays,
    "idefics3": _tile_arrays,
    "mistral3": _pixtral_arrays,
    "qwen2_5_vl": _qwen_arrays,
    "qwen3_vl": _qwen_arrays,
    "qwen3_5": _qwen_arrays,
    "lfm2_vl": _lfm_arrays,
    "gemma4": _gemma_arrays,
}


def is_wide(picture):
    """Whether a picture has the second of two sizes."""
    return picture.data[-1] % 2 == 1


def arrays_for(family):
    """A processor's `arrays` for a family."""
    make = ARRAYS.get(family, _square_arrays)

    def arrays_of(pictures):
        every = []
        for picture in pictures:
            seed = int.from_bytes(hashlib.sha256(picture.data).digest()[:8])
            every.append(make(np.random.default_rng(seed), is_wide(picture)))
        joined = {}
        for name in every[0]:
            axis = JOINED_AT.get(family, 0) if name == "pixel_values" else 0
            array = np.concatenate([each[name] for each in every], axis)
            is_real = array.dtype == np.float64
            joined[name] = array.astype(np.float32) if is_real else array
        return joined

    return arrays_of


def num_placeholders(family, picture):
    """The number of tokens that stand for a picture."""
    numbers = {"llava": (16, 16), "internvl": (4, 4), "gemma3": (4, 4), "mistral3": (4, 2)}
    numbers |= {"lfm2_vl": (4, 2), "gemma4": (4, 2)}
    return numbers.get(family, (4, 8))[is_wide(picture)]


def picture(number):
    return Picture(f"picture {number}".encode())


def in_prompt(pictures, prompt):
    """The pictures of a row's prompt, which are encoded together."""
    return (PlacedPictures(tuple(pictures), 0, len(prompt)),) if pictures else ()


def picture_input(family, *, is_trained=False):
    return PictureInput(arrays_for(family), frozenset({PLACEHOLDER}), is_trained=is_trained)


def picture_model(family, **changes):
    text, others = FAMILIES[family]
    config = AutoConfig.for_model(
        family, text_config=TEXT | text | changes, **others, tie_word_embeddings=False
    )
    torch.manual_seed(7)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:
                weight.normal_(0.0, 0.1)
            elif "norm" in name and "bias" not in name:
                weight.normal_(1.0, 0.1)
    return model.eval()


def picture_folder(folder, family, **changes):
    """Write a tiny random model to a folder, with the built-in model's tokenizer."""
    picture_model(family, **changes).save_pretrained(folder)
    AutoTokenizer.from_pretrained(resolve_model("tiny")).save_pretrained(folder)
    return str(folder)
