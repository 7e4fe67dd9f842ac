"""Expected speed on GPUs, from bytes, operations and kernels (docs/devices.md, *Expected speed*).

    python -m benchmarks.performance_model                   # the tables of docs/devices.md
    python -m benchmarks.performance_model build/gpu-*.json  # measured speeds beside expected ones

A test compares the *counted* constants with the code. Those under *assumed* are not measured.
"""

import json
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

from easyrl.engines import COPIED_TOKENS, padded
from easyrl.engines.step_graphs import CELL_STEP


class Load(NamedTuple):
    prompt: int = 256  # tokens
    completion: int = 1024  # tokens
    group: int = 8  # completions


LOAD = Load()

# -- counted: bfloat16, the operations' tensors in bytes -------------------------------------------
KERNELS = {"qwen2": (85, 70), "qwen3": (101, 70)}
COPYING_KERNELS = {"qwen2": (57, 66), "qwen3": (73, 66)}
"""Kernels of the embedded engine's decode step: for each layer, and for all else. COPYING_KERNELS
are for prompts of at most COPIED_TOKENS tokens, which are copied to the rows."""
SCORE_BYTES, HIDDEN_BYTES, LOGIT_BYTES = 68, 290, {"embedded": 23, "vLLM": 34}
"""Moved in a decode step per score of attention; per row, layer and hidden element; per logit."""
TRAIN_KERNELS = {"qwen2": (121, 215), "qwen3": (166, 215)}
"""Kernels of a micro-batch's forward and backward, without attention."""
TRAIN_HIDDEN_BYTES, TRAIN_LOGIT_BYTES = {"qwen2": 525, "qwen3": 645}, 97
"""Moved in training by other operations, per token, layer and hidden element, and per logit."""

# -- assumed ---------------------------------------------------------------------------------------
READ, COMPUTE = 0.75, 0.6
"""Parts of the bandwidth and of the peak that kernels reach."""
REPLAYED, LAUNCHED = 1.5e-6, 6e-6
"""Seconds per kernel: what one adds in a CUDA graph, and what launching one from Python takes."""
HOST = {"embedded": 1e-3, "vLLM": 2e-3}
"""Seconds of a step in which the device waits for the host."""
VLLM_KERNELS = 11, 20
"""Norm, QKV, norm of heads, RoPE, cache, attention, output, norm, MLP with 3."""
BYTES_PER_TRAINED_WEIGHT, USABLE = 18, 0.9
"""Weights, gradients and two moments in float32, and a bfloat16 copy. Usable part of a memory."""
RECOMPUTED = 4 / 3
"""Training takes that much longer with activation checkpointing."""


class Card(NamedTuple):
    memory: float  # bytes
    bandwidth: float  # bytes per second
    peak: float  # dense bfloat16 operations per second


CARDS = {  # by the vendor's data sheets
    "L4": Card(24e9, 300e9, 121e12),
    "4090": Card(24e9, 1008e9, 165e12),
    "A100": Card(80e9, 2039e9, 312e12),
    "H100": Card(80e9, 3350e9, 989e12),
}


class Model(NamedTuple):
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    family: str = "qwen3"
    tied: bool = True
    vocabulary: int = 151936

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocabulary

    @property
    def body_weights(self) -> int:
        """Number of the layers' weights, without norms and biases."""
        width = 2 * self.head_size * (self.heads + self.kv_heads) + 3 * self.intermediate
        return self.layers * self.hidden * width

    @property
    def weights(self) -> int:
        return self.body_weights + self.head_weights * (1 if self.tied else 2)

    @property
    def kv_bytes(self) -> int:
        """Bytes of a token's keys and values in bfloat16."""
        return 4 * self.layers * self.kv_heads * self.head_size

    @property
    def pair_operations(self) -> int:
        """Operations of attention for a query and a key."""
        return 4 * self.layers * self.heads * self.head_size


MODELS = {
    "0.5 B": Model(896, 4864, 24, 14, 2, 64, family="qwen2"),  # Qwen2.5-0.5B
    "1.7 B": Model(2048, 6144, 28, 16, 8, 128),  # Qwen3-1.7B
    "8 B": Model(4096, 12288, 36, 32, 8, 128, tied=False),  # Qwen3-8B
}
# Of `easyrl bench`.
BENCHED = {"0.6B": Model(1024, 3072, 28, 16, 8, 128), "1.7B": MODELS["1.7 B"]}
LOADS = {"equal lengths": Load(16, 88, 1), "prompts of 1024": Load(1024, 64, 8)}


class Step(NamedTuple):  # of decoding, or the mean of several
    num_bytes: float
    num_kernels: float
    seconds: float


def decode(model: Model, card: Card, engine: str, rows: int, *, cells: int, load: Load) -> Step:
    """A step of `rows` completions of `cells` tokens. The embedded engine reads the keys of a
    prompt once per group (unless it copies them), vLLM once per row."""
    copies = load.prompt <= COPIED_TOKENS
    prompts = rows // load.group if engine == "embedded" and not copies else rows
    pairs, keys = rows * (load.prompt + cells), rows * cells + prompts * load.prompt
    num_weights = model.body_weights + model.head_weights
    num_bytes = 2 * num_weights + model.kv_bytes * keys
    num_bytes += LOGIT_BYTES[engine] * rows * model.vocabulary
    num_operations = rows * 2 * num_weights + model.pair_operations * pairs
    per_layer, besides = VLLM_KERNELS
    if engine == "embedded":
        of_layer = SCORE_BYTES * model.heads * pairs + HIDDEN_BYTES * model.hidden * rows
        num_bytes += of_layer * model.layers
        per_layer, besides = (COPYING_KERNELS if copies else KERNELS)[model.family]
    kernels = per_layer * model.layers + besides
    seconds = max(num_bytes / (READ * card.bandwidth), num_operations / (COMPUTE * card.peak))
    return Step(num_bytes, kernels, seconds + kernels * REPLAYED + HOST[engine])


def generate(
    model: Model, card: Card, engine: str, rows: int, load: Load = LOAD
) -> tuple[Step, float]:
    """Return the mean step, and the seconds in which `rows` completions that start together are
    generated, with their prompts. The embedded engine rounds their cells up to CELL_STEP."""
    unit, last = CELL_STEP if engine == "embedded" else 1, padded(load.completion)
    steps = [
        decode(model, card, engine, rows, cells=min(padded(n, unit), last), load=load)
        for n in range(1, load.completion + 1)
    ]
    mean = Step(*(sum(column) / len(steps) for column in zip(*steps, strict=True)))
    prefill = 2 * model.body_weights * load.prompt * rows / load.group / (COMPUTE * card.peak)
    return mean, mean.seconds * len(steps) + prefill


def rows_that_fit(model: Model, card: Card, memory_fraction: float = USABLE) -> int:
    """Completions in flight at full length: 8 to 256, a power of two; or 0."""
    left = memory_fraction * card.memory - 2 * model.weights
    of_row = (LOAD.completion + LOAD.prompt / LOAD.group) * model.kv_bytes
    return next((2**n for n in range(8, 2, -1) if 2**n * of_row <= left), 0)


def train(model: Model, card: Card) -> tuple[float, float] | None:
    """Return completion tokens per second and MFU of a micro-batch of one group; None where weights
    and optimizer do not fit. 6 operations per weight and token, 3 times those of attention."""
    if BYTES_PER_TRAINED_WEIGHT * model.weights > USABLE * card.memory:
        return None
    completions = LOAD.group * LOAD.completion
    tokens = LOAD.prompt + completions
    pairs = LOAD.prompt**2 / 2 + completions * (LOAD.prompt + LOAD.completion / 2)
    operations: float = 6 * (model.body_weights * tokens + model.head_weights * completions)
    operations += 3 * model.pair_operations * pairs
    num_bytes = TRAIN_HIDDEN_BYTES[model.family] * model.hidden * model.layers * tokens
    num_bytes += TRAIN_LOGIT_BYTES * model.vocabulary * completions
    seconds = operations / (COMPUTE * card.peak) + num_bytes / (READ * card.bandwidth)
    per_layer, besides = TRAIN_KERNELS[model.family]
    seconds = max(seconds, (per_layer * model.layers + besides) * LAUNCHED)
    return completions / seconds, operations / seconds / card.peak


def tables() -> Iterator[str]:
    yield "| model | card | engine | rows | GB/step | kernels | ms/step | tokens/s |"
    yield "|---|---|---|---|---|---|---|---|"
    for (name, model), (card_name, card) in product(MODELS.items(), CARDS.items()):
        rows = rows_that_fit(model, card)
        for engine in HOST if rows else []:
            step, seconds = generate(model, card, engine, rows)
            yield (
                f"| {name} | {card_name} | {engine} | {rows} | {step.num_bytes / 1e9:.1f} "
                f"| {step.num_kernels:,.0f} | {step.seconds * 1e3:.1f} "
                f"| {rows * LOAD.completion / seconds:,.0f} |"
            )
        if not rows:
            yield f"| {name} | {card_name} | both | does not fit | | | | | |"
    yield ""
    yield "| trained tokens/s (MFU) | " + " | ".join(CARDS) + " |"
    yield "|---|" + "---|" * len(CARDS)
    for name, model in MODELS.items():
        rates = (train(model, card) for card in CARDS.values())
        cells = (f"{x[0]:,.0f} ({x[1]:.0%})" if x else "does not fit" for x in rates)
        yield f"| {name} | " + " | ".join(cells) + " |"
    yield ""
    yield from shared_device()


def shared_device() -> Iterator[str]:
    """An iteration of 64 x 8 completions of 1.7 B on one H100 that generates and trains: the times
    add up. By default the embedded engine has 16 groups in flight, vLLM all that fit."""
    model, card, num_tokens = MODELS["1.7 B"], CARDS["H100"], 64 * LOAD.group * LOAD.completion
    rates = train(model, card)
    assert rates is not None
    training = num_tokens / rates[0] * RECOMPUTED
    for engine, in_flight in zip(HOST, (16 * LOAD.group, 64 * LOAD.group), strict=True):
        rows = min(in_flight, rows_that_fit(model, card, memory_fraction=0.5))
        waves = 64 * LOAD.group / rows
        generation = waves * generate(model, card, engine, rows)[1]
        yield (
            f"- {engine}: {generation:.0f} s of generation in {waves:.0f} waves of {rows} rows, "
            f"{training:.0f} s of training; {num_tokens / (generation + training):,.0f} tokens/s"
        )


def compare(file: Path) -> Iterator[str]:
    """Measured and expected figures of a result of `easyrl bench engine` or `loop`."""
    found = json.loads(file.read_text(encoding="utf-8"))
    for row in found["results"] if found["suite"] in ("engine", "loop") else ():
        what, words = row.get("load") or row["model"], str(row.get("device")).replace("-", " ")
        card = next((card for name, card in CARDS.items() if name in words.split()), None)
        if card is not None and what in LOADS:
            load, rows = LOADS[what], 128
            seconds = generate(BENCHED["0.6B"], card, "embedded", rows, load)[1]
            measured, expected = row["engine_tokens_per_second"], rows * load.completion / seconds
            yield f"{what}: {measured:,.0f} tokens/s, expected {expected:,.0f}"
        elif card is not None and row.get("mfu") and (rates := train(BENCHED[what], card)):
            factor = RECOMPUTED if row["infer_devices"] == row["train_devices"] else 1.0
            yield f"{what}: MFU {row['mfu']:.0%}, expected {rates[1] / factor:.0%}"


if __name__ == "__main__":
    for lines in map(compare, map(Path, sys.argv[1:])) if sys.argv[1:] else [tables()]:
        print(*lines, sep="\n")
