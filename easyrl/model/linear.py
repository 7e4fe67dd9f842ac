"""Linear layers by oneDNN, on CPUs where PyTorch's own matrix product leaves half of the core idle.

PyTorch's x86 builds multiply float32 matrices with MKL, which runs AVX-512 code on Intel's CPUs
alone and AVX2 code on all others. oneDNN, in the same builds, has AVX-512 code for every CPU:
on one Zen 5 core 230 instead of 95 GFLOP/s at the sizes of the demo's model.

Layers are changed by class, so the model's code, its names and its saved files stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from easyrl import devices


def speed_up_linear_layers(model: nn.Module) -> None:
    """Let the float32 linear layers of a model on the CPU use oneDNN, where that is faster."""
    if not devices.mkl_misses_avx512() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.dtype == torch.float32:
            module.__class__ = OneDNNLinear


class OneDNNLinear(nn.Linear):
    """`nn.Linear`, computed by oneDNN."""

    def forward(self, input: Tensor) -> Tensor:
        is_float32 = input.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
        if not is_float32 or not input.is_cpu or not input.numel():  # it has no product of no rows
            return super().forward(input)
        output: Tensor = _Product.apply(input, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return output


class _Product(torch.autograd.Function):
    """input [..., K] times weight [N, K], transposed, plus bias [N] -> [..., N]"""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight)
        return _multiply(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad
        gradient = gradients[0]
        rows = gradient.reshape(-1, weight.shape[0])  # [rows, N]
        of_input = of_weight = None
        if needs_input:
            of_input = _multiply(gradient, weight.t())
        if needs_weight:
            of_weight = _multiply_rows(rows, input.reshape(-1, weight.shape[1]))
        return of_input, of_weight, rows.sum(0) if needs_bias else None


def _multiply(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """oneDNN's product; the operation that PyTorch's compiler uses for float32."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")
    return product


def _multiply_rows(a: Tensor, b: Tensor) -> Tensor:
    """a [rows, N], b [rows, K] -> aᵀ b [N, K]. oneDNN copies the first factor that stands across
    memory: let it be the narrower one."""
    if a.shape[1] <= b.shape[1]:
        return _multiply(a.t(), b.t())
    return _multiply(b.t(), a.t()).t()
