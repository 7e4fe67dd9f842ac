"""Episodes of agents: requests of an endpoint become sequences of the engine, and these a group.

    submit(prompt) ─► the agent runs (`pool`) ─► request ─► engine.submit or engine.resume
                            ▲                                            │
                            └───────── answer ◄──────── turn ◄───────────┘
    all episodes of a group have ended ─► their sequences ─► completions, as trees of tokens

A request whose messages begin as a conversation that was answered begins with its tokens, and what
is new is rendered behind them. A sequence that is suspended exactly there is resumed. Otherwise a
new one begins: a branch. It shares the longest beginning that its prompt has in common with the
group's prompt or an earlier sequence of its episode. Suspended sequences are ended, the oldest
first, where others need rows.

In deterministic runs requests are served at barriers: when no sequence can be continued and every
episode waits for one answer or has ended, all are served, in a fixed order.
"""

import hashlib
import json
import secrets
import time
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from easyrl.agents.endpoint import ApiError, Endpoint, Request, no_episode
from easyrl.agents.pool import AgentPool
from easyrl.agents.program import Value
from easyrl.agents.sequences import (
    Episode,
    Group,
    Recorded,
    RecordedText,
    Sequence,
    Shared,
    join_sequences,
)
from easyrl.config import ConfigError
from easyrl.config.rollout import MAX_BRANCHES
from easyrl.config.spec import EpisodeSpec
from easyrl.data.chat import render_prompt, text_decoder
from easyrl.engines.base import Engine, FinishedGroup, GroupRequest, Turn
from easyrl.environments.base import Episodes, GroupRecord, GroupTexts, mean, num_common
from easyrl.environments.conversation import Conversations
from easyrl.environments.host import Key
from easyrl.environments.host_pool import FAILURES, CallFailed, HostKilled
from easyrl.environments.loading import Interface
from easyrl.environments.pool import row_of
from easyrl.environments.tool_calls.calls import Calls
from easyrl.rewards.worker import Call, Scored
from easyrl.types import Completion, Messages, Prompt

MAX_REFUSED = 16
"""Requests beyond a limit after which an agent is given up: it may ask for ever."""
STEPS_TOGETHER = 4  # engine steps between two looks at new requests: a batch of rows costs less
PREFIX_TOKENS = 256  # tokens before an answer that reading its calls may need
DIGEST_BYTES = 16
MAX_TOOL_SETS = 64  # of which conversations are remembered


class _NewPrompt(NamedTuple):
    """What sequences have in common that are submitted as one request."""

    group_key: Key
    ids: tuple[int, ...]
    max_tokens: int


class AgentEpisodes(Episodes):
    """The open groups of a rollout worker with an agent."""

    def __init__(
        self, spec: EpisodeSpec, pool: AgentPool, endpoint: Endpoint, *, max_open_groups: int
    ) -> None:
        """`pool`: of the agent; `max_open_groups`: generated at a time."""
        self._spec = spec
        self._is_deterministic = spec.is_deterministic
        self._max_open = max_open_groups
        self.pool = pool
        self.endpoint = endpoint
        self._queue: deque[Group] = deque()  # groups that have not been started
        self._groups: dict[Key, Group] = {}
        self._num_open = 0  # groups that are being generated
        self._episodes: dict[str, Episode] = {}  # that have not ended, by their keys, in order
        self._sequences: dict[tuple[Key, int], Sequence] = {}
        """Sequences that have not ended, by the key of their request and their number in it."""
        self._suspended: dict[Sequence, None] = {}  # the oldest first
        self._new: dict[_NewPrompt, list[Sequence]] = {}  # not submitted yet
        self._num_live = 0  # sequences that the engine keeps
        self._replaced: set[str] = set()  # fields of requests that were reported
        self._next_step = 0  # of the engine, after which requests are served

    def bind(self, engine: Engine, tokenizer: Any, num_rows: int) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._num_rows = num_rows
        self._decode = text_decoder(tokenizer)
        self._conversations_with = lru_cache(MAX_TOOL_SETS)(self._make_conversations)
        self._is_regular = lru_cache(MAX_TOOL_SETS)(self._check_regular)
        self.pool.loaded()

    @property
    def has_work(self) -> bool:
        return bool(self._queue or self._groups)

    @property
    def wakers(self) -> SequenceOf[Connection | int]:
        return [*self.pool.connections, self.endpoint.fileno()]

    def close(self) -> None:
        self.pool.close()
        self.endpoint.close()

    def submit(self, key: Key, prompt: Prompt, num_generations: int) -> None:
        self._queue.append(Group(key, prompt, num_generations))

    def take(self, finished: list[FinishedGroup]) -> list[FinishedGroup]:
        """Take sequences, of which `advance` makes groups."""
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
        running = list(self._episodes.values())
        for episode in running:
            self._give_up_if_endless(episode)
        all_wait = all(episode.waiting or episode.future.done() for episode in running)
        is_barrier = all_wait and not self._engine.can_step
        may_serve = is_barrier or not self._is_deterministic
        if may_serve:
            self._serve_requests(running)
        finished: list[FinishedGroup] = []
        for group in self._groups.values():
            if group.is_complete:
                finished.append(self._finished(group))
        if may_serve:
            while self._queue and self._num_open < self._max_open:
                self._num_open += 1
                self._start(self._queue.popleft())
        self._submit_new()
        while self._suspended and self._num_live > self._num_rows:
            oldest = next(iter(self._suspended))
            self._end_sequence(oldest)
        return finished

    # -- the agent --------------------------------------------------------------------------------

    def _start(self, group: Group) -> None:
        """Run the agent for each episode of a group."""
        self._groups[group.key] = group
        first_number = group.num_starts * group.num_generations
        group.num_starts += 1
        group.started = time.monotonic()
        group.prompt_ids = None
        keys = [secrets.token_urlsafe(24) for _ in range(group.num_generations)]
        self.endpoint.keys.update(keys)
        row = row_of(group.prompt)
        futures = self.pool.run_agents(group.key, row, self.endpoint.url, keys)
        group.episodes = []
        for key, future in zip(keys, futures, strict=True):
            number = first_number + len(group.episodes)
            episode = Episode(group, number, key, future)
            group.episodes.append(episode)
            self._episodes[key] = episode

    def _give_up_if_endless(self, episode: Episode) -> None:
        """End the program of an episode that asks for ever, although it is refused."""
        num_refused = episode.num_refused + self.endpoint.refused[episode.key]
        if num_refused > MAX_REFUSED and not episode.future.done():
            self.pool.give_up(episode.future)

    def _end(self, episode: Episode) -> None:
        """End an episode whose program has ended."""
        if episode.has_ended:
            return
        self._close(episode)
        group = episode.group
        try:
            value = Value(*episode.future.result())
        except HostKilled as error:
            if group.num_starts > 1 or self._is_deterministic:
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
        else:
            episode.value = value.total
            episode.parts = value.parts

    def _close(self, episode: Episode) -> None:
        """Accept no more requests of an episode, and end its suspended sequences."""
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

    def _end_sequence(self, sequence: Sequence) -> None:
        self._suspended.pop(sequence, None)
        self._engine.end(sequence.last_turn, "stop")
        self._num_live -= 1

    # -- requests ---------------------------------------------------------------------------------

    def _accept(self, request: Request) -> None:
        """Let a request wait until it is served."""
        for name in sorted(request.replaced - self._replaced):
            self.pool.report(f"what the agent asks for by {name} is replaced by the run's")
        self._replaced |= request.replaced
        episode = self._episodes.get(request.key)
        if episode is None:
            request.reply(no_episode())
        elif self._is_deterministic and (episode.waiting or episode.answering):
            expected = "expected false, or one request of an episode at a time"
            request.reply(ApiError(f"runtime.deterministic: {expected}"))
        else:
            episode.waiting.append(request)

    def _serve_requests(self, running: list[Episode]) -> None:
        """Serve the requests that wait, every few steps of the engine, and end episodes."""
        num_steps = self._engine.num_steps
        is_due = num_steps >= self._next_step or not self._engine.can_step
        if is_due and num_steps > 0:  # 0: the engine does not count them
            self._next_step = num_steps + STEPS_TOGETHER
        for episode in running:
            if episode.future.done():
                self._end(episode)
            while is_due and episode.waiting and self._serve(episode, episode.waiting[0]):
                episode.waiting.popleft()

    def _serve(self, episode: Episode, request: Request) -> bool:
        """Give a request to the engine, or refuse it; return False while other requests of the
        episode may use the tokens that it needs."""
        wanted = request.max_tokens  # for each choice; None: all that are left
        num_choices = request.num_choices
        most = self._engine.sampling.max_completion_length
        num_left = most - episode.num_tokens - episode.num_reserved
        if episode.num_reserved and (wanted is None or num_choices * wanted > num_left):
            return False
        try:
            ids = self._ids_of(episode, request)
        except (ValueError, TypeError) as error:  # also of the tokenizer and the template
            self._refuse(episode, request, ApiError(str(error)))
            return True
        if episode.group.prompt_ids is None:
            episode.group.prompt_ids = ids[: self._spec.limits.max_prompt_length]
        shared = self._most_shared(episode, ids)
        is_resumed = num_choices == 1 and self._is_resumable(shared, len(ids))
        num_new = len(ids) - shared.num_tokens
        available = (num_left - num_new) // num_choices
        limit = available
        if wanted is not None and wanted <= available:
            limit = wanted
        elif wanted is not None and episode.num_reserved:
            return False
        num_branches = len(episode.sequences)
        if not is_resumed:
            num_branches += num_choices
        refusal = self._refusal(episode, limit, num_branches)
        if refusal is not None:
            self._refuse(episode, request, refusal)
            return True
        if is_resumed and shared.parent is not None:
            self._resume(shared.parent, ids, limit)
            sequences = [shared.parent]
        else:
            sequences = self._branch(episode, ids, shared, num_choices)
            prompt = _NewPrompt(episode.group.key, tuple(ids), limit)
            self._new.setdefault(prompt, []).extend(sequences)
        episode.num_requests += 1
        episode.num_tokens += num_new
        for sequence in sequences:
            sequence.request = request
            sequence.num_reserved = limit
            episode.num_reserved += limit
        episode.answering[request] = sequences
        return True

    def _refuse(self, episode: Episode, request: Request, refusal: ApiError) -> None:
        episode.num_refused += 1
        request.reply(refusal)

    def _refusal(self, episode: Episode, limit: int, num_branches: int) -> ApiError | None:
        """Return why an episode may ask no more. `limit`: tokens that are left for an answer."""
        most_requests = self._spec.max_turns
        seconds = self._spec.episode_timeout_seconds
        most_tokens = self._engine.sampling.max_completion_length
        if episode.num_requests >= most_requests:
            episode.limit = "max_turns"
            return ApiError(f"expected at most {most_requests} requests (rollout.max_turns)")
        if seconds is not None and time.monotonic() > episode.group.started + seconds:
            episode.limit = "time"
            key = "rollout.episode_timeout_seconds"
            return ApiError(f"expected an episode of at most {seconds:g} s ({key})")
        if num_branches > MAX_BRANCHES:
            episode.limit = "max_turns"
            return ApiError(f"expected at most {MAX_BRANCHES} branches (MAX_BRANCHES)")
        if limit < 1:
            episode.limit = "length"
            key = "rollout.max_completion_length"
            text = f"expected at most {most_tokens} tokens behind an episode's prompt ({key})"
            return ApiError(text, "context_length_exceeded")
        return None

    # -- the tokens of a request ------------------------------------------------------------------

    def _ids_of(self, episode: Episode, request: Request) -> list[int]:
        """Return the tokens of a request: those of the longest answered conversation that it
        continues, and what is new behind them. Raises ConfigError."""
        if request.messages:
            return self._ids_of_chat(episode, request)
        continued: RecordedText | None = None
        for each in episode.texts:
            is_longer = continued is None or len(each.text) > len(continued.text)
            if is_longer and request.prompt.startswith(each.text):
                continued = each
        if continued is None:
            return render_prompt(request.prompt, self._tokenizer)
        rest = request.prompt[len(continued.text) :]
        new_ids = self._tokenizer(rest, add_special_tokens=False)["input_ids"]
        return continued.recorded.ids + list(new_ids)

    def _ids_of_chat(self, episode: Episode, request: Request) -> list[int]:
        tools = _as_key(request.tools)
        conversations = self._conversations_with(tools)
        digests = [tools.encode()]  # of the conversation before each message
        for message in request.messages:
            digests.append(_digest(digests[-1], message))
        request.digest = digests.pop()
        num_known = 0
        for number, digest in enumerate(digests):
            if digest in episode.recorded:
                num_known = number
        new = request.messages[num_known:]
        are_new = all(message["role"] in ("tool", "user", "system") for message in new)
        if num_known and are_new and self._is_regular(tools, new[0]["role"]):
            request.continued = digests[num_known]
            before = episode.recorded[request.continued].ids
            return before + conversations.suffix(new, before[-1])
        return conversations.prompt_ids(request.messages)

    def _make_conversations(self, tools: str) -> Conversations:
        interface = Interface(json.loads(tools), False, False)
        ends = self._engine.end_tokens
        return Conversations(self._spec, self._tokenizer, interface, ends, is_checked=False)

    def _check_regular(self, tools: str, role: str) -> bool:
        """Whether the template writes the same behind every answer."""
        try:
            self._conversations_with(tools).check(role)
        except ConfigError:
            return False
        return True

    def _most_shared(self, episode: Episode, ids: list[int]) -> Shared:
        """Return what begins with most of the tokens: the group's prompt, or a sequence of the
        episode, if possible a suspended one."""
        parent: Sequence | None = None
        num_shared = num_common(ids, episode.group.prompt_ids or [])
        for sequence in episode.sequences:
            number = num_common(ids, sequence.ids)
            is_better = number > num_shared
            if number == num_shared and parent is not None:
                is_better = sequence in self._suspended and parent not in self._suspended
            if is_better:
                parent = sequence
                num_shared = number
        return Shared(parent, num_shared)

    def _is_resumable(self, shared: Shared, length: int) -> bool:
        """Whether so many tokens, the first of which are shared, continue a suspended sequence."""
        parent = shared.parent
        if parent is None or parent not in self._suspended:
            return False
        num_new = length - shared.num_tokens
        is_whole = shared.num_tokens == len(parent.ids)
        return is_whole and 0 < num_new < parent.last_turn.num_left

    # -- the engine -------------------------------------------------------------------------------

    def _resume(self, sequence: Sequence, ids: list[int], limit: int) -> None:
        """Continue a suspended sequence up to these tokens."""
        del self._suspended[sequence]
        new_ids = ids[len(sequence.ids) :]
        self._engine.resume(sequence.last_turn, new_ids, limit)
        sequence.ids = ids
        sequence.turn = None

    def _branch(
        self, episode: Episode, ids: list[int], shared: Shared, num_choices: int
    ) -> list[Sequence]:
        """Begin new sequences, which share their prompt: it belongs to the first one."""
        first = Sequence(episode, ids, shared.parent, shared.num_tokens)
        sequences = [first]
        for _ in range(num_choices - 1):
            sequences.append(Sequence(episode, list(ids), first, len(ids)))
        episode.sequences += sequences
        return sequences

    def _submit_new(self) -> None:
        """Submit new sequences. Those of a group with equal prompts share it in the engine."""
        for prompt, sequences in self._new.items():
            first = sequences[0]
            number = first.episode.sequences.index(first)
            key = (*prompt.group_key, first.episode.number, number)
            request = GroupRequest(
                key,
                prompt.ids,
                len(sequences),
                has_turns=True,
                max_turn_tokens=prompt.max_tokens,
            )
            self._engine.submit(request)
            for index, sequence in enumerate(sequences):
                sequence.num_prompt = len(prompt.ids)
                self._sequences[key, index] = sequence
            first.episode.group.num_open += len(sequences)
            self._num_live += len(sequences)
        self._new.clear()

    def _receive(self, turn: Turn) -> None:
        """Take what a sequence has sampled; answer its request if it was the last."""
        sequence = self._sequences[turn.key, turn.sample_index]
        episode = sequence.episode
        request = sequence.request
        assert request is not None, "a sequence samples for a request"
        num_sampled = len(turn.token_ids)
        sequence.ids += turn.token_ids.tolist()
        sequence.turn = turn
        episode.num_tokens += num_sampled
        episode.num_reserved -= sequence.num_reserved
        if episode.has_ended:
            self._end_sequence(sequence)
            return
        self._suspended[sequence] = None
        is_as_long_as_wanted = request.max_tokens is not None and num_sampled >= request.max_tokens
        if turn.is_cut and not is_as_long_as_wanted:
            episode.is_cut = True
        sequences = episode.answering[request]
        if all(each.turn is not None for each in sequences):
            del episode.answering[request]
            self._reply(request, sequences)

    # -- answers ----------------------------------------------------------------------------------

    def _reply(self, request: Request, sequences: list[Sequence]) -> None:
        """Answer a request in OpenAI's form."""
        choices: list[dict[str, Any]] = []
        num_sampled = 0
        for index, sequence in enumerate(sequences):
            read = self._read_message if request.messages else self._read_text
            choice = read(request, sequence)
            choices.append({**choice, "logprobs": None, "index": index})
            num_sampled += len(sequence.last_turn.token_ids)
        last = sequences[-1]
        num_prompt = len(last.ids) - len(last.last_turn.token_ids)
        usage = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_sampled,
            "total_tokens": num_prompt + num_sampled,
        }
        request.reply({"choices": choices, "usage": usage})

    def _read_text(self, request: Request, sequence: Sequence) -> dict[str, Any]:
        """Return a text completion, and remember it: requests may continue it."""
        episode = sequence.episode
        turn = sequence.last_turn
        text = self._decode(turn.token_ids.tolist())
        prompt = request.prompt
        recorded = Recorded(sequence, len(sequence.ids))
        episode.texts.append(RecordedText(prompt + text, recorded))
        question = {"role": "user", "content": prompt}
        answer = {"role": "assistant", "content": text}
        digest = _digest(prompt.encode(), answer)
        episode.keep_conversation(digest, [question, answer])
        return {"text": self._before_stop(text, turn), "finish_reason": _finish_reason(turn)}

    def _read_message(self, request: Request, sequence: Sequence) -> dict[str, Any]:
        """Return an answer of a chat, and remember it: requests may continue it."""
        episode = sequence.episode
        turn = sequence.last_turn
        length = len(sequence.ids)
        start = length - len(turn.token_ids)
        prefix = sequence.ids[max(start - PREFIX_TOKENS, 0) : start]
        conversations = self._conversations_with(_as_key(request.tools))
        read = conversations.read_turn(turn.token_ids.tolist(), prefix)
        # What only the schema refuses goes to the agent as written: its own program checks it.
        calls: Calls = []
        if request.reads_calls:
            calls = [call for call in read.calls if call.arguments is not None]
        text = self._before_stop(read.around if calls else read.text, turn)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            message["content"] = text or None
            message["tool_calls"] = _as_openai(calls, episode.num_calls)
        episode.num_calls += len(calls)
        digest = _digest(request.digest, message)
        episode.recorded[digest] = Recorded(sequence, length)
        episode.conversations.pop(request.continued, None)
        episode.keep_conversation(digest, [*request.messages, message])
        reason = "tool_calls" if calls else _finish_reason(turn)
        return {"message": message, "finish_reason": reason}

    def _before_stop(self, text: str, turn: Turn) -> str:
        """Return the text before the first stop string, as OpenAI's API does."""
        if turn.is_cut:
            return text
        for stop in self._spec.stop:
            text = text.partition(stop)[0]
        return text

    # -- finished groups --------------------------------------------------------------------------

    def _finished(self, group: Group) -> FinishedGroup:
        group.is_finished = True
        self._num_open -= 1
        end = min(self._engine.end_tokens)
        group.prompt_ids = group.prompt_ids or [end]
        num_prompt = len(group.prompt_ids)
        completions = [join_sequences(each, num_prompt, end) for each in group.episodes]
        return GroupRequest(group.key, group.prompt_ids, len(completions)), completions

    def finish(self, key: Key, completions: list[Completion]) -> GroupTexts:
        """Return the prompt, and each episode's last conversation from its first answer on."""
        group = self._groups[key]
        answers: list[Messages] = []
        for episode in group.episodes:
            chat: Messages = [{"role": "assistant", "content": ""}]
            if episode.conversations:
                *_, chat = episode.conversations.values()
            roles = [message["role"] for message in chat]
            first_answer = roles.index("assistant")
            answers.append(chat[first_answer:])
        return GroupTexts(group.prompt.content, answers)

    def judge(self, key: Key, call: Call) -> tuple[SequenceOf[int], Future[Any]] | None:
        """Score a group by what the agent has returned; if its process is lost, nothing can."""
        group = self._groups[key]
        functions = self._spec.rewards.functions
        future: Future[Any] = Future()
        if group.error:
            future.set_exception(group.error)
            return range(len(functions)), future
        if "agent" not in functions:
            return None
        is_only_reward = len(functions) == 1
        future.set_result(_scored(group, is_only_reward=is_only_reward))
        return [functions.index("agent")], future

    def forget(self, key: Key) -> GroupRecord:
        self.pool.forget(key)
        group = self._groups.pop(key)
        episodes = group.episodes
        without_requests = [episode for episode in episodes if not episode.sequences]
        metrics = {
            "episodes/turns": mean([episode.num_requests for episode in episodes]),
            "episodes/branches": mean([len(episode.sequences) for episode in episodes]),
            "episodes/without_requests": len(without_requests) / len(episodes),
        }
        chats: list[list[Messages]] = []
        for episode in episodes:
            chats.append(list(episode.conversations.values()) or [[]])
        columns: dict[str, list[Any]] = {
            "messages": [of_episode[-1] for of_episode in chats],
            "ended_by": [episode.ended_by for episode in episodes],
        }
        if any(len(of_episode) > 1 for of_episode in chats):
            columns["branches"] = [of_episode[:-1] for of_episode in chats]
        return GroupRecord(metrics, columns)


def _scored(group: Group, *, is_only_reward: bool) -> Scored:
    """Return what the agent gives its episodes. One that has failed without a reward gets 0, as
    does one that reached a limit, if the agent gives the only reward."""
    scores: list[float | None] = []
    named: dict[str, list[float]] = {}
    errors: list[str] = []
    for episode in group.episodes:
        score = episode.value
        has_failed = bool(episode.error) or (is_only_reward and bool(episode.limit))
        if score is None and has_failed:
            score = 0.0
        scores.append(score)
        for name, value in episode.parts.items():
            named.setdefault(name, []).append(value)
        error = f"the agent failed:\n{episode.error}"
        if episode.error and error not in errors:
            errors.append(error)
    metrics: dict[str, float] = {}
    for name, values in named.items():
        metrics[f"rewards/{name}/mean"] = mean(values)
    return Scored([scores], errors, metrics, {})


def _finish_reason(turn: Turn) -> str:
    return "length" if turn.is_cut else "stop"


def _as_key(tools: list[dict[str, Any]]) -> str:
    """Return descriptions of tools in a form that conversations are remembered by."""
    return json.dumps(tools, sort_keys=True)


def _as_openai(calls: Calls, number: int) -> list[dict[str, Any]]:
    """Return calls in OpenAI's form. `number`: of the first one in its episode, of which ids are
    made where the model has written none."""
    found: list[dict[str, Any]] = []
    used: set[str] = set()
    for call in calls:
        call_id = call.call_id
        if not call_id or call_id in used:
            call_id = f"call{number:05}"
        used.add(call_id)
        function = {"name": call.name, "arguments": json.dumps(call.arguments)}
        found.append({"id": call_id, "type": "function", "function": function})
        number += 1
    return found


def _digest(before: bytes, message: Mapping[str, Any]) -> bytes:
    """Digest a conversation up to a message: roles, texts and calls, whatever else they have."""
    calls: list[tuple[str, Any]] = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        calls.append((function["name"], arguments))
    role = message["role"]
    content = message["content"] or ""
    text = json.dumps([role, content, calls], sort_keys=True)
    digest = hashlib.blake2b(before + text.encode(), digest_size=DIGEST_BYTES)
    return digest.digest()
