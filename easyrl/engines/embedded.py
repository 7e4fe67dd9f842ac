"""The embedded engine: transformers' own model code under a continuous-batching loop.

    submit ─► waiting requests ─► prompt prefilled once ─► sequences ready ─► rows ─► finished

One forward per step processes the newest token of every row in flight and, if few sequences are
ready to start, the prompts of the next requests: `[n decode tokens | prompt | prompt | ...]`. A
prompt is a node of the cache's tree (`cache.nodes`). What several prompts begin with is a node
above theirs, computed once (`prefixes`). Of a request with a family, only the tokens that no
earlier one of the family has stored are computed. Layers with a state have one for each node and
row (`cache.states`).

A row holds the tokens of one sequence behind its nodes. Active rows come first, the longest before
the others; then suspended ones. Finished rows are reused in the same step. When a suspended row is
resumed, one step computes all tokens that were inserted.

The pictures of a prompt are encoded when it is computed, once for the group. Those that an agent or
a tool shows are encoded with the tokens around them, wherever these are stored (`shown`). In some
models the positions behind pictures are others than the number of tokens says: a row has this
`shift`.

Requests are served first come, first served. What a step computes depends on the requests and the
sampled tokens alone, never on a clock (docs/design.md, Invariants).

Shapes: S rows, n of them active, V tokens of the vocabulary.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from easyrl import devices
from easyrl.engines import CELLS, MAX_PREFILL_TOKENS, SLOT_STEP, started_sequences
from easyrl.engines.base import FinishedGroup, GroupRequest, PolicyEngine, Turn
from easyrl.engines.cache.attention import StepLayout, length_class
from easyrl.engines.cache.cache import MAX_LEVELS, NodeCache, StoredRow
from easyrl.engines.cache.nodes import Family, Node
from easyrl.engines.fused_decoder import RECHECKED_TOKENS, fused_decoder
from easyrl.engines.fused_delta_rule import fuse_steps
from easyrl.engines.prefixes import PromptPrefixes
from easyrl.engines.sampling import SamplingSettings, sample, uniform_stream
from easyrl.engines.shown import with_placeholders
from easyrl.engines.step_graphs import PROMPT_STEP, StepGraphs
from easyrl.layout.tree import Ints
from easyrl.model.inputs import ModelInputs
from easyrl.model.mixers.interface import Spans
from easyrl.model.policy import Policy
from easyrl.types import (
    Completion,
    Float32,
    Float64,
    Int32,
    PromptMedia,
    RowPictures,
    WeightPiece,
)

# States of a row. Rows with a higher state stand before the others.
ENDED = -1
SUSPENDED = 0
RESUMED = 1
ACTIVE = 2


@dataclass(slots=True, eq=False)
class _Sequence:
    """A completion that is being sampled: ready to start, or in a row."""

    request: GroupRequest
    node: Node | None
    """The node that it continues. Until it starts, that of its prompt. A row that starts with a
    copy of this node continues what is above the copied ones, or none."""
    sample_index: int
    limit: int  # completion tokens at most
    uniforms: Float64  # [limit]
    shift: int = 0
    """Added to the rope positions of the tokens behind a prompt, whose pictures may take fewer or
    more positions than tokens."""
    row_start: int = 0
    """Position of the token in the first cell of its row: the one behind `node`."""
    first_token: int = 0  # sampled when the prompt was computed
    first_logprob: float = 0.0
    inserted: Sequence[int] | None = None
    """Tokens to resume it with. A sequence that starts with inserted tokens has no first token."""
    max_turn_tokens: int | None = None  # of its next turn


class _Opened(NamedTuple):
    """A request whose sequences are to start, and the node that ends with its prompt."""

    request: GroupRequest
    node: Node


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
        if policy.has_states:
            fuse_steps(policy)
        self._prefixes = PromptPrefixes()
        self._added = list[Int32]()  # prompts that `_prefixes` does not have yet
        self._ready: deque[_Sequence] = deque()
        # The first `num_active` rows are in flight; those behind, up to `num_held`, are suspended.
        self.num_active = 0
        self.num_held = 0
        longest = sampling.max_completion_length
        # A replay that repeats a step would advance its states twice.
        has_graphs = devices.has_graphs(policy.device) and not policy.has_states
        self.cache = NodeCache(
            num_rows,
            sampling.max_prompt_length,
            longest,
            prompt_step=PROMPT_STEP if has_graphs else CELLS,
            slot_step=SLOT_STEP if has_graphs else 1,
            capacity=started_sequences(num_rows),
            has_states=policy.has_states,
        )
        self.graphs = StepGraphs(policy, self.cache, sampling) if has_graphs else None
        self._sequences = np.full(num_rows, None)  # the _Sequence of each row that is held
        # `position` and `cell` are those of the newest token; `slots` are those of the nodes that
        # the row continues; `count` and `turn_start` are completion tokens so far and before the
        # current turn.
        integers = ("position", "shift", "cell", "count", "limit", "turn_start", "state")
        per_token = {"uniforms": "f8", "tokens": "i4", "logprobs": "f4", "is_sampled": "?"}
        fields: list[Any] = [(name, "i8") for name in integers]
        fields.append(("slots", "i8", MAX_LEVELS))
        fields += [(name, kind, longest) for name, kind in per_token.items()]
        self._rows = np.zeros(num_rows, dtype=fields)

    @property
    def has_work(self) -> bool:
        return bool(self.num_held or self._ready or self._waiting or self._finished)

    @property
    def can_step(self) -> bool:
        starts = (self._ready or self._waiting) and self.num_held < self.cache.num_rows
        return bool(self.num_active or starts or self._finished or self._rows_to_resume())

    def submit(self, request: GroupRequest) -> None:
        super().submit(request)
        if _may_share(request):
            self._added.append(_ids_of(request))

    def resume(self, turn: Turn, tokens: Sequence[int], max_turn_tokens: int | None = None) -> None:
        assert 0 < len(tokens) < turn.num_left
        sequence = self._sequences[self._row_of(turn)]
        sequence.inserted = tokens
        sequence.max_turn_tokens = max_turn_tokens

    @torch.inference_mode()
    def end(
        self, turn: Turn, reason: Literal["stop", "length"], *, may_continue: bool = False
    ) -> None:
        row = self._row_of(turn)
        family = self._sequences[row].request.family
        if may_continue and family is not None:
            self.cache.keep(family, self._stored_row(row))
        self._end_row(row, reason)
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
        opened = self._open_requests()
        fed = self._insert_tokens()
        if opened or fed or (self.num_active and not self._decode_with_graphs()):
            self._forward_and_sample(fed, opened)
        self._start_ready_rows()
        finished = self._take_finished()
        if not self.has_work:
            # What the next requests find must not depend on those that have finished.
            self.cache.drop_unused()
            self._prefixes = PromptPrefixes()
        return finished

    def _open_requests(self) -> list[_Opened]:
        """Take the next requests and find or make the nodes of their prompts; none while enough
        sequences are ready to start."""
        num_rows = self.cache.num_rows
        num_free = num_rows - self.num_held
        if len(self._ready) >= num_free + max(1, num_rows // 16):
            return []
        num_wanted = started_sequences(num_rows) - self.num_held - len(self._ready)
        if self._added:
            self._prefixes.add(self._added)
            self._added = []
        chosen: list[GroupRequest] = []
        num_tokens = 0
        new_prefixes = set[bytes]()
        while self._waiting and num_wanted > 0:
            num_tokens += self._num_to_compute(self._waiting[0], new_prefixes)
            if chosen and num_tokens > MAX_PREFILL_TOKENS:
                break
            chosen.append(self._waiting.popleft())
            num_wanted -= chosen[-1].num_generations
        return self._with_nodes(chosen)

    def _num_to_compute(self, request: GroupRequest, new_prefixes: set[bytes]) -> int:
        """Return how many tokens of a prompt are not stored yet. `new_prefixes`: beginnings that
        the step computes for other prompts; those that it computes for this one are added."""
        ids = _ids_of(request)
        if request.family is not None:
            rows = self._stored_rows(request.family)
            return len(ids) - self.cache.num_found(request.family, ids, rows)
        num_found = 0
        node: Node | None = None
        for cut in self._cuts_of(request):
            prefix = ids[:cut]
            node = self.cache.tree.prefix(prefix, node)
            if node is not None or prefix.tobytes() in new_prefixes:
                num_found = cut
            new_prefixes.add(prefix.tobytes())
        return len(ids) - num_found

    def _cuts_of(self, request: GroupRequest) -> list[int]:
        """Return the lengths of the beginnings that a prompt without a family shares."""
        return self._prefixes.cuts_of(_ids_of(request)) if _may_share(request) else []

    def _with_nodes(self, requests: Sequence[GroupRequest]) -> list[_Opened]:
        alone = [request for request in requests if request.family is None]
        prompts = [_ids_of(request) for request in alone]
        cuts = [self._cuts_of(request) for request in alone]
        nodes_alone = iter(self.cache.add_prompts(prompts, cuts))
        opened = []
        for request in requests:
            if request.family is None:
                node = next(nodes_alone)
            else:
                node = self._node_in_family(request, request.family)
            for _ in range(request.num_generations):
                self.cache.tree.use(node)
            opened.append(_Opened(request, node))
        return opened

    def _node_in_family(self, request: GroupRequest, family: Family) -> Node:
        rows = self._stored_rows(family)
        node = self.cache.node_of(family, _ids_of(request), rows)
        for stored in rows:
            # The first tokens of a row may be in a node now.
            sequence = self._sequences[stored.number]
            num_moved = stored.start - sequence.row_start
            self._rows["cell"][stored.number] -= num_moved
            sequence.row_start = stored.start
            sequence.node = stored.parent
        for row in range(self.num_held):
            # Nodes above may have been cut.
            sequence = self._sequences[row]
            self._rows["slots"][row] = self.cache.slots_of(sequence.node)
        self._arrange()
        return node

    def _stored_rows(self, family: Family) -> list[StoredRow]:
        rows = []
        for row in range(self.num_held):
            if self._sequences[row].request.family == family:
                rows.append(self._stored_row(row))
        return rows

    def _stored_row(self, row: int) -> StoredRow:
        sequence = self._sequences[row]
        state = self._rows[row]
        sampled = state["tokens"][: state["count"]]
        prompt = _ids_of(sequence.request)
        ids = np.append(prompt, sampled)
        # The newest token is computed in the next step.
        num_stored = max(state["position"], sequence.row_start)
        return StoredRow(
            number=row,
            ids=ids[:num_stored],
            start=sequence.row_start,
            parent=sequence.node,
        )

    def _insert_tokens(self) -> list[Int32]:
        """Move the next rows to resume behind the active ones, and insert their tokens. Return the
        tokens to compute of each: the last sampled one, and the inserted ones."""
        num_resumed = self._choose_resumed()
        if num_resumed:
            self._arrange()
        fed = []
        for row in range(self.num_active, self.num_active + num_resumed):
            sequence = self._sequences[row]
            inserted = sequence.inserted
            sequence.inserted = None
            state = self._rows[row]
            start = int(state["count"])
            stop = start + len(inserted)
            for name in ("count", "position", "cell"):
                state[name] += len(inserted)
            state["turn_start"] = stop
            state["limit"] = _turn_limit(sequence, stop)
            state["state"] = ACTIVE
            state["tokens"][start:stop] = inserted
            state["logprobs"][start:stop] = 0.0
            state["is_sampled"][start:stop] = False
            # Before the first token of a completion stands the prompt, which has been computed.
            fed.append(state["tokens"][max(0, start - 1) : stop])
        return fed

    def _choose_resumed(self) -> int:
        """Mark the rows whose inserted tokens the next step computes; return their number. Padded
        to the longest, they are at most MAX_PREFILL_TOKENS, unless there is only one."""
        number = 0
        longest = 0
        for row in self._rows_to_resume():
            longest = max(longest, 1 + len(self._sequences[row].inserted))
            if number and (number + 1) * longest > MAX_PREFILL_TOKENS:
                break
            number += 1
            self._rows["state"][row] = RESUMED
        return number

    def _decode_with_graphs(self) -> bool:
        """Compute the next token of every active row; return False if graphs cannot."""
        if self.graphs is None:
            return False
        rows = np.arange(self.num_active)
        active = self._rows[: self.num_active]
        newest = active["tokens"][rows, active["count"] - 1]
        uniforms = active["uniforms"][rows, active["count"]]
        drawn = self.graphs.step(newest, uniforms, active)
        if drawn is None:
            return False
        tokens, logprobs = drawn
        self.num_completion_tokens += self.num_active
        self.num_steps += 1
        self._advance(tokens.cpu().numpy(), logprobs.cpu().numpy())
        return True

    def _forward_and_sample(self, fed: list[Int32], opened: list[_Opened]) -> None:
        """Compute the new tokens of rows and nodes; sample the next token of every active row, and
        the first one of the sequences that start with the opened requests."""
        new_nodes = [node for node in self.cache.tree.nodes if not node.is_stored]
        for node in new_nodes:
            self.num_prompt_tokens += len(node) - node.num_stored
        pictured = dict[Node, PromptMedia]()
        for request, node in opened:
            if request.media is not None:
                pictured[node] = request.media
        logits = self._forward(fed, new_nodes, pictured)
        self.num_steps += 1
        self.num_active += len(fed)
        starting = self._sequences_of(opened)
        sampled = [sequence for sequence in starting if sequence.inserted is None]
        if starting:
            logits = self._logits_of_sequences(logits, new_nodes, sampled)
        if len(logits):
            self._sample(logits, sampled)
        self._ready.extend(starting)

    def _sample(self, logits: Tensor, first_of: Sequence[_Sequence]) -> None:
        """Sample the next token of every active row, and the first one of these sequences. `logits`
        [n + number of sequences, V]"""
        n = self.num_active
        active = self._rows[:n]
        next_of_active = active["uniforms"][np.arange(n), active["count"]]
        first_uniforms = np.array([sequence.uniforms[0] for sequence in first_of])
        every_uniform = torch.from_numpy(np.concatenate([next_of_active, first_uniforms]))
        uniforms = every_uniform.to(logits.device)

        drawn_tokens, drawn_logprobs = sample(logits, uniforms, self.sampling)
        tokens = drawn_tokens.cpu().numpy()
        logprobs = drawn_logprobs.cpu().numpy()
        self.num_completion_tokens += len(tokens)
        for index, sequence in enumerate(first_of, start=n):
            sequence.first_token = int(tokens[index])
            sequence.first_logprob = float(logprobs[index])
        self._advance(tokens[:n], logprobs[:n])

    def _sequences_of(self, opened: Sequence[_Opened]) -> list[_Sequence]:
        sequences = []
        for request, node in opened:
            shift = 0
            if request.media is not None:
                assert self.policy.vision is not None
                shift = self.policy.vision.position_delta(request.prompt_ids, request.media.arrays)
            shift += self._shift_of(node.ids)
            for index, limit in enumerate(request.limits(self.sampling)):
                key = (*request.key, index)
                sequence = _Sequence(
                    request=request,
                    node=node,
                    sample_index=index,
                    limit=limit,
                    uniforms=uniform_stream(self.sampling.seed, key, limit),
                    shift=shift,
                    max_turn_tokens=request.max_turn_tokens,
                )
                if request.first_tokens:
                    sequence.inserted = request.first_tokens[index]
                sequences.append(sequence)
        return sequences

    def _logits_of_sequences(
        self, logits: Tensor, new_nodes: Sequence[Node], sampled: Sequence[_Sequence]
    ) -> Tensor:
        """Return the logits of the active rows, then of these sequences: the last token of a prompt
        predicts the first one of all that continue it. `logits`: of the rows, then of the prompts
        that were computed."""
        index_of = dict[Node, int]()
        ends = [node for node in new_nodes if node.is_prompt]
        for index, node in enumerate(ends, self.num_active):
            index_of[node] = index
            if node.family is not None:
                node.logits = logits[index].clone()
        indices = list(range(self.num_active))
        stored = list[Tensor]()  # logits of prompts that were computed before
        for sequence in sampled:
            prompt = sequence.node
            assert prompt is not None
            if prompt not in index_of:
                index_of[prompt] = len(logits) + len(stored)
                stored.append(prompt.logits)
            indices.append(index_of[prompt])
        if stored:
            logits = torch.cat([logits, torch.stack(stored)])
        wanted = torch.tensor(indices, dtype=torch.int64, device=logits.device)
        return logits.index_select(0, wanted)

    def _forward(
        self,
        fed: list[Int32],
        new_nodes: list[Node],
        pictured: Mapping[Node, PromptMedia],
    ) -> Tensor:
        """Store the tokens of new nodes, of which some are prompts with pictures.

        Return the logits of every active row, of the rows behind them that are resumed (`fed`: the
        tokens of each), and of the last token of every new node that ends a prompt:
        [n + len(fed) + number of prompts, V]."""
        n = self.num_active
        device = self.policy.device
        active = self._rows[:n]
        resumed = self._rows[n : n + len(fed)]
        prompts = [node for node in new_nodes if node.parent is None and node.num_stored == 0]
        others = [node for node in new_nodes if node not in prompts]
        behind_prefixes = [node for node in others if node.family is None]
        continuing = [node for node in others if node.family is not None]
        # The parts have the order of `StepLayout`: active rows, resumed rows, continuing nodes,
        # nodes behind prefixes, prompts.
        parts = _Tokens()
        newest = active["tokens"][np.arange(n), active["count"] - 1]
        logits_at = parts.add(newest, active["position"] + active["shift"]).tolist()
        of_resumed = (resumed["position"] + resumed["shift"]).tolist()
        pictures = list[RowPictures]()
        for index, (tokens, position) in enumerate(zip(fed, of_resumed, strict=True)):
            positions = np.arange(1 - len(tokens), 1) + position
            numbers = parts.add(tokens, positions)
            logits_at.append(numbers[-1])
            pictures += self._shown_among(tokens, numbers)
            resumed["shift"][index] += self._shift_of(tokens)
        last_of = dict[Node, int]()
        for node in (*continuing, *behind_prefixes, *prompts):
            first = node.start + node.num_stored
            positions = np.arange(first, node.stop) + self._shift_of(node.ids[:first])
            tokens = node.ids[first:]
            numbers = parts.add(tokens, positions)
            last_of[node] = numbers[-1]
            pictures += self._shown_among(tokens, numbers)
            if node in pictured:
                media = pictured[node]
                start = int(numbers[0])
                stop = start + len(numbers)
                pictures.append(RowPictures(media.pictures, start, stop, stop, media.arrays))
        logits_at += [last_of[node] for node in new_nodes if node.is_prompt]
        if not parts.number:
            return torch.zeros(0, self.policy.vocabulary_size, device=device)
        ids = parts.ids(self._placeholder_id)
        layout = StepLayout(
            self.cache,
            active,
            resumed,
            [len(tokens) for tokens in fed],
            continuing=continuing,
            behind_prefixes=behind_prefixes,
            prompts=prompts,
            spans=self._spans_of(ids, pictures),
            device=device,
        )
        for node in new_nodes:
            node.num_stored = len(node)
        inputs = ModelInputs(
            ids.to(device),
            parts.positions().to(device),
            layout,
            torch.tensor(logits_at, dtype=torch.int64, device=device),
            tuple(pictures),
        )
        if pictures:
            return self.policy.forward(inputs)
        return self._run_model(inputs)

    @property
    def _placeholder_id(self) -> int:
        """The token that the model gets for a part of a picture; 0 without pictures."""
        return 0 if self.policy.vision is None else self.policy.vision.placeholder_id

    def _shown_among(self, tokens: Ints, numbers: Ints) -> list[RowPictures]:
        """Return the pictures among new tokens, which have these numbers in the step. (Tokens of
        one row or node stand together, and nothing else behind them continues them.)"""
        found = list[RowPictures]()
        for shown in self.shown.find(tokens):
            start = int(numbers[shown.start])
            stop = int(numbers[0]) + shown.stop
            end = int(numbers[-1]) + 1
            found.append(RowPictures((shown.picture,), start, stop, end))
        return found

    def _shift_of(self, ids: Ints) -> int:
        """Return what the pictures among tokens add to the positions of the tokens behind them."""
        vision = self.policy.vision
        if vision is None or not vision.has_axes:
            return 0
        shift = 0
        for shown in self.shown.find(ids):
            own = with_placeholders(ids[shown.start : shown.stop], vision.placeholder_id)
            shift += vision.shown_delta(own, shown.picture)
        return shift

    def _spans_of(self, ids: Tensor, pictures: Sequence[RowPictures]) -> Spans | None:
        if self.policy.vision is None:
            return None
        return self.policy.vision.spans_of(ids.numpy(), pictures)

    def _advance(self, tokens: Int32, logprobs: Float32) -> None:
        """Append a sampled token to every active row: 2 x [n]."""
        rows = np.arange(self.num_active)
        active = self._rows[: self.num_active]
        active["tokens"][rows, active["count"]] = tokens
        active["logprobs"][rows, active["count"]] = logprobs
        for name in ("count", "position", "cell"):
            active[name] += 1
        self._stop_complete(rows)
        self._arrange()

    def _stop_complete(self, rows: Ints) -> None:
        """Suspend or end those of these rows whose newest token ends a turn or the completion."""
        counts = self._rows["count"][rows]
        tokens = self._rows["tokens"]
        newest = tokens[rows, counts - 1]
        is_stopped = np.isin(newest, self.end_tokens)
        if self._stop is not None:
            starts = self._rows["turn_start"][rows]
            for index in np.flatnonzero(~is_stopped):
                turn = tokens[rows[index], starts[index] : counts[index]]
                is_stopped[index] = self._stop.is_complete(turn)
        is_full = counts >= self._rows["limit"][rows]
        for index in np.flatnonzero(is_stopped | is_full):
            self._stop_row(int(rows[index]), is_cut=not is_stopped[index])

    def _stop_row(self, row: int, *, is_cut: bool) -> None:
        """Suspend a row at the end of a turn, else end it. `is_cut`: it has reached its limit."""
        request = self._sequences[row].request
        is_turn = not is_cut or request.max_turn_tokens is not None
        if request.has_turns and is_turn:
            self._suspend_row(row, is_cut=is_cut)
        else:
            self._end_row(row, "length" if is_cut else "stop")

    def _suspend_row(self, row: int, *, is_cut: bool) -> None:
        sequence = self._sequences[row]
        state = self._rows[row]
        state["state"] = SUSPENDED
        turn = Turn(
            key=sequence.request.key,
            sample_index=sequence.sample_index,
            token_ids=state["tokens"][state["turn_start"] : state["count"]].copy(),
            num_left=sequence.limit - int(state["count"]),
            is_cut=is_cut,
        )
        self._turns.append(turn)

    def _row_of(self, turn: Turn) -> int:
        """Return the row of a suspended sequence."""
        for row in range(self.num_active, self.num_held):
            sequence = self._sequences[row]
            is_same_group = sequence.request.key == turn.key
            if is_same_group and sequence.sample_index == turn.sample_index:
                return row
        raise ValueError(f"no suspended sequence {turn.sample_index} of group {turn.key}")

    def _rows_to_resume(self) -> list[int]:
        suspended = range(self.num_active, self.num_held)
        return [row for row in suspended if self._sequences[row].inserted is not None]

    def _end_row(self, row: int, reason: Literal["stop", "length"]) -> None:
        sequence = self._sequences[row]
        state = self._rows[row]
        count = state["count"]
        completion = Completion(
            state["tokens"][:count].copy(),
            state["logprobs"][:count].copy(),
            reason,
            state["is_sampled"][:count].copy(),
        )
        self._complete(sequence.request, sequence.sample_index, completion)
        self.cache.release(sequence.node)
        self._sequences[row] = None
        state["state"] = ENDED

    def _arrange(self) -> None:
        """Move rows so that they stand in the order of their states and, if active, of their length
        classes, the longest first. Only rows that do not stand among their like are moved."""
        held = self._rows[: self.num_held]
        ranks = held["state"].copy()
        is_active = held["state"] == ACTIVE
        active_cells = held["cell"][is_active]
        ranks[is_active] += length_class(active_cells + 1)
        is_alive = ranks != ENDED
        wanted = np.sort(ranks[is_alive])[::-1]  # the rank that each row should have
        num_alive = len(wanted)
        self.num_held = num_alive
        self.num_active = int((wanted >= ACTIVE).sum())

        is_wrong = np.ones(len(ranks), dtype=np.bool_)
        is_wrong[:num_alive] = ranks[:num_alive] != wanted
        sources = np.flatnonzero(is_wrong & is_alive)
        if not len(sources):
            return
        highest_first = np.argsort(-ranks[sources], kind="stable")
        sources = sources[highest_first]
        targets = np.flatnonzero(is_wrong[:num_alive])
        num_cells = int(held["cell"][sources].max()) + 1
        self.cache.move_rows(sources, targets, num_cells)
        self._rows[targets] = self._rows[sources]
        self._sequences[targets] = self._sequences[sources]

    def _start_ready_rows(self) -> None:
        """Fill free rows, also those of sequences that end with their first token."""
        while number := min(len(self._ready), self.cache.num_rows - self.num_held):
            rows = np.arange(self.num_held, self.num_held + number)
            self.num_held += number
            prompts = dict[int, Node]()  # by row
            copied = dict[int, Sequence[Node]]()
            for row in rows.tolist():
                sequence = self._ready.popleft()
                assert sequence.node is not None
                prompts[row] = sequence.node
                nodes = self._start_row(row, sequence, prompts[row])
                if nodes:
                    copied[row] = nodes
            self.cache.start_rows(prompts, copied)
            self._stop_complete(rows[self._rows["count"][rows] > 0])
            self._arrange()

    def _start_row(self, row: int, sequence: _Sequence, prompt: Node) -> Sequence[Node]:
        """Start a sequence behind its prompt's node. Return the nodes to copy to the row: that one,
        with others before it, or none."""
        copied = self.cache.copied(prompt, sequence.limit)
        sequence.row_start = prompt.stop
        if copied:
            first = copied[0]
            sequence.row_start = first.start
            sequence.node = first.parent
            self.cache.tree.use(sequence.node)
        # Where the first tokens are inserted, the newest one is the prompt's last.
        count = 1 if sequence.inserted is None else 0
        self._sequences[row] = sequence
        state = self._rows[row]
        state["position"] = len(sequence.request.prompt_ids) - 1 + count
        state["shift"] = sequence.shift
        state["cell"] = state["position"] - sequence.row_start
        state["slots"] = self.cache.slots_of(sequence.node)
        state["count"] = count
        state["limit"] = _turn_limit(sequence, 0)
        state["turn_start"] = 0
        state["state"] = ACTIVE if count else SUSPENDED
        state["uniforms"][: sequence.limit] = sequence.uniforms
        state["tokens"][0] = sequence.first_token
        state["logprobs"][0] = sequence.first_logprob
        state["is_sampled"][:] = True
        return copied


class _Tokens:
    """The tokens of a step, part by part."""

    def __init__(self) -> None:
        self.number = 0
        self._ids = list[Ints]()
        self._positions = list[Ints]()

    def add(self, ids: Ints, positions: Ints) -> Ints:
        """Append a part; return the numbers of its tokens in the step."""
        first = self.number
        self.number += len(ids)
        self._ids.append(ids)
        self._positions.append(positions)
        return np.arange(first, self.number)

    def ids(self, placeholder_id: int) -> Tensor:
        """Return the tokens, with this one for the parts of pictures."""
        ids = with_placeholders(np.concatenate(self._ids), placeholder_id)
        return torch.from_numpy(ids.astype(np.int64))

    def positions(self) -> Tensor:
        return torch.from_numpy(np.concatenate(self._positions))


def _ids_of(request: GroupRequest) -> Int32:
    return np.asarray(request.prompt_ids, dtype=np.int32)


def _may_share(request: GroupRequest) -> bool:
    """Whether the prompt may continue what prompts of other requests begin with. The placeholders
    of pictures are the same tokens for every picture."""
    return request.family is None and request.media is None


def _turn_limit(sequence: _Sequence, start: int) -> int:
    """Return the completion tokens with which a turn that starts behind `start` is cut off."""
    most = sequence.max_turn_tokens
    return sequence.limit if most is None else min(sequence.limit, start + most)
