"""Linear layers by oneDNN equal nn.Linear, forward and backward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from easyrl import devices
from easyrl.model.cpu_layers import OneDNNLinear, speed_up_linear_layers
from easyrl.model.policy import Policy

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN"
)


def both(bias: bool) -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    plain = nn.Linear(48, 80, bias=bias)
    fast = nn.Linear(48, 80, bias=bias)
    fast.load_state_dict(plain.state_dict())
    fast.__class__ = OneDNNLinear
    return plain, fast


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(0, 48), (1, 48), (37, 48), (1, 37, 48), (2, 5, 48)])
def test_outputs_and_gradients_equal_nn_linear(bias: bool, shape: tuple[int, ...]) -> None:
    plain, fast = both(bias)
    results = []
    for layer in (plain, fast):
        torch.manual_seed(1)
        x = torch.randn(shape, requires_grad=True)
        y = layer(x)
        (y * torch.randn(y.shape)).sum().backward()
        results.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_strided_gradient_gives_the_same_result() -> None:
    plain, fast = both(bias=True)
    for layer in (plain, fast):
        x = torch.linspace(-1, 1, 37 * 48).view(37, 48)
        layer(x).t().cumsum(1)[::2].pow(2).sum().backward()
    torch.testing.assert_close(fast.weight.grad, plain.weight.grad, rtol=1e-4, atol=1e-3)


def test_frozen_weights_get_no_gradient() -> None:
    _, fast = both(bias=True)
    fast.requires_grad_(False)
    x = torch.randn(3, 48, requires_grad=True)
    fast(x).sum().backward()
    assert x.grad is not None and fast.weight.grad is None and fast.bias.grad is None


def test_other_dtypes_use_nn_linear() -> None:
    plain, fast = both(bias=True)
    x = torch.randn(3, 48, dtype=torch.bfloat16)
    assert torch.equal(fast.bfloat16()(x), plain.bfloat16()(x))
    _, fast = both(bias=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fast(x.float()).dtype == torch.bfloat16


def test_model_keeps_its_names_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "mkl_misses_avx512", lambda: True)
    fast = Policy.load("tiny")
    assert any(isinstance(module, OneDNNLinear) for module in fast.model.modules())
    fast.model.save_pretrained(tmp_path)
    monkeypatch.setattr(devices, "mkl_misses_avx512", lambda: False)
    plain = Policy.load(str(tmp_path))
    assert not any(isinstance(module, OneDNNLinear) for module in plain.model.modules())
    assert fast.weights_sha256() == plain.weights_sha256()


def test_subclass_of_linear_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(nn.Linear):
        pass

    monkeypatch.setattr(devices, "mkl_misses_avx512", lambda: True)
    model = nn.Sequential(Own(2, 2), nn.Linear(2, 2))
    speed_up_linear_layers(model)
    assert [type(layer) for layer in model] == [Own, OneDNNLinear]
