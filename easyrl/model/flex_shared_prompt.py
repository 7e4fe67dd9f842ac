"""Shared-prompt attention by FlexAttention: one compiled kernel over the whole packed row.

The row is `[P | R1 | R2 | ...][P | R1 | ...]`; its mask is a function of where tokens stand, and
blocks of 128 x 128 that it hides are never computed. It is for half precision on accelerators that
FlexAttention can train on (`devices.trains_flex_attention`); `shared_prompt` does the same for all
others, and in float32 there too: FlexAttention's float32 kernels are many times slower.

A kernel for one length is up to twice as fast as one for all, and takes a second to compile. So
rows are padded to one of a few lengths.

Shapes: T tokens of the packed row, padded to T'; Hq query heads, Hkv key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from easyrl.model.attention_kernels import AttentionSettings
from easyrl.model.shared_prompt import Groups

PROMPT, PADDING = -1, -2
"""Instead of a completion's number in its group."""

BLOCK = 128
LENGTHS_PER_DOUBLING = 8
NUM_KERNELS = 256
"""Kernels that may be compiled: one for each length, window and kind of model."""


class FlexSharedPrompt:
    """The mask of one packed row, made once per window and used by all layers."""

    def __init__(self, groups: Groups, device: torch.device) -> None:
        places = _places(groups)
        self.num_tokens = places.shape[1]
        self._padding = padded_length(self.num_tokens) - self.num_tokens
        padded = np.pad(places, ((0, 0), (0, self._padding)), constant_values=PADDING)
        self._group_of, self._segment_of, self._positions = torch.from_numpy(padded).to(device)
        self._device = device
        self._masks: dict[int | None, BlockMask] = {}

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings
    ) -> Tensor:
        """[T, Hq, D], 2 x [T, Hkv, D] -> [T, Hq, D]"""
        q, k, v = (
            F.pad(x, (0, 0, 0, 0, 0, self._padding)).transpose(0, 1).unsqueeze(0)
            for x in (query, key, value)
        )
        output = _compiled(flex_attention)(
            q,
            k,
            v,
            score_mod=None if settings.softcap is None else _softcap(settings.softcap),
            block_mask=self._mask(settings.sliding_window),
            scale=settings.scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        tokens: Tensor = output[0, :, : self.num_tokens].transpose(0, 1)
        return tokens

    def _mask(self, window: int | None) -> BlockMask:
        if window not in self._masks:
            length = self.num_tokens + self._padding
            self._masks[window] = _compiled(create_block_mask)(
                self.visible(window), None, None, length, length, device=self._device
            )
        return self._masks[window]

    def visible(self, window: int | None) -> Callable[[Any, Any, Any, Any], Any]:
        """Whether token q may look at token k: of its group's prompt or its own completion, not
        ahead, and within the window. Padding looks at padding."""
        group_of, segment_of, positions = self._group_of, self._segment_of, self._positions

        def mask(_batch: Any, _head: Any, q: Any, k: Any) -> Any:
            is_own = (segment_of[k] == PROMPT) | (segment_of[k] == segment_of[q])
            seen = (group_of[q] == group_of[k]) & is_own & (k <= q)
            if window is not None:
                seen = seen & (positions[q] - positions[k] < window)
            return seen

        return mask


def padded_length(num_tokens: int) -> int:
    """The next of LENGTHS_PER_DOUBLING lengths between two powers of two, in whole blocks."""
    above = 1 << (num_tokens - 1).bit_length()  # the next power of two
    step = max(BLOCK, above // (2 * LENGTHS_PER_DOUBLING))
    return -(-num_tokens // step) * step


def _places(groups: Groups) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Of each token its group, its segment (PROMPT or a completion) and its position: [3, T]."""
    columns = []
    for number, (prompt_length, completion_lengths) in enumerate(groups):
        for segment, length in ((PROMPT, prompt_length), *enumerate(completion_lengths)):
            start = 0 if segment == PROMPT else prompt_length
            columns.append(
                np.stack(
                    [np.full(length, number), np.full(length, segment), start + np.arange(length)]
                )
            )
    return np.concatenate(columns, axis=1).astype(np.int32)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled anew for every length, and kept."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, NUM_KERNELS)
    return torch.compile(function, dynamic=False)


@cache
def _softcap(softcap: float) -> Callable[..., Any]:
    def cap(score: Any, _batch: Any, _head: Any, _q: Any, _k: Any) -> Any:
        return softcap * torch.tanh(score / softcap)

    return cap
