"""The fused RMSNorm equals the models' own, forward and backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from easyrl.model.cpu_layers import FusedRMSNorm, speed_up_rms_norms
from easyrl.model.policy import Policy


def both(size: int, norm_class: Any = Qwen3RMSNorm, eps: float = 1e-6) -> list[nn.Module]:
    torch.manual_seed(0)
    plain, fast = (norm_class(size, eps=eps) for _ in range(2))
    with torch.no_grad():
        plain.weight.copy_(1 + torch.randn(size) / 2)
    fast.load_state_dict(plain.state_dict())
    speed_up_rms_norms(fast)
    return [plain, fast]


@pytest.mark.parametrize("norm_class", [Qwen3RMSNorm, LlamaRMSNorm])
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
@pytest.mark.parametrize("shape", [(0, 32), (1, 32), (37, 32), (1, 37, 4, 32), (5, 1)])
def test_outputs_and_gradients_equal_the_models_own(
    shape: tuple[int, ...], eps: float, norm_class: Any
) -> None:
    plain, fast = both(shape[-1], norm_class, eps)
    assert type(fast) is FusedRMSNorm
    results = []
    for layer in (plain, fast):
        torch.manual_seed(1)
        x = torch.randn(shape).mul_(3).requires_grad_()
        y = layer(x)
        (y * torch.randn(shape)).sum().backward()
        results.append([y.detach(), x.grad, layer.weight.grad])
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_gradient_is_the_derivative() -> None:
    torch.manual_seed(0)
    _, fast = both(8)
    fast.double()
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True)

    def norm(x: torch.Tensor, weight: torch.Tensor) -> Any:
        return torch.func.functional_call(fast, {"weight": weight}, (x,))

    assert torch.autograd.gradcheck(norm, (x, weight))


def test_strided_input_and_gradient_give_the_same_result() -> None:
    plain, fast = both(32)
    gradients = []
    for layer in (plain, fast):
        x = torch.linspace(-2, 1, 4 * 7 * 32).view(4, 32, 7).requires_grad_()
        layer(x.transpose(1, 2)).transpose(0, 1).cumsum(0)[::2].pow(2).sum().backward()
        gradients.append((x.grad, layer.weight.grad))
    for expected, got in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-3)


def test_row_of_zeros_with_a_frozen_weight_has_a_finite_gradient() -> None:
    gradients = []
    for layer in both(32):
        layer.requires_grad_(False)
        x = torch.zeros(2, 32, requires_grad=True)
        layer(x).sum().backward()
        gradients.append(x.grad)
        assert layer.weight.grad is None
    assert torch.isfinite(gradients[1]).all()
    torch.testing.assert_close(gradients[1], gradients[0])


def test_without_gradients_it_equals_the_models_own_to_rounding() -> None:
    plain, fast = both(32)
    x = torch.randn(37, 32)
    with torch.inference_mode():
        torch.testing.assert_close(fast(x), plain(x), rtol=1e-6, atol=1e-6)


def test_below_float32_it_equals_the_models_own_bit_for_bit() -> None:
    plain, fast = both(32)
    plain.bfloat16(), fast.bfloat16()
    x = torch.randn(5, 32, dtype=torch.bfloat16)
    assert torch.equal(fast(x), plain(x))


class CenteredRMSNorm(Qwen3RMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> Any:
        return super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))


class OtherEpsRMSNorm(Qwen3RMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> Any:
        return self.weight * hidden_states * hidden_states.square().mean(-1, True).rsqrt()


class GroupedRMSNorm(Qwen3RMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> Any:
        halves = hidden_states.unflatten(-1, (2, -1))
        halves = halves * (halves.square().mean(-1, True) + self.variance_epsilon).rsqrt()
        return self.weight * halves.flatten(-2)


@pytest.mark.parametrize("weight", [0.0, 1e-7, 1.0])
def test_norm_that_computes_something_else_is_not_replaced(weight: float) -> None:
    """Whatever its weights are: zeros or ones may hide the difference."""
    others = [
        Gemma3RMSNorm(32),  # multiplies by 1 + weight
        CenteredRMSNorm(32),
        OtherEpsRMSNorm(32, eps=1e-2),
        GroupedRMSNorm(32),
    ]
    norms = nn.Sequential(*others, Qwen3RMSNorm(32))
    for norm in norms:
        nn.init.constant_(norm.weight, weight)
    classes = [type(norm) for norm in others]
    speed_up_rms_norms(norms)
    assert [type(norm) for norm in norms] == [*classes, FusedRMSNorm]
    assert norms[-1].weight[0].item() == pytest.approx(weight)


def test_model_keeps_its_names_and_files(tmp_path: Path) -> None:
    fast = Policy.load("tiny")
    assert any(isinstance(module, FusedRMSNorm) for module in fast.model.modules())
    fast.model.save_pretrained(tmp_path)
    assert Policy.load(str(tmp_path)).weights_sha256() == fast.weights_sha256()
