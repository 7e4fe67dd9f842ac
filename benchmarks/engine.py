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
# Groups of long prompts.
LONG_PROMPT = 1024
LONG_GROUP = 8
LONG_LENGTH = 64
# Completions of geometric lengths: cut off at MAX_LENGTH, their mean is about EQUAL_LENGTH.
NUM_RAGGED = 512
MEAN_LENGTH = 92
MAX_LENGTH = 256


@dataclass(frozen=True, slots=True)
class RaggedRequest(GroupRequest):
    """A group whose completions have a maximum length each."""

    lengths: Sequence[int] = ()  # [G]

    def limits(self, sampling: SamplingSettings) -> Sequence[int]:
        return self.lengths


def run(repetitions: int = 5) -> Iterator[Row]:
    """Yield a row per load."""
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
    rng = np.random.default_rng(0)
    drawn = rng.geometric(1 / MEAN_LENGTH, num_ragged)
    ragged = np.minimum(drawn, MAX_LENGTH).tolist()
    yield measure("equal lengths", prompts[:NUM_ROWS], [EQUAL_LENGTH] * NUM_ROWS)
    yield measure("geometric lengths", prompts, ragged)
    rng = np.random.default_rng(0)
    size = (NUM_ROWS // LONG_GROUP, LONG_PROMPT)
    long_prompts = rng.integers(2, len(tokenizer), size).tolist()
    yield measure(f"prompts of {LONG_PROMPT}", long_prompts, [LONG_LENGTH] * NUM_ROWS)


def compare(
    load: str, prompts: Sequence[list[int]], lengths: Sequence[int], *, repetitions: int, kind: str
) -> Row:
    """Measure one load. `lengths`: of all completions; each prompt has equally many."""
    device = torch.device(kind)
    settings = SamplingSettings(
        max_prompt_length=max(map(len, prompts)),
        max_completion_length=max(lengths),
    )
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
    num_warm_up = 1 if engine.graphs is None else 2  # these runs capture the steps
    seconds = take_turns(actions, repetitions, num_warm_up)
    stored = engine.cache.keys_values
    bytes_per_token = 0
    for keys_and_values in stored.rows:
        bytes_per_token += sum(each[0, :, 0].nbytes for each in keys_and_values)
    cache_bytes = stored.num_bytes
    copies = NUM_ROWS * settings.max_sequence_length  # tokens, if each row had a copy of its prompt
    num_tokens = sum(lengths)
    rates = {}
    for name, taken in seconds.items():
        rates[f"{name}_tokens_per_second"] = num_tokens / statistics.median(taken)
    return {
        "load": load,
        "device": None if kind == "cpu" else devices.device_label(kind, 0),
        "completion_tokens": num_tokens,
        **rates,
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
    group_size = len(lengths) // len(prompts)
    for number, prompt in enumerate(prompts):
        first = number * group_size
        of_group = lengths[first : first + group_size]
        engine.submit(RaggedRequest((number,), prompt, group_size, lengths=of_group))
    while engine.has_work:
        engine.step()


@torch.inference_mode()
def _run_generate(model: Any, prompts: Sequence[list[int]], lengths: Sequence[int]) -> None:
    """Generate left-padded batches with transformers' defaults (SDPA, dynamic cache)."""
    group_size = len(lengths) // len(prompts)
    rows = []  # a prompt for each completion
    for prompt in prompts:
        rows += [torch.tensor(prompt)] * group_size
    for start in range(0, len(rows), NUM_ROWS):
        batch = slice(start, start + NUM_ROWS)
        ids = pad_sequence(rows[batch], batch_first=True, padding_value=-1, padding_side="left")
        is_token = ids >= 0
        model.generate(
            ids.clamp(min=0).to(model.device),
            attention_mask=is_token.long().to(model.device),
            max_new_tokens=max(lengths[batch]),
            eos_token_id=[],
            do_sample=True,
            top_k=0,
        )
