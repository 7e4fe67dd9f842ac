"""Groups that store their prompt once against groups that repeat it: forward and backward.

Both are packed rows through the same attention function of a random Qwen3: 6 layers of width 256 in
float32 on one CPU core, or the shape of Qwen3-0.6B in bfloat16 on an accelerator. Vocabulary and
head are small on the CPU: both rows predict the same completion tokens, so the head costs the same.

Shapes: P prompt tokens, R completion tokens, G completions; T tokens of a row, K of completions.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from easyrl import devices
from easyrl.bench.measure import median_ratio, peak_bytes, take_turns, timed
from easyrl.bench.models import QWEN3_06B, SMALL, random_model
from easyrl.data.packing import Rollout, pack
from easyrl.model.attention import ATTENTION_NAME, PackedGroups, register_attention
from easyrl.model.cpu_layers import speed_up_linear_layers
from easyrl.model.logprobs import chunked_token_logprobs
from easyrl.model.policy import Policy

COLUMNS = (
    *("prompt_len", "completion_len", "num_generations", "speedup", "token_ratio", "efficiency"),
    *("memory_ratio", "max_logprob_error", "max_grad_error"),
)


class Shape(NamedTuple):
    """One group. Lengths of completions are drawn from a range."""

    prompt_len: int
    shortest: int
    longest: int
    num_generations: int


CPU_SHAPES = (
    Shape(256, 32, 32, 16),
    Shape(128, 128, 128, 16),
    Shape(256, 16, 128, 16),
    Shape(8, 128, 128, 8),
    Shape(512, 64, 64, 8),
    Shape(64, 16, 128, 8),
)
ACCELERATOR_SHAPES = (
    Shape(1024, 512, 512, 16),
    Shape(1024, 64, 512, 16),
    Shape(256, 256, 256, 8),
    Shape(64, 512, 512, 8),
)


class Group(NamedTuple):
    """A prompt and its completions, and a weight of the loss for every completion token."""

    prompt: Tensor  # [P]
    completions: list[Tensor]  # G of [R]
    weights: Tensor  # [K]


class Result(NamedTuple):
    logprobs: Tensor  # [K]
    gradients: dict[str, Tensor]


def run(repetitions: int = 5) -> list[dict[str, Any]]:
    """One row per shape. Errors are in nats, and relative to max(|g|, 1e-4 |all g|) for gradients;
    memory is that of the shared row beside the model and its gradients."""
    kind, _ = devices.accelerator()
    if kind == "cpu":
        torch.set_num_threads(1)
        return [compare(shape, SMALL, torch.float32, "cpu", repetitions) for shape in CPU_SHAPES]
    return [
        compare(shape, QWEN3_06B, torch.bfloat16, kind, repetitions) for shape in ACCELERATOR_SHAPES
    ]


def compare(
    shape: Shape, size: Mapping[str, Any], dtype: torch.dtype, kind: str, repetitions: int
) -> dict[str, Any]:
    device = torch.device(kind)
    register_attention()
    with device:
        model = random_model(size, attn_implementation=ATTENTION_NAME).to(dtype).eval()
    if kind == "cpu":
        speed_up_linear_layers(model)
    policy, group = Policy(model, device), make_group(shape, size["vocab_size"], device)
    rows = {
        "shared": packed(group, policy, shares_prompts=True),
        "repeated": packed(group, policy, shares_prompts=False),
    }
    expected = each_alone(group, policy)
    errors = {name: _errors(row(), expected) for name, row in rows.items()}
    peaks = {name: peak_bytes(row, device) for name, row in rows.items()}
    seconds = take_turns({name: timed(row, device) for name, row in rows.items()}, repetitions)
    speedup = median_ratio(seconds["repeated"], seconds["shared"])
    num_prompt, num_completion = shape.prompt_len, len(group.weights)
    num_repeated = num_prompt * shape.num_generations + num_completion
    token_ratio = num_repeated / (num_prompt + num_completion)
    return {
        "prompt_len": num_prompt,
        "completion_len": round(num_completion / shape.num_generations, 1),
        "num_generations": shape.num_generations,
        "speedup": speedup,
        "token_ratio": token_ratio,
        "efficiency": speedup / token_ratio,
        "max_logprob_error": errors["shared"][0],
        "max_grad_error": errors["shared"][1],
        "max_logprob_error_repeated": errors["repeated"][0],
        "max_grad_error_repeated": errors["repeated"][1],
        "peak_memory_bytes": peaks["shared"],
        "memory_ratio": peaks["repeated"] / peaks["shared"],
        "seconds": statistics.median(seconds["shared"]),
        "dtype": str(dtype).removeprefix("torch."),
    }


def make_group(shape: Shape, vocab_size: int, device: torch.device) -> Group:
    """Draw random tokens and weights."""
    prompt_len, shortest, longest, num_generations = shape
    rng = np.random.default_rng(0)
    lengths = rng.integers(shortest, longest, num_generations, endpoint=True).tolist()
    generator = torch.Generator().manual_seed(0)
    prompt, *completions = (
        torch.randint(vocab_size, (length,), generator=generator).to(device)
        for length in (prompt_len, *lengths)
    )
    weights = torch.randn(sum(lengths), generator=generator).to(device)
    return Group(prompt, completions, weights)


def each_alone(group: Group, policy: Policy) -> Result:
    """By transformers' own attention, in float64, unpadded, one sequence after another."""
    model = copy.deepcopy(policy.model).double()
    model.set_attn_implementation("eager")
    model.zero_grad()
    results = []
    weights = torch.split(group.weights, [len(c) for c in group.completions])
    for completion, own_weights in zip(group.completions, weights, strict=True):
        sequence = torch.cat([group.prompt, completion])
        logits = model(input_ids=sequence[None], use_cache=False).logits[0]
        predicting = logits[len(group.prompt) - 1 : -1]
        alone = torch.log_softmax(predicting, dim=-1).gather(1, completion[:, None])[:, 0]
        results.append(_backward(alone, own_weights, model))
    return Result(torch.cat([result.logprobs for result in results]), results[-1].gradients)


def packed(group: Group, policy: Policy, *, shares_prompts: bool) -> Callable[[], Result]:
    """Return a function: one forward and backward of the group as a packed row. The next call of
    any such function overwrites the gradients."""
    rollouts = [
        Rollout(
            prompt_index=0,
            prompt_ids=group.prompt.cpu().numpy().astype(np.int32),
            completion_ids=completion.cpu().numpy().astype(np.int32),
            rollout_logprobs=np.zeros(len(completion), dtype=np.float32),
            loss_mask=np.ones(len(completion), dtype=np.bool_),
            advantage=1.0,
        )
        for completion in group.completions
    ]
    batch = pack(rollouts, shares_prompts=shares_prompts)
    input_ids, positions, logits_at, targets = (  # [T], [T], [K], [K]
        torch.from_numpy(array).to(policy.device)
        for array in (batch.input_ids, batch.position_ids, batch.logits_at, batch.targets)
    )

    def forward_and_backward() -> Result:
        policy.model.zero_grad(set_to_none=False)  # so that gradients are no part of the peak
        groups = PackedGroups(batch.groups, policy.device)
        hidden = policy.hidden_states(input_ids, positions, groups, at=logits_at)
        logprobs, _ = chunked_token_logprobs(
            policy.head,
            hidden,
            targets,
            temperature=1.0,
            vocabulary_size=policy.vocabulary_size,
        )
        return _backward(logprobs, group.weights, policy.model)

    return forward_and_backward


def _backward(logprobs: Tensor, weights: Tensor, model: Any) -> Result:
    """Gradients of the weighted sum are added to those that the model has."""
    (logprobs * weights).sum().backward()  # type: ignore[no-untyped-call]
    return Result(logprobs.detach(), {n: p.grad for n, p in model.named_parameters()})


def _errors(result: Result, expected: Result) -> tuple[float, float]:
    """The largest error of a log-probability in nats, and of a tensor's gradient, relative."""
    total = torch.stack([g.norm() for g in expected.gradients.values()]).norm()
    of_gradients = [
        float((result.gradients[name].double() - g).norm() / max(g.norm(), 1e-4 * total))
        for name, g in expected.gradients.items()
    ]
    return float((result.logprobs.double() - expected.logprobs).abs().max()), max(of_gradients)
