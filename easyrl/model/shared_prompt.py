"""Shared-prompt attention: a group stands in the row as `[P | R1 | R2 | ... | RG]`.

A prompt's tokens look at the prompt, a completion's at its prompt and at itself, none ahead. So
two kinds of blocks make up the attention of a packed row, and nothing else is computed:

    own      every segment (a prompt or a completion) to itself, causally
    prompt   all completions of a group at once to their prompt, whose keys are not copied

A completion's softmax over both is put together by their log-sum-exps (`attention_kernels`). Kept
for backward are the row's query, key and value, its output and log-sum-exp: no scores, no copies.

Shapes: T tokens of the packed row, Hkv key/value heads, G query heads for each of them (1 where
keys and values are meant), D head size; of a bucket: B segments, L the longest of them. What is
called "tokens" is [T, Hkv, G, D], "cells" [B, L, Hkv, G, D], a block's tensors [B*Hkv, G, L, D].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from easyrl.model.attention_kernels import (
    HIDDEN,
    AttentionSettings,
    Block,
    choose_kernel,
    merge,
)
from easyrl.model.segments import Bucket, make_buckets, padded_length

_Ints = np.ndarray[Any, np.dtype[np.int64]]

Groups = Sequence[tuple[int, Sequence[int]]]
"""Of each its P, and the R of its completions (none: the prompt stands alone)."""


class SharedPrompt:
    """The blocks of one packed row."""

    def __init__(self, groups: Groups, device: torch.device) -> None:
        segments: list[tuple[int, int]] = []  # start, length
        self._prompts: list[_Prompt] = []
        place = 0
        for prompt_length, completion_lengths in groups:
            segments.append((place, prompt_length))
            prompt = slice(place, place + prompt_length)
            place = prompt.stop
            for length in completion_lengths:
                segments.append((place, length))
                place += length
            if completion_lengths:
                completions = slice(prompt.stop, place)
                self._prompts.append(_Prompt(prompt, completions, tuple(completion_lengths)))
        self._buckets = make_buckets(np.array(segments, dtype=np.int64), device)
        self._biases: dict[tuple[Any, ...], Tensor] = {}

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings
    ) -> Tensor:
        """[T, Hq, D], 2 x [T, Hkv, D] -> [T, Hq, D]"""
        num_heads = key.shape[1]
        # The fused kernel takes the elements of a head as adjacent, and does not check it.
        rows = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        output: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
            *(x.reshape(len(x), num_heads, -1, x.shape[-1]) for x in rows),
            (self, settings),
        )
        return output.flatten(1, 2)

    def own_blocks(
        self, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings
    ) -> list[tuple[Bucket, Block]]:
        window = settings.sliding_window
        blocks = []
        for bucket in self._buckets:
            length = bucket.longest
            bias = None
            if window is not None and window < length:
                bias = self._bias(np.arange(length), np.arange(length), window, query)
            q, k, v = (_to_block(bucket.take(x)) for x in (query, key, value))
            k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
            blocks.append((bucket, Block(q, k, v, is_causal=bias is None, bias=bias)))
        return blocks

    def prompt_blocks(
        self, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings
    ) -> list[tuple[slice, slice, Block]]:
        """Blocks, each with where its queries and its keys stand in the row."""
        window = settings.sliding_window
        blocks = []
        for prompt in self._prompts:
            keys, bias = prompt.tokens, None
            if window is not None:
                num_prompt = keys.stop - keys.start
                first = max(0, num_prompt - window + 1)
                if first == num_prompt:
                    continue
                keys = slice(keys.start + first, keys.stop)
                positions = num_prompt + np.concatenate([np.arange(n) for n in prompt.lengths])
                if positions.max() - first >= window:
                    bias = self._bias(positions, np.arange(first, num_prompt), window, query)
            else:
                keys, bias = self._pad(keys, query)
            q, k, v = (
                _to_block(x[where].unsqueeze(0))
                for x, where in ((query, prompt.completions), (key, keys), (value, keys))
            )
            k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
            blocks.append((prompt.completions, keys, Block(q, k, v, is_causal=False, bias=bias)))
        return blocks

    def _pad(self, keys: slice, query: Tensor) -> tuple[slice, Tensor | None]:
        """A prompt's keys with what stands behind them in the row, up to their padded number; the
        bias [1, S] hides that again."""
        length = keys.stop - keys.start
        width = padded_length(length)
        if width == length or keys.start + width > len(query):
            return keys, None
        name = (length, width)
        if name not in self._biases:
            bias = torch.zeros(1, width, dtype=query.dtype)
            bias[:, length:] = HIDDEN
            self._biases[name] = bias.to(query.device)
        return slice(keys.start, keys.start + width), self._biases[name]

    def _bias(self, queries: _Ints, keys: _Ints, window: int, like: Tensor) -> Tensor:
        """[L, S] from positions: 0 where a query may look, HIDDEN where not. Layers share it."""
        name = (queries.tobytes(), keys.tobytes(), window)
        if name not in self._biases:
            distance = torch.from_numpy(queries[:, None] - keys[None, :])
            hidden = (distance < 0) | (distance >= window)
            bias = torch.zeros(hidden.shape, dtype=like.dtype).masked_fill_(hidden, HIDDEN)
            self._biases[name] = bias.to(like.device)
        return self._biases[name]


class _Attention(torch.autograd.Function):
    """[T, Hkv, G, D], 2 x [T, Hkv, 1, D] -> [T, Hkv, G, D]"""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        how: tuple[SharedPrompt, AttentionSettings],
    ) -> Tensor:
        layout, settings = how
        kernel = choose_kernel(query, value, settings)
        output = query.new_empty((*query.shape[:-1], value.shape[-1]))
        logsumexp = torch.empty(0)  # [T, Hkv, G, 1]
        for bucket, block in layout.own_blocks(query, key, value, settings):
            part, part_logsumexp = kernel.forward(block, settings)
            if not len(logsumexp):
                logsumexp = part_logsumexp.new_empty((*query.shape[:-1], 1))
            bucket.put(output, part)
            bucket.put(logsumexp, part_logsumexp)
        for queries, _, block in layout.prompt_blocks(query, key, value, settings):
            part, part_logsumexp = (_to_tokens(x) for x in kernel.forward(block, settings))
            merge(output[queries], logsumexp[queries], part, part_logsumexp)
        ctx.save_for_backward(query, key, value, output, logsumexp)
        ctx.how = how
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, logsumexp = ctx.saved_tensors
        layout, settings = ctx.how
        gradient = gradients[0]
        kernel = choose_kernel(query, value, settings)
        of_query, of_key, of_value = (x.new_empty(x.shape) for x in (query, key, value))
        for bucket, block in layout.own_blocks(query, key, value, settings):
            parts = kernel.backward(
                _to_block(bucket.take(gradient, padding=0.0)),
                _to_block(bucket.take(output)),
                _to_block(bucket.take(logsumexp, padding=float("inf"))),  # a weight of 0
                block,
                settings,
            )
            bucket.put(of_query, parts[0])
            bucket.put(of_key, parts[1].sum(1, keepdim=True))
            bucket.put(of_value, parts[2].sum(1, keepdim=True))
        for queries, keys, block in layout.prompt_blocks(query, key, value, settings):
            whole = [_to_block(x[queries].unsqueeze(0)) for x in (gradient, output, logsumexp)]
            parts = kernel.backward(whole[0], whole[1], whole[2], block, settings)
            of_query[queries] += _to_tokens(parts[0])
            of_key[keys] += _to_tokens(parts[1].sum(1, keepdim=True))
            of_value[keys] += _to_tokens(parts[2].sum(1, keepdim=True))
        return of_query, of_key, of_value, None


def _to_block(cells: Tensor) -> Tensor:
    """[B, L, Hkv, G, D] -> [B*Hkv, G, L, D]: query heads that share a key head are one batch."""
    return cells.permute(0, 2, 3, 1, 4).flatten(0, 1)


def _to_tokens(block: Tensor) -> Tensor:
    """[Hkv, G, L, D] -> [L, Hkv, G, D]"""
    return block.permute(2, 0, 1, 3)


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt that completions stand behind."""

    tokens: slice
    completions: slice
    lengths: tuple[int, ...]
