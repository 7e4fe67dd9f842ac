"""Episodes: completions of several turns, between which an environment acts.

    submit(prompt) ─► environments reset ─► engine.submit ─► turn ─► environment ─┬► engine.resume
                                                              ▲                   ├► engine.end
                                                              └───────────────────┘

Groups are started as others end, so that few environments exist at a time.

In deterministic runs answers are handed over at barriers: when no sequence can be continued and no
call is open, all answers are handed over, in a fixed order. So what a step computes does not depend
on how long a tool takes.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple

import numpy as np

from easyrl.config import ConfigError
from easyrl.config.spec import EpisodeSpec
from easyrl.data.pictures import PictureError
from easyrl.engines.base import Engine, FinishedGroup, GroupRequest, Turn
from easyrl.environments.base import Episodes, GroupRecord, GroupTexts, mean, num_common
from easyrl.environments.conversation import Conversations
from easyrl.environments.host import Acted, Key
from easyrl.environments.host_pool import FAILURES, HostLost
from easyrl.environments.pictures import EpisodePictures, NoRoomForPictures, ShownFiles
from easyrl.environments.pool import EnvironmentPool, name_of, row_of
from easyrl.environments.tool_calls.calls import UNKNOWN, Calls, ToolCall
from easyrl.events import FailedCall
from easyrl.model.prompt_renderer import PromptRenderer
from easyrl.rewards.functions import GroupLost, RewardError
from easyrl.rewards.worker import Call
from easyrl.types import Completion, Messages, Prompt, PromptMedia, as_text

EndReason = Literal["answer", "done", "max_turns", "length", "time", "error"]


@dataclass(slots=True)
class _Episode:
    prompt: Messages  # with the observation
    messages: Messages = field(default_factory=list)  # after the prompt
    num_turns: int = 0
    num_calls: int = 0
    num_errors: int = 0
    num_read: int = 0  # tokens of the completion that `messages` has
    ended_by: EndReason = "length"
    files: ShownFiles | None = None  # that its environment has shown


class _Waiting(NamedTuple):
    """A turn that the environment answers."""

    turn: Turn
    future: Future[Any]  # with the fields of `Acted`


@dataclass(slots=True)
class _Group:
    prompt: Prompt
    environment: str  # its name
    episodes: list[_Episode]
    resets: list[Future[Any]]  # [] once the group is being generated
    started: float
    prompt_ids: list[int] = field(default_factory=list)  # of the first episode
    media: PromptMedia | None = None  # its pictures; None before it begins
    waiting: dict[int, _Waiting] = field(default_factory=dict)  # by episode
    error: Exception | None = None  # its environments cannot be used any more

    @property
    def is_reset(self) -> bool:
        """Whether its environments wait for the group to be generated."""
        return bool(self.resets) and all(future.done() for future in self.resets)

    @property
    def has_open_calls(self) -> bool:
        futures = [*self.resets, *(each.future for each in self.waiting.values())]
        return not all(future.done() for future in futures)


class _Submitted(NamedTuple):
    """A group that has not been started."""

    key: Key
    prompt: Prompt
    num_generations: int


class EnvironmentEpisodes(Episodes):
    """The open groups of a rollout worker with environments."""

    def __init__(self, spec: EpisodeSpec, pool: EnvironmentPool, *, max_open_groups: int) -> None:
        """`pool`: of the environments; `max_open_groups`: generated at a time."""
        self._spec = spec
        self._is_deterministic = spec.is_deterministic
        self._max_open = max_open_groups
        self.pool = pool
        self._queue: deque[_Submitted] = deque()
        self._groups: dict[Key, _Group] = {}
        self._failed: list[FinishedGroup] = []  # at their start
        self._num_open = 0  # groups that are being generated

    def bind(self, engine: Engine, renderer: PromptRenderer, num_rows: int) -> None:
        self._engine = engine
        self._renderer = renderer
        tokenizer = renderer.tokenizer
        loaded = self.pool.loaded()
        self._interfaces = loaded.interfaces
        self._reward_functions = loaded.reward_functions
        self._pictures: EpisodePictures | None = None
        if self._spec.shows_pictures and renderer.processor is not None:
            self._pictures = EpisodePictures(renderer.processor, tokenizer, engine.shown)
        self._conversations: dict[str, Conversations] = {}
        for name, interface in self._interfaces.items():
            conversations = Conversations(
                self._spec, tokenizer, interface, engine.end_tokens, pictures=self._pictures
            )
            self._conversations[name] = conversations

    @property
    def has_work(self) -> bool:
        return bool(self._queue or self._groups)

    @property
    def wakers(self) -> Sequence[Connection | int]:
        return self.pool.connections

    def close(self) -> None:
        self.pool.close()

    def take(self, finished: list[FinishedGroup]) -> list[FinishedGroup]:
        return finished

    def submit(self, key: Key, prompt: Prompt, num_generations: int) -> None:
        self._queue.append(_Submitted(key, prompt, num_generations))

    def advance(self) -> list[FinishedGroup]:
        """Start groups, exchange turns and answers; return groups that failed at their start."""
        for turn in self._engine.take_turns():
            self._send(turn)
        self.pool.poll()
        has_open_calls = any(group.has_open_calls for group in self._groups.values())
        is_barrier = not self._engine.can_step and not has_open_calls
        if is_barrier or not self._is_deterministic:
            self._hand_over()
            while self._queue and self._num_open < self._max_open:
                self._num_open += 1
                self._start(self._queue.popleft())
        failed = self._failed
        self._failed = []
        return failed

    # -- the start of a group ---------------------------------------------------------------------

    def _start(self, submitted: _Submitted) -> None:
        """Reset the environments of a group."""
        key = submitted.key
        prompt = submitted.prompt
        name = name_of(prompt, self._interfaces)
        sequence = np.random.SeedSequence((self._spec.seed, *key))
        seeds = sequence.generate_state(submitted.num_generations, np.uint32).tolist()
        row = row_of(prompt, name)
        resets = self.pool.start(key, name, row, seeds)
        messages = with_observation(prompt.content, None)
        episodes = [_Episode(messages) for _ in seeds]
        started = time.monotonic()
        self._groups[key] = _Group(prompt, name, episodes, resets, started)

    def _begin(self, key: Key, group: _Group) -> None:
        """Give a group to the engine, with the observations of its environments."""
        resets = group.resets
        group.resets = []
        try:
            observations = [future.result() for future in resets]
            prompts = self._prompts_of(group, observations)
            num_common = common_length(prompts)
            self._check_lengths(prompts, num_common)
            for ids in prompts:
                self._check_no_picture(ids[num_common:], "an observation")
        except (*FAILURES, ValueError) as error:
            self._break(key, error)
            self._failed.append(self._failed_group(key, len(resets)))
            return
        common = prompts[0][:num_common]
        own = [ids[num_common:] for ids in prompts]  # tokens that not all prompts begin with
        media = group.media if group.prompt.pictures else None
        for episode, tokens in zip(group.episodes, own, strict=True):
            episode.num_read = len(tokens)
        group.prompt_ids = prompts[0]
        first_tokens = own if any(own) else None
        request = GroupRequest(
            key, common, len(prompts), has_turns=True, first_tokens=first_tokens, media=media
        )
        self._engine.submit(request)

    def _prompts_of(self, group: _Group, observations: list[str | None]) -> list[list[int]]:
        """Return the tokens of each episode's prompt. Raises ConfigError."""
        conversations = self._conversations[group.environment]
        prompts: list[list[int]] = []
        for episode, observation in zip(group.episodes, observations, strict=True):
            messages = with_observation(group.prompt.content, observation)
            episode.prompt = messages
            rendered = self._renderer.render(
                messages, group.prompt.pictures, conversations.variables
            )
            group.media = rendered.media  # the same for all episodes
            prompts.append(rendered.token_ids)
        return prompts

    def _failed_group(self, key: Key, num_generations: int) -> FinishedGroup:
        """Return a group whose completions are an end token that was not sampled."""
        end = min(self._engine.end_tokens)
        ids = np.array([end], dtype=np.int32)
        logprobs = np.zeros(1, dtype=np.float32)
        is_sampled = np.zeros(1, dtype=np.bool_)
        completion = Completion(ids, logprobs, "stop", is_sampled)
        return GroupRequest(key, [end], num_generations), [completion] * num_generations

    def _check_lengths(self, prompts: list[list[int]], num_common: int) -> None:
        longest = max(len(ids) for ids in prompts)
        longest_own = longest - num_common
        most = self._spec.limits.max_prompt_length
        most_own = self._spec.limits.max_completion_length
        if longest > most or longest_own >= most_own:
            raise ValueError(
                f"expected a prompt of at most {most} tokens with the observation "
                f"(data.max_prompt_length), of which fewer than {most_own} differ in a group "
                f"(rollout.max_completion_length), got {longest} and {longest_own}"
            )

    # -- turns ------------------------------------------------------------------------------------

    def _send(self, turn: Turn) -> None:
        """Give a turn to its environment, or end the episode."""
        group = self._groups[turn.key]
        episode = group.episodes[turn.sample_index]
        interface = self._interfaces[group.environment]
        calls = self._read(group, episode, turn.token_ids.tolist())
        if group.error:
            self._end(turn, episode, "error")
        elif interface.is_game or calls:
            action = episode.messages[-1]["content"] if interface.is_game else calls
            future = self.pool.act(turn.key, turn.sample_index, action)
            group.waiting[turn.sample_index] = _Waiting(turn, future)
        else:
            self._end(turn, episode, "answer")

    def _read(self, group: _Group, episode: _Episode, token_ids: list[int]) -> Calls:
        """Append a turn to the episode's messages; return its calls."""
        conversations = self._conversations[group.environment]
        turn = conversations.read_turn(token_ids, group.prompt_ids)
        message: dict[str, Any] = {"role": "assistant", "content": turn.text}
        shown_calls: list[dict[str, Any]] = []
        for call in turn.calls:
            if isinstance(call, ToolCall):
                function = {"name": call.name, "arguments": call.arguments}
                shown_calls.append({"type": "function", "function": function})
        if shown_calls:
            message["tool_calls"] = shown_calls
        episode.messages.append(message)
        episode.num_turns += 1
        episode.num_read += len(token_ids)
        return turn.calls

    def _hand_over(self) -> None:
        """Begin groups whose environments are reset; give answers to the engine."""
        for key, group in list(self._groups.items()):
            if group.is_reset:
                self._begin(key, group)
            for index in sorted(group.waiting):
                turn, future = group.waiting[index]
                if future.done():
                    del group.waiting[index]
                    self._answer(group, group.episodes[index], turn, future)

    def _answer(self, group: _Group, episode: _Episode, turn: Turn, future: Future[Any]) -> None:
        """Continue an episode with what its environment answers, or end it."""
        try:
            acted = Acted(*future.result())
        except FAILURES as error:
            # In deterministic runs the result must not depend on time.
            is_slow = isinstance(error, TimeoutError) and not self._is_deterministic
            if not is_slow:
                self._break(turn.key, error, episode)
                self._end(turn, episode, "error")
                return
            if self._interfaces[group.environment].is_game:
                self._end(turn, episode, "time")
                return
            acted = _failed_calls(episode.messages[-1], error)
        episode.num_calls += acted.num_calls
        episode.num_errors += acted.num_errors
        try:
            messages = self._named(turn.key, episode, acted.messages)
        except NoRoomForPictures:
            self._end(turn, episode, "done" if acted.is_done else "length")
            return
        except PictureError as error:
            self._break(turn.key, error, episode)
            self._end(turn, episode, "error")
            return
        episode.messages += messages
        limit = self._spec.episode_timeout_seconds
        if acted.is_done:
            self._end(turn, episode, "done")
        elif episode.num_turns >= self._spec.max_turns:
            self._end(turn, episode, "max_turns")
        elif limit is not None and time.monotonic() - group.started > limit:
            self._end(turn, episode, "time")
        else:
            self._resume(group, episode, turn, messages)

    def _named(self, key: Key, episode: _Episode, messages: Messages) -> Messages:
        """Return answers whose pictures are named by digests. Raises PictureError."""
        pictures = self._pictures
        if pictures is None:
            return messages
        if episode.files is None:
            episode.files = ShownFiles(self._spec.max_image_bytes)
        named: Messages = []
        for message in messages:
            try:
                named.append(pictures.named(message, episode.files, key))
            except PictureError as error:
                source = f"tool '{message['name']}'" if "name" in message else "step"
                raise type(error)(f"{source}: {error}") from error
        return named

    def _resume(self, group: _Group, episode: _Episode, turn: Turn, messages: Messages) -> None:
        """Insert messages behind a turn, and let the model go on."""
        conversations = self._conversations[group.environment]
        try:
            suffix = conversations.suffix(messages, int(turn.token_ids[-1]))
            self._check_no_picture(suffix, "an environment's answer")
        except ConfigError:
            raise  # of the template, which refuses any answer
        except ValueError as error:
            self._break(turn.key, error, episode)
            self._end(turn, episode, "error")
            return
        if len(suffix) >= turn.num_left:
            self._end(turn, episode, "length")
        else:
            episode.num_read += len(suffix)
            self._engine.resume(turn, suffix)

    def _check_no_picture(self, token_ids: Sequence[int], source: str) -> None:
        """Raise ValueError for a token at which the model expects a picture."""
        if not self._renderer.placeholder_ids.isdisjoint(token_ids):
            raise ValueError(
                f"expected {source} without the text that stands for a picture, which the model "
                "would look for; give a picture as a part of the content (docs/environments.md)"
            )

    def _end(self, turn: Turn, episode: _Episode, reason: EndReason) -> None:
        episode.ended_by = reason
        self._engine.end(turn, "length" if reason == "length" else "stop")

    def _break(self, key: Key, error: Exception, episode: _Episode | None = None) -> None:
        """Give a group up; raise RewardError if that is to end the run (`reward.on_error`)."""
        group = self._groups[key]
        is_slow = isinstance(error, TimeoutError) and not self._is_deterministic
        is_lost = is_slow or isinstance(error, GroupLost)
        text = f"rollout.environment: {error}"
        group.error = GroupLost(text) if is_lost else HostLost(text)
        if self._spec.rewards.options.on_error == "stop" and not is_lost:
            raise RewardError(
                FailedCall(
                    str(group.error),
                    prompt=as_text(group.prompt.content),
                    completion=None if episode is None else as_text(episode.messages),
                    row=group.prompt.references(),
                ),
                key,
            )

    # -- finished groups --------------------------------------------------------------------------

    def finish(self, key: Key, completions: list[Completion]) -> GroupTexts:
        group = self._groups[key]
        self._num_open -= 1
        for episode, completion in zip(group.episodes, completions, strict=True):
            not_read = completion.token_ids[episode.num_read :]
            last_turn = not_read.tolist()
            if last_turn and not group.error:
                self._read(group, episode, last_turn)
        answers = [episode.messages for episode in group.episodes]
        return GroupTexts(group.episodes[0].prompt, answers)

    def judge(self, key: Key, call: Call) -> tuple[Sequence[int], Future[Any]] | None:
        """Score a group by the functions that need environments; if it is broken, none can."""
        error = self._groups[key].error
        if error is not None:
            future: Future[Any] = Future()
            future.set_exception(error)
            return range(len(self._spec.rewards.functions)), future
        functions = self._reward_functions
        if not functions:
            return None
        return functions, self.pool.judge(key, call._replace(functions=functions))

    def forget(self, key: Key) -> GroupRecord:
        self.pool.forget(key)
        self._engine.shown.forget(key)
        episodes = self._groups.pop(key).episodes
        metrics = {
            "episodes/turns": mean([episode.num_turns for episode in episodes]),
            "tools/calls": mean([episode.num_calls for episode in episodes]),
            "tools/errors": mean([episode.num_errors for episode in episodes]),
        }
        columns: dict[str, list[Any]] = {
            "messages": [episode.prompt + episode.messages for episode in episodes],
            "ended_by": [episode.ended_by for episode in episodes],
        }
        return GroupRecord(metrics, columns)


def _failed_calls(answer: Mapping[str, Any], error: Exception) -> Acted:
    """Return an error as the result of every call of an answer."""
    names = [call["function"]["name"] for call in answer.get("tool_calls", ())]
    if not names:
        names = [UNKNOWN]  # of a call that cannot be read
    result = str({"error": str(error)})
    messages: Messages = []
    for name in names:
        messages.append({"role": "tool", "name": name, "content": result})
    return Acted(messages, False, num_calls=len(names), num_errors=len(names))


def with_observation(content: str | Messages, observation: str | None) -> Messages:
    """Return a prompt as messages, with the observation at the end of its last user message."""
    messages: Messages = []
    if isinstance(content, str):
        messages.append({"role": "user", "content": content})
    else:
        messages += content
    if not observation:
        return messages
    if not messages or messages[-1]["role"] != "user":
        messages.append({"role": "user", "content": observation})
    else:
        last = messages.pop()
        messages.append({**last, "content": extended(last["content"], observation)})
    return messages


def extended(content: str | list[dict[str, Any]], text: str) -> str | list[dict[str, Any]]:
    """Return a message's content with a text behind it."""
    if isinstance(content, str):
        return f"{content}{text}"
    return [*content, {"type": "text", "text": text}]


def common_length(sequences: Sequence[Sequence[int]]) -> int:
    """Return the length of the longest common prefix that leaves each sequence a token, unless all
    are equal."""
    first = sequences[0]
    common = min(num_common(first, other) for other in sequences)
    shortest = min(len(sequence) for sequence in sequences)
    longest = max(len(sequence) for sequence in sequences)
    if common == longest:  # all are equal
        return common
    return min(common, shortest - 1)
