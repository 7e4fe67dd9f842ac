"""Sampling by inverse transform from one uniform number per token.

The numbers of a sequence come from a counter-based generator (Philox) keyed by what names the
sequence, so that they depend on nothing else: not on the batch, the engine or the worker.

Shapes: N sequences, V tokens of the vocabulary.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 512
"""Tokens of the vocabulary whose probabilities are summed at a time."""


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
        tokens = _invert(logprobs.double().exp_(), uniforms)
    return tokens, logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)


def _invert(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Where the running sum of probabilities [N, V] passes `uniforms` [N] of its total: [N].

    First the block of tokens, then the token in it, with running sums as products by a triangle:
    accelerators have no running sum that gives the same bits every time.
    """
    num_rows, num_words = probabilities.shape
    padding = -num_words % BLOCK if num_words > BLOCK else 0
    blocks = F.pad(probabilities, (0, padding)).view(num_rows, -1, min(num_words, BLOCK))
    ends = _running_sum(blocks.sum(dim=-1))  # [N, blocks]
    threshold = (uniforms * ends[:, -1]).unsqueeze(1)  # [N, 1]
    block = _first_above(ends, threshold)  # [N, 1]
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp(min=0)), 0.0)
    rows = torch.arange(num_rows, device=block.device)
    inside = before + _running_sum(blocks[rows, block.squeeze(1)])  # [N, BLOCK]
    token = block * blocks.shape[-1] + _first_above(inside, threshold)
    return token.squeeze(1).clamp_(max=num_words - 1)


def _running_sum(values: Tensor) -> Tensor:
    size = values.shape[-1]
    return values @ torch.ones(size, size, dtype=values.dtype, device=values.device).triu_()


def _first_above(sums: Tensor, threshold: Tensor) -> Tensor:
    """Of each row [N, n] the first place whose sum is over the threshold [N, 1]: [N, 1]."""
    place = torch.searchsorted(sums, threshold, right=True)
    return place.clamp_(max=sums.shape[-1] - 1)
