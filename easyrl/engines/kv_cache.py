"""The preallocated KV cache of the embedded engine, and the attention layout that reads it.

Rows 0..n-1 of the cache belong to sequences in flight, each at its own position. The packed row of
a step is `[n decode tokens | prompt | prompt | ...]`: decode tokens attend to their cache row,
prompts to themselves. A prompt's keys and values are kept once (`PromptCache`) until all
completions of its group have started from a copy of them.

Shapes: S rows, n of them active, Hq query heads, Hkv key/value heads, D head size, M the longest
sequence that fits a row, L the longest active one, P prompt tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from easyrl.model.shared_prompt import AttentionSettings, SharedPrompt

PromptCache = list[tuple[Tensor, Tensor]]
"""Keys and values of one prompt, per layer: 2 x [Hkv, P, D]."""


class KVCache:
    """Per layer 2 x [S, Hkv, M, D], allocated when a layer is first seen and never grown."""

    def __init__(self, num_rows: int, max_length: int) -> None:
        self.num_rows = num_rows
        self.max_length = max_length
        self.layers: list[tuple[Tensor, Tensor]] = []

    def allocate(self, key: Tensor, value: Tensor) -> None:
        """Add a layer with the shape and dtype of key and value: 2 x [T, Hkv, D]."""
        keys, values = (
            x.new_zeros(self.num_rows, x.shape[1], self.max_length, x.shape[2])
            for x in (key, value)
        )
        self.layers.append((keys, values))

    def start_rows(self, rows: Tensor, prompt: PromptCache) -> None:
        """Copy the prompt into `rows` [s]."""
        for layer, of_prompt in zip(self.layers, prompt, strict=True):
            for cache, kept in zip(layer, of_prompt, strict=True):
                cache[rows, :, : kept.shape[1]] = kept

    def move_row(self, source: int, target: int, length: int) -> None:
        for layer in self.layers:
            for cache in layer:
                cache[target, :, :length] = cache[source, :, :length]


class StepLayout:
    """The attention layout of one engine step: n decode tokens, then whole prompts."""

    def __init__(
        self, cache: KVCache, positions: Tensor, longest: int, prompt_lengths: Sequence[int]
    ) -> None:
        """`positions` [n]: the position of each active row's new token; `longest`: L."""
        self.cache = cache
        self.prompts: list[PromptCache] = [[] for _ in prompt_lengths]
        self._num_decode = len(positions)
        self._positions = positions
        self._rows = torch.arange(self._num_decode, device=positions.device)
        self._longest = longest
        self._prompt_lengths = list(prompt_lengths)
        self._packed: SharedPrompt | None = None
        if prompt_lengths:
            groups = [(length, ()) for length in prompt_lengths]
            self._packed = SharedPrompt(groups, positions.device)
        self._biases: dict[tuple[int | None, int], Tensor] = {}

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings
    ) -> Tensor:
        if settings.layer == len(self.cache.layers):
            self.cache.allocate(key, value)
        n = self._num_decode
        outputs = []
        if n:
            outputs.append(self._decode(query[:n], key[:n], value[:n], settings))
        if self._packed is not None:
            parts = (torch.split(x[n:], self._prompt_lengths) for x in (key, value))
            for prompt, k, v in zip(self.prompts, *parts, strict=True):
                prompt.append((k.transpose(0, 1), v.transpose(0, 1)))
            outputs.append(self._packed.attend(query[n:], key[n:], value[n:], settings))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _decode(
        self, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings
    ) -> Tensor:
        keys, values = self.cache.layers[settings.layer]
        keys[self._rows, :, self._positions] = key
        values[self._rows, :, self._positions] = value
        n, length = self._num_decode, self._longest
        heads = keys.shape[1]
        keys = keys[:n, :, :length].flatten(0, 1)  # [n*Hkv, L, D], a view
        values = values[:n, :, :length].flatten(0, 1)
        # Query heads that share a key head take the dimension of query positions: no key is copied.
        grouped = query.reshape(n * heads, -1, query.shape[-1])  # [n*Hkv, Hq/Hkv, D]
        bias = self._bias(settings.sliding_window, heads, query.dtype)
        if settings.softcap is None:
            scores = torch.baddbmm(bias, grouped, keys.transpose(1, 2), alpha=settings.scaling)
        else:
            scores = torch.bmm(grouped, keys.transpose(1, 2)) * settings.scaling
            scores = torch.tanh(scores / settings.softcap) * settings.softcap + bias
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
        return torch.bmm(weights, values).view(n, -1, values.shape[-1])

    def _bias(self, window: int | None, heads: int, dtype: torch.dtype) -> Tensor:
        """Return [n*Hkv, 1, L]: 0 for visible keys, -inf for others. Shared by the layers."""
        key = (window, heads)
        if key not in self._biases:
            cells = torch.arange(self._longest, device=self._positions.device)[None, :]
            hidden = cells > self._positions[:, None]
            if window is not None:
                hidden |= cells <= self._positions[:, None] - window
            bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            bias.masked_fill_(hidden, float("-inf"))
            self._biases[key] = bias.repeat_interleave(heads, dim=0)[:, None, :]
        return self._biases[key]
