"""Folders with a configuration, a tokenizer and a processor of each family that understands
pictures, without weights. Sizes are small; templates are as those of the families, but short."""

import json
import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

from easyrl.data.hub import resolve_model
from multimodal_models import BLOCKS, DELTA_RULE, ROTARY, TEXT, VISION

TEMPLATE = (
    "{{% for message in messages %}}{{{{ message['role'] }}}}: "
    "{{% if message['content'] is string %}}{{{{ message['content'] }}}}"
    "{{% else %}}{{% for part in message['content'] %}}"
    "{{% if part['type'] == 'image' %}}{image}{{% else %}}{{{{ part['text'] }}}}{{% endif %}}"
    "{{% endfor %}}{{% endif %}}\n{{% endfor %}}"
    "{{% if add_generation_prompt %}}assistant: {{% endif %}}"
)
"""With the text that the family writes for a picture."""
QWEN_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
QWEN_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 14,
    "merge_size": 2,
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 64},
}
QWEN_SHOWN = "<|vision_start|><|image_pad|><|vision_end|>"
TILES = {
    "size": {"longest_edge": 112},
    "max_image_size": {"longest_edge": 56},
    "do_image_splitting": True,
    "do_resize": True,
    "do_pad": True,
}
TILE_TOKENS = [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
TILE_SHOWN = {
    "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
}
GEMMA_TOKENS = {
    "image_token": "<image_soft_token>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
}
FAMILIES = {
    "qwen2_5_vl": {
        "tokens": QWEN_TOKENS,
        "shown": QWEN_SHOWN,
        "images": QWEN_IMAGES,
        "processor": {"processor_class": "Qwen2_5_VLProcessor"},
        "config": {
            "text_config": TEXT | {"rope_parameters": ROTARY},
            "vision_config": BLOCKS | {"out_hidden_size": 32, "fullatt_block_indexes": [1]},
        },
    },
    "qwen3_vl": {
        "tokens": QWEN_TOKENS,
        "shown": QWEN_SHOWN,
        "images": QWEN_IMAGES,
        "processor": {"processor_class": "Qwen3VLProcessor"},
        "config": {
            "text_config": TEXT | {"rope_parameters": ROTARY},
            "vision_config": BLOCKS
            | {
                "out_hidden_size": 32,
                "num_position_embeddings": 16,
                "patch_size": 14,
                "deepstack_visual_indexes": [0, 1],
            },
        },
    },
    "qwen3_5": {
        "tokens": QWEN_TOKENS,
        "shown": QWEN_SHOWN,
        "images": QWEN_IMAGES,
        "processor": {"processor_class": "Qwen3VLProcessor"},
        "config": {
            "text_config": TEXT | DELTA_RULE | {"rope_parameters": ROTARY},
            "vision_config": BLOCKS
            | {"out_hidden_size": 32, "num_position_embeddings": 16, "patch_size": 14},
        },
    },
    "smolvlm": {
        "tokens": TILE_SHOWN,
        "more_tokens": TILE_TOKENS,
        "shown": "<image>",
        "images": {"image_processor_type": "SmolVLMImageProcessor", **TILES},
        "processor": {"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
        "config": {
            "text_config": {"model_type": "llama", **TEXT},
            "vision_config": VISION | {"image_size": 56},
            "scale_factor": 2,
        },
    },
    "idefics3": {
        "tokens": TILE_SHOWN,
        "more_tokens": TILE_TOKENS,
        "shown": "<image>",
        "images": {"image_processor_type": "Idefics3ImageProcessor", **TILES},
        "processor": {"processor_class": "Idefics3Processor", "image_seq_len": 4},
        "config": {
            "text_config": {"model_type": "llama", **TEXT},
            "vision_config": VISION | {"image_size": 56},
            "scale_factor": 2,
        },
    },
    "internvl": {
        "tokens": {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        "shown": "<IMG_CONTEXT>\n",
        "images": {
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": {"height": 28, "width": 28},
            "crop_to_patches": True,
            "max_patches": 6,
        },
        "processor": {"processor_class": "InternVLProcessor", "image_seq_length": 4},
        "placeholder": "<IMG_CONTEXT>",
        "config": {
            "text_config": {"model_type": "qwen3", **TEXT},
            "vision_config": VISION | {"image_size": [28, 28], "patch_size": [7, 7]},
        },
    },
    "llava": {
        "tokens": {"image_token": "<image>"},
        "shown": "<image>\n",
        "images": {
            "image_processor_type": "LlavaImageProcessor",
            "size": {"shortest_edge": 28},
            "crop_size": {"height": 28, "width": 28},
        },
        "processor": {
            "processor_class": "LlavaProcessor",
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
        "config": {
            "text_config": {"model_type": "llama", **TEXT},
            "vision_config": {"model_type": "clip_vision_model", **VISION},
        },
    },
    "mistral3": {
        "tokens": {"image_token": "[IMG]"},
        "more_tokens": ["[IMG_BREAK]", "[IMG_END]"],
        "shown": "[IMG]",
        "images": {
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": 112},
            "patch_size": 14,
        },
        "processor": {
            "processor_class": "PixtralProcessor",
            "patch_size": 14,
            "spatial_merge_size": 2,
        },
        "config": {
            "text_config": {"model_type": "mistral", **TEXT, "sliding_window": None},
            "vision_config": {"model_type": "pixtral", **VISION, "head_dim": 8},
        },
    },
    "gemma3": {
        "tokens": GEMMA_TOKENS,
        "shown": "<start_of_image>",
        "images": {
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 28, "width": 28},
        },
        "processor": {"processor_class": "Gemma3Processor", "image_seq_length": 4},
        "config": {"text_config": TEXT, "vision_config": VISION, "mm_tokens_per_image": 4},
    },
    "gemma4": {
        "tokens": {
            **GEMMA_TOKENS,
            "audio_token": "<audio>",
            "boa_token": "<start_of_audio>",
            "eoa_token": "<end_of_audio>",
        },
        "shown": "<image_soft_token>",
        "images": {
            "image_processor_type": "Gemma4ImageProcessor",
            "patch_size": 4,
            "max_soft_tokens": 140,
            "pooling_kernel_size": 3,
        },
        "processor": {"processor_class": "Gemma4Processor"},
        "config": {"text_config": TEXT, "vision_config": {"patch_size": 4, **VISION}},
    },
    "lfm2_vl": {
        "tokens": {
            "image_token": "<image>",
            "image_start_token": "<|image_start|>",
            "image_end_token": "<|image_end|>",
            "image_thumbnail_token": "<|img_thumbnail|>",
        },
        "more_tokens": [f"<|img_row_{row}_col_{column}|>" for row in (1, 2) for column in (1, 2)],
        "shown": "<image>",
        "images": {
            "image_processor_type": "Lfm2VlImageProcessor",
            "tile_size": 64,
            "encoder_patch_size": 4,
            "min_image_tokens": 4,
            "max_image_tokens": 64,
            "max_tiles": 4,
        },
        "processor": {"processor_class": "Lfm2VlProcessor"},
        "config": {
            "text_config": {
                "model_type": "lfm2",
                **TEXT,
                "layer_types": ["conv", "full_attention"],
            },
            "vision_config": {"model_type": "siglip2_vision_model", **VISION, "patch_size": 4},
        },
    },
}
NEEDS_TORCHVISION = ("mistral3", "lfm2_vl")
"""Families whose processor transformers has only with torchvision, also for pictures."""
BACKEND_FREE = ("idefics3", "llava", "gemma3")
"""Families whose full processor loads without torchvision: it has no part for videos."""


def has_torchvision():
    """Whether torchvision can be imported: it must be built for the torch that is installed."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        return False
    return True


def processor_folder(folder, family):
    """Write the files of a model of the family, but for its weights."""
    about = FAMILIES[family]
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(resolve_model("tiny"), folder, dirs_exist_ok=True)
    (folder / "model.safetensors").unlink()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    names = about["tokens"]
    tokenizer.add_tokens([*names.values(), *about.get("more_tokens", ())], special_tokens=True)
    tokenizer.chat_template = TEMPLATE.format(image=about["shown"])
    tokenizer.save_pretrained(folder)
    settings = folder / "tokenizer_config.json"
    changed = json.loads(settings.read_text())
    changed["extra_special_tokens"] = names
    settings.write_text(json.dumps(changed))
    placeholder = about.get("placeholder", names.get("image_token"))
    config = AutoConfig.for_model(
        family,
        **about["config"],
        image_token_id=tokenizer.convert_tokens_to_ids(placeholder),
    )
    config.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(about["images"]))
    (folder / "processor_config.json").write_text(json.dumps(about["processor"]))
    return folder


def write_model_with_processor(folder, family, **text_settings):
    """Write a model with random weights into a folder, with tokenizer and processor. Its text model
    has these settings besides those of the family."""
    processor_folder(folder, family)
    config = AutoConfig.from_pretrained(folder)
    config.text_config.update(text_settings)
    torch.manual_seed(1)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(1.0 if "norm" in name and "bias" not in name else 0.0, 0.1)
    model.save_pretrained(folder)
