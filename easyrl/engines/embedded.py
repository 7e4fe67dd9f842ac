"""The embedded engine: transformers' own model code under a continuous-batching loop.

    submit ─► waiting groups ─► prompt prefilled once ─► sequences ready ─► rows ─► finished groups

One forward per step processes the newest token of every row in flight and, if few sequences are
ready to start, the prompts of the next groups: `[n decode tokens | prompt | prompt | ...]`. Active
rows come first, the longest before the others; then suspended ones. Finished rows are reused in the
same step. When a suspended row is resumed, one step computes all tokens that were inserted.

Groups are served first come, first served. What a step computes depends on the requests and the
sampled tokens alone, never on a clock (docs/design.md, Invariants).

Shapes: S rows, n of them active, V tokens of the vocabulary.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from easyrl import devices
from easyrl.engines import CELLS, MAX_PREFILL_TOKENS, SLOT_STEP
from easyrl.engines.base import FinishedGroup, GroupRequest, PolicyEngine, Turn
from easyrl.engines.fused_decoder import RECHECKED_TOKENS, fused_decoder
from easyrl.engines.kv_cache import Ints, KVCache, StepLayout, length_class
from easyrl.engines.sampling import SamplingSettings, sample, uniform_stream
from easyrl.engines.step_graphs import PROMPT_STEP, StepGraphs
from easyrl.model.inputs import ModelInputs
from easyrl.model.policy import Policy
from easyrl.types import Completion, Float32, Float64, Int32, WeightPiece

ENDED, SUSPENDED, RESUMED, ACTIVE = -1, 0, 1, 2  # states of a row; the highest are kept first


@dataclass(slots=True, eq=False)
class _Sequence:
    request: GroupRequest
    slot: int  # of its prompt in the KV cache
    sample_index: int
    limit: int  # completion tokens at most
    uniforms: Float64  # [limit]
    first_token: int = 0
    first_logprob: float = 0.0
    inserted: Sequence[int] | None = None
    """Tokens to resume it with. A sequence that starts with inserted tokens has no first token."""
    max_turn_tokens: int | None = None  # of its next turn


class EmbeddedEngine(PolicyEngine):
    """Continuous batching over `num_rows` preallocated rows (see `engines.base.Engine`)."""

    def __init__(
        self,
        policy: Policy,
        sampling: SamplingSettings,
        *,
        num_rows: int,
        tokenizer: Any = None,
    ) -> None:
        super().__init__(policy, sampling, tokenizer)
        self._decoder = fused_decoder(policy, sampling.max_sequence_length)
        self._run_model: Callable[[ModelInputs], Tensor] = self._decoder or policy.forward
        self._ready: deque[_Sequence] = deque()
        # The first num_active rows are in flight; those behind them, up to num_held, are suspended.
        self.num_active = self.num_held = 0
        longest = sampling.max_completion_length
        has_graphs = devices.has_graphs(policy.device)
        steps = (PROMPT_STEP, SLOT_STEP) if has_graphs else (CELLS, 1)
        self.cache = KVCache(num_rows, sampling.max_prompt_length, longest, *steps)
        self.graphs = StepGraphs(policy, self.cache, sampling) if has_graphs else None
        self._sequences = np.full(num_rows, None)  # the _Sequence of each row that is held
        # `position` and `cell` are those of the newest token, `slot` is that of the prompt, `count`
        # and `turn_start` are completion tokens so far and before the current turn.
        integers = ("position", "cell", "slot", "count", "limit", "turn_start", "state")
        per_token = {"uniforms": "f8", "tokens": "i4", "logprobs": "f4", "is_sampled": "?"}
        arrays = [(name, kind, longest) for name, kind in per_token.items()]
        self._rows = np.zeros(num_rows, dtype=[*((name, "i8") for name in integers), *arrays])

    @property
    def has_work(self) -> bool:
        return bool(self.num_held or self._ready or self._waiting or self._finished)

    @property
    def can_step(self) -> bool:
        starts = (self._ready or self._waiting) and self.num_held < self.cache.num_rows
        return bool(self.num_active or starts or self._finished or self._rows_to_resume())

    def resume(self, turn: Turn, tokens: Sequence[int], max_turn_tokens: int | None = None) -> None:
        assert 0 < len(tokens) < turn.num_left
        sequence = self._sequences[self._row_of(turn)]
        sequence.inserted, sequence.max_turn_tokens = tokens, max_turn_tokens

    @torch.inference_mode()
    def end(self, turn: Turn, reason: Literal["stop", "length"]) -> None:
        self._end_row(self._row_of(turn), reason)
        self._arrange()

    def load_weights(self, pieces: Iterable[WeightPiece]) -> None:
        def arriving() -> Iterator[WeightPiece]:
            for piece in pieces:
                self.use_cores()  # the trainer is at work by now
                yield piece

        super().load_weights(arriving())
        self.cache.shrink()
        if self._decoder is not None:
            self._decoder.copy_weights(self.use_cores)
            is_equal = self._decoder.equals(self.policy, RECHECKED_TOKENS)
            self._run_model = self._decoder if is_equal else self.policy.forward

    @torch.inference_mode()
    def step(self) -> list[FinishedGroup]:
        prefill, fed = self._choose_prefill(), self._insert_tokens()
        if prefill or fed or (self.num_active and not self._decode_with_graphs()):
            self._forward_and_sample(fed, prefill)
        self._start_ready_rows()
        return self._take_finished()

    def _choose_prefill(self) -> list[GroupRequest]:
        """Return the next prompts to prefill: none while enough sequences are ready to start."""
        rows = self.cache.num_rows
        free = rows - self.num_held
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

    def _insert_tokens(self) -> list[Int32]:
        """Move the next rows to resume behind the active ones and insert their tokens; return
        these, each row's with the last sampled one before."""
        number = longest = 0
        for row in self._rows_to_resume():
            inserted = self._sequences[row].inserted or ()
            longest = max(longest, 1 + len(inserted))
            if number and (number + 1) * longest > MAX_PREFILL_TOKENS:
                break
            number += 1
            self._rows["state"][row] = RESUMED
        if number:
            self._arrange()
        fed = []
        for row in range(self.num_active, self.num_active + number):
            sequence, state = self._sequences[row], self._rows[row]
            inserted, sequence.inserted = sequence.inserted or (), None
            start = int(state["count"])
            for name in ("count", "position", "cell"):
                state[name] += len(inserted)
            state["turn_start"], state["state"] = state["count"], ACTIVE
            state["limit"] = _turn_limit(sequence, end := int(state["count"]))
            state["tokens"][start:end] = inserted
            state["logprobs"][start:end], state["is_sampled"][start:end] = 0.0, False
            fed.append(state["tokens"][max(0, start - 1) : end])
        return fed

    def _decode_with_graphs(self) -> bool:
        """Compute the next token of every active row; return False if graphs cannot."""
        if self.graphs is None:
            return False
        rows, active = np.arange(self.num_active), self._rows[: self.num_active]
        newest = active["tokens"][rows, active["count"] - 1]
        drawn = self.graphs.step(newest, active["uniforms"][rows, active["count"]], active)
        if drawn is None:
            return False
        self.num_completion_tokens += self.num_active
        self.num_steps += 1
        self._advance(*(tensor.cpu().numpy() for tensor in drawn))
        return True

    def _forward_and_sample(self, fed: list[Int32], prefill: list[GroupRequest]) -> None:
        slots = self.cache.claim_slots([len(request.prompt_ids) for request in prefill])
        logits = self._forward(fed, [request.prompt_ids for request in prefill], slots)
        self.num_active += len(fed)
        n = self.num_active
        num_samples = [0 if each.first_tokens else each.num_generations for each in prefill]
        self.num_prompt_tokens += sum(len(request.prompt_ids) for request in prefill)
        self.num_completion_tokens += n + sum(num_samples)
        self.num_steps += 1
        starting: list[_Sequence] = []
        for request, slot in zip(prefill, slots, strict=True):
            for i, limit in enumerate(request.limits(self.sampling)):
                uniforms = uniform_stream(self.sampling.seed, (*request.key, i), limit)
                starting.append(_Sequence(request, slot, i, limit, uniforms))
                starting[-1].max_turn_tokens = request.max_turn_tokens
                if request.first_tokens:
                    starting[-1].inserted = request.first_tokens[i]
        sampled = [sequence for sequence in starting if sequence.inserted is None]
        of_rows = self._rows["uniforms"][np.arange(n), self._rows["count"][:n]]
        uniforms = np.concatenate([of_rows, [s.uniforms[0] for s in sampled]])
        if starting:  # the last prompt token predicts the first token of all G completions
            repeats = torch.tensor([1] * n + num_samples)
            logits = logits.repeat_interleave(repeats.to(logits.device), dim=0)
        drawn = sample(logits, torch.from_numpy(uniforms).to(logits.device), self.sampling)
        tokens, logprobs = (tensor.cpu().numpy() for tensor in drawn)
        for sequence, token, logprob in zip(sampled, tokens[n:], logprobs[n:], strict=True):
            sequence.first_token, sequence.first_logprob = int(token), float(logprob)
        self._ready.extend(starting)
        self._advance(tokens[:n], logprobs[:n])

    def _forward(self, fed: list[Int32], prompts: list[Any], slots: list[int]) -> Tensor:
        """Return the logits of every active row, of the rows behind them that are resumed (`fed`:
        the tokens of each), and of every prompt's last token [n + len(fed) + len(prompts), V]."""
        n = self.num_active
        device = self.policy.device
        lengths = [len(prompt) for prompt in prompts]
        rows, active, resumed = np.arange(n), self._rows[:n], self._rows[n : n + len(fed)]
        newest = active["tokens"][rows, active["count"] - 1]
        ids = np.concatenate([newest, *fed, *(np.asarray(p, dtype=np.int64) for p in prompts)])
        spans = [
            np.arange(1 - len(tokens), 1) + last
            for tokens, last in zip(fed, resumed["position"], strict=True)
        ]
        spans += map(np.arange, lengths)
        positions = np.concatenate([active["position"], *spans])
        keep = np.concatenate([rows, n + np.cumsum([*map(len, spans)], dtype=np.int64) - 1])
        stored = list(zip(slots, lengths, strict=True))
        num_new = [*map(len, fed)]
        layout = StepLayout(self.cache, active, resumed, num_new, prompts=stored, device=device)
        inputs = ModelInputs(
            torch.from_numpy(ids.astype(np.int64)).to(device),
            torch.from_numpy(positions).to(device),
            layout,
            torch.from_numpy(keep).to(device),
        )
        return self._run_model(inputs)

    def _advance(self, tokens: Int32, logprobs: Float32) -> None:
        rows, active = np.arange(self.num_active), self._rows[: self.num_active]
        active["tokens"][rows, active["count"]] = tokens
        active["logprobs"][rows, active["count"]] = logprobs
        active["count"] += 1
        active["position"] += 1
        active["cell"] += 1
        self._stop_complete(rows)
        self._arrange()

    def _stop_complete(self, rows: Ints) -> None:
        counts, tokens = self._rows["count"][rows], self._rows["tokens"]
        stopped = np.isin(tokens[rows, counts - 1], self.end_tokens)
        if self._stop is not None:
            for i in np.flatnonzero(~stopped):
                stopped[i] = self._stop.is_complete(tokens[rows[i], : counts[i]])
        for i in np.flatnonzero(stopped | (counts >= self._rows["limit"][rows])):
            row = int(rows[i])
            request = self._sequences[row].request
            if request.has_turns and (stopped[i] or request.max_turn_tokens is not None):
                self._suspend_row(row, is_cut=not stopped[i])
            else:
                self._end_row(row, "stop" if stopped[i] else "length")

    def _suspend_row(self, row: int, *, is_cut: bool) -> None:
        sequence, state = self._sequences[row], self._rows[row]
        state["state"] = SUSPENDED
        tokens = state["tokens"][state["turn_start"] : state["count"]].copy()
        num_left = sequence.limit - int(state["count"])
        key, index = sequence.request.key, sequence.sample_index
        self._turns.append(Turn(key, index, tokens, num_left, is_cut))

    def _row_of(self, turn: Turn) -> int:
        suspended = enumerate(self._sequences[self.num_active : self.num_held], self.num_active)
        wanted = turn.key, turn.sample_index
        return next(row for row, of in suspended if (of.request.key, of.sample_index) == wanted)

    def _rows_to_resume(self) -> list[int]:
        suspended = range(self.num_active, self.num_held)
        return [row for row in suspended if self._sequences[row].inserted is not None]

    def _end_row(self, row: int, reason: Literal["stop", "length"]) -> None:
        sequence, state = self._sequences[row], self._rows[row]
        names = ("tokens", "logprobs", "is_sampled")
        tokens, logprobs, is_sampled = (state[name][: state["count"]].copy() for name in names)
        completion = Completion(tokens, logprobs, reason, is_sampled)
        if self._complete(sequence.request, sequence.sample_index, completion):
            self.cache.prompt_lengths[sequence.slot] = 0  # its slot is free
        self._sequences[row], state["state"] = None, ENDED

    def _arrange(self) -> None:
        """Move rows that are not in the order of their states and, if active, length classes."""
        held = self._rows[: self.num_held]
        ranks = held["state"] + (held["state"] == ACTIVE) * length_class(held["cell"] + 1)
        is_alive = ranks != ENDED
        wanted = np.sort(ranks[is_alive])[::-1]
        self.num_held = len(wanted)
        self.num_active = int((wanted >= ACTIVE).sum())
        is_wrong = np.ones(len(ranks), dtype=np.bool_)
        is_wrong[: len(wanted)] = ranks[: len(wanted)] != wanted
        sources = np.flatnonzero(is_wrong & is_alive)
        if not len(sources):
            return
        sources = sources[np.argsort(-ranks[sources], kind="stable")]
        targets = np.flatnonzero(is_wrong[: len(wanted)])
        self.cache.move_rows(sources, targets, int(held["cell"][sources].max()) + 1)
        self._rows[targets] = self._rows[sources]
        self._sequences[targets] = self._sequences[sources]

    def _start_ready_rows(self) -> None:
        """Fill free rows, also those of sequences that end with their first token."""
        while number := min(len(self._ready), self.cache.num_rows - self.num_held):
            rows = np.arange(self.num_held, self.num_held + number)
            self.num_held += number
            for row in rows.tolist():
                self._start_row(row, self._ready.popleft())
            free = self.cache.start_rows(rows, self._rows["slot"][rows])
            counts = self._rows["count"][rows]
            self._rows["cell"][rows] = free - 1 + counts
            self._stop_complete(rows[counts > 0])
            self._arrange()

    def _start_row(self, row: int, sequence: _Sequence) -> None:
        # Where the first tokens are inserted, the newest one is the prompt's last.
        count = 1 if sequence.inserted is None else 0
        state, self._sequences[row] = self._rows[row], sequence
        state["position"] = len(sequence.request.prompt_ids) - 1 + count
        state["slot"] = sequence.slot
        state["count"], state["limit"], state["turn_start"] = count, _turn_limit(sequence, 0), 0
        state["state"] = ACTIVE if count else SUSPENDED
        state["uniforms"][: sequence.limit] = sequence.uniforms
        state["tokens"][0] = sequence.first_token
        state["logprobs"][0] = sequence.first_logprob
        state["is_sampled"][:] = True


def _turn_limit(sequence: _Sequence, start: int) -> int:
    most = sequence.max_turn_tokens
    return sequence.limit if most is None else min(sequence.limit, start + most)
