"""A model's forward in fewer, larger operations: for decoding in float32 on the CPU.

For decoder layers of Llama's kind (also Qwen2, Qwen3, Mistral ...) a third of the operations gives
the same result:

    q, k and v in one product, gate and up in one; norms' weights multiplied into the next product's
    weights; RMSNorm and RoPE in four operations

Large products use oneDNN, with copies of the weights in its blocked layout: for 4 to 64 rows 1.1 to
3 times as fast as torch's own.

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

from easyrl.engines import padded
from easyrl.layout.tree import TokenTree
from easyrl.model.inputs import ModelInputs
from easyrl.model.mixers.interface import LayerSettings, Layout
from easyrl.model.mixers.packed_row import PackedRow
from easyrl.model.mixers.recording import RecordingLayout
from easyrl.model.policy import Policy

TOLERANCE = 1e-4  # largest difference of logits, relative to the largest logit: rounding in float32
MAX_ROWS = 64  # of one product
TILE_ROWS = 6  # that oneDNN computes at a time with AVX2
PLANNED_ROWS = 8  # number of rows for which oneDNN chooses the layout of weights
SMALL = 130_000  # weights: for fewer, torch's own product is faster than a call of oneDNN
CHECKED_TOKENS = 24  # of each row of the check, when the decoder is made
RECHECKED_TOKENS = 2  # of each row of the check, with new weights
USED = re.compile(  # names of the parameters that the decoder uses
    r"(embed_tokens|norm|layers\.\d+\.(input_layernorm|post_attention_layernorm))\.weight"
    r"|layers\.\d+\.self_attn\.([qk]_norm\.weight|[qkvo]_proj\.(weight|bias))"
    r"|layers\.\d+\.mlp\.(gate|up|down)_proj\.(weight|bias)"
)


def fused_decoder(policy: Policy, max_length: int) -> FusedDecoder | None:
    """Return a decoder for sequences of up to `max_length` tokens, or None if it is not exact."""
    for parameter in policy.model.parameters():
        if parameter.dtype != torch.float32 or not parameter.is_cpu:
            return None
    # An error of any kind: the model's layers may be of another kind.
    with torch.inference_mode(), suppress(Exception):
        decoder = FusedDecoder(policy, max_length)
        if _shows_all_weights(policy) and decoder.equals(policy):
            return decoder
    return None


def _shows_all_weights(policy: Policy) -> bool:
    """Return whether a comparison of logits tests the use of every weight: the decoder uses all
    parameters, and no matrix and no norm is all zeros."""
    for name, parameter in policy.model.get_decoder().named_parameters():
        if not USED.fullmatch(name):
            return False
        if not name.endswith("bias") and not parameter.any():
            return False
    return True


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, H] -> x Wᵀ + b [T, N]. Large weights are in oneDNN's layout."""
    if weight.numel() < SMALL:
        return nn.functional.linear(x, weight, bias)
    products = list[Tensor]()
    for rows in torch.split(x, MAX_ROWS):
        num_rows = len(rows)
        block = _with_padding(rows)
        product = torch.ops.mkldnn._linear_pointwise(block, weight, bias, "none", [], "")
        products.append(product[:num_rows])
    if len(products) == 1:
        return products[0]
    return torch.cat(products)


def _with_padding(rows: Tensor) -> Tensor:
    num_rows = len(rows)
    num_missing = _padded_rows(num_rows) - num_rows
    if num_missing == 0:
        return rows
    return nn.functional.pad(rows, (0, 0, 0, num_missing))


def _padded_rows(num_rows: int) -> int:
    """Return the number of rows, up to MAX_ROWS, with which a product of so many is computed. There
    are few such numbers: oneDNN keeps a kernel of 0.6 MB for each number of rows, shape of weights
    and number of threads."""
    if num_rows <= 4:
        return padded(num_rows, 2)
    return min(MAX_ROWS, padded(num_rows, TILE_ROWS))


def _reordered(weight: Tensor) -> Tensor:
    """Return a copy of a large weight [N, H] in oneDNN's layout."""
    copy: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, PLANNED_ROWS)
    return copy


class _Product:
    """x [T, H] -> x Wᵀ + b [T, N] of layers side by side; W includes RMSNorm `norm`'s weight."""

    def __init__(self, *layers: nn.Linear, norm: Any = None) -> None:
        self._layers = layers
        self._norm = norm

    def copy_weights(self) -> None:
        weight = self._joined_weight()
        if weight.numel() < SMALL:
            self.weight = weight.t().contiguous().t()
        else:
            self.weight = _reordered(weight)
        self.bias: Tensor | None = None  # [N]
        biases: list[Tensor] = [layer.bias for layer in self._layers]
        if any(bias is not None for bias in biases):
            self.bias = torch.cat(biases)

    def _joined_weight(self) -> Tensor:
        """Return W [N, H]. Without a norm there is only one layer."""
        weights = [layer.weight for layer in self._layers]
        if self._norm is None:
            return weights[0]
        input_weight = _scaled_weight(self._norm)  # [H]
        sizes = [len(weight) for weight in weights]
        joined = weights[0].new_empty(sum(sizes), len(input_weight))
        parts = torch.split(joined, sizes)
        for weight, part in zip(weights, parts, strict=True):
            torch.mul(weight, input_weight, out=part)
        return joined

    def __call__(self, x: Tensor) -> Tensor:
        return _product(x, self.weight, self.bias)


class _Layer:
    """A decoder layer: its products, norms and attention parameters."""

    def __init__(self, module: Any, settings: LayerSettings) -> None:
        attention = module.self_attn
        mlp = module.mlp
        attention_norm = module.input_layernorm
        mlp_norm = module.post_attention_layernorm
        self.qkv = _Product(
            attention.q_proj,
            attention.k_proj,
            attention.v_proj,
            norm=attention_norm,
        )
        self.out = _Product(attention.o_proj)
        self.gate_up = _Product(mlp.gate_proj, mlp.up_proj, norm=mlp_norm)
        self.down = _Product(mlp.down_proj)
        self.activation = mlp.act_fn
        self.settings = settings
        self.attention_eps = _scaled_eps(attention_norm)
        self.mlp_eps = _scaled_eps(mlp_norm)
        self.head_size = attention.head_dim
        self.num_queries = attention.q_proj.out_features // self.head_size
        self.num_keys = attention.k_proj.out_features // self.head_size
        self.head_norms: list[Any] = []  # of queries and keys
        if hasattr(attention, "q_norm"):
            self.head_norms = [attention.q_norm, attention.k_norm]
            self.head_eps = _scaled_eps(attention.q_norm)

    def copy_weights(self) -> None:
        for product in (self.qkv, self.out, self.gate_up, self.down):
            product.copy_weights()
        if self.head_norms:
            query_norm, key_norm = self.head_norms
            query_weight = query_norm.weight.expand(self.num_queries, self.head_size)
            key_weight = key_norm.weight.expand(self.num_keys, self.head_size)
            weight = torch.cat([query_weight, key_weight])
            self.head_weight = weight * self.head_size**0.5  # [Hq + Hkv, D]

    def update(self, hidden: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> None:
        """Replace `hidden` [T, H] by the layer's output. `cos`, `sin`: [T, 1, 2, D/2]."""
        self._add_attention(hidden, cos, sin, layout)
        self._add_mlp(hidden)

    def _add_attention(self, hidden: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> None:
        normalized = _normalized(hidden, self.attention_eps)
        projected = self.qkv(normalized)
        heads = projected.view(len(hidden), -1, self.head_size)  # [T, Hq + 2 Hkv, D]
        num_rotated = self.num_queries + self.num_keys
        to_rotate, value = heads.tensor_split([num_rotated], dim=1)
        if self.head_norms:
            to_rotate = _normalized(to_rotate, self.head_eps)
            to_rotate.mul_(self.head_weight)
        rotated = _rotated(to_rotate, cos, sin)
        query, key = rotated.tensor_split([self.num_queries], dim=1)
        attended = layout.attend(query, key, value, self.settings)  # [T, Hq, D]
        hidden += self.out(attended.flatten(1))

    def _add_mlp(self, hidden: Tensor) -> None:
        normalized = _normalized(hidden, self.mlp_eps)
        projected = self.gate_up(normalized)
        gate, up = projected.chunk(2, dim=-1)
        activated = self.activation(gate)
        activated.mul_(up)
        hidden += self.down(activated)


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to heads [T, h, D], with the tables of `_rotations`."""
    num_tokens, num_heads, _ = heads.shape
    halves = heads.view(num_tokens, num_heads, 2, -1)  # [T, h, 2, D/2]
    swapped = halves.flip(2)
    swapped.mul_(sin)
    rotated = torch.addcmul(swapped, halves, cos)
    return rotated.flatten(2)


def _scaled_eps(norm: Any) -> Tensor:
    eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    return torch.tensor(eps * norm.weight.numel())


def _scaled_weight(norm: Any) -> Tensor:
    """Return the norm's weight with the factor sqrt(H) that `_normalized` leaves out."""
    size = len(norm.weight)
    weight: Tensor = norm.weight * size**0.5
    return weight


def _normalized(x: Tensor, scaled_eps: Tensor) -> Tensor:
    """x / sqrt(Σ x² + D eps) over the last dimension: RMSNorm without weight and factor sqrt(D),
    which its caller multiplies into weights."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    factor = torch.addcmul(scaled_eps, norm, norm)
    factor.rsqrt_()
    return x * factor


def _rotations(rotary: Any, max_length: int) -> list[Tensor]:
    """Return cosines and signed sines of RoPE (arXiv 2104.09864, eq. 34) of each position, by
    halves of a head: 2 x [max_length, 1, 2, D/2]. Raises ValueError if these depend on a batch."""
    if rotary.rope_type in ("dynamic", "longrope"):
        raise ValueError("RoPE depends on the longest sequence")
    every_position = torch.arange(max_length)
    cos, sin = rotary(torch.zeros(1), every_position[None])  # 2 x [1, max_length, D]
    by_half = (max_length, 1, 2, -1)
    cos_by_half = cos.reshape(by_half)
    sin_by_half = sin.reshape(by_half)
    signs_of_halves = sin.new_tensor([-1.0, 1.0])
    return [cos_by_half.contiguous(), sin_by_half * signs_of_halves[:, None]]


class FusedDecoder:
    """A model's forward with `Policy.forward`'s argument and result."""

    def __init__(self, policy: Policy, max_length: int) -> None:
        """Raises an error of any kind if the model's layers are of another kind."""
        decoder = policy.model.get_decoder()
        self._embed = decoder.embed_tokens
        self._norm = decoder.norm
        self._eps = _scaled_eps(decoder.norm)
        self._head = policy.model.get_output_embeddings()
        self._ban = policy.ban
        self._tables = _rotations(decoder.rotary_emb, max_length)
        recorded = RecordingLayout(TokenTree.of_sequences([1]))
        one = torch.zeros(1, dtype=torch.int64)
        policy.forward(ModelInputs(one, one, recorded, one))
        self._layers = list[_Layer]()
        for module, settings in zip(decoder.layers, recorded.settings, strict=True):
            self._layers.append(_Layer(module, settings))
        self.copy_weights()

    @torch.no_grad()
    def copy_weights(self, use_cores: Callable[[], None] = lambda: None) -> None:
        for layer in self._layers:
            use_cores()
            layer.copy_weights()
        use_cores()
        self._head_weight = self._head.weight  # which frees the earlier copy
        if self._head_weight.numel() >= SMALL:
            self._head_weight = _reordered(self._head_weight)
        self._norm_weight = _scaled_weight(self._norm)

    def __call__(self, inputs: ModelInputs) -> Tensor:
        hidden = self._embed(inputs.ids)  # [T, H]
        cos_table, sin_table = self._tables
        cos = cos_table.index_select(0, inputs.positions)  # [T, 1, 2, D/2]
        sin = sin_table.index_select(0, inputs.positions)
        for layer in self._layers:
            layer.update(hidden, cos, sin, inputs.layout)
        wanted = hidden[inputs.logits_at]  # [K, H]
        normalized = _normalized(wanted, self._eps) * self._norm_weight
        logits = _product(normalized, self._head_weight, self._head.bias)
        return self._ban(logits)

    @torch.inference_mode()
    def equals(self, policy: Policy, num_tokens: int = CHECKED_TOKENS) -> bool:
        """Compare logits of random tokens at the first and last positions. Zeros prove nothing."""
        inputs = self._random_inputs(policy.vocabulary_size, num_tokens)
        num_cores = torch.get_num_threads()
        half = max(1, num_cores // 2)
        compute = torch.inference_mode()(self)
        # Side by side: for so few tokens the cores of one forward mostly wait for each other.
        with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(half,)) as thread:
            computing = thread.submit(compute, inputs)
            torch.set_num_threads(half)
            try:
                expected = policy.forward(inputs)
            finally:
                torch.set_num_threads(num_cores)
        got = computing.result()
        for logits in (got, expected):
            logits.masked_fill_(logits == -torch.inf, 0.0)  # tokens that are never sampled
        difference = (got - expected).abs().max()
        largest = expected.abs().max()
        return bool(difference < TOLERANCE * largest)

    def _random_inputs(self, vocabulary_size: int, num_tokens: int) -> ModelInputs:
        """Make two sequences of random tokens, at the first positions and at the last ones."""
        longest = len(self._tables[0])
        length = min(longest, num_tokens)
        first_positions = torch.arange(length)
        last_positions = first_positions + longest - length
        positions = torch.cat([first_positions, last_positions])
        generator = torch.Generator().manual_seed(0)
        return ModelInputs(
            torch.randint(vocabulary_size, positions.shape, generator=generator),
            positions,
            PackedRow(TokenTree.of_sequences([length, length])),
            torch.arange(len(positions)),
        )
