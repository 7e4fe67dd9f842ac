"""Print docs/multimodal.md: `python docs/multimodal.py > docs/multimodal.md` (minutes on one core).

Each row is what happens to a tiny random model of that type, by the code that a run loads and
writes its model with:

    type ──► tiny configuration ──► folder ──► `load_policy` ──► other weights ──► folder, compared

`python docs/multimodal.py qwen3_5 llava` prints the rows of these types only.
"""

import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import CONFIG_MAPPING, AutoConfig  # noqa: E402
from transformers.models.auto import modeling_auto  # noqa: E402

from easyrl.config import ConfigError  # noqa: E402
from easyrl.model.files import (  # noqa: E402
    load_model_config,
    load_tokenizer,
    quieten_transformers,
    read_loaded_files,
)
from easyrl.model.loading import load_policy  # noqa: E402
from easyrl.model.saving import save_policy  # noqa: E402
from easyrl.model.text_part import (  # noqa: E402
    text_config_of,
    unsupported_type_reason,
    whole_class,
)
from easyrl.model.towers import find_kept_parts, find_parts, making  # noqa: E402
from multimodal_models import same_bits, stored, write_model  # noqa: E402

MOST_WEIGHTS = 100_000_000
"""A model with more of them does not take its sizes from the keys below."""
NUM_LAYERS = 4  # of a text model with several kinds of layers
ROPE_SECTIONS = [2, 1, 1]  # of time, height and width; of all heads that are rotated
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 160,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Towers, under several names.
    "embed_dim": 32,
    "d_model": 32,
    "depth": 2,
    "num_heads": 4,
    "num_layers": 2,
    "n_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "ffn_dim": 48,
    "out_hidden_size": 32,
    "text_hidden_size": 32,
    "encoder_hidden_size": 32,
    "projection_dim": 32,
    "projector_hidden_size": 32,
    "base_channels": 32,
    "num_filters": 2,
    # Experts.
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "moe_k": 2,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "intermediate_size_mlp": 48,
    # Latent attention.
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    # Layers with a state.
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 1,
    "chunk_size": 64,
    # Gemma.
    "vocab_size_per_layer_input": 160,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
    "num_global_key_value_heads": 2,
    "global_head_dim": 8,
    "num_kv_shared_layers": 0,
}
"""Small sizes by keys of the configurations of parts. A part gets those that it has."""
MORE: dict[str, dict[str, Any]] = {
    "deepseek_ocr2": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
    "ernie4_5_vl_moe": {
        "moe_intermediate_size": [16, 16],
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [1, 1, 2]},
    },
    "diffusion_gemma": {"per_layer_config": {}},
    "dots3_note": {"per_layer_config": {}},
    "gemma3n": {
        "intermediate_size": [48] * NUM_LAYERS,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gemma4": {"per_layer_config": {}},
    "gemma4_unified": {"per_layer_config": {}},
    "glm5_next": {"num_key_value_heads": 4},
    "hunyuan_vl": {"head_dim": 8},
    "kimi_k25": {"num_key_value_heads": 4},
    "unlimited_ocr": {"num_key_value_heads": 4},
    "step3p7": {"sliding_window": 16},
}
"""What the text models of these types need beside SMALL, or instead."""

PAGE = f"""# Models with a text model inside

Without pictures in the prompts ([data.md](data.md#pictures)) multimodal models are trained as text
models: towers (of pictures, of sound) are not loaded, and
what a run writes has their weights bit for bit
([Exporting](resuming.md#exporting)). No list of names decides what is loaded: transformers'
mappings say which class a type has, and the class says which of its modules is the decoder.

Each row is what happened to a tiny random model of the type, on a CPU with transformers
{transformers.__version__}: its folder was loaded, its text model changed, and the model written.

- **prompt once**, **prompt repeated**: how groups are trained.
- **kept**: every weight outside of the text model had the same bits afterwards, and all names were
  those of the source.

| type | class | training | files |
|---|---|---|---|
"""
AFTER = """
No tiny model of these types was made, so nothing is said of them: {not_tried}.

This page is printed by `python docs/multimodal.py > docs/multimodal.md`.
"""


class NotTried(Exception):
    """No tiny model of a type can be made here; the text says why."""


def multimodal_types() -> list[str]:
    """Return the types with several parts that transformers has a class for that writes text."""
    mappings = (
        modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    )
    found = set[str]()
    for mapping in mappings:
        for model_type in mapping:
            if CONFIG_MAPPING[model_type].sub_configs:
                found.add(model_type)
    return sorted(found)


def tiny_config(model_type: str) -> Any:
    """Return a configuration with small parts. Raises NotTried."""
    config = AutoConfig.for_model(model_type)
    try:
        _shrink(config)
        for key, value in MORE.get(model_type, {}).items():
            setattr(text_config_of(config), key, value)
        type(config).from_dict(config.to_dict())  # it checks more when it is read
        whole = whole_class(config)
        with torch.device("meta"), making(whole):
            num_weights = whole._from_config(config).num_parameters()
    except Exception as error:  # any, depending on what the type's code expects
        raise NotTried(f"{type(error).__name__}: {error}") from error
    if num_weights > MOST_WEIGHTS:
        raise NotTried(f"{num_weights:,} weights")
    return config


def _shrink(config: Any) -> None:
    """Give a configuration, and those of its parts, the sizes of SMALL."""
    for key, value in [*vars(config).items()]:
        if isinstance(value, transformers.PreTrainedConfig):
            _shrink(value)
        elif key in SMALL and isinstance(value, int) and not isinstance(value, bool):
            setattr(config, key, SMALL[key])
    kinds = getattr(config, "layer_types", None)
    if kinds and "layer_types" in vars(config):
        config.num_hidden_layers = NUM_LAYERS
        config.layer_types = [*dict.fromkeys(kinds), *kinds][:NUM_LAYERS]
        if getattr(config, "mlp_layer_types", None):
            config.mlp_layer_types = config.mlp_layer_types[:NUM_LAYERS]
    rope = getattr(config, "rope_parameters", None) or {}
    for settings in (rope, *(each for each in rope.values() if isinstance(each, dict))):
        if "rope_theta" in settings:
            settings["mrope_section"] = ROPE_SECTIONS
            settings["partial_rotary_factor"] = 1.0


def decide(model_type: str) -> str:
    """Return the row of a type; empty if it has no text model inside. Raises NotTried."""
    try:
        config = AutoConfig.for_model(model_type)
    except Exception as error:  # any, depending on what the type's code expects
        raise NotTried(f"{type(error).__name__}: {error}") from error
    if text_config_of(config) is None:
        return ""
    whole = whole_class(config)
    name = "" if whole is None else whole.__name__
    reason = unsupported_type_reason(config)
    if reason is not None:
        return f"| `{model_type}` | {name} | refused: {reason} | |"
    config = tiny_config(model_type)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "source")
        try:
            write_model(source, config)
        except Exception as error:  # any, depending on what the type's code expects
            raise NotTried(f"{type(error).__name__}: {error}") from error
        try:
            training, files = _train_and_write(source, Path(folder, "written"))
        except ConfigError as error:
            reason = " ".join(str(error).replace(str(source), "the model").split())
            return f"| `{model_type}` | {name} | refused: {reason} | |"
    return f"| `{model_type}` | {name} | {training} | {files} |"


def _train_and_write(source: Path, written: Path) -> tuple[str, str]:
    """Load the folder, change the text model, write the folder, and compare the two."""
    read_loaded_files(str(source))
    policy = load_policy(str(source))
    kept = find_kept_parts(str(source), policy.model)
    with torch.no_grad():
        for weight in policy.trained_parameters():
            weight.add_(0.01)
    save_policy(policy, written, load_tokenizer("tiny"), kept=kept)
    training = "prompt once"
    if policy.no_packing_reason is not None:
        training = f"prompt repeated: {policy.no_packing_reason}"
    before = stored(source)
    after = stored(written)
    parts = find_parts(load_model_config(str(source)), before)
    is_kept = all(same_bits(before[name], after[name]) for name in parts.kept)
    has_names = before.keys() == after.keys()
    return training, "kept" if is_kept and has_names else "other names"


def main() -> None:
    warnings.simplefilter("ignore")
    quieten_transformers()
    chosen = sys.argv[1:]
    if not chosen:
        print(PAGE, end="")
    not_tried: dict[str, str] = {}
    for model_type in chosen or multimodal_types():
        try:
            row = decide(model_type)
            if row:
                print(row, flush=True)
        except NotTried as error:
            not_tried[model_type] = " ".join(str(error).split())
    if chosen:
        for model_type, reason in not_tried.items():
            print(f"{model_type}: no tiny model: {reason}")
    else:
        print(AFTER.format(not_tried=", ".join(f"`{each}`" for each in not_tried)), end="")


if __name__ == "__main__":
    main()
