"""Episodes of agents: requests of an endpoint become sequences of the engine, and these a group.

    submit(prompt) ─► the agent runs (`host`) ─► request ─► engine.submit or engine.resume
                            ▲                                            │
                            └───────── answer ◄──────── turn ◄───────────┘
    all episodes of a group have ended ─► their sequences ─► completions, as trees of tokens

A request whose messages begin as a conversation that was answered begins with its tokens, and what
is new is rendered behind them. A sequence that is suspended exactly there is resumed. Otherwise a
new one begins: a branch. Suspended sequences are ended, the oldest first, where others need rows.

A new sequence shares the longest beginning that its prompt has in common with the group's prompt or
an earlier sequence of its episode. So every sampled token is in one node of the episode's tree.

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
from typing import Any

import numpy as np

from easyrl.agents.endpoint import ApiError, Endpoint, Request, no_episode
from easyrl.agents.pool import AgentPool
from easyrl.config import ConfigError
from easyrl.config.rollout import MAX_BRANCHES
from easyrl.config.spec import EpisodeSpec
from easyrl.data.chat import render_prompt, text_decoder
from easyrl.engines.base import Engine, FinishedGroup, GroupRequest, Turn
from easyrl.environments.base import Episodes, GroupRecord, GroupTexts
from easyrl.environments.conversation import Conversations
from easyrl.environments.host import Key
from easyrl.environments.host_pool import FAILURES, CallFailed, HostKilled
from easyrl.environments.loading import Interface
from easyrl.environments.pool import row_of
from easyrl.layout.tree import TokenTree
from easyrl.rewards.worker import Call, Scored
from easyrl.types import Completion, Messages, Prompt

MAX_REFUSED = 16
"""Requests beyond a limit after which an agent is given up: it may ask for ever."""
STEPS_TOGETHER = 4  # engine steps between two looks at new requests: a batch of rows costs less
PREFIX_TOKENS = 256  # tokens before an answer that reading its calls may need


@dataclass(slots=True, eq=False)
class _Sequence:
    """A sequence of the engine: what it shares with others, then tokens of its own."""

    episode: "Episode"
    ids: list[int]  # all that are known: prompt, inserted and sampled ones
    parent: "_Sequence | None"  # shares its first tokens; None: the group's prompt does
    num_shared: int
    num_prompt: int = 0  # tokens that the engine has got as its prompt
    request: Any = None  # that it samples an answer for
    num_reserved: int = 0  # most tokens of that answer
    turn: Any = None  # its newest, while it is suspended
    completion: Any = None  # since it has ended


@dataclass(slots=True, eq=False)
class Episode:
    group: "Group"
    number: int  # in all episodes of the group, those of an earlier start included
    key: str  # at the endpoint
    future: Future[Any]  # what the agent returns
    sequences: list[_Sequence] = field(default_factory=list)
    waiting: deque[Request] = field(default_factory=deque)
    answering: dict[Request, list[_Sequence]] = field(default_factory=dict)
    recorded: dict[bytes, tuple[_Sequence, int]] = field(default_factory=dict)
    """By the digest of an answered conversation: the first tokens of a sequence, so many."""
    texts: list[tuple[str, _Sequence, int]] = field(default_factory=list)  # completed ones
    conversations: dict[bytes, Messages] = field(default_factory=dict)  # that nothing continues
    num_requests: int = 0
    num_tokens: int = 0  # distinct ones behind the group's prompt
    num_reserved: int = 0  # most tokens that are being sampled
    num_calls: int = 0
    limit: str = ""  # that requests were refused for
    num_refused: int = 0
    is_cut: bool = False  # an answer, where the tokens of the episode ended
    has_ended: bool = False
    value: float | None = None
    parts: dict[str, float] = field(default_factory=dict)  # named rewards, whose sum is `value`
    error: str = ""


@dataclass(slots=True, eq=False)
class Group:
    key: Key
    prompt: Prompt
    num_generations: int
    episodes: list[Episode] = field(default_factory=list)
    started: float = 0.0
    num_starts: int = 0
    prompt_ids: list[int] | None = None  # of the first request, as long as a prompt may be
    num_open: int = 0  # sequences that have not ended
    error: Exception | None = None
    is_finished: bool = False


class AgentEpisodes(Episodes):
    """The open groups of a rollout worker with an agent."""

    def __init__(
        self, spec: EpisodeSpec, pool: AgentPool, endpoint: Endpoint, *, max_open_groups: int
    ) -> None:
        self._spec, self.pool, self.endpoint = spec, pool, endpoint
        self._max_open, self._num_open = max_open_groups, 0
        self._queue: deque[Group] = deque()
        self._groups: dict[Key, Group] = {}
        self._episodes: dict[str, Episode] = {}  # that are going on, by their keys, in order
        self._sequences: dict[tuple[Key, int], _Sequence] = {}  # that have not ended
        self._suspended: dict[_Sequence, None] = {}  # in order
        self._new: dict[tuple[Key, tuple[int, ...], int], list[_Sequence]] = {}
        """Not submitted yet, by group, prompt and most tokens: these share a request."""
        self._num_live = 0  # sequences that the engine keeps
        self._replaced: set[str] = set()
        self._next_step = 0  # of the engine, after which requests are served

    def bind(self, engine: Engine, tokenizer: Any, num_rows: int) -> None:
        """Use this engine, with so many sequences, once the agent is loaded. Raises ConfigError."""
        self._engine, self._tokenizer, self._num_rows = engine, tokenizer, num_rows
        self._decode = text_decoder(tokenizer)
        self.pool.loaded()

        @lru_cache(64)
        def conversations(tools: str) -> Conversations:
            interface = Interface(json.loads(tools), False, False)
            ends = engine.end_tokens
            return Conversations(self._spec, tokenizer, interface, ends, is_checked=False)

        @lru_cache(64)
        def is_regular(tools: str, role: str) -> bool:
            """Whether the template writes the same behind every answer."""
            try:
                conversations(tools).check(role)
            except ConfigError:
                return False
            return True

        self._conversations, self._is_regular = conversations, is_regular

    @property
    def has_work(self) -> bool:
        return bool(self._queue or self._groups)

    @property
    def wakers(self) -> list[Any]:
        return [*self.pool.connections, self.endpoint.fileno()]

    def close(self) -> None:
        self.pool.close()
        self.endpoint.close()

    def submit(self, key: Key, prompt: Prompt, num_generations: int) -> None:
        self._queue.append(Group(key, prompt, num_generations))

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
        going_on = list(self._episodes.values())
        for episode in going_on:
            refused = episode.num_refused + self.endpoint.refused[episode.key]
            if refused > MAX_REFUSED and not episode.future.done():
                self.pool.give_up(episode.future)
        waits = not self._engine.can_step and all(e.waiting or e.future.done() for e in going_on)
        is_due = self._engine.num_steps >= self._next_step or not self._engine.can_step
        if waits or not self._spec.is_deterministic:
            if is_due and (num_steps := self._engine.num_steps):  # 0: it does not count
                self._next_step = num_steps + STEPS_TOGETHER
            for episode in going_on:
                if episode.future.done():
                    self._end(episode)
                while is_due and episode.waiting and self._serve(episode, episode.waiting[0]):
                    episode.waiting.popleft()
        finished = [*map(self._finished, filter(_is_complete, self._groups.values()))]
        if waits or not self._spec.is_deterministic:
            while self._queue and self._num_open < self._max_open:
                self._num_open += 1
                self._start(self._queue.popleft())
        self._submit_new()
        while self._suspended and self._num_live > self._num_rows:
            self._end_sequence(next(iter(self._suspended)))
        return finished

    # -- the agent --------------------------------------------------------------------------------

    def _start(self, group: Group) -> None:
        first = group.num_starts * group.num_generations
        self._groups[group.key] = group
        group.started, group.prompt_ids = time.monotonic(), None
        group.num_starts += 1
        keys = [secrets.token_urlsafe(24) for _ in range(group.num_generations)]
        self.endpoint.keys.update(keys)
        row = row_of(group.prompt)
        futures = self.pool.run_agents(group.key, row, self.endpoint.url, keys)
        pairs = enumerate(zip(keys, futures, strict=True), first)
        group.episodes = [Episode(group, number, *pair) for number, pair in pairs]
        self._episodes |= {each.key: each for each in group.episodes}

    def _end(self, episode: Episode) -> None:
        if episode.has_ended:
            return
        self._close(episode)
        group = episode.group
        try:
            episode.value, episode.parts = episode.future.result()
        except HostKilled as error:
            if group.num_starts > 1 or self._spec.is_deterministic:
                group.error = error
                return
            for each in group.episodes:
                self._close(each)
            self._start(group)
        except CallFailed as error:
            episode.error = "" if episode.limit else str(error)
        except TimeoutError:
            episode.limit = episode.limit or "time"
        except FAILURES as error:
            group.error = error

    def _close(self, episode: Episode) -> None:
        if episode.has_ended:
            return
        episode.has_ended = True
        self._episodes.pop(episode.key, None)
        self.endpoint.keys.discard(episode.key)
        self.endpoint.refused.pop(episode.key, None)
        for request in [*episode.waiting, *episode.answering]:
            request.reply(no_episode())
        episode.waiting.clear()
        for sequence in episode.sequences:
            if sequence in self._suspended:
                self._end_sequence(sequence)

    def _end_sequence(self, sequence: _Sequence) -> None:
        self._suspended.pop(sequence, None)
        self._engine.end(sequence.turn, "stop")
        self._num_live -= 1

    # -- requests ---------------------------------------------------------------------------------

    def _accept(self, request: Request) -> None:
        for name in sorted(request.replaced - self._replaced):
            self.pool.report(f"what the agent asks for by {name} is replaced by the run's")
        self._replaced |= request.replaced
        episode = self._episodes.get(request.key)
        if episode is None:
            request.reply(no_episode())
        elif self._spec.is_deterministic and (episode.waiting or episode.answering):
            expected = "expected false, or one request of an episode at a time"
            request.reply(ApiError(f"runtime.deterministic: {expected}"))
        else:
            episode.waiting.append(request)

    def _serve(self, episode: Episode, request: Request) -> bool:
        """Give a request to the engine, or refuse it; return False while other requests of the
        episode may use the tokens that it needs."""
        num, wanted = request.num_choices, request.max_tokens
        most = self._engine.sampling.max_completion_length
        left = most - episode.num_tokens - episode.num_reserved
        if episode.num_reserved and (wanted is None or num * wanted > left):
            return False
        try:
            ids = self._ids(episode, request)
        except (ValueError, TypeError) as error:  # also of the tokenizer and the template
            episode.num_refused += 1
            request.reply(ApiError(str(error)))
            return True
        if episode.group.prompt_ids is None:
            episode.group.prompt_ids = ids[: self._spec.limits.max_prompt_length]
        parent, num_shared = self._most_shared(episode, ids)
        is_resumed = num == 1 and self._is_resumable(parent, num_shared, len(ids))
        available = (left - len(ids) + num_shared) // num
        if episode.num_reserved and wanted is not None and wanted > available:
            return False
        limit = min(wanted or available, available)
        num_branches = len(episode.sequences) + num * (not is_resumed)
        if refusal := self._refusal(episode, limit, num_branches):
            episode.num_refused += 1
            request.reply(refusal)
            return True
        episode.num_requests += 1
        episode.num_tokens += len(ids) - num_shared
        episode.num_reserved += num * limit
        if parent is not None and is_resumed:
            del self._suspended[parent]
            self._engine.resume(parent.turn, ids[num_shared:], limit)
            parent.ids, parent.turn, sequences = ids, None, [parent]
        else:
            first = _Sequence(episode, ids, parent, num_shared)
            others = [_Sequence(episode, [*ids], first, len(ids)) for _ in range(num - 1)]
            sequences = [first, *others]
            episode.sequences += sequences
            self._new.setdefault((episode.group.key, tuple(ids), limit), []).extend(sequences)
        for sequence in sequences:
            sequence.request, sequence.num_reserved = request, limit
        episode.answering[request] = sequences
        return True

    def _refusal(self, episode: Episode, limit: int, num_branches: int) -> ApiError | None:
        max_turns, seconds = self._spec.max_turns, self._spec.episode_timeout_seconds
        most = self._engine.sampling.max_completion_length
        if episode.num_requests >= max_turns:
            episode.limit = "max_turns"
            return ApiError(f"expected at most {max_turns} requests (rollout.max_turns)")
        if seconds is not None and time.monotonic() > episode.group.started + seconds:
            episode.limit, key = "time", "rollout.episode_timeout_seconds"
            return ApiError(f"expected an episode of at most {seconds:g} s ({key})")
        if num_branches > MAX_BRANCHES:
            episode.limit = "max_turns"
            return ApiError(f"expected at most {MAX_BRANCHES} branches (MAX_BRANCHES)")
        if limit < 1:
            episode.limit = "length"
            key = "rollout.max_completion_length"
            text = f"expected at most {most} tokens behind an episode's prompt ({key})"
            return ApiError(text, "context_length_exceeded")
        return None

    def _ids(self, episode: Episode, request: Request) -> list[int]:
        """Return the tokens of a request: those of the longest answered conversation that it
        continues, and what is new behind them. Raises ConfigError."""
        if not request.messages:
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
        known = [n for n, digest in enumerate(digests[:-1]) if digest in episode.recorded]
        if known:
            rest, digest = request.messages[known[-1] :], digests[known[-1]]
            is_rest = {message["role"] for message in rest} <= {"tool", "user", "system"}
            if is_rest and self._is_regular(tools, rest[0]["role"]):
                sequence, length = episode.recorded[digest]
                request.continued = digest
                before = sequence.ids[:length]
                return before + conversations.suffix(rest, before[-1])
        return conversations.prompt_ids(request.messages)

    def _is_resumable(self, parent: _Sequence | None, num_shared: int, length: int) -> bool:
        """Whether so many tokens, of which a sequence shares the first ones, continue it."""
        if parent is None or parent not in self._suspended or num_shared < len(parent.ids):
            return False
        return bool(num_shared < length < num_shared + parent.turn.num_left)

    def _most_shared(self, episode: Episode, ids: list[int]) -> tuple[_Sequence | None, int]:
        """Return what begins with most of the tokens, and with how many: the group's prompt (None),
        or a sequence of the episode, if possible a suspended one."""
        found: tuple[_Sequence | None, int] = None, num_common(ids, episode.group.prompt_ids or [])
        for sequence in sorted(episode.sequences, key=lambda each: each not in self._suspended):
            if (number := num_common(ids, sequence.ids)) > found[1]:
                found = sequence, number
        return found

    def _submit_new(self) -> None:
        """Submit new sequences. Those of a group with equal prompts share it in the engine."""
        for (key, ids, limit), sequences in self._new.items():
            first = sequences[0].episode
            own = (*key, first.number, first.sequences.index(sequences[0]))
            self._engine.submit(
                GroupRequest(own, ids, len(sequences), has_turns=True, max_turn_tokens=limit)
            )
            for index, sequence in enumerate(sequences):
                sequence.num_prompt = len(ids)
                self._sequences[own, index] = sequence
            first.group.num_open += len(sequences)
            self._num_live += len(sequences)
        self._new.clear()

    def _receive(self, turn: Turn) -> None:
        """Take what a sequence has sampled; answer its request if it was the last."""
        sequence = self._sequences[turn.key, turn.sample_index]
        episode, request = sequence.episode, sequence.request
        sequence.ids += turn.token_ids.tolist()
        sequence.turn = turn
        episode.num_tokens += len(turn.token_ids)
        episode.num_reserved -= sequence.num_reserved
        if episode.has_ended:
            self._end_sequence(sequence)
            return
        self._suspended[sequence] = None
        wanted = request.max_tokens
        episode.is_cut |= turn.is_cut and (wanted is None or len(turn.token_ids) < wanted)
        sequences = episode.answering[request]
        if any(each.turn is None for each in sequences):
            return
        del episode.answering[request]
        prompt = len(sequence.ids) - len(turn.token_ids)
        sampled = sum(len(each.turn.token_ids) for each in sequences)
        usage = {"prompt_tokens": prompt, "completion_tokens": sampled}
        choices = [self._read(request, each) | {"index": n} for n, each in enumerate(sequences)]
        request.reply({"choices": choices, "usage": usage | {"total_tokens": prompt + sampled}})

    def _read(self, request: Request, sequence: _Sequence) -> dict[str, Any]:
        """Return an answer in OpenAI's form, and remember it: requests may continue it."""
        episode, turn = sequence.episode, sequence.turn
        tokens, length = turn.token_ids.tolist(), len(sequence.ids)
        stops = () if turn.is_cut else self._spec.stop
        reason = "length" if turn.is_cut else "stop"
        if not request.messages:
            text, before = self._decode(tokens), request.prompt
            episode.texts.append((before + text, sequence, length))
            chat = [{"role": "user", "content": before}, {"role": "assistant", "content": text}]
            digest = _digest(before.encode(), chat[1])
            episode.conversations.pop(digest, None)  # the newest is the last
            episode.conversations[digest] = chat
            return {"text": _before(text, stops), "logprobs": None, "finish_reason": reason}
        conversations = self._conversations(json.dumps(request.tools, sort_keys=True))
        prefix = sequence.ids[: length - len(tokens)][-PREFIX_TOKENS:]
        text, found, around = conversations.read_turn(tokens, prefix)
        # What only the schema refuses goes to the agent as written: its own program checks it.
        calls = [each for each in found if request.reads_calls and each.arguments is not None]
        text = _before(around if calls else text, stops)
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}
        used = set[str]()
        for number, call in enumerate(calls, episode.num_calls):
            function = {"name": call.name, "arguments": json.dumps(call.arguments)}
            own_id = f"call{number:05}"
            call_id = own_id if call.call_id in used else call.call_id or own_id
            used.add(call_id)
            own = {"id": call_id, "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(own)
        episode.num_calls += len(calls)
        digest = _digest(request.digest, message)
        episode.recorded[digest] = sequence, length
        for each in (request.continued, digest):  # the newest is the last
            episode.conversations.pop(each, None)
        episode.conversations[digest] = [*request.messages, message]
        reason = "tool_calls" if calls else reason
        return {"message": message, "logprobs": None, "finish_reason": reason}

    # -- finished groups --------------------------------------------------------------------------

    def _finished(self, group: Group) -> FinishedGroup:
        group.is_finished = True
        self._num_open -= 1
        end = min(self._engine.end_tokens)
        group.prompt_ids = group.prompt_ids or [end]
        completions = [_completion(each, len(group.prompt_ids), end) for each in group.episodes]
        return GroupRequest(group.key, group.prompt_ids, len(completions)), completions

    def finish(self, key: Key, completions: list[Completion]) -> GroupTexts:
        """Return the prompt, and each episode's last conversation from its first answer on."""
        group, answers = self._groups[key], list[Messages]()
        for episode in group.episodes:
            chat: Messages = [{"role": "assistant", "content": ""}]
            chat = [chat, *episode.conversations.values()][-1]
            roles = [message["role"] for message in chat]
            answers.append(chat[roles.index("assistant") :])
        return GroupTexts(group.prompt.content, answers)

    def judge(self, key: Key, call: Call) -> tuple[Sequence[int], Future[Any]] | None:
        """Score a group by what the agent has returned; if its process is lost, nothing can."""
        group, specs = self._groups[key], self._spec.rewards.functions
        future: Future[Any] = Future()
        if group.error:
            future.set_exception(group.error)
            return range(len(specs)), future
        if "agent" not in specs:
            return None
        values: list[float | None] = []
        named: dict[str, list[float]] = {}
        for each in group.episodes:
            is_zero = each.error or (each.limit and len(specs) == 1)
            values.append(0.0 if is_zero and each.value is None else each.value)
            for name, value in each.parts.items():
                named.setdefault(name, []).append(value)
        metrics = {f"rewards/{name}/mean": sum(of) / len(of) for name, of in named.items()}
        errors = dict.fromkeys(f"the agent failed:\n{e.error}" for e in group.episodes if e.error)
        future.set_result(Scored([values], [*errors], metrics, {}))
        return [specs.index("agent")], future

    def forget(self, key: Key) -> GroupRecord:
        self.pool.forget(key)
        group = self._groups.pop(key)
        episodes = group.episodes
        counts: dict[str, list[int]] = {
            "episodes/turns": [each.num_requests for each in episodes],
            "episodes/branches": [len(each.sequences) for each in episodes],
            "episodes/without_requests": [not each.sequences for each in episodes],
        }
        chats = [[*each.conversations.values()] or [[]] for each in episodes]
        ended = ["error" if group.error or e.error else e.limit or "answer" for e in episodes]
        columns: dict[str, list[Any]] = {"messages": [of[-1] for of in chats], "ended_by": ended}
        if any(len(of) > 1 for of in chats):
            columns["branches"] = [of[:-1] for of in chats]
        metrics = {name: sum(of) / len(of) for name, of in counts.items()}
        return GroupRecord(metrics, columns)


def _is_complete(group: Group) -> bool:
    is_over = not group.num_open and all(each.has_ended for each in group.episodes)
    return is_over and not group.is_finished


def _completion(episode: Episode, num_prompt: int, end_token: int) -> Completion:
    """Join the tokens of an episode: of each sequence what it does not share with others. Without a
    sequence it has an end token, which is not sampled."""
    starts: dict[_Sequence, int] = {}  # index of the token before the first, had it one of its own
    length = 0
    parts = list[Any]()
    predecessors = [np.arange(-1, num_prompt - 1)]

    def index_of(sequence: _Sequence | None, position: int) -> int:
        """Index in the prompt and the completion of a token of a sequence."""
        while sequence is not None and position < sequence.num_shared:
            sequence = sequence.parent
        return position if sequence is None else starts[sequence] + position

    def masked(ids: list[int]) -> tuple[Any, Any, Any]:
        tokens = np.array(ids, dtype=np.int32)
        return tokens, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.bool_)

    for each in episode.sequences:
        sampled = each.completion
        parts.append(masked(each.ids[each.num_shared : each.num_prompt]))
        parts.append((sampled.token_ids, sampled.logprobs, sampled.is_sampled))
        starts[each] = num_prompt + length - each.num_shared
        number = each.num_prompt - each.num_shared + len(sampled.token_ids)
        first = num_prompt + length
        own = np.arange(first - 1, first - 1 + number)
        own[0] = index_of(each.parent, each.num_shared - 1)
        predecessors.append(own)
        length += number
    if not parts:
        parts.append(masked([end_token]))
        predecessors.append(np.array([num_prompt - 1]))
    token_ids, logprobs, is_sampled = map(np.concatenate, zip(*parts, strict=True))
    tree = TokenTree.of_predecessors(np.concatenate(predecessors), cuts=[num_prompt])
    reason: Any = "length" if episode.is_cut or episode.limit == "length" else "stop"
    return Completion(token_ids, logprobs, reason, is_sampled, tree)


def _before(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first of these strings, as OpenAI's API does."""
    for stop in stops:
        text = text.partition(stop)[0]
    return text


def _digest(before: bytes, message: Mapping[str, Any]) -> bytes:
    """Digest a conversation up to a message: roles, texts and calls, whatever else they have."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    given = [(call["name"], call.get("arguments")) for call in calls]
    read = [(name, json.loads(x) if isinstance(x, str) else x) for name, x in given]
    text = json.dumps([message["role"], message["content"] or "", read], sort_keys=True)
    return hashlib.blake2b(before + text.encode(), digest_size=16).digest()


def num_common(one: list[int], other: list[int]) -> int:
    """Length of the longest common prefix."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    return next(n for n in range(length) if one[n] != other[n])
