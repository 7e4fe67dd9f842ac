"""The engine for models that the embedded one cannot serve: one group at a time, by their own code.

All rows of a group have the same prompt and need no padding. The model's own cache keeps whatever
state it needs between tokens; a model without one computes whole rows. Exact and simple, not fast.

Some models' caches fail, or lose what their layers would see without one (RecurrentGemma's in
transformers 5.23). So each group is checked by one plain forward, the trainer's, and if that gives
other log-probabilities the group is generated again without a cache.

Shapes: G completions of the group, R their maximum tokens.
"""

from contextlib import suppress
from typing import Any, Literal

import numpy as np
import torch

from easyrl.engines.base import FinishedGroup, GroupRequest, PolicyEngine
from easyrl.engines.sampling import sample, uniform_stream
from easyrl.model.attention import PackedGroups
from easyrl.model.logprobs import chunked_token_logprobs
from easyrl.types import Completion, Int32

CACHES = ("past_key_values", "cache_params")  # names in models' outputs and arguments
CACHE_TOLERANCE = 3.0  # largest gap in nats with and without a cache, times sqrt(eps) of the dtype


class GenerateEngine(PolicyEngine):
    _has_reported = False

    @torch.inference_mode()
    def step(self) -> list[FinishedGroup]:
        if not self._waiting:
            return []
        request = self._waiting.popleft()
        completions: list[Completion] = []
        with suppress(Exception):  # any: what a cache needs depends on the model's code
            completions = self._generate(request, use_cache=True)
        if not completions or not self._is_exact(request, completions):
            if not self._has_reported:
                self.report("the model's cache fails: whole rows are computed, exact but slower")
                self._has_reported = True
            completions = self._generate(request, use_cache=False)
        self.num_prompt_tokens += len(request.prompt_ids)
        self.num_completion_tokens += sum(len(c.token_ids) for c in completions)
        return [(request, completions)]

    def _generate(self, request: GroupRequest, *, use_cache: bool) -> list[Completion]:
        sampling, device, size = self.sampling, self.policy.device, request.num_generations
        limit = request.limits(sampling)[0]
        keys = [(*request.key, i) for i in range(size)]
        uniforms = np.stack([uniform_stream(sampling.seed, key, limit) for key in keys])  # [G, R]
        ids = torch.tensor([list(request.prompt_ids)] * size, device=device)
        tokens, logprobs = np.zeros((size, limit), np.int32), np.zeros((size, limit), np.float32)
        lengths, stopped = np.zeros(size, np.int64), np.zeros(size, np.bool_)  # 0: not ended
        cache: dict[str, Any] = {}
        for position in range(limit):
            new = ids[:, -1:] if cache else ids
            output = self.policy.run_layers(input_ids=new, use_cache=use_cache, **cache)
            found = ((name, getattr(output, name, None)) for name in CACHES)
            cache = {name: state for name, state in found if state is not None}
            numbers = torch.from_numpy(uniforms[:, position]).to(device)
            drawn = sample(self.policy.head(output.last_hidden_state[:, -1]), numbers, sampling)
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

    def _is_stopped(self, tokens: Int32) -> bool:
        is_end = int(tokens[-1]) in self.end_tokens
        return is_end or (self._stop is not None and self._stop.is_complete(tokens))

    def _is_exact(self, request: GroupRequest, completions: list[Completion]) -> bool:
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
