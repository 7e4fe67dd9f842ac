"""The embedded engine: transformers' own model code under a continuous-batching loop.

    submit ─► waiting groups ─► prompt prefilled once ─► sequences ready ─► rows ─► finished groups

One forward per step processes the newest token of every row in flight and, if few sequences are
ready to start, the prompts of the next groups: `[n decode tokens | prompt | prompt | ...]`. Decode
tokens attend to their row of the KV cache, prompts to themselves. A finished row is reused by the
next ready sequence in the same step; if there is none, the last row moves into its place, so that
finished rows cost nothing. Groups are served first come, first served. What a step computes depends
on the requests and the sampled tokens alone, never on a clock (docs/design.md, Invariants).

Shapes: S rows, n of them active, Hq query heads, Hkv key/value heads, D head size, M the longest
sequence that fits a row, L the longest active one, P prompt tokens, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from easyrl.engines import MAX_PREFILL_TOKENS
from easyrl.engines.base import FinishedGroup, GroupRequest, PolicyEngine, SamplingSettings
from easyrl.engines.sampling import sample, uniform_stream
from easyrl.model.policy import Policy
from easyrl.model.shared_prompt import AttentionSettings, SharedPrompt
from easyrl.types import Completion, Float32, Float64, Int32

PromptCache = list[tuple[Tensor, Tensor]]
"""Keys and values of one prompt, per layer 2 x [Hkv, P, D], kept until all completions of its group
have started from a copy of them."""

# -- KV cache and attention -----------------------------------------------------------------------


class KVCache:
    """Per layer 2 x [S, Hkv, M, D], allocated when a layer is first seen and never grown."""

    def __init__(self, num_rows: int, max_length: int) -> None:
        self.num_rows = num_rows
        self.max_length = max_length
        self.layers: list[tuple[Tensor, Tensor]] = []

    def allocate(self, key: Tensor, value: Tensor) -> None:
        """Add a layer with the shape and dtype of key and value: 2 x [T, Hkv, D]."""
        keys, values = (
            x.new_zeros(self.num_rows, x.shape[1], self.max_length, x.shape[2])
            for x in (key, value)
        )
        self.layers.append((keys, values))

    def start_row(self, row: int, prompt: PromptCache) -> None:
        """Copy the prompt into the row."""
        for layer, of_prompt in zip(self.layers, prompt, strict=True):
            for cache, kept in zip(layer, of_prompt, strict=True):
                cache[row, :, : kept.shape[1]] = kept

    def move_row(self, source: int, target: int, length: int) -> None:
        for layer in self.layers:
            for cache in layer:
                cache[target, :, :length] = cache[source, :, :length]


class StepLayout:
    """The attention layout of one engine step: n decode tokens, then whole prompts."""

    def __init__(
        self, cache: KVCache, positions: Tensor, longest: int, prompt_lengths: Sequence[int]
    ) -> None:
        """`positions` [n]: the position of each active row's new token; `longest`: L."""
        self.cache = cache
        self.prompts: list[PromptCache] = [[] for _ in prompt_lengths]
        self._num_decode = len(positions)
        self._positions = positions
        self._rows = torch.arange(self._num_decode, device=positions.device)
        self._longest = longest
        self._prompt_lengths = list(prompt_lengths)
        self._packed: SharedPrompt | None = None
        if prompt_lengths:
            groups = [(length, ()) for length in prompt_lengths]
            self._packed = SharedPrompt(groups, positions.device)
        self._biases: dict[tuple[int | None, int], Tensor] = {}

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings
    ) -> Tensor:
        if settings.layer == len(self.cache.layers):
            self.cache.allocate(key, value)
        n = self._num_decode
        outputs = []
        if n:
            outputs.append(self._decode(query[:n], key[:n], value[:n], settings))
        if self._packed is not None:
            parts = (torch.split(x[n:], self._prompt_lengths) for x in (key, value))
            for prompt, k, v in zip(self.prompts, *parts, strict=True):
                prompt.append((k.transpose(0, 1), v.transpose(0, 1)))
            outputs.append(self._packed.attend(query[n:], key[n:], value[n:], settings))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _decode(
        self, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings
    ) -> Tensor:
        keys, values = self.cache.layers[settings.layer]
        keys[self._rows, :, self._positions] = key
        values[self._rows, :, self._positions] = value
        n, length = self._num_decode, self._longest
        heads = keys.shape[1]
        keys = keys[:n, :, :length].flatten(0, 1)  # [n*Hkv, L, D], a view
        values = values[:n, :, :length].flatten(0, 1)
        # Query heads that share a key head take the dimension of query positions: no key is copied.
        grouped = query.reshape(n * heads, -1, query.shape[-1])  # [n*Hkv, Hq/Hkv, D]
        bias = self._bias(settings.sliding_window, heads, query.dtype)
        if settings.softcap is None:
            scores = torch.baddbmm(bias, grouped, keys.transpose(1, 2), alpha=settings.scaling)
        else:
            scores = torch.bmm(grouped, keys.transpose(1, 2)) * settings.scaling
            scores = torch.tanh(scores / settings.softcap) * settings.softcap + bias
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
        return torch.bmm(weights, values).view(n, -1, values.shape[-1])

    def _bias(self, window: int | None, heads: int, dtype: torch.dtype) -> Tensor:
        """Return [n*Hkv, 1, L]: 0 for visible keys, -inf for others. Shared by the layers."""
        key = (window, heads)
        if key not in self._biases:
            cells = torch.arange(self._longest, device=self._positions.device)[None, :]
            hidden = cells > self._positions[:, None]
            if window is not None:
                hidden |= cells <= self._positions[:, None] - window
            bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            bias.masked_fill_(hidden, float("-inf"))
            self._biases[key] = bias.repeat_interleave(heads, dim=0)[:, None, :]
        return self._biases[key]


# -- the engine -----------------------------------------------------------------------------------


@dataclass
class _Group:
    request: GroupRequest
    completions: dict[int, Completion] = field(default_factory=dict)


@dataclass(slots=True)
class _Sequence:
    group: _Group
    sample_index: int
    limit: int  # completion tokens at most
    uniforms: Float64  # [limit]
    prompt: PromptCache  # of the group; empty once the sequence has started
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

    def _choose_prefill(self) -> list[GroupRequest]:
        """Return the next prompts to prefill: none while enough sequences are ready to start."""
        rows = self._cache.num_rows
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
        logits, prompts = self._forward([request.prompt_ids for request in prefill])
        num_samples = [request.num_generations for request in prefill]
        self.num_prompt_tokens += sum(len(request.prompt_ids) for request in prefill)
        self.num_completion_tokens += n + sum(num_samples)
        starting: list[_Sequence] = []
        for request, prompt in zip(prefill, prompts, strict=True):
            group = _Group(request)
            for i, limit in enumerate(request.limits(self.sampling)):
                uniforms = uniform_stream(self.sampling.seed, (*request.key, i), limit)
                starting.append(_Sequence(group, i, limit, uniforms, prompt))
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
            self._start_row(row, replacement)
            return
        last = self.num_active - 1
        self.num_active = last
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
            logprobs = np.array([sequence.first_logprob], dtype=np.float32)
            self._complete(sequence, tokens, logprobs, is_stopped=is_stopped)
        return None

    def _start_ready_rows(self) -> None:
        """Fill free rows."""
        while self.num_active < self._cache.num_rows:
            sequence = self._next_ready()
            if sequence is None:
                return
            self.num_active += 1
            self._start_row(self.num_active - 1, sequence)

    def _start_row(self, row: int, sequence: _Sequence) -> None:
        self._cache.start_row(row, sequence.prompt)
        sequence.prompt = []  # its memory is free once all sequences of the group have started
        self._sequences[row] = sequence
        state = self._rows[row]
        state["position"] = len(sequence.group.request.prompt_ids)
        state["count"], state["limit"] = 1, sequence.limit
        state["uniforms"][: sequence.limit] = sequence.uniforms
        state["tokens"][0] = sequence.first_token
        state["logprobs"][0] = sequence.first_logprob

    def _complete(
        self, sequence: _Sequence, tokens: Int32, logprobs: Float32, *, is_stopped: bool
    ) -> None:
        group = sequence.group
        completion = Completion(tokens, logprobs, "stop" if is_stopped else "length")
        group.completions[sequence.sample_index] = completion
        if len(group.completions) == group.request.num_generations:
            ordered = [group.completions[i] for i in range(group.request.num_generations)]
            self._finished.append(FinishedGroup(group.request, ordered))
