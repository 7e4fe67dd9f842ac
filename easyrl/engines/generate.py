"""The engine for models that the embedded one cannot serve: one group at a time, by their own code.

All rows of a group have the same prompt and need no padding. The model's own cache keeps whatever
state it needs between tokens; a model without one computes whole rows. Simple, not fast.

Some models' caches fail, or lose what their layers would see without one (RecurrentGemma's in
transformers 5.23). Others give a token other results in a longer row (equal scores in the sparse
attention of DeepSeek V3.2). So each group is measured: one plain forward of its whole sequences,
the trainer's, gives the log-probabilities that are expected.

    with the cache ──► exact ──► done
          │ differs, or raises an error
          ▼
    without it ──────► exact ──► done, reported once as slower
          │ differs
          ▼
    the smaller difference ────► done, reported once as inexact

Every group begins with the cache, so that its tokens do not depend on the groups before it.

Shapes: G completions of the group, R their maximum tokens, L tokens of a forward's rows.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from easyrl.engines.base import FinishedGroup, GroupRequest, PolicyEngine
from easyrl.engines.sampling import SamplingSettings, sample, uniform_stream
from easyrl.layout.tree import TokenTree
from easyrl.model.inputs import ModelInputs
from easyrl.model.logprobs import chunked_token_logprobs
from easyrl.model.policy import Policy
from easyrl.types import Completion, Int32

CACHES = ("cache", "past_key_values", "cache_params")
"""Names of a cache in models' outputs and arguments: the first from transformers 5.24 on, the
others before, and in models with code of their own."""
TOLERANCE = 3.0
"""Largest exact difference from the trainer's log-probabilities, in nats times sqrt(eps) of the
dtype."""


@dataclass(frozen=True, slots=True)
class _Sampled:
    """A group's completions, and how far their log-probabilities are from the trainer's."""

    completions: list[Completion]  # [G]
    difference: float  # the largest, in nats; infinite if one is not a number


class GenerateEngine(PolicyEngine):
    def __init__(self, policy: Policy, sampling: SamplingSettings, tokenizer: Any = None) -> None:
        super().__init__(policy, sampling, tokenizer)
        self._reported: set[str] = set()

    @torch.inference_mode()
    def step(self) -> list[FinishedGroup]:
        if not self._waiting:
            return []
        request = self._waiting.popleft()
        completions = self._sample_group(request)
        self.num_prompt_tokens += len(request.prompt_ids)
        self.num_completion_tokens += sum(len(c.token_ids) for c in completions)
        return [(request, completions)]

    def _sample_group(self, request: GroupRequest) -> list[Completion]:
        """Sample a group in the first way that is exact, or else in the one that is closer."""
        tolerance = TOLERANCE * torch.finfo(self.policy.model.dtype).eps ** 0.5
        cached: _Sampled | None = None
        try:
            cached = self._sample_and_measure(request, use_cache=True)
        except Exception as error:  # any: what a cache needs depends on the model's code
            lines = str(error).strip().splitlines()
            with_cache = f"{type(error).__name__} ({lines[0] if lines else 'no message'})"
        else:
            if cached.difference <= tolerance:
                return cached.completions
            with_cache = f"a difference of {cached.difference:.1e} nats"

        whole = self._sample_and_measure(request, use_cache=False)
        is_exact = whole.difference <= tolerance
        expected = f"expected the trainer's log-probabilities to {tolerance:.1e} nats"
        got = f"got {with_cache} with the model's cache, {whole.difference:.1e} nats without it"
        if is_exact:
            self._report_once(
                "slower",
                f"whole rows are computed without a cache, which is slower: {expected}, {got}",
            )
            return whole.completions
        self._report_once(
            "inexact",
            f"training is not exactly on-policy: {expected}, {got}. The model gives a token other "
            "results in a longer row. Watch sampling/sampling_logp_difference/max; "
            "algorithm.importance_sampling_correction=truncate weights tokens by the difference",
        )
        if cached is not None and cached.difference < whole.difference:
            return cached.completions
        return whole.completions

    def _report_once(self, kind: str, text: str) -> None:
        if kind not in self._reported:
            self._reported.add(kind)
            self.report(text)

    def _sample_and_measure(self, request: GroupRequest, *, use_cache: bool) -> _Sampled:
        completions = self._generate(request, use_cache=use_cache)
        return _Sampled(completions, self._difference(request, completions))

    def _generate(self, request: GroupRequest, *, use_cache: bool) -> list[Completion]:
        sampling, device, size = self.sampling, self.policy.device, request.num_generations
        limit = request.limits(sampling)[0]
        keys = [(*request.key, i) for i in range(size)]
        uniforms = np.stack([uniform_stream(sampling.seed, key, limit) for key in keys])  # [G, R]
        prompt = torch.tensor([list(request.prompt_ids)], device=device)
        ids = prompt.expand(size, -1)
        tokens, logprobs = np.zeros((size, limit), np.int32), np.zeros((size, limit), np.float32)
        lengths, stopped = np.zeros(size, np.int64), np.zeros(size, np.bool_)  # 0: not ended
        has_positions = use_cache and self.policy.layers_accept("position_ids")
        cache: dict[str, Any] = {}
        for position in range(limit):
            if cache:
                new = ids[:, -1:]  # [G, 1]
            elif use_cache:
                new = prompt  # [1, L]: its cache is copied for all rows
            else:
                new = ids  # [G, L]
            inputs = {"input_ids": new, "use_cache": use_cache, **cache}
            if has_positions:
                # Not every model asks its cache where the new tokens are (Bamba, MiniMax).
                numbers = torch.arange(ids.shape[1] - new.shape[1], ids.shape[1], device=device)
                inputs["position_ids"] = numbers.expand(len(new), -1)
            output = self.policy.run_layers(**inputs)
            hidden = output.last_hidden_state[:, -1].expand(size, -1)
            if use_cache:
                is_of_prompt = not cache
                cache = self._cache_of(output)
                if is_of_prompt:
                    _copy_row(cache, size, device)
            uniform = torch.from_numpy(uniforms[:, position]).to(device)
            drawn = sample(self.policy.head(hidden), uniform, sampling)
            ids = torch.cat([ids, drawn[0].unsqueeze(1)], dim=1)
            tokens[:, position], logprobs[:, position] = (x.cpu().numpy() for x in drawn)
            for row in np.flatnonzero(lengths == 0):
                stopped[row] = self._is_stopped(tokens[row, : position + 1])
                lengths[row] = position + 1 if stopped[row] or position + 1 == limit else 0
            if lengths.all():
                break
        reasons: list[Literal["stop", "length"]] = ["stop" if x else "length" for x in stopped]
        return [
            Completion(tokens[i, :n], logprobs[i, :n], reasons[i], np.ones(n, dtype=np.bool_))
            for i, n in enumerate(lengths)
        ]

    def _cache_of(self, output: Any) -> dict[str, Any]:
        """Return the argument that gives the model the cache of its output; none without one."""
        for name in CACHES:
            cache = getattr(output, name, None)
            if cache is not None:
                # Outputs rename a cache whose argument has another name in a model's own code.
                argument = next((each for each in CACHES if self.policy.layers_accept(each)), name)
                return {argument: cache}
        return {}

    def _is_stopped(self, tokens: Int32) -> bool:
        is_end = int(tokens[-1]) in self.end_tokens
        return is_end or (self._stop is not None and self._stop.is_complete(tokens))

    def _difference(self, request: GroupRequest, completions: list[Completion]) -> float:
        """Return the largest difference of the completions' log-probabilities from those of a
        plain forward, the trainer's, in nats."""
        num_prompt, device = len(request.prompt_ids), self.policy.device
        tokens = [torch.tensor([*request.prompt_ids, *c.token_ids]) for c in completions]
        lengths = [len(of_sequence) for of_sequence in tokens]
        ids = torch.cat(tokens).to(device)
        positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
        targets = torch.nonzero(positions >= num_prompt).squeeze(1)
        row = ModelInputs.of_row(ids, TokenTree.of_sequences(lengths), targets - 1)
        hidden = self.policy.hidden_states(row)
        temperature = self.sampling.temperature or 1.0  # see `sample`
        expected, _ = chunked_token_logprobs(self.policy, hidden, ids[targets], temperature)
        got = np.concatenate([completion.logprobs for completion in completions])
        largest = float(np.abs(expected.cpu().numpy() - got).max())
        return math.inf if math.isnan(largest) else largest


def _copy_row(cache: dict[str, Any], size: int, device: torch.device) -> None:
    """Copy the only row of a model's cache, so that it has `size` rows."""
    first_row = torch.zeros(size, dtype=torch.int64, device=device)
    for rows in cache.values():
        rows.reorder_cache(first_row)
