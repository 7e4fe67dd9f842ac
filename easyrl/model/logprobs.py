"""Log-probabilities of given tokens at the sampling temperature.

Shapes: K tokens, V tokens of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Logits [K, V] and targets [K] -> log-probabilities [K] and entropies [K] (no gradient).

    Both are of the sampling distribution softmax(logits / temperature), in float32, in nats.
    """
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    with torch.no_grad():
        finite = logprobs.clamp(min=torch.finfo(torch.float32).min)  # 0 · log 0 is 0
        entropy = -(logprobs.exp() * finite).sum(dim=-1)
    return logprobs.gather(1, targets.unsqueeze(1)).squeeze(1), entropy
