"""The embedded engine: transformers' own model code under a continuous-batching loop.

    submit ─► waiting groups ─► prompt prefilled once ─► sequences ready ─► rows ─► finished groups

One forward per step processes the newest token of every row in flight and, if few sequences are
ready to start, the prompts of the next groups: `[n decode tokens | prompt | prompt | ...]`. Decode
tokens attend to their prompt and their row of the KV cache (`kv_cache`), prompts to themselves. The
active rows come first, the longest before the others; finished rows cost nothing and are reused by
the next ready sequences in the same step. Groups are served first come, first served. What a step
computes depends on the requests and the sampled tokens alone, never on a clock (docs/design.md,
Invariants).

Shapes: S rows, n of them active, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from easyrl.engines import MAX_PREFILL_TOKENS
from easyrl.engines.base import FinishedGroup, GroupRequest, PolicyEngine, SamplingSettings
from easyrl.engines.fused_decoder import fused_decoder
from easyrl.engines.kv_cache import KVCache, StepLayout, length_class
from easyrl.engines.sampling import sample, uniform_stream
from easyrl.model.policy import Policy
from easyrl.types import Completion, Float32, Float64, Int32, WeightPiece


@dataclass
class _Group:
    request: GroupRequest
    slot: int  # of its prompt in the KV cache
    completions: dict[int, Completion] = field(default_factory=dict)


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
        self._decoder = fused_decoder(policy, sampling.max_sequence_length)
        self._choose_forward()
        self.cache = KVCache(num_rows, sampling.max_prompt_length, sampling.max_completion_length)
        self._ready: deque[_Sequence] = deque()
        self._finished: list[FinishedGroup] = []
        # The first num_active rows are in flight.
        self.num_active = 0
        self._sequences: list[_Sequence | None] = [None] * num_rows
        longest = sampling.max_completion_length
        self._rows = np.zeros(
            num_rows,
            dtype=[
                ("position", np.int64),  # of the newest token in the sequence
                ("cell", np.int64),  # its place in the row of the KV cache
                ("slot", np.int64),  # of the prompt
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

    def load_weights(self, pieces: Iterable[WeightPiece]) -> None:
        super().load_weights(pieces)
        if self._decoder is not None:
            self._decoder.copy_weights()
        self._choose_forward()

    def _choose_forward(self) -> None:
        self._run_model: Callable[..., Tensor] = self.policy.forward
        if self._decoder is not None and self._decoder.equals(self.policy):
            self._run_model = self._decoder

    @torch.inference_mode()
    def step(self) -> list[FinishedGroup]:
        prefill = self._choose_prefill()
        if self.num_active or prefill:
            self._forward_and_sample(prefill)
        self._start_ready_rows()
        finished, self._finished = self._finished, []
        return finished

    # -- what a step computes ---------------------------------------------------------------

    def _choose_prefill(self) -> list[GroupRequest]:
        """Return the next prompts to prefill: none while enough sequences are ready to start."""
        rows = self.cache.num_rows
        free = rows - self.num_active
        if len(self._ready) >= free + max(1, rows // 16):
            return []
        wanted = free + max(1, rows // 4) - len(self._ready)
        chosen: list[GroupRequest] = []
        tokens = 0
        while self._waiting and wanted > 0:
            tokens += len(self._waiting[0].prompt_ids)
            if chosen and tokens > MAX_PREFILL_TOKENS:
                break
            chosen.append(self._waiting.popleft())
            wanted -= chosen[-1].num_generations
        return chosen

    def _forward_and_sample(self, prefill: list[GroupRequest]) -> None:
        n = self.num_active
        slots = self.cache.claim_slots([len(request.prompt_ids) for request in prefill])
        logits = self._forward([request.prompt_ids for request in prefill], slots)
        num_samples = [request.num_generations for request in prefill]
        self.num_prompt_tokens += sum(len(request.prompt_ids) for request in prefill)
        self.num_completion_tokens += n + sum(num_samples)
        self.num_steps += 1
        starting: list[_Sequence] = []
        for request, slot in zip(prefill, slots, strict=True):
            group = _Group(request, slot)
            for i, limit in enumerate(request.limits(self.sampling)):
                uniforms = uniform_stream(self.sampling.seed, (*request.key, i), limit)
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

    def _forward(self, prompts: list[Any], slots: list[int]) -> Tensor:
        """Return the logits of every active row and of every prompt's last token
        [n + len(prompts), V]. The prompts' keys and values go to these slots."""
        n = self.num_active
        device = self.policy.device
        lengths = [len(prompt) for prompt in prompts]
        rows, active = np.arange(n), self._rows[:n]
        newest = active["tokens"][rows, active["count"] - 1]
        ids = np.concatenate([newest, *(np.asarray(p, dtype=np.int64) for p in prompts)])
        positions = np.concatenate([active["position"], *(np.arange(size) for size in lengths)])
        keep = np.concatenate([rows, n + np.cumsum(lengths, dtype=np.int64) - 1])
        layout = StepLayout(self.cache, active, list(zip(slots, lengths, strict=True)), device)
        return self._run_model(
            torch.from_numpy(ids.astype(np.int64)).to(device),
            torch.from_numpy(positions).to(device),
            layout,
            torch.from_numpy(keep).to(device),
        )

    # -- rows ---------------------------------------------------------------------------------

    def _advance(self, tokens: Int32, logprobs: Float32) -> None:
        """Store the sampled token of every active row and end the rows that are complete."""
        rows, active = np.arange(self.num_active), self._rows[: self.num_active]
        active["tokens"][rows, active["count"]] = tokens
        active["logprobs"][rows, active["count"]] = logprobs
        active["count"] += 1
        active["position"] += 1
        active["cell"] += 1
        stopped = np.isin(tokens, self._eos)
        if self._stop is not None:
            for row in np.flatnonzero(~stopped):
                so_far = active["tokens"][row, : active["count"][row]]
                stopped[row] = self._stop.is_complete(so_far)
        ended = stopped | (active["count"] >= active["limit"])
        for row in np.flatnonzero(ended):
            self._end_row(int(row), is_stopped=bool(stopped[row]))
        self._arrange(~ended)

    def _end_row(self, row: int, *, is_stopped: bool) -> None:
        sequence, state = self._sequences[row], self._rows[row]
        assert sequence is not None
        tokens, logprobs = (state[name][: state["count"]] for name in ("tokens", "logprobs"))
        self._complete(sequence, tokens.copy(), logprobs.copy(), is_stopped=is_stopped)
        self._sequences[row] = None

    def _arrange(self, is_alive: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
        """Move rows so that the living ones come first, those of a higher length class before
        others. Only rows that are in the wrong place move."""
        classes = length_class(self._rows["cell"][: self.num_active] + 1)
        classes[~is_alive] = -1
        wanted = np.sort(classes[is_alive])[::-1]
        self.num_active = len(wanted)
        is_wrong = np.ones(len(classes), dtype=np.bool_)
        is_wrong[: len(wanted)] = classes[: len(wanted)] != wanted
        sources = np.flatnonzero(is_wrong & is_alive)
        if not len(sources):
            return
        sources = sources[np.argsort(-classes[sources], kind="stable")]
        targets = np.flatnonzero(is_wrong[: len(wanted)])
        self.cache.move_rows(sources, targets, int(self._rows["cell"][sources].max()))
        self._rows[targets] = self._rows[sources]
        for row, sequence in zip(targets, [self._sequences[row] for row in sources], strict=True):
            self._sequences[row] = sequence

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
            logprobs = np.array([sequence.first_logprob], dtype=np.float32)
            self._complete(sequence, tokens, logprobs, is_stopped=is_stopped)
        return None

    def _start_ready_rows(self) -> None:
        """Fill free rows."""
        first = self.num_active
        while self.num_active < self.cache.num_rows:
            sequence = self._next_ready()
            if sequence is None:
                break
            self._sequences[self.num_active] = sequence
            state = self._rows[self.num_active]
            state["position"] = len(sequence.group.request.prompt_ids)
            state["slot"] = sequence.group.slot
            state["count"], state["limit"] = 1, sequence.limit
            state["uniforms"][: sequence.limit] = sequence.uniforms
            state["tokens"][0] = sequence.first_token
            state["logprobs"][0] = sequence.first_logprob
            self.num_active += 1
        rows = np.arange(first, self.num_active)
        self._rows["cell"][rows] = self.cache.start_rows(rows, self._rows["slot"][rows])

    def _complete(
        self, sequence: _Sequence, tokens: Int32, logprobs: Float32, *, is_stopped: bool
    ) -> None:
        group = sequence.group
        completion = Completion(tokens, logprobs, "stop" if is_stopped else "length")
        group.completions[sequence.sample_index] = completion
        if len(group.completions) == group.request.num_generations:
            ordered = [group.completions[i] for i in range(group.request.num_generations)]
            self._finished.append(FinishedGroup(group.request, ordered))
            self.cache.release_slot(group.slot)
