"""A part of the self-test (`runtime.self_test`), in a process of its own; an error if it fails."""

from __future__ import annotations

import os
import sys
from itertools import product

import torch

from easyrl import devices, events
from easyrl.bench import weights
from easyrl.bench.attention import Shape, compare
from easyrl.bench.harness import SMALL, record, spread
from easyrl.config import load_config

SHAPES, HEAD_SIZES = (Shape(20, 5, 25, 2), Shape(300, 50, 200, 4)), (64, 128)
SIZE = SMALL | {"num_hidden_layers": 2}
MAX_LOGPROB_ERROR, MAX_GRAD_ERROR = 0.05, 0.1
"""Of SIZE against float64. Those of bfloat16 are 0.01 and 0.03."""
MAX_GAP, LEARNING_RATE = 0.02, 0.003
"""With this learning rate an engine that keeps its first weights has a larger mean difference of
log-probabilities from the trainer."""


def check_attention(words: list[str]) -> None:
    """Compare short and long packed rows, forward and backward, with each sequence alone."""
    kind, mode = devices.accelerator()[0], load_config(None, {}, words).model.attention
    dtype = torch.float32 if kind == "cpu" else torch.bfloat16
    for shape, head_size in product(SHAPES, HEAD_SIZES):
        row = compare(shape, SIZE | {"head_dim": head_size}, dtype, kind, 1, attention=mode)
        _expect_at_most(MAX_LOGPROB_ERROR, row["max_logprob_error"], f"log-probabilities, {shape}")
        _expect_at_most(MAX_GRAD_ERROR, row["max_grad_error"], f"gradients, {shape}")


def check_run(infer: str, train: str, engine: str, words: list[str]) -> None:
    """Train; compare the engines' log-probabilities with the trainer's, also after an update."""
    gaps = []

    def observe(event: events.Event) -> None:
        if isinstance(event, events.IterationFinished):
            gaps.append(event.metrics["sampling/sampling_logp_difference/mean"])

    dtype = "float32" if train == "cpu" else "bfloat16"
    flags = {"devices.infer": infer, "devices.train": train, "rollout.engine": engine}
    flags |= {"model.dtype": dtype, "reward.functions": [f"{spread.__module__}:spread"]}
    flags |= {"rollout.max_completion_length": 64, "train.learning_rate": LEARNING_RATE}
    record(engine, flags, words, iterations=1, observers=[observe])
    for gap in gaps:
        _expect_at_most(MAX_GAP, gap, "gap between engine and trainer")


def _expect_at_most(bound: float, got: float, what: str) -> None:
    if not got <= bound:  # also NaN
        raise ValueError(f"{what}: expected at most {bound}, got {got:.3g}")


if __name__ == "__main__":
    part, infer, train, *words = sys.argv[1:]
    os.environ.update(word.split("=") for word in words if "." not in word)
    words = [word for word in words if "." in word]
    if part == "weights":
        list(weights.run(infer, train, repetitions=1, size=SMALL))
    elif part == "attention":
        check_attention(words)
    else:
        check_run(infer, train, part, words)
