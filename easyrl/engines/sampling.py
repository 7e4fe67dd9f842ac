"""Sampling by inverse transform from one uniform number per token.

The numbers of a sequence come from a counter-based generator (Philox) keyed by what names the
sequence, so that they depend on nothing else: not on the batch, the engine or the worker.

Shapes: N sequences, V tokens of the vocabulary.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def uniform_stream(seed: int, key: tuple[int, ...], length: int) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1) of one sequence, one per position: [length]."""
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, *key))))
    return generator.random(length)


def sample(logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Draw one token per row; returns tokens [N] and their log-probabilities [N] float32.

    `logits` is [N, V], `uniforms` float64 [N]. The log-probability is that of the sampling
    distribution softmax(logits / temperature). At temperature 0 the likeliest token is taken,
    and its log-probability is that at temperature 1.
    """
    if temperature == 0.0:
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        tokens = logprobs.argmax(dim=-1)
    else:
        logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
        cumulative = logprobs.double().exp_().cumsum_(dim=-1)  # [N, V]
        threshold = (uniforms * cumulative[:, -1]).unsqueeze(1)
        tokens = torch.searchsorted(cumulative, threshold, right=True).squeeze(1)
        tokens.clamp_(max=logits.shape[1] - 1)
    return tokens, logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
