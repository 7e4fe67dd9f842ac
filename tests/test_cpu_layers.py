"""Layers for CPUs equal the models' own, forward and backward: oneDNN's Linear, a fused RMSNorm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from easyrl import devices
from easyrl.model.cpu_layers import (
    FusedRMSNorm,
    OneDNNLinear,
    speed_up_linear_layers,
    speed_up_rms_norms,
)
from easyrl.model.policy import Policy

needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN"
)


def linear_layers(bias: bool = True) -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    plain, fast = (nn.Linear(48, 80, bias=bias) for _ in range(2))
    fast.load_state_dict(plain.state_dict())
    fast.__class__ = OneDNNLinear
    return plain, fast


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


@needs_onednn
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(0, 48), (1, 48), (37, 48), (1, 37, 48), (2, 5, 48)])
def test_linear_layer_equals_nn_linear(bias: bool, shape: tuple[int, ...]) -> None:
    layers = linear_layers(bias)
    assert_same(layers, torch.randn(shape), weighted_sum, rtol=1e-5, atol=1e-5)


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


@needs_onednn
def test_strided_input_and_gradient_give_the_same_result() -> None:
    x = torch.linspace(-1, 1, 37 * 48).view(37, 48)
    assert_same(linear_layers(), x, lambda y: y.t().cumsum(1)[::2].pow(2).sum(), 1e-4, 1e-3)
    x = torch.linspace(-2, 1, 4 * 7 * 32).view(4, 32, 7).transpose(1, 2)
    assert_same(norms(), x, lambda y: y.transpose(0, 1).cumsum(0)[::2].pow(2).sum(), 1e-4, 1e-3)


@needs_onednn
def test_frozen_weights_get_no_gradient() -> None:
    for layers, x in ((linear_layers(), torch.randn(3, 48)), (norms(), torch.zeros(2, 32))):
        for layer in layers:
            layer.requires_grad_(False)
        assert_same(layers, x, lambda y: y.sum(), rtol=1e-5, atol=1e-5)  # finite, of zeros too
        assert all(p.grad is None for layer in layers for p in layer.parameters())


@needs_onednn
def test_other_dtypes_use_the_models_own_layers() -> None:
    for (plain, fast), size in ((linear_layers(), 48), (norms(), 32)):
        x = torch.randn(5, size, dtype=torch.bfloat16)
        assert torch.equal(fast.bfloat16()(x), plain.bfloat16()(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear_layers()[1](torch.randn(3, 48)).dtype == torch.bfloat16


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


@needs_onednn
def test_subclass_of_linear_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(nn.Linear):
        pass

    monkeypatch.setattr(devices, "mkl_misses_avx512", lambda: True)
    model = nn.Sequential(Own(2, 2), nn.Linear(2, 2))
    speed_up_linear_layers(model)
    assert [type(layer) for layer in model] == [Own, OneDNNLinear]


@needs_onednn
def test_model_keeps_its_names_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "mkl_misses_avx512", lambda: True)
    fast = Policy.load("tiny")
    kinds = {type(module) for module in fast.model.modules()}
    assert {FusedRMSNorm, OneDNNLinear} <= kinds
    fast.model.save_pretrained(tmp_path)
    monkeypatch.setattr(devices, "mkl_misses_avx512", lambda: False)
    plain = Policy.load(str(tmp_path))
    assert OneDNNLinear not in {type(module) for module in plain.model.modules()}
    assert fast.weights_sha256() == plain.weights_sha256()
