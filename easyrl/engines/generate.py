"""The engine for models that the embedded one cannot serve: transformers' own `generate`.

The model's own code keeps whatever state it needs between tokens. One group runs at a time, so all
rows have the same prompt and need no padding. A logits processor draws each token as every engine
does (`sampling`) and leaves greedy `generate` no other choice. Exact and simple, not fast.

Some models' caches lose what their layers would see without one (Doge's and RecurrentGemma's in
transformers 5.23). So each group is checked by one plain forward, the trainer's, and if that gives
other log-probabilities the group is generated again without a cache.

Shapes: G completions of the group, R tokens of the longest completion.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria

from easyrl.engines.base import FinishedGroup, GroupRequest, PolicyEngine
from easyrl.engines.sampling import SamplingSettings, StopStrings, sample, uniform_stream
from easyrl.model.attention import PackedGroups
from easyrl.model.logprobs import chunked_token_logprobs
from easyrl.types import Completion

CACHE_TOLERANCE = 3.0
"""Largest gap in nats with and without a cache, times sqrt(eps) of the dtype."""


class GenerateEngine(PolicyEngine):
    """Engine that generates one group at a time (see `engines.base.Engine`)."""

    @torch.inference_mode()
    def step(self) -> list[FinishedGroup]:
        if not self._waiting:
            return []
        request = self._waiting.popleft()
        completions = self._generate(request, use_cache=True)
        if not self._is_exact(request, completions):
            completions = self._generate(request, use_cache=False)
        self.num_prompt_tokens += len(request.prompt_ids)
        self.num_completion_tokens += sum(len(c.token_ids) for c in completions)
        return [(request, completions)]

    def _generate(self, request: GroupRequest, *, use_cache: bool) -> list[Completion]:
        sampling, model = self.sampling, self.policy.model
        limits = request.limits(sampling)
        keys = [(*request.key, i) for i in range(request.num_generations)]
        uniforms = np.stack([uniform_stream(sampling.seed, key, max(limits)) for key in keys])
        draw = _Draw(torch.from_numpy(uniforms), sampling)
        end = _End(len(request.prompt_ids), limits, self.policy.eos_token_ids, self._stop)
        prompt = torch.tensor([list(request.prompt_ids)], device=self.policy.device)
        input_ids = prompt.repeat(request.num_generations, 1)
        own = model.generation_config
        # Ignore the model's own settings (penalties, beams, a minimum length).
        model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
        try:
            output: Tensor = model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                logits_processor=[draw],
                stopping_criteria=[end],
                do_sample=False,
                max_new_tokens=max(limits),
                use_cache=use_cache,
            )
        finally:
            model.generation_config = own
        tokens = output[:, prompt.shape[1] :].cpu().numpy().astype(np.int32)  # [G, R]
        logprobs = torch.stack(draw.logprobs, dim=1).cpu().numpy().astype(np.float32)  # [G, R]
        reasons: list[Literal["stop", "length"]] = ["stop" if x else "length" for x in end.stopped]
        return [
            Completion(tokens[i, :n], logprobs[i, :n], reasons[i], np.ones(n, dtype=np.bool_))
            for i, n in enumerate(end.lengths)
        ]

    def _is_exact(self, request: GroupRequest, completions: list[Completion]) -> bool:
        """Return whether a plain forward gives the reported log-probabilities."""
        num_prompt, device = len(request.prompt_ids), self.policy.device
        tokens = [torch.tensor([*request.prompt_ids, *c.token_ids]) for c in completions]
        lengths = [len(of_sequence) for of_sequence in tokens]
        ids = torch.cat(tokens).to(device)
        positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
        targets = torch.nonzero(positions >= num_prompt).squeeze(1)
        hidden = self.policy.hidden_states(
            ids, positions, PackedGroups.of_sequences(lengths, device), at=targets - 1
        )
        temperature = self.sampling.temperature or 1.0  # see `sample`
        expected, _ = chunked_token_logprobs(self.policy, hidden, ids[targets], temperature)
        got = np.concatenate([completion.logprobs for completion in completions])
        tolerance = CACHE_TOLERANCE * torch.finfo(self.policy.model.dtype).eps ** 0.5
        return bool(np.abs(expected.cpu().numpy() - got).max() <= tolerance)


class _Draw(LogitsProcessor):  # type: ignore[misc]
    """Processor that draws a token for every row and masks all others."""

    def __init__(self, uniforms: Tensor, sampling: SamplingSettings) -> None:
        self._uniforms, self._sampling = uniforms, sampling  # [G, R]
        self.logprobs: list[Tensor] = []  # one [G] for each position

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        uniforms = self._uniforms[:, len(self.logprobs)].to(scores.device)
        tokens, logprobs = sample(scores, uniforms, self._sampling)
        self.logprobs.append(logprobs)
        return torch.full_like(scores, float("-inf")).scatter_(1, tokens.unsqueeze(1), 0.0)


class _End(StoppingCriteria):  # type: ignore[misc]
    """Criterion that ends a row at an end-of-sequence token, a stop string or its limit."""

    def __init__(
        self, num_prompt: int, limits: Sequence[int], eos: Sequence[int], stop: StopStrings | None
    ) -> None:
        self._num_prompt, self._limits = num_prompt, np.array(limits)
        self._eos, self._stop = list(eos), stop
        self.lengths = np.zeros(len(limits), dtype=np.int64)  # 0: the row has not ended
        self.stopped = np.zeros(len(limits), dtype=np.bool_)  # not by its limit

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """Return for each row whether it has ended: [G]."""
        tokens = input_ids[:, self._num_prompt :].cpu().numpy()  # [G, r]
        in_flight = self.lengths == 0
        stopped = np.isin(tokens[:, -1], self._eos)
        if self._stop is not None:
            for row in np.flatnonzero(in_flight & ~stopped):
                stopped[row] = self._stop.is_complete(tokens[row])
        ended = in_flight & (stopped | (tokens.shape[1] >= self._limits))
        self.lengths[ended], self.stopped[ended] = tokens.shape[1], stopped[ended]
        return torch.from_numpy(self.lengths > 0).to(input_ids.device)
