"""Compile kernels for NVIDIA GPUs on a machine that has none.

Inductor and Triton run as they would on the card, down to its machine code; nothing is launched.
Instead, the shared memory that each kernel needs is compared with what a block has on the card.

    python tests/gpu_compiler.py CARD TOKENS HEADS KEY_HEADS HEAD_SIZE WINDOW SINKS

compiles the trainer's FlexAttention, forward and backward, for a packed row; exit code 1 if a
kernel does not fit. WINDOW 0: none; SINKS 1: the heads have sinks, 0: they have none. Needs Triton
on PYTHONPATH and GUARD, the library of `gpu_guard.cpp`.
"""

import contextlib
import ctypes
import json
import os
import sys
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch


class Card(NamedTuple):
    major: int
    minor: int
    shared_bytes: int  # of a block at most
    num_processors: int


CARDS = {
    "A100": Card(8, 0, 166_912, 108),
    "4090": Card(8, 9, 101_376, 128),
    "H100": Card(9, 0, 232_448, 132),
    "5090": Card(12, 0, 101_376, 170),
}


class Kernel(NamedTuple):
    name: str
    shared_bytes: int


class Compiled(Exception):
    """Raised in place of the first launch."""


def pretend(card: Card) -> list[Kernel]:
    """Let torch find the card in this process; return the list to which compiled kernels go."""
    ctypes.CDLL(os.environ["GUARD"], mode=ctypes.RTLD_GLOBAL)
    import torch
    import torch._dynamo.device_interface as interfaces
    import torch._functorch.config
    import torch._inductor.config as inductor
    import torch._subclasses.fake_tensor as fake
    import triton
    from torch._inductor import output_code
    from torch._inductor.fx_passes import joint_graph, post_grad
    from torch._inductor.runtime import triton_helpers, triton_heuristics
    from triton.backends.compiler import GPUTarget

    properties = SimpleNamespace(
        name="pretended",
        major=card.major,
        minor=card.minor,
        multi_processor_count=card.num_processors,
        shared_memory_per_block=49_152,
        shared_memory_per_block_optin=card.shared_bytes,
        regs_per_multiprocessor=65_536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
        L2_cache_size=50 << 20,
        total_memory=24 << 30,
        gcnArchName="",
    )
    stream = SimpleNamespace(cuda_stream=0, device=torch.device("cuda", 0), device_index=0)
    answers: dict[str, Any] = {
        **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), True),
        **dict.fromkeys(("set_device", "set_rng_state", "synchronize", "_lazy_init"), None),
        **dict.fromkeys(("current_device", "exchange_device", "maybe_exchange_device"), 0),
        "device_count": 1,
        "get_device_properties": properties,
        "get_device_capability": (card.major, card.minor),
        "get_device_name": "pretended",
        "memory_allocated": 0,
        "current_stream": stream,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
    }
    for name, value in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=value, **__: answer)
        setattr(interfaces.CudaInterface, name, staticmethod(getattr(torch.cuda, name)))
    torch.cuda._exchange_device = lambda _: 0
    torch.cuda._maybe_exchange_device = lambda _: 0  # another one: each is looked up by itself
    torch._C._cuda_getCurrentRawStream = lambda _: 0  # absent from builds for CPUs
    torch.version.cuda = "13.0"
    interfaces.CudaInterface.get_raw_stream = staticmethod(lambda _: 0)
    for device in ("cuda", "cuda:0"):
        interfaces.register_interface_for_device(device, interfaces.CudaInterface)
    fake.init_gpu_context = lambda _: None
    joint_graph.lazy_init = post_grad.lazy_init = lambda *_: None  # these would benchmark
    inductor.compile_threads = 1
    inductor.fx_graph_cache = False
    inductor.use_static_triton_launcher = inductor.use_static_cuda_launcher = False
    torch._functorch.config.enable_autograd_cache = False
    torch._functorch.config.force_non_lazy_backward_lowering = True

    class Driver:
        binary_ext = "cubin"
        utils = SimpleNamespace(
            get_device_properties=lambda _: {
                "max_shared_mem": card.shared_bytes,
                "multiprocessor_count": card.num_processors,
                "warpSize": 32,
                "max_num_regs": 65_536,
            }
        )
        is_active = staticmethod(lambda: True)
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda _: 0)
        set_current_device = staticmethod(lambda _: None)
        get_active_torch_device = staticmethod(lambda: torch.device("cuda", 0))
        get_current_target = staticmethod(
            lambda: GPUTarget("cuda", card.major * 10 + card.minor, 32)
        )

    triton.runtime.driver.set_active(Driver())
    triton_helpers.set_driver_to_gpu = lambda: None
    kernels: list[Kernel] = []

    def collect(self: Any) -> None:
        self.launchers = [lambda *_, **__: None]
        for result in self.compile_results:
            kernels.append(Kernel(self.fn.__name__, result.kernel.metadata.shared))

    def launch(*_: Any) -> None:
        raise Compiled

    triton_heuristics.CachingAutotuner._make_launchers = collect
    output_code.CompiledFxGraph.__call__ = launch
    return kernels


def compile_attention(
    card: Card,
    num_tokens: int,
    heads: tuple[int, int],
    head_size: int,
    window: int | None,
    *,
    has_sinks: bool,
) -> list[Kernel]:
    """Return the kernels of `FlexAttention` for a row of one group, forward and backward."""
    kernels = pretend(card)
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from easyrl.layout.tree import TokenTree
    from easyrl.model.mixers import flex
    from easyrl.model.mixers.interface import LayerSettings

    prompt = num_tokens // 3
    tree = TokenTree.of_group(prompt, [num_tokens - prompt - 5, 5])
    settings = LayerSettings(0, head_size**-0.5, window, None)
    compiled = flex._compiled
    with (
        FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True),
        patch.object(  # the mask is data, which nothing here has
            flex,
            "_compiled",
            lambda f: f if f is flex.create_block_mask else compiled(f),
        ),
        contextlib.suppress(Compiled),
    ):
        query, key, value = (
            torch.empty(num_tokens, n, head_size, device="cuda", dtype=torch.bfloat16)
            .requires_grad_()
            for n in (heads[0], heads[1], heads[1])
        )  # fmt: skip
        sinks = None
        if has_sinks:
            sinks = torch.empty(heads[0], device="cuda", dtype=torch.bfloat16).requires_grad_()
        layout = flex.FlexAttention(tree, torch.device("cuda"))
        layout.attend(query, key, value, settings, sinks)
        raise AssertionError("nothing was launched")
    return kernels


if __name__ == "__main__":
    chosen = CARDS[sys.argv[1]]
    tokens, query_heads, key_heads, size, window_size, num_sinks = map(int, sys.argv[2:])
    found = compile_attention(
        chosen,
        tokens,
        (query_heads, key_heads),
        size,
        window_size or None,
        has_sinks=bool(num_sinks),
    )
    print(json.dumps(found))
    sys.exit(any(kernel.shared_bytes > chosen.shared_bytes for kernel in found))
