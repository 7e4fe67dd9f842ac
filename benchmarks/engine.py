"""The embedded engine against transformers' `generate`.

On one core: the demo's model and prompts. On an accelerator: the same prompts and a random model of
Qwen3-0.6B's shape in bfloat16; on NVIDIA GPUs the engine also runs without CUDA graphs.

`generate` works in batches of NUM_ROWS, each of which runs to its longest completion; the engine
refills its NUM_ROWS rows. Only tokens up to a completion's length count.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from benchmarks.measuring import timed
from easyrl import devices
from easyrl.bench.harness import QWEN3_06B, Row, median_ratio, take_turns
from easyrl.data.chat import render_prompt
from easyrl.data.hub import resolve_model
from easyrl.data.tasks import ARITHMETIC
from easyrl.engines.base import GroupRequest
from easyrl.engines.embedded import EmbeddedEngine
from easyrl.engines.sampling import SamplingSettings
from easyrl.model.files import load_tokenizer
from easyrl.model.loading import load_policy
from easyrl.model.policy import Policy
from easyrl.runtime.self_test_part import random_model, random_policy

NUM_ROWS = 128
EQUAL_LENGTH = 88
LONG_PROMPT, LONG_GROUP, LONG_LENGTH = 1024, 8, 64
NUM_RAGGED, MEAN_LENGTH, MAX_LENGTH = 512, 92, 256  # capped at MAX_LENGTH, the mean is about 88


@dataclass(frozen=True, slots=True)
class RaggedRequest(GroupRequest):
    """A group whose completions have a maximum length each."""

    lengths: Sequence[int] = ()  # [G]

    def limits(self, sampling: SamplingSettings) -> Sequence[int]:
        return self.lengths


def run(repetitions: int = 5) -> Iterator[Row]:
    """One row per load."""
    kind, _ = devices.accelerator()
    if kind == "cpu":
        torch.set_num_threads(1)
    torch.manual_seed(0)
    measure = partial(compare, repetitions=repetitions if kind == "cpu" else 2, kind=kind)
    tokenizer = load_tokenizer("tiny")
    # `generate` takes minutes on an accelerator: a launch takes longer than a kernel.
    num_ragged = NUM_RAGGED if kind == "cpu" else 2 * NUM_ROWS
    rows = ARITHMETIC.held_out_rows()[:num_ragged]
    prompts = [render_prompt(row["prompt"], tokenizer) for row in rows]
    drawn = np.random.default_rng(0).geometric(1 / MEAN_LENGTH, num_ragged)
    ragged = np.minimum(drawn, MAX_LENGTH).tolist()
    yield measure("equal lengths", prompts[:NUM_ROWS], [EQUAL_LENGTH] * NUM_ROWS)
    yield measure("geometric lengths", prompts, ragged)
    num_long = NUM_ROWS // LONG_GROUP
    long = np.random.default_rng(0).integers(2, len(tokenizer), (num_long, LONG_PROMPT)).tolist()
    yield measure(f"prompts of {LONG_PROMPT}", long, [LONG_LENGTH] * NUM_ROWS)


def compare(
    load: str, prompts: Sequence[list[int]], lengths: Sequence[int], *, repetitions: int, kind: str
) -> Row:
    """`lengths`: of all completions, as many of each prompt."""
    device, longest = torch.device(kind), max(map(len, prompts))
    settings = SamplingSettings(max_prompt_length=longest, max_completion_length=max(lengths))
    policy, model = _models(device)
    policy.eos_token_ids.clear()
    engine = EmbeddedEngine(policy, settings, num_rows=NUM_ROWS)
    actions = {
        "engine": timed(partial(_run_engine, engine, prompts, lengths), device),
        "generate": timed(partial(_run_generate, model, prompts, lengths), device),
    }
    if engine.graphs is not None:
        without = EmbeddedEngine(policy, settings, num_rows=NUM_ROWS)
        without.graphs = None
        action = partial(_run_engine, without, prompts, lengths)
        actions["engine_without_graphs"] = timed(action, device)
    # Warm-up runs also capture the steps.
    seconds = take_turns(actions, repetitions, num_warm_up=1 if engine.graphs is None else 2)
    bytes_per_token = sum(x[0, :, 0].nbytes for layer in engine.cache.rows for x in layer)
    layers = (*engine.cache.rows, *engine.cache.prompts)
    cache_bytes = sum(x.nbytes for layer in layers for x in layer)
    copies = NUM_ROWS * settings.max_sequence_length  # tokens, if each row had a copy of its prompt
    rates = {name: sum(lengths) / statistics.median(taken) for name, taken in seconds.items()}
    return {
        "load": load,
        "device": None if kind == "cpu" else devices.device_label(kind, 0),
        "completion_tokens": sum(lengths),
        **{f"{name}_tokens_per_second": rate for name, rate in rates.items()},
        "speedup": median_ratio(seconds["generate"], seconds["engine"]),
        "cache_mib": cache_bytes / 2**20,
        "cache_mib_if_copied": copies * bytes_per_token / 2**20,
    }


def _models(device: torch.device) -> tuple[Policy, Any]:
    """Return the policy, and the same model with transformers' attention."""
    if device.type == "cpu":
        model = AutoModelForCausalLM.from_pretrained(resolve_model("tiny"), dtype=torch.float32)
        return load_policy("tiny"), model
    with device:
        theirs = random_model(QWEN3_06B, attn_implementation="sdpa").to(torch.bfloat16).eval()
    return random_policy(QWEN3_06B, torch.bfloat16, device.type), theirs


def _run_engine(
    engine: EmbeddedEngine, prompts: Sequence[list[int]], lengths: Sequence[int]
) -> None:
    size = len(lengths) // len(prompts)  # of a group
    for number, prompt in enumerate(prompts):
        of_group = lengths[number * size : (number + 1) * size]
        engine.submit(RaggedRequest((number,), prompt, size, lengths=of_group))
    while engine.has_work:
        engine.step()


@torch.inference_mode()
def _run_generate(model: Any, prompts: Sequence[list[int]], lengths: Sequence[int]) -> None:
    """Generate left-padded batches with transformers' defaults (SDPA, dynamic cache)."""
    size = len(lengths) // len(prompts)
    each = [torch.tensor(prompt) for prompt in prompts for _ in range(size)]
    for start in range(0, len(each), NUM_ROWS):
        batch = slice(start, start + NUM_ROWS)
        rows = each[batch]
        ids = pad_sequence(rows, batch_first=True, padding_value=-1, padding_side="left")
        model.generate(
            ids.clamp(min=0).to(model.device),
            attention_mask=(ids >= 0).long().to(model.device),
            max_new_tokens=max(lengths[batch]),
            eos_token_id=[],
            do_sample=True,
            top_k=0,
        )
