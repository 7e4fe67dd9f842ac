"""The RMSNorm for CPUs equals the models' own, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from easyrl.model.cpu_layers import (
    FusedRMSNorm,
    speed_up_rms_norms,
)


def norms(size: int = 32, norm_class: Any = Qwen3RMSNorm, eps: float = 1e-6) -> list[nn.Module]:
    torch.manual_seed(0)
    plain, fast = (norm_class(size, eps=eps) for _ in range(2))
    with torch.no_grad():
        plain.weight.copy_(1 + torch.randn(size) / 2)
    fast.load_state_dict(plain.state_dict())
    speed_up_rms_norms(fast)
    assert type(fast) is FusedRMSNorm
    return [plain, fast]


def assert_same(
    layers: Any, x: Tensor, loss: Callable[[Tensor], Tensor], rtol: float, atol: float
) -> None:
    """Compare outputs, and the gradients of input and weights."""
    results = []
    for layer in layers:
        given = x.detach().requires_grad_()
        y = layer(given)
        loss(y).backward()
        results.append([y.detach(), given.grad, *(p.grad for p in layer.parameters())])
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)


def weighted_sum(y: Tensor) -> Tensor:
    return (y * torch.randn(y.shape, generator=torch.Generator().manual_seed(1))).sum()


@pytest.mark.parametrize("norm_class", [Qwen3RMSNorm, LlamaRMSNorm])
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
@pytest.mark.parametrize("shape", [(0, 32), (1, 32), (37, 32), (1, 37, 4, 32), (5, 1)])
def test_norm_equals_the_models_own(shape: tuple[int, ...], eps: float, norm_class: Any) -> None:
    layers = norms(shape[-1], norm_class, eps)
    assert_same(layers, torch.randn(shape) * 3, weighted_sum, rtol=1e-5, atol=1e-5)
    x = torch.randn(shape)
    with torch.inference_mode():
        torch.testing.assert_close(layers[1](x), layers[0](x), rtol=1e-6, atol=1e-6)


def test_gradient_of_the_norm_is_the_derivative() -> None:
    torch.manual_seed(0)
    _, fast = norms(8)
    fast.double()
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True)

    def norm(x: Tensor, weight: Tensor) -> Any:
        return torch.func.functional_call(fast, {"weight": weight}, (x,))

    assert torch.autograd.gradcheck(norm, (x, weight))


def test_strided_input_and_gradient_give_the_same_result() -> None:
    x = torch.linspace(-2, 1, 4 * 7 * 32).view(4, 32, 7).transpose(1, 2)
    assert_same(norms(), x, lambda y: y.transpose(0, 1).cumsum(0)[::2].pow(2).sum(), 1e-4, 1e-3)


def test_frozen_weights_get_no_gradient() -> None:
    layers = norms()
    for layer in layers:
        layer.requires_grad_(False)
    assert_same(layers, torch.zeros(2, 32), lambda y: y.sum(), rtol=1e-5, atol=1e-5)  # finite
    assert all(p.grad is None for layer in layers for p in layer.parameters())


def test_other_dtypes_use_the_models_own_layers() -> None:
    plain, fast = norms()
    x = torch.randn(5, 32, dtype=torch.bfloat16)
    assert torch.equal(fast.bfloat16()(x), plain.bfloat16()(x))


# -- which layers are replaced --------------------------------------------------------------------


class OtherEpsRMSNorm(Qwen3RMSNorm):
    def forward(self, hidden_states: Tensor) -> Any:
        return self.weight * hidden_states * hidden_states.square().mean(-1, True).rsqrt()


@pytest.mark.parametrize("weight", [0.0, 1e-7, 1.0])
def test_norm_that_computes_something_else_is_not_replaced(weight: float) -> None:
    """Its weights may be zeros or ones, which can hide the difference."""
    others = [
        Gemma3RMSNorm(32),  # multiplies by 1 + weight
        OtherEpsRMSNorm(32, eps=1e-2),
    ]
    every = nn.Sequential(*others, Qwen3RMSNorm(32))
    for norm in every:
        nn.init.constant_(norm.weight, weight)
    classes = [type(norm) for norm in others]
    speed_up_rms_norms(every)
    assert [type(norm) for norm in every] == [*classes, FusedRMSNorm]
    assert every[-1].weight[0].item() == pytest.approx(weight)
