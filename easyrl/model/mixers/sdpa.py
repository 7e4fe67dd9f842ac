"""Attention in a packed row by blocks of scores, which PyTorch's kernels compute.

Every token attends to its own node and to each node above it, causally. The row is in depth-first
order, so that the tokens below a node stand right behind it. There are two kinds of blocks:

    own      every node (a prompt or a completion) to itself, causally
    shared   all tokens below a node together to that node, whose keys are not copied
    span     the tokens of a picture to those of its tokens that stand behind them (`Spans`)

For a group `[P | R1 | R2 | ... | RG]` these are 1 + G own blocks and one shared block. The cost
follows the distinct tokens and the lengths of the paths to them.

The softmax of a token over its blocks is merged by their log-sum-exps. A head's sink is one more
score, that of a key whose value is 0. For backward the row's query, key and value, its output and
log-sum-exp are kept: no scores, no copies.

Own blocks of similar length are computed together (`buckets`).

Shapes: T tokens of the packed row, Hkv key/value heads, G query heads for each of them (1 for keys
and values), D head size; of a bucket: B nodes, L the longest of them. "Tokens" are
[T, Hkv, G, D], "cells" [B, L, Hkv, G, D], a block's tensors [B*Hkv, G, L, D].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from easyrl import devices
from easyrl.layout.tree import Ints, TokenTree
from easyrl.model.mixers.buckets import Bucket, make_buckets, padded_length
from easyrl.model.mixers.interface import LayerSettings, Spans

HIDDEN = -1e30  # added to hidden scores; finite, as a query may have no visible key in a block


@dataclass(frozen=True, slots=True)
class Block:
    """Queries [B, H, L, D] with the keys and values that they attend to: [B, H, S, D], possibly
    expanded to H (stride 0). Values may have another size than D."""

    query: Tensor
    key: Tensor
    value: Tensor
    is_causal: bool  # only where L == S
    bias: Tensor | None  # [L, S] or [B, 1, L or 1, S], added to the scores


class BlockOutput(NamedTuple):
    """The result of a softmax over the keys of one block."""

    output: Tensor  # [B, H, L, D]
    logsumexp: Tensor  # [B, H, L, 1] of the scores, float32 or wider


class BlockGradients(NamedTuple):
    """Gradients of a block's tensors, before those of query heads that share a key are summed."""

    query: Tensor
    key: Tensor
    value: Tensor


class _OwnBlock(NamedTuple):
    """The attention of a bucket of nodes to themselves."""

    bucket: Bucket
    block: Block


class _OtherBlock(NamedTuple):
    """The attention of all tokens below a node to the node, or of tokens to later ones."""

    queries: slice  # tokens of the row that attend
    keys: slice  # tokens of the row that they attend to
    block: Block


class OwnAttention(NamedTuple):
    """Attention of a row's tokens to their own nodes."""

    output: Tensor  # [T, Hkv, G, D]
    logsumexp: Tensor  # [T, Hkv, G, 1] of the scores, float32 or wider


class Rows(NamedTuple):
    """A layer's tensors: [T, Hkv, G, D] and 2 x [T, Hkv, 1, D]."""

    query: Tensor
    key: Tensor
    value: Tensor


def _grouped(query: Tensor, key: Tensor, value: Tensor) -> Rows:
    """Group the query heads by the key head that they share."""
    num_key_heads = key.shape[1]

    def group(tokens: Tensor) -> Tensor:
        # The fused kernel assumes that the elements of a head are adjacent, and does not check it.
        if tokens.stride(-1) != 1:
            tokens = tokens.contiguous()
        num_tokens, _, head_size = tokens.shape
        return tokens.reshape(num_tokens, num_key_heads, -1, head_size)

    return Rows(group(query), group(key), group(value))


class SdpaAttention:
    """The attention of one packed row, whose tree is in depth-first order."""

    def __init__(self, tree: TokenTree, device: torch.device, spans: Spans | None = None) -> None:
        self._tree = tree
        self._spans = spans
        self._buckets = make_buckets(tree, device)
        self._biases: dict[tuple[bytes, bytes, int], Tensor] = {}  # see `_bias`

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        settings: LayerSettings,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute attention: [T, Hq, D], 2 x [T, Hkv, D] -> [T, Hq, D]. See `Layout.attend`."""
        rows = _grouped(query, key, value)
        grouped_sinks = None
        if sinks is not None:
            grouped_sinks = group_sinks(sinks, key.shape[1])
        apply: Any = _Attention.apply
        output: Tensor = apply(*rows, grouped_sinks, self, settings)
        return output.flatten(1, 2)

    def attend_sequences(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        settings: LayerSettings,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute `attend` without gradient for a row of whole sequences, in which no node has
        children. The fused kernels that are used here store no scores, but they support neither
        soft-capping nor sinks, and spans are blocks of their own."""
        assert not self._tree.has_children.any()
        if settings.softcap is not None or sinks is not None or self._spans is not None:
            return self.attend(query, key, value, settings, sinks)
        rows = _grouped(query.contiguous(), key.contiguous(), value.contiguous())
        output = rows.query.new_empty((*rows.query.shape[:-1], value.shape[-1]))
        for bucket, block in self.own_blocks(rows, settings):
            result = scaled_dot_product_attention(
                block.query,
                block.key,
                block.value,
                attn_mask=block.bias,
                is_causal=block.is_causal,
                scale=settings.scaling,
            )
            bucket.put(output, result)
        return output.flatten(1, 2)

    def attend_own(self, rows: Rows, settings: LayerSettings) -> OwnAttention:
        """Compute the attention of each node to itself, without gradient."""
        query = rows.query
        token_heads = query.shape[:-1]  # T, Hkv, G
        output = query.new_empty((*token_heads, rows.value.shape[-1]))
        wide = torch.promote_types(query.dtype, torch.float32)
        logsumexp = query.new_empty((*token_heads, 1), dtype=wide)
        for bucket, block in self.own_blocks(rows, settings):
            own = attend_block(block, settings)
            bucket.put(output, own.output)
            bucket.put(logsumexp, own.logsumexp)
        return OwnAttention(output, logsumexp)

    def own_blocks(self, rows: Rows, settings: LayerSettings) -> Iterator[_OwnBlock]:
        """Yield the blocks of all nodes with themselves, by buckets."""
        window = settings.sliding_window
        for bucket in self._buckets:
            bias = None
            if window is not None and window < bucket.longest:
                positions = np.arange(bucket.longest)
                bias = self._bias(positions, positions, window, rows.query)
            block = _block(
                bucket.take(rows.query),
                bucket.take(rows.key),
                bucket.take(rows.value),
                is_causal=bias is None,
                bias=bias,
            )
            yield _OwnBlock(bucket, block)

    def other_blocks(self, rows: Rows, settings: LayerSettings) -> Iterator[_OtherBlock]:
        """Yield the blocks that are merged with the own ones, in their order."""
        yield from self._shared_blocks(rows, settings)
        if self._spans is None:
            return
        if settings.sliding_window is None and self._spans.only_sliding:
            return
        for start, stop in self._spans.places:
            if stop - start > 1:
                yield self._span_block(rows, start, stop)

    def merge_others(
        self, rows: Rows, settings: LayerSettings, output: Tensor, logsumexp: Tensor
    ) -> None:
        """Add these blocks to the attention of each node to itself, in place."""
        for queries, _, block in self.other_blocks(rows, settings):
            shared = attend_block(block, settings)
            merge(
                output[queries],
                logsumexp[queries],
                _to_tokens(shared.output),
                _to_tokens(shared.logsumexp),
            )

    def _span_block(self, rows: Rows, start: int, stop: int) -> _OtherBlock:
        """Return the block of a span's tokens with those behind them. (A window hides only what
        stands before a token.)"""
        queries = slice(start, stop - 1)
        keys = slice(start + 1, stop)
        num_tokens = stop - start - 1
        # The query and the key at an equal place in the block are neighbours in the row.
        bias = rows.query.new_full((num_tokens, num_tokens), HIDDEN).tril(-1)
        block = _block(
            rows.query[queries][None],
            rows.key[keys][None],
            rows.value[keys][None],
            is_causal=False,
            bias=bias,
        )
        return _OtherBlock(queries, keys, block)

    def _shared_blocks(self, rows: Rows, settings: LayerSettings) -> Iterator[_OtherBlock]:
        """Yield a block for each node that others continue: of all tokens below it with its own."""
        window = settings.sliding_window
        tree = self._tree
        for node in np.flatnonzero(tree.has_children):
            start = int(tree.starts[node])
            stop = int(tree.stops[node])
            below = slice(stop, int(tree.ends[node]))
            if window is None:
                keys, bias = self._pad(slice(start, stop), rows.query)
            else:
                # Positions: of the node's first token, of the first token below it, and of the
                # first key that this one sees.
                first = int(tree.first_positions[node])
                first_below = first + stop - start
                first_seen = max(first, first_below - window + 1)
                num_seen = first_below - first_seen
                if num_seen == 0:
                    continue
                keys = slice(stop - num_seen, stop)
                bias = None
                of_queries = tree.positions[below]
                if of_queries.max() - first_seen >= window:
                    of_keys = np.arange(first_seen, first_below)
                    bias = self._bias(of_queries, of_keys, window, rows.query)
            block = _block(
                rows.query[below][None],
                rows.key[keys][None],
                rows.value[keys][None],
                is_causal=False,
                bias=bias,
            )
            yield _OtherBlock(below, keys, block)

    def _pad(self, keys: slice, query: Tensor) -> tuple[slice, Tensor | None]:
        """Extend a node's keys to a padded length; return the bias [1, S] that hides the rest."""
        start = keys.start
        length = keys.stop - start
        width = padded_length(length)
        has_tokens_behind = start + width <= len(query)
        if width == length or not has_tokens_behind:
            return keys, None
        last_visible = np.array([length - 1])
        bias = self._bias(last_visible, np.arange(width), width, query)
        return slice(start, start + width), bias

    def _bias(self, queries: Ints, keys: Ints, window: int, reference: Tensor) -> Tensor:
        """Return the bias [L, S] of queries and keys at these positions: 0 where the key is
        visible, else HIDDEN. Layers share it. `reference`: tensor that gives dtype and device."""
        name = (queries.tobytes(), keys.tobytes(), window)
        if name not in self._biases:
            distance = torch.from_numpy(queries[:, None] - keys[None, :])  # [L, S]
            is_later = distance < 0
            is_outside_window = distance >= window
            bias = torch.zeros(distance.shape, dtype=reference.dtype)
            bias.masked_fill_(is_later | is_outside_window, HIDDEN)
            self._biases[name] = bias.to(reference.device)
        return self._biases[name]


class _Attention(torch.autograd.Function):
    """[T, Hkv, G, D], 2 x [T, Hkv, 1, D], sinks [Hkv, G, 1] or None -> [T, Hkv, G, D]"""

    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        layout: SdpaAttention,
        settings: LayerSettings,
    ) -> Tensor:
        rows = Rows(query, key, value)
        output, logsumexp = layout.attend_own(rows, settings)
        layout.merge_others(rows, settings, output, logsumexp)
        if sinks is not None:
            merge_sinks(output, logsumexp, sinks)
        ctx.save_for_backward(query, key, value, sinks, output, logsumexp)
        ctx.layout = layout
        ctx.settings = settings
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, logsumexp = ctx.saved_tensors
        layout: SdpaAttention = ctx.layout
        settings: LayerSettings = ctx.settings
        rows = Rows(query, key, value)
        of_query = query.new_empty(query.shape)
        of_key = key.new_empty(key.shape)
        of_value = value.new_empty(value.shape)
        for bucket, block in layout.own_blocks(rows, settings):
            # Padding has no weight: exp(score - inf) = 0.
            parts = attend_block_backward(
                block,
                settings,
                gradient=_to_block(bucket.take(gradient, 0.0)),
                output=_to_block(bucket.take(output)),
                logsumexp=_to_block(bucket.take(logsumexp, np.inf)),
            )
            bucket.put(of_query, parts.query)
            bucket.put(of_key, parts.key.sum(1, keepdim=True))
            bucket.put(of_value, parts.value.sum(1, keepdim=True))
        for queries, keys, block in layout.other_blocks(rows, settings):
            parts = attend_block_backward(
                block,
                settings,
                gradient=_to_block(gradient[queries][None]),
                output=_to_block(output[queries][None]),
                logsumexp=_to_block(logsumexp[queries][None]),
            )
            of_query[queries] += _to_tokens(parts.query)
            of_key[keys] += _to_tokens(parts.key.sum(1, keepdim=True))
            of_value[keys] += _to_tokens(parts.value.sum(1, keepdim=True))
        of_sinks = None
        if sinks is not None:
            of_sinks = _gradient_of_sinks(
                sinks, gradient=gradient, output=output, logsumexp=logsumexp
            )
        return of_query, of_key, of_value, of_sinks, None, None


def _gradient_of_sinks(
    sinks: Tensor, *, gradient: Tensor, output: Tensor, logsumexp: Tensor
) -> Tensor:
    """Return the gradient of sinks [Hkv, G, 1], like that of a key's scores in
    `attend_block_backward`. The value 0 leaves of it, for every token, `-probability * dot`."""
    probabilities = torch.exp(sinks - logsumexp)  # [T, Hkv, G, 1]
    wide = probabilities.dtype
    dot = (gradient.to(wide) * output).sum(dim=-1, keepdim=True)
    return -(probabilities * dot).sum(0)


def _block(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, bias: Tensor | None
) -> Block:
    """Return the block of cells: [B, L, Hkv, G, D] and 2 x [B, S, Hkv, 1, D]."""
    num_query_heads = query.shape[3]
    return Block(
        _to_block(query),
        _to_block(key).expand(-1, num_query_heads, -1, -1),
        _to_block(value).expand(-1, num_query_heads, -1, -1),
        is_causal,
        bias,
    )


def _to_block(cells: Tensor) -> Tensor:
    """[B, L, Hkv, G, D] -> [B*Hkv, G, L, D]: query heads that share a key head are one batch."""
    return cells.permute(0, 2, 3, 1, 4).flatten(0, 1)


def _to_tokens(block: Tensor) -> Tensor:
    """[Hkv, G, L, D] -> [L, Hkv, G, D]"""
    return block.permute(2, 0, 1, 3)


def attend_block(block: Block, settings: LayerSettings) -> BlockOutput:
    """Compute the attention of one block."""
    if is_fused(block, settings):
        outputs: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            block.query,
            block.key,
            block.value,
            0.0,  # dropout
            block.is_causal,
            attn_mask=block.bias,
            scale=settings.scaling,
        )
        return BlockOutput(outputs[0], outputs[1].unsqueeze(-1))
    scores = _scores(block, settings).scores
    logsumexp = torch.logsumexp(scores, dim=-1, keepdim=True)
    probabilities = torch.exp(scores - logsumexp).to(block.value.dtype)
    return BlockOutput(torch.matmul(probabilities, block.value), logsumexp)


def attend_block_backward(
    block: Block, settings: LayerSettings, *, gradient: Tensor, output: Tensor, logsumexp: Tensor
) -> BlockGradients:
    """Return the gradients of query, key and value, given the output's gradient, the merged output
    and the merged log-sum-exp: with these, a block's probabilities are `exp(scores - logsumexp)`
    (FlashAttention-2, arXiv 2307.08691, algorithm 2)."""
    if is_fused(block, settings):
        gradients: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient,
            block.query,
            block.key,
            block.value,
            output,
            logsumexp.squeeze(-1),
            0.0,  # dropout
            block.is_causal,
            attn_mask=block.bias,
            scale=settings.scaling,
        )
        return BlockGradients(gradients[0], gradients[1], gradients[2])
    scores, capped = _scores(block, settings)
    probabilities = torch.exp(scores - logsumexp)
    wide = probabilities.dtype  # float32 or wider
    gradient = gradient.to(wide)
    of_value = torch.matmul(probabilities.transpose(-1, -2), gradient)
    of_probabilities = torch.matmul(gradient, block.value.to(wide).transpose(-1, -2))
    dot = (gradient * output).sum(dim=-1, keepdim=True)
    of_scores = probabilities * (of_probabilities - dot) * settings.scaling
    if capped is not None:
        of_scores = of_scores * (1.0 - capped.square())
    of_query = torch.matmul(of_scores, block.key.to(wide))
    of_key = torch.matmul(of_scores.transpose(-1, -2), block.query.to(wide))
    return BlockGradients(of_query, of_key, of_value)


def is_fused(block: Block, settings: LayerSettings) -> bool:
    """Return whether PyTorch's fused kernel computes the block. It exists for the CPU alone, and
    supports neither soft-capping nor values of another size than keys (MLA)."""
    is_on_cpu = block.query.device.type == "cpu"
    has_one_size = block.query.shape[-1] == block.value.shape[-1]
    return is_on_cpu and has_one_size and settings.softcap is None


class _Scores(NamedTuple):
    scores: Tensor  # [B, H, L, S], float32 or wider
    capped: Tensor | None  # tanh(score / softcap), of the same shape; None without soft-capping


def _scores(block: Block, settings: LayerSettings) -> _Scores:
    scores = _products(block.query, block.key) * settings.scaling
    capped = None
    if settings.softcap is not None:
        capped = torch.tanh(scores / settings.softcap)
        scores = capped * settings.softcap
    if block.bias is not None:
        scores = scores + block.bias
    if block.is_causal:
        queries_by_keys = scores.shape[-2:]  # L, S
        is_later = torch.ones(queries_by_keys, dtype=torch.bool, device=scores.device).triu_(1)
        scores = scores.masked_fill(is_later, HIDDEN)
    return _Scores(scores, capped)


def _products(query: Tensor, key: Tensor) -> Tensor:
    """Multiply [B, H, L, D] by [B, H, S, D] to [B, H, L, S], in float32 or wider."""
    wide = torch.promote_types(query.dtype, torch.float32)
    columns = key.transpose(-1, -2)  # [B, H, D, S]
    is_half = query.dtype != wide
    # Scores in half precision would have 8 bits: an error of 0.8 % instead of 0.2 %.
    if is_half and devices.widens_products(query.device):
        rows_by_head = query.flatten(0, 1)  # [B*H, L, D]
        columns_by_head = columns.flatten(0, 1)  # [B*H, D, S]
        products = torch.bmm(rows_by_head, columns_by_head, out_dtype=wide)
        return products.view(*query.shape[:-1], -1)
    return torch.matmul(query.to(wide), columns.to(wide))


def merge(output: Tensor, logsumexp: Tensor, other: Tensor, other_logsumexp: Tensor) -> None:
    """Update `output` [..., D], `logsumexp` [..., 1] to those of one softmax over both blocks."""
    whole = torch.logaddexp(logsumexp, other_logsumexp)
    share = torch.exp(logsumexp - whole)
    output *= share
    other_share = torch.exp(other_logsumexp - whole)
    output += other * other_share
    logsumexp.copy_(whole)


def group_sinks(sinks: Tensor, num_key_heads: int) -> Tensor:
    """Return the sinks [Hq] as scores [Hkv, G, 1], in float32 or wider."""
    wide = torch.promote_types(sinks.dtype, torch.float32)
    return sinks.to(wide).reshape(num_key_heads, -1, 1)


def merge_sinks(output: Tensor, logsumexp: Tensor, sinks: Tensor) -> None:
    """Update `output` [..., Hkv, G, D] and `logsumexp` [..., Hkv, G, 1] to those of a softmax over
    one more key, whose scores are `sinks` [Hkv, G, 1] and whose value is 0."""
    whole = torch.logaddexp(logsumexp, sinks)
    output *= torch.exp(logsumexp - whole)
    logsumexp.copy_(whole)
