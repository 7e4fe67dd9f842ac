"""A part of the self-test (`runtime.self_test`), in a process of its own; an error if it fails."""

from __future__ import annotations

import os
import sys
from itertools import product
from typing import Any

import torch

from easyrl import devices, events
from easyrl.bench import weights
from easyrl.bench.attention import Shape, compare
from easyrl.bench.harness import SMALL, record
from easyrl.config import load_config

SHAPES, HEAD_SIZES = (Shape(20, 5, 25, 2), Shape(200, 40, 130, 3)), (64, 128)
SIZE = SMALL | {"num_hidden_layers": 2}
MAX_LOGPROB_ERROR, MAX_GRAD_ERROR = 0.05, 0.1
"""Largest errors against float64 that pass. In bfloat16 on a CPU they are 0.007 and 0.023."""
MAX_GAP, LEARNING_RATE = 0.02, 0.003
"""Mean difference of log-probabilities between engine and trainer. It is 0.07 after an update with
this learning rate if the engine keeps its first weights."""


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
    measured: list[tuple[float, float]] = []

    def observe(event: events.Event) -> None:
        if isinstance(event, events.IterationFinished):
            gap = event.metrics["sampling/sampling_logp_difference/mean"]
            measured.append((gap, event.metrics["grad_norm"]))

    dtype = "float32" if train == "cpu" else "bfloat16"
    flags: dict[str, Any] = {"devices.infer": infer, "devices.train": train}
    flags |= {"model.dtype": dtype, "reward.functions": ["length_penalty"]}
    flags |= {"rollout.engine": engine, "rollout.max_completion_length": 100}
    flags |= {"train.learning_rate": LEARNING_RATE}
    record(engine, flags, words, iterations=1, observers=[observe])
    for gap, norm in measured:
        if not norm > 0.0:  # also NaN
            raise ValueError(f"expected a gradient, got one of norm {norm}")
        _expect_at_most(MAX_GAP, gap, "gap between engine and trainer")


def _expect_at_most(bound: float, got: float, what: str) -> None:
    if not got <= bound:  # also NaN
        raise ValueError(f"{what}: expected at most {bound}, got {got:.3g}")


if __name__ == "__main__":
    part, infer, train, *words = sys.argv[1:]
    for key, _, value in (word.partition("=") for word in words if "." not in word):
        os.environ[key] = value
    words = [word for word in words if "." in word]
    if part == "weights":
        list(weights.run(infer, train, repetitions=1, size=SMALL))
    elif part == "attention":
        check_attention(words)
    else:
        check_run(infer, train, part, words)
