"""The attention mixer: one function, registered with transformers as `attn_implementation`.

    a layer's own code ─► query, key, value ─► `_attention` ─► current layout's `attend`

A model with `attn_implementation="easyrl"` builds no mask. Its layers find the layout by the object
that `connect_layers` gives to them.

Shapes: T tokens of the packed row, Hq query heads, Hkv key/value heads, D head size.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from easyrl.layout.tree import NONE, TokenTree
from easyrl.model.mixers.interface import CurrentLayout, LayerSettings, UnsupportedLayer

HAS_STATE = False
ATTENTION_NAME = "easyrl"
CURRENT_LAYOUT = "easyrl_current_layout"
"""Attribute of attention modules: the `CurrentLayout` of their model."""


def register_attention(*, is_compiled: bool = False) -> None:
    """Register `attn_implementation="easyrl"` with transformers. `is_compiled`: the layers are
    compiled. Their attention is then excluded, because it depends on the layout."""
    from transformers import AttentionInterface

    function = _attention
    if is_compiled:
        disable: Any = torch.compiler.disable
        function = disable(_attention)
    AttentionInterface.register(ATTENTION_NAME, function)


def find_layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules that may be attention. Others with a number are harmless."""
    return [module for module in model.modules() if hasattr(module, "layer_idx")]


def connect_layers(model: nn.Module, current: CurrentLayout) -> None:
    """Let a model's attention layers find the current layout."""
    for module in find_layers(model):
        setattr(module, CURRENT_LAYOUT, current)


def exclude_from_compiling(model: nn.Module) -> None:
    """Run attention as it is in layers that are compiled around it, of this model and others."""
    register_attention(is_compiled=True)


def checked_trees(model: nn.Module) -> list[TokenTree]:
    """Return a group, and a tree in which a completion branches."""
    group = TokenTree.of_group(3, [2, 4])
    branched = TokenTree(np.array([2, 3, 1, 2]), np.array([NONE, 0, 1, 1]))
    return [group, branched]


def _attention(
    module: nn.Module,
    query: Tensor,  # [1, Hq, T, D]
    key: Tensor,  # [1, Hkv, T, D]
    value: Tensor,  # [1, Hkv, T, D]
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # [Hq]: sinks
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute a layer's attention as transformers asks for it: an output [1, T, Hq, D], and no
    weights."""
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if attention_mask is not None:
        raise UnsupportedLayer(f"layer {layer} uses its own attention mask")
    current: CurrentLayout = getattr(module, CURRENT_LAYOUT)
    assert current.layout is not None, "the model runs without a layout"
    settings = LayerSettings(
        layer=layer,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
    )
    output = current.layout.attend(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        settings,
        s_aux,
    )
    return output.unsqueeze(0), None
