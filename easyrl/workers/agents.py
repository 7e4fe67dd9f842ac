"""Episodes of agents: requests of an endpoint become sequences of the engine, and these a group.

    submit(prompt) ─► the agent runs (`host`) ─► request ─► engine.submit or engine.resume
                            ▲                                            │
                            └───────── answer ◄──────── turn ◄───────────┘
    all episodes of a group have ended ─► their sequences ─► completions, as trees of segments

A request whose messages begin as a conversation that was answered begins with its tokens, and what
is new is rendered behind them. A sequence that is suspended exactly there is resumed. Otherwise a
new one begins: a branch. Suspended sequences are ended, the oldest first, where others need their
rows.

A new sequence shares the longest beginning that its prompt has in common with the group's prompt or
an earlier sequence of its episode. So every sampled token is in one segment.

In deterministic runs requests are served at barriers: when no sequence can be continued and every
episode waits for one answer or has ended, all are served, in a fixed order.
"""

import hashlib
import json
import secrets
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from easyrl.agents.endpoint import Answer, ApiError, Choice, Endpoint, Request, message_of
from easyrl.config import Config, ConfigError
from easyrl.config.rollout import MAX_BRANCHES, SamplingChoice
from easyrl.data.chat import render_prompt, text_decoder
from easyrl.engines.base import Engine, FinishedGroup, GroupRequest, Turn
from easyrl.environments.conversation import Conversations
from easyrl.environments.loading import Interface
from easyrl.environments.pool import FAILURES, CallFailed, EnvironmentPool, HostKilled, row_of
from easyrl.rewards.loading import reward_specs
from easyrl.rewards.worker import Call, Scored
from easyrl.types import Completion, Messages, Prompt

Key = tuple[int, ...]
PREFIX_TOKENS = 256  # before an answer, that reading its calls may need


@dataclass(slots=True, eq=False)
class _Sequence:
    """A sequence of the engine: what it shares with others, then its own tokens."""

    episode: "_Episode"
    ids: list[int]  # all that is known: prompt, inserted and sampled tokens
    parent: "_Sequence | None"  # of which it shares `num_shared` tokens; None: the group's prompt
    num_shared: int
    num_prompt: int  # tokens that the engine got as its prompt
    request: Request | None = None  # that it samples an answer for
    num_reserved: int = 0  # most tokens that it may sample now
    turn: Turn | None = None  # since it is suspended
    completion: Completion | None = None  # since it has ended


@dataclass(slots=True, eq=False)
class _Episode:
    group: "_Group"
    number: int
    key: str  # at the endpoint
    future: Future[Any]  # of the agent's result
    sequences: list[_Sequence] = field(default_factory=list)
    waiting: deque[Request] = field(default_factory=deque)
    answering: dict[Request, dict[_Sequence, Choice | None]] = field(default_factory=dict)
    recorded: dict[bytes, tuple[_Sequence, int]] = field(default_factory=dict)
    """By the digest of a conversation that ends with an answer: its tokens are the first ones of
    this sequence, up to this number."""
    texts: list[tuple[str, _Sequence, int]] = field(default_factory=list)  # text completions
    conversations: dict[bytes, Messages] = field(default_factory=dict)  # that are not continued
    num_requests: int = 0
    num_tokens: int = 0  # distinct ones behind the group's prompt
    num_reserved: int = 0  # tokens that may be sampled now
    num_calls: int = 0
    limit: str = ""  # that a request was refused for
    has_ended: bool = False
    value: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    error: str = ""

    @property
    def is_waiting(self) -> bool:
        """Whether the agent's next step depends on this worker."""
        return self.future.done() or bool(self.waiting)


@dataclass(slots=True, eq=False)
class _Group:
    key: Key
    prompt: Prompt
    num_generations: int
    episodes: list[_Episode] = field(default_factory=list)
    started: float = 0.0
    num_starts: int = 0
    prompt_ids: list[int] | None = None  # since the first request
    num_open: int = 0  # sequences that have not ended
    error: Exception | None = None
    is_finished: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether all of it has ended, and it is not finished yet."""
        is_over = all(each.has_ended for each in self.episodes) and not self.num_open
        return is_over and not self.is_finished


class AgentEpisodes:
    """The open groups of a rollout worker with an agent: the interface of `episodes.Episodes`."""

    def __init__(
        self,
        config: Config,
        sources: Mapping[str, str],
        *,
        max_open_groups: int,
        sampling: SamplingChoice,
    ) -> None:
        """`sources`: of the user's files; `max_open_groups`: generated at a time."""
        self._config, self._max_open, self._sampling = config, max_open_groups, sampling
        self._num_rows = max_open_groups * sampling.num_samples
        self.pool = EnvironmentPool(config, sources)
        stop, of_run = config.rollout.stop, (SamplingChoice.of_training(config.rollout), sampling)
        allowed: dict[str, tuple[Any, ...]] = {
            name: tuple(getattr(each, name) for each in of_run)
            for name in ("temperature", "top_p", "top_k")
        }
        allowed["top_k"] += () if sampling.top_k else (-1,)
        allowed["stop"] = (stop, *stop) if len(stop) == 1 else (stop,)
        allowed |= dict.fromkeys(("frequency_penalty", "presence_penalty", "min_p"), (0,))
        allowed |= {"repetition_penalty": (1,), "seed": ()}
        ignores = config.rollout.agent_sampling == "ignore"
        self.endpoint = Endpoint(allowed, ignores_sampling=ignores)
        self._queue: deque[_Group] = deque()
        self._groups: dict[Key, _Group] = {}
        self._episodes: dict[str, _Episode] = {}  # that are going on, by their keys, in order
        self._sequences: dict[tuple[Key, int], _Sequence] = {}  # that have not ended
        self._suspended: dict[_Sequence, None] = {}  # in order
        self._new: dict[tuple[Key, tuple[int, ...], int], list[_Sequence]] = {}
        """Not given to the engine yet, by group, prompt and most tokens: one request for each."""
        self._num_open = 0  # groups that have not finished
        self._num_live = 0  # sequences that the engine has
        self._replaced: set[str] = set()

    def bind(self, engine: Engine, tokenizer: Any) -> None:
        """Use this engine, once the agent is loaded. Raises ConfigError."""
        self._engine, self._tokenizer = engine, tokenizer
        self.pool.loaded()
        self._decode = text_decoder(tokenizer)
        self._conversations = lru_cache(64)(self._make_conversations)
        self._is_regular = lru_cache(64)(self._check_suffixes)

    def _make_conversations(self, tools: str) -> Conversations:
        interface, ends = Interface(json.loads(tools), False, False), self._engine.end_tokens
        return Conversations(self._config, self._tokenizer, interface, ends, is_checked=False)

    def _check_suffixes(self, tools: str, role: str) -> bool:
        """Return whether what the template writes behind an answer is the same in any turn."""
        try:
            self._conversations(tools).check(role)
        except ConfigError:
            return False
        return True

    @property
    def has_work(self) -> bool:
        return bool(self._queue or self._groups)

    @property
    def wakers(self) -> list[Any]:
        """Readable when `advance` has something to do."""
        return [*self.pool.connections, self.endpoint.fileno()]

    def close(self) -> None:
        """End the agents and the endpoint."""
        self.pool.close()
        self.endpoint.close()

    def submit(self, key: Key, prompt: Prompt, num_generations: int) -> None:
        self._queue.append(_Group(key, prompt, num_generations))

    def take(self, finished: list[FinishedGroup]) -> list[FinishedGroup]:
        """Take what the engine has finished: sequences, of which `advance` makes groups."""
        for request, completions in finished:
            for index, completion in enumerate(completions):
                sequence = self._sequences.pop((request.key, index))
                sequence.completion = completion
                sequence.episode.group.num_open -= 1
        return []

    def advance(self) -> list[FinishedGroup]:
        """Exchange requests and answers, start groups; return those that have finished."""
        for turn in self._engine.take_turns():
            self._receive(turn)
        self.pool.poll()
        for request in self.endpoint.take():
            self._accept(request)
        episodes = list(self._episodes.values())
        is_barrier = not self._engine.can_step and all(each.is_waiting for each in episodes)
        if is_barrier or not self._config.runtime.deterministic:
            for episode in episodes:
                if episode.future.done():
                    self._end(episode)
                elif episode.waiting:
                    self._serve_waiting(episode)
            while self._queue and self._num_open < self._max_open:
                group = self._queue.popleft()
                self._groups[group.key] = group
                self._num_open += 1
                self._start(group)
        self._submit_new()
        while self._suspended and self._num_live > self._num_rows:
            self._end_sequence(next(iter(self._suspended)))
        return [self._finished(each) for each in self._groups.values() if each.is_complete]

    # -- the agent --------------------------------------------------------------------------------

    def _start(self, group: _Group) -> None:
        group.started, group.prompt_ids = time.monotonic(), None
        group.num_starts += 1
        keys = [secrets.token_urlsafe(24) for _ in range(group.num_generations)]
        assert self.endpoint.keys is not None
        self.endpoint.keys.update(keys)
        row = row_of(group.prompt, "")
        futures = self.pool.run_agents(group.key, row, self.endpoint.url, keys)
        group.episodes = [
            _Episode(group, n, *each) for n, each in enumerate(zip(keys, futures, strict=True))
        ]
        self._episodes |= {each.key: each for each in group.episodes}

    def _end(self, episode: _Episode) -> None:
        """End an episode whose agent has returned or failed."""
        group = episode.group
        if episode.has_ended:
            return
        self._close(episode)
        try:
            episode.value, episode.parts = episode.future.result()
        except HostKilled as error:
            if group.num_starts > 1 or self._config.runtime.deterministic:
                group.error = error
                return
            for each in group.episodes:
                self._close(each)
            self._start(group)
        except CallFailed as error:
            episode.error = "" if episode.limit else str(error)
        except TimeoutError:
            episode.limit = "time"
        except FAILURES as error:
            group.error = error

    def _close(self, episode: _Episode) -> None:
        """Refuse further requests of an episode, and end its sequences."""
        if episode.has_ended:
            return
        episode.has_ended = True
        del self._episodes[episode.key]
        assert self.endpoint.keys is not None
        self.endpoint.keys.discard(episode.key)
        for request in [*episode.waiting, *episode.answering]:
            request.answer.set_exception(ENDED)
        for sequence in episode.sequences:
            if sequence in self._suspended:
                self._end_sequence(sequence)

    def _end_sequence(self, sequence: _Sequence) -> None:
        assert sequence.turn is not None
        self._suspended.pop(sequence, None)
        self._engine.end(sequence.turn, "stop")
        self._num_live -= 1

    # -- requests ---------------------------------------------------------------------------------

    def _accept(self, request: Request) -> None:
        for name in sorted(request.replaced - self._replaced):
            self.pool.report(f"the agent's {name} is replaced by the run's")
        self._replaced |= request.replaced
        episode = self._episodes.get(request.key)
        if episode is None:
            request.answer.set_exception(ENDED)
        elif self._config.runtime.deterministic and (episode.waiting or episode.answering):
            problem = "runtime.deterministic: expected one request of an episode at a time"
            request.answer.set_exception(ApiError(problem))
        else:
            episode.waiting.append(request)

    def _serve_waiting(self, episode: _Episode) -> None:
        while episode.waiting:
            request = episode.waiting[0]
            try:
                if not self._serve(episode, request):
                    return
            except (ApiError, ConfigError) as error:
                shown = error if isinstance(error, ApiError) else ApiError(str(error))
                request.answer.set_exception(shown)
            episode.waiting.popleft()

    def _serve(self, episode: _Episode, request: Request) -> bool:
        """Give a request to the engine; return False while other requests of the episode may use
        the tokens that it needs. Raises ApiError or ConfigError where it is refused."""
        group, rollout, num = episode.group, self._config.rollout, request.num_choices
        left = self._sampling.max_completion_length - episode.num_tokens - episode.num_reserved
        wanted = request.max_tokens
        if episode.num_reserved and (wanted is None or num * wanted > left):
            return False
        limit = rollout.episode_timeout_seconds
        if episode.num_requests >= rollout.max_turns:
            episode.limit = "max_turns"
            raise ApiError(f"rollout.max_turns: an episode has {rollout.max_turns} requests")
        if limit is not None and time.monotonic() > group.started + limit:
            episode.limit = "time"
            raise ApiError(f"rollout.episode_timeout_seconds: the episode took over {limit:g} s")
        ids = self._ids(episode, request)
        if group.prompt_ids is None:
            group.prompt_ids = ids[: self._config.data.max_prompt_length]
        resumed = self._resumable(episode, ids) if num == 1 else None
        parent, num_shared = resumed, 0 if resumed is None else len(resumed.ids)
        if resumed is None:
            parent, num_shared = self._most_shared(episode, ids)
        num_new = len(ids) - num_shared
        available = (left - num_new) // num
        if episode.num_reserved and wanted is not None and wanted > available:
            return False
        if available < 1:
            episode.limit = "length"
            raise ApiError(
                f"expected at most {self._sampling.max_completion_length} tokens in an episode, all"
                " branches together, behind the prompt (rollout.max_completion_length), got "
                f"{episode.num_tokens} before this request, which has {num_new} new ones",
                "context_length_exceeded",
            )
        if resumed is None and len(episode.sequences) + num > MAX_BRANCHES:
            raise ApiError(f"expected at most {MAX_BRANCHES} branches in an episode (MAX_BRANCHES)")
        most = available if wanted is None else min(wanted, available)
        episode.num_requests += 1
        episode.num_tokens += num_new
        episode.num_reserved += num * most
        if resumed is not None:
            assert resumed.turn is not None
            del self._suspended[resumed]
            self._engine.resume(resumed.turn, ids[num_shared:], most)
            resumed.ids, resumed.turn, sequences = ids, None, [resumed]
        else:
            first = _Sequence(episode, ids, parent, num_shared, len(ids))
            sequences = [first]
            sequences += [
                _Sequence(episode, [*ids], first, len(ids), len(ids)) for _ in range(num - 1)
            ]
            episode.sequences += sequences
            self._new.setdefault((group.key, tuple(ids), most), []).extend(sequences)
        for sequence in sequences:
            sequence.request, sequence.num_reserved = request, most
        episode.answering[request] = dict.fromkeys(sequences)
        return True

    def _ids(self, episode: _Episode, request: Request) -> list[int]:
        """Return the tokens of a request: those of the longest answered conversation that it
        continues, and what is new behind them. Raises ConfigError."""
        if isinstance(request.prompt, list):
            if max(request.prompt) >= len(self._tokenizer) or min(request.prompt) < 0:
                raise ConfigError(f"prompt: expected tokens from 0 to {len(self._tokenizer) - 1}")
            return [*request.prompt]
        if not request.is_chat:
            found = [each for each in episode.texts if request.prompt.startswith(each[0])]
            if not found:
                return render_prompt(request.prompt, self._tokenizer)
            text, sequence, length = max(found, key=lambda each: len(each[0]))
            rest = self._tokenizer(request.prompt[len(text) :], add_special_tokens=False)
            return sequence.ids[:length] + list(rest["input_ids"])
        tools = json.dumps(request.tools, sort_keys=True)
        conversations, digests = self._conversations(tools), [tools.encode()]
        for message in request.messages:
            digests.append(_digest(digests[-1], message))
        request.digest = digests[-1]
        for length in range(len(request.messages) - 1, 0, -1):
            rest = request.messages[length:]
            if digests[length] not in episode.recorded:
                continue
            is_rest = {message["role"] for message in rest} <= {"tool", "user", "system"}
            if is_rest and self._is_regular(tools, rest[0]["role"]):
                sequence, num_tokens = episode.recorded[digests[length]]
                request.continued = digests[length]
                before = sequence.ids[:num_tokens]
                return before + conversations.suffix(rest, before[-1])
            break
        return conversations.prompt_ids(request.messages)

    def _resumable(self, episode: _Episode, ids: list[int]) -> _Sequence | None:
        """Return a suspended sequence that the tokens continue."""
        for sequence in episode.sequences:
            turn, length = sequence.turn, len(sequence.ids)
            if sequence in self._suspended and turn is not None:
                fits = length < len(ids) < length + turn.num_left
                if fits and ids[:length] == sequence.ids:
                    return sequence
        return None

    def _most_shared(self, episode: _Episode, ids: list[int]) -> tuple[_Sequence | None, int]:
        """Return what the tokens have most of in common with, and how much: the group's prompt
        (None), or a sequence of the episode."""
        parent, most = None, num_common(ids, episode.group.prompt_ids or [])
        for sequence in episode.sequences:
            if (number := num_common(ids, sequence.ids)) > most:
                parent, most = sequence, number
        return parent, most

    def _submit_new(self) -> None:
        """Submit new sequences; those of a group with equal prompts share it in the engine."""
        for (key, ids, most), sequences in self._new.items():
            first, group = sequences[0].episode, sequences[0].episode.group
            number = first.number + group.num_generations * (group.num_starts - 1)
            own = (*key, number, first.sequences.index(sequences[0]))
            request = GroupRequest(own, ids, len(sequences), has_turns=True, max_turn_tokens=most)
            self._engine.submit(request)
            self._sequences |= {(own, n): each for n, each in enumerate(sequences)}
            group.num_open += len(sequences)
            self._num_live += len(sequences)
        self._new.clear()

    def _receive(self, turn: Turn) -> None:
        """Take what a sequence has sampled; answer its request if it was the last."""
        sequence = self._sequences[turn.key, turn.sample_index]
        episode, request, start = sequence.episode, sequence.request, len(sequence.ids)
        assert request is not None
        sequence.ids += turn.token_ids.tolist()
        sequence.turn, sequence.request = turn, None
        episode.num_tokens += len(turn.token_ids)
        episode.num_reserved -= sequence.num_reserved
        if episode.has_ended:
            self._end_sequence(sequence)
            return
        self._suspended[sequence] = None
        choices = episode.answering[request]
        choices[sequence] = self._read(episode, request, sequence, start)
        answered = [(each, choice) for each, choice in choices.items() if choice is not None]
        if len(answered) < len(choices):
            return
        del episode.answering[request]
        for each, choice in answered:
            self._record(episode, request, each, choice)
        sampled = sum(len(each.turn.token_ids) for each, _ in answered if each.turn)
        request.answer.set_result(Answer([choice for _, choice in answered], start, sampled))

    def _read(self, episode: _Episode, request: Request, sequence: _Sequence, start: int) -> Choice:
        assert sequence.turn is not None
        tokens, calls, is_cut = sequence.ids[start:], [], sequence.turn.is_cut
        if request.is_chat:
            tools = json.dumps(request.tools, sort_keys=True)
            prefix = sequence.ids[max(0, start - PREFIX_TOKENS) : start]
            text, found = self._conversations(tools).read_answer(tokens, prefix)
            if not request.reads_calls:
                text, found = self._conversations(tools).read_turn(tokens, prefix)[0], []
            for call in found:
                function = {"name": call.name, "arguments": json.dumps(call.arguments)}
                own = {"id": f"call{episode.num_calls:05}", "type": "function"}
                calls.append({**own, "function": function})
                episode.num_calls += 1
        else:
            text = self._decode(tokens)
            if isinstance(request.prompt, str):
                episode.texts.append((request.prompt + text, sequence, len(sequence.ids)))
        if not is_cut:
            for stop in self._config.rollout.stop:
                text = text.partition(stop)[0]
        return Choice(text, calls, "length" if is_cut else "tool_calls" if calls else "stop")

    def _record(
        self, episode: _Episode, request: Request, sequence: _Sequence, choice: Choice
    ) -> None:
        """Remember an answer, so that requests can continue it."""
        message, before = message_of(choice), request.messages
        if not request.is_chat:
            given = request.prompt
            text = given if isinstance(given, str) else self._decode(given)
            before = [{"role": "user", "content": text}]
        digest = _digest(request.digest, message)
        episode.recorded[digest] = sequence, len(sequence.ids)
        episode.conversations.pop(request.continued, None)
        if not request.is_chat:
            digest = len(episode.conversations).to_bytes(4, "big")
        episode.conversations[digest] = [*before, message]

    # -- finished groups --------------------------------------------------------------------------

    def _finished(self, group: _Group) -> FinishedGroup:
        group.is_finished = True
        if group.prompt_ids is None:
            group.prompt_ids = [min(self._engine.end_tokens)]
        prompt_ids = group.prompt_ids
        completions = [self._completion(each, len(prompt_ids)) for each in group.episodes]
        return GroupRequest(group.key, prompt_ids, len(completions)), completions

    def _completion(self, episode: _Episode, num_prompt: int) -> Completion:
        """Join the tokens of an episode: of each sequence what it does not share."""
        reason: Literal["stop", "length"] = "length" if episode.limit == "length" else "stop"
        if not episode.sequences:  # one token, of no sequence
            end, one = min(self._engine.end_tokens), np.ones(1, dtype=np.int32)
            zeros, masked = np.zeros(1, np.float32), np.zeros(1, np.bool_)
            return Completion(end * one, zeros, reason, masked, one, (num_prompt - 1) * one)
        starts: dict[_Sequence, int] = {}
        length, lengths, after, parts = 0, [], [], []

        def index_of(sequence: _Sequence | None, position: int) -> int:
            """Index in [prompt | completion] of a token of a sequence."""
            while sequence is not None and position < sequence.num_shared:
                sequence = sequence.parent
            return position if sequence is None else starts[sequence] + position

        for each in episode.sequences:
            sampled = each.completion
            assert sampled is not None
            own = np.array(each.ids[each.num_shared : each.num_prompt], dtype=np.int32)
            zeros, masked = np.zeros(len(own), np.float32), np.zeros(len(own), np.bool_)
            parts += [
                (own, zeros, masked),
                (sampled.token_ids, sampled.logprobs, sampled.is_sampled),
            ]
            starts[each] = num_prompt + length - each.num_shared
            after.append(index_of(each.parent, each.num_shared - 1))
            lengths.append(len(own) + len(sampled.token_ids))
            length += lengths[-1]
        token_ids, logprobs, is_sampled = map(np.concatenate, zip(*parts, strict=True))
        segments = np.array(lengths, dtype=np.int32), np.array(after, dtype=np.int32)
        return Completion(token_ids, logprobs, reason, is_sampled, *segments)

    def finish(self, key: Key, completions: list[Completion]) -> tuple[Any, list[Messages]]:
        """Return the prompt, and the answered part of each episode's last conversation."""
        self._num_open -= 1
        group = self._groups[key]
        return group.prompt.content, [_answers(each) for each in group.episodes]

    def judge(self, key: Key, call: Call) -> tuple[Sequence[int], Future[Any]] | None:
        """Score a group by what the agent has returned; if its process is lost, nothing can."""
        group, specs = self._groups[key], reward_specs(self._config)
        future: Future[Any] = Future()
        if group.error:
            future.set_exception(group.error)
            return range(len(specs)), future
        if "agent" not in specs:
            return None
        values, named = [], dict[str, list[float]]()
        for each in group.episodes:
            has_none = each.value is None and (each.error or (each.limit and len(specs) == 1))
            values.append(0.0 if has_none else each.value)
            for name, value in each.parts.items():
                named[name] = [*named.get(name, []), value]
        metrics = {f"rewards/{name}/mean": sum(of) / len(of) for name, of in named.items()}
        errors = list(
            dict.fromkeys(f"the agent failed:\n{e.error}" for e in group.episodes if e.error)
        )
        future.set_result(Scored([values], errors, metrics, {}))
        return [specs.index("agent")], future

    def forget(self, key: Key) -> tuple[dict[str, float], dict[str, list[Any]]]:
        """End a group; return its metrics, and columns [G] that samples.jsonl shows."""
        self.pool.forget(key)
        group = self._groups.pop(key)
        episodes, number = group.episodes, group.num_generations
        ended = ["error" if group.error or e.error else e.limit or "answer" for e in episodes]
        metrics = {
            "episodes/turns": sum(each.num_requests for each in episodes) / number,
            "episodes/branches": sum(len(each.sequences) for each in episodes) / number,
            "episodes/without_requests": sum(not each.sequences for each in episodes) / number,
        }
        of_all = [[*each.conversations.values()] or [[]] for each in episodes]
        columns: dict[str, list[Any]] = {"messages": [of[-1] for of in of_all], "ended_by": ended}
        if any(len(of) > 1 for of in of_all):
            columns["branches"] = [of[:-1] for of in of_all]
        return metrics, columns


ENDED = ApiError("the episode has ended", "invalid_api_key", status=401)


def _answers(episode: _Episode) -> Messages:
    """The last conversation of an episode from its first answer on."""
    for conversation in reversed(episode.conversations.values()):
        roles = [message["role"] for message in conversation]
        return conversation[roles.index("assistant") :]
    return [{"role": "assistant", "content": ""}]


def _digest(before: bytes, message: Mapping[str, Any]) -> bytes:
    """Digest a conversation up to this message: role, text and calls, whatever else it has."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    read = [(call["name"], _parsed(call.get("arguments"))) for call in calls]
    text = json.dumps([message["role"], message.get("content") or "", read], sort_keys=True)
    return hashlib.blake2b(before + text.encode(), digest_size=16).digest()


def _parsed(arguments: Any) -> Any:
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def num_common(one: list[int], other: list[int]) -> int:
    """Length of the longest common prefix."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    return next(n for n in range(length) if one[n] != other[n])
