"""EasyRL's attention function, registered with transformers.

A model loaded with `attn_implementation="easyrl"` builds no mask. Every forward passes a *layout*
through the model's keyword arguments:

    model(input_ids, position_ids=..., attention_layout=layout)

and each layer calls `layout.attend(...)`. The trainer's layout is `PackedRow`; the embedded
engine's reads and writes a KV cache.

Shapes: T tokens of the packed row, Hq query heads, Hkv key/value heads, D head size.
"""

from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from easyrl import devices
from easyrl.layout.tree import TokenTree
from easyrl.model.shared_prompt import LayerSettings, SharedPrompt

ATTENTION_NAME = "easyrl"
SMALLEST_FLEX_HEAD_SIZE = 16  # the smallest that FlexAttention's kernels support
notes: list[str] = []  # for the user, until a worker reports them


class UnservableLayer(Exception):
    """EasyRL's attention cannot compute a layer exactly; the message is a clause why."""


class AttentionLayout(Protocol):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, settings: LayerSettings) -> Tensor:
        """Compute attention over the packed row: [T, Hq, D], 2 x [T, Hkv, D] -> [T, Hq, D]."""


def register_attention(*, is_compiled: bool = False) -> None:
    """Register `attn_implementation="easyrl"` with transformers. If layers are compiled, their
    attention runs as it is: it depends on the layout."""
    from transformers import AttentionInterface

    disable: Any = torch.compiler.disable
    AttentionInterface.register(ATTENTION_NAME, disable(_attention) if is_compiled else _attention)


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
    if s_aux is not None:
        raise UnservableLayer(f"layer {module.layer_idx} has attention sinks")
    if attention_mask is not None:
        raise UnservableLayer(f"layer {module.layer_idx} uses its own attention mask")
    if attention_layout is None:
        raise UnservableLayer(f"layer {module.layer_idx} does not pass the layout to its attention")
    settings = LayerSettings(
        layer=int(module.layer_idx),  # type: ignore[arg-type]
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
    )
    output = attention_layout.attend(
        query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), settings
    )
    return output.unsqueeze(0), None


class PackedRow:
    """The layout of a packed row: FlexAttention where possible."""

    def __init__(
        self, tree: TokenTree, device: torch.device | str = "cpu", *, may_use_flex: bool = True
    ) -> None:
        """`tree`: of the row's tokens, in depth-first order."""
        self.tree = tree
        self._device = torch.device(device)
        self._may_use_flex = may_use_flex

    def attend(self, query: Tensor, key: Tensor, value: Tensor, settings: LayerSettings) -> Tensor:
        uses_flex = (
            self._may_use_flex
            and query.dtype in (torch.bfloat16, torch.float16)
            and query.shape[-1] >= SMALLEST_FLEX_HEAD_SIZE
            and settings.softcap is None  # it compiles no kernel for all lengths then
            and devices.trains_flex_attention(self._device)
        )
        if uses_flex:
            from easyrl.model.flex_shared_prompt import trains  # slow to import

            heads = query.shape[1:], key.shape[1:]
            uses_flex = trains(self._device, query.dtype, *heads, settings.sliding_window)
        layout = self._flex if uses_flex else self._blocks
        return layout.attend(query, key, value, settings)

    @cached_property
    def _blocks(self) -> SharedPrompt:
        return SharedPrompt(self.tree, self._device)

    @cached_property
    def _flex(self) -> AttentionLayout:
        from easyrl.model.flex_shared_prompt import FlexSharedPrompt  # slow to import

        return FlexSharedPrompt(self.tree, self._device)
