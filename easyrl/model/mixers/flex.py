"""Attention in a packed row by FlexAttention: one compiled kernel over the whole row.

Blocks of 128 x 128 scores that the mask hides are never computed. Used in half precision on
accelerators that can train FlexAttention, whose float32 kernels are many times slower than `sdpa`.
One kernel serves rows of every length: one for each would be up to 1.5 times as fast, but takes ten
seconds to compile for every new length.

Shapes: T tokens of the packed row, Hq query heads, Hkv key/value heads, D head size.
"""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from easyrl import devices
from easyrl.layout.tree import Ints, TokenTree
from easyrl.model.mixers.interface import LayerSettings, Layout
from easyrl.model.mixers.sdpa import SdpaAttention

if TYPE_CHECKING:
    from easyrl.model.mixers.packed_row import LayerShape

LARGE_HEAD_SIZE = 128
LARGE_HEAD_BYTES = 160 * 1024
"""Kernels for heads larger than LARGE_HEAD_SIZE need about this much shared memory with torch's
block sizes. Consumer cards (RTX 3090 to 5090), L4 and A10 have 99 KiB; A100 has 163, H100 227."""
LARGE_HEAD_OPTIONS = {
    "num_stages": 1,
    "bwd_BLOCK_M1": 32,
    "bwd_BLOCK_N1": 32,
    "bwd_BLOCK_M2": 32,
    "bwd_BLOCK_N2": 32,
}
"""Smaller blocks, with which large heads fit into less shared memory."""
MAX_ERROR = 0.05  # of a tried kernel's results, relative to their norm; in bfloat16 it is 0.01


class FlexAttention:
    """The attention of one packed row, whose tree is in depth-first order. Its mask is made once
    for each sliding window, for all layers."""

    def __init__(self, tree: TokenTree, device: torch.device) -> None:
        ends = np.repeat(tree.ends, tree.lengths)
        self._ends = _as_int32(ends, device)
        """One past the last token that may see each token [T]."""
        self._positions = _as_int32(tree.positions, device)  # [T]
        self._device = device
        self._masks: dict[int | None, BlockMask] = {}  # by sliding window

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        settings: LayerSettings,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute attention without soft-capping: [T, Hq, D], 2 x [T, Hkv, D] -> [T, Hq, D]."""
        assert settings.softcap is None
        num_query_heads = query.shape[1]
        num_key_heads = key.shape[1]
        # A kernel that also returns the log-sum-exps is another one.
        logsumexps: dict[str, Any] = {}
        if sinks is not None:
            logsumexps["return_aux"] = AuxRequest(lse=True)
        result = _compiled(flex_attention)(
            _to_batch(query),
            _to_batch(key),
            _to_batch(value),
            block_mask=self._mask(settings.sliding_window),
            scale=settings.scaling,
            enable_gqa=num_query_heads != num_key_heads,
            kernel_options=_kernel_options(query),
            **logsumexps,
        )
        if sinks is None:
            return _to_tokens(result)
        output, auxiliary = result
        logsumexp = auxiliary.lse.unsqueeze(-1)  # [1, Hq, T, 1], float32
        share_of_keys = torch.sigmoid(logsumexp - sinks[:, None, None])
        return _to_tokens((output * share_of_keys).to(output.dtype))

    def _mask(self, window: int | None) -> BlockMask:
        if window not in self._masks:
            length = len(self._positions)
            self._masks[window] = _compiled(create_block_mask)(
                self.visible(window), None, None, length, length, device=self._device
            )
        return self._masks[window]

    def visible(self, window: int | None) -> Callable[[Any, Any, Any, Any], Any]:
        """Return the mask function of a sliding window. Query token q sees key token k if k is on
        its path, not after it, and within the window."""
        ends = self._ends
        positions = self._positions

        def mask(_batch: Any, _head: Any, q: Any, k: Any) -> Any:
            is_on_path = (k <= q) & (q < ends[k])
            if window is None:
                return is_on_path
            distance = positions[q] - positions[k]
            return is_on_path & (distance < window)

        return mask


def _as_int32(values: Ints, device: torch.device) -> Tensor:
    return torch.from_numpy(values.astype(np.int32)).to(device)


def _to_batch(tokens: Tensor) -> Tensor:
    """[T, H, D] -> [1, H, T, D]"""
    return tokens.transpose(0, 1).unsqueeze(0)


def _to_tokens(batch: Tensor) -> Tensor:
    """[1, H, T, D] -> [T, H, D]"""
    return batch[0].transpose(0, 1)


def failure(layer: "LayerShape") -> str | None:
    """Try the kernels of a kind of layer, forward and backward, on a tiny row, and compare them
    with `sdpa`. Return None, or the reason why they cannot be used."""
    tree = TokenTree.of_group(2, [1])
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=generator)
        return drawn.to(layer.device, layer.dtype).requires_grad_()

    query = draw(tree.num_tokens, *layer.query)
    key = draw(tree.num_tokens, *layer.key)
    sinks = None
    if layer.has_sinks:
        num_query_heads = layer.query[0]
        sinks = draw(num_query_heads)
    head_size = layer.query[1]
    settings = LayerSettings(
        layer=0, scaling=head_size**-0.5, sliding_window=layer.sliding_window, softcap=None
    )

    def results(layout: Layout) -> Tensor:
        """Return the elements of the output and of all gradients."""
        output = layout.attend(query, key, key, settings, sinks)
        inputs = [query, key]
        if sinks is not None:
            inputs.append(sinks)
        gradients = torch.autograd.grad(output.square().sum(), inputs)
        flat = [tensor.detach().flatten().float() for tensor in (output, *gradients)]
        return torch.cat(flat)

    # A layer whose activations are recomputed must not count the tensors that are saved here.
    apart = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
    try:
        with torch.enable_grad(), apart:
            got = results(FlexAttention(tree, layer.device))
            expected = results(SdpaAttention(tree, layer.device))
    except Exception as error:  # of Inductor, Triton or the driver
        text = str(error).strip() or type(error).__name__
        return text.splitlines()[0]
    difference = (got - expected).norm()
    if not difference <= MAX_ERROR * expected.norm():  # also NaN
        return "its kernels give other results"
    return None


def _kernel_options(query: Tensor) -> dict[str, Any]:
    """Return options with which the kernels compile, forward and backward."""
    # The kernel for fewer than 128 queries has no valid configuration for some numbers of them.
    options: dict[str, Any] = {"FORCE_USE_FLEX_ATTENTION": True}
    head_size = query.shape[-1]
    shared_memory_bytes = devices.shared_memory_bytes(query.device)
    if head_size > LARGE_HEAD_SIZE and shared_memory_bytes < LARGE_HEAD_BYTES:
        options |= LARGE_HEAD_OPTIONS
    return options


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)
