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


def sample(
    logits: Tensor, uniforms: Tensor, temperature: float, *, top_k: int = 0, top_p: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Draw one token per row; returns tokens [N] and their log-probabilities [N] float32.

    `logits` is [N, V], `uniforms` float64 [N]. With `top_k` and `top_p` only the likeliest tokens
    are drawn (see `_truncate`). The log-probability is that of the whole distribution
    softmax(logits / temperature) all the same, for that is what is trained: the trainer computes
    it too, and the gap between the two stays a matter of numerics. At temperature 0 the likeliest
    token is taken, and its log-probability is that at temperature 1.
    """
    if temperature == 0.0:
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        tokens = logprobs.argmax(dim=-1)
    else:
        logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
        probabilities = logprobs.double().exp_()  # [N, V]
        if top_k > 0 or top_p < 1.0:
            probabilities = _truncate(probabilities, top_k, top_p)
        tokens = _invert(probabilities, uniforms)
    return tokens, logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)


def _invert(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Where the running sum of probabilities [N, V] passes `uniforms` [N] of its total: [N].

    First the block of tokens, then the token in it, with running sums as products by a triangle:
    accelerators have no running sum that gives the same bits every time.
    """
    num_rows, num_words = probabilities.shape
    padding = -num_words % BLOCK if num_words > BLOCK else 0
    blocks = F.pad(probabilities, (0, padding)).view(num_rows, -1, min(num_words, BLOCK))
    sums = blocks.sum(dim=-1)  # [N, blocks]
    ends = _running_sum(sums)
    threshold = (uniforms * ends[:, -1]).unsqueeze(1)  # [N, 1]
    block = _first_above(ends, sums, threshold)  # [N, 1]
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks[torch.arange(num_rows, device=block.device), block.squeeze(1)]  # [N, BLOCK]
    token = _first_above(before + _running_sum(inside), inside, threshold)
    return (block * blocks.shape[-1] + token).squeeze(1)


def _running_sum(values: Tensor) -> Tensor:
    size = values.shape[-1]
    return values @ torch.ones(size, size, dtype=values.dtype, device=values.device).triu_()


def _first_above(sums: Tensor, values: Tensor, threshold: Tensor) -> Tensor:
    """Of each row [N, n] the first place that has a value and whose sum is over the threshold
    [N, 1], or else (sums are rounded) the last that has a value: [N, 1]."""
    has_value = values > 0
    places = torch.arange(values.shape[-1], device=values.device)
    last = torch.where(has_value, places, 0).amax(dim=-1, keepdim=True)
    is_above = has_value & ((sums > threshold) | (places == last))
    return is_above.to(torch.uint8).argmax(dim=-1, keepdim=True)


def _truncate(probabilities: Tensor, top_k: int, top_p: float) -> Tensor:
    """Zeros [N, V] but for the `top_k` likeliest tokens (0: all) and, of these, the fewest whose
    share is at least `top_p` (nucleus sampling, arXiv 1904.09751, section 3.1). Of tokens that are
    equally likely the first come first."""
    likeliest, tokens = probabilities.sort(dim=-1, descending=True, stable=True)
    if top_k > 0:
        likeliest[:, top_k:] = 0.0
    before = likeliest.cumsum(dim=-1) - likeliest  # [N, V]: what is likelier
    likeliest[before >= top_p * likeliest.sum(dim=-1, keepdim=True)] = 0.0
    return torch.zeros_like(probabilities).scatter_(1, tokens, likeliest)
