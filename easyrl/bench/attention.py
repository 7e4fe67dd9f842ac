"""Groups that store their prompt once against groups that repeat it: forward and backward.

Both are packed rows through the same attention function of a random Qwen3: 6 layers of width 256 in
float32 on one CPU core, or the shape of Qwen3-0.6B in bfloat16 on an accelerator. Vocabulary and
head are small on the CPU: both rows predict the same completion tokens, so the head costs the same.

Shapes: P prompt tokens, R completion tokens, G completions; T tokens of a row, K of completions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from easyrl import devices
from easyrl.bench.harness import (
    QWEN3_06B,
    SMALL,
    Row,
    median_ratio,
    peak_bytes,
    random_group,
    random_model,
    take_turns,
    timed,
)
from easyrl.config.model import AttentionMode
from easyrl.data.packing import Rollout, pack, split_group
from easyrl.model.attention import ATTENTION_NAME, PackedGroups, register_attention
from easyrl.model.logprobs import chunked_token_logprobs
from easyrl.model.policy import Policy


class Shape(NamedTuple):
    prompt_len: int
    shortest: int  # completion
    longest: int
    num_generations: int


CPU_SHAPES = Shape(256, 32, 32, 16), Shape(256, 16, 128, 16), Shape(8, 128, 128, 8)
ACCELERATOR_SHAPES = Shape(1024, 512, 512, 16), Shape(1024, 64, 512, 16), Shape(64, 512, 512, 8)


class Result(NamedTuple):
    logprobs: Tensor  # [K]
    gradients: dict[str, Tensor]


def run(repetitions: int = 5) -> Iterator[Row]:
    """One row per shape."""
    kind, _ = devices.accelerator()
    if kind == "cpu":
        torch.set_num_threads(1)
    size, dtype = (SMALL, torch.float32) if kind == "cpu" else (QWEN3_06B, torch.bfloat16)
    for shape in CPU_SHAPES if kind == "cpu" else ACCELERATOR_SHAPES:
        yield compare(shape, size, dtype, kind, repetitions)


def compare(
    shape: Shape,
    size: Mapping[str, Any],
    dtype: torch.dtype,
    kind: str,
    repetitions: int,
    *,
    attention: AttentionMode = "auto",
) -> Row:
    """Measure one shape. Errors are in nats, and relative to max(|g|, 1e-4 |all g|) for gradients;
    memory is that beside the model and its gradients."""
    device = torch.device(kind)
    register_attention()
    with device:
        model = random_model(size, attn_implementation=ATTENTION_NAME).to(dtype).eval()
    policy = Policy(model, device, attention=attention)
    group = draw_rollouts(shape, size["vocab_size"])
    ways = {"shared": True, "repeated": False}
    rows = {name: packed(group, policy, shares_prompts=shared) for name, shared in ways.items()}
    expected = each_alone(group, policy)
    errors = {name: _errors(row(), expected) for name, row in rows.items()}
    peaks = {name: peak_bytes(row, device) for name, row in rows.items()}
    seconds = take_turns({name: timed(row, device) for name, row in rows.items()}, repetitions)
    speedup = median_ratio(seconds["repeated"], seconds["shared"])
    num_completion = len(expected.logprobs)
    num_repeated = shape.prompt_len * shape.num_generations + num_completion
    token_ratio = num_repeated / (shape.prompt_len + num_completion)
    return {
        "prompt_len": shape.prompt_len,
        "completion_len": round(num_completion / shape.num_generations, 1),
        "num_generations": shape.num_generations,
        "speedup": speedup,
        "token_ratio": token_ratio,
        "efficiency": speedup / token_ratio,
        "memory_ratio": peaks["repeated"] / peaks["shared"],
        **errors["shared"],
        **{f"{name}_repeated": error for name, error in errors["repeated"].items()},
    }


def draw_rollouts(shape: Shape, vocab_size: int) -> list[Rollout]:
    """Draw a group. A completion's advantage is the weight of its tokens in the loss."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(shape.shortest, shape.longest, shape.num_generations, endpoint=True)
    return split_group(random_group(shape.prompt_len, lengths.tolist(), vocab_size))


def each_alone(group: Sequence[Rollout], policy: Policy) -> Result:
    """Compute the result with transformers' own attention in float64, one sequence at a time."""
    model = copy.deepcopy(policy.model).double()
    model.set_attn_implementation("eager")
    model.zero_grad()
    results = []
    for rollout in group:
        prompt, completion = (
            torch.from_numpy(ids).to(policy.device, torch.int64)
            for ids in (rollout.prompt_ids, rollout.completion_ids)
        )
        logits = model(input_ids=torch.cat([prompt, completion])[None], use_cache=False).logits[0]
        logprobs = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
        alone = logprobs.gather(1, completion[:, None])[:, 0]
        results.append(_backward(alone, alone.new_tensor(rollout.advantage), model))
    return Result(torch.cat([result.logprobs for result in results]), results[-1].gradients)


def packed(
    group: Sequence[Rollout], policy: Policy, *, shares_prompts: bool
) -> Callable[[], Result]:
    """Return a function: one forward and backward of the group as a packed row. The next call of
    any such function overwrites the gradients."""
    batch = pack(group, shares_prompts=shares_prompts)
    arrays = (batch.input_ids, batch.position_ids, batch.logits_at, batch.targets, batch.advantages)
    input_ids, positions, logits_at, targets, weights = (  # [T], [T], [K], [K], [K]
        torch.from_numpy(array).to(policy.device) for array in arrays
    )

    def forward_and_backward() -> Result:
        policy.model.zero_grad(set_to_none=False)  # so that gradients are no part of the peak
        layout = PackedGroups(batch.groups, policy.device, may_use_flex=policy.may_use_flex)
        hidden = policy.hidden_states(input_ids, positions, layout, at=logits_at)
        logprobs, _ = chunked_token_logprobs(policy, hidden, targets, temperature=1.0)
        return _backward(logprobs, weights, policy.model)

    return forward_and_backward


def _backward(logprobs: Tensor, weights: Tensor, model: Any) -> Result:
    """Add the gradients of the weighted sum to the model's."""
    (logprobs * weights).sum().backward()  # type: ignore[no-untyped-call]
    return Result(logprobs.detach(), {n: p.grad for n, p in model.named_parameters()})


def _errors(result: Result, expected: Result) -> Row:
    """The largest errors of a log-probability, and of a tensor's gradient."""
    total = torch.stack([g.norm() for g in expected.gradients.values()]).norm()
    of_gradients = [
        float((result.gradients[name].double() - g).norm() / max(g.norm(), 1e-4 * total))
        for name, g in expected.gradients.items()
    ]
    of_logprobs = (result.logprobs.double() - expected.logprobs).abs()
    return {"max_logprob_error": float(of_logprobs.max()), "max_grad_error": max(of_gradients)}
