"""Draw tokens by inverse transform from one uniform number each, and find stop strings.

A sequence's uniform numbers come from a counter-based generator (Philox) keyed by its identity, and
do not depend on the batch, the engine or the worker.

Shapes: N sequences, V tokens of the vocabulary, R completion tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from easyrl.data.chat import text_decoder
from easyrl.model.logprobs import BLOCK, block_sums, shifted_scores
from easyrl.types import Float64, Int32

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""The text of bytes that are not a whole character."""
LARGEST_UNIFORM = 1.0 - 2.0**-52
"""Times a sum it is less than the sum, also when it is rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """Sampling settings of an engine. `config.rollout` explains the keys."""

    max_prompt_length: int
    max_completion_length: int
    temperature: float = 1.0  # 0: take the likeliest token
    top_k: int = 0
    top_p: float = 1.0
    stop: Sequence[str] = ()
    seed: int = 0
    max_length: int | None = None  # of prompt + completion; None: the sum of the longest ones

    @property
    def max_sequence_length(self) -> int:
        return self.max_length or self.max_prompt_length + self.max_completion_length

    @property
    def truncates(self) -> bool:
        """Whether only the likeliest tokens are drawn."""
        return self.top_k > 0 or self.top_p < 1.0


def uniform_stream(seed: int, key: tuple[int, ...], length: int) -> Float64:
    """Return the uniform numbers in [0, 1) of a sequence, one per position: [length]."""
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, *key))))
    return generator.random(length)


def sample(logits: Tensor, uniforms: Tensor, settings: SamplingSettings) -> tuple[Tensor, Tensor]:
    """Draw a token per row from logits [N, V] and uniforms [N] (float64); return the tokens [N] and
    their log-probabilities [N] (float32).

    The log-probability is always that of the whole distribution softmax(logits / temperature),
    which is what is trained, also with `top_k` and `top_p`. Temperature 0 takes the likeliest
    token; its log-probability is that at temperature 1.
    """
    scores = shifted_scores(logits, settings.temperature or 1.0)  # [N, V]
    weights = scores.exp()
    sums = block_sums(weights)  # [N, V / BLOCK]
    total = sums.sum(dim=-1, keepdim=True)
    if settings.temperature == 0.0:
        tokens = logits.argmax(dim=-1, keepdim=True)
    else:
        if settings.truncates:
            weights = _truncated(weights, settings.top_k, settings.top_p)
            sums = block_sums(weights)
        block, uniforms = _draw(sums, uniforms.unsqueeze(1))
        of_block = block * BLOCK + torch.arange(BLOCK, device=logits.device)  # [N, BLOCK]
        last = logits.shape[1] - 1
        weights = weights.gather(1, of_block.clamp(max=last)).masked_fill_(of_block > last, 0.0)
        tokens = (block * BLOCK + _draw(weights, uniforms)[0]).clamp_(max=last)
    return tokens.squeeze(1), (scores.gather(1, tokens) - total.log()).squeeze(1)


def _draw(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw an index per row in proportion to weights [N, K], with uniforms [N, 1]. Return it, and
    the uniform's place within its share, which is a uniform number, too: 2 x [N, 1]."""
    # Float64 is slow on most accelerators: K is small.
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    threshold = uniforms.clamp(0.0, LARGEST_UNIFORM) * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, threshold, right=True)
    index.clamp_(max=weights.shape[1] - 1)  # of weights that are not numbers
    share = weights.gather(1, index)
    return index, (threshold - cumulative.gather(1, index) + share) / share


def _truncated(weights: Tensor, top_k: int, top_p: float) -> Tensor:
    """Zero all but the `top_k` likeliest tokens (0: all) and, of these, the fewest whose share is
    at least `top_p` (arXiv 1904.09751, section 3.1): [N, V]. Of equal weights lower ids are
    kept."""
    likeliest, tokens = weights.sort(dim=-1, descending=True, stable=True)
    if top_k > 0:
        likeliest[:, top_k:] = 0.0
    if top_p < 1.0:
        before = likeliest.cumsum(dim=-1) - likeliest  # [N, V]: the sum of the likelier ones
        likeliest[before >= top_p * likeliest.sum(dim=-1, keepdim=True)] = 0.0
    return torch.zeros_like(weights).scatter_(1, tokens, likeliest)


class StopStrings:
    """Detect when a completion's text first contains one of some strings (`rollout.stop`), also
    inside of a token or across tokens. Only the tail is decoded that the longest string can span,
    and only if the newest token can end a string."""

    def __init__(self, tokenizer: Any, strings: Sequence[str]) -> None:
        self._decode = text_decoder(tokenizer)
        self._strings = tuple(strings)
        self._last_characters = {string[-1] for string in strings}
        # A token has at least one byte. One more token: the first may lose its space.
        self._num_tokens = max(len(string.encode()) for string in strings) + 1
        # Decoded twice in a row, the second token keeps its leading space.
        self._text_of = cache(lambda token: self._decode([token, token]))

    def is_complete(self, token_ids: Int32) -> bool:
        """Return whether the text of `token_ids` [R] has a string that it did not have before."""
        newest = self._text_of(int(token_ids[-1]))
        if self._last_characters.isdisjoint(newest) and INCOMPLETE not in newest:
            return False
        text = self._decode(token_ids[-self._num_tokens :].tolist())
        return any(string in text for string in self._strings)
