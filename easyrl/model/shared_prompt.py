"""Shared-prompt attention: a group is packed as `[P | R1 | R2 | ... | RG]`.

A prompt token attends to the prompt, a completion token to its prompt and its own completion, both
causally:

    own      every segment (a prompt or a completion) to itself, causally
    prompt   all completions of a group together to their prompt, whose keys are not copied

Completions may branch too: a group is a tree of segments in depth-first order, so that the tokens
below a segment stand right behind it. They attend to it together, as to a prompt. The cost follows
the distinct tokens and the lengths of the paths to them.

A token's softmax over its blocks is merged by their log-sum-exps. Kept for backward are the row's
query, key and value, its output and log-sum-exp: no scores, no copies.

A kernel takes many segments at once if they have one length. So segments of similar length are
padded to the longest of them: a bucket. Wide buckets waste scores, many buckets waste calls.

Shapes: T tokens of the packed row, Hkv key/value heads, G query heads for each of them (1 for keys
and values), D head size; of a bucket: B segments, L the longest of them. "Tokens" are
[T, Hkv, G, D], "cells" [B, L, Hkv, G, D], a block's tensors [B*Hkv, G, L, D].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from easyrl import devices
from easyrl.layout.tree import Ints, TokenTree

HIDDEN = -1e30  # added to hidden scores; finite, as a query may have no visible key in a block


@dataclass(frozen=True, slots=True)
class LayerSettings:
    """A layer's attention parameters."""

    layer: int
    scaling: float
    sliding_window: int | None
    softcap: float | None


@dataclass(frozen=True, slots=True)
class Block:
    """Queries [B, H, L, D] with the keys and values that they attend to: [B, H, S, D], possibly
    expanded to H (stride 0). Values may have another size than D."""

    query: Tensor
    key: Tensor
    value: Tensor
    is_causal: bool  # only where L == S
    bias: Tensor | None  # [L, S] or [B, 1, L or 1, S], added to the scores


class SharedPrompt:
    """The attention layout of one packed row, whose tree is in depth-first order."""

    def __init__(self, tree: TokenTree, device: torch.device) -> None:
        self._tree = tree
        self._buckets = make_buckets(np.stack([tree.starts, tree.lengths], axis=1), device)
        self._biases: dict[tuple[Any, ...], Tensor] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, settings: LayerSettings) -> Tensor:
        """[T, Hq, D], 2 x [T, Hkv, D] -> [T, Hq, D]"""
        num_heads = key.shape[1]
        # The fused kernel assumes that the elements of a head are adjacent, and does not check it.
        rows = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        output: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
            *(x.reshape(len(x), num_heads, -1, x.shape[-1]) for x in rows), self, settings
        )
        return output.flatten(1, 2)

    def attend_sequences(
        self, query: Tensor, key: Tensor, value: Tensor, settings: LayerSettings
    ) -> Tensor:
        """Compute `attend` of whole sequences without gradient: fused kernels store no scores."""
        if settings.softcap is not None:
            return self.attend(query, key, value, settings)
        rows = (x.contiguous() for x in (query, key, value))
        q, k, v = (x.view(len(x), key.shape[1], -1, x.shape[-1]) for x in rows)
        output = query.new_empty((*q.shape[:-1], value.shape[-1]))
        for bucket, block in self.own_blocks(q, k, v, settings):
            inputs = block.query, block.key, block.value, block.bias, 0.0, block.is_causal
            bucket.put(output, scaled_dot_product_attention(*inputs, scale=settings.scaling))
        return output.flatten(1, 2)

    def own_blocks(
        self, query: Tensor, key: Tensor, value: Tensor, settings: LayerSettings
    ) -> Iterator[tuple[Bucket, Block]]:
        window = settings.sliding_window
        for bucket in self._buckets:
            positions, bias = np.arange(bucket.longest), None
            if window is not None and window < bucket.longest:
                bias = self._bias(positions, positions, window, query)
            cells = (bucket.take(x) for x in (query, key, value))
            yield bucket, _block(*cells, is_causal=bias is None, bias=bias)

    def prompt_blocks(
        self, query: Tensor, key: Tensor, value: Tensor, settings: LayerSettings
    ) -> Iterator[tuple[slice, slice, Block]]:
        """Yield a block for each node that others continue, with the queries of what is below it
        and its keys: their numbers in the row, and the block."""
        window = settings.sliding_window
        tree = self._tree
        for node in np.flatnonzero(tree.has_children):
            start, stop = int(tree.starts[node]), int(tree.stops[node])
            below = slice(stop, int(tree.ends[node]))
            bias = None
            if window is None:
                keys, bias = self._pad(slice(start, stop), query)
            else:
                position = int(tree.first_positions[node])
                after = position + stop - start  # the first position below
                first = max(position, after - window + 1)  # the first that is seen from there
                if first == after:
                    continue
                keys = slice(stop - (after - first), stop)
                positions = tree.positions[below]
                if positions.max() - first >= window:
                    bias = self._bias(positions, np.arange(first, after), window, query)
            cells = (x[None] for x in (query[below], key[keys], value[keys]))
            yield below, keys, _block(*cells, is_causal=False, bias=bias)

    def _pad(self, keys: slice, query: Tensor) -> tuple[slice, Tensor | None]:
        """Extend a segment's keys to a padded length; return the bias [1, S] that hides this."""
        length = keys.stop - keys.start
        width = padded_length(length)
        if width == length or keys.start + width > len(query):
            return keys, None
        bias = self._bias(np.array([length - 1]), np.arange(width), width, query)
        return slice(keys.start, keys.start + width), bias

    def _bias(self, queries: Ints, keys: Ints, window: int, reference: Tensor) -> Tensor:
        """Return [L, S] from positions: 0 for visible keys, HIDDEN for others. Layers share it."""
        name = (queries.tobytes(), keys.tobytes(), window)
        if name not in self._biases:
            distance = torch.from_numpy(queries[:, None] - keys[None, :])
            hidden = (distance < 0) | (distance >= window)
            bias = torch.zeros(hidden.shape, dtype=reference.dtype).masked_fill_(hidden, HIDDEN)
            self._biases[name] = bias.to(reference.device)
        return self._biases[name]


class _Attention(torch.autograd.Function):
    """[T, Hkv, G, D], 2 x [T, Hkv, 1, D] -> [T, Hkv, G, D]"""

    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: Any, settings: LayerSettings
    ) -> Tensor:
        output = query.new_empty((*query.shape[:-1], value.shape[-1]))
        wide = torch.promote_types(query.dtype, torch.float32)
        logsumexp = query.new_empty((*query.shape[:-1], 1), dtype=wide)
        for bucket, block in layout.own_blocks(query, key, value, settings):
            part, part_logsumexp = attend_block(block, settings)
            bucket.put(output, part)
            bucket.put(logsumexp, part_logsumexp)
        for queries, _, block in layout.prompt_blocks(query, key, value, settings):
            part, part_logsumexp = (_to_tokens(x) for x in attend_block(block, settings))
            merge(output[queries], logsumexp[queries], part, part_logsumexp)
        ctx.save_for_backward(query, key, value, output, logsumexp)
        ctx.layout, ctx.settings = layout, settings
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, logsumexp = ctx.saved_tensors
        layout, settings = ctx.layout, ctx.settings
        of_query, of_key, of_value = (x.new_empty(x.shape) for x in (query, key, value))
        for bucket, block in layout.own_blocks(query, key, value, settings):
            # Padding has no weight: exp(score - inf) = 0.
            padded = bucket.take(gradient, 0.0), bucket.take(output), bucket.take(logsumexp, np.inf)
            parts = attend_block_backward(block, settings, *map(_to_block, padded))
            bucket.put(of_query, parts[0])
            bucket.put(of_key, parts[1].sum(1, keepdim=True))
            bucket.put(of_value, parts[2].sum(1, keepdim=True))
        for queries, keys, block in layout.prompt_blocks(query, key, value, settings):
            whole = (_to_block(x[queries].unsqueeze(0)) for x in (gradient, output, logsumexp))
            parts = attend_block_backward(block, settings, *whole)
            of_query[queries] += _to_tokens(parts[0])
            of_key[keys] += _to_tokens(parts[1].sum(1, keepdim=True))
            of_value[keys] += _to_tokens(parts[2].sum(1, keepdim=True))
        return of_query, of_key, of_value, None, None


def _block(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, bias: Tensor | None
) -> Block:
    q, k, v = (_to_block(cells) for cells in (query, key, value))
    k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
    return Block(q, k, v, is_causal, bias)


def _to_block(cells: Tensor) -> Tensor:
    """[B, L, Hkv, G, D] -> [B*Hkv, G, L, D]: query heads that share a key head are one batch."""
    return cells.permute(0, 2, 3, 1, 4).flatten(0, 1)


def _to_tokens(block: Tensor) -> Tensor:
    """[Hkv, G, L, D] -> [L, Hkv, G, D]"""
    return block.permute(2, 0, 1, 3)


def attend_block(block: Block, settings: LayerSettings) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, L, D] and the scores' log-sum-exp [B, H, L, 1], float32 or wider."""
    if not is_fused(block, settings):
        scores = _scores(block, settings)[0]
        logsumexp = torch.logsumexp(scores, dim=-1, keepdim=True)
        weights = torch.exp(scores - logsumexp)
        return torch.matmul(weights.to(block.value.dtype), block.value), logsumexp
    inputs = block.query, block.key, block.value, 0.0, block.is_causal
    outputs: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *inputs, attn_mask=block.bias, scale=settings.scaling
    )
    return outputs[0], outputs[1].unsqueeze(-1)


def attend_block_backward(
    block: Block, settings: LayerSettings, gradient: Tensor, output: Tensor, logsumexp: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, given the output's gradient, the merged output
    and the merged log-sum-exp: with these, a block's probabilities are `exp(scores - logsumexp)`
    (FlashAttention-2, arXiv 2307.08691, algorithm 2)."""
    if is_fused(block, settings):
        inputs = gradient, block.query, block.key, block.value, output, logsumexp.squeeze(-1)
        gradients: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *inputs, 0.0, block.is_causal, attn_mask=block.bias, scale=settings.scaling
        )
        return gradients[0], gradients[1], gradients[2]
    scores, capped = _scores(block, settings)
    weights = torch.exp(scores - logsumexp)
    wide = weights.dtype
    gradient = gradient.to(wide)
    of_value = torch.matmul(weights.transpose(-1, -2), gradient)
    of_weights = torch.matmul(gradient, block.value.to(wide).transpose(-1, -2))
    dot = (gradient * output).sum(dim=-1, keepdim=True)
    of_scores = weights * (of_weights - dot) * settings.scaling
    if capped is not None:
        of_scores = of_scores * (1.0 - capped.square())
    of_query = torch.matmul(of_scores, block.key.to(wide))
    of_key = torch.matmul(of_scores.transpose(-1, -2), block.query.to(wide))
    return of_query, of_key, of_value


def is_fused(block: Block, settings: LayerSettings) -> bool:
    """Return whether PyTorch's kernel computes the block: no soft-capping, no MLA."""
    has_one_size = block.query.shape[-1] == block.value.shape[-1]
    return block.query.device.type == "cpu" and settings.softcap is None and has_one_size


def _scores(block: Block, settings: LayerSettings) -> tuple[Tensor, Tensor | None]:
    """Return scores [B, H, L, S], float32 or wider, and tanh(score / softcap) if soft-capped."""
    query, key = block.query, block.key.transpose(-1, -2)
    wide = torch.promote_types(query.dtype, torch.float32)
    # Scores in half precision would have 8 bits: an error of 0.8 % instead of 0.2 %.
    if query.dtype != wide and devices.widens_products(query.device):
        scores = torch.bmm(query.flatten(0, 1), key.flatten(0, 1), out_dtype=wide)
        scores = scores.view(*query.shape[:-1], -1) * settings.scaling
    else:
        scores = torch.matmul(query.to(wide), key.to(wide)) * settings.scaling
    capped = None
    if settings.softcap is not None:
        capped = torch.tanh(scores / settings.softcap)
        scores = capped * settings.softcap
    if block.bias is not None:
        scores = scores + block.bias
    if block.is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores = scores.masked_fill(hidden, HIDDEN)
    return scores, capped


def merge(output: Tensor, logsumexp: Tensor, other: Tensor, other_logsumexp: Tensor) -> None:
    """Update `output` [..., D], `logsumexp` [..., 1] to those of one softmax over both blocks."""
    whole = torch.logaddexp(logsumexp, other_logsumexp)
    output *= torch.exp(logsumexp - whole)
    output += other * torch.exp(other_logsumexp - whole)
    logsumexp.copy_(whole)


BUCKET_SCORES = 8000
"""Cost of another bucket, in padded scores. Measured with the demo's model on one core: a bucket's
calls take as long as this many scores of 4 heads, forward and backward."""

LANES = 16
"""Float32 numbers in the widest vector register. PyTorch's fused kernel processes the remainder of
a row of scores one by one: 79 keys take 1.5 times as long as 80."""

_Lengths = TypeVar("_Lengths", int, Ints)


def padded_length(lengths: _Lengths) -> _Lengths:
    """Return each length, or the next multiple of LANES if that is faster to compute."""
    return lengths + (-lengths % LANES) * (lengths % LANES > LANES // 2)


@dataclass(frozen=True, slots=True)
class Bucket:
    """B segments of similar length, padded to the longest, L."""

    longest: int
    tokens: Tensor  # [B*L] int64: the token of each cell; 0 for padding
    padding: Tensor  # int64: the cells that are padding
    real: Tensor  # int64: the cells that are not padding
    tokens_of_real: Tensor  # int64

    def take(self, tokens: Tensor, padding: float | None = None) -> Tensor:
        """[T, ...] -> cells [B, L, ...]. Padding cells hold any value, or `padding`."""
        cells = tokens.index_select(0, self.tokens)
        if padding is not None:
            cells.index_fill_(0, self.padding, padding)
        return cells.view(-1, self.longest, *tokens.shape[1:])

    def put(self, tokens: Tensor, block: Tensor) -> None:
        """Write the real cells of a block [B*Hkv, G, L, D] to their tokens in [T, Hkv, G, D]."""
        cells = block.view(-1, tokens.shape[1], *block.shape[1:]).permute(0, 3, 1, 2, 4)
        real = cells.reshape(-1, *tokens.shape[1:]).index_select(0, self.real)
        tokens.index_copy_(0, self.tokens_of_real, real.to(tokens.dtype))  # may be wider


def make_buckets(segments: Ints, device: torch.device) -> list[Bucket]:
    """Divide segments [n, 2] (start, length) into buckets, the longest first: minimize the cost of
    scores and buckets over all cuts of the segments sorted by length, by dynamic programming over
    the distinct widths."""
    longest_first = segments[np.argsort(-segments[:, 1], kind="stable")]
    falling, starts = np.unique(-padded_length(longest_first[:, 1]), return_index=True)
    bounds = np.append(starts, len(segments))  # where each width starts
    least = np.zeros(len(bounds), dtype=np.int64)  # least cost of the segments before each bound
    previous = np.zeros(len(bounds), dtype=np.int64)  # start of the last bucket before it
    for stop in range(1, len(bounds)):
        costs = least[:stop] + (bounds[stop] - bounds[:stop]) * falling[:stop] ** 2
        previous[stop] = costs.argmin()
        least[stop] = costs.min() + BUCKET_SCORES
    cuts = [len(falling)]
    while cuts[-1]:
        cuts.append(int(previous[cuts[-1]]))
    return [
        _make_bucket(longest_first[bounds[start] : bounds[stop]], device)
        for stop, start in pairwise(cuts)
    ][::-1]


def _make_bucket(segments: Ints, device: torch.device) -> Bucket:
    starts, lengths = segments[:, :1], segments[:, 1:]  # 2 x [B, 1]
    longest = padded_length(int(lengths[0, 0]))
    offsets = np.arange(longest)[None, :]  # [1, L]
    is_real = (offsets < lengths).reshape(-1)
    tokens = np.where(is_real, (starts + offsets).reshape(-1), 0)
    real = np.flatnonzero(is_real)

    def on_device(array: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return Bucket(
        longest=longest,
        tokens=on_device(tokens),
        padding=on_device(np.flatnonzero(~is_real)),
        real=on_device(real),
        tokens_of_real=on_device(tokens[real]),
    )
