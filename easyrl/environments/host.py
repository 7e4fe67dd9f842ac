"""A process that runs the user's environments or agents. All episodes of a group are in one.

    rollout worker ──Request────────────────────► host: threads, and an event loop
    (`host_pool`)  ◄──JSON [number, kind, value]──

`kind` is one of

    started         the call has begun
    returned        `value` is what it returned, as JSON
    failed          `value` is a traceback
    misconfigured   `value` is the message of a ConfigError

Calls of different episodes run at the same time, at most `Host.num_threads`; coroutines run on one
event loop. In deterministic runs the calls of environments run one after another in the main
thread, and Python's and NumPy's global random numbers belong to the episode whose call runs.
"""

import asyncio
import inspect
import json
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, cast

import numpy as np

from easyrl.config import ConfigError
from easyrl.config.spec import EpisodeSpec
from easyrl.data.pictures import (
    PictureError,
    data_address,
    is_picture,
    open_picture,
    picture_of_part,
    read_picture,
    with_images,
)
from easyrl.environments.loading import Environment, Interfaces, load_environments
from easyrl.environments.tool_calls.calls import BadCall, Calls, ToolCall
from easyrl.processes import maybe_sleep, set_name
from easyrl.rewards import worker
from easyrl.rewards.loading import accepted_arguments
from easyrl.types import Messages, is_picture_part, is_text_part
from easyrl.user_code import user_traceback

PROCESS_NAME = "easyrl-env"
Key = tuple[int, ...]  # identifies a group


class Request(NamedTuple):
    """A call that a rollout worker sends to a host."""

    number: int  # the reports of the host name it
    method: str  # of `Host`
    arguments: tuple[Any, ...]
    is_repeated: bool = False
    """The call ran in another process before. The calls behind it rely on what it does, so it is
    finished before they start."""


class Host:
    """The methods that a pool calls by their names. Subclasses add those for episodes."""

    num_threads: int  # most calls that run at a time; 1: they run in the main thread

    def __init__(self, spec: EpisodeSpec) -> None:
        self._spec = spec
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def load(self, is_first: bool = False) -> Any:
        """Load the user's code. `is_first`: in the first process of the pool, whose result the
        rollout worker reads. Raises ConfigError."""
        raise NotImplementedError

    def forget(self, key: Key) -> None:
        """Drop a group."""

    def awaited(self, value: Any) -> Any:
        """Return a value, or the result of a coroutine."""
        if not inspect.isawaitable(value):
            return value
        return asyncio.run_coroutine_threadsafe(cast(Any, value), self._loop).result()


class Loaded(NamedTuple):
    """What a rollout worker needs to know of its environments and their reward functions."""

    interfaces: Interfaces
    reward_functions: Sequence[int]
    """Indices in `reward.functions` of those that need the environments of a group."""


class Acted(NamedTuple):
    """Results of an episode's calls, as messages."""

    messages: Messages
    is_done: bool = False  # the environment ends the episode
    num_calls: int = 0
    num_errors: int = 0


class RandomStates(NamedTuple):
    """States of Python's and NumPy's global random numbers."""

    python: Any
    numpy: Any

    @classmethod
    def current(cls) -> "RandomStates":
        return cls(random.getstate(), np.random.get_state())

    @classmethod
    def of_seed(cls, seed: int) -> "RandomStates":
        drawn = np.random.RandomState(seed % 2**32)
        return cls(random.Random(seed).getstate(), drawn.get_state())

    def restore(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)


@dataclass(slots=True)
class _Episode:
    environment_name: str
    tools: Mapping[str, Callable[..., Any]]
    environment: Any = None  # None: there are only tools
    random_states: RandomStates | None = None  # in deterministic runs


class EnvironmentHost(Host):
    """Holds the environments of episodes, and calls their methods and tools."""

    def __init__(self, spec: EpisodeSpec) -> None:
        super().__init__(spec)
        self.num_threads = spec.num_threads
        self._environments: Mapping[str, Environment] = {}
        self._groups: dict[Key, dict[int, _Episode]] = {}
        self._spare: dict[str, list[Any]] = {}  # instances that no episode uses, by environment

    def load(self, is_first: bool = False) -> Loaded:
        """Load environments and reward functions. Only the first process describes the tools:
        transformers, which does it, imports torch."""
        self._environments = load_environments(self._spec, with_schemas=is_first)
        interfaces: dict[str, Any] = {}
        for name, environment in self._environments.items():
            interfaces[name] = environment.interface
            self._spare[name] = [environment.first]
        return Loaded(interfaces, worker.functions_with_environments())

    def reset(
        self, key: Key, index: int, name: str, row: Mapping[str, Any], seed: int
    ) -> str | None:
        """Start episode `index` of a group; return the observation. Instances are reset often."""
        if not self._environments:  # `load` failed in this process: it fails again, in this call
            self.load()
        environment = self._environments[name]
        episode = _Episode(name, environment.tools)
        self._groups.setdefault(key, {})[index] = episode
        if environment.make is None:
            return None
        spare = self._spare[name]
        instance = spare.pop() if spare else environment.make()
        methods = {method: getattr(instance, method) for method in environment.methods}
        episode.environment = instance
        episode.tools = {**environment.tools, **methods}
        if self._spec.is_deterministic:
            episode.random_states = RandomStates.of_seed(seed)
        if "seed" in inspect.signature(instance.reset).parameters:
            row = {"seed": seed, **row}
        shown = {name: with_images(value) for name, value in row.items()}
        arguments = accepted_arguments(instance.reset, shown)
        observation = self._call(episode, instance.reset, **arguments)
        if not isinstance(observation, str | None):
            raise TypeError(f"reset: expected a string or None, got {observation!r:.80}")
        return observation

    def act(self, key: Key, index: int, action: Calls | str) -> Acted:
        """Execute a turn's tool calls, or give the text of a turn to a game."""
        episode = self._groups[key][index]
        if isinstance(action, str):
            return self._step(episode, action)
        messages = []
        num_errors = 0
        for call in action:
            content: Any
            try:
                content = self._call_tool(episode, call)
            except BaseException as error:  # of the user's tool, SystemExit too, or of a wrong call
                num_errors += 1
                content = str({"error": str(error)})
            if self._is_shown(content):
                content = self._parts_of(f"tool '{call.name}'", content)
            message = {"role": "tool", "name": call.name, "content": content}
            if call.call_id:
                message["tool_call_id"] = call.call_id
            messages.append(message)
        return Acted(messages, False, len(action), num_errors)

    def _step(self, episode: _Episode, text: str) -> Acted:
        returned = self._call(episode, episode.environment.step, text)
        match returned:
            case (str() as observation, is_done):
                messages = [{"role": "user", "content": observation}]
                return Acted(messages, bool(is_done), num_calls=1)
            case (observation, is_done) if self._is_shown(observation):
                parts = self._parts_of("step", observation)
                return Acted([{"role": "user", "content": parts}], bool(is_done), num_calls=1)
        raise TypeError(f"step: expected (observation, done), got {returned!r:.80}")

    def _parts_of(self, source: str, content: Any) -> list[dict[str, str]]:
        """Return an answer with pictures as parts of a content, in which these have addresses.
        Raises TypeError, which names the source, for what is no picture."""
        if not self._spec.shows_pictures:
            raise TypeError(
                f"{source}: expected a text or a value, because answers may have pictures only "
                f"with rollout.takes_pictures=true, got {content!r:.80}"
            )
        parts: list[dict[str, str]] = []
        for each in content if isinstance(content, list) else [content]:
            if not (is_picture_part(each) or is_picture(each)):
                text = each["text"] if is_text_part(each) else each
                parts.append({"type": "text", "text": str(text)})
                continue
            try:
                picture = picture_of_part(each) if is_picture_part(each) else read_picture(each)
                open_picture(picture)  # all of it, here where an error has a place
                parts.append({"type": "image", "url": data_address(picture)})
            except PictureError as error:
                raise TypeError(f"{source}: {error}") from error
        return parts

    def _call_tool(self, episode: _Episode, call: ToolCall | BadCall) -> Any:
        if isinstance(call, BadCall):
            raise ValueError(call.reason)
        if call.name not in episode.tools:
            raise ValueError(f"there is no tool '{call.name}'")
        returned = self._call(episode, episode.tools[call.name], **call.arguments)
        return returned if self._is_shown(returned) else str(returned)

    def _is_shown(self, returned: Any) -> bool:
        """Whether an answer has pictures. A single mapping may be about something else where no
        pictures are expected."""
        if is_picture_part(returned):
            return self._spec.shows_pictures
        return is_picture(returned)

    def _call(
        self, episode: _Episode, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        worker.BoundedOutput.begin_call()
        with _random_numbers_of(episode):
            return self.awaited(function(*args, **kwargs))

    def judge(self, key: Key, call: worker.Call) -> worker.Scored:
        """Call the reward functions that need the group's environments."""
        episodes = self._groups[key]
        environments = [episodes[index].environment for index in sorted(episodes)]
        return worker.run_call(call, environments, self.awaited)

    def forget(self, key: Key) -> None:
        """Drop a group. Other episodes use its environments again."""
        for episode in self._groups.pop(key, {}).values():
            if episode.environment is not None:
                self._spare[episode.environment_name].append(episode.environment)


@contextmanager
def _random_numbers_of(episode: _Episode) -> Iterator[None]:
    """Let the block draw from the episode's own random numbers, if it has any."""
    if episode.random_states is None:
        yield
        return
    before = RandomStates.current()
    episode.random_states.restore()
    try:
        yield
    finally:
        episode.random_states = RandomStates.current()
        before.restore()


def serve(
    connection: Connection, make_host: type[Host], spec: EpisodeSpec, sources: Mapping[str, str]
) -> None:
    """Run a host process: answer requests until the rollout worker ends it."""
    worker.start(spec.rewards, sources)
    set_name(PROCESS_NAME)
    host = make_host(spec)
    sending = threading.Lock()

    def send(number: int, kind: str, value: Any = None) -> None:
        content = json.dumps((number, kind, value)).encode()
        with sending:
            connection.send_bytes(content)

    def answer(request: Request) -> None:
        maybe_sleep()
        number = request.number
        send(number, "started")
        try:
            send(number, "returned", getattr(host, request.method)(*request.arguments))
        except ConfigError as error:
            send(number, "misconfigured", str(error))
        except BaseException as error:  # SystemExit too: the process belongs to the user's code
            send(number, "failed", user_traceback(error))

    with ThreadPoolExecutor(host.num_threads) as threads:
        answer(connection.recv())  # `load`, which all others need
        while request := connection.recv():
            if host.num_threads == 1 or request.is_repeated:
                answer(request)  # in the main thread, where `signal` works
            else:
                threads.submit(answer, request)
