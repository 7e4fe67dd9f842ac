"""Train a built-in model: `python -m examples.make_tiny [NAME] [--output DIR]`.

All are small models with one token per character, trained from scratch: first on correct solutions
of generated problems, then shortly on solutions with mistakes, so that RL has something to improve.
`tiny-hybrid` is a Qwen3.5 (three of its four layers are gated delta rules), `tiny-vision` a LLaVA
(a SigLIP tower before a Qwen3), the others are Qwen3.
The same machine, versions and number of threads give the same weights.

    tiny              `arithmetic`. Some lines add a number in one step (`17+58=75`) instead of
                      tens, then units, and some of these sums are off by 1 or 10.
    tiny-hybrid       The same. It also confuses the numbers of long sums.
    tiny-vision       `picture-sums`, with the mistakes of `tiny`, whose weights it begins with.
    tiny-countdown    `countdown-small`. Some searches stop after a wrong try and answer with that.
    tiny-guess        `guess`. Guesses are often only a few numbers further.
"""

import argparse
import math
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, count, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
)
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from easyrl.data.hub import BUILT_IN_MODELS
from easyrl.data.picture_sums import PICTURE_SUMS, QUESTION
from easyrl.data.tasks import ARITHMETIC, COUNTDOWN_SMALL, GUESS, CountdownProblem, applied
from easyrl.environments.guess import Guess
from easyrl.model.processor import load_processor
from easyrl.types import Picture

# Probabilities of the second stage's mistakes. Sums of pictures have fewer numbers than those of
# text: with as much haste as there, three of four would be right before RL begins.
HASTE, SLIP, GIVE_UP, STEP = 0.12, 0.5, 0.2, 0.85
HASTE_WITH_PICTURES = 0.21
MEMORY = 10, 100  # tokens, by head
FEW = 5
MAX_TRIES = 8
BATCH_SIZE, SORTED_ROWS = 32, 512
NUM_STEPS = {
    "tiny": (1500, 150),
    "tiny-hybrid": (1000, 150),
    "tiny-vision": (700, 150),
    "tiny-countdown": (700, 80),
    "tiny-guess": (2500, 100),
}
Example = Sequence[tuple[str, bool]]
"""Parts of a text, and whether the model writes them. It ends each of its own."""
Batch = dict[str, Tensor]
"""The model's arguments."""
LEARNING_RATES = 3e-3, 5e-4
"""Steps and learning rates of the two stages."""


def make(name: str, output: Path, num_steps: Sequence[int]) -> None:
    """Train a model in its two stages and write it, with its tokenizer, to `output`. Its sizes,
    dtype and tokenizer are those of the built-in model."""
    rng = random.Random(0)
    tokenizer: Any = AutoTokenizer.from_pretrained(BUILT_IN_MODELS[name])
    config: Any = AutoConfig.from_pretrained(BUILT_IN_MODELS[name])
    dtype = config.dtype  # which `from_config` changes
    model = untrained(config)
    if name == "tiny-vision":
        begin_with_text_model(model, BUILT_IN_MODELS["tiny"])
    for stage, learning_rate in enumerate(LEARNING_RATES):

        def example(index: int, stage: int = stage) -> Example:
            if name in ("tiny", "tiny-hybrid"):
                operands = ARITHMETIC.problem(stage, index)
                answer = solution(operands, rng, HASTE * stage)
                return [(ARITHMETIC.key(operands), False), (answer, True)]
            if name == "tiny-guess":
                return game(GUESS.problem(stage, index), rng, STEP * stage)
            problem = COUNTDOWN_SMALL.problem(stage, index)
            prompt = COUNTDOWN_SMALL.row(problem)["prompt"]
            return [(prompt, False), (search(problem, rng, GIVE_UP * stage), True)]

        if name == "tiny-vision":
            data = batches_with_pictures(tokenizer, stage, rng)
        else:
            data = batches(tokenizer, example, seed=stage)
        train(model, data, num_steps[stage], learning_rate)
    model.to(dtype).save_pretrained(output)
    tokenizer.save_pretrained(output)


def untrained(config: Any) -> Any:
    """Return a random model of a configuration, in float32."""
    torch.manual_seed(0)
    has_tower = hasattr(config, "vision_config")
    auto_model: Any = AutoModelForImageTextToText if has_tower else AutoModelForCausalLM
    model = auto_model.from_config(config, dtype=torch.float32)
    model.generation_config.do_sample = True
    for module in model.modules():
        if isinstance(module, Qwen3_5GatedDeltaNet):
            remember(module)
    return model


@torch.no_grad()
def remember(layer: Qwen3_5GatedDeltaNet) -> None:
    """Let the heads of a random layer keep their states for MEMORY tokens. As transformers draws
    them, most of them would forget within a token, and from that they learn little."""
    for head, num_tokens in enumerate(MEMORY):
        # A state is multiplied by exp(-exp(A_log) * softplus(dt_bias)) per token, roughly.
        layer.A_log[head] = 0.0
        layer.dt_bias[head] = math.log(math.expm1(1 / num_tokens))


@torch.no_grad()
def begin_with_text_model(model: Any, folder: Path) -> None:
    """Give the text model in `model` the weights of a text model with a smaller vocabulary."""
    auto_model: Any = AutoModelForCausalLM
    source = auto_model.from_pretrained(folder, dtype=torch.float32).model.state_dict()
    for name, weight in model.model.language_model.state_dict().items():
        weight[: len(source[name])] = source[name]


def batches(tokenizer: Any, example: Callable[[int], Example], seed: int) -> Iterator[Batch]:
    """Yield input ids and labels, both [BATCH_SIZE, T], endlessly. Each SORTED_ROWS rows are sorted
    by length, which saves padding, and their batches shuffled."""
    rng = random.Random(seed)
    for first in count(step=SORTED_ROWS):
        rows = [tokens(example(index), tokenizer) for index in range(first, first + SORTED_ROWS)]
        rows.sort(key=lambda row: len(row[0]))
        chunks = [rows[start : start + BATCH_SIZE] for start in range(0, SORTED_ROWS, BATCH_SIZE)]
        rng.shuffle(chunks)
        for chunk in chunks:
            yield padded(chunk, tokenizer)


def batches_with_pictures(tokenizer: Any, stage: int, rng: random.Random) -> Iterator[Batch]:
    """Yield batches of `picture-sums`, with pixels [BATCH_SIZE, 3, height, width]."""
    processor: Any = load_processor(str(BUILT_IN_MODELS["tiny-vision"]))
    question = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}
    ]
    for first in count(step=BATCH_SIZE):
        rows = []
        pixels = []
        for index in range(first, first + BATCH_SIZE):
            operands = PICTURE_SUMS.problem(stage, index)
            picture = Picture(PICTURE_SUMS.row(operands)["image"]["bytes"])
            prompt = processor.render(question, [picture])
            answer = solution(operands, rng, HASTE_WITH_PICTURES * stage)
            ids, labels = tokens([(answer, True)], tokenizer)
            before = torch.tensor(prompt.token_ids)
            no_loss = torch.full_like(before, -100)
            rows.append((torch.cat([before, ids]), torch.cat([no_loss, labels])))
            pixels.append(torch.from_numpy(prompt.media.arrays["pixel_values"]))
        yield {**padded(rows, tokenizer), "pixel_values": torch.cat(pixels)}


def tokens(example: Example, tokenizer: Any) -> tuple[Tensor, Tensor]:
    """Return input ids and labels of an example, both [T]."""
    ids: list[int] = []
    labels: list[int] = []
    for text, is_own in example:
        part = tokenizer.encode(text) + [tokenizer.eos_token_id] * is_own
        ids += part
        labels += part if is_own else [-100] * len(part)  # no loss on the prompt
    return torch.tensor(ids), torch.tensor(labels)


def padded(rows: Sequence[tuple[Tensor, Tensor]], tokenizer: Any) -> Batch:
    """Return input ids and labels, both [B, T], padded on the right: causal attention needs no
    mask then."""
    ids, labels = map(list, zip(*rows, strict=True))
    return {
        "input_ids": pad_sequence(ids, True, tokenizer.pad_token_id),
        "labels": pad_sequence(labels, True, -100),
    }


def train(model: Any, data: Iterator[Batch], num_steps: int, learning_rate: float) -> None:
    """Take `num_steps` AdamW steps: a short warm-up, then a cosine decay to 1 %."""
    settings: Any = {"lr": learning_rate, "betas": (0.9, 0.98), "weight_decay": 0.01}
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    num_warmup = max(1, num_steps // 20)

    def factor(step: int) -> float:
        return min((step + 1) / num_warmup, 0.505 + 0.495 * math.cos(math.pi * step / num_steps))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    for step, batch in zip(range(num_steps), data, strict=False):
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step}/{num_steps}  loss {loss.item():.4f}", flush=True)


def solution(operands: Sequence[int], rng: random.Random, haste: float = 0.0) -> str:
    """Return the working of an `arithmetic` problem and its answer; with haste it may be wrong."""
    total, text = operands[0], ""
    for number in operands[1:]:
        tens, slip = total + number // 10 * 10, 0
        line = f"{total}+{tens - total}={tens}+{number % 10}={total + number}\n"
        if haste and rng.random() < haste:
            slip = rng.choice((-10, -1, 1, 10)) if rng.random() < SLIP else 0
            line = f"{total}+{number}={total + number + slip}\n"
        total += number + slip
        text += line
    return f"{text}#{total}"


def tries(problem: CountdownProblem) -> Iterator[tuple[str, str, bool]]:
    """Yield for all expressions of the three numbers, the larger operand on the left, the working
    (`9-1=8,8+7=15;17<`: less than 17), the expression `(9-1)+7`, and whether it is correct."""
    level, target = COUNTDOWN_SMALL, problem.target
    pairs, signs = combinations(range(3), 2), level.operations
    for pair, inner, outer in product(pairs, signs, signs):
        other = problem.nums[3 - sum(pair)]
        low, high = sorted(problem.nums[index] for index in pair)
        between = applied(inner, high, low)
        if between is None or between > level.largest_value:
            continue
        left, right = max(between, other), min(between, other)
        value = applied(outer, left, right)
        if value is None or value > level.largest_value:
            continue
        sign = "=" if value == target else "<" if value < target else ">"
        working = f"{high}{inner}{low}={between},{left}{outer}{right}={value};{target}{sign}\n"
        sides = [f"({high}{inner}{low})", str(other)]
        yield working, outer.join(sides if between >= other else reversed(sides)), value == target


def search(problem: CountdownProblem, rng: random.Random, give_up: float) -> str:
    """Return tries in random order, up to a correct one or until giving up, and the answer."""
    candidates = list(tries(problem))
    rng.shuffle(candidates)
    wrong = [candidate for candidate in candidates if not candidate[2]]
    correct = next(candidate for candidate in candidates if candidate[2])
    text = answer = ""
    for working, expression, is_correct in [*wrong[: rng.randrange(MAX_TRIES)], correct]:
        text += working
        answer = expression
        if is_correct or rng.random() < give_up:
            break
    return f"{text}<answer>{answer}</answer>"


def game(secret: int, rng: random.Random, step: float) -> Example:
    """Return a game of `guess`. A guess is a possible number or, with probability `step`, one of
    the next few in the right direction."""
    environment, low, high = Guess(), GUESS.numbers[0], GUESS.numbers[-1]
    environment.reset(secret)
    parts, guess, answer, is_over = [(f"{low}-{high}\n", False)], 0, "", False
    while not is_over:
        first, last = low, high
        if answer and rng.random() < step:
            first, last = (low, low + FEW) if answer == "higher" else (high - FEW, high)
        guess = rng.randint(max(low, first), min(high, last))
        answer, is_over = environment.step(str(guess))
        parts += [(str(guess), True), (f"{answer}\n", False)]
        low, high = (guess + 1, high) if answer == "higher" else (low, guess - 1)
    return parts[:-1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a built-in model.")
    parser.add_argument("model", choices=NUM_STEPS, nargs="?", default="tiny")
    parser.add_argument("--output", type=Path, help="folder to write")
    given = parser.parse_args()
    torch.set_num_threads(1)
    make(given.model, given.output or BUILT_IN_MODELS[given.model], NUM_STEPS[given.model])
