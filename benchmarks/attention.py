"""Groups that store their prompt once against groups that repeat it: forward and backward.

Both are packed rows through the same attention function of a random Qwen3: 6 layers of width 256 in
float32 on one CPU core, or the shape of Qwen3-0.6B in bfloat16 on an accelerator. Vocabulary and
head are small on the CPU: both rows predict the same completion tokens, so the head costs the same.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.measuring import peak_bytes, timed
from easyrl import devices
from easyrl.bench.harness import QWEN3_06B, Row, median_ratio, take_turns
from easyrl.runtime import self_test_part as part


class Shape(NamedTuple):
    """A group. Lengths are in tokens; those of completions are drawn."""

    prompt_len: int
    shortest: int
    longest: int
    num_generations: int


CPU_SHAPES = (
    Shape(256, 32, 32, 16),
    Shape(256, 16, 128, 16),
    Shape(8, 128, 128, 8),
)
ACCELERATOR_SHAPES = (
    Shape(1024, 512, 512, 16),
    Shape(1024, 64, 512, 16),
    Shape(64, 512, 512, 8),
)


def run(repetitions: int = 5) -> Iterator[Row]:
    """Yield a row per shape."""
    kind, _ = devices.accelerator()
    if kind == "cpu":
        torch.set_num_threads(1)
        for shape in CPU_SHAPES:
            yield compare(shape, part.SMALL, torch.float32, kind, repetitions)
    else:
        for shape in ACCELERATOR_SHAPES:
            yield compare(shape, QWEN3_06B, torch.bfloat16, kind, repetitions)


def compare(
    shape: Shape, size: Mapping[str, Any], dtype: torch.dtype, kind: str, repetitions: int
) -> Row:
    """Measure one shape. Errors are in nats, and relative for gradients."""
    device = torch.device(kind)
    policy = part.random_policy(size, dtype, kind)
    rng = np.random.default_rng(0)
    drawn = rng.integers(shape.shortest, shape.longest, shape.num_generations, endpoint=True)
    lengths = drawn.tolist()
    group = part.draw_rollouts(shape.prompt_len, lengths, size["vocab_size"])
    rows = {
        "shared": part.packed(group, policy, shares_prompts=True),
        "repeated": part.packed(group, policy, shares_prompts=False),
    }
    expected = part.each_alone(group, policy)
    errors = {name: part.errors(row(), expected) for name, row in rows.items()}
    peaks = {name: peak_bytes(row, device) for name, row in rows.items()}
    actions = {name: timed(row, device) for name, row in rows.items()}
    seconds = take_turns(actions, repetitions)
    speedup = median_ratio(seconds["repeated"], seconds["shared"])
    num_completion_tokens = sum(lengths)
    num_shared = shape.prompt_len + num_completion_tokens
    num_repeated = shape.prompt_len * shape.num_generations + num_completion_tokens
    token_ratio = num_repeated / num_shared
    return {
        "prompt_len": shape.prompt_len,
        "completion_len": round(num_completion_tokens / shape.num_generations, 1),
        "num_generations": shape.num_generations,
        "speedup": speedup,
        "token_ratio": token_ratio,
        "efficiency": speedup / token_ratio,
        "memory_ratio": peaks["repeated"] / peaks["shared"],
        "max_logprob_error": errors["shared"][0],
        "max_grad_error": errors["shared"][1],
        "max_logprob_error_repeated": errors["repeated"][0],
        "max_grad_error_repeated": errors["repeated"][1],
    }
