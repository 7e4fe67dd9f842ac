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
from easyrl.engines.base import (
    FinishedGroup,
    GroupRequest,
    PolicyEngine,
    SamplingSettings,
    check_request,
)
from easyrl.engines.kv_cache import KVCache, PromptCache, StepLayout
from easyrl.engines.sampling import StopStrings, sample, uniform_stream
from easyrl.model.policy import Policy
from easyrl.types import Completion


@dataclass
class _Group:
    request: GroupRequest
    prompt: PromptCache = field(default_factory=PromptCache)
    num_started: int = 0
    completions: dict[int, Completion] = field(default_factory=dict)


@dataclass(slots=True)
class _Sequence:
    group: _Group
    sample_index: int
    limit: int  # completion tokens at most
    uniforms: np.ndarray[Any, np.dtype[np.float64]]  # [limit]
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
        """`tokenizer` is needed for stop strings."""
        super().__init__()
        self.policy = policy
        self.sampling = sampling
        self._stop = StopStrings(tokenizer, sampling.stop) if sampling.stop else None
        self.num_prompt_tokens = 0
        self.num_completion_tokens = 0
        self._eos = np.asarray([] if ignore_eos else policy.eos_token_ids, dtype=np.int64)
        self._cache = KVCache(num_rows, sampling.max_sequence_length)
        self._waiting: deque[GroupRequest] = deque()
        self._ready: deque[_Sequence] = deque()
        self._finished: list[FinishedGroup] = []
        # State of each row; the first _num_active rows are in flight.
        self._num_active = 0
        self._sequences: list[_Sequence | None] = [None] * num_rows
        self._positions = np.zeros(num_rows, dtype=np.int64)  # of the newest token
        self._counts = np.zeros(num_rows, dtype=np.int64)  # completion tokens so far
        self._limits = np.zeros(num_rows, dtype=np.int64)
        shape = (num_rows, sampling.max_completion_length)
        self._uniforms = np.zeros(shape, dtype=np.float64)
        self._tokens = np.zeros(shape, dtype=np.int32)
        self._logprobs = np.zeros(shape, dtype=np.float32)
        self._row_state: list[np.ndarray[Any, Any]] = [
            self._positions,
            self._counts,
            self._limits,
            self._uniforms,
            self._tokens,
            self._logprobs,
        ]

    @property
    def has_work(self) -> bool:
        return bool(self._num_active or self._ready or self._waiting or self._finished)

    @property
    def num_active(self) -> int:
        """Number of sequences in flight."""
        return self._num_active

    def submit(self, request: GroupRequest) -> None:
        check_request(request, self.sampling)
        self._waiting.append(request)

    @torch.inference_mode()
    def step(self) -> list[FinishedGroup]:
        prefill = self._choose_prefill()
        if self._num_active or prefill:
            self._forward_and_sample(prefill)
        self._start_ready_rows()
        finished, self._finished = self._finished, []
        return finished

    # -- what a step computes ---------------------------------------------------------------

    def _choose_prefill(self) -> list[_Group]:
        """Return the next groups to prefill: none while enough sequences are ready to start."""
        rows = self._cache.num_rows
        free = rows - self._num_active
        if len(self._ready) >= free + max(1, rows // 16) or not self._waiting:
            return []
        wanted = free + max(1, rows // 4) - len(self._ready)
        groups: list[_Group] = []
        tokens = 0
        while self._waiting and wanted > 0:
            request = self._waiting[0]
            tokens += len(request.prompt_ids)
            if groups and tokens > MAX_PREFILL_TOKENS:
                break
            groups.append(_Group(self._waiting.popleft()))
            wanted -= request.num_generations
        return groups

    def _forward_and_sample(self, prefill: list[_Group]) -> None:
        n = self._num_active
        logits, prompts = self._forward([group.request.prompt_ids for group in prefill])
        self.num_prompt_tokens += sum(len(group.request.prompt_ids) for group in prefill)
        self.num_completion_tokens += n + sum(g.request.num_generations for g in prefill)
        starting: list[_Sequence] = []
        for group, prompt in zip(prefill, prompts, strict=True):
            group.prompt = prompt
            starting += self._new_sequences(group)
        counts = self._counts[:n]
        uniforms = np.concatenate(
            [self._uniforms[np.arange(n), counts], [s.uniforms[0] for s in starting]]
        )
        if starting:  # the last prompt token predicts the first token of all G completions
            repeats = torch.tensor([1] * n + [g.request.num_generations for g in prefill])
            logits = logits.repeat_interleave(repeats.to(logits.device), dim=0)
        tokens, logprobs = sample(
            logits, torch.from_numpy(uniforms).to(logits.device), self.sampling
        )
        new_tokens, new_logprobs = tokens.cpu().numpy(), logprobs.cpu().numpy()
        for sequence, token, logprob in zip(
            starting, new_tokens[n:], new_logprobs[n:], strict=True
        ):
            sequence.first_token, sequence.first_logprob = int(token), float(logprob)
        self._ready.extend(starting)
        self._advance(new_tokens[:n], new_logprobs[:n])

    def _forward(self, prompts: list[Any]) -> tuple[Tensor, list[PromptCache]]:
        """Return the logits of every active row and of every prompt's last token
        [n + len(prompts), V], and the prompts' keys and values."""
        n = self._num_active
        device = self.policy.device
        lengths = [len(prompt) for prompt in prompts]
        rows = np.arange(n)
        newest = self._tokens[rows, self._counts[:n] - 1]
        positions = np.concatenate([self._positions[:n], *(np.arange(size) for size in lengths)])
        ids = np.concatenate([newest, *(np.asarray(p, dtype=np.int64) for p in prompts)])
        keep = np.concatenate([rows, n + np.cumsum(lengths, dtype=np.int64) - 1])
        positions_on_device = torch.from_numpy(positions).to(device)
        layout = StepLayout(
            self._cache,
            positions_on_device[:n],
            longest=int(self._positions[:n].max(initial=-1)) + 1,
            prompt_lengths=lengths,
        )
        logits = self.policy.forward(
            torch.from_numpy(ids.astype(np.int64)).to(device),
            positions_on_device,
            layout,
            logits_at=torch.from_numpy(keep).to(device),
        )
        return logits, layout.prompts

    def _new_sequences(self, group: _Group) -> list[_Sequence]:
        request = group.request
        seed = self.sampling.seed
        return [
            _Sequence(group, i, limit, uniform_stream(seed, (*request.key, i), limit))
            for i, limit in enumerate(request.limits(self.sampling))
        ]

    # -- rows ---------------------------------------------------------------------------------

    def _advance(self, tokens: np.ndarray[Any, Any], logprobs: np.ndarray[Any, Any]) -> None:
        """Store the sampled token of every active row and end the rows that are complete."""
        n = self._num_active
        rows = np.arange(n)
        counts = self._counts[:n]
        self._tokens[rows, counts] = tokens
        self._logprobs[rows, counts] = logprobs
        counts += 1
        self._positions[:n] += 1
        stopped = np.isin(tokens, self._eos)
        if self._stop is not None:
            for row in np.flatnonzero(~stopped):
                stopped[row] = self._stop.is_complete(self._tokens[row, : counts[row]])
        ended = np.flatnonzero(stopped | (counts >= self._limits[:n]))
        for row in ended[::-1]:  # from the end: a row that moves is then never one that has ended
            self._end_row(int(row), stopped=bool(stopped[row]))

    def _end_row(self, row: int, *, stopped: bool) -> None:
        sequence, count = self._sequences[row], self._counts[row]
        assert sequence is not None
        self._complete(
            sequence,
            Completion(
                self._tokens[row, :count].copy(),
                self._logprobs[row, :count].copy(),
                "stop" if stopped else "length",
            ),
        )
        replacement = self._next_ready()
        if replacement is not None:
            self._start_rows([row], [replacement])
            return
        last = self._num_active - 1
        if row != last:
            self._cache.move_row(last, row, int(self._positions[last]))
            for state in self._row_state:
                state[row] = state[last]
            self._sequences[row] = self._sequences[last]
        self._sequences[last] = None
        self._num_active = last

    def _next_ready(self) -> _Sequence | None:
        """Return the next sequence that needs a row: not one that ends with its first token."""
        while self._ready:
            sequence = self._ready.popleft()
            tokens = np.array([sequence.first_token], dtype=np.int32)
            stopped = sequence.first_token in self._eos
            if self._stop is not None and not stopped:
                stopped = self._stop.is_complete(tokens)
            if not stopped and sequence.limit > 1:
                return sequence
            self._mark_started(sequence.group, 1)
            self._complete(
                sequence,
                Completion(
                    tokens,
                    np.array([sequence.first_logprob], dtype=np.float32),
                    "stop" if stopped else "length",
                ),
            )
        return None

    def _start_ready_rows(self) -> None:
        """Fill free rows, the sequences of one prompt together."""
        while self._num_active < self._cache.num_rows:
            batch: list[_Sequence] = []
            while len(batch) < self._cache.num_rows - self._num_active:
                sequence = self._next_ready()
                if sequence is None:
                    break
                if batch and sequence.group is not batch[0].group:
                    self._ready.appendleft(sequence)
                    break
                batch.append(sequence)
            if not batch:
                return
            first = self._num_active
            self._num_active += len(batch)
            self._start_rows(list(range(first, self._num_active)), batch)

    def _start_rows(self, rows: list[int], sequences: list[_Sequence]) -> None:
        """Start sequences of one group in `rows`."""
        group = sequences[0].group
        self._cache.start_rows(torch.tensor(rows, device=self.policy.device), group.prompt)
        for row, sequence in zip(rows, sequences, strict=True):
            self._sequences[row] = sequence
            self._positions[row] = len(group.request.prompt_ids)
            self._counts[row] = 1
            self._limits[row] = sequence.limit
            self._uniforms[row, : sequence.limit] = sequence.uniforms
            self._tokens[row, 0] = sequence.first_token
            self._logprobs[row, 0] = sequence.first_logprob
        self._mark_started(group, len(rows))

    def _mark_started(self, group: _Group, count: int) -> None:
        """Free the prompt's keys and values once all of the group's sequences have started."""
        group.num_started += count
        if group.num_started == group.request.num_generations:
            group.prompt = PromptCache()

    def _complete(self, sequence: _Sequence, completion: Completion) -> None:
        group = sequence.group
        group.completions[sequence.sample_index] = completion
        if len(group.completions) == group.request.num_generations:
            ordered = [group.completions[i] for i in range(group.request.num_generations)]
            self._finished.append(FinishedGroup(group.request, ordered))
