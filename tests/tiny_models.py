"""Tiny random models of many families, and references that run each sequence alone."""

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from easyrl.data.hub import resolve_model
from easyrl.layout.tree import NONE, TokenTree
from easyrl.model.inputs import ModelInputs
from easyrl.model.mixers.flex import FlexAttention
from easyrl.types import WeightPiece

VOCABULARY = 61
WINDOW = 5  # shorter than the longest sequence
LENGTHS = [3, 13, 1, 8]

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "vocab_size": VOCABULARY, "max_position_embeddings": 64}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
WINDOWED = {"use_sliding_window": True, "sliding_window": WINDOW}
EXPERTS = {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
EXPERT_SIZE = {"moe_intermediate_size": 16}
SHARED_EXPERT = {**EXPERT_SIZE, "shared_expert_intermediate_size": 16}
ALTERNATING = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
WITH_SINKS = {
    "gpt_oss": {
        **GROUPED,
        **EXPERTS,
        **ALTERNATING,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "truncate": False,
        },
    },
    "granite_swa": {**GROUPED, **ALTERNATING},
    "granitemoe_swa": {**GROUPED, **EXPERTS, **ALTERNATING},
    "flint": {**GROUPED, **EXPERTS, **SHARED_EXPERT, **ALTERNATING, "mlp_only_layers": [0]},
    # Values have another size than keys, and only sliding layers have sinks.
    "mimo_v2_flash": {
        **GROUPED,
        **ALTERNATING,
        **EXPERT_SIZE,
        "num_key_value_heads": 1,
        "v_head_dim": 12,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
}
"""Families whose attention has a sink for each head."""
FAMILIES = {
    "qwen2": {"num_key_value_heads": 2},
    "qwen2_window": {"num_key_value_heads": 2, **WINDOWED, "max_window_layers": 1},
    "qwen3": {**GROUPED, "tie_word_embeddings": True},
    "llama": GROUPED,
    "mistral": {**GROUPED, "sliding_window": WINDOW},
    # A query scaling that is not head_dim ** -0.5, and soft-capping strong enough to matter.
    "gemma2": {
        **GROUPED,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 3,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {**GROUPED, "sliding_window": WINDOW, "sliding_window_pattern": 2},
    # Sizes for each layer; the last layers attend to the keys of an earlier one.
    "gemma3n_text": {
        **GROUPED,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "sliding_window": WINDOW,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "laurel_rank": 4,
        "altup_num_inputs": 2,
    },
    "gpt_neox": {"rotary_pct": 0.5},
    "olmo2": {"num_key_value_heads": 2},
    "qwen3_moe": {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, **EXPERT_SIZE},
    # Queries are scaled by their positions, from `original_max_position_embeddings` on.
    "ministral3": {
        **GROUPED,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 2,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "diffllama": {"num_key_value_heads": 2},  # differential attention: two in each layer
    "phi3": {"num_key_value_heads": 2, "sliding_window": WINDOW},
    # Multi-head latent attention: values are smaller than queries and keys.
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "first_k_dense_replace": 3,
    },
    **WITH_SINKS,
}

OLD_SIZES = {"n_layer": 2, "n_head": 4, "n_embd": 32, "rotary_dim": 4, "n_positions": 64}
IGNORED_STATE = "ignores the state"
OTHER_RESULTS = "a packed row gives other results"
NO_INTERFACE = "uses transformers' attention interface"

# For each family its configuration, and the reported reason.
UNSHARED = {
    "mamba": (
        {"state_size": 4, "conv_kernel": 4, "time_step_rank": 4},
        IGNORED_STATE,
    ),
    "llama4_text": (
        {**GROUPED, **EXPERTS, "intermediate_size_mlp": 48, "attention_chunk_size": 4},
        "layer 0 is of type chunked_attention",
    ),
    # It learns which keys are visible.
    "doge": (
        {"num_key_value_heads": 2, "keep_window_size": 64},
        "layer 0 uses its own attention mask",
    ),
    "bloom": (OLD_SIZES, NO_INTERFACE),
    # Windows that are only in the mask that transformers builds.
    "qwen2_moe": (
        {"num_key_value_heads": 2, **EXPERTS, **SHARED_EXPERT, **WINDOWED},
        "does not pass its sliding window",
    ),
    # It computes positions from the tokens themselves.
    "roberta": ({"is_decoder": True}, OTHER_RESULTS),
}
LONG = {"max_position_embeddings": 512}
DELTA_RULE = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
CONVOLUTION = {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3}
MAMBA_2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 64,
}
WITH_STATES = {
    "qwen3_5_text": GROUPED | LONG | DELTA_RULE,
    "qwen3_5_moe_text": GROUPED | LONG | DELTA_RULE | EXPERTS | SHARED_EXPERT,
    "qwen3_next": GROUPED | LONG | DELTA_RULE | EXPERTS | SHARED_EXPERT,
    "olmo_hybrid": GROUPED | LONG | DELTA_RULE,
    "lfm2": GROUPED | LONG | CONVOLUTION,
    "lfm2_moe": GROUPED | LONG | CONVOLUTION | EXPERTS | EXPERT_SIZE | {"num_dense_layers": 1},
    "granitemoehybrid": GROUPED
    | LONG
    | MAMBA_2
    | {"layer_types": ["mamba", "attention", "mamba"], "shared_intermediate_size": 16}
    | {"num_local_experts": 2, "num_experts_per_tok": 1},
    "falcon_h1": GROUPED | LONG | MAMBA_2 | {"mamba_d_ssm": 64},
    "bamba": GROUPED | LONG | MAMBA_2 | {"attn_layer_indices": [1]},
    "nemotron_h": {
        **GROUPED,
        **LONG,
        "layers_block_type": ["mamba", "attention", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 64,
    },
    "zamba2": {
        **GROUPED,
        **LONG,
        "layers_block_type": ["mamba", "hybrid", "mamba"],
        "attention_head_dim": 16,
        "mamba_d_state": 8,
        "n_mamba_heads": 4,
        "mamba_ngroups": 1,
        "chunk_size": 64,
        "num_mem_blocks": 1,
    },
    "mamba2": {
        "max_position_embeddings": 512,
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 8,
        "n_groups": 1,
        "chunk_size": 64,
    },
}
"""Families whose layers have a state, as it is computed in packed rows."""

SPREAD = 0.1
"""Spread of the weights: with more, gradients of recurrences exceed float32's precision."""


def tiny_model(family, attention="eager", spread=0.2, seed=1, **changes):
    model_type = family.removesuffix("_window")
    config = AutoConfig.for_model(model_type, **(SIZES | FAMILIES.get(family, {}) | changes))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Large enough that a wrong mask shows in the first digit.
            parameter.normal_(1.0 if "norm" in name else 0.0, spread)
    return model.eval()


def plain_model(path, weights=None, dtype=torch.float32):
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=dtype)
    if weights is not None:
        missing, unexpected = model.load_state_dict(weights, strict=False)
        assert not unexpected and {*missing} <= {"lm_head.weight"}  # tied: it has one name
    return model.to(dtype).eval()


def plain_logprobs(logits, targets, temperature):
    """Log-probabilities and entropies by definition, in float64."""
    every = torch.log_softmax(logits.double() / temperature, dim=-1)
    return every.gather(1, targets[:, None])[:, 0], -(every.exp() * every).sum(-1)


def pieces_of(weights, size=100):
    """Each weight in pieces of `size` elements, in memory that is overwritten by the next."""
    for weight in weights:
        for number, values in enumerate(weight.materialize().detach().flatten().split(size)):
            buffer = values.clone()
            yield WeightPiece(weight.name, number * size, buffer, tuple(weight.reference.shape))
            buffer.fill_(torch.nan)


def untied_model(folder):
    """A random model for vLLM with an untied head, biases, and the built-in model's tokenizer."""
    sizes = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32768}
    ends = {"eos_token_id": 1, "bos_token_id": None, "tie_word_embeddings": False}
    tiny_model("qwen2", None, 0.1, 0, **sizes, **heads, **ends).save_pretrained(folder)
    AutoTokenizer.from_pretrained(resolve_model("tiny")).save_pretrained(folder)
    return str(folder)


def model_with_sinks(folder):
    """A random gpt-oss with the built-in model's tokenizer."""
    changes = {"vocab_size": 99, "max_position_embeddings": 128, "pad_token_id": None}
    changes |= {"eos_token_id": 1, "bos_token_id": None}
    tiny_model("gpt_oss", None, SPREAD, **changes).save_pretrained(folder)
    AutoTokenizer.from_pretrained(resolve_model("tiny")).save_pretrained(folder)
    return str(folder)


def draw_sequences(lengths, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in lengths]


def lay_out(groups):
    """Return, of a row of groups, each (P, [R, ...]), the indices of each completion's whole
    sequence."""
    sequences, start = [], 0
    for num_prompt, completions in groups:
        prompt = torch.arange(start, start + num_prompt)
        start += num_prompt
        for length in completions:
            sequences.append(torch.cat([prompt, torch.arange(start, start + length)]))
            start += length
    return sequences


def tree_of(groups):
    """The tree of a row of groups: of each the prompt's length, those of its completions and, if
    it is deeper, what each of these continues (0: the prompt, n: the n-th of them)."""
    trees = []
    for prompt, completions, *parents in groups:
        above = parents[0] if parents else [0] * len(completions)
        trees.append(TokenTree(np.array([prompt, *completions]), np.array([NONE, *above])))
    return TokenTree.joined(trees)


def dense_mask(tree, window=None):
    """FlexAttention's mask of the row, evaluated for every pair: [T, T]."""
    indices = torch.arange(tree.num_tokens)
    visible = FlexAttention(tree, torch.device("cpu")).visible(window)
    return visible(None, None, indices[:, None], indices[None, :])


def packed_logits(policy, sequences, *, as_trained=False):
    """Logits of a packed row. `as_trained`: by the head on the hidden states."""
    lengths = [len(sequence) for sequence in sequences]
    row = ModelInputs.of_row(torch.cat(sequences), TokenTree.of_sequences(lengths))
    if as_trained:
        return policy.head(policy.hidden_states(row))
    return policy.forward(row)


def separate_logits(reference, sequences):
    return torch.cat([reference(input_ids=s[None], use_cache=False).logits[0] for s in sequences])


def gradients(model, logits, sequences):
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(len(logits), generator=generator)
    targets = torch.cat([sequence.roll(-1) for sequence in sequences])
    model.zero_grad()
    (-F.cross_entropy(logits, targets, reduction="none") * weights).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def largest_gradient_gap(got, expected, floor=1e-4):
    """Return the largest |difference| / max(|g|, floor |all g|) over the tensors."""
    assert got.keys() == expected.keys()
    total = torch.stack([g.norm() for g in expected.values()]).norm()
    return max(
        float((got[name] - g).norm() / max(g.norm(), floor * total)) for name, g in expected.items()
    )


def assert_same_as_alone(reference, policy, sequences, floor=1e-4):
    expected, got = separate_logits(reference, sequences), packed_logits(policy, sequences)
    assert float((got - expected).detach().abs().max()) <= 1e-5
    gradients_got = gradients(policy.model, got, sequences)
    gradients_expected = gradients(reference, expected, sequences)
    assert largest_gradient_gap(gradients_got, gradients_expected, floor) <= 1e-5
