"""Random models with the shapes of real ones. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SMALL = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
QWEN3_06B = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}


def random_model(size: Mapping[str, Any], **more: Any) -> Any:
    """Return a float32 Qwen3. `size`, `more`: arguments of its config."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**size, **more, max_position_embeddings=4096))
