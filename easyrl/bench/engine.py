"""The embedded engine against transformers' `generate`: the demo's model and prompts, one core.

Two loads: completions of one length, and geometric lengths as in reinforcement learning. `generate`
works in batches of NUM_ROWS, each of which runs to its longest completion; the engine refills its
NUM_ROWS rows. Only tokens up to a completion's length count.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from easyrl.bench.harness import Row, median_ratio, take_turns, timed
from easyrl.data.chat import render_prompt
from easyrl.data.hub import resolve_model
from easyrl.data.tasks import ARITHMETIC
from easyrl.engines.base import GroupRequest, SamplingSettings
from easyrl.engines.embedded import EmbeddedEngine
from easyrl.model.files import load_tokenizer
from easyrl.model.policy import Policy

NUM_ROWS = 128
EQUAL_LENGTH = 88
NUM_RAGGED, MEAN_LENGTH, MAX_LENGTH = 512, 92, 256  # capped at MAX_LENGTH, the mean is about 88
CPU = torch.device("cpu")


def run(repetitions: int = 5) -> Iterator[Row]:
    """One row per load."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = load_tokenizer("tiny")
    rows = ARITHMETIC.held_out_rows()[:NUM_RAGGED]
    prompts = [render_prompt(row["prompt"], tokenizer) for row in rows]
    drawn = np.random.default_rng(0).geometric(1 / MEAN_LENGTH, NUM_RAGGED)
    ragged = np.minimum(drawn, MAX_LENGTH).tolist()
    yield compare("equal lengths", prompts[:NUM_ROWS], [EQUAL_LENGTH] * NUM_ROWS, repetitions)
    yield compare("geometric lengths", prompts, ragged, repetitions)


def compare(
    load: str, prompts: Sequence[list[int]], lengths: Sequence[int], repetitions: int
) -> Row:
    settings = SamplingSettings(max_prompt_length=64, max_completion_length=MAX_LENGTH)
    engine = EmbeddedEngine(Policy.load("tiny"), settings, num_rows=NUM_ROWS, ignore_eos=True)
    model = AutoModelForCausalLM.from_pretrained(resolve_model("tiny"), dtype=torch.float32)
    actions = {
        "engine": timed(partial(_run_engine, engine, prompts, lengths), CPU),
        "generate": timed(partial(_run_generate, model, prompts, lengths), CPU),
    }
    seconds = take_turns(actions, repetitions)
    rates = {name: sum(lengths) / statistics.median(taken) for name, taken in seconds.items()}
    return {
        "load": load,
        "completion_tokens": sum(lengths),
        "engine_tokens_per_second": rates["engine"],
        "generate_tokens_per_second": rates["generate"],
        "speedup": median_ratio(seconds["generate"], seconds["engine"]),
    }


def _run_engine(
    engine: EmbeddedEngine, prompts: Sequence[list[int]], lengths: Sequence[int]
) -> None:
    for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        engine.submit(GroupRequest((number,), prompt, 1, [length]))
    while engine.has_work:
        engine.step()


@torch.inference_mode()
def _run_generate(model: Any, prompts: Sequence[list[int]], lengths: Sequence[int]) -> None:
    """Generate left-padded batches with transformers' defaults (SDPA, dynamic cache)."""
    for start in range(0, len(prompts), NUM_ROWS):
        batch = slice(start, start + NUM_ROWS)
        rows = [torch.tensor(prompt) for prompt in prompts[batch]]
        ids = pad_sequence(rows, batch_first=True, padding_value=-1, padding_side="left")
        model.generate(
            ids.clamp(min=0),
            attention_mask=(ids >= 0).long(),
            max_new_tokens=max(lengths[batch]),
            eos_token_id=[],
            do_sample=True,
            top_k=0,
        )
