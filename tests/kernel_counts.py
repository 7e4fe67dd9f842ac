"""Count the kernels that operations launch on a GPU and the bytes that these move, without a GPU.

A model on torch's meta device runs the code of an accelerator: operations know shapes and types and
compute nothing.
"""

import math
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.performance_model import LOAD
from easyrl import devices
from easyrl.engines import COPIED_TOKENS, SLOT_STEP
from easyrl.engines.base import SamplingSettings
from easyrl.engines.cache.cache import MAX_LEVELS, NodeCache
from easyrl.engines.step_graphs import PROMPT_STEP, StepGraphs
from easyrl.layout.tree import NONE
from easyrl.model.inputs import ModelInputs
from easyrl.model.logprobs import chunked_token_logprobs
from easyrl.model.mixers.attention import ATTENTION_NAME, register_attention
from easyrl.model.policy import Policy

META = torch.device("meta")
GATHERS = {"aten::index", "aten::embedding", "aten::gather", "aten::searchsorted"}
"""Operations that read as much of their first input as they write."""
PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm"}


class Counter(TorchDispatchMode):
    """Kernels of the operations that run in it, and the bytes that they read and write."""

    def __init__(self):
        super().__init__()
        self.num_kernels = 0
        self.num_bytes = self.product_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func._schema.name, kwargs or {}
        if name == "aten::logsumexp":
            with self:
                return _logsumexp(*args, **kwargs)
        result = func(*args, **kwargs)
        given, made = _tensors((args, kwargs)), _tensors(result)
        memory = {x.untyped_storage()._cdata for x in given}
        is_view = all(x.untyped_storage()._cdata in memory for x in made)
        if not (is_view and not func._schema.is_mutable) and not name.startswith("aten::empty"):
            if name == "aten::index_put_":
                given = made = [args[2]]
            elif name in GATHERS:
                given = [*given[1:], *made]
            num_bytes = sum(map(_bytes, (*given, *made)))
            self.num_kernels += 1
            self.num_bytes += num_bytes
            self.product_bytes += num_bytes if name in PRODUCTS else 0
        return result


def _logsumexp(x, dims, keepdim=False):
    """Compute it with the kernels that torch launches for it on every device (see its profiler)."""
    largest = x.amax(dims, keepdim=keepdim)
    largest.masked_fill_(largest.abs() == math.inf, 0)
    return (x - largest).exp_().sum(dims, keepdim=keepdim).log_().add_(largest)


def _tensors(tree):
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _bytes(x):
    sizes = zip(x.shape, x.stride(), strict=True)
    return math.prod(size for size, stride in sizes if stride) * x.element_size()


def make_policy(model, layers):
    register_attention()
    sizes = {
        "vocab_size": model.vocabulary,
        "hidden_size": model.hidden,
        "intermediate_size": model.intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
    }
    config = AutoConfig.for_model(model.family, **sizes)
    with META:
        whole = AutoModelForCausalLM.from_config(
            config, attn_implementation=ATTENTION_NAME, dtype=torch.bfloat16
        )
    return Policy(whole.eval(), META)


def count_decode_step(model, layers, rows, prompt, cells):
    """A step of the embedded engine that is captured as a CUDA graph."""
    policy = make_policy(model, layers)
    cache = NodeCache(rows, prompt, cells, prompt_step=PROMPT_STEP, slot_step=SLOT_STEP)
    ids = np.zeros(prompt, dtype=np.int32)
    num_prompts = rows // LOAD.group
    nodes = cache.add_prompts([ids] * num_prompts, cuts=[[]] * num_prompts)
    one = torch.zeros(1, model.kv_heads, model.head_size, dtype=torch.bfloat16, device=META)
    for _ in range(layers):
        cache.keys_values.add_layer(one, one)
    sampling = SamplingSettings(max_prompt_length=prompt, max_completion_length=cells)
    graphs = StepGraphs(policy, cache, sampling)
    fields = [(name, np.int64) for name in ("position", "shift", "cell")]
    fields.append(("slots", np.int64, MAX_LEVELS))
    states = np.zeros(rows, dtype=fields)
    states["slots"] = NONE
    copied = prompt if prompt <= COPIED_TOKENS else 0
    if not copied:
        slots = np.array([node.slot for node in nodes])
        states["slots"][:, 0] = slots[np.arange(rows) // LOAD.group]
    states["cell"], states["position"] = cells + copied - 1, prompt + cells - 1
    sizes, inputs = graphs._prepare(np.zeros(rows, np.int64), np.zeros(rows), states)
    integers = torch.from_numpy(inputs.joined()).to(META)
    as_cuda = patch.object(devices, "widens_products", lambda device: True)
    # Not inference mode, which hides what is computed.
    with as_cuda, torch.no_grad(), Counter() as counter:
        graphs._compute(sizes, integers)
    return counter


class _NoAttention:
    """A layout that computes nothing: FlexAttention is one kernel, whose scores stay in it."""

    def attend(self, query, key, value, settings, sinks):
        return query + 0 * (key.sum() + value.sum())


def count_training(model, layers, tokens):
    policy = make_policy(model, layers)
    ids = torch.zeros(tokens, dtype=torch.int64, device=META)
    with Counter() as counter:
        hidden = policy.hidden_states(ModelInputs(ids, ids, _NoAttention(), ids))
        logprobs, _ = chunked_token_logprobs(policy, hidden, ids, 1.0)
        logprobs.sum().backward()
    return counter
