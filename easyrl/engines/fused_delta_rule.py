"""One token of a gated delta rule in fewer operations: for decoding in float32 on the CPU.

For one token, a layer's own code makes several tensors that are as large as the states of all rows,
and runs its convolution as for many tokens. Here both states are written in place (arXiv
2412.06464, eq. 10). S is the state before the token and S' the one behind it; q, k and v are query,
key and value, a is the decay and b beta:

    S'   = a S + k dᵀ            d = b (v - a Sᵀk)
    S'ᵀq = a Sᵀq + (k·q) d       so that Sᵀk and Sᵀq are one product

The layers are those of Qwen3.5 and of models with the same ones. They are recognized by what they
compute: outputs and states are compared with those of each layer's own code, which is used where
they differ. The comparison is repeated with random weights. The model's first weights may be zero,
or let a state decay at once, and so hide a difference that later weights show.

Shapes: B rows, H the model's width, C channels of the convolution, K its kernel size, N value
heads, Dk and Dv head sizes of keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from easyrl.model.mixers.recurrent import MixerState, RecurrentMixer, StateName, find_layers
from easyrl.model.policy import Policy

TOLERANCE = 1e-5  # largest difference, relative to the largest value: rounding in float32
CHECKED_ROWS = 3
CHECKED_TOKENS = 6  # before the token that is compared
CHECKED_SCALES = (1.0, 0.01)  # of the hidden states: small ones show `EPS`
EPS = 1e-6  # added to the squared norms of queries and keys
CONVOLUTION = StateName("convolution", 0)
RECURRENT = StateName("recurrent", 0)


def fuse_steps(policy: Policy) -> None:
    """Let layers compute single tokens with `DeltaStep`, where it is exact."""
    for layer in find_layers(policy.model):
        mixer = layer.forward
        assert isinstance(mixer, RecurrentMixer)
        mixer.step = _exact_step(layer)


def _exact_step(layer: nn.Module) -> DeltaStep | None:
    """Return a layer's step, or None if it differs from the layer's own code."""
    for parameter in layer.parameters():
        if parameter.dtype != torch.float32 or not parameter.is_cpu:
            return None
    # An error of any kind: the layer may be of another kind.
    with suppress(Exception):
        step = DeltaStep(layer)
        if not _equals(step):
            return None
        with _random_weights(layer):
            if _equals(step):
                return step
    return None


@contextmanager
def _random_weights(layer: nn.Module) -> Iterator[None]:
    """Give a layer random weights inside the block, and then its own ones again."""
    generator = torch.Generator().manual_seed(0)
    own_weights = [(parameter, parameter.data) for parameter in layer.parameters()]
    try:
        for parameter, own_weight in own_weights:
            parameter.data = _random_weight(own_weight, generator)
        yield
    finally:
        for parameter, own_weight in own_weights:
            parameter.data = own_weight


def _random_weight(own_weight: Tensor, generator: torch.Generator) -> Tensor:
    """Return a weight of the same shape, random and so large that products keep their size."""
    num_summed = own_weight[0].numel()
    bound = (3 / num_summed) ** 0.5  # the variance of uniform numbers is bound² / 3
    return torch.empty_like(own_weight).uniform_(-bound, bound, generator=generator)


@torch.inference_mode()
def _equals(step: DeltaStep) -> bool:
    """Compare outputs and states with the layer's own: of one token behind some random ones."""
    mixer = step.layer.forward
    generator = torch.Generator().manual_seed(0)
    shape = (CHECKED_ROWS, CHECKED_TOKENS + 1, step.layer.hidden_size)
    random_hidden = torch.randn(shape, generator=generator)
    for scale in CHECKED_SCALES:
        hidden = scale * random_hidden
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
        """Raises AttributeError if the layer is of another kind."""
        self.layer = layer
        self._sizes = [layer.key_dim, layer.key_dim, layer.value_dim]  # of query, key and value

    def __call__(self, hidden: Tensor, state: MixerState) -> Tensor:
        """Return the layer's outputs [B, 1, H] for hidden states [B, 1, H]. `state`, which is not
        empty, is replaced in place."""
        layer = self.layer
        x = hidden[:, 0]
        inputs = state.tensors[CONVOLUTION]
        kernel = layer.conv1d.weight[:, 0]
        channels = _convolve(layer.in_proj_qkv(x), inputs, kernel)
        read = _update(state.tensors[RECURRENT], self._token(x, channels))

        # Norm and gate of each head.
        read_heads = read.view(-1, layer.head_v_dim)
        gate_heads = layer.in_proj_z(x).view(-1, layer.head_v_dim)
        normalized = layer.norm(read_heads, gate_heads)
        rows = normalized.view(len(x), 1, -1)
        output: Tensor = layer.out_proj(rows)
        return output

    def _token(self, x: Tensor, channels: Tensor) -> _Token:
        """Return the tokens of hidden states [B, H] and outputs of the convolution [B, C]."""
        layer = self.layer
        num_rows = len(x)
        key_size = layer.head_k_dim
        query, key, value = torch.split(channels, self._sizes, dim=-1)

        query_and_key = torch.stack([query, key]).view(2, num_rows, -1, key_size)
        squares = query_and_key.square().sum(dim=-1, keepdim=True)
        normalized = query_and_key * torch.rsqrt(squares + EPS)
        heads_per_key = layer.num_v_heads // layer.num_k_heads
        if heads_per_key > 1:
            normalized = normalized.repeat_interleave(heads_per_key, dim=2)
        normalized_query, normalized_key = normalized  # 2 x [B, N, Dk]

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
    known, read_before = products.unbind(2)  # a Sᵀk and a Sᵀq, 2 x [B, N, Dv]
    change = (token.value - known) * beta  # d

    # S' = a S + k dᵀ
    state.mul_(decay)
    matrices = state.view(-1, *state.shape[2:])  # [B N, Dk, Dv]
    key_columns = key.flatten(0, 1).unsqueeze(2)
    change_rows = change.flatten(0, 1).unsqueeze(1)
    matrices.baddbmm_(key_columns, change_rows)

    # S'ᵀq = a Sᵀq + (k·q) d
    overlap = (key * query).sum(dim=-1, keepdim=True)
    return torch.addcmul(read_before, overlap, change)
