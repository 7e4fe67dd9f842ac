"""Expected speed on GPUs, by bytes, operations and kernels (docs/devices.md, *Expected speed*).

    python -m tests.performance_model                   # the tables of docs/devices.md
    python -m tests.performance_model build/gpu-*.json  # measured speeds beside expected ones

The load: groups of GROUP completions behind one prompt of PROMPT tokens; completions of COMPLETION
tokens, half of which are there in an average step. A decode step of R rows takes

    max(bytes / (READ * bandwidth), operations / (COMPUTE * peak)) + kernels * GAP + HOST

and yields R tokens. READ, COMPUTE, GAP and HOST are assumptions; all else is counted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROMPT, COMPLETION, GROUP = 256, 1024, 8
READ = 0.75
"""Part of the bandwidth that large products reach."""
COMPUTE, TRAIN_COMPUTE = 0.6, 0.4
"""Part of the peak that products of a decode step reach, and a whole training step (its MFU)."""
GAP = {"embedded": 1.5e-6, "vLLM": 1.5e-6}
"""Seconds between two kernels of a replayed CUDA graph."""
HOST = {"embedded": 1e-3, "vLLM": 2e-3}
"""Seconds of a step in which the device waits for the host: finished rows, the next input."""
LOGIT_BYTES = 2 + 4 * 4
"""Bytes moved per logit: written in bfloat16, four passes of the sampling in float32."""
BYTES_PER_TRAINED_WEIGHT = 18
"""Weights, gradients and two moments in float32, and a bfloat16 copy."""
USABLE = 0.9
"""Part of a device's memory that can be used."""


@dataclass(frozen=True)
class Card:
    memory: float  # bytes
    bandwidth: float  # bytes per second
    peak: float  # dense bfloat16 operations per second


CARDS = {  # by the vendor's data sheets
    "L4": Card(24e9, 300e9, 121e12),
    "4090": Card(24e9, 1008e9, 165e12),
    "A100": Card(80e9, 2039e9, 312e12),
    "H100": Card(80e9, 3350e9, 989e12),
}


@dataclass(frozen=True)
class Model:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    tied: bool = True
    vocabulary: int = 151936

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocabulary

    @property
    def read_weights(self) -> int:
        """Weights that a token is multiplied with, without norms and biases."""
        attention = 2 * self.hidden * self.head_size * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.head_weights

    @property
    def weights(self) -> int:
        return self.read_weights + (0 if self.tied else self.head_weights)

    @property
    def kv_bytes(self) -> int:
        """Bytes of a token's keys and values in bfloat16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_size

    @property
    def num_kernels(self) -> dict[str, int]:
        """Kernels of a decode step. `test_kernels_of_a_step` counts those of the embedded engine;
        vLLM's are read from its code: norm, QKV, norm of heads and RoPE, cache, attention, output,
        norm, MLP with 3."""
        return {
            "embedded": KERNELS_PER_LAYER * self.layers + KERNELS_PER_STEP,
            "vLLM": 11 * self.layers + 20,
        }


KERNELS_PER_LAYER, KERNELS_PER_STEP = 40, 60
MODELS = {
    "0.5 B": Model(896, 4864, 24, 14, 2, 64),  # Qwen2.5-0.5B
    "1.7 B": Model(2048, 6144, 28, 16, 8, 128),  # Qwen3-1.7B
    "8 B": Model(4096, 12288, 36, 32, 8, 128, tied=False),  # Qwen3-8B
}


@dataclass(frozen=True)
class Step:
    """A decode step of `rows` completions."""

    rows: int
    num_bytes: float
    num_operations: float
    num_kernels: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.rows / self.seconds


def decode_step(
    model: Model,
    card: Card,
    engine: str,
    rows: int,
    *,
    prompt: int = PROMPT,
    completion: float = COMPLETION,
    group: int = GROUP,
) -> Step:
    """The embedded engine reads a prompt's keys once per group, vLLM once per row."""
    prompts = rows / group if engine == "embedded" else rows
    cells = rows * completion / 2 + prompts * prompt
    num_bytes = (
        2 * model.read_weights + model.kv_bytes * cells + LOGIT_BYTES * rows * model.vocabulary
    )
    attention = 4 * model.layers * model.heads * model.head_size * (prompt + completion / 2)
    operations = rows * (2 * model.read_weights + attention)
    num_kernels = model.num_kernels[engine]
    seconds = max(num_bytes / (READ * card.bandwidth), operations / (COMPUTE * card.peak))
    seconds += num_kernels * GAP[engine] + HOST[engine]
    return Step(rows, num_bytes, operations, num_kernels, seconds)


def rows_that_fit(model: Model, card: Card, engine: str) -> int:
    """Completions in flight at full length, a power of two from GROUP to 256; 0 if none fits. The
    cache of both engines keeps a group's prompt once."""
    left = USABLE * card.memory - 2 * model.weights
    rows = 256
    while rows >= GROUP:
        if rows * (COMPLETION + PROMPT / GROUP) * model.kv_bytes <= left:
            return rows
        rows //= 2
    return 0


def trained_tokens_per_second(model: Model, card: Card) -> float | None:
    """Completion tokens; 6 operations per weight and token (forward and backward), and those of
    attention. A group shares its prompt. None where weights and optimizer do not fit."""
    if BYTES_PER_TRAINED_WEIGHT * model.weights > USABLE * card.memory:
        return None
    tokens = GROUP * COMPLETION
    body = model.read_weights - model.head_weights
    pairs = PROMPT**2 / 2 + tokens * (PROMPT + COMPLETION / 2)
    operations = 6 * body * PROMPT + 6 * model.read_weights * tokens
    operations += 12 * model.layers * model.heads * model.head_size * pairs
    return tokens * TRAIN_COMPUTE * card.peak / operations


def tables() -> Iterator[str]:
    yield "| model | card | engine | rows | GB per step | kernels | ms per step | tokens/s | MFU |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name, model in MODELS.items():
        for card_name, card in CARDS.items():
            for engine in GAP:
                rows = rows_that_fit(model, card, engine)
                step = decode_step(model, card, engine, max(rows, 1))
                mfu = step.num_operations / step.seconds / card.peak
                figures = (
                    f"{step.num_bytes / 1e9:.1f} | {step.num_kernels:,} | {step.seconds * 1e3:.1f} "
                    f"| {step.tokens_per_second:,.0f} | {mfu:.1%}"
                )
                figures = figures if rows else "does not fit | | | |"
                yield f"| {name} | {card_name} | {engine} | {rows} | {figures} |"
    yield ""
    yield "| trained tokens/s | " + " | ".join(CARDS) + " |"
    yield "|---|" + "---|" * len(CARDS)
    for name, model in MODELS.items():
        rates = [trained_tokens_per_second(model, card) for card in CARDS.values()]
        cells = ["does not fit" if rate is None else f"{rate:,.0f}" for rate in rates]
        yield f"| {name} | " + " | ".join(cells) + " |"


def compare(file: Path) -> Iterator[str]:
    """Lines of a result of `easyrl bench engine` or `loop`: measured and expected."""
    found = json.loads(file.read_text(encoding="utf-8"))
    results: Any = found["results"]
    for row in results.values() if isinstance(results, dict) else results:
        card = next((c for name, c in CARDS.items() if name in str(row.get("device"))), None)
        if card is None:
            continue
        if found["suite"] == "engine":
            shape = Model(1024, 3072, 28, 16, 8, 128)
            long = row["load"].startswith("prompts")
            prompt, group, length = (1024, 8, 64) if long else (12, 1, 88)
            step = decode_step(
                shape, card, "embedded", 128, prompt=prompt, completion=length, group=group
            )
            measured = row["engine_tokens_per_second"]
            yield f"{row['load']}: {measured:,.0f} tokens/s, expected {step.tokens_per_second:,.0f}"
        elif row.get("mfu") is not None:
            yield f"training {row['model']}: MFU {row['mfu']:.0%}, expected {TRAIN_COMPUTE:.0%}"


if __name__ == "__main__":
    files = map(Path, sys.argv[1:])
    print(
        *((line for file in files for line in compare(file)) if sys.argv[1:] else tables()),
        sep="\n",
    )
