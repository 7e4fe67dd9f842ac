"""Compute with the trainer's FlexAttention kernels for NVIDIA GPUs on a machine that has none.

    TRITON_INTERPRET=1 python tests/gpu_interpreter.py ROW WINDOW SINKS

Inductor generates the kernels for an H100, forward and backward, as in `gpu_compiler`, whose needs
are the same. Triton's interpreter runs them on the CPU, on a packed row in bfloat16. Prints as JSON
how far the output and each gradient are from float64, relative to their norms.

ROW is a name in ROWS. WINDOW 0: none; SINKS 1: the heads have sinks, 0: they have none.
"""

# ruff: noqa: E402
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import gpu_compiler

# Torch finds the card only if it is imported afterwards.
gpu_compiler.pretend(gpu_compiler.CARDS["H100"])

import numpy as np
import torch
from torch import Tensor
from torch._inductor.output_code import CompiledFxGraph
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.attention.flex_attention import AuxOutput

from easyrl.layout.tree import NONE, TokenTree
from easyrl.model.mixers import flex
from easyrl.model.mixers.flex import FlexAttention
from easyrl.model.mixers.interface import LayerSettings
from easyrl.model.mixers.sdpa import SdpaAttention

NUM_HEADS = {"query": 4, "key": 2, "value": 2}
HEAD_SIZE = 64
ROWS = {
    "group": TokenTree.of_group(30, [35, 5]),  # in one block of 128 x 128 scores
    # In two blocks each way. Every token of the second sees the whole prompt, which is the first.
    "tree": TokenTree(np.array([128, 50, 30, 25, 23]), np.array([NONE, 0, 1, 0, 3])),
}
MASK_TENSORS = (
    *("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"),
    *("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"),
)


class Case(NamedTuple):
    tree: TokenTree
    settings: LayerSettings
    has_sinks: bool

    def draw(self, device: str) -> dict[str, Tensor]:
        """Return query, key and value [T, H, D], and sinks [Hq] if the heads have them."""
        generator = torch.Generator().manual_seed(0)
        shapes: dict[str, tuple[int, ...]] = {
            name: (self.tree.num_tokens, num_heads, HEAD_SIZE)
            for name, num_heads in NUM_HEADS.items()
        }
        if self.has_sinks:
            shapes["sinks"] = (NUM_HEADS["query"],)
        drawn = {}
        for name, shape in shapes.items():
            tensor = torch.randn(shape, generator=generator)
            drawn[name] = tensor.to(device, torch.bfloat16).requires_grad_()
        return drawn


class Programs(NamedTuple):
    """What Inductor made of a call of `flex_attention`."""

    forward: Callable[[list[Any]], Any]
    backward: Callable[[list[Any]], Any]
    inputs: list[str | int]
    """The forward program's inputs: names of tensors, and sizes."""
    num_outputs: int
    """How many of the forward program's results are outputs; the others go to the backward one."""


def named_tensors(
    layout: FlexAttention, query: Tensor, key: Tensor, value: Tensor, mask: Any
) -> dict[str, Tensor]:
    named = {"query": query, "key": key, "value": value}
    named["ends"] = layout._ends
    named["positions"] = layout._positions
    for name in MASK_TENSORS:
        named[name] = getattr(mask, name)
    return named


@contextlib.contextmanager
def kernel_replaced(kernel: Callable[..., Any]) -> Iterator[None]:
    """Let FlexAttention call another function in place of its kernel, and make its masks without
    compiling that."""

    def compiled(function: Any) -> Any:
        if function is flex.create_block_mask:
            return function
        return kernel

    with patch.object(flex, "_compiled", compiled):
        yield


def generate(case: Case) -> Programs:
    """Compile the attention of a row for the pretended card."""
    launched: list[tuple[CompiledFxGraph, list[Any]]] = []
    graphs: list[CompiledFxGraph] = []
    names: dict[int, str] = {}
    make_graph = CompiledFxGraph.__init__
    compiled = flex._compiled(flex.flex_attention)

    def collect(graph: CompiledFxGraph, *arguments: Any, **more: Any) -> None:
        make_graph(graph, *arguments, **more)
        graphs.append(graph)

    def launch(graph: CompiledFxGraph, inputs: Any) -> None:
        launched.append((graph, list(inputs)))
        raise gpu_compiler.Compiled

    def name_and_call(*tensors: Tensor, **more: Any) -> Any:
        named = named_tensors(layout, *tensors, more["block_mask"])
        names.update({id(tensor): name for name, tensor in named.items()})
        return compiled(*tensors, **more)

    with (
        FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True),
        patch.object(CompiledFxGraph, "__init__", collect),
        patch.object(CompiledFxGraph, "__call__", launch),
        kernel_replaced(name_and_call),
        contextlib.suppress(gpu_compiler.Compiled),
    ):
        layout = FlexAttention(case.tree, torch.device("cuda"))
        layout.attend(**case.draw("cuda"), settings=case.settings)
        raise AssertionError("nothing was launched")
    ((forward, taken),) = launched
    (backward,) = (graph for graph in graphs if graph is not forward)
    inputs = [names[id(each)] if isinstance(each, Tensor) else int(each) for each in taken]
    num_outputs = 2 if case.has_sinks else 1
    return Programs(forward.current_callable, backward.current_callable, inputs, num_outputs)


class Interpreted(torch.autograd.Function):
    """The programs on tensors in memory, called as AOTAutograd calls them."""

    @staticmethod
    def forward(
        context: Any, programs: Programs, named: dict[str, Tensor], *_differentiable: Tensor
    ) -> tuple[Tensor, ...]:
        inputs = [named[each] if isinstance(each, str) else each for each in programs.inputs]
        results = programs.forward(inputs)
        context.programs = programs
        context.saved = results[programs.num_outputs :]
        return tuple(results[: programs.num_outputs])

    @staticmethod
    def backward(context: Any, *tangents: Tensor) -> tuple[Tensor | None, ...]:
        sizes = [each for each in context.saved if isinstance(each, int)]
        tensors = [each for each in context.saved if isinstance(each, Tensor)]
        contiguous = [tangent.contiguous() for tangent in tangents]
        gradients = context.programs.backward([*sizes, *tensors, *contiguous])
        by_name = dict(zip(context.programs.inputs, gradients, strict=True))
        return None, None, by_name["query"], by_name["key"], by_name["value"]


def interpret(case: Case, programs: Programs) -> dict[str, float]:
    """Return the errors of the output and of the gradients."""
    drawn = case.draw("cpu")
    exact = {name: tensor.detach().double().requires_grad_() for name, tensor in drawn.items()}
    expected = SdpaAttention(case.tree, torch.device("cpu")).attend(**exact, settings=case.settings)
    generator = torch.Generator().manual_seed(1)
    tangent = torch.randn(expected.shape, generator=generator).to(torch.bfloat16)
    expected_gradients = torch.autograd.grad(expected, [*exact.values()], tangent.double())

    def kernel(*tensors: Tensor, block_mask: Any, **_: Any) -> Any:
        named = named_tensors(layout, *tensors, block_mask)
        run: Any = Interpreted.apply
        output, *logsumexps = run(programs, named, *tensors)
        if not logsumexps:
            return output
        (logsumexp,) = logsumexps
        return output, AuxOutput(lse=logsumexp)

    layout = FlexAttention(case.tree, torch.device("cpu"))
    with kernel_replaced(kernel):
        output = layout.attend(**drawn, settings=case.settings)
    gradients = torch.autograd.grad(output, [*drawn.values()], tangent)
    errors = {"output": error(output, expected)}
    for name, got, gradient in zip(drawn, gradients, expected_gradients, strict=True):
        errors[f"gradient of {name}"] = error(got, gradient)
    return errors


def error(got: Tensor, expected: Tensor) -> float:
    difference = got.detach().double() - expected.detach()
    return float(difference.norm() / expected.detach().norm())


def launch_on_cpu() -> None:
    """Replace what the generated programs call around their kernels."""
    guards: Any = torch._C._dynamo.guards
    guards._empty_strided_cuda = guards._empty_strided_cpu
    cuda: Any = torch.cuda
    cuda._DeviceGuard = lambda _: contextlib.nullcontext()


def compute_in_bfloat16() -> None:
    """Correct Triton's interpreter, which stores a bfloat16 number as its bits in a uint16: it
    multiplies these bits (findings/triton_interpreter_bfloat16_dot.sh), and it truncates where GPUs
    round to the nearest number."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    builder: Any = InterpreterBuilder
    multiply = builder.create_dot
    cast = builder.cast_impl

    def to_float32(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        numbers = torch.from_numpy(handle.data).view(torch.bfloat16).float()
        return TensorHandle(numbers.numpy(), tl.float32)

    def multiply_numbers(self: Any, left: Any, right: Any, *more: Any) -> Any:
        return multiply(self, to_float32(left), to_float32(right), *more)

    def cast_to_nearest(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
            return cast(self, source, target)
        rounded = torch.from_numpy(source.data).to(torch.bfloat16)
        return TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)

    builder.create_dot = multiply_numbers
    builder.cast_impl = cast_to_nearest


if __name__ == "__main__":
    row, window, num_sinks = sys.argv[1:]
    chosen = Case(
        ROWS[row],
        LayerSettings(0, HEAD_SIZE**-0.5, int(window) or None, None),
        has_sinks=bool(int(num_sinks)),
    )
    launch_on_cpu()
    compute_in_bfloat16()
    print(json.dumps(interpret(chosen, generate(chosen))))
