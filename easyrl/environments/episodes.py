"""Episodes: completions of several turns, between which an environment acts.

    submit(prompt) ─► environments reset ─► engine.submit ─► turn ─► environment ─┬► engine.resume
                                                              ▲                   ├► engine.end
                                                              └───────────────────┘

Groups are started as others end, so that few environments exist at a time.

In deterministic runs answers are handed over at barriers: when no sequence can be continued and no
call is pending, all answers are, in a fixed order. So what a step computes does not depend on how
long a tool takes.
"""

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from easyrl.config.spec import EpisodeSpec
from easyrl.engines.base import Engine, FinishedGroup, GroupRequest, Turn
from easyrl.environments.base import Episodes, GroupRecord, GroupTexts
from easyrl.environments.conversation import Conversations
from easyrl.environments.host import Acted, Key
from easyrl.environments.host_pool import FAILURES, HostLost
from easyrl.environments.pool import EnvironmentPool, name_of, row_of
from easyrl.environments.tool_calls.calls import Calls, ToolCall
from easyrl.rewards.functions import GroupLost, RewardError
from easyrl.rewards.worker import Call
from easyrl.types import Completion, Messages, Prompt

EndReason = Literal["answer", "done", "max_turns", "length", "time", "error"]


@dataclass(slots=True)
class _Episode:
    prompt: Messages  # with the observation
    messages: Messages = field(default_factory=list)  # after the prompt
    num_turns: int = 0
    num_calls: int = 0
    num_errors: int = 0
    num_read: int = 0  # completion tokens that are in `messages`
    ended_by: EndReason = "length"


@dataclass(slots=True)
class _Group:
    prompt: Prompt
    environment: str  # its name
    episodes: list[_Episode]
    resets: list[Future[Any]]
    started: float
    prompt_ids: list[int] = field(default_factory=list)  # of the first episode
    pending: dict[int, tuple[Turn, Future[Any]]] = field(default_factory=dict)  # by episode
    error: Exception | None = None  # its environments cannot be used any more


class EnvironmentEpisodes(Episodes):
    """The open groups of a rollout worker with environments."""

    def __init__(self, spec: EpisodeSpec, pool: EnvironmentPool, *, max_open_groups: int) -> None:
        """`pool`: of the environments; `max_open_groups`: generated at a time."""
        self._spec, self._max_open = spec, max_open_groups
        self.pool = pool
        self._queue: deque[tuple[Key, Prompt, int]] = deque()
        self._groups: dict[Key, _Group] = {}
        self._failed: list[FinishedGroup] = []
        self._num_open = 0  # groups that are being generated

    def bind(self, engine: Engine, tokenizer: Any, num_rows: int) -> None:
        """Use this engine, which keeps a row for each sequence, once the environments are loaded.
        Raises ConfigError."""
        self._engine = engine
        self._interfaces, self._reward_functions = self.pool.loaded()
        self._conversations = {
            name: Conversations(self._spec, tokenizer, interface, engine.end_tokens)
            for name, interface in self._interfaces.items()
        }

    @property
    def has_work(self) -> bool:
        return bool(self._queue or self._groups)

    @property
    def wakers(self) -> list[Any]:
        """Readable when `advance` has something to do."""
        return list(self.pool.connections)

    def close(self) -> None:
        self.pool.close()

    def take(self, finished: list[FinishedGroup]) -> list[FinishedGroup]:
        """Take what the engine has finished; return the groups among it."""
        return finished

    def submit(self, key: Key, prompt: Prompt, num_generations: int) -> None:
        self._queue.append((key, prompt, num_generations))

    def advance(self) -> list[FinishedGroup]:
        """Start groups, exchange turns and answers; return groups that failed at their start."""
        for turn in self._engine.take_turns():
            self._send(turn)
        self.pool.poll()
        is_barrier = not self._engine.can_step and not self._is_waiting()
        if is_barrier or not self._spec.is_deterministic:
            self._hand_over()
            while self._queue and self._num_open < self._max_open:
                self._num_open += 1
                self._start(*self._queue.popleft())
        failed, self._failed = self._failed, []
        return failed

    def _is_waiting(self) -> bool:
        futures = [future for group in self._groups.values() for future in group.resets]
        futures += [f for group in self._groups.values() for _, f in group.pending.values()]
        return not all(future.done() for future in futures)

    def _start(self, key: Key, prompt: Prompt, num_generations: int) -> None:
        name = name_of(prompt, self._interfaces)
        seeds = np.random.SeedSequence((self._spec.seed, *key))
        drawn = [int(seed) for seed in seeds.generate_state(num_generations, np.uint32)]
        resets = self.pool.start(key, name, row_of(prompt, name), drawn)
        messages = with_observation(prompt.content, None)
        episodes = [_Episode(messages) for _ in drawn]
        self._groups[key] = _Group(prompt, name, episodes, resets, time.monotonic())

    def _begin(self, key: Key, group: _Group) -> None:
        resets, group.resets = group.resets, []
        try:
            observations = [future.result() for future in resets]
            ids = []
            for episode, observation in zip(group.episodes, observations, strict=True):
                episode.prompt = with_observation(group.prompt.content, observation)
                ids.append(self._conversations[group.environment].prompt_ids(episode.prompt))
            num_common = common_length(ids)
            self._check_lengths(max(map(len, ids)), num_common)
        except (*FAILURES, ValueError) as error:
            self._break(group, error)
            end = np.array([min(self._engine.end_tokens)], dtype=np.int32)
            zero, nothing = np.zeros(1, dtype=np.float32), np.zeros(1, dtype=np.bool_)
            request = GroupRequest(key, end.tolist(), len(resets))
            completions = [Completion(end, zero, "stop", nothing) for _ in resets]
            self._failed.append((request, completions))
            return
        own = [each[num_common:] for each in ids]
        for episode, tokens in zip(group.episodes, own, strict=True):
            episode.num_read = len(tokens)
        group.prompt_ids, common = ids[0], ids[0][:num_common]
        first_tokens = own if any(own) else None
        self._engine.submit(
            GroupRequest(key, common, len(ids), has_turns=True, first_tokens=first_tokens)
        )

    def _check_lengths(self, longest: int, num_common: int) -> None:
        most = self._spec.limits.max_prompt_length
        most_own = self._spec.limits.max_completion_length
        if longest > most or longest - num_common >= most_own:
            raise ValueError(
                f"expected a prompt of at most {most} tokens with the observation "
                f"(data.max_prompt_length), of which fewer than {most_own} differ in a group "
                f"(rollout.max_completion_length), got {longest} and {longest - num_common}"
            )

    def _send(self, turn: Turn) -> None:
        group = self._groups[turn.key]
        episode = group.episodes[turn.sample_index]
        interface = self._interfaces[group.environment]
        calls = self._read(group, episode, turn.token_ids.tolist())
        if group.error:
            self._end(turn, episode, "error")
        elif interface.is_game or calls:
            action = episode.messages[-1]["content"] if interface.is_game else calls
            future = self.pool.act(turn.key, turn.sample_index, action)
            group.pending[turn.sample_index] = turn, future
        else:
            self._end(turn, episode, "answer")

    def _read(self, group: _Group, episode: _Episode, token_ids: list[int]) -> Calls:
        """Append a turn to the episode's messages; return its calls."""
        conversations = self._conversations[group.environment]
        text, calls, _ = conversations.read_turn(token_ids, group.prompt_ids)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        read = [call for call in calls if isinstance(call, ToolCall)]
        if read:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in read
            ]
        episode.messages.append(message)
        episode.num_turns += 1
        episode.num_read += len(token_ids)
        return calls

    def _hand_over(self) -> None:
        for key, group in list(self._groups.items()):
            if group.resets and all(future.done() for future in group.resets):
                self._begin(key, group)
            for index in sorted(group.pending):
                turn, future = group.pending[index]
                if future.done():
                    del group.pending[index]
                    self._answer(group, group.episodes[index], turn, future)

    def _answer(self, group: _Group, episode: _Episode, turn: Turn, future: Future[Any]) -> None:
        try:
            acted = Acted(*future.result())
        except FAILURES as error:
            # In deterministic runs the result must not depend on time.
            if self._spec.is_deterministic or not isinstance(error, TimeoutError):
                self._break(group, error)
                self._end(turn, episode, "error")
                return
            if self._interfaces[group.environment].is_game:
                self._end(turn, episode, "time")
                return
            calls = episode.messages[-1].get("tool_calls", ())
            names = [call["function"]["name"] for call in calls] or ["unknown"]
            result = str({"error": str(error)})
            messages = [{"role": "tool", "name": name, "content": result} for name in names]
            acted = Acted(messages, False, len(names), len(names))
        episode.messages += acted.messages
        episode.num_calls += acted.num_calls
        episode.num_errors += acted.num_errors
        if acted.is_done:
            self._end(turn, episode, "done")
            return
        limit = self._spec.episode_timeout_seconds
        if episode.num_turns >= self._spec.max_turns:
            self._end(turn, episode, "max_turns")
        elif limit is not None and time.monotonic() - group.started > limit:
            self._end(turn, episode, "time")
        else:
            conversations = self._conversations[group.environment]
            suffix = conversations.suffix(acted.messages, int(turn.token_ids[-1]))
            if len(suffix) >= turn.num_left:
                self._end(turn, episode, "length")
            else:
                episode.num_read += len(suffix)
                self._engine.resume(turn, suffix)

    def _end(self, turn: Turn, episode: _Episode, reason: EndReason) -> None:
        episode.ended_by = reason
        self._engine.end(turn, "length" if reason == "length" else "stop")

    def _break(self, group: _Group, error: Exception) -> None:
        """Give a group up; raise RewardError if that is to end the run (`reward.on_error`)."""
        is_slow = isinstance(error, TimeoutError) and not self._spec.is_deterministic
        is_lost = is_slow or isinstance(error, GroupLost)
        group.error = (GroupLost if is_lost else HostLost)(f"rollout.environment: {error}")
        if self._spec.rewards.options.on_error == "stop" and not is_lost:
            prompt = f"{group.prompt.content!r:.200}"
            raise RewardError(f"{group.error}\nfor the prompt {prompt}")

    def finish(self, key: Key, completions: list[Completion]) -> GroupTexts:
        """Return the prompt, and the messages of each episode after it."""
        own = self._groups[key]
        self._num_open -= 1
        for episode, completion in zip(own.episodes, completions, strict=True):
            rest = completion.token_ids[episode.num_read :].tolist()
            if rest and not own.error:
                self._read(own, episode, rest)
        answers = [episode.messages for episode in own.episodes]
        return GroupTexts(own.episodes[0].prompt, answers)

    def judge(self, key: Key, call: Call) -> tuple[Sequence[int], Future[Any]] | None:
        """Score a group by the functions that need environments; if it is broken, none can."""
        if error := self._groups[key].error:
            future: Future[Any] = Future()
            future.set_exception(error)
            return range(len(self._spec.rewards.functions)), future
        if not (functions := self._reward_functions):
            return None
        return functions, self.pool.judge(key, call._replace(functions=functions))

    def forget(self, key: Key) -> GroupRecord:
        """End a group; return its metrics, and columns [G] that samples.jsonl shows."""
        self.pool.forget(key)
        episodes = self._groups.pop(key).episodes
        means = {
            "episodes/turns": [episode.num_turns for episode in episodes],
            "tools/calls": [episode.num_calls for episode in episodes],
            "tools/errors": [episode.num_errors for episode in episodes],
        }
        columns: dict[str, list[Any]] = {
            "messages": [[*episode.prompt, *episode.messages] for episode in episodes],
            "ended_by": [episode.ended_by for episode in episodes],
        }
        metrics = {name: sum(of_all) / len(of_all) for name, of_all in means.items()}
        return GroupRecord(metrics, columns)


def with_observation(content: str | Messages, observation: str | None) -> Messages:
    """Return a prompt as messages, with the observation at the end of its last user message."""
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else [*content]
    if not observation:
        return messages
    if not messages or messages[-1]["role"] != "user":
        return [*messages, {"role": "user", "content": observation}]
    last = {**messages[-1], "content": f"{messages[-1]['content']}{observation}"}
    return [*messages[:-1], last]


def common_length(sequences: Sequence[list[int]]) -> int:
    """Length of the longest common prefix that leaves each a token, unless all are equal."""
    lengths = [*map(len, sequences)]
    columns = enumerate(zip(*sequences, strict=False))
    common = next((n for n, tokens in columns if len({*tokens}) > 1), min(lengths))
    return common if common == max(lengths) else min(common, min(lengths) - 1)
