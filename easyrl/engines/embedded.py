"""The embedded engine: transformers' own model code under a continuous-batching loop.

    submit ─► waiting groups ─► prompt prefilled once ─► sequences ready ─► rows ─► finished groups

One forward per step processes the newest token of every row in flight and, if few sequences are
ready to start, the prompts of the next groups. A finished row is reused by the next ready sequence
in the same step; if there is none, the last row moves into its place, so that finished rows cost
nothing. Groups are served first come, first served. What a step computes depends on the requests
and the sampled tokens alone, never on a clock (docs/design.md, Invariants).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from easyrl.engines import MAX_PREFILL_TOKENS
from easyrl.engines.base import FinishedGroup, GroupRequest, PolicyEngine, SamplingSettings
from easyrl.engines.kv_cache import KVCache, PromptCache, StepLayout
from easyrl.engines.sampling import sample, uniform_stream
from easyrl.model.policy import Policy
from easyrl.types import Completion, Float32, Float64, Int32


@dataclass
class _Group:
    request: GroupRequest
    prompt: PromptCache = field(default_factory=list)
    num_started: int = 0
    completions: dict[int, Completion] = field(default_factory=dict)

    def mark_started(self, count: int) -> None:
        """Free the prompt's keys and values once all sequences have started."""
        self.num_started += count
        if self.num_started == self.request.num_generations:
            self.prompt = []


@dataclass(slots=True)
class _Sequence:
    group: _Group
    sample_index: int
    limit: int  # completion tokens at most
    uniforms: Float64  # [limit]
    first_token: int = 0
    first_logprob: float = 0.0


class EmbeddedEngine(PolicyEngine):
    """Continuous batching over `num_rows` preallocated rows (see `engines.base.Engine`)."""

    def __init__(
        self,
        policy: Policy,
        sampling: SamplingSettings,
        *,
        num_rows: int,
        tokenizer: Any = None,
        ignore_eos: bool = False,
    ) -> None:
        super().__init__(policy, sampling, tokenizer)
        self._eos = np.asarray([] if ignore_eos else policy.eos_token_ids, dtype=np.int64)
        self._cache = KVCache(num_rows, sampling.max_sequence_length)
        self._ready: deque[_Sequence] = deque()
        self._finished: list[FinishedGroup] = []
        # The first num_active rows are in flight.
        self.num_active = 0
        self._sequences: list[_Sequence | None] = [None] * num_rows
        longest = sampling.max_completion_length
        self._rows = np.zeros(
            num_rows,
            dtype=[
                ("position", np.int64),  # of the newest token
                ("count", np.int64),  # completion tokens so far
                ("limit", np.int64),
                ("uniforms", np.float64, longest),
                ("tokens", np.int32, longest),
                ("logprobs", np.float32, longest),
            ],
        )

    @property
    def has_work(self) -> bool:
        return bool(self.num_active or self._ready or self._waiting or self._finished)

    @torch.inference_mode()
    def step(self) -> list[FinishedGroup]:
        prefill = self._choose_prefill()
        if self.num_active or prefill:
            self._forward_and_sample(prefill)
        self._start_ready_rows()
        finished, self._finished = self._finished, []
        return finished

    # -- what a step computes ---------------------------------------------------------------

    def _choose_prefill(self) -> list[_Group]:
        """Return the next groups to prefill: none while enough sequences are ready to start."""
        rows = self._cache.num_rows
        free = rows - self.num_active
        if len(self._ready) >= free + max(1, rows // 16):
            return []
        wanted = free + max(1, rows // 4) - len(self._ready)
        groups: list[_Group] = []
        tokens = 0
        while self._waiting and wanted > 0:
            tokens += len(self._waiting[0].prompt_ids)
            if groups and tokens > MAX_PREFILL_TOKENS:
                break
            groups.append(_Group(self._waiting.popleft()))
            wanted -= groups[-1].request.num_generations
        return groups

    def _forward_and_sample(self, prefill: list[_Group]) -> None:
        n = self.num_active
        requests = [group.request for group in prefill]
        logits, prompts = self._forward([request.prompt_ids for request in requests])
        num_samples = [request.num_generations for request in requests]
        self.num_prompt_tokens += sum(len(request.prompt_ids) for request in requests)
        self.num_completion_tokens += n + sum(num_samples)
        starting: list[_Sequence] = []
        for group, prompt in zip(prefill, prompts, strict=True):
            group.prompt = prompt
            for i, limit in enumerate(group.request.limits(self.sampling)):
                uniforms = uniform_stream(self.sampling.seed, (*group.request.key, i), limit)
                starting.append(_Sequence(group, i, limit, uniforms))
        of_rows = self._rows["uniforms"][np.arange(n), self._rows["count"][:n]]
        uniforms = np.concatenate([of_rows, [s.uniforms[0] for s in starting]])
        if starting:  # the last prompt token predicts the first token of all G completions
            repeats = torch.tensor([1] * n + num_samples)
            logits = logits.repeat_interleave(repeats.to(logits.device), dim=0)
        drawn = sample(logits, torch.from_numpy(uniforms).to(logits.device), self.sampling)
        tokens, logprobs = (tensor.cpu().numpy() for tensor in drawn)
        for sequence, token, logprob in zip(starting, tokens[n:], logprobs[n:], strict=True):
            sequence.first_token, sequence.first_logprob = int(token), float(logprob)
        self._ready.extend(starting)
        self._advance(tokens[:n], logprobs[:n])

    def _forward(self, prompts: list[Any]) -> tuple[Tensor, list[PromptCache]]:
        """Return the logits of every active row and of every prompt's last token
        [n + len(prompts), V], and the prompts' keys and values."""
        n = self.num_active
        device = self.policy.device
        lengths = [len(prompt) for prompt in prompts]
        rows, active = np.arange(n), self._rows[:n]
        newest = active["tokens"][rows, active["count"] - 1]
        ids = np.concatenate([newest, *(np.asarray(p, dtype=np.int64) for p in prompts)])
        positions = np.concatenate([active["position"], *(np.arange(size) for size in lengths)])
        keep = np.concatenate([rows, n + np.cumsum(lengths, dtype=np.int64) - 1])
        positions_on_device = torch.from_numpy(positions).to(device)
        layout = StepLayout(
            self._cache,
            positions_on_device[:n],
            longest=int(active["position"].max(initial=-1)) + 1,
            prompt_lengths=lengths,
        )
        logits = self.policy.forward(
            torch.from_numpy(ids.astype(np.int64)).to(device),
            positions_on_device,
            layout,
            logits_at=torch.from_numpy(keep).to(device),
        )
        return logits, layout.prompts

    # -- rows ---------------------------------------------------------------------------------

    def _advance(self, tokens: Int32, logprobs: Float32) -> None:
        """Store the sampled token of every active row and end the rows that are complete."""
        rows, active = np.arange(self.num_active), self._rows[: self.num_active]
        active["tokens"][rows, active["count"]] = tokens
        active["logprobs"][rows, active["count"]] = logprobs
        active["count"] += 1
        active["position"] += 1
        stopped = np.isin(tokens, self._eos)
        if self._stop is not None:
            for row in np.flatnonzero(~stopped):
                so_far = active["tokens"][row, : active["count"][row]]
                stopped[row] = self._stop.is_complete(so_far)
        ended = np.flatnonzero(stopped | (active["count"] >= active["limit"]))
        for row in ended[::-1]:  # from the end, so that a row that moves has not ended
            self._end_row(int(row), is_stopped=bool(stopped[row]))

    def _end_row(self, row: int, *, is_stopped: bool) -> None:
        sequence, state = self._sequences[row], self._rows[row]
        assert sequence is not None
        tokens, logprobs = (state[name][: state["count"]] for name in ("tokens", "logprobs"))
        self._complete(sequence, tokens.copy(), logprobs.copy(), is_stopped=is_stopped)
        replacement = self._next_ready()
        if replacement is not None:
            self._start_rows([row], [replacement])
            return
        self.num_active = last = self.num_active - 1
        if row != last:
            self._cache.move_row(last, row, int(self._rows["position"][last]))
            self._rows[row] = self._rows[last]
            self._sequences[row] = self._sequences[last]
        self._sequences[last] = None

    def _next_ready(self) -> _Sequence | None:
        """Return the next sequence that needs a row: not one that ends with its first token."""
        while self._ready:
            sequence = self._ready.popleft()
            tokens = np.array([sequence.first_token], dtype=np.int32)
            is_stopped = sequence.first_token in self._eos
            if self._stop is not None and not is_stopped:
                is_stopped = self._stop.is_complete(tokens)
            if not is_stopped and sequence.limit > 1:
                return sequence
            sequence.group.mark_started(1)
            logprobs = np.array([sequence.first_logprob], dtype=np.float32)
            self._complete(sequence, tokens, logprobs, is_stopped=is_stopped)
        return None

    def _start_ready_rows(self) -> None:
        """Fill free rows, the sequences of one prompt together."""
        while self.num_active < self._cache.num_rows:
            batch: list[_Sequence] = []
            while len(batch) < self._cache.num_rows - self.num_active:
                sequence = self._next_ready()
                if sequence is None:
                    break
                if batch and sequence.group is not batch[0].group:
                    self._ready.appendleft(sequence)
                    break
                batch.append(sequence)
            if not batch:
                return
            first = self.num_active
            self.num_active += len(batch)
            self._start_rows(list(range(first, self.num_active)), batch)

    def _start_rows(self, rows: list[int], sequences: list[_Sequence]) -> None:
        """Start sequences of one group in `rows`."""
        group = sequences[0].group
        self._cache.start_rows(torch.tensor(rows, device=self.policy.device), group.prompt)
        for row, sequence in zip(rows, sequences, strict=True):
            self._sequences[row] = sequence
            state = self._rows[row]
            state["position"] = len(group.request.prompt_ids)
            state["count"], state["limit"] = 1, sequence.limit
            state["uniforms"][: sequence.limit] = sequence.uniforms
            state["tokens"][0] = sequence.first_token
            state["logprobs"][0] = sequence.first_logprob
        group.mark_started(len(rows))

    def _complete(
        self, sequence: _Sequence, tokens: Int32, logprobs: Float32, *, is_stopped: bool
    ) -> None:
        group = sequence.group
        completion = Completion(tokens, logprobs, "stop" if is_stopped else "length")
        group.completions[sequence.sample_index] = completion
        if len(group.completions) == group.request.num_generations:
            ordered = [group.completions[i] for i in range(group.request.num_generations)]
            self._finished.append(FinishedGroup(group.request, ordered))
