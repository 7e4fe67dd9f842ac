"""The trainer's layout: a packed row whose tokens form a tree.

Shapes: T tokens of the packed row, Hq query heads, Hkv key/value heads, D head size.
"""

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from easyrl import devices
from easyrl.layout.tree import TokenTree
from easyrl.model.mixers.interface import LayerSettings, Spans
from easyrl.model.mixers.recurrent import RunLayer, TreeScan
from easyrl.model.mixers.sdpa import SdpaAttention

if TYPE_CHECKING:
    from easyrl.model.mixers.flex import FlexAttention

SMALLEST_FLEX_HEAD_SIZE = 16  # the smallest that FlexAttention's kernels support


class LayerShape(NamedTuple):
    """What FlexAttention's kernels of a layer depend on."""

    device: torch.device
    dtype: torch.dtype
    query: torch.Size  # (Hq, D)
    key: torch.Size  # (Hkv, D)
    sliding_window: int | None
    has_sinks: bool


class AttentionKernels:
    """The choice of kernels for the rows of one model on this machine.

    FlexAttention is used where it is faster and can train. Whether it can is tried once for each
    shape of layer, because its kernels are compiled for it, with a compiler that may be missing.
    """

    def __init__(self, *, may_use_flex: bool = True) -> None:
        self.report: Callable[[str], None] = print  # called where a slower way is taken
        self._may_use_flex = may_use_flex
        self._can_train: dict[LayerShape, bool] = {}

    def use_flex(
        self, query: Tensor, key: Tensor, settings: LayerSettings, *, has_sinks: bool
    ) -> bool:
        """Return whether FlexAttention computes such a layer: query [T, Hq, D], key [T, Hkv, D]."""
        is_suitable = (
            self._may_use_flex
            and query.dtype in (torch.bfloat16, torch.float16)
            and query.shape[-1] >= SMALLEST_FLEX_HEAD_SIZE
            and settings.softcap is None  # with it no kernel compiles for all lengths
            and devices.trains_flex_attention(query.device)
        )
        if not is_suitable:
            return False
        shape = LayerShape(
            device=query.device,
            dtype=query.dtype,
            query=query.shape[1:],
            key=key.shape[1:],
            sliding_window=settings.sliding_window,
            has_sinks=has_sinks,
        )
        if shape not in self._can_train:
            from easyrl.model.mixers import flex  # slow to import

            reason = flex.failure(shape)
            self._can_train[shape] = reason is None
            if reason is not None:
                self.report(f"attention without FlexAttention, exact but slower: {reason}")
        return self._can_train[shape]


class PackedRow:
    """The layout of a packed row."""

    def __init__(
        self,
        tree: TokenTree,
        device: torch.device | str = "cpu",
        kernels: AttentionKernels | None = None,
        spans: Spans | None = None,
    ) -> None:
        """`tree`: of the row's tokens, in depth-first order. `kernels`: of the model that runs the
        row, so that what was tried for its earlier rows is known. A row with `spans` is computed
        without FlexAttention."""
        self.tree = tree
        self.spans = spans
        self._device = torch.device(device)
        self._kernels = kernels or AttentionKernels()

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        settings: LayerSettings,
        sinks: Tensor | None = None,
    ) -> Tensor:
        has_sinks = sinks is not None
        if self.spans is None and self._kernels.use_flex(query, key, settings, has_sinks=has_sinks):
            return self._flex.attend(query, key, value, settings, sinks)
        return self._sdpa.attend(query, key, value, settings, sinks)

    def scan(self, run: RunLayer, hidden: Tensor) -> Tensor:
        return self._scan.scan(run, hidden)

    @cached_property
    def _scan(self) -> TreeScan:
        return TreeScan(self.tree, self._device)

    @cached_property
    def _sdpa(self) -> SdpaAttention:
        return SdpaAttention(self.tree, self._device, self.spans)

    @cached_property
    def _flex(self) -> "FlexAttention":
        from easyrl.model.mixers.flex import FlexAttention  # slow to import

        return FlexAttention(self.tree, self._device)
