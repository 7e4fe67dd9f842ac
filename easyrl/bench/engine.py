"""The embedded engine against transformers' `generate`: the demo's model and prompts, one core.

Two loads: completions of one length, and geometric lengths as in reinforcement learning. `generate`
works in batches of NUM_ROWS, each of which runs to its longest completion; the engine refills its
NUM_ROWS rows. Both sample at temperature 1 and generate the same number of tokens that count.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from easyrl.bench.measure import median_ratio, seconds_of_each
from easyrl.data.arithmetic import held_out_prompts
from easyrl.data.chat import render_prompt
from easyrl.data.hub import resolve_model
from easyrl.engines.base import GroupRequest, SamplingSettings
from easyrl.engines.embedded import EmbeddedEngine
from easyrl.model.files import load_tokenizer
from easyrl.model.policy import Policy

NUM_ROWS = 128
EQUAL_LENGTH = 88
NUM_RAGGED, MEAN_LENGTH, MAX_LENGTH = 512, 92, 256  # capped at MAX_LENGTH, the mean is about 88
GREEDY_LENGTH = 96
MAX_PROMPT_LENGTH = 64
CPU = torch.device("cpu")
COLUMNS = {
    "load": "load",
    "sequences": "sequences",
    "completion_tokens": "tokens",
    "engine_tokens_per_second": "engine, tokens/s",
    "generate_tokens_per_second": "generate, tokens/s",
    "speedup": "speedup",
    "greedy_mismatches": "mismatches",
}


def run(repetitions: int = 5) -> list[dict[str, Any]]:
    """One row per load, and one with the number of greedy completions that differ
    (`greedy_mismatches`)."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = load_tokenizer("tiny")
    prompts = [render_prompt(p.content, tokenizer) for p in held_out_prompts()[:NUM_RAGGED]]
    drawn = np.random.default_rng(0).geometric(1 / MEAN_LENGTH, NUM_RAGGED)
    ragged = np.minimum(drawn, MAX_LENGTH).tolist()
    baseline = Generate()
    return [
        compare(
            "equal lengths", prompts[:NUM_ROWS], [EQUAL_LENGTH] * NUM_ROWS, baseline, repetitions
        ),
        compare("geometric lengths", prompts, ragged, baseline, repetitions),
        check_greedy(prompts[:NUM_ROWS], baseline),
    ]


def compare(
    load: str,
    prompts: Sequence[list[int]],
    lengths: Sequence[int],
    baseline: Generate,
    repetitions: int,
) -> dict[str, Any]:
    engine = _make_engine(temperature=1.0)

    def by_generate() -> None:
        for start in range(0, len(prompts), NUM_ROWS):
            batch = slice(start, start + NUM_ROWS)
            baseline(prompts[batch], max(lengths[batch]), temperature=1.0)

    actions = {"engine": lambda: _generate(engine, prompts, lengths), "generate": by_generate}
    seconds = seconds_of_each(actions, repetitions, CPU)
    num_tokens = sum(lengths)
    return {
        "load": load,
        "sequences": len(lengths),
        "completion_tokens": num_tokens,
        "engine_tokens_per_second": num_tokens / statistics.median(seconds["engine"]),
        "generate_tokens_per_second": num_tokens / statistics.median(seconds["generate"]),
        "speedup": median_ratio(seconds["generate"], seconds["engine"]),
    }


def check_greedy(prompts: Sequence[list[int]], baseline: Generate) -> dict[str, Any]:
    lengths = [GREEDY_LENGTH] * len(prompts)
    got = _generate(_make_engine(temperature=0.0), prompts, lengths)
    expected = baseline(prompts, GREEDY_LENGTH, temperature=0.0)
    return {
        "load": "greedy",
        "sequences": len(prompts),
        "completion_tokens": sum(lengths),
        "greedy_mismatches": sum(
            ours != theirs for ours, theirs in zip(got, expected, strict=True)
        ),
    }


def _make_engine(*, temperature: float) -> EmbeddedEngine:
    settings = SamplingSettings(
        max_prompt_length=MAX_PROMPT_LENGTH,
        max_completion_length=MAX_LENGTH,
        temperature=temperature,
    )
    return EmbeddedEngine(Policy.load("tiny"), settings, num_rows=NUM_ROWS, ignore_eos=True)


def _generate(
    engine: EmbeddedEngine, prompts: Sequence[list[int]], lengths: Sequence[int]
) -> list[list[int]]:
    """One completion per prompt, in the order of the prompts."""
    for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        engine.submit(GroupRequest((number,), prompt, 1, [length]))
    finished = []
    while engine.has_work:
        finished += engine.step()
    finished.sort(key=lambda group: group.request.key)
    return [group.completions[0].token_ids.tolist() for group in finished]


class Generate:
    """transformers' `generate` with its defaults (SDPA, dynamic cache), left-padded."""

    def __init__(self) -> None:
        from transformers import AutoModelForCausalLM

        path = resolve_model("tiny")
        self._model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    @torch.inference_mode()
    def __call__(
        self, prompts: Sequence[list[int]], length: int, *, temperature: float
    ) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0}
        output = self._model.generate(
            ids, attention_mask=mask, max_new_tokens=length, eos_token_id=[], **sampling
        )
        completions: list[list[int]] = output[:, longest:].tolist()
        return completions
