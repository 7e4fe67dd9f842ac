"""A model's forward in fewer, larger operations: for decoding in float32 on the CPU.

For decoder layers of Llama's kind (also Qwen2, Qwen3, Mistral ...) a third of the operations gives
the same result:

    q, k and v in one product, gate and up in one; norms' weights multiplied into the next product's
    weights; RMSNorm and RoPE in four operations

Large products use oneDNN, with copies of the layers' weights in its blocked layout: for 4 to 64
rows 1.1 to 2.3 times as fast as torch's own.

The model's own code is used where logits differ, then or with new weights, and where the first
weights could hide that: if the model has parameters that are not used here, or weights that are all
zero.

Shapes: T tokens, K of them with logits, H the model's width, Hq query heads, Hkv key/value heads, D
head size, V tokens of the vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from easyrl.layout.tree import TokenTree
from easyrl.model.inputs import ModelInputs
from easyrl.model.mixers.interface import LayerSettings, Layout
from easyrl.model.mixers.packed_row import PackedRow
from easyrl.model.mixers.recording import RecordingLayout
from easyrl.model.policy import Policy

TOLERANCE = 1e-4  # largest difference of logits, relative to the largest logit: rounding in float32
PADDED_TO, MOST_ROWS = 8, 64  # rows of a product: oneDNN keeps a kernel for each number of them
SMALL = 130_000  # weights: for fewer, torch's own product is faster than a call of oneDNN
CHECKED_TOKENS, RECHECKED_TOKENS = 24, 2  # of each row of the check, at first and with new weights
USED = re.compile(  # names of parameters
    r"(embed_tokens|norm|layers\.\d+\.(input_layernorm|post_attention_layernorm))\.weight"
    r"|layers\.\d+\.self_attn\.([qk]_norm\.weight|[qkvo]_proj\.(weight|bias))"
    r"|layers\.\d+\.mlp\.(gate|up|down)_proj\.(weight|bias)"
)


def fused_decoder(policy: Policy, max_length: int) -> FusedDecoder | None:
    """Return a decoder for sequences of up to `max_length` tokens, or None if it is not exact."""
    if not all(p.dtype == torch.float32 and p.is_cpu for p in policy.model.parameters()):
        return None
    with torch.inference_mode(), suppress(Exception):  # any: its layers may be of another kind
        decoder = FusedDecoder(policy, max_length)
        parameters = policy.model.get_decoder().named_parameters()
        is_shown = (USED.fullmatch(n) and (n.endswith("bias") or p.any()) for n, p in parameters)
        if all(is_shown) and decoder.equals(policy):
            return decoder
    return None


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if weight.numel() < SMALL:
        return nn.functional.linear(x, weight, bias)
    parts = torch.split(nn.functional.pad(x, (0, 0, 0, -len(x) % PADDED_TO)), MOST_ROWS)
    multiply = torch.ops.mkldnn._linear_pointwise
    return torch.cat([multiply(part, weight, bias, "none", [], "") for part in parts])[: len(x)]


class _Product:
    """x [T, H] -> x Wᵀ + b [T, N] of layers side by side; W includes RMSNorm `norm`'s weight."""

    def __init__(self, *layers: nn.Linear, norm: Any = None) -> None:
        self._layers, self._norm = layers, norm

    def copy_weights(self) -> None:
        weights = [layer.weight for layer in self._layers]
        weight = weights[0]
        if self._norm is not None:
            of_inputs = self._norm.weight * len(self._norm.weight) ** 0.5  # see `_normalized`
            sizes = [len(each) for each in weights]
            weight = weight.new_empty(sum(sizes), len(of_inputs))  # [N, H]
            for own, part in zip(weights, torch.split(weight, sizes), strict=True):
                torch.mul(own, of_inputs, out=part)
        pack, is_small = torch.ops.mkldnn._reorder_linear_weight, weight.numel() < SMALL
        self.weight = weight.t().contiguous().t() if is_small else pack(weight, PADDED_TO)
        self.bias: Tensor | None = None  # [N]
        if any(layer.bias is not None for layer in self._layers):
            self.bias = torch.cat([layer.bias for layer in self._layers])

    def __call__(self, x: Tensor) -> Tensor:
        return _product(x, self.weight, self.bias)


class _Layer:
    """A decoder layer: its products, norms and attention parameters."""

    def __init__(self, module: Any, settings: LayerSettings) -> None:
        attention, mlp = module.self_attn, module.mlp
        before, between = module.input_layernorm, module.post_attention_layernorm
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.qkv = _Product(*projections, norm=before)
        self.out = _Product(attention.o_proj)
        self.gate_up = _Product(mlp.gate_proj, mlp.up_proj, norm=between)
        self.down = _Product(mlp.down_proj)
        self.activation = mlp.act_fn
        self.settings = settings
        self.head_size = attention.head_dim
        self.num_heads = [layer.out_features // self.head_size for layer in projections]
        self.eps = [_scaled_eps(before), _scaled_eps(between)]
        self.head_norms: list[Any] = []  # of queries and keys
        if hasattr(attention, "q_norm"):
            self.head_norms = [attention.q_norm, attention.k_norm]
            self.head_eps = _scaled_eps(attention.q_norm)

    def copy_weights(self) -> None:
        for product in (self.qkv, self.out, self.gate_up, self.down):
            product.copy_weights()
        if self.head_norms:
            sizes = zip(self.head_norms, self.num_heads[:2], strict=True)
            weights = [norm.weight.expand(number, self.head_size) for norm, number in sizes]
            self.head_weight = torch.cat(weights) * self.head_size**0.5  # [Hq + Hkv, D]

    def update(self, hidden: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> None:
        """Replace `hidden` [T, H] by the layer's output. `cos`, `sin`: [T, 1, 2, D/2]."""
        num_queries, num_keys, _ = self.num_heads
        qkv = self.qkv(_normalized(hidden, self.eps[0])).view(len(hidden), -1, self.head_size)
        rotated, value = qkv.tensor_split([num_queries + num_keys], dim=1)
        if self.head_norms:
            rotated = _normalized(rotated, self.head_eps).mul_(self.head_weight)
        halves = rotated.view(*rotated.shape[:2], 2, -1)
        rotated = torch.addcmul(halves.flip(2).mul_(sin), halves, cos).flatten(2)
        query, key = rotated.tensor_split([num_queries], dim=1)
        hidden += self.out(layout.attend(query, key, value, self.settings).flatten(1))
        gate, up = self.gate_up(_normalized(hidden, self.eps[1])).chunk(2, dim=-1)
        hidden += self.down(self.activation(gate).mul_(up))


def _scaled_eps(norm: Any) -> Tensor:
    eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    return torch.tensor(eps * norm.weight.numel())


def _normalized(x: Tensor, scaled_eps: Tensor) -> Tensor:
    """x / sqrt(Σ x² + D eps) over the last dimension: RMSNorm without weight and factor sqrt(D),
    which its caller multiplies into weights."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.addcmul(scaled_eps, norm, norm).rsqrt_()


def _rotations(rotary: Any, max_length: int) -> list[Tensor]:
    """Return cosines and signed sines of RoPE (arXiv 2104.09864, eq. 34) of each position, by
    halves of a head: 2 x [max_length, 1, 2, D/2]. Raises ValueError if these depend on a batch."""
    if rotary.rope_type in ("dynamic", "longrope"):
        raise ValueError("RoPE depends on the longest sequence")
    tables = rotary(torch.zeros(1), torch.arange(max_length)[None])
    cos, sin = (table[0].unflatten(-1, (2, -1)).unsqueeze(1) for table in tables)
    return [cos.contiguous(), sin * sin.new_tensor([-1.0, 1.0])[:, None]]


class FusedDecoder:
    """A model's forward with `Policy.forward`'s argument and result."""

    def __init__(self, policy: Policy, max_length: int) -> None:
        """Raises an error of any kind if the model's layers are of another kind."""
        decoder = policy.model.get_decoder()
        self._embed, self._norm = decoder.embed_tokens, decoder.norm
        self._eps = _scaled_eps(decoder.norm)
        self._head = policy.model.get_output_embeddings()
        self._tables = _rotations(decoder.rotary_emb, max_length)
        recorded = RecordingLayout(TokenTree.of_sequences([1]))
        one = torch.zeros(1, dtype=torch.int64)
        policy.forward(ModelInputs(one, one, recorded, one))
        layers = zip(decoder.layers, recorded.settings, strict=True)
        self._layers = [_Layer(*layer) for layer in layers]
        self.copy_weights()

    @torch.no_grad()
    def copy_weights(self, use_cores: Callable[[], None] = lambda: None) -> None:
        for layer in self._layers:
            use_cores()
            layer.copy_weights()
        self._norm_weight = self._norm.weight * len(self._norm.weight) ** 0.5

    def __call__(self, inputs: ModelInputs) -> Tensor:
        hidden = self._embed(inputs.ids)  # [T, H]
        cos, sin = (table.index_select(0, inputs.positions) for table in self._tables)
        for layer in self._layers:
            layer.update(hidden, cos, sin, inputs.layout)
        last = _normalized(hidden[inputs.logits_at], self._eps) * self._norm_weight
        return _product(last, self._head.weight, self._head.bias)

    @torch.inference_mode()
    def equals(self, policy: Policy, num_tokens: int = CHECKED_TOKENS) -> bool:
        """Compare logits of random tokens at the first and last positions. Zeros prove nothing."""
        longest = len(self._tables[0])
        first = torch.arange(min(longest, num_tokens))
        positions = torch.cat([first, first + longest - len(first)])
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(policy.vocabulary_size, positions.shape, generator=generator)
        layout = PackedRow(TokenTree.of_sequences([len(first)] * 2))
        every = torch.arange(len(positions))
        inputs = ModelInputs(tokens, positions, layout, every)
        cores = torch.get_num_threads()
        half = max(1, cores // 2)
        # Side by side: for so few tokens the cores of one forward mostly wait for each other.
        with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(half,)) as thread:
            mine = thread.submit(torch.inference_mode()(self), inputs)
            torch.set_num_threads(half)
            try:
                expected = policy.forward(inputs)
            finally:
                torch.set_num_threads(cores)
        return bool((mine.result() - expected).abs().max() < TOLERANCE * expected.abs().max())
