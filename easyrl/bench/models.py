"""Random models with the shapes of real ones, and random groups. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from easyrl.types import RolloutGroup

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
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**size, **more, max_position_embeddings=4096))


def random_group(prompt_length: int, lengths: Sequence[int], vocab_size: int = 256) -> RolloutGroup:
    """Return a group of random tokens and advantages. `lengths`: of the completions."""
    rng = np.random.default_rng(0)
    num_tokens, num_generations = sum(lengths), len(lengths)
    return RolloutGroup(
        iteration=0,
        policy_version=0,
        group_index=0,
        prompt_index=0,
        prompt_ids=rng.integers(vocab_size, size=prompt_length, dtype=np.int32),
        completion_lengths=np.array(lengths, np.int32),
        completion_ids=rng.integers(vocab_size, size=num_tokens, dtype=np.int32),
        rollout_logprobs=np.zeros(num_tokens, np.float32),
        loss_mask=np.ones(num_tokens, np.bool_),
        rewards=np.zeros(num_generations, np.float32),
        advantages=rng.normal(size=num_generations).astype(np.float32),
        truncated=np.zeros(num_generations, np.bool_),
    )
