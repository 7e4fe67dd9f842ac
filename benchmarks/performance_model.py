"""Expected speed on GPUs, from bytes, operations and kernels (docs/devices.md, *Expected speed*).

    python -m benchmarks.performance_model                   # the tables of docs/devices.md
    python -m benchmarks.performance_model build/gpu-*.json  # measured speeds beside expected ones

A test compares the *counted* constants with the code. Those under *assumed* are not measured.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from easyrl.engines import COPIED_TOKENS, padded
from easyrl.engines.step_graphs import CELL_STEP


class Load(NamedTuple):
    """Lengths of a group."""

    prompt: int = 256  # tokens
    completion: int = 1024  # tokens
    group: int = 8  # completions


LOAD = Load()


class Kernels(NamedTuple):
    per_layer: int
    besides: int  # for all else

    def of(self, num_layers: int) -> int:
        return self.per_layer * num_layers + self.besides


# -- counted: bfloat16, the operations' tensors in bytes -------------------------------------------
KERNELS = {"qwen2": Kernels(85, 69), "qwen3": Kernels(101, 69)}
"""Kernels of the embedded engine's decode step."""
COPYING_KERNELS = {"qwen2": Kernels(57, 65), "qwen3": Kernels(73, 65)}
"""The same for prompts of at most COPIED_TOKENS tokens, which are copied to the rows."""
SCORE_BYTES = 68
"""Moved in a decode step per score of attention."""
HIDDEN_BYTES = 290
"""Moved in a decode step per row, layer and hidden element."""
LOGIT_BYTES = {"embedded": 23, "vLLM": 34}
"""Moved in a decode step per logit."""
TRAIN_KERNELS = {"qwen2": Kernels(121, 205), "qwen3": Kernels(166, 205)}
"""Kernels of a micro-batch's forward and backward, without attention."""
TRAIN_HIDDEN_BYTES = {"qwen2": 525, "qwen3": 645}
"""Moved in training by operations that are no products, per token, layer and hidden element."""
TRAIN_LOGIT_BYTES = 97
"""Moved in training by operations that are no products, per logit."""

# -- assumed ---------------------------------------------------------------------------------------
READ = 0.75
"""Part of the bandwidth that kernels reach."""
COMPUTE = 0.6
"""Part of the peak that kernels reach."""
REPLAYED_SECONDS = 1.5e-6
"""Time that one more kernel adds to a CUDA graph."""
LAUNCHED_SECONDS = 6e-6
"""Time to launch a kernel from Python."""
HOST_SECONDS = {"embedded": 1e-3, "vLLM": 2e-3}
"""Time of a step in which the device waits for the host."""
ENGINES = tuple(HOST_SECONDS)
VLLM_KERNELS = Kernels(11, 20)
"""Norm, QKV, norm of heads, RoPE, cache, attention, output, norm, MLP with 3."""
BYTES_PER_TRAINED_WEIGHT = 18
"""Weights, gradients and two moments in float32, and a bfloat16 copy."""
USABLE = 0.9
"""Usable part of a memory."""
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
    "H200": Card(141e9, 4800e9, 989e12),
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


class Step(NamedTuple):
    """A step of decoding, or the mean of several."""

    num_bytes: float
    num_kernels: float
    seconds: float


class Generation(NamedTuple):
    mean_step: Step
    seconds: float  # of all steps and the prompts


class Training(NamedTuple):
    tokens_per_second: float  # of completions
    mfu: float  # operations over the card's peak


def seconds_of(card: Card, num_bytes: float, num_operations: float) -> float:
    """Return how long an operation takes that reads and computes at the same time."""
    reading = num_bytes / (READ * card.bandwidth)
    computing = num_operations / (COMPUTE * card.peak)
    return max(reading, computing)


def decode(model: Model, card: Card, engine: str, rows: int, *, cells: int, load: Load) -> Step:
    """Return a step of `rows` completions of `cells` tokens. The embedded engine reads the keys of
    a prompt once per group (unless it copies them), vLLM once per row."""
    is_embedded = engine == "embedded"
    copies = load.prompt <= COPIED_TOKENS
    num_prompts = rows
    if is_embedded and not copies:
        num_prompts = rows // load.group
    num_keys = rows * cells + num_prompts * load.prompt
    num_pairs = rows * (load.prompt + cells)  # of a query and a key
    num_weights = model.body_weights + model.head_weights
    num_operations = rows * 2 * num_weights + model.pair_operations * num_pairs
    num_bytes = 2 * num_weights + model.kv_bytes * num_keys
    num_bytes += LOGIT_BYTES[engine] * rows * model.vocabulary
    kernels = VLLM_KERNELS
    if is_embedded:
        score_bytes = SCORE_BYTES * model.heads * num_pairs
        hidden_bytes = HIDDEN_BYTES * model.hidden * rows
        num_bytes += (score_bytes + hidden_bytes) * model.layers
        kernels = COPYING_KERNELS[model.family] if copies else KERNELS[model.family]
    num_kernels = kernels.of(model.layers)
    seconds = seconds_of(card, num_bytes, num_operations)
    seconds += num_kernels * REPLAYED_SECONDS + HOST_SECONDS[engine]
    return Step(num_bytes, num_kernels, seconds)


def generate(model: Model, card: Card, engine: str, rows: int, load: Load = LOAD) -> Generation:
    """Generate `rows` completions that start together, with their prompts. The embedded engine
    rounds their cells up to CELL_STEP."""
    unit = CELL_STEP if engine == "embedded" else 1
    last = padded(load.completion)
    steps = []
    for length in range(1, load.completion + 1):
        cells = min(padded(length, unit), last)
        steps.append(decode(model, card, engine, rows, cells=cells, load=load))
    mean = Step(
        num_bytes=sum(step.num_bytes for step in steps) / len(steps),
        num_kernels=sum(step.num_kernels for step in steps) / len(steps),
        seconds=sum(step.seconds for step in steps) / len(steps),
    )
    num_prompt_tokens = load.prompt * rows / load.group
    prefill = 2 * model.body_weights * num_prompt_tokens / (COMPUTE * card.peak)
    return Generation(mean, mean.seconds * len(steps) + prefill)


def rows_that_fit(model: Model, card: Card, memory_fraction: float = USABLE) -> int:
    """Return how many completions of full length fit: 8 to 256, a power of two; or 0."""
    left = memory_fraction * card.memory - 2 * model.weights
    of_row = (LOAD.completion + LOAD.prompt / LOAD.group) * model.kv_bytes
    for rows in (256, 128, 64, 32, 16, 8):
        if rows * of_row <= left:
            return rows
    return 0


def train(model: Model, card: Card) -> Training | None:
    """Train a micro-batch of one group; None where weights and optimizer do not fit. 6 operations
    per weight and token, 3 times those of attention."""
    if BYTES_PER_TRAINED_WEIGHT * model.weights > USABLE * card.memory:
        return None
    completions = LOAD.group * LOAD.completion
    tokens = LOAD.prompt + completions
    pairs = LOAD.prompt**2 / 2 + completions * (LOAD.prompt + LOAD.completion / 2)
    operations: float = 6 * (model.body_weights * tokens + model.head_weights * completions)
    operations += 3 * model.pair_operations * pairs
    num_bytes = TRAIN_HIDDEN_BYTES[model.family] * model.hidden * model.layers * tokens
    num_bytes += TRAIN_LOGIT_BYTES * model.vocabulary * completions
    # Products do not wait for memory, other operations do.
    seconds = operations / (COMPUTE * card.peak) + num_bytes / (READ * card.bandwidth)
    num_kernels = TRAIN_KERNELS[model.family].of(model.layers)
    seconds = max(seconds, num_kernels * LAUNCHED_SECONDS)
    return Training(completions / seconds, operations / seconds / card.peak)


def tables() -> Iterator[str]:
    """Yield the lines of the tables in docs/devices.md."""
    yield "| model | card | engine | rows | GB/step | kernels | ms/step | tokens/s |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, model in MODELS.items():
        for card_name, card in CARDS.items():
            rows = rows_that_fit(model, card)
            if not rows:
                yield f"| {name} | {card_name} | both | does not fit | | | | | |"
                continue
            for engine in ENGINES:
                step, seconds = generate(model, card, engine, rows)
                yield (
                    f"| {name} | {card_name} | {engine} | {rows} | {step.num_bytes / 1e9:.1f} "
                    f"| {step.num_kernels:,.0f} | {step.seconds * 1e3:.1f} "
                    f"| {rows * LOAD.completion / seconds:,.0f} |"
                )
    yield ""
    yield "| trained tokens/s (MFU) | " + " | ".join(CARDS) + " |"
    yield "|---|" + "---|" * len(CARDS)
    for name, model in MODELS.items():
        cells = []
        for card in CARDS.values():
            rate = train(model, card)
            if rate is None:
                cells.append("does not fit")
            else:
                cells.append(f"{rate.tokens_per_second:,.0f} ({rate.mfu:.0%})")
        yield f"| {name} | " + " | ".join(cells) + " |"
    yield ""
    yield from shared_device()


def shared_device() -> Iterator[str]:
    """An iteration of 64 x 8 completions of 1.7 B on one H100 that generates and trains: the times
    add up. By default the embedded engine has 16 groups in flight, vLLM all that fit."""
    model = MODELS["1.7 B"]
    card = CARDS["H100"]
    num_completions = 64 * LOAD.group
    num_tokens = num_completions * LOAD.completion
    rate = train(model, card)
    assert rate is not None
    training = num_tokens / rate.tokens_per_second * RECOMPUTED
    in_flight = {"embedded": 16 * LOAD.group, "vLLM": num_completions}
    for engine in ENGINES:
        rows = min(in_flight[engine], rows_that_fit(model, card, memory_fraction=0.5))
        waves = num_completions / rows
        generation = waves * generate(model, card, engine, rows).seconds
        yield (
            f"- {engine}: {generation:.0f} s of generation in {waves:.0f} waves of {rows} rows, "
            f"{training:.0f} s of training; {num_tokens / (generation + training):,.0f} tokens/s"
        )


def compare(file: Path) -> Iterator[str]:
    """Yield measured and expected figures of a result of `easyrl bench engine` or `loop`."""
    found = json.loads(file.read_text(encoding="utf-8"))
    if found["suite"] not in ("engine", "loop"):
        return
    for row in found["results"]:
        card = _card_of(str(row.get("device")))
        if card is None:
            continue
        what = row.get("load") or row["model"]
        if what in LOADS:
            load = LOADS[what]
            rows = 128
            generation = generate(BENCHED["0.6B"], card, "embedded", rows, load)
            expected = rows * load.completion / generation.seconds
            measured = row["engine_tokens_per_second"]
            yield f"{what}: {measured:,.0f} tokens/s, expected {expected:,.0f}"
        elif row.get("mfu"):
            rate = train(BENCHED[what], card)
            if rate is not None:
                recomputes = row["infer_devices"] == row["train_devices"]
                expected = rate.mfu / (RECOMPUTED if recomputes else 1.0)
                yield f"{what}: MFU {row['mfu']:.0%}, expected {expected:.0%}"


def _card_of(device: str) -> Card | None:
    """Return the card that a device's name has as a word, as in "NVIDIA H100 80GB HBM3"."""
    words = device.replace("-", " ").split()
    for name, card in CARDS.items():
        if name in words:
            return card
    return None


def main(files: Sequence[str]) -> None:
    if not files:
        print(*tables(), sep="\n")
    for file in map(Path, files):
        if file.exists():
            print(*compare(file), sep="\n")
        else:
            print(f"{file.stem}: not measured")


if __name__ == "__main__":
    main(sys.argv[1:])
