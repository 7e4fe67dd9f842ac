"""Train a built-in model: `python -m easyrl.model.built_in.make_tiny [NAME] [--output DIR]`.

Both are small Qwen3 models with one token per character, trained from scratch on generated
problems. The first stage trains on correct solutions; a short second stage trains on solutions with
mistakes, so that RL has something to improve.

    tiny              `arithmetic`, 0.8 M weights. Second stage: with HASTE_PROBABILITY a line adds
                      a number in one step (`17+58=75`) instead of tens, then units, and with
                      SLIP_PROBABILITY such a sum is off by 1 or 10. RL increases the accuracy from
                      under a half; completions become longer.
    tiny-countdown    `countdown-small`, 0.4 M weights, written in bfloat16. Second stage: after
                      each wrong try the search stops with GIVE_UP_PROBABILITY and answers with that
                      try. RL increases the accuracy from a quarter.

A solution of `countdown-small`:

    7 9 1 = 17                      the problem
    9-1=8,8+7=15;17<                a try: two operations; the value is smaller than the target
    9+7=16,16+1=17;17=              a correct try
    <answer>(9+7)+1</answer>

The same seed, machine, versions and number of threads give the same weights.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from easyrl.data.hub import BUILT_IN_MODELS
from easyrl.data.tasks import ARITHMETIC, COUNTDOWN_SMALL, CountdownProblem, applied

HASTE_PROBABILITY = 0.12
SLIP_PROBABILITY = 0.5
MAX_TRIES = 8
GIVE_UP_PROBABILITY = 0.2
BATCH_SIZE = 32
BATCHES_PER_SORT = 16
LEARNING_RATES = 3e-3, 5e-4
"""Learning rates of the two stages."""
IGNORED = -100
"""Label of a token without loss."""

NUM_STEPS = {"tiny": (1500, 150), "tiny-countdown": (700, 80)}
"""Steps of the two stages."""


def make(name: str, output: Path, *, num_steps: Sequence[int], seed: int) -> None:
    """Train a model in its two stages and write it, with its tokenizer, to `output`.

    Sizes, dtype and tokenizer are those of the built-in model.
    """
    torch.manual_seed(seed)
    tokenizer: Any = AutoTokenizer.from_pretrained(BUILT_IN_MODELS[name])
    config = AutoConfig.from_pretrained(BUILT_IN_MODELS[name])
    dtype = config.dtype
    auto_model: Any = AutoModelForCausalLM
    model = auto_model.from_config(config, dtype=torch.float32)
    model.generation_config.do_sample = True
    rng = random.Random(seed)
    for stage, learning_rate in enumerate(LEARNING_RATES):

        def of_arithmetic(index: int, stage: int = stage) -> tuple[str, str]:
            operands = ARITHMETIC.problem(seed + stage, index)
            solved = solution(operands, rng, haste=HASTE_PROBABILITY * stage)
            return ARITHMETIC.key(operands), solved

        def of_countdown(index: int, stage: int = stage) -> tuple[str, str]:
            problem = COUNTDOWN_SMALL.problem(seed + stage, index)
            prompt = COUNTDOWN_SMALL.row(problem)["prompt"]
            return prompt, search(problem, rng, GIVE_UP_PROBABILITY * stage)

        example = of_arithmetic if name == "tiny" else of_countdown
        data = batches(tokenizer, seed + stage, example)
        train(model, data, num_steps=num_steps[stage], learning_rate=learning_rate)
    model.to(dtype).save_pretrained(output)
    tokenizer.save_pretrained(output)


def batches(
    tokenizer: Any, seed: int, example: Callable[[int], tuple[str, str]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield input ids and labels, both [BATCH_SIZE, T], endlessly, in an order given by `seed`.

    `example` returns the prompt and the completion of an index. BATCHES_PER_SORT batches are drawn
    together and sorted by length, which saves padding.
    """
    rng = random.Random(seed)
    index = 0
    while True:
        rows = []
        for _ in range(BATCHES_PER_SORT * BATCH_SIZE):
            prompt, completion = map(tokenizer.encode, example(index))
            completion.append(tokenizer.eos_token_id)
            labels = [IGNORED] * len(prompt) + completion
            rows.append((torch.tensor(prompt + completion), torch.tensor(labels)))
            index += 1
        rows.sort(key=lambda row: len(row[0]))
        starts = list(range(0, len(rows), BATCH_SIZE))
        rng.shuffle(starts)
        for start in starts:
            chosen = rows[start : start + BATCH_SIZE]
            pad: int = tokenizer.pad_token_id
            yield (
                pad_sequence([ids for ids, _ in chosen], batch_first=True, padding_value=pad),
                pad_sequence([each for _, each in chosen], batch_first=True, padding_value=IGNORED),
            )


def train(
    model: Any, data: Iterator[tuple[Tensor, Tensor]], *, num_steps: int, learning_rate: float
) -> None:
    """Take `num_steps` AdamW steps: a short warm-up, then a cosine decay to 1 %."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    num_warmup = max(1, num_steps // 20)

    def factor(step: int) -> float:
        return min((step + 1) / num_warmup, 0.505 + 0.495 * math.cos(math.pi * step / num_steps))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    for step, (ids, labels) in zip(range(1, num_steps + 1), data, strict=False):
        # Padding is on the right, so causal attention needs no mask.
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == num_steps:
            print(f"step {step}/{num_steps}  loss {loss.item():.4f}", flush=True)


def solution(operands: Sequence[int], rng: random.Random, haste: float = 0.0) -> str:
    """Return the working of an `arithmetic` problem and its answer; with haste it may be wrong (see
    above)."""
    total = operands[0]
    lines = []
    for number in operands[1:]:
        if rng.random() >= haste:
            tens = total + number // 10 * 10
            lines.append(f"{total}+{tens - total}={tens}+{number % 10}={total + number}\n")
            total += number
        else:
            slip = rng.choice((-10, -1, 1, 10)) if rng.random() < SLIP_PROBABILITY else 0
            lines.append(f"{total}+{number}={total + number + slip}\n")
            total += number + slip
    return "".join(lines) + f"#{total}"


class Try(NamedTuple):
    working: str
    expression: str
    value: int


def tries(problem: CountdownProblem) -> list[Try]:
    """Return all expressions of the three numbers; the larger operand is always on the left."""
    level, target, found = COUNTDOWN_SMALL, problem.target, []
    for pair, inner, outer in product(
        combinations(range(3), 2), level.operations, level.operations
    ):
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
        expression = outer.join(sides if between >= other else reversed(sides))
        found.append(Try(working, expression, value))
    return found


def search(problem: CountdownProblem, rng: random.Random, give_up_probability: float) -> str:
    """Return tries in random order, ending with a correct one or where the search is given up, and
    the answer."""
    candidates = tries(problem)
    rng.shuffle(candidates)
    wrong = [each for each in candidates if each.value != problem.target]
    correct = next(each for each in candidates if each.value == problem.target)
    text = ""
    for each in [*wrong[: rng.randrange(MAX_TRIES)], correct]:
        text += each.working
        if each is correct or rng.random() < give_up_probability:
            break
    return f"{text}<answer>{each.expression}</answer>"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a built-in model.")
    parser.add_argument("model", choices=NUM_STEPS, nargs="?", default="tiny")
    parser.add_argument("--output", type=Path, help="folder to write")
    given = parser.parse_args()
    torch.set_num_threads(1)
    output = given.output or BUILT_IN_MODELS[given.model]
    make(given.model, output, num_steps=NUM_STEPS[given.model], seed=0)
