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
from typing import Any

import numpy as np
import torch

from easyrl.engines.base import FinishedGroup, GroupRequest, PolicyEngine
from easyrl.engines.sampling import SamplingSettings, sample, uniform_stream
from easyrl.layout.tree import TokenTree
from easyrl.model.inputs import ModelInputs
from easyrl.model.logprobs import chunked_token_logprobs
from easyrl.model.policy import Policy
from easyrl.types import Completion, Float32, Float64, Int32

CACHE_NAMES = ("cache", "past_key_values", "cache_params")
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
        group = _Group(self, request)
        device = self.policy.device
        size = request.num_generations
        prompt = torch.tensor([list(request.prompt_ids)], device=device)  # [1, P]
        ids = prompt.expand(size, -1)  # [G, P + tokens so far]
        has_positions = use_cache and self.policy.layers_accept("position_ids")
        cache: dict[str, Any] = {}
        while not group.has_ended:
            is_first = ids.shape[1] == prompt.shape[1]
            if cache:
                new = ids[:, -1:]  # [G, 1]
            elif use_cache and is_first:
                new = prompt  # its cache is copied for all rows
            else:
                new = ids
            inputs = {"input_ids": new, "use_cache": use_cache, **cache}
            if has_positions:
                # Not every model asks its cache where the new tokens are (Bamba, MiniMax).
                first = ids.shape[1] - new.shape[1]
                positions = torch.arange(first, ids.shape[1], device=device)
                inputs["position_ids"] = positions.expand(len(new), -1)
            output = self.policy.run_layers(**inputs)
            if use_cache:
                cache = self._cache_of(output)
                if is_first:
                    _copy_row(cache, size, device)
            hidden = output.last_hidden_state[:, -1].expand(size, -1)
            uniforms = torch.from_numpy(group.next_uniforms()).to(device)
            tokens, logprobs = sample(self.policy.head(hidden), uniforms, self.sampling)
            ids = torch.cat([ids, tokens.unsqueeze(1)], dim=1)
            group.append(tokens.cpu().numpy(), logprobs.cpu().numpy())
        return group.completions()

    def _cache_of(self, output: Any) -> dict[str, Any]:
        """Return the argument that gives the model the cache of its output; none without one."""
        for name in CACHE_NAMES:
            cache = getattr(output, name, None)
            if cache is None:
                continue
            # Outputs rename a cache whose argument has another name in a model's own code.
            accepted = [each for each in CACHE_NAMES if self.policy.layers_accept(each)]
            return {accepted[0] if accepted else name: cache}
        return {}

    def is_stopped(self, tokens: Int32) -> bool:
        """Return whether a completion ends with the last of these tokens [R]."""
        if int(tokens[-1]) in self.end_tokens:
            return True
        return self._stop is not None and self._stop.is_complete(tokens)

    def _difference(self, request: GroupRequest, completions: list[Completion]) -> float:
        """Return the largest difference of the completions' log-probabilities from those of a
        plain forward, the trainer's, in nats."""
        sequences = []
        for completion in completions:
            sequence = torch.tensor([*request.prompt_ids, *completion.token_ids])
            sequences.append(sequence)
        tree = TokenTree.of_sequences([len(sequence) for sequence in sequences])
        ids = torch.cat(sequences).to(self.policy.device)

        is_sampled = torch.from_numpy(tree.positions >= len(request.prompt_ids))
        targets = torch.nonzero(is_sampled).squeeze(1).to(ids.device)
        # The token before a target predicts it.
        inputs = ModelInputs.of_row(ids, tree, targets - 1)
        hidden = self.policy.hidden_states(inputs)
        temperature = self.sampling.temperature or 1.0  # see `sample`
        expected, _ = chunked_token_logprobs(self.policy, hidden, ids[targets], temperature)

        got = np.concatenate([completion.logprobs for completion in completions])
        differences = np.abs(expected.cpu().numpy() - got)
        largest = float(differences.max())
        return math.inf if math.isnan(largest) else largest


class _Group:
    """The tokens of a group's completions while they are sampled."""

    def __init__(self, engine: GenerateEngine, request: GroupRequest) -> None:
        size = request.num_generations
        self._engine = engine
        self._limit = request.limits(engine.sampling)[0]  # R: equal for all of a group
        self._num_tokens = 0  # of every row, those behind its end included
        uniforms = []
        for index in range(size):
            key = (*request.key, index)
            uniforms.append(uniform_stream(engine.sampling.seed, key, self._limit))
        self._uniforms = np.stack(uniforms)  # [G, R]
        self._tokens = np.zeros((size, self._limit), np.int32)
        self._logprobs = np.zeros((size, self._limit), np.float32)
        self._lengths = np.zeros(size, np.int64)  # of each completion; 0: it has not ended
        self._is_stopped = np.zeros(size, np.bool_)

    @property
    def has_ended(self) -> bool:
        return bool(self._lengths.all())

    def next_uniforms(self) -> Float64:
        """Return the uniform numbers with which the next tokens are drawn [G]."""
        uniforms: Float64 = self._uniforms[:, self._num_tokens]
        return uniforms

    def append(self, tokens: Int32, logprobs: Float32) -> None:
        """Append the next token of each row: 2 x [G]. Rows that have ended ignore theirs."""
        self._tokens[:, self._num_tokens] = tokens
        self._logprobs[:, self._num_tokens] = logprobs
        self._num_tokens += 1
        is_full = self._num_tokens == self._limit
        in_progress = np.flatnonzero(self._lengths == 0)
        for row in in_progress:
            so_far = self._tokens[row, : self._num_tokens]
            is_stopped = self._engine.is_stopped(so_far)
            self._is_stopped[row] = is_stopped
            if is_stopped or is_full:
                self._lengths[row] = self._num_tokens

    def completions(self) -> list[Completion]:
        completions = []
        for row, length in enumerate(self._lengths):
            completion = Completion(
                self._tokens[row, :length],
                self._logprobs[row, :length],
                "stop" if self._is_stopped[row] else "length",
                np.ones(length, dtype=np.bool_),
            )
            completions.append(completion)
        return completions


def _copy_row(cache: dict[str, Any], size: int, device: torch.device) -> None:
    """Copy the only row of a model's cache, so that it has `size` rows."""
    first_row = torch.zeros(size, dtype=torch.int64, device=device)
    for rows in cache.values():
        rows.reorder_cache(first_row)
