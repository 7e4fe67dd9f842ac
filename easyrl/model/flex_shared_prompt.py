"""Shared-prompt attention by FlexAttention: one compiled kernel over the whole packed row.

Blocks of 128 x 128 scores that the mask hides are never computed. Used in half precision on
accelerators that can train FlexAttention, whose float32 kernels are many times slower than
`shared_prompt`. One kernel serves rows of every length: one for each would be up to 1.5 times as
fast, but takes ten seconds to compile for every new length.

Shapes: T tokens of the packed row, Hq query heads, Hkv key/value heads, D head size.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from easyrl import devices
from easyrl.layout.tree import TokenTree
from easyrl.model.attention import notes
from easyrl.model.shared_prompt import LayerSettings

LARGE_HEAD_SIZE, LARGE_HEAD_BYTES = 128, 160 * 1024
"""Kernels for larger heads than this need about this much shared memory with torch's block sizes.
Consumer cards (RTX 3090 to 5090), L4 and A10 have 99 KiB; A100 has 163, H100 227."""


class FlexSharedPrompt:
    """The attention layout of one packed row, whose tree is in depth-first order. Its mask is made
    once per window, for all layers."""

    def __init__(self, tree: TokenTree, device: torch.device) -> None:
        # Of each token: the end of the tokens that see it, and its position.
        ends = np.repeat(tree.ends, tree.lengths)
        of_tokens = np.stack([ends, tree.positions]).astype(np.int32)
        self._ends, self._positions = torch.from_numpy(of_tokens).to(device)
        self._device = device
        self._masks: dict[int | None, BlockMask] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, settings: LayerSettings) -> Tensor:
        """[T, Hq, D], 2 x [T, Hkv, D] -> [T, Hq, D], without soft-capping."""
        assert settings.softcap is None
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        mask, is_grouped = self._mask(settings.sliding_window), q.shape[1] != k.shape[1]
        options = _kernel_options(q.shape[-1], devices.shared_memory_bytes(q.device))
        how = {"scale": settings.scaling, "enable_gqa": is_grouped, "kernel_options": options}
        output = _compiled(flex_attention)(q, k, v, block_mask=mask, **how)
        tokens: Tensor = output[0].transpose(0, 1)
        return tokens

    def _mask(self, window: int | None) -> BlockMask:
        if window not in self._masks:
            length = len(self._positions)
            self._masks[window] = _compiled(create_block_mask)(
                self.visible(window), None, None, length, length, device=self._device
            )
        return self._masks[window]

    def visible(self, window: int | None) -> Callable[[Any, Any, Any, Any], Any]:
        """Return the mask: of the same node or of one above it, not ahead, in the window."""
        ends, positions = self._ends, self._positions

        def mask(_batch: Any, _head: Any, q: Any, k: Any) -> Any:
            seen = (k <= q) & (q < ends[k])
            if window is not None:
                seen = seen & (positions[q] - positions[k] < window)
            return seen

        return mask


@cache
def trains(
    device: torch.device, dtype: torch.dtype, query: torch.Size, key: torch.Size, window: int | None
) -> bool:
    """Try the kernels of such layers (number and size of heads) once; note why they fail."""
    q, k = (
        torch.zeros(3, *s, dtype=dtype, device=device, requires_grad=True) for s in (query, key)
    )
    layout = FlexSharedPrompt(TokenTree.of_group(2, [1]), device)
    # A layer whose activations are recomputed must not count the tensors that are saved here.
    apart = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
    try:
        with torch.enable_grad(), apart:
            output = layout.attend(q, k, k, LayerSettings(0, 1.0, window, None))
            torch.autograd.grad(output.sum(), [q, k])
    except Exception as error:  # of Inductor, Triton or the driver
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        notes.append(f"attention without FlexAttention, exact but slower: {reason}")
        return False
    return True


def _kernel_options(head_size: int, shared_memory_bytes: int) -> dict[str, Any]:
    """Return options with which the kernels compile, forward and backward."""
    # The kernel for fewer than 128 queries has no valid configuration for some numbers of them.
    options: dict[str, Any] = {"FORCE_USE_FLEX_ATTENTION": True}
    if head_size > LARGE_HEAD_SIZE and shared_memory_bytes < LARGE_HEAD_BYTES:
        options |= {"num_stages": 1}
        options |= {f"bwd_BLOCK_{side}": 32 for side in ("M1", "N1", "M2", "N2")}
    return options


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)
