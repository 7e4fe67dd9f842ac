"""The one attention function of EasyRL, registered with transformers.

A model loaded with `attn_implementation="easyrl"` builds no mask of its own. Every forward
hands a *layout* through the model's keyword arguments:

    model(input_ids, position_ids=..., attention_layout=layout)

and each layer calls `layout.attend(...)`. The layout knows which tokens of the row belong
together; the model's code is not touched. The trainer's layout is `PackedGroups`; the
embedded engine brings its own, which reads and writes a KV cache.

Shapes: T tokens of the packed row, Hq query heads, Hkv key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from easyrl import devices
from easyrl.model.attention_kernels import AttentionSettings
from easyrl.model.shared_prompt import Groups, SharedPrompt

ATTENTION_NAME = "easyrl"

SMALLEST_FLEX_HEAD_SIZE = 16
"""FlexAttention's kernels take no smaller one."""


class AttentionLayout(Protocol):
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings
    ) -> Tensor:
        """Attention over the packed row: [T, Hq, D], 2 x [T, Hkv, D] -> [T, Hq, D]."""
        ...


def register_attention() -> None:
    """Make `attn_implementation="easyrl"` known to transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, _attention)


def _attention(
    module: nn.Module,
    query: Tensor,  # [1, Hq, T, D]
    key: Tensor,  # [1, Hkv, T, D]
    value: Tensor,  # [1, Hkv, T, D]
    attention_mask: Tensor | None,
    *,
    attention_layout: AttentionLayout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if attention_layout is None:
        raise ValueError(
            f"model.path: {type(module).__name__} is not told which tokens belong together (its "
            "model does not pass keyword arguments on), so EasyRL cannot serve it exactly; choose "
            "another model"
        )
    if not getattr(module, "is_causal", True):
        raise ValueError(
            f"model.path: {type(module).__name__} lets tokens look ahead, so its model completes "
            "no prompts (an encoder may need is_decoder in its config.json); choose another model"
        )
    if s_aux is not None:
        raise ValueError(
            f"model.path: {type(module).__name__} has attention sinks, which EasyRL's attention "
            "cannot compute exactly; choose a model without them"
        )
    if attention_mask is not None:
        raise ValueError(
            f"model.path: {type(module).__name__} makes an attention mask of its own, which "
            "EasyRL's attention cannot follow exactly; choose another model"
        )
    settings = AttentionSettings(
        layer=int(module.layer_idx),  # type: ignore[arg-type]
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
    )
    output = attention_layout.attend(
        query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), settings
    )
    return output.unsqueeze(0), None


class PackedGroups:
    """Groups one after another in a row, `[P | R1 | R2 | ...]` each: the prompt stands there once.

    Every completion is causal behind its prompt and sees no other. In half precision by
    FlexAttention where that can be trained, else block by block (`shared_prompt`).
    """

    def __init__(self, groups: Groups, device: torch.device | str = "cpu") -> None:
        self._groups, self._device = groups, torch.device(device)

    @classmethod
    def of_sequences(
        cls, lengths: Sequence[int], device: torch.device | str = "cpu"
    ) -> PackedGroups:
        """Whole sequences that share nothing."""
        return cls([(length, ()) for length in lengths], device)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings
    ) -> Tensor:
        takes_flex = (
            query.dtype in (torch.bfloat16, torch.float16)
            and query.shape[-1] >= SMALLEST_FLEX_HEAD_SIZE
            and settings.softcap is None  # its compiler makes no kernel for all lengths with one
            and devices.trains_flex_attention(self._device)
        )
        layout = self._flex if takes_flex else self._blocks
        return layout.attend(query, key, value, settings)

    @cached_property
    def _blocks(self) -> SharedPrompt:
        return SharedPrompt(self._groups, self._device)

    @cached_property
    def _flex(self) -> AttentionLayout:
        from easyrl.model.flex_shared_prompt import FlexSharedPrompt  # slow to import

        return FlexSharedPrompt(self._groups, self._device)
