"""Print docs/families.md: `python docs/families.py > docs/families.md` (minutes on one core).

Each row is what loading a tiny random model of that type decides, by the code that a run loads its
model with:

    type ──► tiny configuration ──► random weights in a folder ──► `load_policy` ──► row

`python docs/families.py qwen3 lfm2` prints the rows of these types only.
"""

import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM  # noqa: E402
from transformers.models.auto import modeling_auto  # noqa: E402

from easyrl.config import ConfigError  # noqa: E402
from easyrl.model.files import quieten_transformers  # noqa: E402
from easyrl.model.loading import load_policy  # noqa: E402
from easyrl.model.mixers.kinds import has_states  # noqa: E402
from tiny_models import FAMILIES, SIZES, SPREAD, UNSHARED, WITH_STATES, tiny_model  # noqa: E402

MOST_WEIGHTS = 10_000_000
"""A model with more of them does not take its sizes from the keys below."""
SMALL: dict[str, Any] = {
    **SIZES,
    "num_hidden_layers": 4,
    "max_position_embeddings": 512,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 5,
    # Sizes under older names.
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 48,
    "n_positions": 512,
    "n_ctx": 512,
    "d_model": 32,
    "n_layers": 2,
    "n_heads": 4,
    "max_seq_len": 512,
    "num_layers": 2,
    "num_heads": 4,
    "rotary_dim": 4,
    "ffn_dim": 48,
    "ffn_hidden_size": 48,
    "max_target_positions": 512,
    "word_embed_proj_dim": 32,
    # Experts.
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "moe_intermediate_size": 16,
    "expert_ffn_hidden_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "zero_expert_num": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_dense_layers": 1,
    "first_k_dense_replace": 1,
    "router_hidden_size": 16,
    # Latent attention.
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "qk_head_dim": 16,
    "o_lora_rank": 16,
    "o_groups": 2,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 4,
    # Layers with a state.
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "layer_group_size": 2,
    "state_size": 8,
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "n_mamba_heads": 2,
    "lru_width": 32,
    "block_size": 64,
}
"""Small sizes by keys of config.json. A type gets those that it has, and has not null."""
MORE: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma4_text": {"vocab_size_per_layer_input": 61, "hidden_size_per_layer_input": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "kimi_linear": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 16,
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""What these types need beside SMALL, or instead."""
KNOWN = FAMILIES | WITH_STATES
KNOWN |= {name: config for name, (config, _) in UNSHARED.items() if name != "qwen2_moe"}
"""Configurations of tests, by type. That of `qwen2_moe` has windows, which its models have not."""

PAGE = f"""# Model families

What a run does with a model of each type, and what generates its completions. The type is
`model_type` in the model's config.json.

- **prompt once**: a group is trained as one packed row, so that its prompt is computed once for all
  of its completions.
- **prompt once, states copied**: the same for models whose layers have a state (gated delta rules,
  Mamba-2, short convolutions). Such a layer computes the prompt once; each completion begins with a
  copy of the prompt's state, and gradients flow back through it.
- **prompt repeated**: completions are trained as padded rows, each with its prompt. That is exact,
  too, but slower. The reason is given.

No list of names decides. When a model is loaded, a packed row of small groups and trees must give
the logits of its sequences alone, by transformers' own `eager` attention, or prompts are repeated.
A row of this page is that decision for a tiny random model of the type, on a CPU with transformers
{transformers.__version__}; older ones find no layer with a state, and repeat the prompts of
these types. For a model with other features than the tiny one it may differ; a start says what was
decided.

Types with a text model inside, such as Qwen3.5 with its vision tower, are on [a page of their
own](multimodal.md).

The last column says what `make test` compares beside: log-probabilities and the gradients of all
weights with those of separate sequences, in float64.

"""
AFTER = """
This page is printed by `python docs/families.py > docs/families.md`.
"""


class Family(NamedTuple):
    """What a run does with models of a type, as the page says it."""

    model_type: str
    training: str
    engine: str
    tested: str

    def row(self) -> str:
        return f"| `{self.model_type}` | {self.training} | {self.engine} | {self.tested} |"


class NotTried(Exception):
    """No tiny model of a type can be made here; the text says why."""


def text_types() -> list[str]:
    """Return the types that transformers has a causal language model for, without encoders, models
    with an encoder, and those with a configuration for each of several parts."""
    encoders = modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    found = []
    for model_type in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        config_class = CONFIG_MAPPING[model_type]
        has_parts = bool(config_class.sub_configs)
        if not (model_type in encoders or config_class.is_encoder_decoder or has_parts):
            found.append(model_type)
    return sorted(found)


def make_tiny(model_type: str, folder: str) -> None:
    """Write a tiny random model to a folder. Raises NotTried where transformers cannot run it."""
    try:
        sizes = KNOWN.get(model_type) or _small_sizes(model_type)
        config = AutoConfig.for_model(model_type, **(SIZES | sizes))
        auto_model: Any = AutoModelForCausalLM
        with torch.device("meta"):
            num_weights = auto_model.from_config(config).num_parameters()
        if num_weights > MOST_WEIGHTS:
            raise NotTried(f"{num_weights:,} weights")
        model = tiny_model(model_type, None, SPREAD, **sizes)
        with torch.no_grad():
            model(input_ids=torch.arange(3, 20)[None], use_cache=False)
        model.save_pretrained(folder)
    except Exception as error:  # any, depending on what the type's code expects
        raise NotTried(f"{type(error).__name__}: {error}") from error


def _small_sizes(model_type: str) -> dict[str, Any]:
    """Return those of SMALL that the type's configuration has."""
    config = AutoConfig.for_model(model_type).to_dict()
    sizes = {key: value for key, value in SMALL.items() if config.get(key) is not None}
    if "kv_lora_rank" in sizes:  # latent attention has keys for every head
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    return sizes | MORE.get(model_type, {})


def decide(model_type: str) -> Family:
    """Return what a run does with a tiny model of a type. Raises NotTried."""
    with tempfile.TemporaryDirectory() as folder:
        make_tiny(model_type, folder)
        try:
            policy = load_policy(folder)
        except ConfigError as error:
            reason = str(error).replace(f" ({folder})", "").split("): ")[-1]
            reason = reason.removeprefix("model.path: ").removesuffix("; use another model")
            return Family(model_type, f"refused: {reason}", "", "")
    reason = policy.no_packing_reason
    if reason is not None:
        return Family(model_type, f"prompt repeated: {reason}", "the model's own code", "")
    training = "prompt once"
    if has_states(policy.model):
        training += ", states copied"
    tested = "float64" if model_type in FAMILIES or model_type in WITH_STATES else ""
    return Family(model_type, training, "embedded engine", tested)


def families_markdown() -> str:
    lines = ["| type | training | generated by | tested |\n", "|---|---|---|---|\n"]
    not_tried = []
    for model_type in text_types():
        try:
            lines.append(decide(model_type).row() + "\n")
        except NotTried as why:
            print(f"{model_type}: {why}", file=sys.stderr)
            not_tried.append(f"`{model_type}`")
    others = ""
    if not_tried:
        names = ", ".join(not_tried)
        others = f"\nNo tiny model of these types was made, so nothing is said of them: {names}.\n"
    return PAGE + "".join(lines) + others + AFTER


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    quieten_transformers()
    torch.set_num_threads(1)
    if len(sys.argv) == 1:
        print(families_markdown(), end="")
    for model_type in sys.argv[1:]:
        print(decide(model_type).row())
