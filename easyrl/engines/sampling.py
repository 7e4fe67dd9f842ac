"""Draw tokens by inverse transform from one uniform number each, and find stop strings.

A sequence's uniform numbers come from a counter-based generator (Philox) keyed by its identity, and
do not depend on the batch, the engine or the worker.

Shapes: N sequences, V tokens of the vocabulary, R completion tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from easyrl.data.chat import special_stops, text_decoder
from easyrl.model.logprobs import BLOCK, block_sums, shifted_scores
from easyrl.types import Float64, Int32

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""The text of bytes that are not a whole character."""
LARGEST_UNIFORM = 1.0 - 2.0**-52
"""The largest uniform number that is used. Its product with a sum is smaller than the sum even
after rounding, so that a token is always found."""


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
    max_length: int | None = None
    """Most tokens of a prompt and its completion together. None: the sum of the two maxima."""

    @property
    def max_sequence_length(self) -> int:
        return self.max_length or self.max_prompt_length + self.max_completion_length

    @property
    def truncates(self) -> bool:
        """Whether only the likeliest tokens are drawn."""
        return self.top_k > 0 or self.top_p < 1.0


def uniform_stream(seed: int, key: tuple[int, ...], length: int) -> Float64:
    """Return the uniform numbers in [0, 1) of a sequence, one per position: [length]."""
    entropy = np.random.SeedSequence((seed, *key))
    generator = np.random.Generator(np.random.Philox(entropy))
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
        tokens = _draw_tokens(weights, sums, uniforms.unsqueeze(1))
    token_scores = scores.gather(1, tokens)  # [N, 1]
    logprobs = token_scores - total.log()
    return tokens.squeeze(1), logprobs.squeeze(1)


def _draw_tokens(weights: Tensor, sums: Tensor, uniforms: Tensor) -> Tensor:
    """Draw a token per row in proportion to weights [N, V]: first its block, by the blocks' sums
    [N, V / BLOCK], then the token in the block. `uniforms` [N, 1]; returns [N, 1]."""
    block = _draw(sums, uniforms)
    first_of_block = block.choice * BLOCK  # [N, 1]
    in_block = first_of_block + torch.arange(BLOCK, device=weights.device)  # [N, BLOCK]
    last_token = weights.shape[1] - 1
    # The last block may have fewer tokens: the others have no weight.
    block_weights = weights.gather(1, in_block.clamp(max=last_token))  # [N, BLOCK]
    block_weights.masked_fill_(in_block > last_token, 0.0)
    within = _draw(block_weights, block.uniforms)
    tokens = first_of_block + within.choice
    return tokens.clamp_(max=last_token)


class _Drawn(NamedTuple):
    choice: Tensor  # [N, 1]: the index
    uniforms: Tensor  # [N, 1]: where in the index's share the number was: uniform in [0, 1), too


def _draw(weights: Tensor, uniforms: Tensor) -> _Drawn:
    """Draw an index per row in proportion to weights [N, K], with uniforms [N, 1]."""
    # Float64 is slow on most accelerators: K is small.
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    threshold = uniforms.clamp(0.0, LARGEST_UNIFORM) * total
    index = torch.searchsorted(cumulative, threshold, right=True)
    last_index = weights.shape[1] - 1
    index.clamp_(max=last_index)  # it is too large if weights are NaN
    share = weights.gather(1, index)
    end_of_share = cumulative.gather(1, index)
    within_share = threshold - end_of_share + share
    return _Drawn(choice=index, uniforms=within_share / share)


def _truncated(weights: Tensor, top_k: int, top_p: float) -> Tensor:
    """Return weights [N, V] with 0 for all tokens but the `top_k` likeliest (0: all) and, of these,
    the fewest whose share is at least `top_p` (arXiv 1904.09751, section 3.1). Among tokens of
    equal weight the lower ids are kept."""
    likeliest, tokens = weights.sort(dim=-1, descending=True, stable=True)
    if top_k > 0:
        likeliest[:, top_k:] = 0.0
    if top_p < 1.0:
        before = likeliest.cumsum(dim=-1) - likeliest  # [N, V]: the sum of the likelier ones
        wanted = top_p * likeliest.sum(dim=-1, keepdim=True)  # [N, 1]
        likeliest[before >= wanted] = 0.0
    truncated = torch.zeros_like(weights)
    return truncated.scatter_(1, tokens, likeliest)


class StopStrings:
    """Detect when a completion's text first contains one of some strings (`rollout.stop`).

    A string may lie inside a token or across tokens. To save time, a completion is decoded only if
    its newest token can end a string, and then only its last tokens, as many as the longest string
    can span.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str]) -> None:
        self._decode = text_decoder(tokenizer)
        self._special_tokens = special_stops(tokenizer, strings)
        self._strings = tuple(strings)
        self._last_characters = {string[-1] for string in strings}
        longest = max(len(string.encode()) for string in strings)
        # A token has at least one byte. One more token: the first may lose its space.
        self._num_tokens = longest + 1
        self._text_of = cache(self._decode_twice)

    def _decode_twice(self, token: int) -> str:
        """Return the text of a token twice in a row: the second one keeps its leading space."""
        return self._decode([token, token])

    def is_complete(self, token_ids: Int32) -> bool:
        """Return whether the text of `token_ids` [R] contains one of the strings, given that the
        text without the last token does not."""
        if int(token_ids[-1]) in self._special_tokens:
            return True
        newest = self._text_of(int(token_ids[-1]))
        has_last_character = not self._last_characters.isdisjoint(newest)
        if not has_last_character and INCOMPLETE not in newest:
            return False
        last_tokens = token_ids[-self._num_tokens :]
        pictures = np.flatnonzero(last_tokens < 0)  # which have no text: see `engines.shown`
        if len(pictures):
            behind_pictures = pictures[-1] + 1
            last_tokens = last_tokens[behind_pictures:]
        text = self._decode(last_tokens.tolist())
        return any(string in text for string in self._strings)
