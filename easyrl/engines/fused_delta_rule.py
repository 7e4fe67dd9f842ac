"""One token of a gated delta rule in fewer operations: for decoding in float32 on the CPU.

A layer's own code reads and writes the states of all rows eight times for a token, and computes its
convolution as one of many tokens. Here the states are read or written in place, four times
(arXiv 2412.06464, eq. 10; S: state, q, k, v: query, key and value, a: decay, b: beta):

    S' = a S + k dᵀ          d = b (v - a Sᵀk)
    S'ᵀq = a Sᵀq + (k·q) d   so that Sᵀk and Sᵀq are one product

The layers are those of Qwen3.5, recognized by their parts. Each is compared with its own code,
which is used where results differ, or where weights that are all zero could hide that.

Shapes: B rows, H the model's width, C channels of the convolution, K its kernel size, N value
heads, Dk and Dv head sizes of keys and values.
"""

from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from easyrl.model.mixers.recurrent import MixerState, RecurrentMixer, StateName, find_layers
from easyrl.model.policy import Policy

TOLERANCE = 1e-5  # largest difference, relative to the largest value: rounding in float32
CHECKED_ROWS = 3
CHECKED_TOKENS = 6  # before the token that is compared
EPS = 1e-6  # of the norms of queries and keys
CONVOLUTION = StateName("convolution", 0)
RECURRENT = StateName("recurrent", 0)
MATRICES = {
    *("in_proj_qkv.weight", "in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight"),
    *("conv1d.weight", "norm.weight", "out_proj.weight"),
}
VECTORS = {"A_log", "dt_bias"}


def fuse_steps(policy: Policy) -> None:
    """Let layers compute single tokens with `DeltaStep`, where it is exact."""
    for parameter in policy.model.parameters():
        if parameter.dtype != torch.float32 or not parameter.is_cpu:
            return
    for layer in find_layers(policy.model):
        _fuse_step(layer)


def _fuse_step(layer: Any) -> None:
    mixer = layer.forward
    assert isinstance(mixer, RecurrentMixer)
    mixer.step = None
    # An error of any kind: the layer may be of another kind.
    with torch.inference_mode(), suppress(Exception):
        step = DeltaStep(layer)
        if _shows_all_weights(layer) and _equals(step, mixer, layer):
            mixer.step = step


def _shows_all_weights(layer: nn.Module) -> bool:
    """Return whether a comparison of outputs tests the use of every weight: `DeltaStep` uses all
    parameters, and no product is all zeros."""
    parameters = dict(layer.named_parameters())
    return parameters.keys() == MATRICES | VECTORS and all(
        bool(parameters[name].any()) for name in MATRICES
    )


def _equals(step: "DeltaStep", mixer: RecurrentMixer, layer: Any) -> bool:
    """Compare the outputs and states of a token behind some random ones."""
    generator = torch.Generator().manual_seed(0)
    shape = (CHECKED_ROWS, CHECKED_TOKENS + 1, layer.hidden_size)
    hidden = torch.randn(shape, generator=generator)
    state = MixerState()
    mixer.run(hidden[:, :-1], state)
    copied = {name: tensor.clone() for name, tensor in state.tensors.items()}
    own_state = MixerState(copied)
    newest = hidden[:, -1:]
    output = step(newest, state)
    own_output = mixer.run(newest, own_state)

    if state.tensors.keys() != own_state.tensors.keys() or not _are_close(output, own_output):
        return False
    for name, tensor in own_state.tensors.items():
        if not _are_close(state.tensors[name], tensor):
            return False
    return True


def _are_close(got: Tensor, expected: Tensor) -> bool:
    difference = (got - expected).abs().max()
    largest = expected.abs().max()
    return bool(difference <= TOLERANCE * largest)


class _Token(NamedTuple):
    """What a token of each row does to the states."""

    query: Tensor  # [B, N, Dk]
    key: Tensor  # [B, N, Dk]
    value: Tensor  # [B, N, Dv]
    decay: Tensor  # [B, N]
    beta: Tensor  # [B, N]


class DeltaStep:
    """A layer's forward for one token of each row. It reads the layer's weights where they are."""

    def __init__(self, layer: Any) -> None:
        """Raises an error of any kind if the layer is of another kind."""
        if layer.activation not in ("silu", "swish") or layer.conv1d.bias is not None:
            raise ValueError("expected a convolution without bias, followed by SiLU")
        self._layer = layer
        self._sizes = [layer.key_dim, layer.key_dim, layer.value_dim]

    def __call__(self, hidden: Tensor, state: MixerState) -> Tensor:
        """Return the layer's outputs [B, 1, H] for hidden states [B, 1, H]. `state`, which is not
        empty, is replaced in place."""
        layer = self._layer
        head_size = layer.head_v_dim
        x = hidden[:, 0]
        kernel = layer.conv1d.weight[:, 0]
        inputs = state.tensors[CONVOLUTION]
        convolved = _convolve(layer.in_proj_qkv(x), inputs, kernel)
        token = self._token(x, convolved)
        recurrent = state.tensors[RECURRENT]
        read = _update(recurrent, token)
        gate = layer.in_proj_z(x)
        gate_heads = gate.view(-1, head_size)
        read_heads = read.view(-1, head_size)
        normalized = layer.norm(read_heads, gate_heads)
        rows = normalized.view(len(x), 1, -1)
        output: Tensor = layer.out_proj(rows)
        return output

    def _token(self, x: Tensor, channels: Tensor) -> _Token:
        """Return the tokens of hidden states [B, H] and outputs of the convolution [B, C]."""
        layer = self._layer
        num_rows = len(x)
        key_size = layer.head_k_dim
        query, key, value = torch.split(channels, self._sizes, dim=-1)
        both = torch.stack([query, key]).view(2, num_rows, -1, key_size)
        squares = both.square().sum(dim=-1, keepdim=True)
        both = both * torch.rsqrt(squares + EPS)
        heads_per_key = layer.num_v_heads // layer.num_k_heads
        if heads_per_key > 1:
            both = both.repeat_interleave(heads_per_key, dim=2)
        normalized_query, normalized_key = both
        steps = nn.functional.softplus(layer.in_proj_a(x) + layer.dt_bias)
        return _Token(
            query=normalized_query * key_size**-0.5,
            key=normalized_key,
            value=value.view(num_rows, -1, layer.head_v_dim),
            decay=torch.exp(-layer.A_log.exp() * steps),
            beta=layer.in_proj_b(x).sigmoid(),
        )


def _convolve(newest: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
    """Append inputs [B, C] to the last ones [B, C, K], in place, dropping the first. Return the
    activated output of the convolution [B, C]. `weight` [C, K]"""
    inputs.copy_(inputs.roll(-1, dims=-1))
    inputs[..., -1] = newest
    return nn.functional.silu((inputs * weight).sum(dim=-1))


def _update(state: Tensor, token: _Token) -> Tensor:
    """Update states [B, N, Dk, Dv] in place; return what the queries read [B, N, Dv]."""
    query = token.query
    key = token.key
    decay = token.decay[..., None, None]
    beta = token.beta[..., None]

    key_and_query = torch.stack([key, query], dim=2)  # [B, N, 2, Dk]
    products = key_and_query @ state
    products.mul_(decay)
    known, read = products.unbind(2)  # 2 x [B, N, Dv]
    change = (token.value - known) * beta

    state.mul_(decay)
    _, _, *head_shape = state.shape
    matrices = state.view(-1, *head_shape)  # [B N, Dk, Dv]
    key_columns = key.flatten(0, 1).unsqueeze(2)
    change_rows = change.flatten(0, 1).unsqueeze(1)
    matrices.baddbmm_(key_columns, change_rows)

    products_of_both = key * query
    overlap = products_of_both.sum(dim=-1, keepdim=True)
    return torch.addcmul(read, overlap, change)
